"""Parquet files as a table, decoded a batch of rows at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paraxis._calls.extras import needed
from paraxis._tables import _files as files

_WHO = "Table.parquet"


class Parquet:
    """Rows of Parquet files. Their metadata are read when it is made."""

    def __init__(self, folder: Path, target: str, columns: Sequence[str] | None, dtype: Any) -> None:
        with needed(f"px.{_WHO}", "tables"):
            import pyarrow.parquet  # noqa: F401

        self.sizes: list[int] = []
        self.part = 0  # rows of the largest group
        self._files, self.columns, kinds = files.described(_WHO, folder, ".parquet", target, columns, self._schema)
        self.target = target
        held = [np.dtype(own[name].to_pandas_dtype()) for own in kinds for name in self.columns]
        self.dtype = np.result_type(np.float32, *held) if dtype is None else np.dtype(dtype)

    def _schema(self, path: Path) -> Any:
        with _opened(path) as file:
            self.sizes.append(file.metadata.num_rows)
            groups = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
            self.part = max([self.part, *groups])
            return file.schema_arrow

    def __len__(self) -> int:
        return sum(self.sizes)

    def blocks(self, size: int, start: int = 0) -> files.Parts:
        return files.in_blocks(self._parts(size, start), size)

    def place(self, row: int) -> str:
        return files.place(self._files, self.sizes, row)

    def _parts(self, size: int, skipped: int) -> files.Parts:
        """Yield the rows after the first ``skipped``; of these, only what is in the same group of rows is decoded."""
        names = [*self.columns, self.target]
        for file, rows in zip(self._files, self.sizes, strict=True):
            if skipped >= rows:
                skipped -= rows
                continue
            with file.reading(), _opened(file.path) as opened:
                groups = [opened.metadata.row_group(at).num_rows for at in range(opened.num_row_groups)]
                first = 0
                while skipped >= groups[first]:
                    skipped -= groups[first]
                    first += 1
                for batch in opened.iter_batches(size, range(first, len(groups)), columns=names):
                    own, skipped = batch[min(skipped, len(batch)) :], max(0, skipped - len(batch))
                    *found, y = (own.column(name).to_numpy(zero_copy_only=False) for name in names)
                    yield files.as_rows(found, self.dtype), y


def _opened(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, memory_map=True)
