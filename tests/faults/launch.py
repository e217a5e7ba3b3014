"""Runs `bsi train` with faults at named points. The package itself holds no injection: this file patches it.

    launch.py train WORDS...        one run, or one rank under torchrun; faults come from $FAULTS
    launch.py sequence PLAN.json    many runs, each in freshly forked processes (torch is imported once)

A fault is {"point", "do", "step", "rank"}; it happens once, for which it leaves a mark in $FAULT_MARKS (a rank that
torchrun starts again must not die again). Points:

    step      before a step                    loss      in the middle of one, with its losses at hand
    data      while a batch is fetched         network   when the network is called
    evaluate  before an evaluation, with its step as that of the last one trained
    measure   within one, on the rank's own test samples; sample, before samples are drawn
    save:X    in a save: space, write, half, publish, latest, prune
    leave     when a rank leaves the others
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOREVER_S = 600.0


class Faults:
    """The faults of this process, and the actions at their points."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step, self.saving = rank, -1, -1
        self.specs: list[dict[str, Any]] = json.loads(os.environ.get("FAULTS", "[]"))
        self.marks = Path(os.environ.get("FAULT_MARKS", "."))
        self.reached = threading.Condition()
        self.heard = False

    def at(self, point: str) -> str | None:
        """The action of the fault at this point, or None. Each fault happens once."""
        for number, fault in enumerate(self.specs):
            here = fault["point"] == point and fault.get("rank", 0) == self.rank
            # A save is named by the step it saves; training may have continued.
            if here and fault["step"] == (self.saving if point.startswith("save:") else self.step):
                try:
                    (self.marks / f"fault-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                return str(fault["do"])
        return None

    def meet(self, point: str) -> str | None:
        """Perform the action if it is possible here; otherwise return it to the caller."""
        do = self.at(point)
        if do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif do == "hang":
            time.sleep(FOREVER_S)
        elif do is not None and do.startswith("signal "):
            _, name, whom = do.split()
            os.kill(os.getppid() if whom == "parent" else os.getpid(), signal.Signals[name])
            while whom == "parent" and not self.heard:  # until the launcher has forwarded the signal
                time.sleep(0.02)
        elif do == "ctrl-c and wait":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(FOREVER_S)
        elif do == "kill two steps later":
            with self.reached:
                self.reached.wait_for(lambda: self.step >= self.saving + 2, FOREVER_S)
            os.kill(os.getpid(), signal.SIGKILL)
        elif do == "linger":
            time.sleep(2.0)
        elif do == "kill the first":  # the rank that holds the run folder's lock, if it is still there
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                lock = Path(sys.argv[sys.argv.index("--out") + 1]) / "lock.json"
                os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
        elif do == "no space":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif do == "no disk":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        elif do == "no memory":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return do

    def advance(self, step: int) -> None:
        with self.reached:
            self.step = step
            self.reached.notify_all()


def patch(faults: Faults) -> None:
    """Put the faults' points around the package's own functions."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from bsi import bound
    from bsi.backbones.layers import Backbone
    from bsi.runtime import checkpoint
    from bsi.training import loop
    from bsi.training.loop import StopFlag
    from bsi.training.step import Batch, Engine, Piece, Stream, piece_ids

    def around(owner: Any, name: str, point: str, after: bool = False) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not after:
                faults.meet(point)
            result = original(*args, **kwargs)
            if after:
                faults.meet(point)
            return result

        setattr(owner, name, wrapped)

    around(checkpoint, "write_files", "save:write")
    around(checkpoint, "sync_file", "save:half")
    around(checkpoint, "publish", "save:publish")
    around(checkpoint, "move_latest", "save:latest")
    around(checkpoint, "prune", "save:prune")
    around(Backbone, "forward", "network")
    around(loop, "bound", "evaluate")
    around(loop, "draw_samples", "sample")
    around(bound, "noise", "measure")

    save, step, losses, batch_of = checkpoint.save, Engine.step, Engine._losses, Stream._batch

    def faulty_save(root: Path, snapshot: checkpoint.Snapshot, *args: Any) -> Path:
        faults.saving = snapshot.step
        return save(root, snapshot, *args)

    def faulty_step(self: Engine, *args: Any) -> None:
        faults.advance(self.steps_done)
        faults.meet("step")
        step(self, *args)

    def faulty_losses(self: Engine, batch: Batch) -> torch.Tensor:
        found = losses(self, batch)
        return found * torch.nan if faults.meet("loss") == "nan" else found

    log = os.environ.get("SAMPLE_LOG")

    def faulty_batch(self: Stream, piece: Piece, data: torch.Tensor) -> Batch:
        faults.meet("data")
        batch = batch_of(self, piece, data)
        if log and faults.step == piece.step:  # a pass without an update precedes the first step
            ids = piece_ids(self.recipe, len(self.source), piece)
            rows = zip(ids, data, batch.t, batch.eps, strict=True)
            lines = [
                f"{piece.step * self.recipe.batch + piece.offset + i} {sample} "
                f"{hashlib.sha256(x.numpy().tobytes() + t.numpy().tobytes() + eps.numpy().tobytes()).hexdigest()}\n"
                for i, (sample, x, t, eps) in enumerate(rows)
            ]
            with open(log, "a") as file:
                file.write("".join(lines))
        return batch

    Engine.step, Engine._losses, Stream._batch = faulty_step, faulty_losses, faulty_batch  # type: ignore[method-assign]

    hear = StopFlag.__call__

    def listening(self: StopFlag, *args: Any) -> None:
        faults.heard = True
        hear(self, *args)

    StopFlag.__call__ = listening  # type: ignore[method-assign]
    checkpoint.save = faulty_save

    leave = dist.destroy_process_group

    def alone() -> None:
        """A reducer that outlives its process group destroys it while holding the GIL, for which gloo's threads may
        wait.
        """
        faults.meet("leave")
        left = [type(kept).__name__ for kept in gc.get_objects() if isinstance(kept, DistributedDataParallel)]
        leave()
        if left:
            raise RuntimeError(f"the process group is left while {left} holds on to it")

    dist.destroy_process_group = alone

    usage = shutil.disk_usage
    Full = namedtuple("Full", "total used free")
    checkpoint.shutil.disk_usage = (  # type: ignore[attr-defined]
        lambda path: Full(1, 1, 0) if faults.at("save:space") else usage(path)
    )


def command(words: Sequence[str]) -> int:
    """`bsi train WORDS`."""
    from bsi.cli import main

    patch(Faults(int(os.environ.get("RANK", "0"))))
    return main(["train", *words])


def sequence(plan: Path) -> int:
    """Runs of {"out", "words", "faults", "ranks", "local", "slurm", "log", "copy"} in turn.

    Writes the "codes" and the "stderr" of each. `copy` keeps a copy of the run folder.
    """
    import torch._dynamo  # noqa: F401  # before the forks, which need not import it again; optimizers do

    import bsi.training.train  # noqa: F401

    results = []
    for number, entry in enumerate(json.loads(plan.read_text())):
        folder = plan.parent / f"{plan.stem}-{number}"
        folder.mkdir()
        port = _free_port()
        ranks = entry.get("ranks", 1)
        children = [_fork(entry, folder, rank, ranks, port) for rank in range(ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if "copy" in entry:
            shutil.copytree(entry["out"], entry["copy"])
        results.append({"codes": codes, "stderr": "".join((folder / f"err-{r}").read_text() for r in range(ranks))})
    plan.with_suffix(".out").write_text(json.dumps(results))
    return 0


def _free_port() -> int:
    """A free port, in the range that is derived from a Slurm job's number."""
    for port in range(20000 + os.getpid() % 10000, 40000):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", port))
            return port
    raise RuntimeError("no free port")


def _fork(entry: dict[str, Any], folder: Path, rank: int, ranks: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.environ |= {"FAULTS": json.dumps(entry.get("faults", [])), "FAULT_MARKS": str(folder)}
        if "log" in entry:
            os.environ["SAMPLE_LOG"] = entry["log"]
        if entry.get("slurm"):
            os.environ |= {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_LOCALID": str(rank)}
            os.environ |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(port - 20000)}
        elif ranks > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(entry["local"])}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        sys.argv = ["bsi", "train", *entry["words"]]
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT), stream)
        code = command(entry["words"])
    except BaseException as error:
        import traceback

        traceback.print_exception(error)
        code = int(error.code or 0) if isinstance(error, SystemExit) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    if mode == "sequence":
        sys.exit(sequence(Path(rest[0])))
    sys.argv = ["bsi", "train", *rest]
    sys.exit(command(rest))
