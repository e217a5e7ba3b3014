"""Start runs with faults, and compare their files."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save

from bsi.runtime import checkpoint

LIMIT_S = 240.0  # longer than any run here takes on a busy machine
LAUNCH = Path(__file__).with_name("launch.py")

# A tiny DiT with dropout on the digits: 24 steps of 16 samples, a checkpoint every 8, an evaluation every 12.
TINY = (
    "digits --steps 24 --batch 16 --virtual-shards 8 --ema.start 4 --optimizer.warmup 4 "
    "--backbone.width 16 --backbone.depth 1 --backbone.heads 2 --backbone.dropout 0.1 "
    "--every.journal 4 --every.evaluate 12 --every.sample 0 --every.checkpoint 8 "
    "--evaluation.images 64 --evaluation.batch 16"
)


@dataclass
class Entry:
    """One run: its folder, further words, faults, ranks, where it logs its samples, where its folder is copied to, and
    whether its ranks come from Slurm's variables.
    """

    out: Path
    words: list[str] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    ranks: int = 1
    log: Path | None = None
    copy: Path | None = None
    slurm: bool = False
    local: int = 1  # ranks on a host

    def plain(self) -> dict[str, Any]:
        words = [*TINY.split(), "--out", str(self.out), *self.words]
        optional = {name: str(path) for name, path in (("log", self.log), ("copy", self.copy)) if path is not None}
        plain = {"out": str(self.out), "words": words, "faults": self.faults, "ranks": self.ranks, "slurm": self.slurm}
        plain["local"] = self.local
        return {**plain, **optional}


@dataclass(frozen=True)
class Ended:
    """The end of a run: the exit code of each rank, and their stderr."""

    codes: list[int]
    stderr: str


def fault(point: str, do: str, step: int, rank: int = 0) -> dict[str, Any]:
    return {"point": point, "do": do, "step": step, "rank": rank}


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FAULT"))}
    return {**kept, "OMP_NUM_THREADS": "1"}


def _run(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run to the end; after a timeout, kill all processes of the run."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def sequence(folder: Path, *entries: Entry) -> list[Ended]:
    """The runs one after the other, in forked processes of one launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / f"plan{len(list(folder.glob('plan*.json')))}.json"
    plan.write_text(json.dumps([entry.plain() for entry in entries]))
    _run([sys.executable, str(LAUNCH), "sequence", str(plan)], _environment()).check_returncode()
    return [Ended(**result) for result in json.loads(plan.with_suffix(".out").read_text())]


def torchrun(entry: Entry, marks: Path, restarts: int = 0, launch: Path = LAUNCH) -> Ended:
    """The run under torchrun, as a user starts it; its exit code is the launcher's."""
    marks.mkdir(parents=True, exist_ok=True)
    environment = {**_environment(), "FAULTS": json.dumps(entry.faults), "FAULT_MARKS": str(marks)}
    if entry.log is not None:
        environment["SAMPLE_LOG"] = str(entry.log)
    ended = _run(_torchrun_words(entry, restarts, launch), environment)
    return Ended([ended.returncode], ended.stderr)


def torchrun_killed(entry: Entry, marks: Path) -> None:
    """The run under torchrun, which is killed once the run has written its first line."""
    marks.mkdir(parents=True, exist_ok=True)
    environment = {**_environment(), "FAULT_MARKS": str(marks)}
    with subprocess.Popen(
        _torchrun_words(entry, 0, LAUNCH), stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    ) as launcher:
        end = time.monotonic() + LIMIT_S
        while not (entry.out / "journal.jsonl").is_file() or not (entry.out / "journal.jsonl").read_text():
            assert launcher.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        launcher.kill()


def _torchrun_words(entry: Entry, restarts: int, launch: Path) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(entry.ranks),
        "--max-restarts", str(restarts), "--monitor-interval", "0.2",
        "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", str(launch), "train", *entry.plain()["words"],
    ]  # fmt: skip


def fingerprint(run: Path, step: int = 24) -> dict[str, str]:
    """SHA-256 of the parameters, the EMA and the optimizer after a step, whichever ranks have written them."""
    saved = checkpoint.verify(run / "checkpoints" / f"step-{step:08d}")
    found = {}
    for name in ("model", "ema", "optimizer"):
        whole = save({key: tensor.contiguous() for key, tensor in checkpoint.read_tensors(saved, name).items()})
        found[f"{name}.safetensors"] = hashlib.sha256(whole).hexdigest()
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    """The journal without what depends on the clock."""
    clocks = ("time", "images_per_s", "checkpoint_age_s")
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in clocks} for line in lines]


def status(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "status.json").read_text()))


def latest(run: Path) -> str:
    return (run / "checkpoints" / "latest").read_text().strip()


def samples(log: Path) -> list[str]:
    """The logged samples by their position in the stream: position, id, and a hash of data, level and noise."""
    return sorted(log.read_text().splitlines(), key=lambda line: int(line.split()[0]))
