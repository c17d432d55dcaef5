"""The share of lines, passages, or blocks of tokens, that two texts have in common."""

from __future__ import annotations

import itertools
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixwell.data import sketches as module
from mixwell.data.sketches import BlockSketch, LineSketch, PassageSketch, overlap


def lines(numbers: range) -> str:
    return "\n".join(f"this is the line with the number {i:08d}" for i in numbers)


def sketch(text: str, size: int = module.SIZE) -> LineSketch:
    made = LineSketch(size)
    made.add(text, ends=True)
    return made


def passages(text: str, size: int = module.SIZE) -> PassageSketch:
    made = PassageSketch(size)
    made.add(text)
    return made


def prose(words: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    known = ["".join(chr(97 + i) for i in rng.integers(0, 26, size)) for size in rng.integers(2, 9, 3000)]
    return " ".join(known[i] for i in rng.zipf(1.3, words) % len(known))


def blocks(tokens: np.ndarray, size: int = module.SIZE) -> BlockSketch:
    made = BlockSketch(size)
    made.add(tokens)
    return made


def test_overlap_is_exact_if_nothing_was_dropped() -> None:
    validation, domain = sketch(lines(range(100))), sketch(lines(range(70, 5000)))
    assert validation.whole
    assert overlap(validation, domain) == 0.3
    assert overlap(domain, validation) == 30 / 4930
    assert overlap(validation, validation) == 1
    assert overlap(validation, sketch("")) == overlap(sketch(""), validation) == 0


@pytest.mark.parametrize(
    ("validation_lines", "domain_lines"), [(400, 60_000), (60_000, 60_000), (60_000, 400)]
)
def test_overlap_is_estimated_if_sampled(validation_lines: int, domain_lines: int) -> None:
    start = validation_lines // 2
    validation = sketch(lines(range(validation_lines)), size=4096)
    domain = sketch(lines(range(start, start + domain_lines)), size=4096)
    assert len(domain.hashes) == min(4096, domain_lines)
    assert domain.whole == (domain_lines <= 4096)
    expected = min(validation_lines - start, domain_lines) / validation_lines
    assert overlap(validation, domain) == pytest.approx(expected, abs=0.12)


def test_short_lines_and_whitespace_are_ignored() -> None:
    assert len(sketch("x" * 31 + "\n" + " " * 40 + "\n" + "x " * 10).hashes) == 0
    line = "x" * 32
    assert overlap(sketch(f"  {line}\t\r\n{line}\n{line}"), sketch(line)) == 1
    assert len(sketch(f"  {line}\t\r\n{line}\n{line}").hashes) == 1


def literal(documents: list[str]) -> list[int]:
    """The hashes of a text's lines as their definition has it."""
    longest = module.LONGEST_LINE
    stripped = {line.strip()[:longest].rstrip() for text in documents for line in text.split("\n")}
    counting = [line.encode() for line in stripped if len(line) >= module.LINE_CHARACTERS]
    return sorted(int.from_bytes(blake2b(line, digest_size=8).digest(), "little") for line in counting)


SEPARATED = "".join(["\x1c\x1d", "s" * 40, "\x1f\n", "\x1e" * 40, "\n"])
UNICODE = "\u2003" + "Größe, Ⅷ, 数 " * 4 + "\u00a0\n" + "é" * 31 + "\n" + "数" * 32 + "\n"


@settings(deadline=None)
@given(st.data())
def test_lines_do_not_depend_on_chunks(data) -> None:
    kinds = [
        "plain ascii line of more than 32 characters\r\n",
        "short\n",
        " \t\v\f",
        "\n",
        "y" * 33,
        SEPARATED,
    ]
    kinds += [UNICODE, "x" * 70_000, " " * 70_000]
    pieces = st.lists(st.sampled_from(kinds) | st.text(max_size=60), max_size=8).map("".join)
    documents = data.draw(st.lists(pieces, min_size=1, max_size=4))
    made = LineSketch()
    for text in documents:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
        for start, end in itertools.pairwise([0, *cuts, len(text)]):
            made.add(text[start:end])
        made.add("", ends=True)
    assert made.hashes.tolist() == literal(documents)


def test_documents_end_lines() -> None:
    made = LineSketch()
    made.add("x" * 20, ends=True)
    made.add("x" * 20, ends=True)
    assert len(made.hashes) == 0
    made.add("x" * 20)
    made.add("x" * 20)
    assert made.hashes.tolist() == sketch("x" * 40).hashes.tolist()


def test_long_lines_use_bounded_memory() -> None:
    made = LineSketch()
    for _ in range(100):
        made.add("word " * 1000)
    assert len(made._tail) <= module.LONGEST_LINE
    assert made.hashes.tolist() == sketch("  " + "word " * 100_000).hashes.tolist()


def test_arrays() -> None:
    whole = sketch(lines(range(3000)), size=1000)
    again = LineSketch.from_array(whole.to_array(), size=1000)
    assert again.hashes.tolist() == whole.hashes.tolist()
    assert again.threshold == whole.threshold
    again.add(lines(range(9000)))
    assert again.hashes.tolist() == sketch(lines(range(9000)), size=1000).hashes.tolist()
    with pytest.raises(ValueError, match=r"not a sketch: .* got float64 \(3,\)"):
        LineSketch.from_array(np.zeros(3))


def test_short_lines_are_found_as_passages() -> None:
    text = prose(30_000).replace(" ", "\n")
    assert max(map(len, text.split("\n"))) < module.LINE_CHARACTERS
    assert overlap(passages(text), passages(text)) == 1
    assert overlap(passages(text[20_011:40_007]), passages(text)) == 1
    assert overlap(passages(text), passages(text[20_011:40_007])) == pytest.approx(0.12, abs=0.02)
    assert overlap(passages("abc\n" * 30), passages("abc\n" * 100_000)) == 1


def test_excerpts_of_one_line_are_found_as_passages() -> None:
    text = prose(400_000)
    whole = passages(text)
    assert not whole.whole
    assert len(whole.hashes) == module.SIZE
    assert overlap(passages(text[1003:50_000]), whole) == 1
    assert overlap(passages(text[1_000_003:]), whole) == 1
    part = passages(text[:100_000] + prose(20_000, seed=1))
    assert overlap(part, whole) == pytest.approx(0.5, abs=0.1)
    assert overlap(passages(prose(100_000, seed=1)), whole) == 0
    # the same words in another order
    shuffled = text.split()
    np.random.default_rng(0).shuffle(shuffled)
    assert overlap(passages(" ".join(shuffled)), whole) < 0.001


def test_passages_ignore_whitespace() -> None:
    text = prose(20_000)
    wrapped = text.replace(" ", "\r\n\t")
    assert passages(wrapped).hashes.tolist() == passages(text).hashes.tolist()
    assert len(passages("x " * 63).hashes) == 0
    assert len(passages("x " * 64).hashes) == 1
    assert len(passages("\n" * 1000).hashes) == 0


@pytest.mark.parametrize(
    "text", [prose(90_000), prose(50) * 1000, "ä€" * 200_000], ids=["long", "again", "wide"]
)
def test_passages_do_not_depend_on_chunks(text: str) -> None:
    expected = passages(text, size=5000)
    cuts = [0, 1, 63, 64, 65, 1000, 131_071, 131_072, 200_000, len(text)]
    for read in (False, True):
        made = PassageSketch(5000)
        for start, end in itertools.pairwise(cuts):
            made.add(text[start:end])
            if read:
                assert len(made.hashes) <= 5000
        assert made.hashes.tolist() == expected.hashes.tolist()
        assert made.threshold == expected.threshold


def test_all_passages_are_hashed() -> None:
    text = prose(60_000) + prose(40, seed=1) * 2000
    bare = text.replace(" ", "")
    distinct = {bare[i : i + module.PASSAGE_BYTES] for i in range(len(bare) - module.PASSAGE_BYTES + 1)}
    made = passages(text, size=1 << 20)
    assert made.whole
    assert len(made.hashes) == len(distinct)


def test_blocks_are_found_at_any_offset() -> None:
    rng = np.random.default_rng(0)
    domain = rng.integers(0, 50_000, 200_000)
    assert overlap(blocks(domain[777:50_001].astype(np.uint16)), blocks(domain)) == 1
    mixed = np.concatenate([domain[1001:31_001], rng.integers(0, 50_000, 30_000)])
    assert overlap(blocks(mixed), blocks(domain)) == pytest.approx(0.5, abs=0.1)
    assert overlap(blocks(rng.integers(0, 50_000, 30_000)), blocks(domain)) == 0
    assert len(blocks(domain).hashes) == pytest.approx(200_000 / 64, rel=0.1)
    assert len(blocks(np.arange(63)).hashes) == 0


def test_blocks_do_not_depend_on_chunks() -> None:
    tokens = np.random.default_rng(0).integers(0, 300, 150_000)
    made = BlockSketch()
    for part in np.split(tokens, [1, 30, 63, 64, 200, 90_000, 149_990]):
        made.add(part)
    assert made.hashes.tolist() == blocks(tokens).hashes.tolist()


def test_comparing_lines_and_blocks_raises() -> None:
    with pytest.raises(ValueError, match="a sketch of lines cannot be compared with one of blocks"):
        overlap(sketch("x"), blocks(np.arange(3)))
    with pytest.raises(ValueError, match="a sketch of passages cannot be compared with one of lines"):
        overlap(passages("x"), sketch("x"))
