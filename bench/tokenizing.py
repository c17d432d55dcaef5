"""How fast text becomes tokens on disk with `tokenizer: bytes`: python bench/tokenizing.py

All that a run does with a text that it has not seen: the digest of the file, reading, decoding, tokens, the
sketches of lines and passages by which overlap is found, and writing. The text is that of the Python files of this
environment, as it is (most lines are short, and each that counts is hashed), and with ten lines put into one, as
in prose. By the processor's time of one thread; median and range of several repeats, and the share of each part.
"""

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mixwell.data.sketches import LineSketch, PassageSketch
from mixwell.data.sources import TextFiles
from mixwell.data.token_files import tokenize
from mixwell.data.tokenizer import ByteTokenizer
from mixwell.utils import environment

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


def of_lines(pieces: list[str]) -> None:
    sketch = LineSketch()
    for piece in pieces:
        sketch.add(piece)
    sketch.to_array()


def of_passages(pieces: list[str]) -> None:
    sketch = PassageSketch()
    for piece in pieces:
        sketch.add(piece)
    sketch.to_array()


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench/results/tokenizing.json"))
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
            "lines": [used(lambda pieces=pieces: of_lines(pieces)) for _ in range(options.repeats)],
            "passages": [used(lambda pieces=pieces: of_passages(pieces)) for _ in range(options.repeats)],
        }
        rates = spread([size / seconds for seconds in times])
        shares = {part: statistics.median(own) / statistics.median(times) for part, own in parts.items()}
        told = ", ".join(f"{share:.0%} {part}" for part, share in shares.items())
        print(
            f"{name}: {size:.0f} MB, {text.count(chr(10)):,} lines: {rates['median']:.0f} MB/s "
            f"[{rates['min']:.0f}, {rates['max']:.0f}] ({told})",
            flush=True,
        )
        results[name] = {"megabytes": size, "megabytes_per_second": rates, "share_of_time": shares}
    result = {
        "environment": environment.describe(["python", "bench/tokenizing.py"]),
        "repeats": options.repeats,
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
