"""Mixed batches with non-finite rows, wrong labels, or calls in the wrong order."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import mixwell
from helpers.mixed_batches import (
    DOMAINS,
    LABELS,
    SignalModel,
    draw_steps,
    flat,
    last_scores,
    new_mixer,
    row_losses,
    signals,
    train_steps,
    validate,
)
from mixwell import Hypergradient, Mixer, ProjectedTraces

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nonfinite_row_names_its_domain(policy: str, where: str) -> None:
    model = SignalModel().double()
    mixer = new_mixer(model, on_nonfinite=policy)
    steps, validation = draw_steps(signals, 3)
    train_steps(mixer, model, steps[:1])
    before = flat(list(model.parameters()))
    x, y = steps[1][0].clone(), steps[1][1]

    def feed() -> None:
        with mixer.batch(LABELS) as rows:
            losses = row_losses(model, (x, y))
            if where == "loss":
                losses = losses + torch.tensor([0, 0, float("nan"), 0, 0, 0])
            else:  # a finite loss whose gradient is not
                losses.register_hook(lambda g: g * torch.tensor([1, 1, float("inf"), 1, 1, 1]))
            rows.weighted_loss(losses).backward()

    if policy == "raise":
        with pytest.raises(FloatingPointError, match="in a row of 'b' at step 1"):
            feed()
        return
    with pytest.warns(UserWarning, match="in a row of 'b' at step 1"):
        feed()
    mixer.step()
    assert torch.equal(flat(list(model.parameters())), before)
    assert mixer.skipped == {"b": 1}
    validate(mixer, model, validation)
    assert np.isfinite(last_scores(mixer)).all()
    assert mixer.rounds[0].skipped == {"b": 1}


def test_nonfinite_row_begins_round_of_dense_traces_again() -> None:
    model = SignalModel().double()
    mixer = new_mixer(model, traces=mixwell.DenseTraces(), on_nonfinite="skip", horizon=3)
    steps, validation = draw_steps(signals, 3)
    train_steps(mixer, model, steps[:1])
    before = flat(list(model.parameters()))
    with pytest.warns(UserWarning, match="non-finite gradient of parameter"), mixer.batch(LABELS) as rows:
        losses = row_losses(model, steps[1])
        losses.register_hook(lambda g: g * torch.tensor([1, 1, float("inf"), 1, 1, 1]))
        rows.weighted_loss(losses).backward()
    mixer.step()
    assert torch.equal(flat(list(model.parameters())), before)
    other = copy.deepcopy(model)
    last_step_only = new_mixer(other, traces=mixwell.DenseTraces(), horizon=1)
    for one, its_model in ((mixer, model), (last_step_only, other)):
        train_steps(one, its_model, steps[2:])
        validate(one, its_model, validation)
    np.testing.assert_allclose(last_scores(mixer), last_scores(last_step_only), rtol=1e-12)
    assert mixer.rounds[0].new_weights != mixer.rounds[0].weights


def test_messages_for_wrong_labels_losses_and_order() -> None:
    model = SignalModel().double()
    batch = signals(6)
    mixer = new_mixer(model)

    def give(labels=LABELS, losses=None, **options) -> None:
        with mixer.batch(labels, **options) as rows:
            rows.weighted_loss(row_losses(model, batch) if losses is None else losses).backward()

    for labels, said in (
        (["a", "x"], "unknown domain 'x'"),
        ([0, 3], "whole numbers from 0 to 2; got 0 to 3"),
        ([0.5, 1.0], "whole numbers"),
        ([], "there must be rows"),
    ):
        with pytest.raises(ValueError, match=said):
            give(labels)
    with pytest.raises(ValueError, match="one loss for each of the 6 rows"):
        give(losses=torch.ones(()))
    with pytest.raises(ValueError, match="how many rows of 'c'"):
        give(expected_counts={"a": 2, "b": 1})
    with pytest.raises(ValueError, match="unknown domain 'x' in expected_counts"):
        give(expected_counts={"x": 2})
    with pytest.raises(ValueError, match="left no gradient"), mixer.batch(LABELS) as rows:
        rows.weighted_loss(row_losses(model, batch))
    with pytest.raises(RuntimeError, match="twice"), mixer.batch(LABELS) as rows:
        rows.weighted_loss(row_losses(model, batch))
        rows.weighted_loss(row_losses(model, batch))
    give([0, 0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="domain 'b' is missing"):
        mixer.step()
    with pytest.raises(ValueError, match="given twice"):
        give()
    with pytest.raises(RuntimeError, match="cannot be used in one step"), mixer.domain("b"):
        pass
    with pytest.raises(RuntimeError, match="between steps"):
        mixer.state_dict()
    model.zero_grad()
    forward_mode = new_mixer(model, traces=mixwell.ForwardModeTraces())
    with (
        pytest.raises(ValueError, match=r"ForwardModeTraces\(\) cannot separate a mixed batch by domain"),
        forward_mode.batch(LABELS),
    ):
        pass
    with pytest.raises(ValueError, match="at least 1"):
        ProjectedTraces(0)
    with pytest.raises(ValueError, match="AdamW instead of Adam"):
        Mixer(
            model,
            torch.optim.Adam(model.parameters(), weight_decay=0.1),
            DOMAINS,
            horizon=2,
            signal=Hypergradient(traces=ProjectedTraces()),
        )
