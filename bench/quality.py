"""How close the cheap hypergradients are to that of dense traces of every step, over the same steps.

Every variant begins each round with the model and optimizer that the reference had there, and sees the same
rows; the rows of training and of validation are new in every step, as in a run. The weights stay uniform. The
settings are the defaults, so that one of every s steps is traced in a long round, where the reference traces all.
Printed is the tangent cosine with the reference over all draws of the data, of the first round and of the later
ones: the median and the worst. With --exact the reference is the exact hypergradient (curvature by Hessian
products, the optimizer's state differentiated), and the dense traces are compared with it; T up to 20 is
practical.

Settings were chosen on draws below 100; shown are those from 101 on.

    python bench/quality.py [--only gpt-adamw lora-adamw] [--horizons 5 20] [--draws 3] [--exact] [--again]
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from domains import TARGET, Batch, images, records, taught, text
from measure import Results, parser, say
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from workloads import adamw, cnn, gpt, mean_loss, mlp, row_losses, sgd

import mixwell
from mixwell.reference.comparison import tangent_cosine
from mixwell.simplex.rounds import validation_points, validation_rows

FIRST_DRAW = 101
REFERENCE = "dense, every step"
VARIANTS: dict[str, Callable[[], mixwell.Hypergradient]] = {
    "projected 32": lambda: mixwell.Hypergradient(traces=mixwell.ProjectedTraces(32)),
    "projected 16": lambda: mixwell.Hypergradient(traces=mixwell.ProjectedTraces(16)),
    "dense": lambda: mixwell.Hypergradient(traces=mixwell.DenseTraces()),
}


@dataclass(frozen=True)
class Task:
    """What is compared on.

    Args:
        model: makes it.
        optimizer: makes it.
        draw: ``draw(domain, rows, generator)`` makes a batch of a domain, or of the target.
        domains: the number m.
        rows: of each domain in a step.
        pretrained: steps on all domains before the parameters are those of ``adapted``.
        adapted: adds adapters, which alone are trained.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    draw: Callable[[int, int, torch.Generator], Batch]
    domains: int
    rows: int
    pretrained: int = 0
    adapted: Callable[[nn.Module], None] | None = None

    def batch(self, generator: torch.Generator) -> tuple[Batch, Tensor]:
        """The rows of a step in random order, and the domain of each."""
        labels = torch.arange(self.domains).repeat_interleave(self.rows)
        order = torch.randperm(len(labels), generator=generator)
        parts = [self.draw(domain, self.rows, generator) for domain in range(self.domains)]
        x, y = (torch.cat(every)[order] for every in zip(*parts, strict=True))
        return (x, y), labels[order]

    def build(self) -> tuple[nn.Module, Optimizer]:
        """The model, as it is before the first round, and its optimizer."""
        model = copy.deepcopy(self.start())
        return model, self.optimizer([p for p in model.parameters() if p.requires_grad])

    @cache  # noqa: B019
    def start(self) -> nn.Module:
        """The model before the first round."""
        model = self.model()
        if self.pretrained:
            generator = torch.Generator().manual_seed(0)
            optimizer = adamw(model.parameters())
            for _ in range(self.pretrained):
                optimizer.zero_grad()
                mean_loss(model, self.batch(generator)[0]).backward()
                optimizer.step()
        if self.adapted is not None:
            self.adapted(model)
        return model


class Recurrent(nn.Module):
    """A GRU that predicts the next byte."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(257, 64), nn.Linear(width, 257)
        self.cell = nn.GRU(64, width, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cell(self.embedding(tokens))[0])


def tabular() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


def add_lora(model: nn.Module) -> None:
    import peft

    layers = ["attention_in", "attention_out", "feed_in", "feed_out"]
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(peft.LoraConfig(r=8, lora_alpha=16, target_modules=layers), model)


SMALL_GPT = partial(gpt, width=96, layers=3, heads=3)
TEXT = partial(text, 64)
TASKS = {
    "gpt-adamw": Task(SMALL_GPT, adamw, TEXT, domains=4, rows=4),
    "lora-adamw": Task(SMALL_GPT, adamw, TEXT, domains=4, rows=4, pretrained=200, adapted=add_lora),
    "rnn-adamw": Task(Recurrent, adamw, TEXT, domains=4, rows=4),
    "cnn-adamw": Task(partial(cnn, 16), adamw, images, domains=3, rows=32),
    "mlp-adamw": Task(partial(mlp, 256), adamw, taught, domains=3, rows=64),
    "tabular-adamw": Task(tabular, adamw, records, domains=4, rows=16),
    "mlp-sgd": Task(partial(mlp, 256), sgd, taught, domains=3, rows=64),
    "mlp-m16-sgd": Task(partial(mlp, 256), sgd, taught, domains=16, rows=12),
    "cnn-sgd": Task(partial(cnn, 16), sgd, images, domains=3, rows=32),
}


class Trained:
    """A model, its optimizer and a mixer that measures it."""

    def __init__(self, task: Task, horizon: int, signal: mixwell.Hypergradient) -> None:
        self.model, self.optimizer = task.build()
        self.names = [f"domain {j}" for j in range(task.domains)]
        # The weights hardly move, so that all variants train on the same mixture.
        self.mixer = mixwell.Mixer(
            self.model, self.optimizer, self.names, horizon=horizon, signal=signal, update=1e-9
        )

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def run(self, state: Any, steps: list[tuple[Batch, Tensor]], validation: list[Batch]) -> np.ndarray:
        """Train a round from a state and return its scores."""
        for thing, kept in zip((self.model, self.optimizer), copy.deepcopy(state), strict=True):
            thing.load_state_dict(kept)
        signal = cast("mixwell.Hypergradient", self.mixer.signal)
        drawn = iter(validation)
        for rows, labels in steps:
            if signal.requirements.domain_batches:
                self._step_by_domain(rows, labels, graph=signal.requirements.graph)
            else:
                with self.mixer.batch(labels) as batch:
                    batch.weighted_loss(row_losses(self.model, rows)).backward()
            self.mixer.step()
            if self.mixer.validation_due:
                with self.mixer.validation():
                    mean_loss(self.model, next(drawn)).backward()
        return np.array(list(self.mixer.rounds[-1].scores.values()))

    def _step_by_domain(self, rows: Batch, labels: Tensor, *, graph: bool) -> None:
        for index, name in enumerate(self.names):
            part = rows[0][labels == index], rows[1][labels == index]
            with self.mixer.domain(name), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of create_graph
                mean_loss(self.model, part).backward(create_graph=graph)


def cosines(task: Task, horizon: int, seed: int, rounds: int, exact: bool) -> dict[str, list[float]]:
    """The tangent cosine of every variant with the reference, one for each round."""
    torch.set_num_threads(1)
    if exact:
        signal = mixwell.Hypergradient(mixwell.ExactCurvature(), mixwell.ForwardModeTraces())
        variants = {REFERENCE: mixwell.Hypergradient(traces=mixwell.DenseTraces(), trace_every=1)}
        variants |= {name: VARIANTS[name]() for name in ("projected 32",)}
    else:
        signal = mixwell.Hypergradient(traces=mixwell.DenseTraces(), trace_every=1)
        variants = {name: make() for name, make in VARIANTS.items()}
    reference = Trained(task, horizon, signal)
    others = {name: Trained(task, horizon, one) for name, one in variants.items()}
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[float]] = {name: [] for name in others}
    points = len(validation_points(horizon))
    rows = validation_rows(task.domains * task.rows, steps=horizon, points=points)
    for _ in range(rounds):
        steps = [task.batch(generator) for _ in range(horizon)]
        validation = [task.draw(TARGET, rows, generator) for _ in range(points)]
        start = reference.state()
        wanted = reference.run(start, steps, validation)
        for name, one in others.items():
            found[name].append(tangent_cosine(one.run(start, steps, validation), wanted))
    return found


def show(name: str, values: list[list[float]]) -> None:
    """A line of a variant, from the cosines of the rounds of every draw."""
    first, later = [one[0] for one in values], [cosine for one in values for cosine in one[1:]]
    columns = [f"{statistics.median(one):8.4f}{min(one):9.4f}" for one in (first, later)]
    print(f"  {name:17}{'   '.join(columns)}", flush=True)


def main() -> None:
    options = parser(__doc__, "quality.json", list(TASKS))
    options.add_argument("--horizons", type=int, nargs="+", default=[5, 20, 100])
    options.add_argument("--draws", type=int, default=4)
    options.add_argument("--first-draw", type=int, default=FIRST_DRAW)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--exact", action="store_true")
    given = options.parse_args()
    results = Results(given.out, "bench/quality.py", again=given.again)
    for name in given.only:
        task = TASKS[name]
        for horizon in given.horizons:
            found: list[dict[str, list[float]]] = []
            for draw in range(given.first_draw, given.first_draw + given.draws):
                key = f"{name}/T={horizon}/{draw}" + ("/exact" if given.exact else "")
                make = partial(cosines, task, horizon, draw, given.rounds, given.exact)
                found.append(results.get(key, make))
                say(f"{key}: done")
            against = "the exact hypergradient" if given.exact else "dense traces of every step"
            size = sum(p.numel() for p in task.build()[0].parameters() if p.requires_grad)
            print(
                f"\n{name}: {size / 1e6:.2f} M trained parameters, m = {task.domains}, T = {horizon}; "
                f"{given.draws} draws of {given.rounds} rounds; tangent cosine with {against}"
            )
            print(f"  {'':17}{'first round':>17}   {'later rounds':>17}")
            print(f"  {'':17}{'median':>8}{'worst':>9}   {'median':>8}{'worst':>9}")
            for variant in found[0]:
                show(variant, [one[variant] for one in found])


if __name__ == "__main__":
    main()
