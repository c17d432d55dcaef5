"""Fine-tuning: a small language model learns to answer from several sources, one of them with wrong answers.

The base model is trained once, on code and the manual of this Python installation, and kept in the cache. The
sources come from the same installation; the base model's text has no docstrings:

- *docs*: the first sentence of a function's docstring;
- *spelling*: the letters of a word;
- *sums*: sums and differences;
- *characters*: the names of Unicode's characters;
- *wrong*: questions of *docs* with the answers to others, and of *spelling* with wrong letters in the answers.

Only answers count for the loss, as is usual where instructions are learned. Validation and test are other
questions of *docs* and *spelling*. No question or answer is in two parts.
"""

from __future__ import annotations

import ast
import platform
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from mixwell.data.downloads import cache_folder
from mixwell.data.tokenizer import LEAST_SIZE
from mixwell.lab.packages import Say
from mixwell.lab.problems import demo
from mixwell.lab.problems.text import write_texts
from mixwell.training.models.base import next_token_each, next_token_loss
from mixwell.training.models.gpt import Gpt
from mixwell.utils import files

CONTEXT, LAYERS, HEADS, WIDTH = 64, 2, 4, 96
BASE_STEPS, BASE_ROWS, BASE_RATE = 1200, 32, 3e-3
GOOD_CHARACTERS = 100_000
"""Each of *docs* and *spelling* to train on."""
OTHER_CHARACTERS = 400_000
"""Each other source."""
HELD_OUT_CHARACTERS = 100_000
"""Each of the two kinds of questions for validation, and the same number for the test."""

Exchange = tuple[str, str]
Loss = Callable[[nn.Module, Tensor], Tensor]


def prepare(folder: Path, say: Say) -> None:
    """Write the sources, and train the base model into the cache, unless they exist."""
    if not (folder / "test.txt").exists():  # written last
        say(f"writing questions and answers from this Python installation to {folder}")
        write_texts(folder, sources(), say)
    base_model(say=say)


def base_model(*, say: Say = print) -> tuple[Gpt, Loss, Loss]:
    """Return the base model (from the cache, or trained), its mean loss and its loss of every row."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gpt(LEAST_SIZE, context=CONTEXT, layers=LAYERS, heads=HEADS, width=WIDTH)
        # its text is that of the installation
        made_by = f"{platform.python_version()}-{LAYERS}-{WIDTH}-{CONTEXT}-{BASE_STEPS}"
        path = cache_folder() / "finetune" / f"base-{made_by}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            try:
                load_model(model, path)
            except (OSError, SafetensorError, RuntimeError):  # it is not there, or damaged
                say(
                    f"training the base model once, {BASE_STEPS:,} steps (about a minute); it is kept as {path}"
                )
                begun = time.perf_counter()
                loss = train(model, base_text(), steps=BASE_STEPS)
                say(f"the base model is trained: loss {loss:.3f}, {time.perf_counter() - begun:.0f} s")
                with files.replacing(path) as temporary:
                    save_model(model, str(temporary))
    return model, answer_loss, answer_losses


def answer_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean over rows of :func:`answer_losses`."""
    return answer_losses(model, rows).mean()


def answer_losses(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the cross-entropy of every row, the mean over the tokens of its answers; zero if it has none.

    Args:
        model: gives logits of shape ``(rows, length, vocabulary)``.
        rows: tokens, shape ``(rows, length + 1)``.
    """
    counted = in_answers(rows)[:, 1:]
    losses = next_token_each(model, rows) * counted
    return losses.sum(dim=1) / counted.sum(dim=1).clamp(min=1)


def in_answers(rows: Tensor) -> Tensor:
    r"""Return which bytes belong to an answer that starts in its row: after ``A: `` to the end of the line.

    Example:
        >>> rows = torch.tensor([list(b"f\nA: no\n\nQ: ")])
        >>> bytes(rows[in_answers(rows)].tolist())
        b'no\n'
    """
    return _latest(rows, b"\nA: ", 4) > _latest(rows, b"\n\n", 1)


def _latest(rows: Tensor, marker: bytes, behind: int) -> Tensor:
    """Return, at each position, the start of the latest marker plus ``behind``; -1 before the first one."""
    wanted = torch.tensor(list(marker), device=rows.device)
    found = (rows.unfold(1, len(marker), 1) == wanted).all(dim=2)
    begins = found.new_full(rows.shape, 0)
    begins[:, behind:] = found[:, : rows.shape[1] - behind]
    places = torch.arange(rows.shape[1], device=rows.device)
    return torch.where(begins, places, -1).cummax(dim=1).values


def base_text() -> bytes:
    """Return the base model's training text: the language manual, and modules without their docstrings."""
    from pydoc_data.topics import topics

    modules = (demo.split_docstrings(text)[1] for _, text in demo.library_modules())
    code = "\n".join(modules)[: demo.MOST_CHARACTERS]
    return ("\n\n".join(topics.values()) + "\n\n" + code).encode()


def train(model: nn.Module, text: bytes, *, steps: int, rows: int = BASE_ROWS) -> float:
    """Train on random rows of a text's bytes; return the mean loss of the last tenth of the steps."""
    tokens = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    losses: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = BASE_RATE * min(1.0, (step + 1) / 50) * (1 - step / steps)
        begins = torch.randint(len(tokens) - CONTEXT, (rows, 1), generator=draw)
        loss = next_token_loss(model, tokens[begins + torch.arange(CONTEXT + 1)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.zero_grad()
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def sources() -> dict[str, str]:
    """Return the five sources, validation and test by name."""
    modules = list(demo.library_modules())
    parts = {
        "docs": _deal(list(_docs(modules)), "docs"),
        "spelling": _deal(list(_spelling(modules)), "spelling"),
    }
    wrong = [*_misplaced(parts["docs"]["wrong"]), *_misspelled(parts["spelling"]["wrong"])]
    random.Random(0).shuffle(wrong)
    held_out = {part: [*parts["docs"][part], *parts["spelling"][part]] for part in ("validation", "test")}
    for own in held_out.values():
        random.Random(0).shuffle(own)
    return {
        "docs": _text(parts["docs"]["train"]),
        "spelling": _text(parts["spelling"]["train"]),
        "sums": _text(_sums())[:OTHER_CHARACTERS],
        "characters": _text(_characters())[:OTHER_CHARACTERS],
        "wrong": _text(wrong),
        **{part: _text(own) for part, own in held_out.items()},
    }


def _deal(exchanges: list[Exchange], name: str) -> dict[str, list[Exchange]]:
    """Deal exchanges to each part in turn, until it has its characters; the last part is for *wrong*."""
    sizes = {
        "train": GOOD_CHARACTERS,
        "validation": HELD_OUT_CHARACTERS,
        "test": HELD_OUT_CHARACTERS,
        "wrong": OTHER_CHARACTERS if name == "spelling" else OTHER_CHARACTERS // 4,
    }
    random.Random(name).shuffle(exchanges)
    waiting = iter(exchanges)
    parts: dict[str, list[Exchange]] = {}
    for part, size in sizes.items():
        own = parts[part] = []
        characters = 0
        while characters < size and (one := next(waiting, None)) is not None:
            own.append(one)
            characters += len(_text([one]))
    return parts


def _misplaced(exchanges: list[Exchange]) -> Iterator[Exchange]:
    """Yield every question with the answer to the next one, so that none is right."""
    for (question, _), (_, answer) in zip(exchanges, exchanges[1:] + exchanges[:1], strict=True):
        yield question, answer


def _misspelled(exchanges: list[Exchange]) -> Iterator[Exchange]:
    """Yield the exchanges with every other letter of the answers, on average, replaced by a random one."""
    draw = random.Random(0)
    for question, answer in exchanges:
        letters = answer.split("-")
        yield question, "-".join(draw.choice(ascii_lowercase) if draw.random() < 0.5 else x for x in letters)


def _text(exchanges: list[Exchange] | Iterator[Exchange]) -> str:
    return "".join(f"Q: {question}\nA: {answer}\n\n" for question, answer in exchanges)


def _docs(modules: Sequence[tuple[str, str]]) -> Iterator[Exchange]:
    """Yield what functions and classes do; of equal answers only the first."""
    seen: set[str] = set()
    for module, text in modules:
        for node in ast.parse(text).body:
            inner = node.body if isinstance(node, ast.ClassDef) else []
            for one in chain([node], inner):
                if not isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                answer = " ".join((ast.get_docstring(one) or "").split("\n\n")[0].split())
                if 20 <= len(answer) <= 160 and answer not in seen:
                    seen.add(answer)
                    name = one.name if one is node else f"{getattr(node, 'name', '')}.{one.name}"
                    yield f"What does {module}.{name} do?", answer


def _spelling(modules: Sequence[tuple[str, str]]) -> Iterator[Exchange]:
    words: set[str] = set()
    for _, text in modules:
        words |= set(re.findall(r"(?<![A-Za-z])[a-z]{4,10}(?![A-Za-z])", text))
    for word in sorted(words):
        yield f"How is {word} spelled?", "-".join(word)


def _sums() -> Iterator[Exchange]:
    draw = random.Random(0)
    for _ in range(OTHER_CHARACTERS // 25):
        first, second = draw.randrange(1000), draw.randrange(1000)
        if draw.random() < 0.5:
            yield f"What is {first} + {second}?", str(first + second)
        else:
            yield f"What is {first} - {second}?", str(first - second)


def _characters() -> Iterator[Exchange]:
    named = list(demo.character_names())
    random.Random(0).shuffle(named)
    for character, name in named:
        yield f"Which character is U+{ord(character):04X}?", name
