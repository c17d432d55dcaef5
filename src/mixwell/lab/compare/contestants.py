"""The contestants of a comparison and their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from mixwell import methods
from mixwell.methods import Method
from mixwell.training import builder, config_io
from mixwell.training.config import Config

ALL, OWN = "all", "own"
Horizon = int | Literal["own", "long"]


@final
@dataclass(frozen=True)
class Contestant:
    """A method with its settings.

    Args:
        name: shown, and used for its directories.
        entry: the name without a horizon.
        named: whether it was requested by name, and not as one of ``all``.
    """

    name: str
    entry: str
    method: Method
    config: Config
    named: bool

    @property
    def learns(self) -> bool:
        """Whether weights are learned in the run itself."""
        return self.method.learns(self.method.parse_options(self.config.mixer.options))


def choose(
    base: Config, names: Sequence[str], horizons: Sequence[Horizon] = (OWN,)
) -> tuple[list[Contestant], dict[str, str]]:
    """Return the contestants, and by name the reasons why some of ``all`` cannot take part.

    Args:
        base: the settings that all share.
        names: methods, entries of ``compare`` in the settings, or ``all`` for all of both.
        horizons: for methods that learn in rounds, in the run or in a proxy: ``own`` is the authors' choice,
            ``long`` is sqrt(N log N).

    Raises:
        ValueError: A contestant that was named cannot take part.
    """
    wanted = list(dict.fromkeys(one for name in names for one in (_all(base) if name == ALL else [name])))
    found: list[Contestant] = []
    refused: dict[str, str] = {}
    for name in wanted:
        try:
            found += _contestants(base, name, horizons, named=name in names)
        except ValueError as error:
            if name in names:
                raise
            refused[name] = str(error).removeprefix(f"{name}: ")
    return found, refused


def parse_horizons(text: str) -> list[Horizon]:
    """Parse ``own``, ``long`` and numbers, separated by commas.

    Raises:
        ValueError: There is something else.
    """
    found: list[Horizon] = []
    for part in (one.strip() for one in text.split(",")):
        if part in ("own", "long"):
            found.append("own" if part == "own" else "long")
        elif part.isdigit() and int(part) > 0:
            found.append(int(part))
        else:
            raise ValueError(
                f"--horizons takes own, long and whole numbers with commas between, got {text!r}"
            )
    return found


def _all(base: Config) -> list[str]:
    known = [name for name in methods.every() if name != "fixed" or isinstance(base.mixer.weights, dict)]
    return [*known, *(name for name in base.compare if name not in known)]


def _contestants(base: Config, name: str, horizons: Sequence[Horizon], *, named: bool) -> list[Contestant]:
    given = base.compare.get(name, {})
    try:
        method = methods.find(str(given.get("method", name)))
    except ValueError as error:
        variants = f" (`compare` in the config has {', '.join(base.compare)})" if base.compare else ""
        raise ValueError(f"{error}{variants}") from None
    method.expect_installed()
    if not method.has_rounds:
        return [Contestant(name, name, method, _config(base, name, method, given, "own"), named)]
    found: dict[int, Contestant] = {}  # by T: the same horizon is run once
    for horizon in horizons:
        config = _config(base, name, method, given, horizon)
        shown = {"own": name, "long": f"{name} long"}.get(str(horizon), f"{name} T={horizon}")
        found.setdefault(builder.horizon(config), Contestant(shown, name, method, config, named))
    return list(found.values())


def _config(base: Config, name: str, method: Method, given: Mapping[str, Any], horizon: Horizon) -> Config:
    plain = base.model_dump(mode="json")
    mixer: dict[str, Any] = plain["mixer"]
    if method.name != base.mixer.method:  # options of another method do not apply to this one
        mixer |= {"options": {}, "horizon": "auto"}
    mixer |= {"method": method.name, **given}
    if horizon != OWN:
        mixer["horizon"] = min(horizon, base.steps) if isinstance(horizon, int) else horizon
    plain["mixer"], plain["compare"] = mixer, {}
    return config_io.validate_config(plain, where=name)
