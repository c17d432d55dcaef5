"""Learning to Reweight (Ren et al. 2018): the published algorithm, by autograd, beside a real run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mixwell
from helpers.row_weighting import LR, NAMES, Batch, Run, copies, losses_at, mean_loss, network, row_losses
from mixwell import methods
from mixwell.hypergradient.parameters import Parameters
from mixwell.methods import MethodContext
from mixwell.signals.probe_derivatives import ProbeDerivatives
from mixwell.signals.probes import Probes, evaluation_mode, rows_of
from mixwell.signals.row_alignment import RowAlignment
from mixwell.simplex.updates import MirrorDescent, SoftmaxWeights
from mixwell.training.models.cnn import small_cnn
from mixwell.training.models.gpt import Gpt

# ----------------------------------------------------------------------------------------- the published rule


def published_weights(theta: list[Tensor], batch: Batch, validation: Batch) -> Tensor:
    """Algorithm 1, lines 4 to 11: a virtual step by eps = 0, and the gradient of the validation loss by eps."""
    eps = torch.zeros(len(batch[1]), dtype=torch.float64, requires_grad=True)
    training = (eps * losses_at(theta, batch)).sum()
    gradients = torch.autograd.grad(training, theta, create_graph=True)
    virtual = [p - LR * g for p, g in zip(theta, gradients, strict=True)]
    (by_eps,) = torch.autograd.grad(losses_at(virtual, validation).mean(), eps)
    raw = torch.clamp(-by_eps, min=0)
    return raw / raw.sum() if raw.sum() > 0 else raw


def row_gradients(theta: list[Tensor], batch: Batch) -> Tensor:
    losses = losses_at(theta, batch)
    rows = [torch.autograd.grad(one, theta, retain_graph=True) for one in losses]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def flat(theta: list[Tensor]) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in theta]).numpy()


def descend(theta: list[Tensor], loss: Tensor) -> list[Tensor]:
    gradients = torch.autograd.grad(loss, theta)
    return [(p - LR * g).detach().requires_grad_() for p, g in zip(theta, gradients, strict=True)]


@pytest.mark.parametrize(("rows", "weights"), [((4, 4, 4), None), ((2, 6, 4), [2, 6, 4])])
def test_every_step_matches_published_rule(rows: tuple[int, ...], weights: list[float] | None) -> None:
    run = Run(RowAlignment(), rows=rows, weights=weights)
    theta = copies(run.model)
    zeros = 0
    for k in range(8):
        batch, labels = run.batch(k)
        validation = run.aside.at(0) if k == 0 else run.validation.at(k - 1)
        chosen = published_weights(theta, batch, validation)
        zeros += int((chosen == 0).sum())
        loss = (chosen * losses_at(theta, batch)).sum()
        theta = descend(theta, loss)
        run.step()
        assert run.seen[-1] == pytest.approx(loss.item(), abs=1e-10)
        np.testing.assert_allclose(run.vector, flat(theta), atol=1e-10)
        got = {n: sum(float(w) for w, d in zip(chosen, labels, strict=True) if d == n) for n in NAMES}
        measured = run.mixer.rounds[-1].measured
        for name in NAMES:
            assert measured[f"share.{name}"] == pytest.approx(got[name], abs=1e-10)
        assert measured["rows_used"] == pytest.approx(float((chosen > 0).double().mean()))
        assert run.mixer.weights.history[0] == pytest.approx(run.mixer.weights.history[-1])
    assert 0 < zeros < 8 * sum(rows)  # some rows were left out, not all


def test_round_uses_validation_gradient_of_its_start() -> None:
    run = Run(RowAlignment(), horizon=3, weights=[1, 2, 3])
    theta = copies(run.model)
    measure = np.repeat([1 / 6, 2 / 6, 3 / 6], 4) / 4
    align, shares = torch.zeros(()), np.zeros(3)
    for k in range(9):
        if k % 3 == 0:
            validation = run.aside.at(0) if k == 0 else run.validation.at(k // 3 - 1)
            align = torch.cat(
                [g.flatten() for g in torch.autograd.grad(losses_at(theta, validation).mean(), theta)]
            )
            shares = np.zeros(3)
        batch, _ = run.batch(k)
        raw = (row_gradients(theta, batch) @ align).clamp(min=0).numpy() * measure
        chosen = raw / raw.sum()
        shares += chosen.reshape(3, 4).sum(axis=1) / 3
        loss = (torch.from_numpy(chosen) * losses_at(theta, batch)).sum()
        theta = descend(theta, loss)
        run.step()
        assert run.seen[-1] == pytest.approx(loss.item(), abs=1e-10)
        np.testing.assert_allclose(run.vector, flat(theta), atol=1e-10)
        if k % 3 == 2:
            measured = run.mixer.rounds[-1].measured
            np.testing.assert_allclose([measured[f"share.{n}"] for n in NAMES], shares, atol=1e-10)


def test_step_is_zero_if_no_row_helps() -> None:
    run = Run(RowAlignment())
    run.step()
    (x, y), labels = run.batch(1)
    worthless = published_weights(copies(run.model), (x, y), run.validation.at(0)) == 0
    assert worthless.sum() > 1
    batch = x[worthless], y[worthless]
    labels = [label for label, one in zip(labels, worthless.tolist(), strict=True) if one]
    before = run.vector
    run.probabilities = dict.fromkeys(NAMES, 0.5)
    run.step(batch, labels)
    np.testing.assert_array_equal(run.vector, before)
    assert run.mixer.rounds[-1].measured["rows_used"] == 0


# ----------------------------------------------------------------------------------------- domains


def test_domain_weight_is_mean_over_rows() -> None:
    run = Run(RowAlignment("domains"), SoftmaxWeights(), horizon=2, rows=(2, 6, 4), weights=[2, 1, 1])
    theta = copies(run.model)
    first, weights = np.array([0.5, 0.25, 0.25]), np.array([0.5, 0.25, 0.25])
    counts = np.array([2, 6, 4])
    align, shares = torch.zeros(()), np.zeros(3)
    for k in range(6):
        if k % 2 == 0:
            validation = run.aside.at(0) if k == 0 else run.validation.at(k // 2 - 1)
            gradient = torch.autograd.grad(losses_at(theta, validation).mean(), theta)
            align = torch.cat([g.flatten() for g in gradient])
            shares = np.zeros(3)
        batch, _ = run.batch(k)
        raw = (row_gradients(theta, batch) @ align).clamp(min=0).numpy()
        means = np.array([part.mean() for part in np.split(raw, np.cumsum(counts)[:-1])])
        shares += first * means / (first * means).sum()
        # No row is weighted: the step is that of the domains' weights.
        loss = (torch.from_numpy(np.repeat(weights / counts, counts)) * losses_at(theta, batch)).sum()
        theta = descend(theta, loss)
        run.step()
        np.testing.assert_allclose(run.vector, flat(theta), atol=1e-10)
        if k % 2 == 1:
            weights = shares / shares.sum()
            np.testing.assert_allclose(list(run.mixer.weights.last.values()), weights, atol=1e-10)
    assert weights.max() > 0.6  # it did choose


def test_permuted_and_duplicate_domains() -> None:
    def final(**settings: Any) -> dict[str, float]:
        return Run(RowAlignment("domains"), SoftmaxWeights(), horizon=2, **settings).go(6).mixer.weights.last

    plain = final()
    assert final(names=("noisy", "clean", "turned")) == pytest.approx(plain, rel=1e-9)
    doubled = final(
        names=("clean", "turned", "noisy", "copy"),
        rows=(4, 4, 4, 4),
        sources={"copy": "turned"},
        weights=[2, 1, 2, 1],
    )
    assert doubled["turned"] == pytest.approx(doubled["copy"], rel=1e-9)
    assert doubled["turned"] + doubled["copy"] == pytest.approx(plain["turned"], rel=1e-9)
    assert doubled["clean"] == pytest.approx(plain["clean"], rel=1e-9)


def test_absent_domain_keeps_mean_and_zeros_keep_weights() -> None:
    run = Run(RowAlignment("domains"), SoftmaxWeights(), probabilities=dict.fromkeys(NAMES, 0.5))
    run.step()
    means = run.signal.state()[1]["means"].numpy().copy()
    for _ in range(2):
        batch, labels = run.batch(run.mixer.steps_done, absent=["turned"])
        run.step(batch, labels)
        new = run.signal.state()[1]["means"].numpy().copy()
        assert new[1] == means[1]
        assert new[0] != means[0]
        means = new
        np.testing.assert_allclose(list(run.mixer.weights.last.values()), means / means.sum(), rtol=1e-12)
    run.signal._sums[:] = [[0, 0, 0], [0, 0, 0], [4, 4, 4]]  # a round of rows of which none helped
    before = run.mixer.weights.values
    scores = run.signal.scores(None)
    assert scores is not None
    np.testing.assert_allclose(np.exp(-scores), run.signal._weights)
    np.testing.assert_allclose(run.signal._weights, before)


# ----------------------------------------------------------------------------------------- around it


@pytest.mark.parametrize("level", ["rows", "domains"])
@pytest.mark.parametrize("stop", [1, 4, 6])
def test_resume_is_bit_for_bit(level: Any, stop: int) -> None:
    def fresh() -> Run:
        return Run(RowAlignment(level), SoftmaxWeights() if level == "domains" else 1.0, horizon=3)

    whole = fresh().go(8)
    first, second = fresh().go(stop), fresh()
    second.take_over(first)
    second.go(8 - stop)
    np.testing.assert_array_equal(second.vector, whole.vector)
    np.testing.assert_array_equal(second.mixer.weights.history, whole.mixer.weights.history)
    assert second.mixer.rounds == whole.mixer.rounds


def test_each_micro_batch_is_normalized() -> None:
    run = Run(RowAlignment(), rows=(4, 4, 4))
    theta = copies(run.model)
    batch, labels = run.batch(0)
    halves = [[i for i in range(12) if i % 4 // 2 == part] for part in (0, 1)]
    for half in halves:
        rows = batch[0][half], batch[1][half]
        own = [labels[i] for i in half]
        with run.mixer.batch(own, expected_counts=dict.fromkeys(NAMES, 4.0)) as part:
            part.weighted_loss(row_losses(run.model, rows), data=rows).backward()
    run.mixer.step()
    loss = torch.zeros(())
    for half in halves:
        rows = batch[0][half], batch[1][half]
        loss = loss + (published_weights(theta, rows, run.aside.at(0)) * losses_at(theta, rows)).sum() / 2
    np.testing.assert_allclose(run.vector, flat(descend(theta, loss)), atol=1e-12)


def test_warmup_does_not_weight_rows() -> None:
    run = Run(RowAlignment(), warmup=2)
    theta = copies(run.model)
    for k in range(2):
        theta = descend(theta, losses_at(theta, run.batch(k)[0]).mean())
    run.go(2)
    np.testing.assert_allclose(run.vector, flat(theta), atol=1e-12)
    assert run.probes.spent == 0
    theta = descend(
        theta,
        (
            published_weights(theta, run.batch(2)[0], run.aside.at(0)) * losses_at(theta, run.batch(2)[0])
        ).sum(),
    )
    run.step()
    np.testing.assert_allclose(run.vector, flat(theta), atol=1e-10)


def test_nonfinite_step_leaves_no_state() -> None:
    run = Run(RowAlignment("domains"), SoftmaxWeights(), horizon=2, on_nonfinite="skip")
    (x, y), labels = run.batch(0)
    y[0] = math.inf
    with pytest.warns(UserWarning, match="non-finite"):
        run.step((x, y), labels)
    run.step()
    assert np.isfinite(list(run.mixer.rounds[-1].measured.values())).all()
    assert run.mixer.skipped


def test_compute_matches_planned_cost() -> None:
    run = Run(RowAlignment(), rows=(2, 2, 2), probe_rows=3).go(5)  # a step and a validation batch have 6 rows
    method = methods.find("learning-to-reweight")
    extra = method.extra(task("rows"))
    assert run.probes.spent == pytest.approx(6 * (extra.before + 5 * extra.per_step + 5 * extra.per_round))
    assert run.mixer.nbytes >= run.signal.nbytes == sum(p.nbytes for p in run.model.parameters())


def task(level: str) -> MethodContext:
    options = methods.find("learning-to-reweight").options.model_validate({"level": level})
    return MethodContext(
        domains=NAMES, rows=dict.fromkeys(NAMES, 100), batch_rows=12, steps=50, seed=3, options=options
    )


def test_recipe() -> None:
    method = methods.find("learning-to-reweight")
    rows, domains = method.recipe(task("rows")), method.recipe(task("domains"))
    assert repr(rows.signal) == "RowAlignment(level='rows')"
    assert isinstance(rows.update, MirrorDescent)
    assert isinstance(domains.update, SoftmaxWeights)
    assert repr(domains.signal) == "RowAlignment(level='domains')"
    assert method.horizon is not None
    assert method.horizon(500) == 1


def test_missing_requirements_raise() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    given = {name: (lambda: None) for name in NAMES}
    lacking = [
        (None, "validation=..., row_losses=..."),
        (Probes(model, mean_loss, given, lambda: None), "row_losses=..."),
        (Probes(model, mean_loss, given, None, row_losses), "validation=..."),
    ]
    for probes, named in lacking:
        with pytest.raises(ValueError, match=f"probes=Probes.*{named}"):
            mixwell.Mixer(model, optimizer, NAMES, horizon=1, signal=RowAlignment(), probes=probes)
    other = Probes(network(), mean_loss, given, lambda: None, row_losses)
    with pytest.raises(ValueError, match=r"0\.weight is not in it.* same model"):
        mixwell.Mixer(model, optimizer, NAMES, horizon=1, signal=RowAlignment(), probes=other)
    with pytest.raises(ValueError, match="'rows' or 'domains', got 'row'"):
        RowAlignment("row")  # type: ignore[arg-type]
    run = Run(RowAlignment())
    batch, labels = run.batch(0)
    with (
        pytest.raises(ValueError, match=r"weighted_loss\(losses, data=rows\)"),
        run.mixer.batch(labels) as rows,
    ):
        rows.weighted_loss(row_losses(run.model, batch))
    half = batch[0][:6], batch[1][:6]
    with pytest.raises(ValueError, match="12 losses and data of 6 rows"), run.mixer.batch(labels) as rows:
        rows.weighted_loss(row_losses(run.model, batch), data=half)
    with pytest.raises(ValueError, match=r"mixer\.batch, not mixer\.domain"), run.mixer.domain("clean"):
        mean_loss(run.model, run.feeds["clean"].at(0)).backward()
    with pytest.raises(ValueError, match="in use by another mixer"):
        Run(run.signal)


# ----------------------------------------------------------------------------------------- directional derivatives


class Squared(torch.autograd.Function):
    """Something that has no forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(x)  # type: ignore[return-value]


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def next_tokens(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)


def images(dtype: torch.dtype) -> Batch:
    return torch.randn(5, 1, 28, 28, dtype=dtype), torch.randint(0, 10, (5,))


def table(dtype: torch.dtype) -> Batch:
    return torch.randn(6, 4, dtype=dtype), torch.randint(0, 3, (6,))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


MODELS: dict[str, tuple[Any, Any, Any]] = {
    "gpt, tied": (
        lambda: Gpt(31, context=12, layers=2, heads=2, width=16),
        next_tokens,
        lambda _: torch.randint(0, 31, (5, 9)),
    ),
    "cnn": (lambda: small_cnn(4), classified, images),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        classified,
        table,
    ),
    "frozen": (frozen, classified, table),
    "no forward mode": (lambda: nn.Sequential(nn.Linear(4, 8), Square(), nn.Linear(8, 3)), classified, table),
}


def made(kind: str, dtype: torch.dtype) -> tuple[nn.Module, Any, Parameters, Probes, list[Tensor | None]]:
    model, losses, batch = MODELS[kind]
    model = model().to(dtype)
    data = batch(dtype)
    parameters = Parameters.of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    probes = Probes(model, lambda m, b: losses(m, b).mean(), {"a": lambda: data}, None, losses)
    direction = [torch.randn_like(p) if p.requires_grad else None for p in parameters.tensors]
    return model, data, parameters, probes, direction


def one_by_one(
    probes: Probes, data: Any, parameters: Parameters, direction: list[Tensor | None]
) -> tuple[Tensor, Tensor]:
    losses = probes.row_losses(probes.model, data)
    trained = [(p, v) for p, v in zip(parameters.tensors, direction, strict=True) if v is not None]
    products = [
        sum(
            (g * v).sum()
            for g, (_, v) in zip(
                torch.autograd.grad(loss, [p for p, _ in trained], retain_graph=True), trained, strict=True
            )
        )
        for loss in losses
    ]
    return losses.detach(), torch.stack(products)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", MODELS)
def test_row_derivatives_match_single_rows(kind: str, dtype: torch.dtype) -> None:
    model, data, parameters, probes, direction = made(kind, dtype)
    kept = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    derivatives = ProbeDerivatives(probes, parameters)
    losses, products = derivatives.along(data, direction)
    again = derivatives.along(data, direction)
    derivatives._forward_mode = False
    both = derivatives.along(data, direction)
    for before, after in zip(kept, model.buffers(), strict=True):
        assert torch.equal(before, after)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    expected, derived = one_by_one(probes, data, parameters, direction)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for found in ((losses, products), again, both):
        torch.testing.assert_close(found[0], expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found[1], derived, rtol=tolerance, atol=10 * tolerance)
        assert not found[1].requires_grad


def test_cost_of_derivatives_is_counted() -> None:
    for kind, cost in [("frozen", 1.0), ("no forward mode", 2.0)]:
        _, data, parameters, probes, direction = made(kind, torch.float64)
        derivatives = ProbeDerivatives(probes, parameters)
        derivatives.along(data, direction)
        before = probes.spent
        derivatives.along(data, direction)
        assert probes.spent - before == cost * rows_of(data)


def test_training_mode_of_each_module_is_restored() -> None:
    model, data, parameters, probes, _ = made("batch norm", torch.float64)
    model[1].eval()  # type: ignore[index]
    derivatives = ProbeDerivatives(probes, parameters)
    with evaluation_mode(probes.model):
        assert not any(m.training for m in model.modules())
        found = derivatives.mean_gradient(data)
    assert [m.training for m in model.modules()] == [True, True, False, True, True]
    model.eval()
    mean = probes.loss(model, data)
    for own, expected in zip(found, torch.autograd.grad(mean, list(parameters.tensors)), strict=True):
        torch.testing.assert_close(own, expected)


def test_probing_does_not_change_batch_norm_or_dropout() -> None:
    """Its buffers and its random stream; the rows' weights are those of dropout masks of their own."""

    def stepped(signal: Any) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        feed = Run(RowAlignment()).feeds["clean"]
        probes = Probes(model, mean_loss, {"a": lambda: feed.at(9)}, lambda: feed.at(8), row_losses)
        mixer = mixwell.Mixer(
            model, torch.optim.SGD(model.parameters(), lr=LR), ["a"], horizon=5, signal=signal, probes=probes
        )
        model.eval()  # in which validation gradients are taken
        (evaluated,) = torch.autograd.grad(mean_loss(model, feed.at(8)), model[0].weight)  # type: ignore[arg-type]
        model.train()
        with mixer.batch([0] * 4) as batch:
            batch.weighted_loss(row_losses(model, feed.at(0)), data=feed.at(0)).backward()
        mixer.step()
        if isinstance(signal, RowAlignment):
            kept = signal.state()[1]["validation.0"]
            torch.testing.assert_close(kept, evaluated, rtol=1e-12, atol=0)
        return model, torch.rand(3)

    torch.manual_seed(0)
    (looked, after), (plain, expected) = stepped(RowAlignment()), stepped(mixwell.signals.ConstantWeights())
    assert torch.equal(after, expected)
    for own, other in zip(looked.buffers(), plain.buffers(), strict=True):
        assert torch.equal(own, other)
    assert not torch.equal(looked[0].weight, plain[0].weight)  # type: ignore[index]
