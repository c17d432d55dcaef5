"""Hooks on a model's layers that tell the gradients of a mixed batch apart by domain."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn

from mixwell import distributed
from mixwell.hypergradient.capture.accumulators import DenseAccumulator, GradientAccumulator
from mixwell.hypergradient.capture.fused_linear import fused_linear
from mixwell.hypergradient.capture.layer_rules import Layer, LinearLayer, rule_for
from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.parameters import Parameters
from mixwell.typing import Gradients

Rest = Literal["leave-out", "per-domain"]

# What a row may leave in another row's gradient, relative to its own, before they count as mixed.
MIXED = 1e-6
# How far what hooks saw may be from the gradient itself, before a parameter counts as not covered. bfloat16 stays
# well below it.
TOLERANCE = 0.05
# The gradients of parameters of so many numbers cost nothing, and their backward pass goes through all layers.
SMALL = 1 << 13


class CaptureContext:
    """A mixed batch whose gradients are being told apart by domain."""

    def weighted(self, losses: Tensor) -> None:
        """The weighted losses of the rows are there; their sum is differentiated next.

        Args:
            losses: shape ``(rows,)``.
        """


@final
class LayerHooks:
    """Watches the layers of a model while a mixed batch runs forward and backward.

    Hooks are there only while it watches, so that the model stays as it was: it can be copied, saved and exported.
    (In a compiled model they stay: what the compiler makes of a validation pass without them would also run in the
    next training step.)
    A forward hook keeps what a layer needs of its inputs, and a hook on the output adds up its gradients.
    Activation checkpointing, autocast, shared modules and data parallelism need nothing more.

    Args:
        parameters: what is trained.
        rest: what to do with parameters that hooks do not cover: ``"leave-out"``, or take them ``"per-domain"`` by
            one more backward pass for each domain. Either is told in a warning that names them.
        check: look at the first batch twice, to see that rows stay apart and hooks cover what they seem to.
        known: what another watcher of the same model has found when it looked; ``None`` where none has.

    Raises:
        ValueError: there is no layer that can be watched.
    """

    def __init__(
        self, parameters: Parameters, *, rest: Rest, check: bool, known: dict[int, str] | None = None
    ) -> None:
        assert parameters.model is not None
        # A second backward pass is too much for parameters that are spread over processes.
        spread = any(distributed.is_sharded(p) for p in parameters.tensors)
        self._parameters, self._rest, self._unchecked = parameters, rest, check and not spread
        distributed.reshard(parameters.model)
        trained = {id(p): index for index, p in enumerate(parameters.tensors)}
        self._layers: list[tuple[nn.Module, Layer, Callable[..., None]]] = []
        self._compiled = any(_is_compiled(module) for module in parameters.model.modules())
        self._named: set[int] = set()
        self.unsupported: dict[int, str] = {}
        """By index the parameters whose gradients cannot be told apart, and why."""
        for name, module in parameters.model.named_modules():
            own = module.named_parameters(recurse=False, remove_duplicate=False)
            places = {key: trained[id(p)] for key, p in own if id(p) in trained}
            if not places:
                continue
            layer = rule_for(module, places)
            if layer is None:
                reason = f"belongs to a {type(module).__name__}, whose rows are not told apart"
                self.unsupported |= dict.fromkeys(places.values(), reason)
            else:
                self._layers.append((module, layer, self._hook(name, layer)))
        if known is not None:
            self._unchecked = False
            self.unsupported |= known
        self._sums: GradientAccumulator | None = None
        self._hooked = False
        self._paused = False
        self._probe: Callable[[str, Layer, Any, Tensor], None] | None = None
        self.tell()

    @property
    def checked(self) -> dict[int, str] | None:
        """What was found not to be covered, once a batch was looked at."""
        return None if self._unchecked else self.unsupported

    @contextmanager
    def watch(self, sums: GradientAccumulator) -> Generator[CaptureContext]:
        """Add up the gradients of the backward passes inside.

        Args:
            sums: where to.

        Yields:
            What is to be told the weighted losses.

        Raises:
            ValueError: no layer was run.
        """
        sums.ignored = self.unsupported
        sums.touched = False
        whole = (
            sums if isinstance(sums, DenseAccumulator) and not (self._unchecked or self._compiled) else None
        )
        with ExitStack() as stack:
            self._sums = sums
            stack.callback(setattr, self, "_sums", None)
            for module, layer, hook in self._layers:
                if whole is not None and isinstance(layer, LinearLayer):
                    stack.enter_context(fused_linear(module, layer.weight, layer.bias, whole))
                elif not self._hooked:
                    handle = module.register_forward_hook(hook, with_kwargs=True)
                    if not self._compiled:
                        stack.callback(handle.remove)
            self._hooked = self._compiled
            yield _Watch(self, sums)
        if not sums.touched:
            compiled = ". If it is compiled it must not have been run before" if self._compiled else ""
            raise ValueError(
                f"no layer of the model was run: call it inside `with mixer.batch(...)`{compiled}"
            )

    def verify(self, losses: Tensor, sums: GradientAccumulator) -> None:
        """Check the first batch that has rows of two domains, and take what hooks do not cover.

        Args:
            losses: of the rows, weighted.
            sums: of the batch.
        """
        if self._unchecked and len(sums.segments.present) > 1:
            self._unchecked = False
            self._check(losses, sums)
            self.tell()
        if self._rest == "per-domain" and self.unsupported:
            self._add_uncovered(losses, sums)

    def compare(self, seen: Tensor, gradient: Tensor, projections: Projections) -> list[int]:
        """Find parameters whose gradient is not what hooks saw: they are used outside their layer.

        Args:
            seen: by the hooks, projected, by domain, shape ``(m, size)``.
            gradient: the sum over all domains, projected, shape ``(size,)``.
            projections: of the parameters.

        Returns:
            Those that were not known to be so before.
        """
        fresh: list[int] = []
        for index, place in enumerate(projections.places):
            parts, whole = seen[:, place], gradient[place]
            apart = float((parts.sum(dim=0) - whole).norm())
            if index not in self.unsupported and apart > TOLERANCE * float(
                parts.norm(dim=1).sum() + whole.norm()
            ):
                fresh.append(index)
        self.unsupported |= dict.fromkeys(fresh, "is used outside its own layer's forward pass")
        return fresh

    def tell(self) -> None:
        """Name the parameters that hooks do not cover, each once.

        Raises:
            ValueError: there are no others.
        """
        fresh = [i for i in self.unsupported if i not in self._named]
        if not fresh:
            return
        self._named.update(fresh)
        if len(self.unsupported) == len(self._parameters):
            raise ValueError(
                "no layer of the model can be watched, so a mixed batch cannot be told apart by domain; is it "
                "compiled? Give one batch per domain (mixer.domain)"
            )
        share = sum(self._parameters.tensors[i].numel() for i in fresh) / self._parameters.numel
        named = [f"{self._parameters.names[i]} ({self.unsupported[i]})" for i in fresh[:8]]
        more = ["..."] if len(fresh) > 8 else []
        what = (
            "left out of the traces"
            if self._rest == "leave-out"
            else "taken by one more pass for each domain"
        )
        warnings.warn(f"{share:.2%} of the parameters are {what}: {', '.join(named + more)}", stacklevel=2)

    def _check(self, losses: Tensor, sums: GradientAccumulator) -> None:
        """One backward pass of a domain's rows: does their gradient stay in them, and do hooks see all of it?"""
        own = torch.from_numpy(sums.segments.labels == sums.segments.present[0][0]).to(losses.device)
        mixed: list[str] = []
        # Traces that compare with the gradient itself at the end of a step need not have all of it here, too.
        needed = isinstance(sums, DenseAccumulator) or self._rest == "per-domain"
        seen, projections = sums.checking()
        seen.ignored = self.unsupported

        def probe(name: str, layer: Layer, kept: Any, gradient: Tensor) -> None:
            sizes = sums.segments.split(gradient.unsqueeze(-1)).abs().amax(dim=(1, 2))
            if bool(sizes[~own].max() > MIXED * sizes.max()):
                mixed.append(name)
            if needed:
                layer.add(kept, gradient, seen)

        trained = [(i, p) for i, p in enumerate(self._parameters.tensors) if p.requires_grad]
        small = [(i, p) for i, p in trained if p.numel() <= SMALL]
        trained = trained if needed or not small else small
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
        if needed:
            gradients: Gradients = [None] * len(self._parameters)
            for (index, _), gradient in zip(trained, found, strict=True):
                gradients[index] = gradient
            self.compare(seen.rows, projections.project(gradients), projections)

    def _add_uncovered(self, losses: Tensor, sums: GradientAccumulator) -> None:
        """One backward pass per domain over the parameters that hooks do not cover."""
        wanted = [(i, self._parameters.tensors[i]) for i in self.unsupported]
        wanted = [(i, p) for i, p in wanted if p.requires_grad]
        ordered = sums.segments.sorted(losses)
        self._paused = sums.paused = True
        try:
            for domain, begin, end in sums.segments.present:
                found = torch.autograd.grad(
                    ordered[begin:end].sum(), [p for _, p in wanted], retain_graph=True, allow_unused=True
                )
                gradients: list[Tensor | None] = list(found)  # None where a parameter is not used
                for (index, _), gradient in zip(wanted, gradients, strict=True):
                    if gradient is not None:
                        sums.add_gradient(index, domain, gradient)
        finally:
            self._paused = sums.paused = False

    def _hook(self, name: str, layer: Layer) -> Callable[..., None]:
        def forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            sums = self._sums
            if sums is None or self._paused or not isinstance(output, Tensor) or not output.requires_grad:
                return
            sums.touched = True
            try:
                with torch.no_grad():
                    kept = layer.keep((*args, *kwargs.values()), sums)
            except ValueError as error:
                self.unsupported |= dict.fromkeys(layer.places.values(), str(error))
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

        # A compiler would trace what is in force now.
        return cast("Callable[..., None]", torch.compiler.disable(forward)) if self._compiled else forward


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


@final
class _Watch(CaptureContext):
    def __init__(self, watcher: LayerHooks, sums: GradientAccumulator) -> None:
        self._watcher, self._sums = watcher, sums

    def weighted(self, losses: Tensor) -> None:
        self._watcher.verify(losses, self._sums)
