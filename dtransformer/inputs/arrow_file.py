"""Columns of text of Arrow and Parquet files, a block of rows at a time, by pyarrow."""

import contextlib
from collections.abc import Iterator, Sequence

from dtransformer.errors import InputError, check_installed, one_line, shown
from dtransformer.inputs.files import opened
from dtransformer.inputs.paths import FilePath

PARQUET = (".parquet",)
ARROW = (".arrow", ".feather", ".ipc")
_ROWS = 1024  # that are read at once
_STREAM_MAGIC = b"\xff\xff\xff\xff"  # files begin with ARROW1


def iterate_columns(
    path: FilePath, columns: Sequence[str]
) -> Iterator[tuple[int, tuple[str | None, ...]]]:
    """Return the rows of a file with their numbers, from 1: the texts of some columns.

    Args:
        path: a Parquet file, where its name ends so; else an Arrow file or stream.
        columns: their names.

    Raises:
        InputError: pyarrow is missing; the file is missing or damaged, or lacks a column, or has
            something else than text in it.
    """
    check_installed("pyarrow", f"{path}: Arrow and Parquet files")
    with opened(path) as file, _told(path):
        batches, schema = _parquet(file, columns) if _ends(path, PARQUET) else _arrow(file)
        _check_columns(schema, columns, path)
        number = 1
        for batch in batches:
            for row in zip(*(batch.column(name).to_pylist() for name in columns)):
                yield number, row
                number += 1


def iterate_rows(path: FilePath) -> Iterator[tuple[int, dict]]:
    """Yield the rows of a file with their numbers, from 1: dicts of all columns, lists and structs, too.

    Args:
        path: as of `iterate_columns`.

    Raises:
        InputError: pyarrow is missing, or the file is missing or damaged.
    """
    check_installed("pyarrow", f"{path}: Arrow and Parquet files")
    with opened(path) as file, _told(path):
        batches, _ = _parquet(file, None) if _ends(path, PARQUET) else _arrow(file)
        number = 1
        for batch in batches:
            for row in batch.to_pylist():
                yield number, row
                number += 1


def _ends(path, endings):
    return str(path).lower().endswith(endings)


def _parquet(file, columns):
    import pyarrow.parquet

    parquet = pyarrow.parquet.ParquetFile(file)
    schema = parquet.schema_arrow
    known = None if columns is None else [name for name in columns if name in schema.names]
    return parquet.iter_batches(batch_size=_ROWS, columns=known), schema


def _arrow(file):
    import pyarrow.ipc

    if file.peek(len(_STREAM_MAGIC))[: len(_STREAM_MAGIC)] == _STREAM_MAGIC:
        reader = pyarrow.ipc.open_stream(file)
        return _of_rows(reader), reader.schema
    reader = pyarrow.ipc.open_file(file)
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    return _of_rows(batches), reader.schema


def _of_rows(batches):
    for batch in batches:
        batch.validate(full=True)  # offsets of texts, which are followed without a look
        for start in range(0, batch.num_rows, _ROWS):
            yield batch.slice(start, _ROWS)


def _check_columns(schema, columns, path):
    import pyarrow

    for name in columns:
        if schema.names.count(name) != 1:
            raise InputError(
                f"{path} has no column {shown(name)}, it has {shown(', '.join(schema.names), 100)}: "
                "name the one with the text (--field)"
            )
        kind = schema.field(name).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise InputError(f"{path}: column {shown(name)} holds {kind}, expected text")


@contextlib.contextmanager
def _told(path):
    """Inside the `with` block what pyarrow refuses is an InputError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, ArithmeticError) as error:
        reason = one_line(error, 100)
        raise InputError(f"{path} is damaged, or no such file ({reason}): copy it again") from None
