"""Named methods in a training loop, and methods from other packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mixwell
from mixwell import methods
from mixwell.methods import base
from mixwell.mixer.recipes import METHODS, Recipe
from mixwell.signals import ConstantWeights, DomainLosses

NAMES = ["web", "code"]


def made(method: str, *, domains: list[str] = NAMES, **settings: Any) -> mixwell.Mixer:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mixwell.Mixer.from_method(method, model, optimizer, domains, budget=100, **settings)


def test_uses_signal_horizon_and_weights_of_method() -> None:
    mixer = made("group-dro")
    assert isinstance(mixer.signal, DomainLosses)
    assert (mixer.horizon, mixer.budget) == (1, 100)
    assert made("group-dro", horizon="long").horizon == 22
    assert made("proportional", rows={"web": 30, "code": 10}).weights["web"] == pytest.approx(0.75)
    assert made("uniform", weights=[3, 1]).weights["web"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("dogee", {}, "unknown method 'dogee'; did you mean doge"),
        ("doge", {"options": {"nu": 1}}, r"mixer\.options\.nu: doge has no such option; it has .*mu"),
        ("doge", {"options": {"mu": -1}}, r"mixer\.options\.mu must be greater than 0, got -1"),
        ("proportional", {}, r"proportional uses the domains' sizes; give rows=\{'web'"),
        ("regmix", {}, "regmix trains proxies on many mixtures first"),
        ("doge", {"domains": ["web"]}, "doge needs 2 domains or more"),
    ],
)
def test_error_messages(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(method, **settings)


def test_method_of_plugin_package(monkeypatch: pytest.MonkeyPatch) -> None:
    methods.every()
    monkeypatch.setattr(METHODS, "_found", dict(METHODS._found))
    own = base.register(
        base.Method(
            name="first-domain",
            kind="static",
            line="nearly all weight for the first domain",
            paper="nowhere",
            recipe=lambda context: Recipe(
                ConstantWeights(), 1.0, weights={context.domains[0]: 9.0, context.domains[1]: 1.0}
            ),
        )
    )
    assert methods.find("first-domain") is own
    assert made("first-domain").weights["web"] == pytest.approx(0.9)
    with pytest.raises(ValueError, match="registered already"):
        base.register(base.Method(name="doge", kind="static", line="", paper="", recipe=own.recipe))
