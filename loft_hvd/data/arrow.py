"""Arrow: the only file that imports pyarrow. Parquet files, read by group; Flight for the store.

Reading starts no threads and maps no memory: loader processes are forks of one that has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loft_hvd.errors import DataError, MissingDependencyError

try:
    import pyarrow as pa
    from pyarrow import flight
except ImportError as error:  # an extra
    raise MissingDependencyError(
        "loft_hvd.SampleStore needs Arrow Flight, and loft_hvd.ParquetShards Parquet: "
        "pip install 'loft_hvd[store]'"
    ) from error

__all__ = ["READ_ERRORS", "ParquetReader", "flight", "pa", "table_rows"]

# What a damaged file may raise, and one whose values Python's types do not hold: names and text
# that are no UTF-8 are a ValueError, a date after the year 9999 is an OverflowError.
READ_ERRORS = (pa.ArrowException, OSError, ValueError, ArithmeticError, MemoryError)
# Arrow makes room for as many rows as a group claims before it reads one: 2**40 would end the
# process. Bound from Arrow, which writes no group of more.
_MOST_ROWS = 1 << 26


class ParquetReader:
    """One open Parquet file.

    ``group_sizes`` are the rows of each row group.

    Args:
        path: of the file.
        columns: to read; None for all.

    Raises:
        DataError: the file cannot be read, or has no such columns; here and in every method.
    """

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        from pyarrow import parquet  # what asks peers needs none of it

        self._path = path
        self._columns = None if columns is None else list(columns)
        try:
            # Where pages have checksums they are looked at.
            self._file = parquet.ParquetFile(
                path, memory_map=False, pre_buffer=False, page_checksum_verification=True
            )
            schema = self._file.schema
            names = self._file.schema_arrow.names
            parts = [f"{schema.column(each).path}." for each in range(len(schema))]
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} has a column whose name cannot be read ({error}): it is damaged, or was "
                "written with names that are not UTF-8; write it anew with others"
            ) from error
        except READ_ERRORS as error:
            raise DataError(f"{path} is no Parquet file that can be read: {error}") from error
        try:
            # Arrow passes over names that it does not know; "image.bytes" is a part of "image".
            asked = self._columns or ()
            missing = [each for each in asked if not any(p.startswith(f"{each}.") for p in parts)]
            if missing:
                raise DataError(f"{path} has no columns {missing}; it has {names}")
            self.group_sizes = self._checked_sizes()
        except DataError:
            self.close()
            raise

    def _checked_sizes(self) -> list[int]:
        """Return the rows of each row group; the file says them twice, as a sum, too."""
        metadata = self._file.metadata
        sizes = [metadata.row_group(each).num_rows for each in range(metadata.num_row_groups)]
        for group, size in enumerate(sizes):
            if not 0 <= size <= _MOST_ROWS:
                raise DataError(
                    f"{self._path}: row group {group} claims {size} rows, of {_MOST_ROWS} at most; "
                    "it is damaged, or needs smaller row groups: write it anew"
                )
        if sum(sizes) != metadata.num_rows:
            raise DataError(
                f"{self._path} is damaged: its row groups have {sum(sizes)} rows, and it claims "
                f"{metadata.num_rows}; write it anew, or leave it out"
            )
        return sizes

    def read_group(self, group: int) -> Any:
        """Return a row group as an Arrow table."""
        try:
            return self._file.read_row_group(group, columns=self._columns, use_threads=False)
        except READ_ERRORS as error:
            raise DataError(
                f"{self._path}: row group {group} is damaged: {error}; write the file anew, or "
                "leave it out"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def table_rows(table: Any, first: int, last: int) -> list[dict[str, Any]]:
    """Return rows ``first`` to before ``last`` of a table, as dicts of Python values.

    Raises:
        READ_ERRORS: text that is no UTF-8, or a value that Python's types do not hold.
    """
    rows: list[dict[str, Any]] = table.slice(first, last - first).to_pylist()
    return rows
