"""Parameters that a model uses outside of layers: tables of positions, scales, decays, classification tokens.

A tensor *has no rows* if it is computed from parameters, buffers and constants alone. Where such a tensor w, which
depends on parameters without a rule, meets others in an operation ``Y = f(w, X)`` that does have rows, domain j's
gradient of w is the product of ``dY_j``, the rows of domain j, with the derivative of f, and from w it is
propagated to the parameters. So nothing need be known about f, and its first dimension is the batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from mixwell.hypergradient.capture.accumulators import GradientAccumulator
from mixwell.hypergradient.capture.layer_rules import LayerRule
from mixwell.hypergradient.capture.layer_rules.recompute import domain_products, in_backward
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.utils import nested

# Functions whose results are constants of the model, not rows of a batch.
CONSTANTS = {"arange", "eye", "zeros", "ones", "full", "empty", "linspace", "tensor"}
# Each element of the result depends on one element of w: the gradients of all domains are one product.
ELEMENTWISE = {
    *("add", "__add__", "__radd__", "sub", "__sub__", "rsub", "__rsub__"),
    *("mul", "__mul__", "__rmul__", "div", "__truediv__"),
}


@final
class DirectUse:
    """An operation ``Y = f(w, X)`` with a tensor w that has no rows, as a rule of a layer would treat it.

    Args:
        values: each w, and where it comes from, ``None`` for a parameter.
        roots: the parameters that w depends on.
        dims: the dimension of each output in which the rows are.
        name: of the operation.
        repeat: f for another w, where it works element by element.
        inputs: X, where f is ``functional.linear`` and w its weight.
    """

    def __init__(
        self,
        values: Sequence[tuple[Tensor, GradientEdge | None]],
        roots: Mapping[int, Tensor],
        outputs: Sequence[Tensor],
        dims: Sequence[int],
        name: str,
        repeat: Callable[[Tensor], Tensor] | None = None,
        inputs: Tensor | None = None,
    ) -> None:
        self._values, self._roots, self._repeat, self._inputs = values, roots, repeat, inputs
        self._edges, self._dims = [get_gradient_edge(one) for one in outputs], list(dims)
        self.param_indices = {str(index): index for index in roots}
        self.name = name

    def row_dims(self, count: int) -> list[int]:
        """Return the dimension of each of the outputs in which the rows are."""
        return self._dims[:count]

    def accumulate_call(
        self, saved: Any, gradients: Sequence[Tensor | None], accumulator: GradientAccumulator
    ) -> None:
        """Add the gradients of the parameters that w depends on."""
        wanted = [i for i, one in enumerate(gradients) if one is not None]
        given = [cast("Tensor", gradients[i]) for i in wanted]
        groups = accumulator.row_groups
        if self._inputs is not None:
            (index,) = self._roots
            outputs = accumulator.project_outputs(index, groups.per_row(given[0]))
            inputs = accumulator.project_inputs(index, groups.per_row(self._inputs))
            accumulator.add_products(index, outputs, inputs)
            return
        if self._repeat is not None:
            found = self._elementwise(given[0], groups)
        else:
            edges, inputs = [self._edges[i] for i in wanted], [one for one, _ in self._values]
            found = domain_products(edges, given, [self._dims[i] for i in wanted], inputs, groups)
        for domain, products in found:
            for (_, edge), product in zip(self._values, products, strict=True):
                if product is not None:
                    self._add(domain, edge, product, accumulator)

    def _elementwise(self, gradient: Tensor, groups: RowGroups) -> list[tuple[int, list[Tensor | None]]]:
        assert self._repeat is not None
        value = self._values[0][0].detach()
        with torch.enable_grad():
            expanded = value.expand(gradient.shape).requires_grad_()
            again = self._repeat(expanded)
        (product,) = torch.autograd.grad(again, expanded, gradient.to(again.dtype))
        return [
            (domain, [groups.take(product, begin, end).sum(dim=0, keepdim=True).sum_to_size(value.shape)])
            for domain, begin, end in groups.slices
        ]

    def _add(
        self, domain: int, edge: GradientEdge | None, product: Tensor, accumulator: GradientAccumulator
    ) -> None:
        if edge is None:  # w is a parameter
            (index,) = self._roots
            accumulator.add_gradient(index, domain, product)
            return
        found = torch.autograd.grad(
            [edge], list(self._roots.values()), [product], retain_graph=True, allow_unused=True
        )
        for index, one in zip(self._roots, cast("Iterable[Tensor | None]", found), strict=True):
            if one is not None:
                accumulator.add_gradient(index, domain, one)


@final
class DirectUses(TorchFunctionMode):
    """Finds the operations in which parameters without a rule meet the rows of a batch.

    Args:
        watched: the indices of the parameters to follow.
        tensors: all parameters that are trained.
        found: receives each operation and its outputs.
        without_rows: parameters that have met values whose first dimension is not the batch. They are followed
            until the outputs have one dimension, such as the losses of the rows: another batch may have as many
            positions as rows, and then no size tells them apart.
    """

    def __init__(
        self,
        model: nn.Module,
        watched: Iterable[int],
        tensors: Sequence[Tensor],
        groups: RowGroups,
        found: Callable[[DirectUse, Sequence[Tensor]], None],
        without_rows: set[int],
    ) -> None:
        super().__init__()
        self._tensors, self._groups, self._found, self._without_rows = tensors, groups, found, without_rows
        # Tensors are kept, so that no other tensor of the batch has the same id. To take too many for tensors
        # without rows costs time, but the gradients stay right: those are followed to where they meet rows.
        attributes = (one for module in model.modules() for one in vars(module).values())
        constants = (one for one in attributes if isinstance(one, Tensor))
        kept = (*model.parameters(), *model.buffers(), *constants)
        self._free: dict[int, Tensor] = {id(one): one for one in kept}
        # For each layer with a rule that is running, its arguments that depend on parameters, and their views.
        self._entered: list[tuple[dict[int, Tensor], dict[int, Tensor], frozenset[int]] | None] = []
        self._roots = {id(tensors[index]): frozenset([index]) for index in watched}
        self.in_place: set[int] = set()
        """Parameters in tensors that were changed in place by values with rows."""

    def has_no_rows(self, values: Any) -> bool:
        """Return whether all tensors of an argument are computed from parameters and constants alone."""
        return all(self._is_free(one) for one in nested.tensors(values))

    def depend(self, outputs: Sequence[Tensor], indices: Iterable[int]) -> None:
        """Record that outputs without rows of a layer depend on parameters."""
        for one in outputs:
            self._free[id(one)] = one
            self._roots[id(one)] = self._roots.get(id(one), frozenset()) | frozenset(indices)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if in_backward():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        given = nested.tensors((args, kwargs))
        free = all(self._is_free(one) for one in given) if given else name in CONSTANTS
        roots = self._roots_of(given)
        # The operations of layers with rules that are running are not looked at.
        if roots and not free and not self._entered and torch.is_grad_enabled():
            return self._meet(func, name, args, kwargs, roots)
        result = func(*args, **kwargs)
        if free:
            self._mark(result, roots)
        elif given and _changes_first(name):
            self._free.pop(id(given[0]), None)
        return result

    def enter_layer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Begin the forward pass of a layer with a rule; return views of its arguments, ``None`` for no change.

        An argument without rows (the queries of attention, the first state of a recurrent network) may depend on
        parameters, which are not the layer's.
        """
        given = nested.tensors((args, kwargs))
        roots = self._roots_of(given)
        entered = None
        follows = roots and not self._entered and torch.is_grad_enabled() and not in_backward()
        if follows and not all(self._is_free(one) for one in given):
            known = {id(one): one for one in given if id(one) in self._roots}
            views = {key: one.view_as(one) for key, one in known.items() if one.requires_grad}
            entered = known, views, roots
        self._entered.append(entered)
        return None if entered is None else (_put(entered[1], args), _put(entered[1], kwargs))

    def leave_layer(self, name: str, output: Any, row_dims: Callable[[int], list[int]]) -> None:
        """End the forward pass of a layer, and report it if an argument depends on parameters."""
        entered = self._entered.pop()
        if entered is None:
            return
        known, views, roots = entered
        outputs = [one for one in nested.tensors(output) if one.requires_grad]
        self._report(name, known, views, outputs, row_dims(len(outputs)), roots)

    def _roots_of(self, values: Iterable[Tensor]) -> frozenset[int]:
        return frozenset[int]().union(*(self._roots.get(id(one), frozenset[int]()) for one in values))

    def _is_free(self, value: Tensor) -> bool:
        alone = value.dim() == 0 or (value.shape[0] == 1 and len(self._groups) > 1)
        return alone or id(value) in self._free

    def _mark(self, result: Any, roots: frozenset[int]) -> None:
        for one in nested.tensors(result):
            self._free[id(one)] = one
            if roots and one.requires_grad:
                self._roots[id(one)] = self._roots.get(id(one), frozenset()) | roots

    def _meet(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], roots: frozenset[int]
    ) -> Any:
        given = {id(one): one for one in nested.tensors((args, kwargs)) if id(one) in self._roots}
        if _changes_first(name) and id(nested.tensors(args)[0]) in given:
            changed = id(nested.tensors(args)[0])  # it has rows from now on, and is not followed
            self.in_place |= self._roots.pop(changed)
            self._free.pop(changed, None)
            return func(*args, **kwargs)
        # Views of their own, so that the derivative is that of this operation alone.
        views = {key: one.view_as(one) for key, one in given.items() if one.requires_grad}
        result = func(*_put(views, args), **_put(views, kwargs))
        outputs = [one for one in nested.tensors(result) if one.requires_grad]
        repeat: Callable[[Tensor], Tensor] | None = None
        if name in ELEMENTWISE and len(given) == 1 and isinstance(result, Tensor):
            (only,) = given.values()
            if only.dim() < result.dim() or only.shape[0] == 1:
                constants = {id(one): one.detach() for one in nested.tensors((args, kwargs))}

                def repeat_with(value: Tensor) -> Tensor:
                    replaced = {**constants, id(only): value}
                    return cast("Tensor", func(*_put(replaced, args), **_put(replaced, kwargs)))

                repeat = repeat_with

        inputs = None
        if name == "linear" and len(given) == 1 and isinstance(args[0], Tensor) and id(args[0]) not in given:
            (only,) = given.values()
            inputs = args[0].detach() if only.is_leaf and only.dim() == 2 else None
        self._report(name, given, views, outputs, [0] * len(outputs), roots, repeat, inputs)
        return result

    def _report(
        self,
        name: str,
        given: Mapping[int, Tensor],
        views: Mapping[int, Tensor],
        outputs: Sequence[Tensor],
        dims: Sequence[int],
        roots: frozenset[int],
        repeat: Callable[[Tensor], Tensor] | None = None,
        inputs: Tensor | None = None,
    ) -> None:
        """Report an operation whose outputs have rows, or follow its outputs."""
        if not outputs or not views:
            return
        has_rows = all(self._groups.has_rows(one, dim) for one, dim in zip(outputs, dims, strict=True))
        # Of one dimension the outputs are those of a sum over all others, such as losses.
        ambiguous = any(one.dim() > 1 for one in outputs) and not self._without_rows.isdisjoint(roots)
        if not has_rows or ambiguous:
            if not has_rows:
                self._without_rows.update(roots)
            self._mark(outputs, roots)
            return
        # Several are each propagated to all parameters that any of them depends on.
        values = [
            (view, None if given[key].is_leaf and len(views) == 1 else get_gradient_edge(given[key]))
            for key, view in views.items()
        ]
        leaves_of = {i: self._tensors[i] for i in sorted(roots) if self._tensors[i].requires_grad}
        self._found(DirectUse(values, leaves_of, outputs, dims, name, repeat, inputs), outputs)


@final
class UseTracking:
    """Decides which parameters are followed, batch by batch.

    In the first batch all are: layers may hold weights that the model uses without calling them, and be called
    with values that have no rows. Afterwards those that were found, and nothing where there are none.

    Args:
        found: receives each operation and its outputs.
        enabled: whether to follow any.
        without_rows: the :attr:`without_rows` of an earlier run.
    """

    def __init__(
        self,
        parameters: Parameters,
        found: Callable[[DirectUse, Sequence[Tensor]], None],
        *,
        enabled: bool,
        without_rows: Iterable[int] = (),
    ) -> None:
        self._parameters, self._report, self._enabled = parameters, found, enabled
        self.without_rows = set(without_rows)
        """Parameters that have met values whose first dimension is not the batch."""
        self.watched: set[int] = set()
        """Parameters without a rule, and those that were found to be used outside of their layers."""
        self._in_place: set[int] = set()
        self._first, self._called_without_rows = True, False
        self._uses: DirectUses | None = None

    def start(self, groups: RowGroups, stack: ExitStack) -> None:
        """Follow the operations until the stack is closed."""
        if not (self._enabled and (self._first or self.watched or self._called_without_rows)):
            return
        assert self._parameters.model is not None
        watched = range(len(self._parameters)) if self._first else self.watched
        tensors, model = self._parameters.tensors, self._parameters.model
        self._uses = DirectUses(model, watched, tensors, groups, self._found, self.without_rows)
        stack.callback(self._stop)
        stack.enter_context(self._uses)

    def leave_to_rule(self, module: nn.Module, rule: LayerRule, stack: ExitStack) -> None:
        """Do not look at what a layer does with its parameters. Call it before the layer's own hook is registered.

        Both are put in front of all others: what these do is not the layer's.
        """
        uses = self._uses
        if uses is None:
            return

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            return uses.enter_layer(args, kwargs)

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            uses.leave_layer(type(module).__name__, output, rule.row_dims)

        stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True, prepend=True).remove)

    def changed_in_place(self, index: int) -> bool:
        """Return whether a parameter is part of a tensor that was changed in place by values with rows."""
        current = self._uses.in_place if self._uses is not None else set[int]()
        return index in self._in_place or index in current

    @property
    def active(self) -> bool:
        """Whether operations are followed in this batch."""
        return self._uses is not None

    def has_no_rows(self, values: Any) -> bool:
        """Return whether all tensors of an argument are known to have no rows."""
        return self._uses is not None and self._uses.has_no_rows(values)

    def depend(self, outputs: Sequence[Tensor], indices: Iterable[int]) -> None:
        """Record that outputs without rows of a layer depend on parameters."""
        assert self._uses is not None
        self._called_without_rows = True
        self._uses.depend(outputs, indices)

    def _found(self, use: DirectUse, outputs: Sequence[Tensor]) -> None:
        self.watched.update(use.param_indices.values())
        self._report(use, outputs)

    def _stop(self) -> None:
        if self._uses is not None:
            self._in_place |= self._uses.in_place
        self._uses, self._first = None, False


def _put(replaced: Mapping[int, Tensor], values: Any) -> Any:
    return nested.map_tensors(lambda one: replaced.get(id(one), one), values)


def _changes_first(name: str) -> bool:
    """Return whether a function changes its first argument: ``add_``, ``__iadd__``, ``__setitem__``."""
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    )
