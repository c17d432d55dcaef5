"""Hooks on a model's layers that tell the gradients of a mixed batch apart by domain."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from mixwell.layers import Layer, Sums, layer_of
from mixwell.parameters import Gradients, Parameters

# What a row may leave in another row's gradient, relative to its own, before they count as mixed.
MIXED = 1e-6
# How far what hooks saw may be from the gradient itself, before a parameter counts as not covered. bfloat16 stays
# well below it.
TOLERANCE = 0.05


@final
class Watcher:
    """Watches the layers of a model while a mixed batch runs forward and backward.

    Hooks are there only while it watches, so that the model stays as it was: it can be copied, saved and exported.
    A forward hook keeps what a layer needs of its inputs, and a hook on the output adds up its gradients.
    Activation checkpointing, autocast, shared modules and data parallelism need nothing more.

    Args:
        parameters: what is trained.
    """

    def __init__(self, parameters: Parameters) -> None:
        assert parameters.model is not None
        self._parameters = parameters
        trained = {id(p): index for index, p in enumerate(parameters.tensors)}
        self._layers: list[tuple[str, nn.Module, Layer]] = []
        self.uncovered: dict[int, str] = {}
        """By index the parameters whose gradients cannot be told apart, and why."""
        reasons: dict[int, str] = {}
        covered: set[int] = set()
        for name, module in parameters.model.named_modules():
            own = module.named_parameters(recurse=False, remove_duplicate=False)
            places = {key: trained[id(p)] for key, p in own if id(p) in trained}
            if not places:
                continue
            layer = layer_of(module, places)
            if layer is None:
                kind = type(module).__name__
                reasons |= dict.fromkeys(
                    places.values(), f"belongs to a {kind}, whose rows are not told apart"
                )
            else:
                covered |= set(places.values())
                self._layers.append((name, module, layer))
        for index in trained.values():
            if index in reasons or index not in covered:
                self.uncovered[index] = reasons.get(index, "belongs to no layer")
        self._paused = False
        self._probe: Callable[[str, Layer, Any, Tensor], None] | None = None

    @contextmanager
    def watch(self, sums: Sums) -> Generator[None]:
        """Add up the gradients of the backward passes inside.

        Args:
            sums: where to.

        Yields:
            Nothing.
        """
        handles = [
            module.register_forward_hook(self._hook(name, layer, sums), with_kwargs=True)
            for name, module, layer in self._layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def add_uncovered(self, losses: Tensor, sums: Sums) -> None:
        """One backward pass per domain over the parameters that hooks do not cover.

        Args:
            losses: of the rows, weighted.
            sums: where to add.
        """
        wanted = [(i, self._parameters.tensors[i]) for i in self.uncovered]
        wanted = [(i, p) for i, p in wanted if p.requires_grad]
        ordered = sums.segments.sorted(losses)
        self._paused = True
        try:
            for domain, begin, end in sums.segments.present:
                found = torch.autograd.grad(
                    ordered[begin:end].sum(), [p for _, p in wanted], retain_graph=True, allow_unused=True
                )
                gradients: list[Tensor | None] = list(found)  # None where a parameter is not used
                for (index, _), gradient in zip(wanted, gradients, strict=True):
                    if gradient is not None:
                        projected = sums.projections.each[index].project(gradient)
                        sums.projections.block(sums.rows, index)[domain].add_(projected)
        finally:
            self._paused = False

    def check(self, losses: Tensor, sums: Sums) -> None:
        """One backward pass of a domain's rows: does their gradient stay in them, and do hooks see all of it?

        Args:
            losses: of the rows, weighted.
            sums: of the batch, with at least two domains in it.

        Raises:
            ValueError: a layer has the rows in another dimension than the first, or mixes rows.
        """
        domain = sums.segments.present[0][0]
        own = torch.from_numpy(sums.segments.labels == domain).to(losses.device)
        mixed: list[str] = []
        seen = replace(sums, rows=torch.zeros_like(sums.rows))

        def probe(name: str, layer: Layer, kept: Any, gradient: Tensor) -> None:
            sizes = sums.segments.split(gradient.unsqueeze(-1)).abs().amax(dim=(1, 2))
            if bool(sizes[~own].max() > MIXED * sizes.max()):
                mixed.append(name)
            layer.add(kept, gradient, seen)

        trained = [(i, p) for i, p in enumerate(self._parameters.tensors) if p.requires_grad]
        self._probe = probe
        try:
            found = torch.autograd.grad(
                losses[own].sum(), [p for _, p in trained], retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():
                raise
            warnings.warn(
                "whether rows stay apart cannot be looked at through reentrant activation checkpointing; "
                "checkpoint(..., use_reentrant=False) can",
                stacklevel=4,
            )
            return
        finally:
            self._probe = None
        if mixed:
            raise ValueError(
                f"the rows of a batch are not apart in layer {mixed[-1]} ({len(mixed)} such layers): either its "
                "first dimension is not the batch (batch_first=False), or something mixes rows (BatchNorm, a loss "
                "over pairs). Give one batch per domain (mixer.domain), or accept it: ProjectedTraces(check=False)"
            )
        gradients: Gradients = [None] * len(self._parameters)
        for (index, _), gradient in zip(trained, found, strict=True):
            gradients[index] = gradient
        self.compare(seen, sums.projections.project(gradients))

    def compare(self, seen: Sums, gradient: Tensor) -> None:
        """Find parameters whose gradient is not what the hooks saw: they are used outside their layer.

        Args:
            seen: by the hooks, by domain.
            gradient: the sum of all domains, projected, shape ``(size,)``.
        """
        for index, place in enumerate(seen.projections.places):
            parts, whole = seen.rows[:, place], gradient[place]
            apart = float((parts.sum(dim=0) - whole).norm())
            if apart > TOLERANCE * float(parts.norm(dim=1).sum() + whole.norm()):
                self.uncovered.setdefault(index, "is used outside its own layer's forward pass")

    def _hook(self, name: str, layer: Layer, sums: Sums) -> Callable[..., None]:
        def forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._paused or not isinstance(output, Tensor) or not output.requires_grad:
                return
            try:
                with torch.no_grad():
                    kept = layer.keep((*args, *kwargs.values()), sums)
            except ValueError as error:
                self.uncovered |= dict.fromkeys(layer.places.values(), str(error))
                return

            def backward(gradient: Tensor) -> None:
                if self._paused:
                    return
                with torch.no_grad():
                    self._paused = True  # a layer that is run again is not watched
                    try:
                        if self._probe is not None:
                            self._probe(name, layer, kept, gradient)
                        else:
                            layer.add(kept, gradient, sums)
                    finally:
                        self._paused = False

            output.register_hook(backward)

        return forward
