"""How the gradients of a layer's parameters come about, row by row: what a mixed batch is told apart by.

Every kind of layer keeps what it needs when it sees its inputs, and adds up the projected gradient of each
domain when the gradient of its outputs is there. Both are small (r numbers per place instead of a layer's
width) or refer to what PyTorch keeps for its own backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from mixwell.hypergradient.capture.accumulators import GradientAccumulator


class Layer(ABC):
    """A layer whose parameters' gradients can be told apart by rows.

    Args:
        module: the layer.
        places: by the name of a parameter in it, its index among all parameters; only those that are trained.
    """

    def __init__(self, module: nn.Module, places: Mapping[str, int]) -> None:
        self.module: Any = module
        self.weight = places.get("weight")
        self.bias = places.get("bias")
        self.places = places

    @abstractmethod
    def keep(self, inputs: tuple[Any, ...], sums: GradientAccumulator) -> Any:
        """What is needed of the inputs later.

        Args:
            inputs: of the layer's forward pass.
            sums: where gradients will be added.

        Returns:
            Anything.
        """

    @abstractmethod
    def add(self, kept: Any, gradient: Tensor, sums: GradientAccumulator) -> None:
        """Add up the gradients of the layer's parameters.

        Args:
            kept: what :meth:`keep` gave.
            gradient: of the loss by the layer's output.
            sums: where to add.
        """

    def _add_split(self, kept: Any, split: Tensor, sums: GradientAccumulator) -> None:
        """``dY^T X`` for the weight and dY for the bias, dY of shape ``(rows, length, outputs)``."""
        if self.weight is not None:
            sums.add_products(self.weight, sums.outputs(self.weight, split), kept)
        if self.bias is not None:
            sums.add_vectors(self.bias, split)


@final
class LinearLayer(Layer):
    """``G = dY^T X``, and dY itself for the bias."""

    def keep(self, inputs: tuple[Any, ...], sums: GradientAccumulator) -> Any:
        """``X A``.

        Args:
            inputs: one tensor, the features last.
            sums: where gradients will be added.

        Returns:
            Shape ``(rows, length, r)``.
        """
        if self.weight is None:
            return None
        return sums.inputs(self.weight, sums.segments.split(inputs[0]))

    def add(self, kept: Any, gradient: Tensor, sums: GradientAccumulator) -> None:
        """``(dY B)^T (X A)``.

        Args:
            kept: ``X A``.
            gradient: dY.
            sums: where to add.
        """
        self._add_split(kept, sums.segments.split(gradient), sums)


@final
class TransposedLinearLayer(Layer):
    """A linear layer whose weights are inputs by outputs, as the ``Conv1D`` of transformers has them."""

    def keep(self, inputs: tuple[Any, ...], sums: GradientAccumulator) -> Any:
        """``X B``.

        Args:
            inputs: one tensor, the features last.
            sums: where gradients will be added.

        Returns:
            Shape ``(rows, length, r)``.
        """
        if self.weight is None:
            return None
        return sums.outputs(self.weight, sums.segments.split(inputs[0]))

    def add(self, kept: Any, gradient: Tensor, sums: GradientAccumulator) -> None:
        """``(X B)^T (dY A)``.

        Args:
            kept: ``X B``.
            gradient: dY.
            sums: where to add.
        """
        split = sums.segments.split(gradient)
        if self.weight is not None:
            sums.add_products(self.weight, kept, sums.inputs(self.weight, split))
        if self.bias is not None:
            sums.add_vectors(self.bias, split)


@final
class EmbeddingLayer(Layer):
    """A table of which rows are looked up."""

    def keep(self, inputs: tuple[Any, ...], sums: GradientAccumulator) -> Any:
        """The indices, -1 for those that are not trained.

        Args:
            inputs: one tensor of whole numbers.
            sums: where gradients will be added.

        Returns:
            Shape ``(rows, length)``.
        """
        looked_up = sums.segments.split(inputs[0].unsqueeze(-1)).squeeze(-1)
        padding = self.module.padding_idx
        return looked_up if padding is None else looked_up.masked_fill(looked_up == padding, -1)

    def add(self, kept: Any, gradient: Tensor, sums: GradientAccumulator) -> None:
        """The gradients of the rows that were looked up.

        Args:
            kept: the indices.
            gradient: dY.
            sums: where to add.
        """
        if self.weight is not None:
            sums.add_lookups(self.weight, kept, sums.segments.split(gradient))


@final
class NormLayer(Layer):
    """``y = weight * x^ + bias`` with normalized x^ (LayerNorm, RMSNorm): exact gradients."""

    def __init__(self, module: nn.Module, places: Mapping[str, int]) -> None:
        super().__init__(module, places)
        known: Any = module
        layer_norm = isinstance(module, nn.LayerNorm)
        self._normalize: Callable[..., Tensor] = functional.layer_norm if layer_norm else functional.rms_norm
        self._shape = tuple(
            known.normalized_shape if hasattr(module, "normalized_shape") else known.weight.shape
        )
        self._epsilon: float | None = known.eps if hasattr(module, "eps") else known.variance_epsilon

    def keep(self, inputs: tuple[Any, ...], sums: GradientAccumulator) -> Any:
        """The inputs, which PyTorch keeps as well.

        Args:
            inputs: one tensor.
            sums: not used.

        Returns:
            The tensor.
        """
        return inputs[0] if self.weight is not None else None

    def add(self, kept: Any, gradient: Tensor, sums: GradientAccumulator) -> None:
        """The sum of ``dY x^`` over a row's places, and of dY.

        Args:
            kept: the inputs.
            gradient: dY.
            sums: where to add.
        """
        shape = self._shape
        if self.weight is not None:
            normal = self._normalize(kept, shape, eps=self._epsilon)
            product = normal.mul_(gradient) if normal.dtype == gradient.dtype else normal * gradient
            sums.add_vectors(self.weight, sums.segments.split(product.flatten(-len(shape))))
        if self.bias is not None:
            sums.add_vectors(self.bias, sums.segments.split(gradient.flatten(-len(shape))))


@final
class ConvolutionLayer(Layer):
    """A linear layer on patches of its input; ``X A`` is a convolution with the r columns of A as filters."""

    def __init__(self, module: nn.Module, places: Mapping[str, int]) -> None:
        super().__init__(module, places)
        kinds: dict[type[nn.Module], Callable[..., Tensor]] = {
            nn.Conv1d: functional.conv1d,
            nn.Conv2d: functional.conv2d,
            nn.Conv3d: functional.conv3d,
        }
        self._convolve = kinds[type(module)]

    def keep(self, inputs: tuple[Any, ...], sums: GradientAccumulator) -> Any:
        """``X A``.

        Args:
            inputs: one tensor, shape ``(rows, channels, ...)``.
            sums: where gradients will be added.

        Returns:
            Shape ``(rows, places, r)``.

        Raises:
            ValueError: the first dimension is not that of the rows.
        """
        if self.weight is None:
            return None
        if inputs[0].shape[0] != len(sums.segments):
            raise ValueError(
                f"it sees {inputs[0].shape[0]} images, not the {len(sums.segments)} of the batch"
            )
        of = self.module
        matrix = sums.input_matrix(self.weight, inputs[0].dtype)
        filters = _filters(matrix, of.weight, inputs[0].dtype)
        seen = self._convolve(inputs[0], filters, stride=of.stride, padding=of.padding, dilation=of.dilation)
        return _places_first(seen)

    def add(self, kept: Any, gradient: Tensor, sums: GradientAccumulator) -> None:
        """``(dY B)^T (X A)``, summed over places.

        Args:
            kept: ``X A``.
            gradient: dY.
            sums: where to add.
        """
        self._add_split(kept, _places_first(gradient), sums)


def _filters(matrix: Tensor | None, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The columns of a matrix, or of the identity, as filters."""
    side = torch.eye(weight[0].numel(), dtype=dtype, device=weight.device) if matrix is None else matrix
    filters = side.t().reshape(-1, *weight.shape[1:])
    channels_last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return filters.contiguous(memory_format=torch.channels_last) if channels_last else filters


def _places_first(values: Tensor) -> Tensor:
    """``(rows, channels, ...)`` as ``(rows, places, channels)``."""
    return values.movedim(1, -1).reshape(len(values), -1, values.shape[1])


@final
class RecomputeRule(Layer):
    """A layer of another kind, run again on the rows of each domain. It must treat rows one by one."""

    def keep(self, inputs: tuple[Any, ...], sums: GradientAccumulator) -> Any:
        """The inputs.

        Args:
            inputs: tensors with the rows first, and anything else.
            sums: where gradients will be added.

        Returns:
            The inputs.
        """
        if isinstance(inputs[0], Tensor):
            sums.segments.split(inputs[0].unsqueeze(-1))  # refuses a first dimension that is not the rows'
        return inputs

    def add(self, kept: Any, gradient: Tensor, sums: GradientAccumulator) -> None:
        """A forward and a backward pass of this layer alone, domain by domain.

        Args:
            kept: the inputs.
            gradient: dY.
            sums: where to add.
        """
        count = len(sums.segments)

        def is_rows(value: Any) -> bool:
            return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] % count == 0

        def sorted_rows(value: Any) -> Any:
            """``(rows, places, ...)`` in the order of the domains."""
            return sums.segments.sorted(value.detach().unflatten(0, (count, -1))) if is_rows(value) else value

        inputs, outputs = [(sorted_rows(value), is_rows(value)) for value in kept], sorted_rows(gradient)
        parameters = [getattr(self.module, name) for name in self.places]
        for domain, begin, end in sums.segments.present:
            own = [value[begin:end].flatten(0, 1) if of_rows else value for value, of_rows in inputs]
            with torch.enable_grad():
                again = self.module(*own)
            found = torch.autograd.grad(
                again, parameters, outputs[begin:end].flatten(0, 1).to(again.dtype), allow_unused=True
            )
            gradients: list[Tensor | None] = list(found)  # None where a parameter is not used
            for index, one in zip(self.places.values(), gradients, strict=True):
                if one is not None and index not in sums.ignored:
                    sums.add_gradient(index, domain, one)


def _is_rms_norm(module: nn.Module, places: Mapping[str, int]) -> bool:
    """Whether it is one of the RMSNorms that transformers has of its own for nearly every model.

    Some multiply by ``1 + weight``, which has the same gradient. What only has the name is found out in the first
    step of a round, where the sums are compared with the gradient.
    """
    epsilon = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    vector = list(places) == ["weight"] and getattr(module, "weight").dim() == 1  # noqa: B009 - not declared
    return type(module).__name__.endswith("RMSNorm") and epsilon and vector


def rule_for(module: nn.Module, places: Mapping[str, int]) -> Layer | None:
    """How to treat a module that has trained parameters of its own.

    Args:
        module: the module.
        places: its trained parameters.

    Returns:
        The layer, or ``None`` where its rows cannot be told apart.
    """
    if isinstance(module, nn.Linear):
        return LinearLayer(module, places)
    if isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq:
        return EmbeddingLayer(module, places)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or _is_rms_norm(module, places):
        return NormLayer(module, places)
    if type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        convolution: Any = module
        if convolution.groups == 1 and convolution.padding_mode == "zeros":
            return ConvolutionLayer(module, places)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return TransposedLinearLayer(module, places)
    mixes_rows = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)
    return None if mixes_rows or any(True for _ in module.children()) else RecomputeRule(module, places)
