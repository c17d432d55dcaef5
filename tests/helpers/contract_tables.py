"""The tables that the shared contracts run through: every kind of traces, of update and of optimizer.

Whatever is added to the library is added here; ``test_contracts.py`` fails for a class that is in no table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

import mixwell
from helpers.toy_problems import GivenCurvature, step_by_domain, step_mixed, train, train_mixed
from mixwell import Hypergradient
from mixwell.simplex import updates

ESTIMATORS: dict[str, Callable[[], Hypergradient]] = {
    "default": Hypergradient,
    "every step": lambda: Hypergradient(0.3, points=8, span=1.0),
    "last iterate": lambda: Hypergradient(0.3, points=1),
    "window": lambda: Hypergradient(0.3, window=3),
    "dense": lambda: Hypergradient(0.3),
    "per-tensor": lambda: Hypergradient(GivenCurvature({"0.weight": 0.5}, default=0.1)),
    "exact": lambda: Hypergradient(mixwell.ExactCurvature()),
    "forward mode": lambda: Hypergradient(0.3, mixwell.ForwardModeTraces()),
    # Less than every side of the weight matrices, so that all of them are projected at random.
    "projected": lambda: Hypergradient(0.3, mixwell.ProjectedTraces(3)),
    # More than every side, so that nothing is random.
    "projected without loss": lambda: Hypergradient(0.3, mixwell.ProjectedTraces(64)),
    "sketched": lambda: Hypergradient(0.3, mixwell.SketchedTraces(40)),
    "subset": lambda: Hypergradient(0.3, mixwell.DenseTraces(only=["2.*"])),
    "projected subset": lambda: Hypergradient(0.3, mixwell.ProjectedTraces(3, only=["2.*"])),
    "bfloat16": lambda: Hypergradient(0.3, mixwell.DenseTraces(dtype=torch.bfloat16)),
}
# Exact products and forward-mode traces need the graph or the whole gradient of a domain, a sketch its gradient.
BY_DOMAIN_ONLY = {"exact", "forward mode", "sketched"}
ONE_STEP = {"by domain": step_by_domain, "mixed batches": step_mixed}
LOOPS = {"by domain": train, "mixed batches": train_mixed}
FORMS = [
    (estimator, form)
    for estimator in ESTIMATORS
    for form in LOOPS
    if form == "by domain" or estimator not in BY_DOMAIN_ONLY
]
"""Every estimator in every form of batches that it takes."""

UPDATES: dict[str, Callable[[], updates.Update]] = {
    "mirror": lambda: updates.MirrorDescent(2.0),
    "self-tuned": updates.MirrorDescent,
    "self-tuned without noise": lambda: updates.MirrorDescent("auto", shrink=False),
    "projected": lambda: updates.ProjectedDescent(0.5),
    "assigned": updates.SoftmaxWeights,
    "assigned with memory": lambda: updates.SoftmaxWeights(0.5),
    "smoothed": lambda: updates.UniformSmoothing(updates.MirrorDescent(2.0), 0.1),
    "smoothed self-tuned": lambda: updates.UniformSmoothing(updates.MirrorDescent("auto"), 0.1),
}
# Two copies of a domain are not one domain of the sum of their weights to these.
COUNTS_DOMAINS = {
    "self-tuned": "the step size depends on the number of domains and on the mean of their scores",
    "self-tuned without noise": "the step size depends on the number of domains and the mean of their scores",
    "projected": "a Euclidean step moves both copies by the step of the one",
    "assigned": "softmax(-h) does not depend on the weights before: each copy has the whole weight",
    "assigned with memory": "softmax(-h) does not depend on the weights before: each copy has the whole weight",
    "smoothed": "every domain gets the same part of the uniform weights",
    "smoothed self-tuned": "every domain gets the same part of the uniform weights",
}


class OwnDescent(torch.optim.Optimizer):
    """Gradient descent that mixwell does not know by its class."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd with decay": lambda p: torch.optim.SGD(p, lr=0.02, weight_decay=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "momentum with decay": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.5, weight_decay=0.5),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "maximizing sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5, weight_decay=0.5, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "adam with decay": lambda p: torch.optim.Adam(p, lr=3e-3, betas=(0.5, 0.999), weight_decay=2.0),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "adamw with strong decay": lambda p: torch.optim.AdamW(p, lr=3e-3, betas=(0.5, 0.999), weight_decay=2.0),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1, amsgrad=True),
    "maximizing adam": lambda p: torch.optim.Adam(
        p, lr=3e-3, betas=(0.5, 0.999), weight_decay=2.0, maximize=True
    ),
    "unknown": lambda p: OwnDescent(p, lr=0.05),
}
NOT_DIFFERENTIATED = {"amsgrad"}
"""Its running maximum is not differentiated; forward-mode traces refuse it."""
NOT_PROJECTED = {"adam with decay", "maximizing adam"}
"""The decay is divided by the root of the second moments, element by element; projected traces refuse it."""
TRACED = [
    (optimizer, estimator)
    for optimizer in OPTIMIZERS
    for estimator, refused in (
        ("dense", set[str]()),
        ("forward mode", NOT_DIFFERENTIATED),
        ("projected", NOT_PROJECTED),
    )
    if optimizer not in refused
]
"""Every optimizer with the three ways to follow one."""
UNKNOWN = "ignore:mixwell does not know the optimizer OwnDescent"
"""The filter of the warning that a mixer gives for the optimizer ``"unknown"``."""
