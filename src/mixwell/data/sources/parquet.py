"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from mixwell.data.sources import paths
from mixwell.data.sources.base import SOURCES, FileSource, Patterns, Piece, TextSourceConfig, document_pieces

BATCH_BYTES = 4 << 20
_BATCH_ROWS = 1 << 14
_READ_BYTES = 1 << 20


@final
@SOURCES.register("parquet")
class ParquetConfig(TextSourceConfig):
    """Parquet files."""

    parquet: str | list[str]
    """Files; the text is in the column `field`."""
    field: str = "text"
    """The column that holds the text."""

    @override
    def location(self, base: Path) -> str | None:
        return paths.single_location(self.parquet, base)

    @override
    def documents(self, base: Path) -> Parquet:
        return Parquet(self.parquet, base=base, field=self.field)


@final
class Parquet(FileSource):
    """Documents in the rows of Parquet files. Rows with nothing in the column are left out, with a warning.

    Args:
        patterns: in folders, only files that end in ``.parquet``.
        base: the folder that relative patterns start from.
        field: the name of the column with the text.
    """

    def __init__(self, patterns: Patterns, *, base: Path, field: str = "text") -> None:
        super().__init__(patterns, base=base, suffixes=(".parquet",))
        self.field = field

    @override
    def settings(self) -> Mapping[str, object]:
        return {"field": self.field}

    @override
    def pieces(self) -> Iterator[Piece]:
        rows = ((value, str(file), read) for file in self.files for value, read in self._rows(file))
        yield from document_pieces(rows, name=self.name, field=self.field)

    def _rows(self, path: Path) -> Iterator[tuple[object, int]]:
        pyarrow, parquet = _pyarrow()
        try:
            # Otherwise a whole column of a row group, which may be the whole file, is read at once.
            with parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as table:
                self._check(path, table, pyarrow)
                size, total = path.stat().st_size, table.metadata.num_rows
                seen = done = 0
                for batch in table.iter_batches(_batch_rows(table), columns=[self.field]):
                    values = batch.column(0).to_pylist()
                    seen += len(values)
                    now = size * seen // total
                    for place, value in enumerate(values):
                        yield value, now - done if place == 0 else 0
                    done = now
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(
                f"{path} is not a readable Parquet file ({error}); fetch or write it again"
            ) from error

    def _check(self, path: Path, table: Any, pyarrow: Any) -> None:
        schema = table.schema_arrow
        if self.field not in schema.names:
            there = ", ".join(schema.names) or "none"
            raise ValueError(f"{path}: there is no column {self.field!r}; the columns are {there}")
        kind = schema.field(self.field).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        texts = ("is_string", "is_large_string", "is_string_view", "is_null")
        if not any(getattr(pyarrow.types, name)(kind) for name in texts):
            raise ValueError(
                f"{path}: the column {self.field!r} is not text, got {kind}; name a column with text"
            )


def _batch_rows(table: Any) -> int:
    groups = [table.metadata.row_group(index) for index in range(table.metadata.num_row_groups)]
    longest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1)
    return max(1, min(_BATCH_ROWS, int(BATCH_BYTES / max(longest, 1))))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("Parquet files need pyarrow: pip install 'mixwell[data]'") from error
    return pyarrow, pyarrow.parquet
