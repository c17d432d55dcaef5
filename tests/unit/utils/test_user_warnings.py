"""Warnings of any depth point at the line of the user's own file."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mixwell import DenseTraces, Hypergradient, Mixer, ProjectedTraces


class Unknown(torch.optim.Optimizer):
    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None) -> None: ...


def test_warning_of_the_constructor() -> None:
    model = nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="does not know the optimizer") as found:
        Mixer(model, Unknown(model.parameters()), ["a", "b"], horizon=2)
    assert [one.filename for one in found] == [__file__]


class PositionTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.table.expand(x.shape).clone()
        positions += x  # in place, which hooks do not follow
        return self.head(positions)


@pytest.mark.parametrize("traces", [ProjectedTraces(), DenseTraces()])
def test_warning_of_a_hook_or_at_the_end_of_a_block(traces) -> None:
    model = PositionTable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixer = Mixer(model, optimizer, ["a", "b"], horizon=9, signal=Hypergradient(traces=traces))
    with pytest.warns(UserWarning, match="of the parameters are") as found:
        for _ in range(2):
            with mixer.batch([0, 1, 1]) as scope:
                scope.weighted_loss(model(torch.randn(3, 4)).squeeze(1) ** 2).backward()
            mixer.step()
    assert {one.filename for one in found} == {__file__}
