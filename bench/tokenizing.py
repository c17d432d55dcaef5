"""How fast text becomes tokens on disk with `tokenizer: bytes`: python bench/tokenizing.py

All that a run does with a text that it has not seen: the digest of the file, reading, decoding, tokens, the
sketches of lines and passages by which overlap is found, and writing. The text is that of the Python files of this
environment, as it is (most lines are short, and each that counts is hashed), and with ten lines put into one, as
in prose. By the processor's time of one thread; median and range of several repeats, and the share of each part.
"""

import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measure import plain_parser, summarize, write_results

from mixwell.data.sketches import LineSketch, PassageSketch
from mixwell.data.sources import TextFiles
from mixwell.data.tokenization import tokenize
from mixwell.data.tokenizer import ByteTokenizer

PIECE = 4 << 20


def corpus(size: int) -> str:
    parts: list[str] = []
    found = 0
    for place in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_paths()[place]).rglob("*.py")):
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if "\0" in text:
                continue
            parts.append(text)
            found += len(text)
            if found >= size:
                return "".join(parts)
    return "".join(parts)


def joined(text: str) -> str:
    lines = text.split("\n")
    return "\n".join(" ".join(lines[i : i + 10]) for i in range(0, len(lines), 10))


def used(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def whole(path: Path) -> float:
    with tempfile.TemporaryDirectory() as cache:
        source = TextFiles(path.name, base=path.parent)
        return used(lambda: tokenize(source, ByteTokenizer(), cache=Path(cache)))


def draw_sketch(sketch: LineSketch | PassageSketch, pieces: list[str]) -> None:
    for piece in pieces:
        sketch.add(piece)
    sketch.to_array()


def main() -> None:
    parser = plain_parser(__doc__, out="tokenizing.json")
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    code = corpus(options.megabytes * 1_000_000)
    results: dict[str, object] = {}
    for name, text in (("code", code), ("ten lines in one", joined(code))):
        pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "text.txt")
            path.write_bytes(text.encode())
            size = path.stat().st_size / 1e6
            whole(path)  # once for the page cache
            times = [whole(path) for _ in range(options.repeats)]
        parts = {
            part: [used(partial(draw_sketch, kind(), pieces)) for _ in range(options.repeats)]
            for part, kind in (("lines", LineSketch), ("passages", PassageSketch))
        }
        rates = summarize([size / seconds for seconds in times])
        shares = {part: statistics.median(own) / statistics.median(times) for part, own in parts.items()}
        fractions = ", ".join(f"{share:.0%} {part}" for part, share in shares.items())
        print(
            f"{name}: {size:.0f} MB, {text.count(chr(10)):,} lines: {rates['median']:.0f} MB/s "
            f"[{rates['min']:.0f}, {rates['max']:.0f}] ({fractions})",
            flush=True,
        )
        results[name] = {"megabytes": size, "megabytes_per_second": rates, "share_of_time": shares}
    write_results(options.out, "bench/tokenizing.py", repeats=options.repeats, results=results)


if __name__ == "__main__":
    main()
