"""The option ``only=``: traces of some of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import final

from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces.base import StepModel
from mixwell.typing import Gradients

Only = Sequence[str] | Callable[[str], bool]
"""Names or shell patterns (``"*.bias"``, ``"layers.11.*"``), or a function of the name."""


@final
class Selection:
    """The parameters that have traces; the others count as if they did not depend on the weights."""

    def __init__(self, only: Only | None) -> None:
        self.only = only
        self._indices: list[int] | None = None

    def __str__(self) -> str:
        """The argument for a ``repr``, empty where all parameters are selected."""
        if self.only is None:
            return ""
        shown = getattr(self.only, "__name__", "function") if callable(self.only) else list(self.only)
        return f"only={shown}"

    def bind(self, parameters: Parameters) -> Parameters:
        """Return the selected parameters; raise ``ValueError`` where a pattern, or the function, selects none."""
        only, names = self.only, parameters.names
        if only is None:
            return parameters
        if callable(only):
            chosen = [i for i, name in enumerate(names) if only(name)]
        else:
            unused = [pattern for pattern in only if not any(fnmatchcase(name, pattern) for name in names)]
            if unused:
                raise ValueError(f"no parameter is named like {unused}; names: {list(names)}")
            chosen = [
                i for i, name in enumerate(names) if any(fnmatchcase(name, pattern) for pattern in only)
            ]
        if not chosen:
            raise ValueError(f"no parameter is selected; names: {list(names)}")
        self._indices = chosen
        return parameters.subset(chosen)

    def step(self, step: StepModel) -> StepModel:
        """Return the step model of the selected parameters."""
        return step if self._indices is None else step.subset(self._indices)

    def gradients(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the selected parameters."""
        return gradients if self._indices is None else [gradients[i] for i in self._indices]
