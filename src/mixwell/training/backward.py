"""The backward passes of a training step: one for each domain, or one over a mixed batch.

Steps that leave no trace are plain training, so that they take a mixed batch wherever that is the same training.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixwell import distributed
from mixwell.hypergradient.capture.layer_rules.lookup import BATCH_NORMS
from mixwell.hypergradient.parameters import buffers_kept, cuda_devices
from mixwell.mixer.batch import MixtureBatch
from mixwell.mixer.mixer import Mixer
from mixwell.training.config import Config
from mixwell.training.models.base import Trainable
from mixwell.typing import LossFn
from mixwell.utils.costs import FORWARD
from mixwell.utils.nested import to_device


def autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which losses are computed with the config's precision."""
    if config.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@final
class StepBackward:
    """Computes the gradients of a step's batch.

    Args:
        forward: the model as it is called: wrapped for data parallelism, compiled.
        trainable: its losses.
        reference: a trained model and its losses, for methods that compare with one.

    Raises:
        ValueError: the traces take mixed batches, and the loss of every row is not known.
    """

    def __init__(
        self,
        config: Config,
        mixer: Mixer,
        forward: nn.Module,
        trainable: Trainable,
        reference: Trainable | None,
        device: torch.device,
    ) -> None:
        self._config, self._mixer, self._forward, self._device = config, mixer, forward, device
        self._trainable, self._reference = trainable, reference
        self._mixed = self._takes_mixed_batches()
        self._mixes_plain_steps: bool | None = None  # not known before the first of them
        self.rows_computed = 0.0
        """Rows of which a gradient was taken so far; the reference model's forward passes count a third."""

    def run(self, batch: MixtureBatch) -> dict[str, float]:
        """Compute the gradients; return the mean loss of this rank's rows of each domain."""
        mixed = self._mixed or (self._is_plain_step and self._can_mix_plain_step(batch))
        return self._mixed_batch(batch) if mixed else self._domain_batches(batch)

    def _domain_batches(self, batch: MixtureBatch) -> dict[str, float]:
        requirements, totals = self._mixer.signal.requirements, dict[str, float]()
        for part in batch.by_domain(max_rows=self._config.batch.micro_rows, min_parts=requirements.parts):
            assert part.count is not None
            rows, reference = to_device(part.rows, self._device), None
            if requirements.reference:
                assert self._reference is not None
                reference = self._reference_losses(self._reference.loss, rows, part.count)
            with self._mixer.domain(part) as scope:
                with autocast(self._config, self._device), self._twice_differentiable():
                    loss = self._trainable.loss(self._forward, rows)
                objective = self._excess(loss, reference)
                scaled = scope.scaled_loss(loss, objective=objective, reference=reference)
                scaled.backward(create_graph=requirements.graph)
            totals[part.domain] = totals.get(part.domain, 0.0) + float(loss.detach()) * part.count
        return {name: totals[name] / count for name, count in batch.counts.items()}

    def _mixed_batch(self, batch: MixtureBatch) -> dict[str, float]:
        found: list[Tensor] = []
        parts = batch.split(self._config.batch.micro_rows)
        for number, part in enumerate(parts):
            rows = to_device(part.rows, self._device)
            # DDP accumulates the gradient of the parts and averages it over the ranks with the last one.
            last = number == len(parts) - 1
            with (
                nullcontext() if last else distributed.no_sync(self._forward),
                self._mixer.batch(part) as scope,
            ):
                losses, reference = self._row_losses(rows, len(part))
                objective = self._excess(losses, reference)
                scope.weighted_loss(losses, reference=reference, objective=objective, data=rows).backward()
            found.append(losses.detach().flatten(1).mean(dim=1) if losses.dim() > 1 else losses.detach())
        each, labels = torch.cat(found).float().cpu().numpy(), batch.labels.numpy()
        return {name: float(each[labels == batch.names.index(name)].mean()) for name in batch.counts}

    def _row_losses(self, rows: Any, count: int) -> tuple[Tensor, Tensor | None]:
        """Return the losses of rows (of their tokens, where both models give them) and the reference model's."""
        own, other = self._trainable.row_losses, None
        if self._mixer.signal.requirements.reference:
            assert self._reference is not None
            other = self._reference.row_losses
            if self._trainable.token_losses and self._reference.token_losses:
                own, other = self._trainable.token_losses, self._reference.token_losses
            assert other is not None
        assert own is not None
        with autocast(self._config, self._device):
            losses = own(self._forward, rows)
        return losses, None if other is None else self._reference_losses(other, rows, count)

    @torch.no_grad()
    def _reference_losses(self, loss: LossFn, rows: Any, count: int) -> Tensor:
        assert self._reference is not None
        self.rows_computed += FORWARD * count
        with autocast(self._config, self._device):
            return loss(self._reference.model, rows)

    def _excess(self, losses: Tensor, reference: Tensor | None) -> Tensor | None:
        """Return the excess over the reference model's losses where the step minimizes that."""
        if reference is None or self._mixer.signal.requirements.objective != "excess":
            return None
        return (losses - reference).clamp(min=0)

    @property
    def _is_plain_step(self) -> bool:
        return self._mixer.signal.uses_traces and not self._mixer.trace_due

    def _can_mix_plain_step(self, batch: MixtureBatch) -> bool:
        """Return whether a mixed batch is the same training as one batch per domain; found out once.

        It is if the mean loss is that of the rows, and no layer mixes rows. With sharded parameters a rank cannot
        find out by itself, and the answer is no.
        """
        if self._mixes_plain_steps is None:
            mixing = any(isinstance(one, BATCH_NORMS) for one in self._trainable.model.modules())
            possible = self._trainable.row_losses is not None and not mixing
            same = possible and not self._mixer.requires_equal_forward_passes and self._losses_agree(batch)
            self._mixes_plain_steps = not distributed.any_rank(not same, self._device)
        return self._mixes_plain_steps

    @torch.no_grad()
    def _losses_agree(self, batch: MixtureBatch) -> bool:
        """Return whether the loss of a batch is the mean of its rows' losses."""
        part = batch.by_domain(max_rows=self._config.batch.micro_rows)[0]
        rows, model = to_device(part.rows, self._device), self._trainable.model
        assert self._trainable.row_losses is not None
        means: list[Tensor] = []
        with buffers_kept(model), autocast(self._config, self._device):
            for loss in (self._trainable.loss, self._trainable.row_losses):
                with torch.random.fork_rng(cuda_devices(model.parameters())):  # the same dropout masks
                    means.append(loss(model, rows).mean().cpu().double())
        return bool(
            torch.isclose(means[0], means[1], rtol=1e-3 if self._config.precision == "bfloat16" else 1e-5)
        )

    def _twice_differentiable(self) -> AbstractContextManager[Any]:
        # The fused kernels of attention have no second derivative.
        return sdpa_kernel(SDPBackend.MATH) if self._mixer.signal.requirements.graph else nullcontext()

    def _takes_mixed_batches(self) -> bool:
        signal, known = self._mixer.signal, self._trainable.row_losses is not None
        if signal.uses_traces and not self._config.traces.takes_mixed_batches:
            return False
        if signal.uses_traces and not known:
            raise ValueError(
                f"mixer.traces: {self._config.trace_kind} needs the loss of every row: let the Python function "
                "give (model, loss, row_losses), or mixwell.train(..., row_losses=...), or choose dense traces"
            )
        return known and not signal.requirements.domain_batches
