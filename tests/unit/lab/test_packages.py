"""Packages from registries: fetched once, verified, read without unpacking, refused with one clear message."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from mixwell.lab import packages
from mixwell.lab.packages import Package


def tarball(contents: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("package/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "b.txt"
        tar.addfile(link)
    return written.getvalue()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A package that a stand-in for npm gives, and a cache of its own."""
    archive = tmp_path / "served.tgz"
    archive.write_bytes(tarball({"package/b.txt": b"second", "package/a.txt": b"first", "package/c.md": b""}))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "npm").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncp {archive} words-1.0.tgz\n')
    (programs / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MIXWELL_CACHE", str(tmp_path / "cache"))
    return Package("npm", "@some/words", "1.0", hashlib.sha256(archive.read_bytes()).hexdigest())


def test_downloaded_once_with_message(registry: Package, tmp_path: Path) -> None:
    said: list[str] = []
    path = packages.fetch(registry, say=said.append)
    assert path.is_relative_to(tmp_path / "cache")
    assert len(said) == 1
    assert "fetching @some/words@1.0 from npm" in said[0]
    assert packages.fetch(registry, say=said.append) == path
    assert len(said) == 1
    assert (tmp_path / "asked").read_text().splitlines() == ["pack --silent @some/words@1.0"]
    found = packages.members(path, lambda name: name.endswith(".txt"))
    assert list(found.items()) == [("package/a.txt", b"first"), ("package/b.txt", b"second")]


def test_pip_rejects_wrong_checksum_before_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip runs setup.py of a source distribution, so the checksum must be compared before that."""
    served, ran = tmp_path / "served", tmp_path / "ran"
    served.mkdir()
    setup = (
        f"open({str(ran)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='words', version='1.0')\n"
    )
    archive = served / "words-1.0.tar.gz"
    archive.write_bytes(
        tarball({"words-1.0/setup.py": setup.encode(), "words-1.0/PKG-INFO": b"Name: words\nVersion: 1.0\n"})
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(served))
    monkeypatch.setenv("MIXWELL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OSError, match=r"cannot fetch words==1\.0 from PyPI"):
        packages.fetch(Package("PyPI", "words", "1.0", "0" * 64), say=lambda _: None)
    assert not ran.exists()


def test_damaged_archive_is_downloaded_again(registry: Package) -> None:
    said: list[str] = []
    path = packages.fetch(registry, say=said.append)
    good = path.read_bytes()
    path.write_bytes(b"damaged")
    assert packages.fetch(registry, say=said.append).read_bytes() == good
    assert "is damaged" in said[1]


def test_wrong_checksum_raises_and_is_not_cached(registry: Package, tmp_path: Path) -> None:
    other = Package("npm", registry.name, registry.version, "0" * 64)
    with pytest.raises(OSError, match=r"@some/words@1\.0 from npm has another checksum than expected"):
        packages.fetch(other, say=lambda _: None)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_missing_tool_or_network_gives_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIXWELL_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    pinned = Package("PyPI", "no-such-package-of-words", "1.0", "0" * 64)
    with pytest.raises(
        OSError, match=r"cannot fetch no-such-package-of-words==1\.0 from PyPI \(.*MIXWELL_CACHE"
    ):
        packages.fetch(pinned, say=lambda _: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        OSError, match=r"cannot fetch words from npm \(npm is not installed\)\. Put its archive"
    ):
        packages.fetch(Package("npm", "words"), say=lambda _: None)
    with pytest.raises(OSError, match=r"apt-get is not installed.*Run `apt-get update` and try again"):
        packages.fetch(Package("Debian", "words"), say=lambda _: None)


def test_manually_cached_archive_is_used(
    registry: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "packages" / "npm" / "@some-words@1.0"
    folder.mkdir(parents=True)
    (folder / "any-name.tgz").write_bytes((tmp_path / "served.tgz").read_bytes())
    monkeypatch.setenv("PATH", "")
    assert packages.fetch(registry, say=lambda _: None) == folder / "any-name.tgz"


def test_wheels_and_broken_archives(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("words/b.txt", "b")
        wheel.writestr("words/c.md", "c")
    assert packages.members(tmp_path / "a.whl", lambda name: name.endswith(".txt")) == {"words/b.txt": b"b"}
    (tmp_path / "b.tgz").write_bytes(b"not an archive")
    with pytest.raises(OSError, match=r"cannot read .*b\.tgz .*remove it"):
        packages.members(tmp_path / "b.tgz", lambda _: True)


def test_pinned_versions_have_checksums() -> None:
    with pytest.raises(ValueError, match="words: give a version and its checksum, or neither"):
        Package("npm", "words", "1.0")
