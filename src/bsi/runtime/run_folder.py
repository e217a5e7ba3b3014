"""A run folder: everything about one training run, in files that a person can read.

    run.json          the recipe as resolved, how it differs from the named one, the command, the environment
    status.json       running, preempted, finished, failed; at which step, and when
    journal.jsonl     one line per interval
    checkpoints/      see checkpoint.py
    samples/          grids drawn along the way
    averages/         power-function averages, where the recipe keeps some
    evaluations/      what `bsi eval` found
    lock.json         who is training here, while someone is
    replay-*.json     what a step saw whose loss or gradient was not finite

The environment is an allow-list: versions, the machine's kind, a few variables. No tokens, no home paths.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bsi import __version__
from bsi.errors import UsageError
from bsi.io import write_json
from bsi.recipe import Recipe
from bsi.runtime.distributed import World
from bsi.runtime.serialization import changes, from_plain, to_plain

__all__ = ["FORMAT", "RunFolder", "RunRecord", "State"]

FORMAT = 1
State = Literal["running", "preempted", "finished", "failed"]
VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class RunRecord:
    """What run.json says: the recipe, and the class of the network if the caller brought one."""

    recipe: Recipe
    network: str


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run, and its small files."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the folder, or say why it cannot be. What was made and is empty in the end, of a run that was refused,
        is taken away again.
        """
        new: list[Path] = []
        try:
            try:
                new = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                words = f"cannot make the run folder {self.path}: {error.strerror}. Use another --out."
                raise UsageError(words) from error
            yield
        finally:
            with suppress(OSError):  # not empty, as it should be
                for folder in new:
                    folder.rmdir()

    def write_record(self, record: RunRecord, named: Recipe | None, world: World) -> None:
        write_json(
            self.path / "run.json",
            {
                "format": FORMAT,
                "recipe": to_plain(record.recipe),
                "changed": [] if named is None else [str(change) for change in changes(named, record.recipe)],
                "network": record.network,
                "command": _without_home([Path(sys.argv[0]).name, *sys.argv[1:]]),
                "environment": _environment(world),
            },
        )

    def read_record(self) -> RunRecord | None:
        """The record of a run that began earlier; None in a new folder."""
        path = self.path / "run.json"
        if not path.is_file():
            return None
        try:
            given = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}. Restore it, or use another --out.") from error
        if not isinstance(given, dict) or not {"format", "recipe", "network"} <= given.keys():
            raise UsageError(f"{path} is not the record of a run. Restore it, or use another --out.")
        if given["format"] != FORMAT:
            raise UsageError(
                f"{path} has format {given['format']!r}; this version of bsi reads format {FORMAT}. Go on with the "
                f"version that wrote it, or start anew with --init-from."
            )
        return RunRecord(from_plain(Recipe, given["recipe"], "recipe"), str(given["network"]))

    def write_status(self, state: State, step: int, note: str = "") -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_json(self.path / "status.json", {"state": state, "step": step, "note": note, "time": stamp})

    def read_status(self) -> Mapping[str, Any]:
        path = self.path / "status.json"
        try:
            return dict(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError):
            return {}


def _without_home(words: list[str]) -> list[str]:
    """~ for the home folder, where there is one; also in --out=FOLDER, but not inside other names."""
    home = os.path.expanduser("~")
    return [re.sub(rf"(?<![^=]){re.escape(home)}(?=/|$)", "~", word) if len(home) > 1 else word for word in words]


def _environment(world: World) -> dict[str, Any]:
    cuda = world.device.type == "cuda"
    return {
        "bsi": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "system": platform.system(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
