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

__all__ = ["ParquetReader", "flight", "pa", "table_rows"]


class ParquetReader:
    """One open Parquet file.

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
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is no Parquet file that can be read: {error}") from error
        names = self._file.schema_arrow.names
        # Arrow passes over names that it does not know; "image.bytes" is a part of "image".
        schema = self._file.schema
        parts = [f"{schema.column(each).path}." for each in range(len(schema))]
        asked = self._columns or ()
        missing = [name for name in asked if not any(p.startswith(f"{name}.") for p in parts)]
        if missing:
            self.close()
            raise DataError(f"{path} has no columns {missing}; it has {names}")

    @property
    def group_sizes(self) -> list[int]:
        """Rows of each row group."""
        metadata = self._file.metadata
        return [metadata.row_group(each).num_rows for each in range(metadata.num_row_groups)]

    def read_group(self, group: int) -> Any:
        """Return a row group as an Arrow table."""
        try:
            return self._file.read_row_group(group, columns=self._columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{self._path}: row group {group} is damaged: {error}; write the file anew, or "
                "leave it out"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def table_rows(table: Any, first: int, last: int) -> list[dict[str, Any]]:
    """Return rows ``first`` to before ``last`` of a table, as dicts of Python values."""
    rows: list[dict[str, Any]] = table.slice(first, last - first).to_pylist()
    return rows
