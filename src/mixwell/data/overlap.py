"""The overlap of two token files: whether validation text is also in the training data."""

from __future__ import annotations

from functools import lru_cache

from mixwell.data.sketches import BlockSketch, TextSketches, overlap
from mixwell.data.tokenization import TokenFile, chunks


def shared_fraction(validation: TokenFile, domain: TokenFile) -> float:
    """Return the fraction of validation that is also in a domain; see :func:`mixwell.data.sketches.overlap`.

    Where both texts are known it is the greater of the fractions of lines and of passages: lines are found in any
    order, passages also where lines are short and where an excerpt begins or ends within a line. Otherwise it is
    measured in blocks of tokens, for which the whole arrays are read.
    """
    if validation.sketches is None or domain.sketches is None:
        return overlap(block_sketch(validation), block_sketch(domain))
    sought, present = TextSketches.load(validation.sketches), TextSketches.load(domain.sketches)
    return max(overlap(sought.lines, present.lines), overlap(sought.passages, present.passages))


@lru_cache(maxsize=4)  # validation is compared with every domain
def block_sketch(tokens: TokenFile) -> BlockSketch:
    """Return the sketch of the blocks of a token file."""
    sketch = BlockSketch()
    for _, chunk in chunks(tokens.array()):
        sketch.add(chunk)
    return sketch
