"""Documents from files of any size and number, one after the other."""

from collections.abc import Iterable, Iterator, Sequence

from dtransformer.datasets.text import refuse_sgm
from dtransformer.errors import InputError, shown
from dtransformer.inputs.arrow_file import ARROW, PARQUET, iterate_rows
from dtransformer.inputs.files import FilePath
from dtransformer.inputs.json_file import parse_json
from dtransformer.inputs.text import MAX_DOCUMENT, WHITE_SPACE, check_whole, iterate_lines

Document = str | Sequence[str]
BOUNDARIES = "blank_line", "line", "file"
JSON_LINES = tuple(f".{name}{gz}" for name in ("jsonl", "ndjson", "json") for gz in ("", ".gz"))


def read_documents(
    paths: Iterable[FilePath],
    *,
    field: str | Sequence[str] = "text",
    boundary: str = "blank_line",
    sentences: bool = False,
) -> Iterator[Document]:
    """Read documents from files, one at a time: of no file more than a document is held.

    What a file is its name tells: JSON lines or a list (`.jsonl`, `.ndjson`, `.json`), Arrow (`.arrow`,
    `.feather`, `.ipc`) and Parquet (`.parquet`), which need pyarrow, and else UTF-8
    text. Text and JSON lines are unpacked first where the name ends in `.gz`.

    Args:
        paths: the files, in the order in which they are read.
        field: the key, or the column, that the text of a document is in. Or several, for documents
            of several parts, such as `["prompt", "answer"]`. Of `"instruction+input"` the texts that
            are not empty are lines of one part; of an odd number, all but the last are.
        boundary: what ends a document of a text file: `"blank_line"`, `"line"` or `"file"`.
        sentences: whether the lines of a document are its parts, as next-sentence prediction needs
            them; blank ones are left out.

    Returns:
        An iterator of texts; or, where documents have parts, of lists of texts.

    Raises:
        InputError: a file is missing, damaged or too large a document; or several fields are asked
            for of a text file, or together with `sentences`. Says the line or row.

    Example:

    >>> import pathlib
    >>> _ = pathlib.Path("two.txt").write_text("One.\\nTwo.\\n\\nThree.\\n")
    >>> list(read_documents(["two.txt"], sentences=True))
    [['One.', 'Two.'], ['Three.']]
    """
    if boundary not in BOUNDARIES:
        raise InputError(f"boundary is {boundary!r}, expected one of {', '.join(BOUNDARIES)}")
    fields = [field] if isinstance(field, str) else list(field)
    if len(fields) > 1 and len(fields) % 2:
        fields = ["+".join(fields[:-1]), fields[-1]]
    if sentences and len(fields) > 1:
        raise InputError(f"{len(fields)} fields and sentences: documents have parts of one kind")
    for path in paths:
        for document in _documents_of(path, fields, boundary):
            if sentences:
                yield [line for line in document.split("\n") if line.strip(WHITE_SPACE)]
            else:
                yield document


def _documents_of(path, fields, boundary):
    names = [name for field in fields for name in field.split("+")]
    values = placed_values(path, names)
    if values is not None:
        return _of_fields(values, names, fields)
    if len(fields) > 1:
        raise InputError(
            f"{path} is read as text, which has no fields {', '.join(fields)}: give .jsonl, .arrow "
            "or .parquet files"
        )
    return joined(iterate_lines(path), boundary, path)


def joined(lines: Iterable[tuple[int, str]], boundary: str, path: FilePath) -> Iterator[str]:
    """Yield the documents of lines with their numbers; arguments and errors as of `read_documents`."""
    held, size = [], 0
    for number, line in lines:
        if boundary == "line":
            yield line
            continue
        if boundary == "blank_line" and not line.strip(WHITE_SPACE):
            if held:
                yield "\n".join(held)
            held, size = [], 0
            continue
        held.append(line)
        size += len(line)
        if size > MAX_DOCUMENT:
            raise InputError(
                f"{path}, line {number}: a document that ends at a {boundary.replace('_', ' ')} has "
                f"more than {MAX_DOCUMENT:,} characters: let each line be one (--documents line)"
            )
    if held:
        yield "\n".join(held)


def json_values(path: FilePath) -> Iterator[tuple[str, object]]:
    """Yield the values of a file with their places: one value on each line, or one list.

    Readers check the fields that they use; other fields may contain `NaN`.

    Raises:
        InputError: If the file is missing or damaged; names the line.
    """
    lines, held = iterate_lines(path), None
    for number, line in lines:
        if not line.strip(WHITE_SPACE):
            continue
        if line.startswith("[") and held is None:
            held = "\n".join([line, *(line for _, line in lines)])
            values = parse_json(held, path, MAX_DOCUMENT, checks_values=False)
            yield from ((f"{path}, record {i}", value) for i, value in enumerate(values, start=1))
            return
        held, place = "", f"{path}, line {number}"
        yield place, parse_json(line, place, MAX_DOCUMENT, checks_values=False)


def placed_values(path: FilePath, columns: Sequence[str] | None = None) -> Iterator | None:
    """Return the values of a file of JSON or of columns, each after its place; None for other files.

    Args:
        path: the file, whose name says what it is.
        columns: as of `iterate_rows`.

    Raises:
        InputError: the file is missing, damaged or SGM; says the line.
    """
    refuse_sgm(path)
    name = str(path).lower()
    if name.endswith(JSON_LINES):
        return json_values(path)
    if name.endswith((*PARQUET, *ARROW)):
        return ((f"{path}, row {number}", row) for number, row in iterate_rows(path, columns))
    return None


def objects(values: Iterable, names: Iterable[str]) -> Iterator[tuple[str, dict]]:
    """Yield values after their places, which have to be objects with fields of some names.

    Raises:
        InputError: one is none, or lacks a field; says where.
    """
    for place, value in values:
        if not isinstance(value, dict):
            raise InputError(
                f"{place}: expected an object with keys, got {shown(value)}: give JSON lines, an "
                "object on each"
            )
        for name in names:
            if name not in value:
                known = shown(", ".join(value), 100)
                raise InputError(f"{place} has no {shown(name)}, it has {known}: name the field")
        yield place, value


def _of_fields(values, names, fields):
    """Yield the documents of objects, by their fields of some names."""
    for place, value in objects(values, names):
        yield _document({name: value[name] for name in names}, fields, place)


def _document(values, fields, place):
    """Return a document of the values of its fields; null is no text."""
    for name, value in values.items():
        if not isinstance(value, str | None):
            raise InputError(f"{place}: {shown(name)} is {shown(value)}, expected a text")
        check_whole(value or "", f"{place}, {shown(name)}")
    texts = ["\n".join(filter(None, map(values.get, field.split("+")))) for field in fields]
    return texts[0] if len(texts) == 1 else texts
