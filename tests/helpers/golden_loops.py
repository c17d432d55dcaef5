"""Short training loops of one's own, for the record in ``tests/golden``.

All are in float64, so that what another order of a sum changes is far below what a change of an algorithm does.
Every function takes an empty folder and gives an outcome (:mod:`helpers.golden_outcomes`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import mixwell
from helpers.golden_outcomes import of_mixer
from helpers.regression_data import SOURCES, draw
from helpers.toy_problems import GivenCurvature, mse, regression_batches, train, two_layer
from mixwell import Hypergradient, Mixer, MixtureLoader

Case = Callable[[Path], dict[str, Any]]
BUDGET, HORIZON, ROWS = 14, 4, 12
"""Four rounds, the last of which is shorter."""
STOP = 6
DOMAINS = ("d0", "d1", "d2")


def new_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": partial(torch.optim.SGD, lr=0.1),
        "sgd with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.5, nesterov=True),
        "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
    }
    return makers[kind](model.parameters())


# ----------------------------------------------------------------------------- written-out batches, by domain


@dataclass(frozen=True)
class Setting:
    """Parts of a mixer; those that look at the model are made with it."""

    signal: Callable[[nn.Module], mixwell.Signal] = lambda model: Hypergradient()
    optimizer: str = "sgd with momentum"
    parts: Callable[[], dict[str, Any]] = field(default=lambda: {"update": mixwell.MirrorDescent(2.0)})


SETTINGS: dict[str, Setting] = {
    "default": Setting(),
    "one validation point": Setting(lambda _: Hypergradient(0.3, points=1)),
    "every validation point": Setting(lambda _: Hypergradient(0.3, points=8, span=1.0)),
    "window": Setting(lambda _: Hypergradient(0.3, window=2)),
    "projected traces": Setting(lambda _: Hypergradient(0.3, mixwell.ProjectedTraces(3))),
    "carried traces": Setting(lambda _: Hypergradient(0.3, mixwell.ForwardModeTraces()), "adamw"),
    "sketched traces": Setting(lambda _: Hypergradient(0.3, mixwell.SketchedTraces(64))),
    "traces of a subset": Setting(lambda _: Hypergradient(0.3, mixwell.DenseTraces(only=["2.*"]))),
    "bfloat16 traces": Setting(lambda _: Hypergradient(0.3, mixwell.DenseTraces(dtype=torch.bfloat16))),
    "curvature by tensor": Setting(lambda _: Hypergradient(GivenCurvature({"0.weight": 0.5}, default=0.1))),
    "exact curvature": Setting(lambda _: Hypergradient(mixwell.ExactCurvature())),
    "sgd": Setting(optimizer="sgd"),
    "adamw": Setting(optimizer="adamw"),
    "rmsprop": Setting(optimizer="rmsprop"),
    "self-tuned step size": Setting(parts=dict),
    "projected descent": Setting(parts=lambda: {"update": mixwell.ProjectedDescent(0.5)}),
    "assigned weights": Setting(parts=lambda: {"update": mixwell.SoftmaxWeights(0.5)}),
    "smoothed weights": Setting(
        parts=lambda: {"update": mixwell.UniformSmoothing(mixwell.MirrorDescent(2.0), 0.1)}
    ),
    "floor, cap and prior": Setting(
        parts=lambda: {
            "update": 20.0,
            "constraints": [
                mixwell.Floor(0.1),
                mixwell.Cap({"d1": 0.5}),
                mixwell.PriorPull({"d0": 1.0, "d1": 1.0, "d2": 2.0}, 0.05),
            ],
        }
    ),
    "pace of epochs": Setting(
        parts=lambda: {
            "update": 20.0,
            "constraints": [
                mixwell.EpochPace({"d0": 60, "d1": 20, "d2": 200}, 2, batch_size=ROWS, budget=BUDGET)
            ],
        }
    ),
    "stochastic horizon": Setting(parts=lambda: {"horizon": mixwell.StochasticHorizon(), "update": 2.0}),
    "deterministic horizon": Setting(
        parts=lambda: {"horizon": mixwell.DeterministicHorizon(0.1, 10.0), "update": 2.0}
    ),
    "warm-up, clipping, first weights": Setting(
        parts=lambda: {"warmup": 3, "clip_norm": 0.3, "weights": [0.2, 0.3, 0.5], "update": 2.0}
    ),
}


def by_domain(folder: Path, *, setting: Setting) -> dict[str, Any]:
    """The loop of the README over batches that are there beforehand."""
    model = two_layer(0)
    batches, validation = regression_batches(0, steps=BUDGET)
    mixer = Mixer(
        model,
        new_optimizer(setting.optimizer, model),
        DOMAINS,
        **{"budget": BUDGET, "horizon": HORIZON, "signal": setting.signal(model), **setting.parts()},
    )
    train(mixer, model, batches, validation)
    return of_mixer(mixer, model)


def by_domain_resumed(folder: Path, *, setting: Setting) -> dict[str, Any]:
    """The same, saved in the middle of a round and continued by other objects."""
    batches, validation = regression_batches(0, steps=BUDGET)

    def made() -> tuple[nn.Module, torch.optim.Optimizer, Mixer]:
        model = two_layer(0)
        optimizer = new_optimizer(setting.optimizer, model)
        parts = {"budget": BUDGET, "horizon": HORIZON, "signal": setting.signal(model), **setting.parts()}
        return model, optimizer, Mixer(model, optimizer, DOMAINS, **parts)

    model, optimizer, mixer = made()
    train(mixer, model, batches[:STOP], validation)
    mixer.save(folder / "mixer")
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer, mixer = made()
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    mixer.load(folder / "mixer")
    train(mixer, model, batches[STOP:], validation)
    return of_mixer(mixer, model)


def micro_batches(folder: Path) -> dict[str, Any]:
    """Each domain's batch in two parts of different size, and losses that are recorded."""
    model = two_layer(0)
    batches, validation = regression_batches(0, steps=BUDGET)
    optimizer = new_optimizer("adamw", model)
    mixer = Mixer(model, optimizer, DOMAINS, budget=BUDGET, horizon=HORIZON, update=2.0)
    for step in batches:
        for name, (x, y) in step.items():
            for part in (slice(0, 12), slice(12, 16)):
                some = x[part], y[part]
                with mixer.domain(name, fraction=len(some[0]) / len(x), rows=len(some[0])) as scope:
                    loss = mse(model, some)
                    loss.backward()
                    scope.record_loss(loss)
        mixer.step()
        if mixer.validation_due:
            for part in (slice(0, 8), slice(8, 16)):
                with mixer.validation(fraction=0.5) as scope:
                    loss = mse(model, (validation[0][part], validation[1][part]))
                    loss.backward()
                    scope.record_loss(loss)
    return of_mixer(mixer, model)


def nonfinite_losses(folder: Path) -> dict[str, Any]:
    """A loss of one step and the validation loss of one round that are not finite, and are left out."""
    model = two_layer(0)
    batches, validation = regression_batches(0, steps=BUDGET)
    mixer = Mixer(
        model, new_optimizer("sgd", model), DOMAINS, budget=BUDGET, horizon=HORIZON, on_nonfinite="skip"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in batches:
            for name, batch in step.items():
                bad = mixer.steps_done == 5 and name == "d1"
                with mixer.domain(name):
                    (mse(model, batch) * (float("nan") if bad else 1.0)).backward()
            mixer.step()
            if mixer.validation_due:
                bad = mixer.steps_done > 2 * HORIZON
                with mixer.validation():
                    (mse(model, validation) * (float("inf") if bad else 1.0)).backward()
    return {**of_mixer(mixer, model), "left out": dict(mixer.skipped)}


# ----------------------------------------------------------------------------- the loader


def source(name: str, rows: int) -> tuple[Tensor, Tensor]:
    batch = default_collate(draw(name, rows))
    return batch["x"].double(), batch["y"].double()


def sources() -> dict[str, tuple[Tensor, Tensor]]:
    return {name: source(name, rows) for name, rows in zip(SOURCES, (90, 40, 70), strict=True)}


def regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)).double()


def row_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean(dim=1)


def validate(mixer: Mixer, model: nn.Module) -> None:
    wanted = source("shifted", 30)
    with mixer.validation():
        row_losses(model, wanted).mean().backward()


def follow(
    folder: Path,
    *,
    traces: Callable[[], mixwell.Traces] = mixwell.DenseTraces,
    **settings: Any,
) -> dict[str, Any]:
    """Batches by domain that follow the weights."""
    model = regression()
    mixer = Mixer(
        model,
        new_optimizer("adamw", model),
        SOURCES,
        budget=BUDGET,
        horizon=HORIZON,
        signal=Hypergradient(traces=traces()),
        update=3.0,
    )
    loader = MixtureLoader(sources(), ROWS, **settings)
    losses: list[float] = []
    for batch in loader.follow(mixer):
        for part in batch.by_domain():
            with mixer.domain(part):
                loss = row_losses(model, part.rows).mean()
                loss.backward()
            losses.append(loss.item())
        mixer.step()
        if mixer.validation_due:
            validate(mixer, model)
    return {**of_mixer(mixer, model), "training losses": losses, "rows trained on": _taken(loader)}


def follow_mixed(
    folder: Path,
    *,
    traces: Callable[[], mixwell.Traces],
    stop: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Mixed batches that follow the weights; continued by other objects where it stops."""
    model, optimizer, mixer, loader = _mixed(traces, settings)
    losses = _go_on(model, mixer, loader, until=BUDGET if stop is None else stop)
    if stop is not None:
        mixer.save(folder / "mixer")
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), loader.state_dict()))
        model, optimizer, mixer, loader = _mixed(traces, settings)
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        mixer.load(folder / "mixer")
        loader.load_state_dict(state[2])
        losses += _go_on(model, mixer, loader, until=BUDGET)
    return {**of_mixer(mixer, model), "training losses": losses, "rows trained on": _taken(loader)}


def _mixed(
    traces: Callable[[], mixwell.Traces], settings: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer, Mixer, MixtureLoader]:
    model = regression()
    signal = Hypergradient(traces=traces())
    optimizer = new_optimizer("adamw", model)
    mixer = Mixer(model, optimizer, SOURCES, budget=BUDGET, horizon=HORIZON, signal=signal, update=3.0)
    return model, optimizer, mixer, MixtureLoader(sources(), ROWS, **settings)


def _go_on(model: nn.Module, mixer: Mixer, loader: MixtureLoader, *, until: int) -> list[float]:
    losses: list[float] = []
    for batch in loader.follow(mixer):
        with mixer.batch(batch) as scope:
            loss = scope.weighted_loss(row_losses(model, batch.rows))
            loss.backward()
        losses.append(loss.item())
        mixer.step()
        if mixer.validation_due:
            validate(mixer, model)
        if mixer.steps_done == until:
            break
    return losses


def _taken(loader: MixtureLoader) -> list[int]:
    return list(loader.sampler.taken.values())


# ----------------------------------------------------------------------------- beside training


def fidelity(folder: Path) -> dict[str, Any]:
    """How good an estimate is, with two replicates."""
    model = two_layer(0)
    batches, validation = regression_batches(0, steps=HORIZON)
    others = [regression_batches(0, steps=3 * HORIZON)[0][k * HORIZON :][:HORIZON] for k in (1, 2)]
    found = mixwell.measure_fidelity(
        model,
        new_optimizer("sgd", model),
        mse,
        batches,
        validation,
        replicates=[(one, validation) for one in others],
    )
    assert found.replication is not None
    return {
        "estimate": found.estimate.tolist(),
        "exact": found.exact.tolist(),
        "agreement": [found.cosine, found.sign_agreement, found.rank_agreement, found.relative_error],
        "effect": found.replication.effect.tolist(),
        "agreement of replicates": [
            found.replication.agreement,
            found.replication.worst,
            found.replication.effect_cosine,
        ],
    }


def named_method(folder: Path, *, name: str, **options: Any) -> dict[str, Any]:
    """A named method in the loop of the README."""
    model = two_layer(0)
    batches, validation = regression_batches(0, steps=BUDGET)
    mixer = Mixer.from_method(
        name, model, new_optimizer("sgd", model), DOMAINS, budget=BUDGET, horizon=HORIZON, options=options
    )
    for step in batches:
        for domain, batch in step.items():
            with mixer.domain(domain) as scope:
                loss = mse(model, batch)
                loss.backward()
                scope.record_loss(loss)
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                mse(model, validation).backward()
    return of_mixer(mixer, model)


PROJECTED = partial(mixwell.ProjectedTraces, 3)
CASES: dict[str, Case] = {
    **{f"loop by domain: {name}": partial(by_domain, setting=one) for name, one in SETTINGS.items()},
    "loop by domain: micro-batches": micro_batches,
    "loop by domain: losses that are not finite": nonfinite_losses,
    "loader by domain: dense traces": follow,
    "loader by domain: projected traces": partial(follow, traces=PROJECTED),
    "loader by domain: equal counts": partial(follow, rule="equal"),
    "loader by domain: least rows, another seed": partial(follow, least=2, seed=3),
    "loader by domain: workers": partial(follow, num_workers=1),
    "loader mixed: dense traces": partial(follow_mixed, traces=mixwell.DenseTraces),
    "loader mixed: projected traces": partial(follow_mixed, traces=PROJECTED),
    "loader mixed: bfloat16 traces": partial(
        follow_mixed, traces=partial(mixwell.DenseTraces, dtype=torch.bfloat16)
    ),
    "loader mixed: equal counts": partial(follow_mixed, traces=PROJECTED, rule="equal"),
    "fidelity": fidelity,
    "recipe: doge": partial(named_method, name="doge", mu=1.0),
    "recipe: group-dro": partial(named_method, name="group-dro"),
    "recipe: odm": partial(named_method, name="odm"),
}
RESUMED: dict[str, Case] = {
    **{f"loop by domain: {name}": partial(by_domain_resumed, setting=one) for name, one in SETTINGS.items()},
    "loader mixed: dense traces": partial(follow_mixed, traces=mixwell.DenseTraces, stop=STOP),
    "loader mixed: projected traces": partial(follow_mixed, traces=PROJECTED, stop=STOP),
}
"""Those that are stopped and resumed, by the case that they must equal to the last bit."""
