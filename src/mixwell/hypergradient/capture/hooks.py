"""Hooks on a model's layers that separate the gradients of a mixed batch by domain.

The loss of a mixed batch is a weighted sum of its rows' losses. Where a layer treats rows independently, each
row of the gradient dY of its output is due to that row's loss. Forward hooks save the part of the inputs X that
the layer's rule needs, hooks on the outputs receive dY, and the rule adds the gradient of each domain to an
accumulator.

Two assumptions are verified: that rows are independent (no row's loss has a gradient in another row), except where
the parameters are sharded, and that the hooks see the whole gradient (no parameter is used outside of its layer).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from mixwell import distributed
from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.direct_uses import DirectUse, UseTracking
from mixwell.hypergradient.capture.findings import (
    ROWS_ELSEWHERE,
    TOLERANCE,
    HookFindings,
    Unsupported,
    mixed_rows_message,
    reason_in_layer,
)
from mixwell.hypergradient.capture.layer_rules import LayerCall, LayerRule, RecomputeRule, layers_of
from mixwell.hypergradient.capture.layer_rules.lookup import BATCH_NORMS, reason_without_rule
from mixwell.hypergradient.capture.layer_rules.recompute import in_backward
from mixwell.hypergradient.capture.projections import Projections
from mixwell.hypergradient.capture.row_groups import FIRST_DIMENSION
from mixwell.hypergradient.capture.unsupported import UnsupportedParameters
from mixwell.hypergradient.capture.verification import Verification, rows_with_gradient
from mixwell.hypergradient.parameters import Parameters
from mixwell.utils import compilation, nested
from mixwell.utils.user_warnings import warn_user

# Gradients of parameters of this size cost nothing, and their backward pass runs through all layers.
SMALL = 1 << 13


@final
class CaptureContext:
    """A mixed batch from which gradients are captured.

    Args:
        verify: receives the weighted losses; by default nothing is captured.
    """

    def __init__(self, verify: Callable[[Tensor], None] | None = None) -> None:
        self._verify = verify

    def weighted(self, losses: Tensor) -> None:
        """Take the weighted losses of the rows, shape ``(rows,)``, before their sum is differentiated."""
        if self._verify is not None:
            self._verify(losses)


@final
class LayerHooks:
    """Captures per-domain gradients from the layers of a model while a mixed batch runs forward and backward.

    Hooks are registered, and fused layers have another forward pass, only during the capture, so that the model
    stays as it was: it can be copied, saved and exported. A compiled model runs eagerly during the capture, since
    compiled code would not run the hooks. Activation checkpointing, autocast, shared modules and data parallelism
    need nothing more.

    Args:
        unsupported: ``"ignore"`` parameters that hooks do not support, or handle them ``"per_domain"`` by one more
            backward pass for each domain. Either way a warning names them.
        check: differentiate the first batch twice, to verify that rows are independent and hooks see everything.
            Not with sharded parameters (``fully_shard``), where a second backward pass is too expensive.
        known: the :attr:`findings` of earlier hooks on the same model; a verification is not repeated.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        unsupported: Unsupported,
        check: bool,
        known: HookFindings | None = None,
    ) -> None:
        assert parameters.model is not None
        known = known or HookFindings()
        # A second backward pass is too expensive for sharded parameters.
        self._verification = Verification(enabled=check and not parameters.sharded, left=known.verified)
        self._fused: set[int] = set()
        self._parameters = parameters
        # Layers hold the tensors that the optimizer trains only while FSDP2 has not gathered them.
        distributed.reshard(parameters.model)
        trained = {id(p): index for index, p in enumerate(parameters.tensors)}
        self._layers: list[tuple[nn.Module, LayerRule, Callable[..., Any]]] = []
        self._unfused: set[str] = set(known.unfused)
        follows = not parameters.sharded  # not with the gathered copies of sharded parameters
        without_rows = [parameters.names.index(name) for name in known.without_rows]
        self._uses = UseTracking(parameters, self._found_use, enabled=follows, without_rows=without_rows)
        self.unsupported = UnsupportedParameters(parameters, unsupported, self._uses.changed_in_place)
        self._names: dict[int, str] = {}
        for name, module, param_indices, rule in layers_of(parameters.model, trained):
            if rule is not None:
                self._layers.append((module, rule, self._hook(name, rule)))
            elif follows and not isinstance(module, BATCH_NORMS):
                self._uses.watched.update(param_indices.values())
            else:
                found = dict.fromkeys(param_indices.values(), reason_without_rule(module))
                self.unsupported.reasons |= found
        self.unsupported.reasons |= {
            parameters.names.index(name): reason for name, reason in known.unsupported.items()
        }
        self._accumulator: GradientAccumulator | None = None
        self._attached: list[list[Any]] = []
        self._reentrant = False
        self._epsilon = 0.0
        self.unsupported.warn()

    @property
    def findings(self) -> HookFindings:
        """What was found so far."""
        names = self._parameters.names
        reasons = self.unsupported.by_name()
        without_rows = [names[index] for index in sorted(self._uses.without_rows)]
        return HookFindings(
            dict(sorted(self._verification.left.items())), reasons, sorted(self._unfused), without_rows
        )

    @contextmanager
    def capture(self, accumulator: GradientAccumulator) -> Generator[CaptureContext]:
        """Accumulate the gradients of the backward passes inside.

        Yields:
            The context, which takes the weighted losses.
        """
        self.unsupported.begin_batch()
        accumulator.ignored, accumulator.touched = self.unsupported.ignored, False
        verified, self._fused = self._verification.left, set()
        self._verification.begin_batch()
        with ExitStack() as stack:
            self._accumulator = accumulator
            # Undone last: the exit stack first removes the hooks that use it.
            stack.callback(self._end_batch, accumulator)
            stack.enter_context(compilation.run_eagerly())
            self._uses.start(accumulator.row_groups, stack)
            for module, rule, hook in self._layers:
                if isinstance(rule, RecomputeRule):
                    rule.begin_batch()
                self._uses.leave_to_rule(module, rule, stack)
                # The verification needs hooks.
                required = self._verification.required(self._names[id(rule)])
                fused = None if required else self._fuse(rule, accumulator)
                if fused is not None:
                    self._fused.update(rule.param_indices.values())
                    stack.enter_context(fused)
                else:
                    # In front of other hooks, which may change the output.
                    handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
                    stack.callback(handle.remove)
            try:
                yield CaptureContext(lambda losses: self._verify(losses, accumulator))
            except BaseException:
                # The batch may be given again. Sums of a batch that is verified run in another order.
                self._verification.left = verified
                raise
        if not accumulator.touched:
            raise ValueError(
                "no layer of the model was run: call it inside `with mixer.batch(...)`. If it is, its trained "
                "parameters are used where hooks do not see them (in an autograd.Function): give one batch per "
                "domain (mixer.domain)"
            )

    def _end_batch(self, accumulator: GradientAccumulator) -> None:
        self._accumulator = None
        accumulator.batch += 1
        for content in self._attached:
            content.clear()
        self._attached.clear()

    def compare(
        self, seen: Tensor, gradient: Tensor, projections: Projections, *, without: Container[int] = ()
    ) -> list[int]:
        """Find parameters whose gradient the hooks did not see; see :meth:`UnsupportedParameters.compare`."""
        return self.unsupported.compare(seen, gradient, projections, epsilon=self._epsilon, without=without)

    def report_unseen(self, indices: Sequence[int]) -> None:
        """Report parameters that have a gradient of which nothing was accumulated."""
        self.unsupported.report_unseen(indices, reentrant=self._reentrant)

    def _verify(self, losses: Tensor, accumulator: GradientAccumulator) -> None:
        """Verify layers in their first batch that has rows of two domains, and handle unsupported parameters."""
        several = len(accumulator.row_groups.slices) > 1
        # Comparisons with NaN would hold for any model.
        if self._verification.is_due and several and bool(losses.isfinite().all()):
            self._check(losses, accumulator)
        self.unsupported.warn()
        if self.unsupported.mode == "per_domain":
            self.unsupported.differentiate_by_domain(losses, accumulator)

    def _check(self, losses: Tensor, accumulator: GradientAccumulator) -> None:
        """Run a backward pass of a domain's rows: does their gradient stay in them, and do hooks see all of it?"""
        groups, verification = accumulator.row_groups, self._verification
        first = not verification.left
        pending = verification.take_pending()
        domain = verification.choose_domain(groups, pending)
        chosen = torch.from_numpy(groups.labels == domain).to(losses.device)
        mixed: dict[str, LayerRule] = {}
        with_gradient: set[str] = set()
        last = ""
        # Projected traces compare by themselves at the end of the step, which is too late for a pass per domain.
        compares = not accumulator.compared_with_gradient or self.unsupported.mode == "per_domain"
        seen = accumulator.checking()
        seen.ignored = self.unsupported.ignored

        def probe(
            name: str, rule: LayerRule | DirectUse, saved: Any, gradients: Sequence[Tensor | None]
        ) -> None:
            nonlocal last
            dims = rule.row_dims(len(gradients))
            any_gradient, elsewhere = rows_with_gradient(gradients, dims, chosen, groups)
            if any_gradient:
                with_gradient.update(self._names_of(rule) if isinstance(rule, DirectUse) else [name])
            if isinstance(rule, DirectUse):
                if elsewhere:
                    self.unsupported.add(rule.param_indices, ROWS_ELSEWHERE, seen)
                    return
            else:
                last = name
                if elsewhere:
                    mixed[name] = rule
            if compares:
                self._accumulate(rule, saved, gradients, seen)

        trained = [i for i, p in enumerate(self._parameters.tensors) if p.requires_grad]
        small = [i for i in trained if self._parameters.tensors[i].numel() <= SMALL]
        # They do not reach what comes before them, such as an embedding.
        reaching = (
            {*small, *verification.sources} if first and small else frozenset[int]().union(*pending.values())
        )
        wanted = trained if compares else [i for i in trained if i in reaching]
        gradients = verification.differentiate(losses[chosen], self._parameters, wanted, accumulator, probe)
        if gradients is None:  # hooks see the layers of a checkpoint only in its backward pass
            verification.accept(self._names.values())
            self._reentrant = True
            return
        verification.accept(with_gradient)
        # What mixes rows is seen in all layers before it. Otherwise these are other rows, such as the tokens that
        # are sent to an expert, whose number may be a multiple of the rows.
        if first and last in mixed:
            raise ValueError(mixed_rows_message(list(mixed)))
        for name, rule in mixed.items():
            self.unsupported.add(rule.param_indices, reason_in_layer(ROWS_ELSEWHERE, name), seen)
        if compares:
            # Not those of fused layers, which were compared before.
            others = set(range(len(self._parameters))) - frozenset[int]().union(*pending.values())
            without = self._fused | others if self._fused else set[int]()
            projected = seen.projections.project(gradients)
            self.compare(seen.rows, projected, seen.projections, without=without)

    def _found_use(self, use: DirectUse, outputs: Sequence[Tensor]) -> None:
        accumulator = self._accumulator
        if accumulator is not None and not accumulator.paused:
            accumulator.touched = True
            for name, index in zip(self._names_of(use), use.param_indices.values(), strict=True):
                self._verification.add(name, [index])
            self._attach("", use, None, outputs, accumulator)

    def _names_of(self, use: DirectUse) -> list[str]:
        return [f"{self._parameters.names[index]} in {use.name}" for index in use.param_indices.values()]

    def _fuse(self, rule: LayerRule, accumulator: GradientAccumulator) -> AbstractContextManager[None] | None:
        name = self._names[id(rule)]
        # FSDP2 gathers parameters for the layer's own forward and backward pass.
        if name in self._unfused or self._parameters.sharded:
            return None
        return rule.fuse(
            accumulator, lambda call, output: self._has_no_rows(name, rule, call, output, accumulator)
        )

    def _has_no_rows(
        self, name: str, rule: LayerRule, call: LayerCall, output: Any, accumulator: GradientAccumulator
    ) -> bool:
        """Return whether a layer is called with a table or a constant instead of rows, and follow its output."""
        values = call.inputs
        free = self._uses.has_no_rows(values)
        if not free and any(rule.has_rows(one, accumulator.row_groups) for one in nested.tensors(values)):
            return False
        if output is not None:
            self._follow(name, rule, call, FIRST_DIMENSION, accumulator)
        return True

    def _follow(
        self, name: str, rule: LayerRule, call: LayerCall, reason: str, accumulator: GradientAccumulator
    ) -> None:
        """Follow the outputs of a layer that is called without rows, or give up where they may have rows."""
        values = call.inputs
        # Indices without rows are a table's, such as those of positions that come from outside of the model.
        indices = not any(one.is_floating_point() for one in nested.tensors(values))
        if self._uses.has_no_rows(values) or (self._uses.active and indices and reason == FIRST_DIMENSION):
            self._uses.depend(call.outputs, rule.param_indices.values())
        elif not in_backward():
            self.unsupported.add(rule.param_indices, reason_in_layer(reason, name), accumulator)

    def _accumulate(
        self,
        rule: LayerRule | DirectUse,
        saved: Any,
        gradients: Sequence[Tensor | None],
        accumulator: GradientAccumulator,
    ) -> None:
        try:
            rule.accumulate_call(saved, gradients, accumulator)
        except ValueError as error:
            self.unsupported.add(rule.param_indices, str(error), accumulator)

    def _compare_fused(
        self, name: str, rule: LayerRule, call: LayerCall, accumulator: GradientAccumulator
    ) -> None:
        """Do not fuse a layer that has other gradients by itself."""
        accumulator.paused = True
        try:
            with torch.no_grad():
                error = rule.fused_error(call, accumulator)
        finally:
            accumulator.paused = False
        if error > TOLERANCE:
            self._unfused.add(name)
            warn_user(f"layer {name} is not fused: its gradients would be others than PyTorch's")

    def _hook(self, name: str, rule: LayerRule) -> Callable[..., Any]:
        self._names[id(rule)] = name

        def forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            accumulator = self._accumulator
            if accumulator is None or accumulator.paused:
                return None
            outputs = [one for one in nested.tensors(output) if one.requires_grad]
            if not outputs:
                return None
            accumulator.touched = True
            call = LayerCall(args, kwargs, outputs)
            if self._uses.has_no_rows((args, kwargs)):
                self._follow(name, rule, call, FIRST_DIMENSION, accumulator)
                return None
            try:
                with torch.no_grad():
                    saved = rule.save_call(call, accumulator)
            except ValueError as error:
                self._follow(name, rule, call, str(error), accumulator)
                return None
            if not in_backward() and outputs[0].numel():
                source = not any(one.requires_grad for one in nested.tensors((args, kwargs)))
                self._verification.add(name, rule.param_indices.values(), source=source)
            if self._verification.required(name) and self._fuse(rule, accumulator) is not None:
                self._compare_fused(name, rule, call, accumulator)
            if len(outputs) == 1 or not isinstance(output, tuple | list):
                self._attach(name, rule, saved, outputs, accumulator)
                return None
            # One output may depend on another (the state of a recurrent cell), so that its gradient would include
            # the other's. That of a view includes only what comes from outside of the layer.
            views = {id(one): one.view_as(one) for one in outputs}
            self._attach(name, rule, saved, list(views.values()), accumulator)
            return nested.map_tensors(lambda one: views.get(id(one), one), output)

        return forward

    def _attach(
        self,
        name: str,
        rule: LayerRule | DirectUse,
        saved: Any,
        outputs: Sequence[Tensor],
        accumulator: GradientAccumulator,
    ) -> None:
        """Accumulate when the gradients of the outputs are known."""
        # Emptied when the batch ends: it holds the outputs, which hold the hook, so that only the garbage
        # collector would free them.
        content: list[Any] = [rule, saved]
        self._attached.append(content)
        del rule, saved

        def backward(gradients: Sequence[Tensor | None]) -> None:
            known = [one for one in gradients if one is not None]
            probe, paused = self._verification.probe, accumulator.paused
            if not content or not known or (paused and probe is None):
                return
            rule, saved = content
            self._epsilon = max(self._epsilon, torch.finfo(known[0].dtype).eps)
            with torch.no_grad():
                # A layer that the rule runs again is neither captured nor verified.
                self._verification.probe, accumulator.paused = None, True
                try:
                    if probe is not None:
                        probe(name, rule, saved, gradients)
                        return
                    if any(index not in self.unsupported for index in rule.param_indices.values()):
                        self._accumulate(rule, saved, gradients, accumulator)
                finally:
                    self._verification.probe, accumulator.paused = probe, paused

        # On the tensors, not register_full_backward_hook, which wraps the outputs in a function of its own and
        # fails where a model changes them in place.
        if len(outputs) == 1:
            outputs[0].register_hook(lambda gradient: backward([gradient]))
        else:
            register_multi_grad_hook(outputs, backward)
