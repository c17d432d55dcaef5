"""A dataset by domain: from a column that names it, or from a dataset for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast, final

import numpy as np
from torch.utils.data import Subset

from mixwell.data import readers


def by_domain(dataset: Any, column: str) -> dict[str, Any]:
    """Return a dataset for each domain.

    Args:
        dataset: one with rows that name their domain, or a mapping of datasets by domain. One that has no
            columns of its own is read row by row to find the names, so that a mapping is better where rows are
            slow to make.

    Returns:
        Datasets in the order of the mapping, or in the order of the domains' names (of a ``ClassLabel``, in its
        order).
    """
    if isinstance(dataset, Mapping):
        datasets = dict(cast("Mapping[str, Any]", dataset))
        readers.check_datasets(datasets)
        return datasets
    if dataset is None:
        raise ValueError(
            "train_dataset is missing: give a dataset with a domain column, or datasets by domain"
        )
    if readers.is_stream(dataset):
        raise ValueError(
            "a stream cannot be sorted by domain before it is read; give a stream for each domain, as in "
            "train_dataset={'web': web, 'code': code}"
        )
    if not len(dataset):
        raise ValueError("train_dataset is empty")
    names, which = np.unique(np.asarray(_names(dataset, column)), return_inverse=True)
    # Sorted by domain, and in their order within each.
    rows = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])
    places = dict(zip(names.tolist(), rows, strict=True))
    order = [name for name in _class_names(dataset, column) if name in places] or list(places)
    if hasattr(dataset, "select"):
        return {name: dataset.select(places[name]) for name in order}
    return {name: Subset(dataset, places[name].tolist()) for name in order}


def _names(dataset: Any, column: str) -> list[str]:
    if hasattr(dataset, "column_names"):
        if column not in dataset.column_names:
            raise ValueError(
                f"train_dataset has no column {column!r} that names the domain of each row; its columns are "
                f"{', '.join(dataset.column_names)}. Give domain_column='...', or datasets by domain: "
                "train_dataset={'web': web, 'code': code}"
            )
        values = dataset.with_format(None)[column][:]
    else:
        first = dataset[0]
        if not isinstance(first, Mapping) or column not in first:
            raise ValueError(
                f"the rows of train_dataset have no {column!r} that names their domain; give "
                "domain_column='...', or datasets by domain: train_dataset={'web': web, 'code': code}"
            )
        values = [dataset[place][column] for place in range(len(dataset))]
    classes = _class_names(dataset, column)
    missing = [place for place, value in enumerate(values) if value is None or (classes and value < 0)]
    if missing:
        raise ValueError(f"row {missing[0]} of train_dataset has no {column!r} (and {len(missing) - 1} more)")
    return [classes[value] if classes else str(value) for value in values]


def _class_names(dataset: Any, column: str) -> list[str]:
    feature = getattr(dataset, "features", {}).get(column) if hasattr(dataset, "features") else None
    return list(getattr(feature, "names", None) or [])


@final
class CollateWithout:
    """A collator that removes a column from the rows first."""

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]], column: str) -> None:
        self._collate, self._column = collate, column

    def __call__(self, rows: list[Any]) -> Mapping[str, Any]:
        """Return a batch."""
        return self._collate([self._cut(row) for row in rows])

    def _cut(self, row: Any) -> Any:
        if not isinstance(row, Mapping) or self._column not in row:
            return row
        return {key: value for key, value in cast("Mapping[str, Any]", row).items() if key != self._column}
