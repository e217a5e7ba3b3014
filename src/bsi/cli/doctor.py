"""`bsi doctor`: what is installed, what is missing, and the command that fixes it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from bsi.cli.options import Json, answer
from bsi.io import data_folder
from bsi.progress import readable_bytes

ENOUGH_DISK = 2 << 30  # bytes: a prepared CIFAR-10, the Inception weights and a few checkpoints
EXTRAS = {
    "view": "`bsi view`",
    "figures": "the figures of `bsi study`",
    "tensorboard": "`bsi train --track tensorboard`",
    "wandb": "`bsi train --track wandb`",
    "trackio": "`bsi train --track trackio`",
    "mlflow": "`bsi train --track mlflow`",
    "codec": "`bsi compress` and `bsi decompress`",
    "hub": "`bsi export --upload` and `bsi data huggingface`",
}


@dataclass(frozen=True)
class Check:
    """The result of one check: its state is ok, missing or broken."""

    name: str
    state: str
    found: str
    fix: str = ""
    required: bool = False


@dataclass(frozen=True)
class Doctor:
    """Check the installation, and show how to fix it. The exit code is 0 if everything required works, otherwise 1."""

    json: Json = False

    def execute(self) -> int:
        checks = list(examine())
        healthy = all(check.state == "ok" for check in checks if check.required)
        width = max(len(check.name) for check in checks)
        lines = []
        for check in checks:
            lines.append(f"{check.state:<7}  {check.name:<{width}}  {check.found}")
            if check.fix and check.state != "ok":
                lines.append(f"{'':<{width + 9}}  -> {check.fix}")
        lines.append("everything required works" if healthy else "something required is missing or broken, see above")
        answer(self.json, {"healthy": healthy, "checks": [asdict(check) for check in checks]}, "\n".join(lines))
        return 0 if healthy else 1


def examine() -> Iterator[Check]:
    """All checks. An error in one of them is reported as its result and does not affect the others."""
    for name, checks in {"packages": _packages, "torch": _gpu, "data": _data}.items():
        try:
            yield from checks()
        except Exception as error:  # a broken installation may raise anything, which is reported
            yield Check(name, "broken", f"{type(error).__name__}: {error}", required=name != "data")


def _packages() -> Iterator[Check]:
    """Python, and the packages that bsi requires or lists as extras, from the metadata of its installation."""
    yield Check("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}", required=True)
    missing: dict[str, list[str]] = {name: [] for name in EXTRAS}
    for requirement in importlib.metadata.requires("bsi") or ():
        name, least = re.match(r"([\w.-]+)(?:>=([\d.]+))?", requirement).groups("0")  # type: ignore[union-attr]
        extra, version = re.search(r"extra == ['\"]([\w-]+)", requirement), _version(name)
        if extra is None:
            state = "missing" if version is None else "broken" if _numbers(version) < _numbers(least) else "ok"
            fix = f"pip install --upgrade '{name}>={least}'"
            yield Check(name, state, version or "not installed", fix, required=True)
        elif version is None and extra[1] in missing:
            missing[extra[1]].append(name)
    for name, purpose in EXTRAS.items():
        found = f"{', '.join(missing[name])} not installed: needed for {purpose}" if missing[name] else purpose
        yield Check(name, "missing" if missing[name] else "ok", found, f"pip install 'bsi[{name}]'")


def _gpu() -> Iterator[Check]:
    """The GPUs that torch computes on."""
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
        yield Check("gpu", "ok", f"{count} x {', '.join(names)}, CUDA {torch.version.cuda}")
        if _version("triton") is None:
            found = "not installed: networks run without fused kernels"
            yield Check("triton", "missing", found, "pip install triton")
    elif torch.version.cuda is None and shutil.which("nvidia-smi"):
        fix = "pip install --upgrade --force-reinstall torch"
        yield Check("gpu", "missing", "there is an NVIDIA driver, but this torch was built for CPUs", fix)
    else:
        fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES" if torch.version.cuda else ""
        yield Check("gpu", "missing", "none found. Small models train on the CPU.", fix)


def _data() -> Iterator[Check]:
    """The prepared datasets, and the disk they are on."""
    from bsi.data.store import prepared

    root = data_folder()
    names = ["digits (in the package)", *sorted(path.name for path in prepared(root))]
    yield Check("datasets", "ok", f"{', '.join(names)}; in {root}")
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    state, found, fix = "ok", f"{readable_bytes(free)} free in {existing}", "set BSI_DATA to a folder on another disk"
    if not existing.is_dir():
        state, found = "missing", f"{existing} is not a folder"
    elif not os.access(existing, os.W_OK):
        state, found = "missing", f"{existing} is read-only"
    elif free <= ENOUGH_DISK:
        state = "missing"
    yield Check("disk", state, found, fix)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    """The leading numbers: 2.13.0+cpu is [2, 13, 0]."""
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])]
