"""`bsi doctor`: what is installed, what is missing, and the command that fixes it."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from bsi.cli.options import Json, answer

EXTRAS = {
    "view": "`bsi view`",
    "figures": "the figures of `bsi study`",
    "codec": "`bsi compress` and `bsi decompress`",
    "hub": "`bsi export --upload` and `bsi data huggingface`",
    **{name: f"`bsi train --track {name}`" for name in ("tensorboard", "wandb", "trackio", "mlflow")},
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
        lines = []
        for check in checks:
            lines.append(f"{check.state:<7}  {check.name:<12} {check.found}")
            if check.fix and check.state != "ok":
                lines.append(f"{'':<22}-> {check.fix}")
        lines.append("everything required works" if healthy else "something required is missing or broken, see above")
        answer(self.json, {"healthy": healthy, "checks": [asdict(check) for check in checks]}, "\n".join(lines))
        return 0 if healthy else 1


def examine() -> Iterator[Check]:
    """All checks. An error in one of them is reported as its result and does not affect the others."""
    yield Check("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}", required=True)
    for name, checks in {"packages": _packages, "torch": _torch}.items():
        try:
            yield from checks()
        except Exception as error:  # a broken installation may raise anything
            yield Check(name, "broken", f"{type(error).__name__}: {error}", required=True)


def _packages() -> Iterator[Check]:
    """The packages that bsi requires, and those of its extras, from the metadata of its installation."""
    missing: dict[str, list[str]] = {name: [] for name in ("", *EXTRAS)}
    for requirement in importlib.metadata.requires("bsi") or ():
        name, extra = re.split(r"[^\w.-]", requirement)[0], re.search(r"extra == ['\"]([\w-]+)", requirement)
        if not any(importlib.metadata.distributions(name=name)):
            missing.setdefault(extra[1] if extra else "", []).append(name)
    for name in ("", *EXTRAS):
        lacking = f"{', '.join(missing[name])} not installed: needed for " if missing[name] else ""
        package, state = f"bsi[{name}]" if name else "bsi", "missing" if lacking else "ok"
        found = lacking + EXTRAS.get(name, "every command")
        yield Check(name or "packages", state, found, f"pip install --upgrade '{package}'", required=not name)


def _torch() -> Iterator[Check]:
    import torch

    yield Check("torch", "ok", torch.__version__, required=True)
    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        yield Check("gpu", "ok", f"{torch.cuda.device_count()} x {', '.join(names)}, CUDA {torch.version.cuda}")
    elif torch.version.cuda is None and shutil.which("nvidia-smi"):
        fix = "pip install --upgrade --force-reinstall torch"
        yield Check("gpu", "missing", "there is an NVIDIA driver, but this torch was built for CPUs", fix)
    else:
        fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES" if torch.version.cuda else ""
        yield Check("gpu", "missing", "none found. Small models train on the CPU.", fix)
