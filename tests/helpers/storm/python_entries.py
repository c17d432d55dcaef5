"""``python:`` domains and ``model.entry`` that cannot be imported, return the wrong thing, or raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from helpers.storm.cases import Case, plain_config

KIND = "python entries"
HEAD = "import torch\nfrom torch import nn\n"
IMPORTS = {
    "raises": "raise RuntimeError('mine')", "import error": "from torch import nothing_there", "absent": "import nothing_at_all", "syntax": "def f(:", "indentation": " x = 1\ny = 2", "exits": "import sys; sys.exit(3)",
    "name error": "nothing", "recursion": "def g(): g()\ng()", "key error": "{}['a']", "stop": "raise StopIteration", "keyboard": "raise KeyboardInterrupt", "os error": "open('/nothing/x')", "value error": "int('x')", "bad encoding": "# coding: nothing\n", "empty": "", "not callable": "make = 3",
}  # fmt: skip
DATA = {
    "none": "return None", "number": "return 3", "text": "return 'abc'", "empty list": "return []", "empty tuple": "return ()", "numbers": "return [1, 2, 3]", "mapping": "return {'a': 1}", "empty mapping": "return {}", "generator": "return (x for x in range(3))", "class": "return torch.nn.Linear", "tensor": "return torch.ones(3)",
    "scalar": "return torch.tensor(3.0)", "ragged": "return torch.ones(3, 2), torch.ones(4)", "no rows": "return torch.ones(0, 3)", "one tensor": "return torch.rand(20, 1, 28, 28)", "lists of rows": "return [([1.0] * 4, 0)] * 20", "rows of text": "return ['a', 'b'] * 10", "rows of none": "return [None] * 20", "ragged rows": "return [(torch.ones(n + 1), 0) for n in range(20)]",
    "odd rows": "return [(torch.ones(3), 0), (torch.ones(3),)] * 10", "three columns": "return torch.rand(20, 1, 28, 28), torch.zeros(20, dtype=torch.long), torch.ones(20)", "float labels": "return torch.rand(20, 1, 28, 28), torch.rand(20)", "class range": "return torch.rand(20, 1, 28, 28), torch.full((20,), 7)", "wrong shape": "return torch.rand(20, 5), torch.zeros(20, dtype=torch.long)",
    "numpy": "import numpy; return numpy.ones((20, 3))", "iterable": "class D(torch.utils.data.IterableDataset):\n        def __iter__(self): return iter([1])\n    return D()", "negative length": "class D:\n        def __len__(self): return -1\n        def __getitem__(self, i): return 1\n    return D()", "text length": "class D:\n        def __len__(self): return 'x'\n        def __getitem__(self, i): return 1\n    return D()",
    "no length": "class D:\n        def __getitem__(self, i): return 1\n    return D()", "huge length": "class D:\n        def __len__(self): return 10**15\n        def __getitem__(self, i): return torch.rand(1, 28, 28), 0\n    return D()", "rows of objects": "return [object()] * 20", "sparse": "return torch.eye(20).to_sparse(), torch.zeros(20, dtype=torch.long)", "meta": "return torch.rand(20, 1, 28, 28, device='meta'), torch.zeros(20, dtype=torch.long)",
}  # fmt: skip
OWN_DATA = {
    "raises": "raise RuntimeError('mine')", "raises ValueError": "raise ValueError('mine')", "row raises": "class D:\n        def __len__(self): return 20\n        def __getitem__(self, i): raise KeyError(i)\n    return D()", "length raises": "class D:\n        def __len__(self): raise KeyError(3)\n        def __getitem__(self, i): return 1\n    return D()", "opens nothing": "open('/nothing/x')",
}  # fmt: skip
LOSS = "def loss(model, batch): return (model(batch[0].flatten(1)).mean(1) ** 2).mean()\n"
MODELS = {
    "none": "return None", "model only": "return nn.Linear(784, 3)", "text": "return 'ab'", "two texts": "return ('a', 'b')", "class": "return nn.Linear, loss", "list": "return [nn.Linear(784, 3), loss]", "four": "return nn.Linear(784, 3), loss, loss, loss", "no parameters": "return nn.ReLU(), loss", "frozen": "return nn.Linear(784, 3).requires_grad_(False), loss",
    "loss of text": "return nn.Linear(784, 3), lambda m, b: 'x'", "loss of none": "return nn.Linear(784, 3), lambda m, b: None", "loss of a number": "return nn.Linear(784, 3), lambda m, b: 3.0", "loss of rows": "return nn.Linear(784, 3), lambda m, b: m(b[0].flatten(1)).mean(1)", "loss without graph": "return nn.Linear(784, 3), lambda m, b: torch.tensor(1.0)", "loss of int": "return nn.Linear(784, 3), lambda m, b: torch.tensor(1)", "loss of nan": "return nn.Linear(784, 3), lambda m, b: m(b[0].flatten(1)).mean() * float('nan')",
    "loss of no arguments": "return nn.Linear(784, 3), lambda: 3", "loss of three": "return nn.Linear(784, 3), lambda a, b, c: 3", "row losses of a mean": "return nn.Linear(784, 3), loss, loss", "row losses of text": "return nn.Linear(784, 3), loss, lambda m, b: 'x'", "row losses of tokens": "return nn.Linear(784, 3), loss, lambda m, b: m(b[0].flatten(1))", "row losses without graph": "return nn.Linear(784, 3), loss, lambda m, b: torch.ones(len(b[0]))",
    "meta": "return nn.Linear(784, 3, device='meta'), loss", "half": "return nn.Linear(784, 3).half(), lambda m, b: m(b[0].half().flatten(1)).mean()", "double": "return nn.Linear(784, 3).double(), lambda m, b: m(b[0].double().flatten(1)).mean()", "integers": "return nn.Embedding(3, 3), lambda m, b: m(b[1]).mean()", "lazy": "return nn.LazyLinear(3), lambda m, b: m(b[0].flatten(1)).mean()", "complex": "return nn.Linear(784, 3, dtype=torch.complex64), lambda m, b: m(b[0].flatten(1).to(torch.complex64)).abs().mean()",
    "wrong width": "return nn.Linear(5, 3), loss",
}  # fmt: skip
OWN_MODELS = {
    "raises": "raise RuntimeError('mine')", "loss raises": "def bad(m, b): raise RuntimeError('mine')\n    return nn.Linear(784, 3), bad", "loss with a wrong shape": "def bad(m, b): return m(b[0] @ torch.ones(5, 5)).mean()\n    return nn.Linear(784, 3), bad", "model raises": "class M(nn.Linear):\n        def forward(self, x): raise KeyError('mine')\n    return M(784, 3), loss", "row losses raise": "def bad(m, b): raise KeyError('mine')\n    return nn.Linear(784, 3), loss, bad",
}  # fmt: skip
ENTRIES = (
    "",
    ":",
    "a",
    "a:",
    ":b",
    "entries",
    "entries:nothing",
    "entries:make.x",
    "entries:make:x",
    "os:sep",
    "os.path:join",
    "..:x",
    ".:make",
    "entries.py:make",
    "/tmp:make",
    "a b:c",
    "é:é",
    "entries:__name__",
    "builtins:print",
    "builtins:int",
    "torch:nothing",
    "x" * 5000 + ":y",
    "a\0b:c",
    "entries:\0",
    "tests.:f",
)


def cases(seed: int) -> list[Case]:
    """Return one case for each way; the seed does not matter, as all are run."""
    found: list[Case] = []
    for name, body in IMPORTS.items():
        raises = name not in (
            "syntax",
            "indentation",
            "bad encoding",
            "empty",
            "not callable",
            "absent",
            "import error",
        )
        found.append(_data(f"import {name}", body, raises_own=raises))
        found.append(_model(f"model import {name}", body, raises_own=raises))
    found += [_data(f"data {name}", f"def make():\n    {body}\n") for name, body in DATA.items()]
    found += [
        _data(f"own data {name}", f"def make():\n    {body}\n", raises_own=True)
        for name, body in OWN_DATA.items()
    ]
    # The user's loss is given rows that it cannot take: the error is inside it.
    found += [
        _model(f"model {name}", f"{LOSS}def make():\n    {body}\n", raises_own=True)
        for name, body in MODELS.items()
    ]
    found += [
        _model(f"own model {name}", f"{LOSS}def make():\n    {body}\n", raises_own=True)
        for name, body in OWN_MODELS.items()
    ]
    for entry in ENTRIES:
        found.append(_data(f"entry {entry[:30]!r}", "def make(): return 3", entry=entry))
        found.append(_model(f"model entry {entry[:30]!r}", "def make(): return 3", entry=entry))
    for arguments in (3, [], {"x": 1}, {"": 1}, {"self": 1}, {1: 2}, None, "x"):
        found.append(
            _data(
                f"arguments {arguments}",
                "import torch\ndef make(): return torch.ones(20, 3)",
                arguments=arguments,
            )
        )
    return found


def _write(folder: Path, body: str, **changes: Any) -> list[str]:
    plain = plain_config(folder)
    (folder / "entries.py").write_text(
        HEAD + "def rows(): return torch.rand(20, 1, 28, 28), torch.arange(20) % 3\n" + body + "\n"
    )
    good = {"python": "goods:rows"}
    (folder / "goods.py").write_text(
        "import torch\ndef rows(): return torch.rand(20, 1, 28, 28), torch.arange(20) % 3\n"
    )
    plain |= {
        "domains": {"odd": good, "good": good},
        "validation": good,
        "model": {"kind": "cnn", "classes": 3, "channels": 2},
        **changes,
    }
    (folder / "python.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))
    return ["run", "python.yaml", "--no-report"]


def _data(
    name: str, body: str, *, raises_own: bool = False, entry: str = "entries:make", **section: Any
) -> Case:
    def write(folder: Path) -> list[str]:
        return _write(
            folder, body, domains={"odd": {"python": entry, **section}, "good": {"python": "goods:rows"}}
        )

    return Case(KIND, name, write, raises_own=raises_own)


def _model(name: str, body: str, *, raises_own: bool = False, entry: str = "entries:make") -> Case:
    return Case(
        KIND,
        name,
        lambda folder: _write(folder, body, model={"kind": "python", "entry": entry}),
        raises_own=raises_own,
    )
