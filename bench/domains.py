"""Batches of domains that differ, and of a target, from which the validation batch is drawn.

Each function takes the number of a domain (or ``TARGET``), the number of rows, and a generator.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn import functional

from mixwell.lab.problems import demo

Batch = tuple[Tensor, Tensor]
TARGET = -1


def taught(domain: int, rows: int, generator: torch.Generator) -> Batch:
    """256 numbers and a class; in domain j one row of j + 1 has the target's teacher, the others its own."""
    x = torch.randn(rows, 256, generator=generator)
    wanted = torch.rand(rows, generator=generator) < 1 / (1 + max(domain, 0))
    return x, torch.where(wanted, (x @ _teacher(TARGET)).argmax(1), (x @ _teacher(domain)).argmax(1))


@cache
def _teacher(domain: int) -> Tensor:
    """Return a linear map; its largest output is the class."""
    return torch.randn(256, 10, generator=torch.Generator().manual_seed(1 + domain))


def images(domain: int, rows: int, generator: torch.Generator) -> Batch:
    """Ten smooth shapes in noise: upright, turned, and with random classes. The target is turned."""
    y = torch.randint(0, 10, (rows,), generator=generator)
    x = _shapes()[y] + 0.5 * torch.randn(rows, 1, 28, 28, generator=generator)
    if domain in (1, TARGET):
        x = x.rot90(1, (2, 3)).contiguous()
    return x, torch.randint(0, 10, (rows,), generator=generator) if domain == 2 else y


def records(domain: int, rows: int, generator: torch.Generator) -> Batch:
    """40 measurements on scales from .1 to 10 and one of two classes; domains weigh them differently."""
    scales = torch.logspace(-1, 1, 40)
    shift = 0.5 * max(domain, 0) * torch.linspace(-1, 1, 40)
    x = scales * (torch.randn(rows, 40, generator=generator) + shift)
    rule = _rule(TARGET) + max(domain, 0) * _rule(domain) if domain >= 0 else _rule(TARGET)
    noise = 2.0 * torch.randn(rows, generator=generator)
    return x, ((x / scales).mul(rule).sum(1) + noise > 0).long()


@cache
def _rule(domain: int) -> Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(50 + domain))


@cache
def _shapes() -> Tensor:
    coarse = torch.randn(10, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    return functional.interpolate(coarse, size=(28, 28), mode="bilinear")


def tokens(length: int, _domain: int, rows: int, generator: torch.Generator) -> Batch:
    """Random tokens."""
    drawn = torch.randint(0, 257, (rows, length + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def text(length: int, domain: int, rows: int, generator: torch.Generator) -> Batch:
    """Bytes of the demo's corpus: code, the language manual, names, noise; the target is docstrings."""
    corpus = _bytes(domain)
    places = torch.randint(0, len(corpus) - length, (rows,), generator=generator)
    drawn = torch.stack([corpus[place : place + length + 1] for place in places.tolist()]).long()
    return drawn[:, :-1], drawn[:, 1:]


@cache
def _bytes(domain: int) -> Tensor:
    with TemporaryDirectory() as folder:
        demo.write_texts(Path(folder))
        name = demo.VALIDATION if domain == TARGET else demo.DOMAINS[domain]
        return torch.frombuffer(bytearray((Path(folder) / f"{name}.txt").read_bytes()), dtype=torch.uint8)
