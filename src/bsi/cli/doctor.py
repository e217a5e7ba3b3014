"""`bsi doctor`: what is installed, what is missing, and the command that fixes it.

If a required check fails, the exit code is 1; the other checks only report which features are unavailable.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bsi.io import data_folder
from bsi.progress import readable_bytes, supports_color, supports_unicode

State = Literal["ok", "missing", "broken"]
MARKS: dict[State, str] = {"ok": "✓", "missing": "–", "broken": "✗"}
ASCII_MARKS: dict[State, str] = {"ok": "+", "missing": "-", "broken": "x"}
COLORS: dict[State, str] = {"ok": "32", "missing": "33", "broken": "31"}
ENOUGH_DISK = 2 << 30  # bytes: a prepared CIFAR-10, the Inception weights and a few checkpoints

EXTRAS = {
    "view": "`bsi view`",
    "figures": "the figures of `bsi study`",
    "tensorboard": "`bsi train --track tensorboard`",
    "wandb": "`bsi train --track wandb`",
    "trackio": "`bsi train --track trackio`",
    "mlflow": "`bsi train --track mlflow`",
    "hub": "`bsi export --upload` and `bsi data huggingface`",
}


@dataclass(frozen=True)
class Doctor:
    """Check the installation, and show how to fix it. The exit code is 0 if everything required works."""

    json: bool = False
    """Print the result as JSON on stdout."""


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    state: State
    found: str
    fix: str = ""
    required: bool = False


def run(args: Doctor) -> int:
    checks = list(examine())
    healthy = all(check.state == "ok" for check in checks if check.required)
    if args.json:
        print(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}))
        return 0 if healthy else 1
    unicode, color = supports_unicode(sys.stdout.encoding), supports_color(sys.stdout)
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = (MARKS if unicode else ASCII_MARKS)[check.state]
        mark = f"\x1b[{COLORS[check.state]}m{mark}\x1b[0m" if color else mark
        print(f"{mark} {check.name:<{width}}  {check.found}")
        if check.fix and check.state != "ok":
            print(f"  {'':<{width}}  {'→' if unicode else '->'} {check.fix}")
    print("everything required works" if healthy else "something required is missing or broken, see above")
    return 0 if healthy else 1


def examine() -> Iterator[Check]:
    """All checks. An error in one of them is reported as its result and does not affect the others."""
    for check in (_packages, _torch, _data):
        try:
            yield from check()
        except Exception as error:  # a broken installation may raise anything, which is reported
            required = check in (_packages, _torch)
            yield Check(check.__name__.strip("_"), "broken", f"{type(error).__name__}: {error}", required=required)


def _packages() -> Iterator[Check]:
    """Python, and the packages that bsi requires or lists as extras, from the metadata of its installation."""
    good = sys.version_info >= (3, 11)
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Check("python", "ok" if good else "broken", found, "install Python 3.11 or newer", required=True)
    extras: dict[str, list[str]] = {name: [] for name in EXTRAS}
    for requirement in importlib.metadata.requires("bsi") or ():
        name, least = re.match(r"([\w.-]+)(?:>=([\d.]+))?", requirement).groups()  # type: ignore[union-attr]
        of = re.search(r"extra == ['\"]([\w-]+)", requirement)
        if of and of[1] in extras:
            extras[of[1]].append(name)
        elif not of:
            version = _version(name)
            state: State = "missing" if version is None else "ok" if _at_least(version, least) else "broken"
            fix = f"pip install --upgrade '{name}>={least}'"
            yield Check(name, state, version or "not installed", fix, required=True)
    for extra, names in extras.items():
        missing = [name for name in names if _version(name) is None]
        found = f"{', '.join(missing)} not installed: needed for {EXTRAS[extra]}" if missing else EXTRAS[extra]
        yield Check(extra, "missing" if missing else "ok", found, f"pip install 'bsi[{extra}]'")


def _torch() -> Iterator[Check]:
    """The GPUs that torch computes on."""
    import torch

    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        yield Check("gpu", "ok", f"{torch.cuda.device_count()} x {', '.join(names)}, CUDA {torch.version.cuda}")
        triton = _version("triton")
        found = triton or "not installed: networks run without fused kernels"
        yield Check("triton", "ok" if triton else "missing", found, "pip install triton")
    elif torch.version.cuda is None and shutil.which("nvidia-smi"):
        fix = "pip install --upgrade --force-reinstall torch"
        yield Check("gpu", "missing", "there is an NVIDIA driver, but this torch was built for CPUs", fix)
    else:
        built = f": torch was built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
        fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES" if built else ""
        yield Check("gpu", "missing", f"none found{built}. Small models train on the CPU.", fix)


def _data() -> Iterator[Check]:
    """The prepared datasets, and the disk they are on."""
    from bsi.data.store import prepared

    root = data_folder()
    names = ["digits (in the package)", *sorted(path.name for path in prepared(root))]
    yield Check("datasets", "ok", f"{', '.join(names)}; in {_short(root)}")
    there = next(path for path in (root, *root.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        problem = "is read-only" if there.is_dir() else "is not a folder"
        yield Check("disk", "missing", f"{_short(there)} {problem}", "set BSI_DATA to a folder that you can write to")
        return
    free = shutil.disk_usage(there).free
    fix = "free some space, or set BSI_DATA to another disk"
    yield Check(
        "disk", "ok" if free > ENOUGH_DISK else "missing", f"{readable_bytes(free)} free in {_short(there)}", fix
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _at_least(version: str, least: str | None) -> bool:
    """Compare the leading numbers: 2.13.0+cpu is (2, 13, 0)."""
    have, want = ([int(part) for part in re.findall(r"\d+", v.split("+")[0])] for v in (version, least or "0"))
    return have >= want


def _short(path: Path) -> str:
    """The path with ~ for the home folder."""
    home = os.path.expanduser("~")
    return str(Path("~", path.relative_to(home)) if len(home) > 1 and path.is_relative_to(home) else path)
