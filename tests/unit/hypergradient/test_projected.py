"""Projected traces from mixed batches, against dense traces of one batch per domain."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mixwell
from helpers.toy_problems import labeled_batch
from mixwell import Hypergradient, Mixer, ProjectedTraces
from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.parameters import Parameters
from mixwell.reference.comparison import tangent_cosine
from mixwell.training.models.gpt import Gpt

DOMAINS = ["a", "b", "c"]
LABELS = torch.tensor([0, 0, 1, 2, 2, 2])
SHUFFLED = torch.tensor([2, 0, 1, 2, 0, 2])
EXACT = 10_000
Batch = tuple[Tensor, Tensor]


class Tokens(nn.Module):
    """Embedding, norms, a shared layer that is used twice, an activation with a parameter, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=3)
        self.first = nn.LayerNorm(8)
        self.shared = nn.Linear(8, 8)
        self.second = nn.RMSNorm(8)
        self.bend = nn.PReLU(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens))
        x = x + torch.tanh(self.shared(x))
        x = x + self.bend(self.shared(self.second(x)).flatten(0, 1)).view_as(x)  # places flattened into rows
        return self.head(x)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2, padding=1, dilation=1),
            nn.Tanh(),
            nn.Conv2d(6, 4, (2, 3), dilation=(1, 2), padding="valid", bias=False),
            nn.Tanh(),
            nn.Conv2d(4, 4, 1, groups=2),
            nn.Flatten(),
            nn.Linear(24, 5),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.parts(images)


class Signals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv1d(2, 7, 3, padding=1)
        self.out = nn.Linear(7, 5)

    def forward(self, signals: Tensor) -> Tensor:
        return self.out(torch.tanh(self.wide(signals)).mean(dim=-1))


class Conv1D(nn.Module):
    """As transformers has it: a linear layer with the weights the other way round."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.3)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class Gpt2Like(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Conv1D(9, 4), nn.ReLU(), Conv1D(3, 9))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


class LikeRMSNorm(nn.Module):
    """As transformers has them: with names of their own, and for some models around one."""

    def __init__(self, width: int, around: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.variance_epsilon = 1e-3
        self._around = around

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self._around + self.weight) * (x * scale)


class LlamaLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.Linear(4, 9), LikeRMSNorm(9, 0.0), nn.SiLU(), LikeRMSNorm(9, 1.0), nn.Linear(9, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


def tokens(rows: int) -> Batch:
    drawn = torch.randint(0, 11, (rows, 6))
    return drawn[:, :-1], drawn[:, 1:]


def images(rows: int) -> Batch:
    return torch.randn(rows, 3, 8, 12).double(), torch.randint(0, 5, (rows,))


def signals(rows: int) -> Batch:
    return torch.randn(rows, 2, 9).double(), torch.randint(0, 5, (rows,))


def vectors(rows: int) -> Batch:
    return torch.randn(rows, 7, 4).double(), torch.randint(0, 3, (rows, 7))


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "tokens": (Tokens, tokens),
    "images": (Images, images),
    "signals": (Signals, signals),
    "conv1d of transformers": (Gpt2Like, vectors),
    "norms of transformers": (LlamaLike, vectors),
    "gpt": (lambda: Gpt(11, context=8, layers=2, heads=2, width=8), tokens),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
}


def row_losses(model: nn.Module, batch: Batch) -> Tensor:
    scores, wanted = model(batch[0]), batch[1]
    losses = functional.cross_entropy(scores.flatten(0, -2), wanted.flatten(), reduction="none")
    return losses.view(wanted.shape).flatten(1).mean(dim=1) if wanted.dim() > 1 else losses


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return row_losses(model, batch).mean()


def steps_of(draw: Callable[[int], Batch], count: int) -> tuple[list[Batch], Batch]:
    torch.manual_seed(1)
    return [draw(len(LABELS)) for _ in range(count)], draw(5)


def by_domain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Batch],
    validation: Batch,
    labels: Tensor,
    **options,
) -> Mixer:
    """The reference: dense traces, one backward pass per domain."""
    mixer = Mixer(model, optimizer, DOMAINS, horizon=len(steps), update=1.0, **options)
    for x, y in steps:
        for place, name in enumerate(DOMAINS):
            with mixer.domain(name):
                mean_loss(model, (x[labels == place], y[labels == place])).backward()
        mixer.step()
        if mixer.validation_due:
            finish(mixer, model, validation)
    return mixer


def mixed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Batch],
    validation: Batch,
    labels: Tensor,
    traces: mixwell.Traces | None = None,
    **options,
) -> Mixer:
    signal = Hypergradient(traces=traces or ProjectedTraces(EXACT))
    mixer = Mixer(model, optimizer, DOMAINS, horizon=len(steps), update=1.0, signal=signal, **options)
    for batch in steps:
        with mixer.batch(labels) as rows:
            rows.weighted_loss(row_losses(model, batch)).backward()
        mixer.step()
        if mixer.validation_due:
            finish(mixer, model, validation)
    return mixer


def finish(mixer: Mixer, model: nn.Module, validation: Batch) -> None:
    with mixer.validation() as scope:
        loss = mean_loss(model, validation)
        loss.backward()
        scope.record_loss(loss)


def scores(mixer: Mixer) -> np.ndarray:
    return np.array(list(mixer.rounds[-1].scores.values()))


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("labels", [LABELS, SHUFFLED], ids=["sorted", "shuffled"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    "make_traces", [lambda: ProjectedTraces(EXACT), mixwell.DenseTraces], ids=["projected", "dense"]
)
def test_a_mixed_batch_gives_what_one_batch_per_domain_gives(
    make_traces, problem: str, kind: str, labels: Tensor
) -> None:
    make, draw = PROBLEMS[problem]
    model = make().double()
    twin = copy.deepcopy(model)
    steps, validation = steps_of(draw, 4)
    weights = {"a": 0.5, "b": 0.2, "c": 0.3}
    left = by_domain(model, OPTIMIZERS[kind](model.parameters()), steps, validation, labels, weights=weights)
    optimizer = OPTIMIZERS[kind](twin.parameters())
    right = mixed(twin, optimizer, steps, validation, labels, make_traces(), weights=weights)
    np.testing.assert_allclose(scores(right), scores(left), rtol=1e-9)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_dense_traces_of_adam_from_mixed_batches() -> None:
    model = Tokens().double()
    twin = copy.deepcopy(model)
    steps, validation = steps_of(tokens, 5)
    left = by_domain(model, torch.optim.AdamW(model.parameters(), lr=0.01), steps, validation, SHUFFLED)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    right = mixed(twin, optimizer, steps, validation, SHUFFLED, mixwell.DenseTraces())
    np.testing.assert_allclose(scores(right), scores(left), rtol=1e-6)


def test_linear_layers_with_autocast_frozen_parts_and_blocks() -> None:
    """Wider than one block of the fused linear layer; under autocast gradients are of that precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 400), nn.Tanh(), nn.Linear(400, 3))
    model[2].bias.requires_grad_(False)
    steps = [(torch.randn(6, 700), torch.randint(0, 3, (6,))) for _ in range(3)]
    results = []
    for feed, precision in (
        (by_domain, None),
        (mixed, None),
        (by_domain, torch.bfloat16),
        (mixed, torch.bfloat16),
    ):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1)
        options = {"traces": mixwell.DenseTraces()} if feed is mixed else {}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is not None):
            results.append(scores(feed(twin, optimizer, steps, steps[0], LABELS, **options)))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)
    np.testing.assert_allclose(results[3], results[2], rtol=0.03, atol=0.01 * abs(results[2]).max())


def test_clipping_is_that_of_the_step_itself() -> None:
    """With the clipping factors of all steps known, the trace is ``sum_t eta c_t g_t`` (gamma = 0)."""
    model = Signals().double()
    steps, validation = steps_of(signals, 3)
    start = copy.deepcopy(model.state_dict())
    mixer = Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DOMAINS,
        horizon=3,
        signal=Hypergradient(0.0, ProjectedTraces(EXACT), points=1),
        update=1.0,
        clip_norm=0.3,
    )
    run(mixer, model, steps)
    finish(mixer, model, validation)

    model.load_state_dict(start)
    parameters = list(model.parameters())
    traces = torch.zeros(3, sum(p.numel() for p in parameters), dtype=torch.float64)
    for batch in steps:
        losses = row_losses(model, batch)
        own = [
            flat(torch.autograd.grad(losses[torch.eq(LABELS, j)].mean(), parameters, retain_graph=True))
            for j in range(3)
        ]
        combined = torch.stack(own).mean(dim=0)
        clip = min(1.0, 0.3 / (float(combined.norm()) + 1e-6))
        traces += 0.1 * clip * torch.stack(own)
        with torch.no_grad():
            for p, g in zip(parameters, combined.split([p.numel() for p in parameters]), strict=True):
                p -= 0.1 * clip * g.view_as(p)
    wanted = flat(torch.autograd.grad(mean_loss(model, validation), parameters))
    np.testing.assert_allclose(scores(mixer), -(traces @ wanted).numpy(), rtol=1e-6)


def test_adam_preconditions_the_validation_gradient_by_the_last_second_moments() -> None:
    """``h_j = -<P_T v, sum_t rate_t g_jt>``, with gamma = 0 and no momentum."""
    model = Signals().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.0, 0.9), weight_decay=0.0)
    steps, validation = steps_of(signals, 4)
    signal = Hypergradient(0.0, ProjectedTraces(EXACT), points=1)
    mixer = Mixer(model, optimizer, DOMAINS, horizon=4, signal=signal, update=1.0)
    parameters = list(model.parameters())
    traces = torch.zeros(3, sum(p.numel() for p in parameters), dtype=torch.float64)
    for t, batch in enumerate(steps):
        losses = row_losses(model, batch)
        for j in range(3):
            if t:  # the first step of Adam is lr times a sign, which has no derivative
                own = torch.autograd.grad(losses[torch.eq(LABELS, j)].mean(), parameters, retain_graph=True)
                traces[j] += 0.01 * flat(own)
        run(mixer, model, [batch])
    second = flat([optimizer.state[p]["exp_avg_sq"] for p in parameters]) / (1 - 0.9**4)
    wanted = flat(torch.autograd.grad(mean_loss(model, validation), parameters))
    floors = []
    for part in second.split([p.numel() for p in parameters]):
        floors.append((part.mean().sqrt() / 10).expand(len(part)))
    precondition = 1 / (torch.maximum(second.sqrt(), torch.cat(floors)) + 1e-8)
    finish(mixer, model, validation)
    np.testing.assert_allclose(scores(mixer), -(traces @ (precondition * wanted)).numpy(), rtol=1e-6)


def test_projections_are_unbiased_and_better_with_rank() -> None:
    model = Gpt(11, context=8, layers=1, heads=2, width=24).double()
    steps, validation = steps_of(tokens, 3)
    start = copy.deepcopy(model)
    exact = by_domain(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, validation, LABELS)

    def estimates(rank: int) -> np.ndarray:
        found = []
        for seed in range(60):
            twin = copy.deepcopy(start)
            traces = ProjectedTraces(rank, seed=seed)
            optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
            found.append(scores(mixed(twin, optimizer, steps, validation, LABELS, traces)))
        return np.array(found)

    small, large = estimates(2), estimates(8)
    for found in (small, large):
        error = found.std(axis=0) / np.sqrt(len(found))
        assert (abs(found.mean(axis=0) - scores(exact)) < 4 * error).all()
    assert (large.std(axis=0) < small.std(axis=0) / 1.5).all()


def test_projections_are_drawn_anew_for_every_round_and_for_every_parameter() -> None:
    model = nn.Linear(40, 40)
    traces = ProjectedTraces(4)
    Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DOMAINS,
        horizon=2,
        signal=Hypergradient(traces=traces),
    )
    first = traces._projections.each[0].matrix("inputs", torch.float32)
    assert first is not None
    first = first.clone()
    traces.reset(1)
    second = traces._projections.each[0].matrix("inputs", torch.float32)
    assert second is not None
    assert not torch.equal(first, second)
    assert not torch.equal(second, traces._projections.each[0].matrix("outputs", torch.float32))
    traces.reset(0)
    assert torch.equal(first, traces._projections.each[0].matrix("inputs", torch.float32))


def test_leading_directions_of_the_last_validation_gradient_are_exact() -> None:
    """Where the validation gradient is of low rank and stays the same, its inner products have no error."""
    torch.manual_seed(0)
    rank, size = 8, 60
    parameter = nn.Parameter(torch.zeros(size, size, dtype=torch.float64))
    parameters = Parameters(("x",), (parameter,), (0,))
    wanted = torch.randn(size, 3).double() @ torch.randn(3, size).double()
    other = torch.randn(size, size).double()
    errors = []
    for aligned in (False, True):
        found = []
        for seed in range(100):
            projections = Projections(parameters, rank, seed)
            projections.align([wanted if aligned else None])
            projections.resample(0)
            found.append(float(projections.project([wanted]) @ projections.project([other])))
        errors.append(np.array(found) - float((wanted * other).sum()))
    assert abs(errors[1]).max() < 1e-9 * abs(errors[0]).max()
    assert abs(errors[0].mean()) < 4 * errors[0].std() / 10


def test_directions_that_are_exact_leave_the_rest_unbiased() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(30, 40, dtype=torch.float64))
    parameters = Parameters(("x",), (parameter,), (0,))
    left, right, align = (torch.randn(30, 40).double() for _ in range(3))
    found = []
    for seed in range(400):
        projections = Projections(parameters, 6, seed)
        projections.align([align])
        projections.resample(0)
        found.append(float(projections.project([left]) @ projections.project([right])))
    assert abs(np.mean(found) - float((left * right).sum())) < 4 * np.std(found) / 20


@pytest.mark.parametrize("rank", [1, 2, 3, 7])
def test_any_rank_over_several_rounds(rank: int) -> None:
    model = Images()
    mixer = new_mixer(model, traces=ProjectedTraces(rank))
    for _ in range(3):
        run(mixer, model, [(x.float(), y) for x, y in steps_of(images, 2)[0]])
        finish(mixer, model, (torch.randn(5, 3, 8, 12), torch.randint(0, 5, (5,))))
        assert np.isfinite(scores(mixer)).all()


def test_given_one_batch_per_domain_the_result_is_the_same() -> None:
    model = Tokens().double()
    twin = copy.deepcopy(model)
    steps, validation = steps_of(tokens, 3)
    left = by_domain(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        steps,
        validation,
        LABELS,
        signal=Hypergradient(traces=ProjectedTraces(3)),
    )
    right = mixed(
        twin, torch.optim.SGD(twin.parameters(), lr=0.1), steps, validation, LABELS, ProjectedTraces(3)
    )
    np.testing.assert_allclose(scores(right), scores(left), rtol=1e-9)


def test_micro_batches_with_the_counts_of_the_step() -> None:
    model = Tokens().double()
    twin = copy.deepcopy(model)
    steps, validation = steps_of(tokens, 3)
    left = mixed(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, validation, LABELS)
    mixer = Mixer(
        twin,
        torch.optim.SGD(twin.parameters(), lr=0.1),
        DOMAINS,
        horizon=3,
        update=1.0,
        signal=Hypergradient(traces=ProjectedTraces(EXACT)),
    )
    for x, y in steps:
        for part in (slice(0, 3), slice(3, 6)):
            with mixer.batch(LABELS[part], expected_counts={"a": 2, "b": 1, "c": 3}) as batch:
                batch.weighted_loss(row_losses(twin, (x[part], y[part]))).backward()
        mixer.step()
        if mixer.validation_due:
            finish(mixer, twin, validation)
    np.testing.assert_allclose(scores(mixer), scores(left), rtol=1e-9)
    assert mixer.rounds[0].losses == pytest.approx(left.rounds[0].losses)


def test_rows_drawn_by_the_weights_are_an_ordinary_mean() -> None:
    model = Signals().double()
    mixer = new_mixer(model, weights={"a": 0.5, "b": 0.25, "c": 0.25})
    batch = signals(6)
    expected = {name: 6 * weight for name, weight in mixer.weights.last.items()}
    with mixer.batch(["a", "a", "a", "a", "b", "a"], expected_counts=expected) as rows:
        losses = row_losses(model, batch)
        loss = rows.weighted_loss(losses)
        assert loss.item() == pytest.approx(losses.mean().item())
        loss.backward()
    mixer.step()


def test_losses_are_divided_by_the_probability_of_a_domain() -> None:
    model = Signals().double()
    mixer = new_mixer(model)
    with mixer.batch(labeled_batch("aab", DOMAINS, {"c": 0.25})) as rows:
        losses = row_losses(model, signals(3))
        assert rows.weighted_loss(losses).item() == pytest.approx(
            (losses[:2].mean() / 3 + losses[2] / 3).item()
        )
        losses.sum().backward()
    mixer.step()
    with mixer.batch(labeled_batch("abcc", DOMAINS, {"c": 0.25})) as rows:
        losses = row_losses(model, signals(4))
        wanted = losses[0] / 3 + losses[1] / 3 + 4 * losses[2:].mean() / 3
        assert rows.weighted_loss(losses).item() == pytest.approx(wanted.item())
        losses.sum().backward()


# -------------------------------------------------------------------------------- ways to compute


def run(mixer: Mixer, model: nn.Module, steps: Sequence[Batch], validation: Batch | None = None) -> None:
    """Train on mixed batches; with the validation gradients that are due, where there is a batch for them."""
    for batch in steps:
        with mixer.batch(LABELS) as rows:
            rows.weighted_loss(row_losses(model, batch)).backward()
        mixer.step()
        if validation is not None and mixer.validation_due:
            finish(mixer, model, validation)


def new_mixer(
    model: nn.Module,
    *,
    traces: mixwell.Traces | None = None,
    horizon: int = 2,
    points: int = 1,
    **options,
) -> Mixer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    signal = Hypergradient(traces=traces or ProjectedTraces(EXACT), points=points)
    return Mixer(model, optimizer, DOMAINS, horizon=horizon, signal=signal, update=1.0, **options)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


class Checkpointed(nn.Module):
    def __init__(self, inner: Tokens, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.embedding(x)
        body = nn.Sequential(self.inner.first, self.inner.shared, nn.Tanh(), self.inner.second)
        return self.inner.head(checkpoint(body, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    inner = Tokens().double()
    del inner.bend
    plain, checked = Straight(copy.deepcopy(inner)), Checkpointed(inner, reentrant=reentrant)
    steps, validation = steps_of(tokens, 3)
    left = mixed(plain, torch.optim.SGD(plain.parameters(), lr=0.1), steps, validation, LABELS)
    optimizer = torch.optim.SGD(checked.parameters(), lr=0.1)
    if reentrant:
        with pytest.warns(UserWarning, match="reentrant"):
            right = mixed(checked, optimizer, steps, validation, LABELS)
    else:
        right = mixed(checked, optimizer, steps, validation, LABELS)
    np.testing.assert_allclose(scores(right), scores(left), rtol=1e-9)


class Straight(Checkpointed):
    def __init__(self, inner: Tokens) -> None:
        super().__init__(inner, reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.embedding(x)
        return self.inner.head(self.inner.second(torch.tanh(self.inner.shared(self.inner.first(x)))))


def test_autocast_to_bfloat16() -> None:
    torch.manual_seed(0)
    model = Gpt(64, context=16, layers=2, heads=2, width=64)
    start = copy.deepcopy(model)
    labels = torch.arange(3).repeat_interleave(8)
    drawn = [torch.randint(20 * j, 20 * j + 20, (8, 17)) for j in range(3)]
    steps = [(t[:, :-1], t[:, 1:]) for t in [torch.cat(drawn)] * 5]
    validation = (drawn[1][:, :-1], drawn[1][:, 1:])
    left = by_domain(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, validation, labels)
    found = []
    for rank in (EXACT, 16):
        twin = copy.deepcopy(start)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
            right = mixed(twin, optimizer, steps, validation, labels, ProjectedTraces(rank))
        found.append(tangent_cosine(scores(right), scores(left)))
    assert found[0] > 0.99
    assert found[1] > 0.98


@pytest.mark.parametrize("traces", [lambda: ProjectedTraces(EXACT), mixwell.DenseTraces])
def test_a_compiled_model_is_told_apart_as_it_is(traces) -> None:
    # Hooks break its graph, so that it is compiled in parts.
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Gpt(11, context=8, layers=2, heads=2, width=8)
    twin = copy.deepcopy(model)
    steps, validation = steps_of(tokens, 4)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        for one, seen in ((model, model), (twin, torch.compile(twin, backend="aot_eager"))):
            assert isinstance(seen, nn.Module)
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            results.append(scores(mixed(seen, optimizer, steps, validation, SHUFFLED, traces())))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)


def test_a_model_that_is_run_outside_the_block() -> None:
    model = nn.Linear(4, 3)
    mixer = new_mixer(model, traces=ProjectedTraces(2))
    losses = model(torch.randn(6, 4)).square().mean(1)
    with pytest.raises(ValueError, match=r"no layer of the model was run: call it inside `with mixer.batch"):
        with mixer.batch(LABELS) as batch:
            batch.weighted_loss(losses).backward()


def test_a_compiled_model_that_was_run_before_hooks_were_there() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 3)), backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    x = torch.randn(6, 4)
    compiled(x)
    mixer = new_mixer(compiled, traces=ProjectedTraces(2))
    with pytest.raises(ValueError, match="If it is compiled it must not have been run before"):
        with mixer.batch(LABELS) as batch:
            batch.weighted_loss(compiled(x).square().mean(1)).backward()


def test_frozen_parameters_and_warm_up() -> None:
    model = Tokens().double()
    model.shared.weight.requires_grad_(False)
    model.first.weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    steps, validation = steps_of(tokens, 4)
    results = []
    for one, feed in ((model, "domain"), (twin, "batch")):
        trained = [p for p in one.parameters() if p.requires_grad]
        signal = Hypergradient(traces=ProjectedTraces(EXACT) if feed == "batch" else None)
        mixer = Mixer(
            one, torch.optim.SGD(trained, lr=0.1), DOMAINS, horizon=3, signal=signal, update=1.0, warmup=1
        )
        for x, y in steps:
            if feed == "batch":
                run(mixer, one, [(x, y)], validation)
                continue
            for place, name in enumerate(DOMAINS):
                with mixer.domain(name):
                    mean_loss(one, (x[torch.eq(LABELS, place)], y[torch.eq(LABELS, place)])).backward()
            mixer.step()
            if mixer.validation_due:
                finish(mixer, one, validation)
        results.append(scores(mixer))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9)


def test_subset_of_the_parameters() -> None:
    model = Tokens().double()
    twin = copy.deepcopy(model)
    steps, validation = steps_of(tokens, 3)
    select = ["shared.*", "second.weight"]
    left = by_domain(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        steps,
        validation,
        LABELS,
        signal=Hypergradient(traces=mixwell.DenseTraces(only=select)),
    )
    right = mixed(
        twin,
        torch.optim.SGD(twin.parameters(), lr=0.1),
        steps,
        validation,
        LABELS,
        ProjectedTraces(EXACT, only=select),
    )
    np.testing.assert_allclose(scores(right), scores(left), rtol=1e-9)


@pytest.mark.parametrize(
    ("horizon", "rounds", "stop"), [(5, 1, 3), (5, 1, 4), (12, 0, 1), (12, 0, 5), (12, 0, 9)]
)
def test_resumed_in_mid_round_bit_for_bit(tmp_path, horizon, rounds, stop) -> None:
    steps, validation = steps_of(tokens, horizon)

    def start() -> tuple[nn.Module, Mixer]:
        torch.manual_seed(0)
        model = Tokens()
        return model, new_mixer(model, traces=ProjectedTraces(4), horizon=horizon, points=8)

    def whole_rounds(count: int) -> tuple[nn.Module, Mixer]:
        model, mixer = start()
        for _ in range(count):
            run(mixer, model, steps, validation)
        return model, mixer

    _, undisturbed = whole_rounds(rounds + 1)
    first, stopped = whole_rounds(rounds)
    run(stopped, first, steps[:stop], validation)
    stopped.save(tmp_path / "mixer.safetensors")
    second, resumed = start()
    second.load_state_dict(first.state_dict())
    resumed.load(tmp_path / "mixer.safetensors")
    run(resumed, second, steps[stop:], validation)
    assert resumed.rounds[-1].points > 1
    assert resumed.rounds == undisturbed.rounds


def test_the_first_step_of_a_long_round_only_says_which_directions_are_exact() -> None:
    # All gradients have rank one and the same directions, so that nothing is random from the second step on.
    x, y = torch.randn(1, 40).expand(len(LABELS), 40).double(), torch.rand(len(LABELS), 30).double()
    found = []
    for traces, horizon, warmup in ((ProjectedTraces(4), 11, 0), (mixwell.DenseTraces(), 10, 1)):
        torch.manual_seed(0)
        model = nn.Linear(40, 30, bias=False).double()
        mixer = new_mixer(model, traces=traces, horizon=horizon, warmup=warmup)
        for _ in range(11):
            with mixer.batch(LABELS) as batch:
                batch.weighted_loss(y.square().sum(1) * model(x).mean(1)).backward()
            mixer.step()
        with mixer.validation():
            model(x).mean().backward()
        found.append(scores(mixer))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9)


def test_fixed_weights_from_mixed_batches() -> None:
    model = Tokens().double()
    mixer = Mixer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DOMAINS,
        horizon=2,
        signal=mixwell.ConstantWeights(),
        update=1.0,
    )
    steps, _ = steps_of(tokens, 2)
    run(mixer, model, steps)
    assert len(mixer.rounds) == 1
    assert mixer.nbytes == 0


def test_memory_does_not_hold_a_copy_of_the_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    size = sum(p.nbytes for p in model.parameters())
    mixer = new_mixer(model, traces=ProjectedTraces(8))
    batch = torch.randn(6, 256)
    with mixer.batch(LABELS) as rows:
        rows.weighted_loss(model(batch).square().mean(dim=1)).backward()
    mixer.step()
    assert mixer.nbytes < 0.15 * size


# -------------------------------------------------------------------------------- what hooks cannot see


class Loose(nn.Module):
    """Two parameters that are used outside of any layer: a positional table, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(5, 8) * 0.1)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.position
        return functional.linear(torch.tanh(self.linear(x)), self.embedding.weight)


@pytest.mark.parametrize("check", [True, False])
def test_parameters_out_of_sight_are_named_and_left_out(check: bool) -> None:
    model = Loose().double()
    twin = copy.deepcopy(model)
    steps, validation = steps_of(tokens, 3)
    left = by_domain(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        steps,
        validation,
        LABELS,
        signal=Hypergradient(traces=mixwell.DenseTraces(only=["linear.*"])),
    )
    traces = ProjectedTraces(EXACT, check=check)
    with pytest.warns(UserWarning, match="of the parameters are") as told:
        right = mixed(twin, torch.optim.SGD(twin.parameters(), lr=0.1), steps, validation, LABELS, traces)
    np.testing.assert_allclose(scores(right), scores(left), rtol=1e-9)
    assert set(traces.unsupported) == {"embedding.weight", "position"}
    texts = [str(one.message) for one in told]
    assert len(texts) == 2
    assert "position (belongs to a Loose" in texts[0]
    assert "embedding.weight (is used outside" in texts[1]


@pytest.mark.parametrize(
    "traces",
    [ProjectedTraces(EXACT, unsupported="per_domain"), mixwell.DenseTraces()],
    ids=["projected", "dense"],
)
def test_parameters_out_of_sight_taken_by_one_pass_per_domain(traces: mixwell.Traces) -> None:
    model = Loose().double()
    twin = copy.deepcopy(model)
    steps, validation = steps_of(tokens, 3)
    left = by_domain(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, validation, LABELS)
    with pytest.warns(UserWarning, match="one more pass per domain"):
        right = mixed(twin, torch.optim.SGD(twin.parameters(), lr=0.1), steps, validation, LABELS, traces)
    np.testing.assert_allclose(scores(right), scores(left), rtol=1e-9)


class LengthFirst(nn.Module):
    """Has the places first and the rows second, as recurrent networks often do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.embedding(x.t()))).transpose(0, 1)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def test_rows_in_the_second_dimension_are_refused() -> None:
    model = LengthFirst()
    mixer = new_mixer(model)
    drawn = torch.randint(0, 11, (6, 7))
    with (
        pytest.raises(ValueError, match="rows of a batch are not independent in layer"),
        mixer.batch(LABELS) as rows,
    ):
        rows.weighted_loss(row_losses(model, (drawn[:, :-1], drawn[:, 1:])))


def test_rows_that_batch_norm_mixes_are_refused_unless_accepted() -> None:
    model = Normalized()
    mixer = new_mixer(model)
    batch = torch.randn(6, 4), torch.randint(0, 3, (6,))
    with (
        pytest.warns(UserWarning, match="belongs to a BatchNorm1d"),
        pytest.raises(ValueError, match=r"not independent in layer first .*BatchNorm"),
        mixer.batch(LABELS) as rows,
    ):
        rows.weighted_loss(row_losses(model, batch))
    assert all(p.grad is None for p in model.parameters())
    mixer = new_mixer(model, traces=ProjectedTraces(check=False))
    with pytest.warns(UserWarning, match=r"norm.weight \(belongs to a BatchNorm1d"):
        run(mixer, model, [batch])


def test_attention_of_pytorch_is_named() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embedding(x)
            return self.head(x + self.attention(x, x, x, need_weights=False)[0])

    model = Attends().double()
    traces = ProjectedTraces(EXACT, unsupported="per_domain")
    twin = copy.deepcopy(model)
    steps, validation = steps_of(tokens, 3)
    left = by_domain(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, validation, LABELS)
    with pytest.warns(UserWarning, match="of the parameters are") as told:
        right = mixed(twin, torch.optim.SGD(twin.parameters(), lr=0.1), steps, validation, LABELS, traces)
    assert "MultiheadAttention" in str(told[0].message)
    assert {name.split(".")[0] for name in traces.unsupported} == {"attention"}
    np.testing.assert_allclose(scores(right), scores(left), rtol=1e-9)


def test_a_model_without_supported_layers_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = Bare()
    mixer = new_mixer(model)
    with pytest.raises(ValueError, match="no layer of the model is supported"), mixer.batch(LABELS):
        pass


# -------------------------------------------------------------------------------- bad input


def test_the_model_is_left_as_it_was() -> None:
    model = Tokens()
    steps, _ = steps_of(tokens, 1)
    run(new_mixer(model), model, steps)
    assert not any(module._forward_hooks for module in model.modules())
    copy.deepcopy(model)


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_row_that_is_not_finite_names_its_domain(policy: str, where: str) -> None:
    model = Signals().double()
    mixer = new_mixer(model, on_nonfinite=policy)
    steps, validation = steps_of(signals, 3)
    run(mixer, model, steps[:1])
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
    finish(mixer, model, validation)
    assert np.isfinite(scores(mixer)).all()
    assert mixer.rounds[0].skipped == {"b": 1}


def test_a_row_that_is_not_finite_costs_dense_traces_the_round() -> None:
    model = Signals().double()
    mixer = new_mixer(model, traces=mixwell.DenseTraces(), on_nonfinite="skip", horizon=3)
    steps, validation = steps_of(signals, 3)
    run(mixer, model, steps[:1])
    before = flat(list(model.parameters()))
    with pytest.warns(UserWarning, match="non-finite gradient of parameter"), mixer.batch(LABELS) as rows:
        losses = row_losses(model, steps[1])
        losses.register_hook(lambda g: g * torch.tensor([1, 1, float("inf"), 1, 1, 1]))
        rows.weighted_loss(losses).backward()
    mixer.step()
    assert torch.equal(flat(list(model.parameters())), before)
    run(mixer, model, steps[2:])
    with pytest.warns(UserWarning, match="score of b overflowed"):
        finish(mixer, model, validation)
    assert mixer.rounds[0].new_weights == mixer.rounds[0].weights
    run(mixer, model, steps)
    finish(mixer, model, validation)
    assert np.isfinite(scores(mixer)).all()


def test_errors_for_people() -> None:
    model = Signals().double()
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
    carried = new_mixer(model, traces=mixwell.ForwardModeTraces())
    with (
        pytest.raises(ValueError, match=r"ForwardModeTraces\(\) cannot separate a mixed batch by domain"),
        carried.batch(LABELS),
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
