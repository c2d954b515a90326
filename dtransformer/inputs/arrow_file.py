"""Reading rows of Arrow and Parquet files in blocks, with pyarrow."""

import contextlib
from collections.abc import Iterator, Sequence

from dtransformer.errors import InputError, check_installed, short_repr, to_one_line
from dtransformer.inputs.files import FilePath, opened

PARQUET = (".parquet",)
ARROW = (".arrow", ".feather", ".ipc")
_BLOCK_ROWS = 1024  # Number of rows of a block.
_STREAM_MAGIC = b"\xff\xff\xff\xff"  # Files that are not streams begin with ARROW1.


def iterate_rows(
    path: FilePath, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, dict]]:
    """Yield `(row_number, row)` tuples of a file, with dicts of columns, counted from 1.

    Structs and maps are dicts. A file gives each struct the keys of all rows, with nulls. These
    keys are left out, as a JSON Lines file would leave them out.

    Args:
        path: A Parquet file if its name ends in `.parquet`, otherwise an Arrow file or stream.
        columns: Names of the columns to read, if the file has all of them. Defaults to all columns.

    Raises:
        InputError: If pyarrow or the file is missing, or the file is damaged or repeats a name.
    """
    check_installed("pyarrow", f"{path}: Arrow and Parquet files")
    with opened(path) as file, _raise_as_input_error(path):
        is_parquet = str(path).lower().endswith(PARQUET)
        batches, names = _parquet(file) if is_parquet else _arrow(file)
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise InputError(
                f"{path} has two columns {short_repr(repeated[0])}. Rename one of them."
            )
        available = columns if set(columns or ()) <= set(names) else None
        row_number = 1
        for batch in batches(available):
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                yield row_number, {name: _without_nulls(value) for name, value in row.items()}
                row_number += 1


def _without_nulls(value):
    """Return a value whose dicts, at every depth, have no keys with `None`."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(x) for key, x in value.items() if x is not None}
    return value


def _parquet(file):
    """Return a function that reads columns in blocks of rows, and the names of all columns."""
    import pyarrow.parquet

    parquet = pyarrow.parquet.ParquetFile(file)

    def read(columns):
        return parquet.iter_batches(batch_size=_BLOCK_ROWS, columns=columns)

    return read, parquet.schema_arrow.names


def _arrow(file):
    import pyarrow.ipc

    if file.peek(len(_STREAM_MAGIC))[: len(_STREAM_MAGIC)] == _STREAM_MAGIC:
        reader = batches = pyarrow.ipc.open_stream(file)
    else:
        reader = pyarrow.ipc.open_file(file)
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))

    def read(columns):
        for batch in batches:
            batch.validate(full=True)  # pyarrow reads texts at their offsets without a check.
            batch = batch if columns is None else batch.select(columns)
            for start in range(0, batch.num_rows, _BLOCK_ROWS):
                yield batch.slice(start, _BLOCK_ROWS)

    return read, reader.schema.names


@contextlib.contextmanager
def _raise_as_input_error(path):
    """Raise errors of pyarrow inside the `with` block as `InputError`."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, ArithmeticError, KeyError) as error:
        reason = to_one_line(error, 100)
        raise InputError(
            f"{path} is damaged or not an Arrow or Parquet file ({reason}). Copy it again."
        ) from None
