"""The variants of a comparison: methods with their settings and horizons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from mixwell import methods
from mixwell.methods import Method
from mixwell.training import builder, config_io
from mixwell.training.config import Config, constraints_without_effect, drop_constraints
from mixwell.training.unread import unread_settings

Horizon = int | Literal["own", "long"]
ALL = "all"
OWN = "own"


@final
@dataclass(frozen=True)
class Variant:
    """A method with its settings.

    Args:
        name: the entry and, if it differs from the authors' choice, the horizon; also names the run directories.
        entry: a method, or an entry of ``compare`` in the config.
        requested: whether the entry was requested by name, and not as one of ``all``.
    """

    name: str
    entry: str
    method: Method
    config: Config
    requested: bool

    @property
    def kind(self) -> str:
        """``online`` if weights are learned in the run itself, else the kind of the method."""
        learns = self.method.learns(self.method.parse_options(self.config.mixer.options))
        return "online" if learns else self.method.kind

    @property
    def horizon(self) -> int | None:
        """T, if the method learns in rounds."""
        return builder.horizon(self.config) if self.method.has_rounds else None


def choose(
    base: Config, names: Sequence[str], horizons: Sequence[Horizon] = (OWN,)
) -> tuple[list[Variant], dict[str, str]]:
    """Return the variants, and by name the reasons why some of ``all`` cannot be run.

    Args:
        base: the settings that all share.
        names: methods, entries of ``compare`` in the settings, or ``all`` for all of both.
        horizons: for methods that learn in rounds, in the run or in a proxy: ``own`` is the authors' choice,
            ``long`` is sqrt(N log N).

    Raises:
        ValueError: An entry that was requested by name cannot be run.
    """
    wanted = list(dict.fromkeys(one for name in names for one in (_all(base) if name == ALL else [name])))
    found: list[Variant] = []
    refused: dict[str, str] = {}
    for name in wanted:
        try:
            found += _variants(base, name, horizons, requested=name in names)
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


def notes_on_settings(base: Config, chosen: Sequence[Variant]) -> list[str]:
    """Return a sentence for each variant with settings of its own, or constraints of all, that have no effect."""
    found: list[str] = []
    for one in chosen:
        own = {f"mixer.{key}" for key in base.compare.get(one.entry, {})}
        unread = [
            key for key in unread_settings(one.config) if key in own or key.startswith("mixer.options.")
        ]
        changed = base.mixer.model_copy(update={"method": one.method.name})
        unread += constraints_without_effect(changed)
        if unread:
            found.append(
                f"{one.name}: {', '.join(unread)} without effect, since {one.method.name} does not read it"
            )
    return found


def _all(base: Config) -> list[str]:
    # Without weights in the config, "fixed" is the same as "uniform".
    known = [name for name in methods.every() if name != "fixed" or isinstance(base.mixer.weights, dict)]
    return [*known, *(name for name in base.compare if name not in known)]


def _variants(base: Config, entry: str, horizons: Sequence[Horizon], *, requested: bool) -> list[Variant]:
    settings = base.compare.get(entry, {})
    try:
        method = methods.find(str(settings.get("method", entry)))
    except ValueError as error:
        entries = f" (`compare` in the config has {', '.join(base.compare)})" if base.compare else ""
        raise ValueError(f"{error}{entries}") from None
    method.expect_installed()
    found: dict[int | None, Variant] = {}  # by T: the same horizon is run once
    own: Sequence[Horizon] = (OWN,)
    for horizon in horizons if method.has_rounds else own:
        config = _config(base, entry, method, settings, horizon)
        name = {"own": entry, "long": f"{entry} long"}.get(str(horizon), f"{entry} T={horizon}")
        variant = Variant(name, entry, method, config, requested)
        found.setdefault(variant.horizon, variant)
    return list(found.values())


def _config(
    base: Config, entry: str, method: Method, settings: Mapping[str, Any], horizon: Horizon
) -> Config:
    plain = base.model_dump(mode="json")
    mixer: dict[str, Any] = plain["mixer"]
    if method.name != base.mixer.method:  # options of another method do not apply to this one
        mixer |= {"options": {}, "horizon": "auto"}
    mixer["method"] = method.name
    drop_constraints(mixer)  # those of all variants; its own are refused
    mixer |= settings
    if horizon != OWN:
        mixer["horizon"] = min(horizon, base.steps) if isinstance(horizon, int) else horizon
    plain["mixer"], plain["compare"] = mixer, {}
    return config_io.validate_config(plain, where=entry)
