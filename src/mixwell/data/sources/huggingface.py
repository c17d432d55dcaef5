"""Datasets of the library ``datasets``: saved to disk, made from local files, or of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from mixwell.data.sources import paths
from mixwell.data.sources.base import (
    SOURCES,
    Patterns,
    Piece,
    Source,
    TextSourceConfig,
    digest_of,
    document_pieces,
)
from mixwell.utils.regular_files import expand_user
from mixwell.utils.sections import Whole

_BATCH_ROWS = 256


@final
@SOURCES.register("dataset")
class HuggingFaceConfig(TextSourceConfig):
    """A dataset of Hugging Face."""

    dataset: str
    """A folder written by `save_to_disk`, or a name (which may be downloaded)."""
    field: str = "text"
    """The column that holds the text."""
    name: str | None = None
    """The configuration of the dataset."""
    split: str = "train"
    """The split of the dataset."""
    revision: str | None = None
    """The version of the dataset."""
    streaming: bool = False
    """Read the dataset as it arrives, without storing it first."""
    limit: Whole | None = None
    """The greatest number of documents to take."""

    @override
    def location(self, base: Path) -> str | None:
        local = paths.single_location(self.dataset, base)
        return local if local and Path(local).exists() else self.dataset

    @override
    def documents(self, base: Path) -> HuggingFace:
        return HuggingFace(self.dataset, base=base, **self.model_dump(exclude={"dataset"}))


@final
class HuggingFace(Source):
    """A dataset that the library ``datasets`` can load.

    What is not a folder or local files is fetched from the hub as soon as :meth:`pieces` or :meth:`fingerprint`
    is called; see :attr:`remote`.

    Args:
        dataset: a folder written by ``save_to_disk``, a folder with data files, the name of a dataset of the
            hub, or of a reader such as ``json`` for ``data_files``.
        base: the folder that relative paths start from.
        name: the configuration, if there are several.
        field: the name of the column with the text.
        streaming: whether to read it as it arrives, without keeping a copy.
        limit: the greatest number of documents to take.
        revision: of the hub's dataset. A streamed one without it is taken to be the same as last time.
        data_files: files, folders or globs for the reader.
    """

    def __init__(
        self,
        dataset: str | Path,
        *,
        base: Path,
        name: str | None = None,
        split: str = "train",
        field: str = "text",
        streaming: bool = False,
        limit: int | None = None,
        revision: str | None = None,
        data_files: Patterns | None = None,
    ) -> None:
        super().__init__(str(dataset))
        if limit is not None and limit < 1:
            raise ValueError(f"{dataset}: limit must be at least 1 document, got {limit}")
        folder = base / expand_user(dataset)
        self.folder = folder.absolute() if folder.is_dir() and data_files is None else None
        self._saved = self.folder is not None and any(
            (folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")
        )
        self.files: list[Path] | None = None
        self._data_files: list[str] | None = None
        if data_files is not None:
            several = [data_files] if isinstance(data_files, str | Path) else list(data_files)
            self._data_files = [str(file) for file in several if "://" in str(file)]
            if not self._data_files:
                self.files = paths.expand(several, base=base)
                self._data_files = list(map(str, self.files))
            elif len(self._data_files) < len(several):
                raise ValueError(
                    f"{dataset}: data_files are either all addresses or all local files, got both"
                )
        self.dataset, self.config, self.split, self.field = str(dataset), name, split, field
        self.streaming, self.limit, self.revision = streaming, limit, revision
        self._loaded: Any = None

    @property
    @override
    def remote(self) -> bool:
        return self.folder is None and self.files is None

    @override
    def pieces(self) -> Iterator[Piece]:
        """Yield one piece for each document; this fetches a dataset of the hub."""
        where = f"{self.name}, split {self.split}"
        values = ((value, where, 0) for value in self._values())
        yield from document_pieces(values, name=self.name, field=self.field, limit=self.limit)

    @override
    def fingerprint(self, cache: Path | None = None) -> str:
        """Return a digest of the settings and of the content.

        The content is identified by the library's own fingerprint, for local files by their digests; for a stream
        from elsewhere by the settings only. This fetches a dataset of the hub that is not streamed.
        """
        settings = {"config": self.config, "split": self.split, "field": self.field, "limit": self.limit}
        if self._saved or (self.remote and not self.streaming):
            content: object = self._load()._fingerprint
        elif self.folder is not None:
            content = paths.digests(paths.expand([self.folder], base=self.folder), cache)
        elif self.files is not None:
            content = [self.dataset, paths.digests(self.files, cache)]
        else:
            content = [self.dataset, self.revision, self._data_files]
        return digest_of(type(self).__name__, settings, content)

    @override
    def size(self) -> int | None:
        return None

    def _values(self) -> Iterator[object]:
        loaded = self._load()
        columns = loaded.column_names
        if columns is not None:
            if self.field not in columns:
                there = ", ".join(columns) or "none"
                raise ValueError(f"{self.name}: there is no column {self.field!r}; the columns are {there}")
            loaded = loaded.select_columns([self.field])
        batches = iter(loaded.with_format(None).iter(batch_size=_BATCH_ROWS))
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # the library raises errors of many kinds
                raise self._cannot_read(error) from error
            if batch is None:
                return
            # The columns of a stream may be known only now.
            if self.field not in batch:
                raise ValueError(
                    f"{self.name}: there is no column {self.field!r}; the columns are {', '.join(batch)}"
                )
            yield from batch[self.field]

    def _load(self) -> Any:
        if self._loaded is None:
            datasets = _datasets()
            try:
                if self._saved:
                    found = datasets.load_from_disk(str(self.folder))
                else:
                    found = datasets.load_dataset(
                        str(self.folder or self.dataset),
                        self.config,
                        data_files=self._data_files,
                        split=self.split,
                        streaming=self.streaming,
                        revision=self.revision,
                        trust_remote_code=False,  # versions before 4 could run a script of the dataset
                    )
            except Exception as error:
                raise self._cannot_read(error) from error
            if isinstance(found, datasets.DatasetDict):
                if self.split not in found:
                    raise ValueError(
                        f"{self.name}: there is no split {self.split!r}; the splits are {', '.join(found)}"
                    )
                found = found[self.split]
            self._loaded = found
        return self._loaded

    def _cannot_read(self, error: Exception) -> ValueError:
        reason = " ".join(str(error).split()) or type(error).__name__
        advice = (
            "if it is meant to be local, check its path; else its name, and the connection"
            if self.remote
            else "check the files and the settings"
        )
        return ValueError(f"cannot read the dataset {self.name!r} (split {self.split}): {reason}; {advice}")


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "datasets of the hub need the library datasets: pip install 'mixwell[data]'"
        ) from error
    return datasets
