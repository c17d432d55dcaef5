"""``mixture.json``: the mixture that was learned, and what made it. Reading it needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mixwell.training.artifacts import MixtureFields, check_fields
from mixwell.utils import environment, files
from mixwell.utils.parsing import parse_json, shown
from mixwell.utils.regular_files import read_regular

if TYPE_CHECKING:
    from mixwell.mixer.mixer import Mixer

FILE = "mixture.json"
FORMAT = 1
SUM_TOLERANCE = 1e-6


def describe_mixture(
    mixer: Mixer,
    *,
    method: str,
    seed: int,
    rows: dict[str, int],
    taken: dict[str, int],
    computed: float | None = None,
    memory: int | None = None,
) -> dict[str, Any]:
    """Return the content of the file as plain values.

    Args:
        rows: the number of rows by domain, where known.
        taken: rows trained on, by domain.
        computed: rows of which a gradient was taken for any purpose, where they were counted.
        memory: bytes held in addition to plain training; by default those of the mixer.
    """
    weights = mixer.weights
    counted: dict[str, Any] = {"available": rows, "trained_on": taken}
    if computed is not None:
        counted["computed"] = computed
    return {
        "format": FORMAT,
        "domains": list(weights.names),
        "weights": {"last": weights.last, "average": weights.average},
        "history": [
            {"step": step, "weights": dict(zip(weights.names, row.tolist(), strict=True))}
            for step, row in zip(
                [0, *(record.first_step + record.steps for record in mixer.rounds)],
                weights.history,
                strict=True,
            )
        ],
        "signal": [
            {
                "step": record.first_step + record.steps,
                "scores": record.scores,
                "noise": record.noise,
                "points": record.points,
                "step_size": record.step_size,
            }
            for record in mixer.rounds
        ],
        "method": method,
        "horizon": mixer.horizon,
        "budget": mixer.budget,
        "steps_done": mixer.steps_done,
        "finished": mixer.budget is not None
        and mixer.steps_done >= mixer.budget
        and not mixer.validation_due,
        "seed": seed,
        "rows": counted,
        "memory": mixer.nbytes if memory is None else memory,
        "made_with": environment.describe()["packages"],
    }


def write_mixture(folder: Path, described: dict[str, Any]) -> None:
    """Write the mixture of a run into its directory."""
    files.write_atomically(folder / FILE, json.dumps(described, indent=1) + "\n")


def read_mixture(path: Path) -> dict[str, Any]:
    """Read the file of :func:`write_mixture`, given its path or that of a run's directory.

    Raises:
        ValueError: there is none, or it is something else.
    """
    file = path / FILE if path.is_dir() else path
    try:
        plain = parse_json(read_regular(file))
    except FileNotFoundError as error:
        if file != path:
            raise ValueError(f"{path} has no {FILE}: the run has not saved anything yet") from error
        raise ValueError(
            f"there is no {path}; give a {FILE}, or the directory of a run that has one"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot read {file} ({error.strerror})") from error
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"{file} is not JSON ({error}), so it is not a {FILE}") from error
    return check_mixture(plain, where=str(file))


def check_mixture(plain: object, *, where: str = "the mixture") -> dict[str, Any]:
    """Raise ValueError for what is not a mixture of a format that this version reads; return it."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"{where} is not a mixture: expected an object with weights, got {shown(plain)}")
    found = dict(cast("Mapping[str, Any]", plain))
    number = found.get("format")
    if isinstance(number, int) and number > FORMAT:
        raise ValueError(
            f"{where} has format {number}, and this mixwell reads up to {FORMAT}: it was written by a newer "
            "one; update mixwell"
        )
    missing = [key for key in schema()["required"] if key not in found]
    if missing:
        raise ValueError(f"{where} is not a mixture that mixwell wrote: it has no {', '.join(missing)}")
    if number != FORMAT:
        raise ValueError(f"{where}: format must be {FORMAT}, got {shown(number)}")
    domains = _checked_domains(found["domains"], where)
    for which in ("last", "average"):
        _check_weights(_inside(found, "weights", which), domains, where=f"{where}: weights.{which}")
    rows = _inside(found, "rows", "available")
    if not isinstance(rows, dict) or not all(
        isinstance(n, int) for n in cast("dict[str, Any]", rows).values()
    ):
        raise ValueError(f"{where}: rows.available must have whole numbers by domain, got {shown(rows)}")
    check_fields(found, MixtureFields, where=where)
    for point in found["history"]:
        if sorted(point["weights"]) != sorted(domains):
            raise ValueError(
                f"{where}: the history must have a weight of each of {', '.join(domains)}, got {shown(point)}"
            )
    return found


def schema() -> dict[str, Any]:
    """Return the JSON schema of the file."""
    return json.loads(resources.files("mixwell.training").joinpath("mixture.schema.json").read_text("utf-8"))


def _checked_domains(given: object, where: str) -> list[str]:
    names = cast("list[Any]", given) if isinstance(given, list) else []
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ValueError(f"{where}: domains must be a list of different names, got {shown(given)}")
    return names


def _check_weights(given: object, domains: list[str], *, where: str) -> None:
    weights = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    if sorted(weights) != sorted(domains):
        raise ValueError(f"{where} must name each domain once ({', '.join(domains)}), got {shown(given)}")
    for name, value in weights.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value <= 2:
            raise ValueError(
                f"{where}: the weight of {name!r} must be a number of at least 0, got {shown(value)}"
            )
    total = math.fsum(weights.values())
    if abs(total - 1) > SUM_TOLERANCE:
        raise ValueError(f"{where} must sum to one, got {total}; was the file edited?")


def _inside(found: Mapping[str, Any], key: str, inner: str) -> object:
    outer = found[key]
    return cast("dict[str, Any]", outer).get(inner) if isinstance(outer, dict) else None
