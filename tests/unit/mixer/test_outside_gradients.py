"""Gradients that are not those of the mixer's blocks are added with weight 1, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mixwell
from helpers.toy_problems import two_layer
from mixwell.hypergradient.traces import Traces

NAMES = ["a", "b"]
TRACES = [mixwell.DenseTraces(), mixwell.ProjectedTraces(4), mixwell.SketchedTraces(64)]


def rows(seed: int = 0, count: int = 6) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=random), torch.randn(count, 1, generator=random)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def make(
    model: nn.Module, traces: Traces | None = None, lr: float = 0.1, **settings
) -> tuple[mixwell.Mixer, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    signal = mixwell.Hypergradient(traces=traces or mixwell.ProjectedTraces(4), points=1)
    settings.setdefault("horizon", 20)
    return mixwell.Mixer(model, optimizer, NAMES, signal=signal, weights=[0.75, 0.25], **settings), optimizer


def row_losses(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return (model(given[0]) - given[1]).square().mean(dim=1)


def penalty(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


LABELS = ["a", "a", "b", "b", "b", "b"]

WRONG_LOSSES = {
    "did not go through batch.weighted_loss": lambda batch, losses: losses.mean(),
    "another loss was propagated": lambda batch, losses: (batch.weighted_loss(losses), losses.mean())[1],
    r"multiplied by 65536 .*GradScaler": lambda batch, losses: batch.weighted_loss(losses) * 65536.0,
    r"multiplied by -1 ": lambda batch, losses: -batch.weighted_loss(losses),
}


@pytest.mark.parametrize("message", WRONG_LOSSES)
def test_a_mixed_batch_refuses_losses_without_the_weights(message: str) -> None:
    model = network()
    mixer, _ = make(model)
    with pytest.raises(ValueError, match=message), mixer.batch(LABELS) as batch:
        WRONG_LOSSES[message](batch, row_losses(model, rows())).backward()


def test_a_mixed_batch_refuses_a_weighted_loss_that_was_not_propagated() -> None:
    model = network()
    mixer, _ = make(model)
    with pytest.raises(ValueError, match="left no gradient"), mixer.batch(LABELS) as batch:
        batch.weighted_loss(row_losses(model, rows()))


def test_a_mixed_batch_accepts_a_loss_divided_by_the_number_of_micro_batches() -> None:
    model, expected = network(), network()
    mixer, _ = make(model)
    for _ in range(2):
        with mixer.batch(LABELS, expected_counts={"a": 2, "b": 4}) as batch:
            (batch.weighted_loss(row_losses(model, rows())) / 2).backward()
    mixer.step()
    losses = row_losses(expected, rows())
    (0.75 * losses[:2].mean() + 0.25 * losses[2:].mean()).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))


def step_with_auxiliary(mixer: mixwell.Mixer, model: nn.Module, *, mixed: bool, scale: float = 1.0) -> None:
    inputs, targets = rows()
    if mixed:
        with mixer.batch(LABELS) as batch:
            batch.weighted_loss(row_losses(model, (inputs, targets))).backward()
    else:
        for name, own in (("a", slice(0, 2)), ("b", slice(2, 6))):
            with mixer.domain(name):
                row_losses(model, (inputs[own], targets[own])).mean().backward()
    for _ in range(2):
        with mixer.auxiliary():
            (0.5 * scale * penalty(model)).backward()
    mixer.step()


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("mixed", [True, False])
def test_an_auxiliary_loss_has_weight_one(mixed: bool, clip: float | None) -> None:
    model, expected = network(), network()
    mixer, _ = make(model, clip_norm=clip)
    step_with_auxiliary(mixer, model, mixed=mixed)
    losses = row_losses(expected, rows())
    (0.75 * losses[:2].mean() + 0.25 * losses[2:].mean() + penalty(expected)).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(expected.parameters(), clip)
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("traces", TRACES, ids=repr)
def test_an_auxiliary_loss_leaves_no_trace(
    traces: Traces, mixed: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """With a learning rate of nearly zero the parameters do not differ, and the scores are those without it."""
    if mixed and not traces.supports_mixed_batches:
        pytest.skip("no mixed batches")
    scores: list[list[float]] = []
    for scale in (0.0, 1.0):
        model = network()
        mixer, _ = make(model, type(traces)(**_settings(traces)), lr=1e-9, horizon=2)
        for _ in range(2):
            step_with_auxiliary(mixer, model, mixed=mixed, scale=scale)
        with mixer.validation():
            row_losses(model, rows(1)).mean().backward()
        scores.append(list(mixer.rounds[0].scores.values()))
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    assert not [w for w in recwarn if "parameter" in str(w.message)]  # nor does a layer count as not captured


def _settings(traces: Traces) -> dict[str, int]:
    if isinstance(traces, mixwell.ProjectedTraces):
        return {"rank": traces.rank}
    return {"size": traces.size} if isinstance(traces, mixwell.SketchedTraces) else {}


@pytest.mark.parametrize("mixed", [True, False])
def test_a_non_finite_auxiliary_loss_is_left_out(mixed: bool) -> None:
    model, expected = network(), network()
    mixer, _ = make(model, on_nonfinite="skip")
    with pytest.warns(UserWarning, match="auxiliary loss"):
        step_with_auxiliary(mixer, model, mixed=mixed, scale=float("nan"))
    assert mixer.skipped == {"auxiliary loss": 2}
    losses = row_losses(expected, rows())
    (0.75 * losses[:2].mean() + 0.25 * losses[2:].mean()).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))


def test_an_auxiliary_block_belongs_to_a_step() -> None:
    model = network()
    mixer, _ = make(model)
    with pytest.raises(RuntimeError, match="after the step's first block"), mixer.auxiliary():
        penalty(model).backward()


CHANGES = {
    "added": lambda model: penalty(model).backward(),
    "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "replaced": lambda model: setattr(model[0].weight, "grad", torch.ones(3, 4)),
    "cleared": lambda model: model.zero_grad(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_of_mixed_batches_cannot_be_changed_before_the_step(change: str) -> None:
    model = network()
    mixer, _ = make(model)
    with mixer.batch(LABELS) as batch:
        batch.weighted_loss(row_losses(model, rows())).backward()
    CHANGES[change](model)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight was changed outside .* mixer\.step\(\)"):
        mixer.step()


@pytest.mark.parametrize("change", ["added", "replaced"])
def test_gradients_after_domain_blocks_are_refused(change: str) -> None:
    model = network()
    mixer, _ = make(model)
    for name in NAMES:
        with mixer.domain(name):
            row_losses(model, rows()).mean().backward()
    CHANGES[change](model)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight was changed outside .*mixer\.auxiliary"):
        mixer.step()
    model.zero_grad()
    mixer.step()


@pytest.mark.parametrize("traces", [mixwell.DenseTraces, mixwell.ProjectedTraces])
def test_an_optimizer_that_has_stepped_already_is_refused(traces: type[Traces]) -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mixer = mixwell.Mixer(
        net, optimizer, ["a", "b"], budget=10, signal=mixwell.Hypergradient(traces=traces())
    )
    with mixer.batch([0, 1]) as scope:
        scope.weighted_loss(net(torch.ones(2, 3)).square()).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="call mixer.step\\(\\) instead of optimizer.step"):
        mixer.step()


def test_gradients_cannot_be_changed_between_micro_batches() -> None:
    model = network()
    mixer, _ = make(model)
    counts = {"a": 4, "b": 8}
    with mixer.batch(LABELS, expected_counts=counts) as batch:
        batch.weighted_loss(row_losses(model, rows())).backward()
    model.zero_grad()
    with (
        pytest.raises(RuntimeError, match=r"0\.weight was changed"),
        mixer.batch(LABELS, expected_counts=counts),
    ):
        pass


class TiedHead(nn.Module):
    """Has a tied weight, a frozen one, and one that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.tied = self.body
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.tied(self.frozen(self.body(inputs))))


@pytest.mark.parametrize("mixed", [True, False])
def test_parameters_that_the_optimizer_lacks_are_refused(mixed: bool) -> None:
    model = TiedHead()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces(4, check=False))
    mixer = mixwell.Mixer(model, optimizer, NAMES, horizon=4, signal=signal)
    message = r"2 parameters that the optimizer does not have .*: head\.weight, head\.bias\. .*requires_grad_"
    with pytest.raises(ValueError, match=message):
        if mixed:
            with mixer.batch(LABELS) as batch:
                batch.weighted_loss(row_losses(model, rows())).backward()
        else:
            with mixer.domain("a"):
                row_losses(model, rows()).mean().backward()
    assert model.head.weight.grad is None


def test_frozen_tied_and_unused_parameters_are_accepted() -> None:
    model = TiedHead()
    optimizer = torch.optim.SGD([*model.body.parameters(), *model.head.parameters()], lr=0.1)
    mixer = mixwell.Mixer(model, optimizer, NAMES, horizon=4)
    for name in NAMES:
        with mixer.domain(name):
            row_losses(model, rows()).mean().backward()
    mixer.step()


def test_several_optimizers_are_refused() -> None:
    model = two_layer(0)
    first, *rest = model.parameters()
    both = [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(rest)]
    for given in (both, tuple(both), {"first": both[0], "rest": both[1]}):
        with pytest.raises(ValueError, match=r"one optimizer, got 2 \(SGD, AdamW\): .* parameter groups"):
            mixwell.Mixer(model, given, NAMES, horizon=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"must be a torch\.optim\.Optimizer, got str"):
        mixwell.Mixer(model, "sgd", NAMES, horizon=2)  # pyright: ignore[reportArgumentType]


def test_a_grad_scaler_is_refused() -> None:
    model = network()
    mixer, _ = make(model)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match=r"inside a block.*bfloat16"), mixer.domain("a"):
        scaler.scale(row_losses(model, rows()).mean()).backward()
    with pytest.raises(RuntimeError, match=r"inside a block.*bfloat16"), mixer.batch(LABELS) as batch:
        scaler.scale(batch.weighted_loss(row_losses(model, rows()))).backward()
    for call in (scaler.step, scaler.unscale_):
        scaler.scale(torch.ones(()))  # outside of the blocks it is not the mixer's business
        with pytest.raises(AttributeError, match=r"no param_groups.*bfloat16.*mixer\.step\(\)"):
            call(mixer)
    assert not hasattr(mixer, "param_groups")
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    with mixer.domain("a"):
        disabled.scale(row_losses(model, rows()).mean()).backward()
