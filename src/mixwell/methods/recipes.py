"""Any named method in a training loop of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from mixwell import methods
from mixwell.methods import Task
from mixwell.training.config import MixerConfig, method_options

if TYPE_CHECKING:
    from mixwell.signals import Signal
    from mixwell.simplex.constraints import Constraint
    from mixwell.simplex.updates import Update


class MixerParts(TypedDict, total=False):
    """What :class:`mixwell.Mixer` is given: ``Mixer(model, optimizer, domains, **parts)``."""

    horizon: int
    signal: Signal
    update: Update | float | None
    constraints: list[Constraint]
    weights: Mapping[str, float]
    budget: int


def recipe(
    method: str,
    domains: Sequence[str],
    *,
    budget: int,
    horizon: int | Literal["auto", "long"] = "auto",
    options: Mapping[str, Any] | None = None,
    rows: Mapping[str, int] | None = None,
    batch_rows: int = 0,
    warmup: int = 0,
    step_size: float | Literal["auto"] = "auto",
    seed: int = 0,
) -> MixerParts:
    """A method of the field for a mixer of one's own.

    Args:
        method: its name; ``mixwell methods`` lists them.
        domains: their names.
        budget: N, training steps of the run.
        horizon: T; ``"auto"`` is what the method's authors use, ``"long"`` is ``ceil(sqrt(N log N))``.
        options: the method's own settings; ``mixwell methods NAME`` lists them.
        rows: that each domain has, for methods that go by sizes.
        batch_rows: of a training step, all domains together, for methods that look at it.
        warmup: the same that the mixer is given.
        step_size: alpha, for methods that descend along a hypergradient; ``"auto"`` tunes it.
        seed: of what is random in the method.

    Returns:
        Keyword arguments of :class:`mixwell.Mixer`, with ``weights`` where the method begins with its own. Of
        ``doge`` and ``doremi`` they are the rule that their proxies learn by. Methods that look further than a
        step's gradients also need ``probes=`` (:class:`mixwell.Probes`), those that live by losses
        ``scope.record_loss(loss)``, and those that weigh rows ``batch.weighted_loss(losses, data=rows)``.

    Raises:
        ValueError: a name or setting is wrong, the method lacks something, or it trains proxies on many mixtures,
            for which :func:`mixwell.train` and ``mixwell run`` are there.

    Example:
        >>> import torch, mixwell
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> parts = mixwell.recipe("doge", ["web", "code"], budget=100, options={"mu": 0.05}, horizon="long")
        >>> mixer = mixwell.Mixer(model, optimizer, ["web", "code"], **parts)
        >>> mixer.horizon
        22
    """
    found = methods.find(method)
    found.expect_installed()
    if found.needs.proxies and not found.has_rounds:
        raise ValueError(
            f"{method} trains proxies on many mixtures first, which a loop of yours cannot; use "
            f"mixwell.train(..., mixer={{'method': {method!r}}}) or `mixwell run`, and give the weights that it "
            "finds to a Mixer"
        )
    if len(domains) < found.needs.domains:
        raise ValueError(f"{method} needs {found.needs.domains} domains or more, got {list(domains)}")
    plain = MixerConfig(
        method=method, options=dict(options or {}), horizon=horizon, step_size=step_size, warmup=warmup
    )
    task = Task(
        domains=tuple(domains),
        rows=_Sizes(method, rows or {}),
        batch_rows=batch_rows,
        steps=budget,
        seed=seed,
        mixer=plain,
        options=method_options(found, plain.options),
    )
    made = found.recipe(task)
    parts = MixerParts(
        horizon=found.length(horizon, budget),
        signal=made.signal,
        update=made.update,
        constraints=list(made.constraints),
        budget=budget,
    )
    if made.weights is not None:
        parts["weights"] = made.weights
    return parts


class _Sizes(dict[str, int]):
    """Rows by domain; a method that asks for what is not there is told how to have it."""

    def __init__(self, method: str, rows: Mapping[str, int]) -> None:
        super().__init__(rows)
        self._method = method

    def __missing__(self, name: str) -> int:
        raise ValueError(
            f"{self._method} goes by the domains' sizes; give rows={{{name!r}: ..., }} for all of them"
        )
