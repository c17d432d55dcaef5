"""The files and rooms of the package that one training step enters, found by running it.

A profiling function sees every call from the end of the optimizer's second step to the end of its third, so that
one whole iteration of the loop counts and first-time work does not. The steps are found by a hook of torch's
optimizers, so that no name inside the package is needed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT_ROOM = "(root)"
Function = tuple[str, int]
"""The file of a function in the package and its first line; an empty name for what is outside of the package."""


def room(path: str, *, split: bool = False) -> str:
    """The top folder of a file in the package; with `split` a module at the root is a room of its own."""
    head, *rest = path.split("/")
    return head if rest or split or not head else ROOT_ROOM


# ----------------------------------------------------------------------------------------- the two trainings
# The only functions that call the package: edit them as its API changes. Each trains for at least three steps.


def step_of_run() -> None:
    """`mixwell run` in this process: a tiny language model on three texts, with the default method."""
    from mixwell.cli import app

    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.dict(os.environ, MIXWELL_CACHE=name),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        folder = Path(name)
        for domain in ("a", "b", "c", "validation"):
            (folder / f"{domain}.txt").write_text(f"{domain} few words of the text {domain}\n" * 200)
        config = {
            "domains": {domain: f"{domain}.txt" for domain in "abc"},
            "validation": "validation.txt",
            "steps": 400,  # many, so that neither evaluation nor logging is due in the step that is traced
            "model": {"layers": 1, "heads": 2, "width": 16, "context": 16},
            "batch": {"rows": 8},
            "mixer": {"horizon": 20},
        }
        (folder / "tiny.yaml").write_text(json.dumps(config))  # JSON is YAML
        words = ["run", str(folder / "tiny.yaml"), "--out", str(folder / "run"), "--no-report"]
        app(words, standalone_mode=False)


def step_of_own_loop() -> None:
    """A user's loop with `mixer.batch` and projected traces, on a network of two linear layers."""
    import torch

    import mixwell

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    signal = mixwell.Hypergradient(traces=mixwell.ProjectedTraces())
    domains = ["a", "b", "c"]
    mixer = mixwell.Mixer(model, optimizer, domains=domains, horizon=20, signal=signal)
    inputs, targets = torch.randn(12, 8), torch.randn(12, 1)
    for _ in range(4):
        with mixer.batch(domains * 4) as batch:
            losses = (model(inputs) - targets).square().mean(1)
            batch.weighted_loss(losses).backward()
        mixer.step()


# ---------------------------------------------------------------------------------------------- the tracing


class StepTracedError(BaseException):
    """Stops the training; not an `Exception`, so that the code under measurement does not handle it."""


@dataclass
class Tracer:
    """What `sys.setprofile` calls. A resumed generator counts as a call, since control goes to its file.

    The caller is the nearest frame of the package; calls from a user's loop or from torch have none, and count
    as coming from another file and another room.
    """

    package: Path
    calls: list[tuple[Function, Function]] = field(default_factory=list)
    """Caller and callee."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        # From Python 3.12 on comprehensions have no frame, so they are left out in all versions.
        if event != "call" or not self._inside(frame) or frame.f_code.co_name.endswith(("comp>", "expr>")):
            return
        caller = frame.f_back
        while caller is not None and not self._inside(caller):
            caller = caller.f_back
        self.calls.append((self._function(caller), self._function(frame)))

    def _inside(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(f"{self.package}{os.sep}")

    def _function(self, frame: FrameType | None) -> Function:
        if frame is None:
            return ("", 0)
        return Path(frame.f_code.co_filename).relative_to(
            self.package
        ).as_posix(), frame.f_code.co_firstlineno

    def measures(self) -> dict[str, Any]:
        """A room change is one from a function that is entered to the next, whichever of them calls which."""
        across = [(caller, callee) for caller, callee in self.calls if caller[0] != callee[0]]
        files = sorted({file for _, (file, _) in self.calls})
        found: dict[str, Any] = {
            "files": len(files),
            "functions": len({callee for _, callee in self.calls}),
            "calls": len(self.calls),
            "calls across files": len(across),
            "calls across files, each kind once": len(set(across)),
        }
        for view, split in (("root one room", False), ("root modules rooms", True)):
            rooms = [[room(file, split=split) for file, _ in call] for call in self.calls]
            entered = [callee for _, callee in rooms]
            found[f"calls across rooms ({view})"] = sum(one != other for one, other in rooms)
            found[f"room changes ({view})"] = sum(one != other for one, other in itertools.pairwise(entered))
        return found | {"names of files": files}


def traced_step(package: Path, train: Callable[[], None]) -> dict[str, Any]:
    """The measures of the third step of a training."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    tracer, steps = Tracer(package), 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            sys.setprofile(tracer)
        elif steps == 3:
            sys.setprofile(None)
            raise StepTracedError

    hook = register_optimizer_step_post_hook(count)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train()
    except StepTracedError:
        return tracer.measures()
    except (Exception, SystemExit) as error:  # the API has changed: the other measures are still wanted
        return {"not measured": f"{type(error).__name__}: {error}"}
    finally:
        sys.setprofile(None)
        hook.remove()
    return {"not measured": f"the training ended after {steps} steps of an optimizer"}
