"""Quadratic losses of several domains and a target, with gradients in closed form."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

M, D = 3, 4


class Point(nn.Module):
    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.from_numpy(start.copy()))


class DomainLosses:
    """Quadratic losses of M domains and, last, of the target; a batch is a shift of a center."""

    def __init__(self, seed: int, *, steps: int, probes: int) -> None:
        random = np.random.default_rng(seed)
        roots = random.normal(size=(M + 1, D, D))
        self.hessians = roots @ roots.transpose(0, 2, 1) / D + 0.5 * np.eye(D)
        self.centers = random.normal(size=(M + 1, D))
        self.shifts = 0.3 * random.normal(size=(M + 1, probes, D))
        self.train = 0.3 * random.normal(size=(steps, M, D))
        self.start = random.normal(size=D)

    def value(self, j: int, theta: np.ndarray, shift: np.ndarray) -> float:
        away = theta - self.centers[j] - shift
        return away @ self.hessians[j] @ away / 2

    def gradient(self, j: int, theta: np.ndarray, shift: np.ndarray) -> np.ndarray:
        return self.hessians[j] @ (theta - self.centers[j] - shift)

    def torch_value(self, model: Point, batch: Tensor) -> Tensor:
        j = int(batch[0, 0])
        away = model.theta - torch.from_numpy(self.centers[j]) - batch[0, 1:]
        return away @ torch.from_numpy(self.hessians[j]) @ away / 2
