"""The memory that this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Limits of cgroups beyond it are those of none."""


def available_bytes() -> int | None:
    """Return the bytes of memory that can be taken before the system, a cgroup or ``ulimit -v`` refuses them.

    Returns:
        The least of the limits that can be read; ``None`` where none can.
    """
    found = [
        one for one in (_of_machine(), _of_cgroup(_CGROUPS, Path("/proc/self/cgroup")), _of_process()) if one
    ]
    return min(found, default=None)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be allocated: Python's, or one of PyTorch's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "not enough memory" in str(error)
    )


def out_of_memory_message(error: BaseException) -> str:
    """Return the message for an error that :func:`is_out_of_memory` accepts."""
    reason = str(error).splitlines()[0][:200] if str(error) else "Python could not allocate"
    return (
        f"out of memory ({reason}); lower the sizes of the model, batch.rows (or set batch.micro_rows), or "
        "mixer.traces; `mixwell plan` shows what they take"
    )


def format_bytes(number: float) -> str:
    """Return a number of bytes for people.

    Example:
        >>> format_bytes(1234), format_bytes(2.5e12), format_bytes(10**30)
        ('1.23 KB', '2.5 TB', '1e+18 TB')
    """
    units = ["B", "KB", "MB", "GB", "TB"]
    while number >= 1000 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.3g} {units[0]}"


def _of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _of_cgroup(root: Path, membership: Path) -> int | None:
    """Return what the memory cgroups (version 2, or 1) of this process and those above it leave.

    Args:
        root: where cgroups are mounted.
        membership: lines ``number:controllers:path``.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    left: list[int] = []
    for line in lines:
        if len(line) != 3 or line[1] not in ("", "memory"):
            continue
        first = line[1] == "memory"
        top = root / "memory" if first else root
        limit, used = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
        )
        here = top / line[2].strip("/")
        for folder in (here, *here.parents):
            if not folder.is_relative_to(top):
                break
            try:
                most = int((folder / limit).read_text())  # "max" where there is no limit
                taken = int((folder / used).read_text())
            except (OSError, ValueError):
                continue
            # Cached pages of files count as used, and are given back when memory is short.
            if most < _UNLIMITED:
                left.append(max(most - taken + _file_cache(folder), 1))
    return min(left, default=None)


def _file_cache(folder: Path) -> int:
    try:
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(counts.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0


def _of_process() -> int | None:
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY:
            return None
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError, IndexError):
        return None
    return max(soft - used, 1)
