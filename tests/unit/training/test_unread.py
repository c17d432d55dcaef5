"""Settings that the chosen method does not read are named or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mixwell
from helpers.method_runs import OPTIONS, data, loss_of
from mixwell import Floor, Mixer, methods
from mixwell.methods.base import MethodContext
from mixwell.training import config_io
from mixwell.training.trainer import Trainer
from mixwell.training.unread import unread_settings

METHODS = list(methods.every())
LEARNED = [name for name in METHODS if methods.find(name).has_rounds]
NOT_LEARNED = [name for name in METHODS if name not in LEARNED]


class Recording:
    """A context that records what a recipe reads of it."""

    def __init__(self, context: MethodContext) -> None:
        self._context, self.read = context, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._context, name)


def context(name: str, options: dict[str, Any]) -> MethodContext:
    return MethodContext(
        domains=("a", "b"),
        rows={"a": 50, "b": 60},
        batch_rows=10,
        steps=20,
        options=methods.find(name).parse_options(options),
    )


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, OPTIONS.get(name, {})) for name in METHODS),
    ("truncated", {"curvature": "exact"}),
    ("doge", {"target": "domains"}),
    ("ado", {"prior": "weights"}),
    ("skill-it", {"affinity": [[1.0], [2.0]]}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_what_methods_declare_is_what_their_recipes_read(name: str, options: dict[str, Any]) -> None:
    method = methods.find(name)
    recording: Any = Recording(context(name, options))
    recipe = method.recipe(recording)
    declared = methods.find(name).parse_options(options).mixer_settings
    for setting in ("step_size", "curvature", "traces"):
        assert (setting in recording.read) == (setting in declared), setting
    assert (recipe.signal.requirements.validation and not recipe.signal.constant) == (
        "validation_rows" in declared
    )
    if method.has_rounds and not method.needs.proxies:
        assert (recipe.weights is None) == ("weights" in declared)


def config(method: str, **mixer: Any) -> Any:
    plain = {
        "domains": {"a": {"given": "tuple"}, "b": {"given": "tuple"}},
        "validation": {"given": "tuple"},
        "model": {"kind": "given", "name": "Sequential"},
        "steps": 20,
        "mixer": {"method": method, "options": OPTIONS.get(method, {}), **mixer},
    }
    return config_io.validate_config(plain)


EVERY = {
    "horizon": 5,
    "step_size": 0.5,
    "curvature": 0.5,
    "traces": "sketched",
    "sketch_size": 10,
    "projection_rank": 3,
    "warmup": 2,
    "validation_rows": 4,
    "weights": {"a": 1.0, "b": 3.0},
}
RUN = {"horizon", "warmup"}
READ = {
    "mixwell": {*EVERY} - {"projection_rank"},
    "truncated": {*EVERY} - {"projection_rank"},
    **{
        key: {*RUN, "step_size", "validation_rows", "weights"}
        for key in ("implicit-cg", "implicit-neumann", "single-loop")
    },
    **{
        key: {*RUN, "validation_rows", "weights"}
        for key in ("doge", "tikmix-d", "tikmix-m", "learning-to-reweight", "mentornet-dd")
    },
    "ado": RUN,
    "fixed": {"weights"},
    **{
        key: set[str]()
        for key in ("uniform", "proportional", "temperature", "unimax", "regmix", "mixing-laws")
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_settings_without_effect_are_named(method: str) -> None:
    assert unread_settings(config(method)) == []
    found = unread_settings(config(method, **EVERY))
    wanted = set(EVERY) - READ.get(method, {*RUN, "weights"})
    assert {name.removeprefix("mixer.") for name in found if "options" not in name} == wanted


@pytest.mark.parametrize(
    ("method", "mixer", "named"),
    [
        ("mixwell", {"step_size": 0.1, "options": {"factor": 2.0}}, ["mixer.options.factor"]),
        ("mixwell", {"options": {"points": 1, "span": 0.2}}, ["mixer.options.span"]),
        ("mixwell", {"options": {"factor": 2.0}}, []),
        ("pike", {"options": {"beta": 2.0}}, ["mixer.options.beta"]),
        ("pike", {"options": {"form": "conceptual", "beta": 2.0}}, []),
        ("doge", {"options": {"transfer": False, "proxy_steps": 3}}, ["mixer.options.proxy_steps"]),
        (
            "doremi",
            {"options": {"reference": "runs/x", "reference_steps": 3}},
            ["mixer.options.reference_steps"],
        ),
        ("mixwell", {"projection_rank": 3}, ["mixer.projection_rank"]),
        ("mixwell", {"projection_rank": 3, "traces": "projected"}, []),
    ],
)
def test_settings_that_others_turn_off_are_named(method: str, mixer: Any, named: list[str]) -> None:
    assert unread_settings(config(method, **mixer)) == named


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "constraint",
    [{"floor": 0.3}, {"cap": {"a": 0.6}}, {"prior": {"a": 1.0, "b": 2.0}, "prior_strength": 0.1}],
    ids=["floor", "cap", "prior"],
)
def test_constraints_that_nothing_applies_are_refused(method: str, constraint: dict[str, Any]) -> None:
    if method in LEARNED:
        config(method, **constraint)
        return
    with pytest.raises(ValueError, match=rf"mixer\.{next(iter(constraint))}.*: {method} does not learn"):
        config(method, **constraint)


def trained(folder: Path, *, steps: int, **mixer: Any) -> Trainer:
    rows = data()
    validation = rows.pop("validation")
    model = nn.Linear(3, 2)
    return mixwell.train(
        rows, validation, model=model, loss=loss_of, out=folder, steps=steps, quiet=True, mixer=mixer
    )


def test_train_warns_of_settings_without_effect(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"mixer\.step_size has no effect: group-dro"):
        trained(tmp_path / "run", steps=4, method="group-dro", step_size=0.5)


def test_a_proxy_applies_constraints_and_the_last_run_keeps_its_average(tmp_path: Path) -> None:
    done = trained(tmp_path / "run", steps=6, method="doge", floor=0.3, options={"mu": 1e-4})
    assert min(done.mixer.weights.last.values()) >= 0.3 - 1e-9
    assert max(done.mixer.weights.last.values()) > 0.34


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("regmix", "mixing-laws")])
@pytest.mark.parametrize(
    "setting", [{"step_size": 0.5}, {"horizon": 5}, {"warmup": 2}], ids=["step_size", "horizon", "warmup"]
)
def test_from_method_refuses_what_the_method_does_not_read(name: str, setting: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    loss = lambda net, batch: net(batch).square().mean()  # noqa: E731
    row_losses = lambda net, batch: net(batch).square()  # noqa: E731

    def make(**settings: Any) -> Mixer:
        sources = {d: (lambda: torch.zeros(4, 3)) for d in "ab"}
        return Mixer.from_method(
            name,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            ["a", "b"],
            budget=20,
            rows={"a": 50, "b": 60},
            batch_rows=10,
            probes=mixwell.Probes(model, loss, sources, sources["a"], row_losses),
            **settings,
        )

    make()
    key = next(iter(setting))
    read = name in LEARNED if key in RUN else "step_size" in READ.get(name, set())
    if read:
        make(**setting)
        return
    with pytest.raises(ValueError, match=f"{name} does not read {key}"):
        make(**setting)


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("doge", {"options": {"proxy_steps": 5}}, r"options\['proxy_steps'\]"),
        ("mixwell", {"step_size": 0.5, "options": {"factor": 2.0}}, r"options\['factor'\]"),
        ("pike", {"batch_rows": 8, "options": {"eta": 0.1}}, r"options\['eta'\]"),
    ],
)
def test_from_method_refuses_options_without_effect(name: str, settings: Any, named: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=named):
        Mixer.from_method(name, model, optimizer, ["a", "b"], budget=20, **settings)


def test_from_method_applies_constraints_to_fixed_mixtures() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixer = Mixer.from_method(
        "proportional",
        model,
        optimizer,
        ["a", "b"],
        budget=20,
        rows={"a": 1, "b": 9},
        constraints=[Floor(0.3)],
    )
    assert mixer.weights.last == pytest.approx({"a": 0.3, "b": 0.7})
