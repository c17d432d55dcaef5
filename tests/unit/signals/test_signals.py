"""What signals share: the state of saved attributes, gradients by the parameters, checks of settings."""

from __future__ import annotations

import json
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from mixwell.hypergradient.parameters import Parameters
from mixwell.signals import Signal
from mixwell.signals.base import scores_of_weights
from mixwell.signals.checks import (
    require_at_least,
    require_choice,
    require_not_negative,
    require_positive,
)
from mixwell.signals.probes import parameter_gradients
from mixwell.typing import Gradients, Vector


class EveryKind(Signal):
    """Has an attribute of every kind that can be saved."""

    _saved = ("_count", "_recent", "_nothing", "_array", "_tensor", "_by_parameter", "_by_domain")

    def __init__(self, value: float) -> None:
        self._count, self._nothing = int(value), None
        self._recent = [[value], [value, value]]
        self._array, self._tensor = np.full((2, 3), value), torch.full((4,), value)
        self._by_parameter = [torch.full((2,), value), torch.full((), value)]
        self._by_domain = [[torch.full((2,), value + j)] for j in range(2)]
        self._view = self._array[1]

    def scores(self, validation: Gradients | None) -> Vector:
        return self._view


def test_saved_attributes_are_restored_in_place() -> None:
    values, tensors = EveryKind(5.0).state()
    assert values == {"count": 5, "recent": [[5.0], [5.0, 5.0]], "nothing": None}
    assert set(tensors) == {
        "array",
        "tensor",
        "by_parameter.0",
        "by_parameter.1",
        "by_domain.0.0",
        "by_domain.1.0",
    }
    other = EveryKind(1.0)
    other.load_state(json.loads(json.dumps(values)), {name: t.clone() for name, t in tensors.items()})
    restored, copied = other.state()
    assert restored == values
    for name, tensor in tensors.items():
        assert torch.equal(copied[name], tensor), name
    # Views of an array, such as the rows of a table of sums, see what was restored.
    np.testing.assert_array_equal(other.scores(None), np.full(3, 5.0))


def test_a_signal_without_saved_attributes_has_no_state() -> None:
    class Plain(Signal):
        def scores(self, validation: Gradients | None) -> Vector:
            return np.zeros(1)

    assert Plain().state() == ({}, {})


def test_gradients_by_the_parameters_have_none_for_frozen_and_unused_ones() -> None:
    below, above = nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.Sequential(below, above).double()
    below.weight.requires_grad_(False)
    parameters = Parameters.of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(3, 2, dtype=torch.float64)
    first, bias, second, unused = parameter_gradients(parameters, (below(x) @ above.weight.T).sum())
    assert first is None
    assert unused is None
    torch.testing.assert_close(bias, 3 * above.weight.detach()[0])
    torch.testing.assert_close(second, below(x).detach().sum(dim=0, keepdim=True))


def test_gradients_at_other_values_of_a_parameter() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    parameters = Parameters.of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = torch.full((1, 1), 3.0, dtype=torch.float64, requires_grad=True)
    (gradient,) = parameter_gradients(parameters, (other**2).sum(), values={0: other})
    torch.testing.assert_close(gradient, torch.full((1, 1), 6.0, dtype=torch.float64))


def test_scores_of_weights_are_finite_where_a_weight_is_zero() -> None:
    scores = scores_of_weights(np.array([1.0, 0.0]))
    assert scores[0] == 0
    assert np.isfinite(scores).all()


def test_checks_say_what_is_allowed_and_what_was_given() -> None:
    Kind = Literal["a", "b", "c"]
    require_positive(rate=None, eta=1.0)
    require_not_negative(damping=0.0)
    require_at_least(1, steps=1)
    require_choice(Kind, kind="b")
    for value in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"eta must be positive and finite, got {value}"):
            require_positive(eta=value)
    with pytest.raises(ValueError, match=r"damping must be finite and not negative, got -1\.0"):
        require_not_negative(damping=-1.0)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        require_at_least(1, steps=0)
    with pytest.raises(ValueError, match="kind must be 'a', 'b' or 'c', got 'd'"):
        require_choice(Kind, kind="d")
