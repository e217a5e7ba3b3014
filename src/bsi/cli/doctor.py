"""`bsi doctor`: what is installed, what is missing, and the command that fixes it.

A check is required (without it nothing works), or optional (without it something does not). The exit code is 0 when all
required ones hold, 1 otherwise.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bsi.progress import in_color, readable_bytes, speaks_unicode

__all__ = ["Check", "Doctor", "examine", "run"]

State = Literal["ok", "missing", "broken"]
MARKS: dict[State, str] = {"ok": "✓", "missing": "–", "broken": "✗"}
PLAIN_MARKS: dict[State, str] = {"ok": "+", "missing": "-", "broken": "x"}  # where a locale has not those
COLORS: dict[State, str] = {"ok": "32", "missing": "33", "broken": "31"}
ROOMY = 2 << 30  # bytes: a prepared CIFAR-10, the Inception weights and a few checkpoints

TORCH = "2.10"

# Required packages with the least version, and others with what they are for.
CORE = {
    "numpy": "1.26",
    "pillow": "10.3",
    "safetensors": "0.4",
    "einops": "0.8",
    "jaxtyping": "0.2.36",
    "tyro": "1.0",
    "rich": "13",
    "fastapi": "0.110",
    "uvicorn": "0.29",
}
EXTRAS = {
    "matplotlib": "figures of the studies",
    "tensorboard": "`bsi train --tensorboard`",
    "huggingface_hub": "`bsi export --upload`",
}


@dataclass(frozen=True)
class Doctor:
    """Say what is installed, what is missing, and the command that fixes it. Exits with 0 when the core works."""

    json: bool = False
    """Write everything as JSON on stdout."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    found: str
    required: bool = False
    fix: str = ""


def run(args: Doctor) -> int:
    checks = list(examine())
    healthy = all(check.state == "ok" for check in checks if check.required)
    if args.json:
        print(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}))
        return 0 if healthy else 1
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{_colored(check.state)} {check.name:<{width}}  {check.found}")
        if check.fix and check.state != "ok":
            print(f"  {'':<{width}}  {'→' if speaks_unicode(sys.stdout.encoding) else '->'} {check.fix}")
    print("the core works" if healthy else "the core does not work: see above", file=sys.stderr)
    return 0 if healthy else 1


def _colored(state: State) -> str:
    mark = (MARKS if speaks_unicode(sys.stdout.encoding) else PLAIN_MARKS)[state]
    return f"\x1b[{COLORS[state]}m{mark}\x1b[0m" if in_color(sys.stdout.isatty()) else mark


def examine() -> Iterator[Check]:
    """All checks, each safe from the others' failures."""
    for look in (_python, _packages, _torch, _data, _disk, _extras):
        try:
            yield from look()
        except Exception as error:  # a doctor reports what he finds, whatever it is
            yield Check(
                look.__name__.strip("_"), "broken", f"{type(error).__name__}: {error}", look in (_python, _torch)
            )


def _python() -> Iterator[Check]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    yield Check("python", "ok" if good else "broken", f"{version}, {platform.system()} {platform.machine()}", True,
                "install Python 3.11 or newer")  # fmt: skip
    threads = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    limited = f", OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in os.environ else ""
    yield Check("cpu", "ok", f"{threads} threads{limited}")


def _packages() -> Iterator[Check]:
    for name, least in CORE.items():
        version = _version(name)
        enough = version is not None and _parts(version) >= _parts(least)
        state: State = "ok" if enough else "missing" if version is None else "broken"
        yield Check(name, state, version or "not installed", True, f"pip install '{name}>={least}'")


def _torch() -> Iterator[Check]:
    version = _version("torch")
    if version is None:
        yield Check("torch", "missing", "not installed", True, f"pip install 'torch>={TORCH}'")
        return
    import torch

    works = bool(torch.isfinite(torch.ones(8, 8) @ torch.ones(8, 8)).all()) and _parts(version) >= _parts(TORCH)
    fix = f"pip install --upgrade 'torch>={TORCH}'"
    yield Check("torch", "ok" if works else "broken", torch.__version__, True, fix)
    gpu = torch.cuda.is_available()
    yield _cuda()
    bf16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    instead = "not on this GPU: float16 or float32 is used" if gpu else "no GPU: networks compute in float32 here"
    yield Check("bf16", "ok" if bf16 else "missing", "by the GPU" if bf16 else instead)
    yield _distributed()
    triton = _version("triton")
    found = triton or "not installed: on a GPU networks run neither fused nor compiled"
    yield Check("triton", "ok" if triton else "missing", found, fix="pip install triton" if gpu else "")


def _distributed() -> Check:
    import torch.distributed as dist

    there = dist.is_available()
    backends = {"gloo": there and dist.is_gloo_available(), "nccl": there and dist.is_nccl_available()}
    found = ", ".join(name for name, usable in backends.items() if usable)
    fix = "install a build of torch with gloo or NCCL"
    return Check(
        "distributed", "ok" if found else "missing", found or "neither gloo nor NCCL: one process only", fix=fix
    )


def _cuda() -> Check:
    import torch

    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        return Check("cuda", "ok", f"{torch.version.cuda}, {torch.cuda.device_count()} GPU: {', '.join(names)}")
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        return Check("cuda", "missing", "there is an NVIDIA driver, but this torch was built for CPUs",
                     fix="pip install --upgrade --force-reinstall torch")  # fmt: skip
    if torch.version.cuda is not None:
        return Check("cuda", "missing", f"torch was built for CUDA {torch.version.cuda}, but sees no GPU",
                     fix="nvidia-smi, and look at CUDA_VISIBLE_DEVICES")  # fmt: skip
    return Check("cuda", "missing", "no GPU: digits and small data train on a CPU")


def _data() -> Iterator[Check]:
    from bsi import pretrained
    from bsi.data.store import prepared
    from bsi.io import data_folder

    root = data_folder()
    there = sorted(path.name for path in prepared(root))
    yield Check("datasets", "ok", ", ".join(["digits (in the package)", *there]) + f"; in {_short(root)}")
    binaries = (root / "cifar-10-batches-bin").is_dir()
    if not any(name.startswith("cifar10") for name in there):
        found = "downloaded, not prepared" if binaries else "not prepared"
        yield Check("cifar10", "missing", found, fix="bsi data cifar10")
    weights = root / "inception-2015-12-05.safetensors"
    yield Check("inception", "ok" if weights.is_file() else "missing",
                f"{weights.stat().st_size >> 20} MiB" if weights.is_file() else "not here yet: `bsi fid` fetches them",
                fix=f"without internet, put pytorch-fid's weights into {_short(root)}")  # fmt: skip
    bundled = {name: pretrained.find(name) for name in pretrained.BUNDLED}
    lost = [name for name, path in bundled.items() if not path.is_file()]
    found = f"lost: {', '.join(lost)}" if lost else f"bundled: {', '.join(bundled)}"
    yield Check("networks", "broken" if lost else "ok", found, fix="pip install --force-reinstall bsi")


def _disk() -> Iterator[Check]:
    from bsi.io import data_folder

    places: dict[str, Path] = {"disk here": Path.cwd(), "disk of data": data_folder()}
    for name, place in places.items():
        there = next(path for path in (place, *place.parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):
            why = "is read-only" if there.is_dir() else "is not a folder"
            yield Check(name, "missing", f"{_short(there)} {why}", fix="set BSI_DATA and --out to a folder of yours")
            continue
        free = shutil.disk_usage(there).free
        yield Check(name, "ok" if free > ROOMY else "missing", f"{readable_bytes(free)} free in {_short(there)}",
                    fix="free some, or set BSI_DATA and --out to another disk")  # fmt: skip


def _extras() -> Iterator[Check]:
    for name, purpose in EXTRAS.items():
        version = _version(name)
        found = version or f"not installed: needed for {purpose}"
        yield Check(name, "ok" if version else "missing", found, fix=f"pip install {name}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parts(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu -> (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _short(path: Path) -> str:
    """With ~ for the home folder, where there is one."""
    home = os.path.expanduser("~")
    return str(Path("~", path.relative_to(home)) if len(home) > 1 and path.is_relative_to(home) else path)
