"""Reading documents from text, JSON, Arrow and Parquet files as a stream."""

from collections.abc import Iterable, Iterator, Sequence

from dtransformer.datasets.text import refuse_sgm
from dtransformer.errors import InputError, short_repr
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
    """Yield the documents of files, with at most one text document in memory.

    The format follows from the file name: JSON lines or a JSON list (`.jsonl`, `.ndjson`, `.json`),
    Arrow (`.arrow`, `.feather`, `.ipc`) or Parquet (`.parquet`). Other files are UTF-8 text. Arrow
    and Parquet require pyarrow. Text and JSON files are decompressed if their name ends in `.gz`. A
    JSON list is parsed as a whole, so it is limited to the size of one document.

    Args:
        paths: Paths of the files, in reading order.
        field: Name of the key or column that contains the text of a document, or a list of names
            for documents with several parts, such as `["prompt", "answer"]`. A name such as
            `"instruction+input"` joins the nonempty values with line breaks to one part. If the
            number of names is odd and greater than 1, all names except the last are joined.
            Defaults to `"text"`.
        boundary: End of a document in a text file: `"blank_line"` (default), `"line"` or `"file"`.
        sentences: Boolean. Whether to split documents into a list of lines, without blank ones, as
            next-sentence prediction requires. Defaults to `False`.

    Yields:
        A string for each document, or a list of strings for a document with parts.

    Raises:
        InputError: If `boundary` is unknown, a file is missing or damaged, a document is too large,
            a record lacks a field, or several fields are combined with a text file or with
            `sentences`. The message names the line or row.

    Example:

    >>> import pathlib
    >>> _ = pathlib.Path("two.txt").write_text("One.\\nTwo.\\n\\nThree.\\n")
    >>> list(read_documents(["two.txt"], sentences=True))
    [['One.', 'Two.'], ['Three.']]
    """
    if boundary not in BOUNDARIES:
        raise InputError(f"`{boundary=}` is unknown. Expected one of {', '.join(BOUNDARIES)}.")
    fields = [field] if isinstance(field, str) else list(field)
    if len(fields) > 1 and len(fields) % 2:
        fields = ["+".join(fields[:-1]), fields[-1]]
    if sentences and len(fields) > 1:
        raise InputError(f"Cannot combine {len(fields)} fields with `sentences`. Use one of them.")
    for path in paths:
        for document in _read_file(path, fields, boundary):
            if sentences:
                yield [line for line in document.split("\n") if line.strip(WHITE_SPACE)]
            else:
                yield document


def _read_file(path, fields, boundary):
    names = [name for field in fields for name in field.split("+")]
    values = iterate_values(path, names)
    if values is not None:
        return _documents_from_fields(values, names, fields)
    if len(fields) > 1:
        raise InputError(
            f"{path} is read as text, which has no fields {', '.join(fields)}. Give .jsonl, .arrow "
            "or .parquet files."
        )
    return join_documents(iterate_lines(path), boundary, path)


def join_documents(
    lines: Iterable[tuple[int, str]], boundary: str, path: FilePath
) -> Iterator[str]:
    """Yield the documents that consecutive lines form.

    Args:
        lines: Iterable of `(line_number, line)` tuples.
        boundary: `"blank_line"`, `"line"` or `"file"`; see `read_documents`.
        path: Path of the file, for error messages.

    Raises:
        InputError: If a document has more than `MAX_DOCUMENT` characters.
    """
    document_lines = []
    size = 0
    for line_number, line in lines:
        if boundary == "line":
            yield line
            continue
        if boundary == "blank_line" and not line.strip(WHITE_SPACE):
            if document_lines:
                yield "\n".join(document_lines)
            document_lines = []
            size = 0
            continue
        document_lines.append(line)
        size += len(line)
        if size > MAX_DOCUMENT:
            raise InputError(
                f"{path}, line {line_number}: A document (boundary: {boundary.replace('_', ' ')}) has "
                f"more than {MAX_DOCUMENT:,} characters. Use one document per line (--documents line)."
            )
    if document_lines:
        yield "\n".join(document_lines)


def json_values(path: FilePath) -> Iterator[tuple[str, object]]:
    """Yield a `(place, value)` tuple for each value of a file with JSON lines or one JSON list.

    The place names the file and the line or record, for error messages. Readers check the fields
    that they use. Other fields may contain `NaN`.

    Raises:
        InputError: If the file is missing or damaged. The message names the line.
    """
    lines = iterate_lines(path)
    list_text = None
    for line_number, line in lines:
        if not line.strip(WHITE_SPACE):
            continue
        if line.startswith("[") and list_text is None:
            list_text = "\n".join([line, *(line for _, line in lines)])
            values = parse_json(list_text, path, MAX_DOCUMENT, checks_values=False)
            yield from ((f"{path}, record {i}", value) for i, value in enumerate(values, start=1))
            return
        list_text = ""
        place = f"{path}, line {line_number}"
        yield place, parse_json(line, place, MAX_DOCUMENT, checks_values=False)


def iterate_values(path: FilePath, columns: Sequence[str] | None = None) -> Iterator | None:
    """Return the values of a JSON, Arrow or Parquet file.

    Args:
        path: Path of the file. The end of its name determines the format.
        columns: Names of the columns to read; see `iterate_rows`. JSON files ignore it.

    Returns:
        Iterator of `(place, value)` tuples, or `None` if the name has another ending. The place
        names the file and the line, row or record, for error messages.

    Raises:
        InputError: If the file is missing, damaged or an SGM file. The message names the line.
    """
    refuse_sgm(path)
    name = str(path).lower()
    if name.endswith(JSON_LINES):
        return json_values(path)
    if name.endswith((*PARQUET, *ARROW)):
        return (
            (f"{path}, row {row_number}", row) for row_number, row in iterate_rows(path, columns)
        )
    return None


def check_objects(values: Iterable, names: Iterable[str]) -> Iterator[tuple[str, dict]]:
    """Check that each value is a dict with all `names`, and yield the `(place, value)` tuples.

    Raises:
        InputError: If a value is not a dict or lacks a field. The message names the place.
    """
    for place, value in values:
        if not isinstance(value, dict):
            raise InputError(
                f"{place}: Expected a JSON object, got {short_repr(value)}. Write one object per line."
            )
        for name in names:
            if name not in value:
                available = short_repr(", ".join(value), 100)
                raise InputError(
                    f"{place} has no field {short_repr(name)}, only {available}. Set the name of "
                    "the field."
                )
        yield place, value


def _documents_from_fields(values, names, fields):
    for place, value in check_objects(values, names):
        yield _document({name: value[name] for name in names}, fields, place)


def _document(values, fields, place):
    """Return a string, or a list of parts if there are several fields. null is an empty text."""
    for name, value in values.items():
        if not isinstance(value, str | None):
            raise InputError(
                f"{place}: {short_repr(name)} must be a text, got {short_repr(value)}."
            )
        check_whole(value or "", f"{place}, {short_repr(name)}")
    texts = ["\n".join(filter(None, map(values.get, field.split("+")))) for field in fields]
    return texts[0] if len(texts) == 1 else texts
