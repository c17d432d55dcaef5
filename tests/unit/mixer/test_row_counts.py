"""The effective batch size, and the warning where rows do not follow the weights."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mixwell
from mixwell.mixer.row_counts import count_inputs, effective_rows
from mixwell.signals.base import Requirements

SCRIPT = [0.0, 1.0, 1.0]  # scores by domain: the first gains in every round


class Scripted(mixwell.Signal):
    """Gives the same scores in every round and needs no validation gradient."""

    requirements = Requirements(domain_batches=False, validation=False)

    def scores(self, validation):
        return np.array(SCRIPT)


def train(rows: Callable[[mixwell.Mixer, str], int], *, steps: int = 40, told: bool = False) -> mixwell.Mixer:
    """A run whose weights concentrate on the first of three domains."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mixer = mixwell.Mixer(model, optimizer, ["a", "b", "c"], horizon=2, signal=Scripted(), update=0.5)
    for _ in range(steps):
        for name in ("a", "b", "c"):
            count = rows(mixer, name)
            with mixer.domain(name, rows=count if told else None):
                model(torch.randn(count, 4)).square().mean().backward()
        mixer.step()
    return mixer


@pytest.mark.parametrize("told", [True, False])
def test_equal_rows_with_concentrated_weights_warn_once(told: bool) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        mixer = train(lambda mixer, name: 8, told=told)
    assert mixer.weights["a"] > 0.9
    messages = [str(one.message) for one in found]
    assert len(messages) == 1
    assert "the rows of a step do not follow the weights: 'a' has" in messages[0]
    assert "33% of the rows" in messages[0]
    assert "mixwell.MixtureLoader" in messages[0]


@pytest.mark.parametrize("told", [True, False])
def test_rows_that_follow_the_weights_do_not_warn(told: bool) -> None:
    train(lambda mixer, name: max(1, round(48 * mixer.weights[name])), told=told)


def test_all_micro_batches_of_a_domain_are_counted() -> None:
    """The last domain has all the weight and all but a few rows, in many micro-batches: nothing is wasted."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weights = {"a": 0.02, "b": 0.02, "c": 0.96}
    mixer = mixwell.Mixer(
        model, optimizer, list(weights), horizon=2, signal=Scripted(), update=1e-9, weights=weights
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            for name, parts in {"a": 1, "b": 1, "c": 24}.items():
                for _ in range(parts):
                    with mixer.domain(name, fraction=1 / parts):
                        model(torch.randn(2, 4)).square().mean().backward()
            mixer.step()


def test_equal_rows_with_even_weights_do_not_warn() -> None:
    train(lambda mixer, name: 8, steps=2)


def test_mixed_batches_are_counted() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mixer = mixwell.Mixer(model, optimizer, ["a", "b", "c"], horizon=2, signal=Scripted(), update=1.0)
    labels = [0] * 8 + [1] * 8 + [2] * 8
    with pytest.warns(UserWarning, match="the rows of a step do not follow the weights"):
        for _ in range(20):
            with mixer.batch(labels) as batch:
                batch.weighted_loss(model(torch.randn(24, 4)).square().squeeze(1)).backward()
            mixer.step()


@given(
    st.lists(st.floats(0.01, 1), min_size=2, max_size=6),
    st.integers(1, 64),
)
def test_effective_rows_are_maximal_if_they_follow_weights(raw: list[float], batch: int) -> None:
    weights = np.array(raw) / np.sum(raw)
    assert effective_rows(weights, batch * weights) == pytest.approx(batch)
    equal = np.full(len(weights), batch / len(weights))
    assert effective_rows(weights, equal) <= batch * (1 + 1e-9)
    assert effective_rows(weights, equal) == pytest.approx(batch / len(weights) / (weights**2).sum())


def test_effective_rows_match_gradient_variance() -> None:
    weights, rows = np.array([0.7, 0.2, 0.1]), np.array([4, 8, 2])
    draws = np.random.default_rng(0).standard_normal((50_000, rows.sum()))
    means = np.stack([one.mean(axis=1) for one in np.split(draws, np.cumsum(rows)[:-1], axis=1)], axis=1)
    assert 1 / (means @ weights).var() == pytest.approx(effective_rows(weights, rows.astype(float)), rel=0.03)


def test_counting_removes_hooks_and_handles_keywords() -> None:
    class Model(nn.Module):
        def forward(self, *, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids.float()

    model = Model()
    with count_inputs(model) as found:
        model(input_ids=torch.zeros(5, 3))
    assert found == [5]
    model(input_ids=torch.zeros(7, 3))
    assert found == [5]
