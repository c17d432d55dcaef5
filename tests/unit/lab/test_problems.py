"""Embedded problems: all are listed and readable, their parts share nothing, and what is known of them holds."""

from __future__ import annotations

import gzip
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from helpers import commands
from mixwell.lab import packages, problems
from mixwell.lab.compare.variants import choose
from mixwell.lab.problems import demo as corpus
from mixwell.lab.problems import fashion, finetune, manuals, mnist, synthetic, text
from mixwell.training import config_io
from mixwell.training.models.base import next_token_each

NAMES = ["mnist", "fashion", "demo", "drama", "repetition", "manuals", "finetune", "synthetic"]
MODULES = [
    (f"module{n}", f'def work{n}():\n    "Does the work of number {n} quickly."\n    {letter * 5} = 1\n')
    for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz" * 2)
]


# ---------------------------------------------------------------------------------------------------- all of them


def test_all_problems_are_listed(tmp_path: Path) -> None:
    assert list(problems.PROBLEMS) == NAMES
    printed, _ = commands.mixwell("compare", "--help", cwd=tmp_path)
    printed = " ".join(printed.split())  # descriptions are wrapped
    assert all(name in printed and one.description in printed for name, one in problems.PROBLEMS.items())


@pytest.mark.parametrize("name", NAMES)
def test_configs_are_valid_and_have_a_test_set(name: str) -> None:
    config = config_io.validate_config(yaml.safe_load(problems.read_config(name)))
    assert config.validation is not None
    assert config.test is not None
    assert len(config.domains) >= 2
    module, _, function = problems.PROBLEMS[name].prepare.partition(":")
    assert callable(getattr(import_module(f"{problems.__name__}.{module}"), function))


def test_problem_without_data_is_compared(tmp_path: Path) -> None:
    printed, _ = commands.mixwell(
        *("compare", "synthetic", "--methods", "uniform", "--seeds", "1", "--workers", "1", "--no-figures"),
        *("--set", "steps=4", "--out", "out"),
        cwd=tmp_path,
    )
    assert "uniform" in printed
    assert (tmp_path / "out" / "synthetic.yaml").exists()


@pytest.mark.parametrize(
    ("name", "tool"), [("fashion", "npm"), ("drama", "npm"), ("repetition", "npm"), ("manuals", "apt-get")]
)
def test_unreachable_registry_prints_one_line(
    name: str, tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    said, error = commands.mixwell("compare", name, "--out", "out", cwd=tmp_path, status=2)
    assert "fetching" in said
    assert f"{tool} is not installed" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_text_problem_includes_variants(tmp_path: Path) -> None:
    config = config_io.read_config(problems.find("demo", tmp_path, Console(quiet=True)))
    assert config.compare["doge-online"] == {"method": "doge", "options": {"transfer": False}}
    chosen, refused = choose(config, ["all"])
    assert not refused
    assert "learning-to-reweight-domains" in {one.name for one in chosen}


# ---------------------------------------------------------------------------------------------------- images


def test_images_of_small_mnist_problem(mnist_images: Any) -> None:
    mnist.digits.cache_clear()
    images, labels = mnist.digits("vanilla", 8)
    again, noisy = mnist.digits("noisy", 8, wrong=0.5)
    assert images.shape == again.shape == (8, 1, 28, 28)
    assert labels.shape == noisy.shape == (8,)
    turned, same = mnist.digits("vanilla", 8, angle=45.0)
    assert same.tolist() == labels.tolist()
    assert not np.allclose(turned, images)
    mnist.digits.cache_clear()


def test_fashion_images_are_parsed_and_deduplicated() -> None:
    first, second = [0] * 783 + [1], [7] * 784
    contents = [json.dumps({"data": data}).encode() for data in ([first, [], first], [second, first])]
    images, labels = fashion.parse(contents)
    assert images.shape == (2, 28, 28)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match="class 0 has 3 pixels instead of 784"):
        fashion.parse([b'{"data": [[1, 2, 3]]}'])


def test_fashion_domains_are_corrupted_and_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict.fromkeys(fashion.PARTS, 20)
    pixels = torch.randint(0, 256, (140, 28, 28), dtype=torch.uint8)
    labels = torch.arange(140) % 10
    monkeypatch.setattr(fashion, "PARTS", sizes)
    monkeypatch.setattr(fashion, "load", lambda: (pixels, labels))
    fashion.clothes.cache_clear()
    parts = {part: fashion.clothes(part, 20) for part in sizes}
    assert len({image.numpy().tobytes() for images, _ in parts.values() for image in images}) == 140
    plain, right = parts["noisy"]
    _, wrong = fashion.clothes("noisy", 20, wrong=1.0)
    assert bool((wrong != right).all())
    assert torch.equal(fashion.clothes("noisy", 20, shift=1)[1], (right + 1) % 10)
    inverted, _ = fashion.clothes("noisy", 20, invert=True)
    raw = plain * fashion.DEVIATION + fashion.MEAN
    torch.testing.assert_close(inverted * fashion.DEVIATION + fashion.MEAN, 1 - raw)
    coarse, _ = fashion.clothes("noisy", 20, block=4)
    assert coarse[0, 0, :4, :4].unique().numel() == 1
    torch.testing.assert_close(coarse[0, 0, 0, 0], plain[0, 0, :4, :4].mean())
    with pytest.raises(ValueError, match="20 rows of 'clean', and 21 were asked for"):
        fashion.clothes("clean", 21)
    fashion.clothes.cache_clear()


# ---------------------------------------------------------------------------------------------------- text


def test_chapters_are_in_one_split() -> None:
    verses = {f"Book {c}:{v}": f"verse {v} of {c:04}" for c in range(12) for v in range(3)}
    parts = text.split_chapters(verses, train=100, held_out=150)
    assert parts == text.split_chapters(verses, train=100, held_out=150)
    chapters = {
        part: {line.split()[-1] for line in own.splitlines() if re.search(r" \d{4}$", line)}
        for part, own in parts.items()
    }
    assert list(chapters) == ["train", "validation", "test"]
    assert all(chapters.values())
    assert sum(map(len, chapters.values())) == len(set().union(*chapters.values()))


def test_texts_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"domain": "words", "test": "other words"}
    monkeypatch.setattr(text, "six_kinds", lambda _: made)
    said: list[str] = []
    text.prepare_drama(tmp_path, said.append)
    assert said == [f"{tmp_path}/domain.txt: 5 characters", f"{tmp_path}/test.txt: 11 characters"]
    text.prepare_drama(tmp_path, said.append)
    assert len(said) == 2
    assert (tmp_path / "domain.txt").read_text() == "words"


def test_roff_becomes_plain_text() -> None:
    roff = r"""'\" t
.\" a comment
.TH LS 1 "2022" "GNU" "Comandi"
.de XX
hidden
..
.SH "NOME E ALTRO"
\fBls\fP \- elenca \(aqil\(aq \f[I]contenuto\fR\&.
.TP 4
\fI\,file\/\fP \" a remark
.IP \(bu 4
.BR chmod (1),
.B uno "due tre"
.TS
l l.
a	b
.TE
.UR https://example.org
testo
.UE
"""
    assert manuals.plain(roff).splitlines() == [
        "NOME E ALTRO",
        "ls - elenca 'il' contenuto.",
        "file",
        "•",
        "chmod(1),",
        "uno due tre",
        "testo",
    ]


def test_redirect_pages_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "una riga di testo che basta per essere tenuta\n" * 3
    contents = {
        "./usr/share/man/it/man1/ls.1.gz": f".SH NOME\n{body}.SH TRADUZIONE\nQualcuno\n",
        "./usr/share/man/it/man1/dir.1.gz": ".so man1/ls.1\n",
    }
    zipped = {name: gzip.compress(content.encode()) for name, content in contents.items()}

    def members(_: Path, choose: Any) -> dict[str, bytes]:
        return {name: content for name, content in zipped.items() if choose(name)}

    monkeypatch.setattr(packages, "members", members)
    assert manuals.pages(Path("any.deb"), "it") == {"ls.1": f"NOME\n{body.strip()}"}
    assert manuals.pages(Path("any.deb"), "de") == {}


def test_splits_share_no_page_or_line() -> None:
    license = "every page of this manual has the very same license"
    found = {
        f"page{n}.1": f"NAME\npage {n} is a page like no other, and is long\n{license}" for n in range(30)
    }
    found["page0.1"] += "\nnobody has translated this line, which is in English"
    left_out = {"nobody has translated this line, which is in English"}
    parts = manuals.split_pages(found, train=300, held_out=900, left_out=left_out)
    assert "page0.1" in {name for own in parts.values() for name in own}
    assert parts == manuals.split_pages(found, train=300, held_out=900, left_out=left_out)
    names = [name for own in parts.values() for name in own]
    assert len(names) == len(set(names))
    assert all(parts.values())
    lines = [line for own in parts.values() for page in own.values() for line in page.splitlines()]
    long = [line for line in lines if line != "NAME"]
    assert len(long) == len(set(long))
    assert not left_out & set(long)


# ---------------------------------------------------------------------------------------------------- fine-tuning


@pytest.fixture
def small_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(corpus, "library_modules", lambda: iter(MODULES))
    monkeypatch.setattr(finetune, "GOOD_CHARACTERS", 400)
    monkeypatch.setattr(finetune, "HELD_OUT_CHARACTERS", 400)
    monkeypatch.setattr(finetune, "OTHER_CHARACTERS", 2000)
    monkeypatch.setattr(finetune, "BASE_STEPS", 3)
    monkeypatch.setattr(finetune, "base_text", lambda: b"some words to read, again and again. " * 20)
    monkeypatch.setenv("MIXWELL_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("small_library")
def test_questions_are_in_one_split_and_wrong_answers_differ() -> None:
    sources = finetune.sources()
    assert sources == finetune.sources()
    assert list(sources) == ["docs", "spelling", "sums", "characters", "wrong", "validation", "test"]
    asked = {
        name: set(part.splitlines()[::3])
        for name, part in sources.items()
        if name not in ("sums", "characters")
    }
    assert all(asked[name] for name in ("docs", "wrong", "validation", "test"))
    assert sum(map(len, asked.values())) == len(set().union(*asked.values()))
    for name in ("docs", "validation", "test", "wrong"):
        for exchange in sources[name].split("\n\n"):
            if "What does" in exchange:
                question, answer = exchange.splitlines()
                number = question.split("work")[1].split(" ")[0]
                assert (f"number {number} " in answer) == (name != "wrong")
    first = sources["sums"].split("\n\n")[0].removeprefix("Q: What is ")
    question, answer = first.split("?\nA: ")
    assert eval(question) == int(answer)


@pytest.mark.usefixtures("small_library")
def test_base_model_is_trained_once_without_changing_rng() -> None:
    said: list[str] = []
    before = torch.get_rng_state()
    model, loss, row_losses = finetune.base_model(say=said.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert "training the base model once, 3 steps" in said[0]
    again, *_ = finetune.base_model(say=said.append)
    assert len(said) == 2
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is None
    rows = torch.tensor([list(b"?\nA: yes\n\nQ: a"), list(b"Q: no answer here")[:14]])
    losses = row_losses(again, rows)
    torch.testing.assert_close(loss(model, rows), losses.mean())
    each = next_token_each(model, rows)
    torch.testing.assert_close(losses, torch.stack([each[0, 4:8].mean(), torch.tensor(0.0)]))


# ---------------------------------------------------------------------------------------------------- closed form


def test_row_moments_match_closed_form() -> None:
    inputs, labels = synthetic.regression("2", 500)
    inputs, labels = inputs.double(), labels.double()
    torch.testing.assert_close(inputs.T @ inputs / 500, synthetic.covariance(), atol=1e-5, rtol=1e-5)
    noise = labels - inputs @ synthetic.minimizers()[2]
    assert float(noise.square().mean()) == pytest.approx(synthetic.NOISE**2, rel=1e-4)
    assert float((inputs.T @ noise / 500).abs().max()) < 1e-5
    eigenvalues = torch.linalg.eigvalsh(synthetic.covariance())
    assert float(eigenvalues[-1] / eigenvalues[0]) == pytest.approx(synthetic.CONDITION)
    with pytest.raises(ValueError, match="more rows than the dimension 24, got 24"):
        synthetic.regression("0", 24)


@pytest.mark.parametrize("weights", [synthetic.WEIGHTS, (1 / 6,) * 6, (0.5, 0.5, 0, 0, 0, 0)])
def test_excess_validation_loss_matches_closed_form(weights: tuple[float, ...]) -> None:
    """By the normal equations of the weighted rows, which know nothing of the formula."""
    moment = torch.zeros(synthetic.DIMENSION, synthetic.DIMENSION, dtype=torch.float64)
    right = torch.zeros(synthetic.DIMENSION, dtype=torch.float64)
    for domain, weight in enumerate(weights):
        inputs, labels = (one.double() for one in synthetic.regression(str(domain), 400))
        moment += weight * inputs.T @ inputs / 400
        right += weight * inputs.T @ labels / 400
    trained = torch.linalg.solve(moment, right)
    least = synthetic.NOISE**2 / 2
    expected = synthetic.excess(torch.tensor(weights, dtype=torch.float64))
    for part in synthetic.HELD_OUT:
        inputs, labels = (one.double() for one in synthetic.regression(part, 400))
        found = float((inputs @ trained - labels).square().mean()) / 2
        assert found - least == pytest.approx(expected, abs=1e-5)
    if weights == synthetic.WEIGHTS:
        assert expected == pytest.approx(0, abs=1e-20)
    else:
        assert expected > 0.1


def test_training_at_optimum_reaches_minimum_loss() -> None:
    model, loss, row_losses = synthetic.linear()
    domains = [synthetic.regression(str(domain), 200) for domain in range(6)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(400):
        optimizer.zero_grad()
        losses = torch.stack([loss(model, rows) for rows in domains])
        (synthetic.optimum().float() @ losses).backward()
        optimizer.step()
    held_out = synthetic.regression("test", 200)
    assert loss(model, held_out).item() == pytest.approx(synthetic.NOISE**2 / 2, abs=1e-4)
    torch.testing.assert_close(row_losses(model, held_out).mean(), loss(model, held_out))


def test_the_minimizers_are_affinely_independent() -> None:
    differences = synthetic.minimizers()[1:] - synthetic.minimizers()[0]
    assert int(torch.linalg.matrix_rank(differences)) == 5
    assert float(synthetic.optimum().sum()) == pytest.approx(1)
