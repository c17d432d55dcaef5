"""Wrong command lines."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from helpers.storm.cases import HUGE, Case, small_config

KIND = "command lines"
WORDS = (
    "", "x", "-1", "0", "1e308", "nan", "inf", "-inf", str(HUGE), "~nobody", "~no_such_user/x", "tiny.yaml", "/", ".", "/dev/null", "/dev/zero", "a" * 5000, "é", "[", "--", "-h", "\n",
    "letters.txt", "fifo", "1,2", ",", "1.5", "None", "a\tb",
)  # fmt: skip
COMMANDS = (
    "init",
    "plan",
    "run",
    "methods",
    "resume",
    "export",
    "fidelity",
    "tokenizer",
    "report",
    "compare",
    "demo",
    "reproduce",
    "nothing",
    "--version",
)
OPTIONS = (
    "--out",
    "--set",
    "--engine",
    "--ray-address",
    "--to",
    "--weights",
    "--path",
    "--paths",
    "--steps",
    "--seeds",
    "--size",
    "--processes",
    "--methods",
    "--horizons",
    "--equal",
    "--workers",
    "--replicates",
    "--nothing",
    "--help",
)
SET = (
    "a", "=", "=1", "a=", "a=1", ".=1", "..=1", "model=3", "model.layers=", "model.layers=[", "model.layers.x=1", "steps={", "steps=!!python/name:os", "domains.x=~nobody/x", "domains.letters=~no_such_user/x",
    "domains.letters.files.x=1", "tokenizer=~nobody/t.json", "tokenizer=fifo", "tokenizer=/dev/zero", "tokenizer=letters.txt", "base=~nobody", "base=fifo", "base=/dev/null", "device=x", "device=cuda:99", "device=meta", "device=cpu:99", "device=''",
    "device=mps", "device=vulkan", "mixer.method=x", "mixer.method=", "mixer.method=doremi", "mixer.options.reference=x", "mixer.options={reference: ~nobody/x, x: 1}", "loggers.tensorboard=3", "loggers.x=true", "loggers.wandb.x=1", "loggers.jsonl=true",
    "mixer.weights.letters=0", "mixer.weights={letters: 1e300, numbers: 1e-300, marks: 1}", "mixer.floor=2", "mixer.cap=0", "mixer.floor=1e308", "mixer.max_epochs=1e-300", "steps=&a [*a]", "steps=" + "[" * 3000, "steps=" + "9" * 5000, "precision=float16", "compile=x", "parallel.strategy=x",
    "model.kind=transformers", "model={kind: transformers, path: ~nobody/x}", "model={kind: transformers, path: x}", "model={kind: x}", "model.kind=3", "model.kind=[]", "optimizer.kind=[]", "mixer.traces=[]", "optimizer.betas=[1]", "optimizer.betas=x", "mixer.method=[]", "loggers=[]", "domains={}", "domains.letters={}",
    "domains.letters={files: a, jsonl: b}", "domains.letters={huggingface: x/y}", "domains.letters=[]", "domains.letters=['']", "domains.letters=[[]]", "compare.x.y=1", "compare={a: 3}", "batch.rows=1", "batch.micro_rows=0", "batch.min_rows_per_domain=99", "mixer.horizon=99", "mixer.warmup=99", "mixer.validation_rows=99999999",
    "output.evaluate_rows=99999999", "model.heads=3", "model.dropout=1", "optimizer.final=nan", "optimizer.betas=[.nan, 0.5]",
)  # fmt: skip
LINES: tuple[tuple[str, ...], ...] = (
    ("reproduce", "quadratic", "--radius", "1e308", "--budget", "20", "--horizons", "1,5"),
    ("reproduce", "quadratic", "--radius", "1e154", "--budget", "20", "--horizons", "1,5"),
    ("reproduce", "quadratic", "--radius", "nan", "--budget", "20"), ("reproduce", "quadratic", "--radius", "-1", "--budget", "20"), ("reproduce", "quadratic", "--radius", "0", "--budget", "20"), ("reproduce", "quadratic", "--radius", "1e-320", "--budget", "20", "--horizons", "1,5"),
    ("reproduce", "quadratic", "--step-size", "1e308", "--budget", "20", "--horizons", "1,5"), ("reproduce", "quadratic", "--learning-rate", "1e308", "--budget", "20", "--horizons", "1,5"), ("reproduce", "quadratic", "--learning-rate", "nan", "--budget", "20"), ("reproduce", "quadratic", "--margin", "1e308", "--budget", "20"),
    ("reproduce", "quadratic", "--margin", "nan", "--budget", "20"), ("reproduce", "quadratic", "--margin", "0", "--budget", "20"), ("reproduce", "quadratic", "--budget", "0"), ("reproduce", "quadratic", "--horizons", "x"), ("reproduce", "quadratic", "--budget", "20", "--horizons", "99"), ("reproduce", "quadratic", "--budget", "20", "--out", "fifo"),
    ("reproduce", "bounds", "--seeds", "0"), ("reproduce", "bounds", "--copies", "0"), ("reproduce", "bounds", "--decades", "nan"), ("reproduce", "bounds", "--decades", "-1"), ("reproduce", "bounds", "--decades", "inf"), ("reproduce", "bounds", "--decades", "1e308"), ("reproduce", "mnist", "--budget", "x"),
    ("reproduce", "mnist", "--seeds", "0"), ("reproduce", "nothing"), ("compare", "nothing"), ("compare", "tiny.yaml", "--methods", "x"), ("compare", "tiny.yaml", "--seeds", "0"), ("compare", "tiny.yaml", "--horizons", "x"), ("compare", "tiny.yaml", "--equal", "x"), ("compare", "tiny.yaml", "--workers", "0"), ("compare", "tiny.yaml", "--methods", ""),
    ("export",), ("export", "tiny.yaml", "--to", "megatron"), ("export", "nothing", "--to", "x"), ("export", "letters.txt", "--to", "megatron"), ("export", "fifo", "--to", "megatron"), ("export", "/dev/zero", "--to", "megatron"), ("export", "~nobody", "--to", "megatron"),
    ("report",), ("report", "nothing"), ("report", "fifo"), ("report", "/dev/zero"), ("report", "."), ("report", "letters.txt"), ("report", ".", "."), ("report", "~nobody"), ("resume", "."), ("resume", "fifo"), ("resume", "letters.txt"), ("fidelity", "."), ("fidelity", ".", "--steps", "0"), ("methods", "x"), ("methods", ""),
    ("tokenizer", "tiny.yaml", "--size", "0"), ("tokenizer", "tiny.yaml", "--size", "1000000000000"), ("tokenizer", "tiny.yaml", "--size", "300", "--out", "fifo"), ("tokenizer", "tiny.yaml", "--size", "300", "--out", "/nothing/x"), ("tokenizer", "tiny.yaml", "--size", "300", "--out", "letters.txt/x"), ("tokenizer", "tiny.yaml", "--size", "300", "--out", "~nobody/x"),
    ("init", "."), ("init", "letters.txt"), ("init", "letters.txt/x"), ("init", "/nothing/x"), ("init", "fifo"), ("init", "~nobody"), ("run", "tiny.yaml", "--out", "letters.txt"), ("run", "tiny.yaml", "--out", "fifo"), ("run", "tiny.yaml", "--out", "/proc/x"), ("run", "tiny.yaml", "--out", "/dev/null"), ("run", "tiny.yaml", "--out", "letters.txt/x"), ("run", "tiny.yaml", "--out", "~nobody/x", "--no-report"),
    ("run", "tiny.yaml", "--engine", "x"), ("run", "tiny.yaml", "--engine", "local", "--ray-address", "x"), ("run", "~nobody/x.yaml"), ("plan", "~nobody"), ("plan", "~no_such_user/x"), ("plan", "tiny.yaml", "--processes", "-1"), ("plan", "tiny.yaml", "--processes", str(HUGE)), ("demo", "--steps", "0"), ("demo", "--steps", "-1"), ("demo", "--seeds", "0"), ("demo", "--out", "letters.txt"),
    ("plan", "tiny.yaml", "--processes", "1000000"), ("export", "--list"), ("plan", "letters.txt"), ("plan", "/"),
)  # fmt: skip


def cases(seed: int, *, random_lines: int = 50) -> list[Case]:
    """Return chosen command lines, each ``--set`` of a list, and lines of random words."""
    found = [_case(line) for line in LINES]
    for number, one in enumerate(SET):
        found.append(_case((("plan", "run")[number % 2], "tiny.yaml", "--set", one)))
    for number in range(random_lines):
        own = random.Random(f"{KIND} {seed} {number}")
        # Those that would train for minutes if they were right are not drawn.
        command = own.choice([one for one in COMMANDS if one not in ("demo", "compare", "reproduce")])
        words = [own.choice(WORDS if own.random() < 0.6 else OPTIONS) for _ in range(own.randrange(5))]
        found.append(_case((command, *words)))
    return found


def _case(line: Sequence[str]) -> Case:
    def write(folder: Path) -> Sequence[str]:
        small_config(folder)
        os.mkfifo(folder / "fifo")
        return line

    return Case(KIND, " ".join(word[:60] for word in line), write)
