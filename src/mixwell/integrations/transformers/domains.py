"""A dataset by domain: from a column that names it, or from a dataset for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from torch.utils.data import Dataset, Subset

from mixwell.data import readers


def by_domain(dataset: Any, column: str) -> dict[str, Any]:
    """A dataset for each domain.

    Args:
        dataset: one whose rows name their domain, or a mapping of datasets by domain.
        column: the name of the column that does.

    Returns:
        Datasets by domain, in the order in which the domains first appear in a mapping, else in the order of
        their names (of a ``ClassLabel``, in its order).

    Raises:
        ValueError: there is no such column, or a dataset is empty or a stream of several domains.
    """
    if isinstance(dataset, Mapping):
        datasets = dict(cast("Mapping[str, Any]", dataset))
        readers.check(datasets)
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
    places: dict[str, list[int]] = {}
    for place, name in enumerate(_names(dataset, column)):
        places.setdefault(name, []).append(place)
    order = _class_names(dataset, column) or sorted(places)
    if hasattr(dataset, "select"):
        rest = dataset.remove_columns(column)
        return {name: rest.select(places[name]) for name in order if name in places}
    return {name: Subset(_Without(dataset, column), places[name]) for name in order}


def _names(dataset: Any, column: str) -> list[str]:
    if hasattr(dataset, "column_names"):
        if column not in dataset.column_names:
            raise ValueError(
                f"train_dataset has no column {column!r} that names the domain of each row; its columns are "
                f"{', '.join(dataset.column_names)}. Give domain_column='...', or datasets by domain: "
                "train_dataset={'web': web, 'code': code}"
            )
        values = dataset.with_format(None)[column]
    else:
        first = dataset[0]
        if not isinstance(first, Mapping) or column not in first:
            raise ValueError(
                f"the rows of train_dataset have no {column!r} that names their domain; give "
                "domain_column='...', or datasets by domain: train_dataset={'web': web, 'code': code}"
            )
        values = [dataset[place][column] for place in range(len(dataset))]
    classes = _class_names(dataset, column)
    missing = [place for place, value in enumerate(values) if value is None]
    if missing:
        raise ValueError(f"row {missing[0]} of train_dataset has no {column!r} (and {len(missing) - 1} more)")
    return [classes[value] if classes else str(value) for value in values]


def _class_names(dataset: Any, column: str) -> list[str]:
    feature = getattr(dataset, "features", {}).get(column) if hasattr(dataset, "features") else None
    return list(getattr(feature, "names", None) or [])


class _Without(Dataset[Any]):
    """Rows without a column."""

    def __init__(self, dataset: Any, column: str) -> None:
        self._dataset, self._column = dataset, column

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {key: value for key, value in self._dataset[place].items() if key != self._column}


def total_rows(datasets: Mapping[str, Any]) -> int | None:
    """The number of rows, ``None`` where a dataset is a stream.

    Args:
        datasets: by domain.

    Returns:
        Their sum.
    """
    if any(readers.is_stream(one) for one in datasets.values()):
        return None
    return int(np.sum([len(one) for one in datasets.values()]))
