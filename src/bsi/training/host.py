"""How much memory this process can have on its host, before the kernel ends it without a word.

Linux promises more memory than it has: an allocation succeeds, and a process is killed when it writes to it. So what
there is must be read beforehand: what the kernel could give (`MemAvailable`, and swap that is free), and what is left
by the limits of the control groups (version 1 or 2) that containers and Slurm's jobs run in. Cached files count
against such a limit, but are given up first. A system that does not say is taken to have all of its memory free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["host_memory"]

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

# The files of version 2 and of version 1: the limit, what is used, and which lines of memory.stat are cached files.
V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def host_memory(sharing: int = 1, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that this process has or could have, if it shares what is left with as many others like itself."""
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        known = _numbers(proc / "meminfo")
        left = 1024 * (known["MemAvailable:"] + known.get("SwapFree:", 0))
        own = page * int((proc / "self" / "statm").read_text().split()[1])
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * page // sharing
    return max(0, min([left, *_left_in_groups(proc, cgroups)])) // sharing + own


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each control group leaves, from this process's own up to the root of what can be seen."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (cgroups / "memory", V1) if controllers else (cgroups, V2)
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield from _left_in(folder, *files)


def _left_in(folder: Path, limit: str, used: str, cached: tuple[str, ...]) -> Iterator[int]:
    try:
        most = (folder / limit).read_text().strip()
        if most != "max":
            known = _numbers(folder / "memory.stat")
            yield int(most) - int((folder / used).read_text()) + sum(known.get(name, 0) for name in cached)
    except OSError:  # not a group that can be seen from here, or one without limits
        return


def _numbers(path: Path) -> dict[str, int]:
    """A file of lines "name number", as the kernel writes them."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
