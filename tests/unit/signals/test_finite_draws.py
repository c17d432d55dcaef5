"""Batches that a signal computes with outside of the training step, some of which are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mixwell import Mixer, Probes

ROWS, STEPS, HORIZON, BATCHES = 8, 24, 4, 5
Batch = tuple[Tensor, Tensor]
OPTIONS: dict[str, dict[str, Any]] = {
    "tikmix-m": {"candidates": 6},
    "single-loop": {},
    "implicit-cg": {},
    "implicit-neumann": {},
    "aioli": {},
    "skill-it": {"probe_steps": 3},
    "tandem": {},
    "meta-weight-net": {"level": "domains"},
    "mentornet-dd": {"level": "domains", "burn_in": 0.0},
    "learning-to-reweight": {"level": "domains"},
}
USES_VALIDATION = {"aioli", "skill-it", "tandem", "meta-weight-net", "learning-to-reweight"}
USES_DOMAINS = set(OPTIONS) - {"learning-to-reweight"}


def rows(name: str, seed: int) -> Batch:
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(seed + 1000 * "abv".index(name[0])))
    return x, -x[:, :1] if name == "b" else x.sum(1, keepdim=True)


def source(name: str, spoiled: Callable[[int], bool], *, leave_out: bool) -> Callable[[], Batch]:
    """Return a source of batches, some of which have a row of NaN or, with ``leave_out``, do not come."""
    number = -1

    def draw() -> Batch:
        nonlocal number
        number += 1
        while leave_out and spoiled(number):
            number += 1
        x, y = rows(name, number)
        if spoiled(number):
            x[3] = torch.nan
        return x, y

    return draw


def row_losses(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().squeeze(1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return row_losses(model, batch).mean()


def trained(
    method: str, where: str, spoiled: Callable[[int], bool], *, leave_out: bool = False, policy: Any = "skip"
) -> Mixer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    sources = {
        name: source(name, spoiled if name == where else lambda number: False, leave_out=leave_out)
        for name in ("a", "b", "validation")
    }
    mixer = Mixer.from_method(
        method,
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        ["a", "b"],
        budget=STEPS,
        horizon=HORIZON,
        options=OPTIONS[method],
        batch_rows=2 * ROWS,
        probes=Probes(model, loss, {name: sources[name] for name in "ab"}, sources["validation"], row_losses),
        on_nonfinite=policy,
    )
    for step in range(STEPS):
        batches = {name: rows(name, 100 + step) for name in "ab"}
        if mixer.signal.requirements.domain_batches:
            for name, batch in batches.items():
                with mixer.domain(name, rows=ROWS):
                    loss(model, batch).backward()
        else:
            whole = torch.cat([x for x, _ in batches.values()]), torch.cat([y for _, y in batches.values()])
            with mixer.batch([0] * ROWS + [1] * ROWS) as scope:
                scope.weighted_loss(row_losses(model, whole), data=whole).backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                loss(model, rows("v", 200 + step)).backward()
    return mixer


CASES = [(m, "b") for m in OPTIONS if m in USES_DOMAINS] + [
    (m, "validation") for m in OPTIONS if m in USES_VALIDATION
]
needs_lightgbm = {"tikmix-m": "lightgbm"}


@pytest.mark.parametrize(("method", "where"), CASES)
@pytest.mark.filterwarnings("ignore:.*not finite.*:UserWarning")
def test_a_batch_that_is_not_finite_is_as_if_it_had_not_come(method: str, where: str) -> None:
    if method in needs_lightgbm:
        pytest.importorskip(needs_lightgbm[method])
    found = trained(method, where, lambda number: number % BATCHES == 0)
    wanted = trained(method, where, lambda number: number % BATCHES == 0, leave_out=True)
    assert list(found.skipped) == [where]
    assert all(record.scores for record in found.rounds)
    assert found.weights.last == wanted.weights.last
    assert found.weights.last != {"a": 0.5, "b": 0.5}
    assert not wanted.skipped


@pytest.mark.parametrize("method", [method for method in OPTIONS if method in USES_DOMAINS])
@pytest.mark.filterwarnings("ignore:.*not finite.*:UserWarning")
def test_a_domain_that_is_never_finite_does_not_stop_the_others(method: str) -> None:
    if method in needs_lightgbm:
        pytest.importorskip(needs_lightgbm[method])
    mixer = trained(method, "b", lambda number: True)
    assert set(mixer.skipped) == {"b"}
    assert all(record.scores for record in mixer.rounds)


@pytest.mark.parametrize(("method", "where"), CASES)
def test_by_default_a_batch_that_is_not_finite_raises_with_its_name(method: str, where: str) -> None:
    if method in needs_lightgbm:
        pytest.importorskip(needs_lightgbm[method])
    with pytest.raises(FloatingPointError, match=rf"of '{where}', computed outside of the training step"):
        trained(method, where, lambda number: True, policy="raise")


@pytest.mark.filterwarnings("ignore:.*not finite.*:UserWarning")
def test_without_any_finite_target_there_are_no_scores() -> None:
    mixer = trained("aioli", "validation", lambda number: True)
    assert set(mixer.skipped) == {"validation"}
    assert [record.scores for record in mixer.rounds] == [{}] * (STEPS // HORIZON)
    assert mixer.weights.last == {"a": 0.5, "b": 0.5}
