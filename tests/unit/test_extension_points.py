"""A toy of each kind of component, added from outside of the package, and a run that uses all of them.

Nothing here edits or patches mixwell: a component is a class or an object that is registered.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import mixwell
from mixwell.data.datasets import IndexedDataset, TensorRows
from mixwell.data.sources.base import SOURCES, LoadContext, SourceConfig
from mixwell.hypergradient.capture.hooks import CaptureContext
from mixwell.hypergradient.capture.row_groups import RowGroups
from mixwell.hypergradient.parameters import Parameters
from mixwell.hypergradient.traces import TRACES, StepModel, Traces, TracesConfig
from mixwell.integrations.exporters import EXPORTERS, Entry, Format, export
from mixwell.simplex.constraints import Constraint
from mixwell.training import config_io, plan
from mixwell.training.constraints import CONSTRAINTS, ConstraintConfig, ConstraintContext
from mixwell.training.logging.base import LOGGERS, Logger, LoggerConfig, LoggerContext, Outcome
from mixwell.training.models.base import MODELS, ModelConfig, Trainable
from mixwell.training.optimization import OPTIMIZERS, SCHEDULES, OptimizerConfig
from mixwell.training.parallel import ParallelConfig
from mixwell.typing import Gradients, Vector
from mixwell.utils.registry import Registry
from mixwell.utils.sections import Positive, Whole


class ToyOptimizerConfig(OptimizerConfig):
    """Gradient descent with a step of half of the learning rate."""

    moments = ("momentum_buffer",)

    kind: str = "toy"
    factor: Positive = 0.5

    @override
    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr * self.factor)


class ToySourceConfig(SourceConfig):
    """Rows drawn from a line with a given slope."""

    slope: float
    count: Whole = 40

    @override
    def load(self, context: LoadContext) -> IndexedDataset:
        inputs = torch.linspace(-1, 1, self.count).unsqueeze(1)
        return TensorRows(inputs, self.slope * inputs)


class ToyModelConfig(ModelConfig):
    """A line."""

    kind: str = "line"

    @override
    def build(self, *, base: Path, vocabulary: int) -> Trainable:
        return Trainable(nn.Linear(1, 1), _loss, row_losses=_row_losses)


def _row_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean(dim=1)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return _row_losses(model, batch).mean()


@dataclass(frozen=True)
class ToyConstraint(Constraint):
    """Keeps every weight above a threshold."""

    threshold: float

    @override
    def bounds(self, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(names), self.threshold), np.ones(len(names))


class ToyConstraintConfig(ConstraintConfig):
    """The key ``mixer.threshold``."""

    threshold: float | None = None

    @override
    def build(self, run: ConstraintContext) -> Constraint | None:
        return None if self.threshold is None else ToyConstraint(self.threshold)


class ToyTraces(Traces):
    """The sum of a domain's gradients, and nothing of the optimizer."""

    supports_mixed_batches = True

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.mixed_batches = 0

    def __repr__(self) -> str:
        return f"ToyTraces({self.factor})"

    @override
    def allocate(self, parameters: Parameters, domains: int, step: StepModel) -> None:
        self._parameters = parameters
        self.z = [[torch.zeros_like(p) for p in parameters.tensors] for _ in range(domains)]

    @override
    def reset(self, round_index: int, validation: Gradients | None = None) -> None:
        for one in itertools.chain(*self.z):
            one.zero_()

    @override
    def begin_step(self, step: StepModel) -> None: ...

    @override
    def add(self, domain: int, gradients: Gradients, scale: float) -> None:
        for z, gradient in zip(self.z[domain], gradients, strict=True):
            if gradient is not None:
                z.add_(gradient, alpha=self.factor * scale)

    @contextmanager
    def _counted(self) -> Generator[CaptureContext]:
        self.mixed_batches += 1
        yield CaptureContext()

    @override
    def capture(self, row_groups: RowGroups, weights: Vector) -> AbstractContextManager[CaptureContext]:
        return self._counted()

    @override
    def dot(self, vector: Gradients) -> Vector:
        pairs = [[(v, z) for v, z in zip(vector, own, strict=True) if v is not None] for own in self.z]
        return np.array([sum(float((v * z).sum()) for v, z in one) for one in pairs])

    @property
    @override
    def nbytes(self) -> int:
        return sum(one.nbytes for one in itertools.chain(*self.z))


class ToyTracesConfig(TracesConfig):
    """``mixer.traces: toy`` with the key ``mixer.toy_factor``."""

    toy_factor: Positive = 1.0

    @override
    def build(self) -> Traces:
        return ToyTraces(self.toy_factor)


class MixedToyTracesConfig(ToyTracesConfig):
    """The same with mixed batches."""

    takes_mixed_batches = True


class ToyLogger(Logger):
    """Keeps a line for each call."""

    def __init__(self, path: Path, after: int | None) -> None:
        super().__init__(after=after)
        self.path = path

    @property
    @override
    def place(self) -> str:
        return str(self.path)

    @override
    def _write(self, step: int, values: Mapping[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {len(values)}\n")

    @override
    def _end(self, outcome: Outcome) -> None:
        with self.path.open("a") as file:
            file.write(f"{outcome}\n")


class ToyLoggerConfig(LoggerConfig):
    """The key ``loggers.toy``."""

    file: str = "toy.txt"

    @override
    def open(self, run: LoggerContext) -> Logger:
        return ToyLogger(run.folder / self.file, run.saved)


def _names(entries: Sequence[Entry]) -> str:
    return " ".join(entry.name for entry in entries)


COMPONENTS: list[tuple[Registry[Any], str, Any]] = [
    (OPTIMIZERS, "toy", ToyOptimizerConfig),
    (SCHEDULES, "stairs", lambda done: 1.0 if done < 0.5 else 0.5),
    (SOURCES, "slope", ToySourceConfig),
    (MODELS, "line", ToyModelConfig),
    (CONSTRAINTS, "threshold", ToyConstraintConfig),
    (TRACES, "toy", ToyTracesConfig),
    (TRACES, "toy-mixed", MixedToyTracesConfig),
    (LOGGERS, "toy", ToyLoggerConfig),
    (EXPORTERS, "names", Format("the names of the domains", _names, needs_paths=False)),
]
PLAIN: dict[str, Any] = {
    "domains": {"good": {"slope": 2.0}, "bad": {"slope": -2.0, "count": 30}},
    "validation": {"slope": 2.0},
    "model": {"kind": "line"},
    "optimizer": {"kind": "toy", "lr": 0.2, "factor": 0.25, "schedule": "stairs"},
    "batch": {"rows": 8},
    "mixer": {"horizon": 5, "threshold": 0.2, "traces": "toy", "toy_factor": 0.1},
    "loggers": {"toy": {"file": "log.txt"}},
    "steps": 20,
}


@pytest.fixture(autouse=True)
def components() -> Iterator[None]:
    """The toys are there in these tests only."""
    for registry, name, component in COMPONENTS:
        registry.add(name, component)
    yield
    for registry, name, _ in COMPONENTS:
        del registry._found[name]


def test_run_with_a_plugin_component_of_each_kind(tmp_path: Path) -> None:
    done = mixwell.train(out=tmp_path / "run", quiet=True, **PLAIN)
    assert done.steps_done == 20
    assert isinstance(done.mixer.signal, mixwell.Hypergradient)
    assert isinstance(done.mixer.signal.traces, ToyTraces)
    assert done.mixer.signal.traces.factor == 0.1
    assert done.mixer.signal.traces.mixed_batches == 0
    assert min(done.mixer.weights.last.values()) >= 0.2 - 1e-9
    assert done.mixer.weights.last["good"] > done.mixer.weights.last["bad"]
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert lines[0].startswith("0 ")
    assert lines[-1] == "finished"
    assert export(tmp_path / "run", to="names") == "good bad"


def test_the_kind_of_traces_chooses_the_batches(tmp_path: Path) -> None:
    mixed = {**PLAIN, "mixer": {**PLAIN["mixer"], "traces": "toy-mixed"}}
    done = mixwell.train(out=tmp_path / "run", quiet=True, **mixed)
    assert isinstance(done.mixer.signal, mixwell.Hypergradient)
    assert isinstance(done.mixer.signal.traces, ToyTraces)
    assert done.mixer.signal.traces.mixed_batches == 20
    # The derivative of clipping takes more with dense traces.
    config = config_io.validate_config({**mixed, "optimizer": {**PLAIN["optimizer"], "clip_norm": None}})
    parameters = [nn.Parameter(torch.zeros(3, 2))]
    memory = plan.trace_memory(config, parameters)
    assert memory["toy"] == memory["dense"]  # two traces, and the sum of the domains' gradients
    assert memory["toy-mixed"] == memory["dense"] - parameters[0].nbytes
    config = config.model_copy(update={"parallel": ParallelConfig(strategy="fsdp")})
    _, held = plan.distributed_cost(config, parameters, processes=2)
    assert held["toy"] == memory["toy"]
    assert held["dense"] == memory["dense"] / 2
    assert "sketched" not in held


def test_plugin_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = mixwell.train(out=tmp_path / "whole", quiet=True, **PLAIN)
    config = config_io.read_config(tmp_path / "whole" / "config.yaml")
    assert config.optimizer == ToyOptimizerConfig(lr=0.2, factor=0.25, schedule="stairs")
    again = mixwell.train(out=tmp_path / "whole", resume=True, quiet=True, **PLAIN)
    for mine, theirs in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"optimizer": {"kind": "toy", "facter": 1}},
            "optimizer.facter is not a setting; did you mean factor",
        ),
        ({"loggers": {"toy": {"fiel": "x"}}}, "loggers.toy.fiel is not a setting; did you mean file"),
        ({"domains": {"a": {"slope": "x"}}}, "domains.a.slope must be a valid number"),
        ({"mixer": {"threshhold": 0.1}}, "mixer.threshhold is not a setting; did you mean threshold"),
        ({"mixer": {"toy_facter": 0.1}}, "mixer.toy_facter is not a setting; did you mean toy_factor"),
        ({"mixer": {"toy_factor": 0}}, "mixer.toy_factor must be greater than 0, got 0"),
        ({"mixer": {"traces": "toi"}}, "mixer.traces: unknown kind of traces 'toi'; did you mean toy"),
        ({"model": {"kind": "lime"}}, "model: unknown model 'lime'; did you mean line"),
    ],
)
def test_messages_list_plugin_components(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_io.validate_config({**PLAIN, **change})


PLUGIN = """
import math

import torch
from torch import nn

from mixwell.hypergradient.capture.layer_rules import LAYER_RULES
from mixwell.hypergradient.capture.layer_rules.linear import LinearRule
from mixwell.hypergradient.responses import RESPONSES, PlainResponse
from mixwell.training.optimization import SCHEDULES


class Mine(torch.optim.Optimizer): ...


class Layer(nn.Module): ...


RESPONSES.register(Mine)(PlainResponse)
LAYER_RULES.register(Layer)(LinearRule)
SCHEDULES.add("mine", lambda done: 1.0)
"""


def test_plugin_of_an_installed_package_is_found(tmp_path: Path) -> None:
    """A process that only has the package on its path, with the entry point in its metadata."""
    (tmp_path / "my_components.py").write_text(PLUGIN)
    info = tmp_path / "my_components-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-components\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mixwell.plugins]\nmine = my_components\n")
    program = (
        "from mixwell.hypergradient.capture.layer_rules import LAYER_RULES\n"
        "from mixwell.hypergradient.responses import RESPONSES\n"
        "from mixwell.training.optimization import SCHEDULES\n"
        "print([t.__name__ for t in (*RESPONSES.types(), *LAYER_RULES.types())], 'mine' in SCHEDULES)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    for name in ("Mine", "Layer", "AdamW", "LayerNorm", "Conv2d", "True"):
        assert name in done.stdout


@pytest.mark.parametrize(("folder", "found"), [("responses", "Mine"), ("capture/layer_rules", "Layer")])
def test_component_is_one_file_in_its_package(tmp_path: Path, folder: str, found: str) -> None:
    """A copy of the sources with one more file, which nothing imports by name."""
    shutil.copytree(
        Path(mixwell.__file__).parent, tmp_path / "mixwell", ignore=shutil.ignore_patterns("*.pyc")
    )
    (tmp_path / "mixwell" / "hypergradient" / folder / "added.py").write_text(PLUGIN)
    program = (
        "import torch, mixwell\n"
        f"assert mixwell.__file__.startswith({str(tmp_path)!r})\n"
        "from mixwell.hypergradient.capture.layer_rules import LAYER_RULES\n"
        "from mixwell.hypergradient.responses import RESPONSES\n"
        "print([t.__name__ for t in (*RESPONSES.types(), *LAYER_RULES.types())])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert found in done.stdout
