"""Who we are among how many: ranks from torchrun or from Slurm, one process group, PyTorch's own.

`torchrun -m bsi train ...` sets RANK, WORLD_SIZE, LOCAL_RANK and where to meet. Plain `srun bsi train ...` sets
SLURM_PROCID and its relatives, and the first host of the step is the meeting place. Without either there is one rank
and no process group. Ranks use NCCL on GPUs and gloo on CPUs.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from bsi.errors import BsiError, CorruptCheckpoint, DataError, UsageError
from bsi.runtime.rendezvous import Meeting, meet

__all__ = ["FailedTogether", "Place", "World", "find_place", "first_host", "join"]


@dataclass(frozen=True)
class Place:
    """This process among all of them, and where they meet."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    host: str = "localhost"
    port: int = 0
    local_size: int = 1
    """Ranks on this host, which share its memory."""


def find_place(env: Mapping[str, str]) -> Place:
    """Our place by torchrun's variables, else by those of an srun step, else alone."""
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = _whole(env, "RANK"), _whole(env, "WORLD_SIZE")
        if rank >= size:
            raise UsageError(
                f"RANK={rank} is not one of WORLD_SIZE={size} ranks, which count from 0: start them with torchrun, or "
                f"unset RANK and WORLD_SIZE to run alone"
            )
        return Place(
            rank, size, _whole(env, "LOCAL_RANK", 0), env.get("MASTER_ADDR", "localhost"),
            _whole(env, "MASTER_PORT", 29500), _whole(env, "LOCAL_WORLD_SIZE", 1),
        )  # fmt: skip
    # SLURM_STEP_NUM_TASKS is srun's; sbatch's own shell has only the job's variables, and is one process.
    if "SLURM_PROCID" in env and (tasks := _whole(env, "SLURM_STEP_NUM_TASKS", 1)) > 1:
        host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST", "localhost"))
        port = _whole(env, "MASTER_PORT", 20000 + _whole(env, "SLURM_JOB_ID", 0) % 20000)
        on_a_node = -(-tasks // max(1, _whole(env, "SLURM_STEP_NUM_NODES", tasks)))
        return Place(_whole(env, "SLURM_PROCID"), tasks, _whole(env, "SLURM_LOCALID", 0), host, port, on_a_node)
    return Place()


def _whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A number from the environment; unset or empty, the default."""
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"[0-9]+", text):
        raise UsageError(
            f"{name}={text!r} in the environment is not a whole number: torchrun and srun set it; unset it to run alone"
        )
    return int(text)


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: `gpu[003-006,9],login` -> `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^\[,]*)", nodes)
    if not match:
        raise UsageError(f"cannot read Slurm's list of nodes {nodes!r}: set MASTER_ADDR")
    prefix, numbers, suffix = match.groups()
    return prefix + re.split(r"[-,]", numbers)[0] + suffix if numbers else prefix


class FailedTogether(Exception):
    """What ranks do in parts failed on one, and all know: they can still meet. `error` is what this one is to raise."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class World:
    """The ranks of a run and this one's device. With one rank, everything here does nothing."""

    place: Place
    device: torch.device
    meeting: Meeting | None = None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place, on the device's own queue: the host does not wait."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether any rank says so: all get the same answer. The host waits for it."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in the order of ranks."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts

    def broadcast(self, tensor: Tensor) -> None:
        """The first rank's tensor to all, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)

    def agree(self, error: BsiError | None) -> None:
        """Raise on every rank what went wrong on one: its own error there, a short note elsewhere."""
        if error is not None and self.size == 1:
            raise error
        code = torch.tensor(0 if error is None else error.code, device=self.device)
        if self.size > 1:
            dist.all_reduce(code, dist.ReduceOp.MAX)
        if error is not None:
            raise error
        for known in (UsageError, DataError, CorruptCheckpoint):
            if int(code) == known.code:
                raise known("another rank refused: its message says why")
        if int(code):
            raise BsiError("another rank failed: its message says why")

    def fail_together(self, error: Exception | None) -> None:
        """After a part of each rank's own, and before they put the parts together: raise on all if one has failed.

        A rank that left instead would be waited for: over NCCL until the launcher kills who waits.
        """
        if self.any(error is not None):
            raise FailedTogether(error or BsiError("another rank failed: its message says why"))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: str | None, timeout_s: float) -> Iterator[World]:
    """Take part in the world for as long as the block runs. `device` is cuda, cpu, or None for what is there."""
    place = find_place(os.environ)
    world = World(place, pick_device(device, place.local_rank))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if place.size == 1:
        yield world
        return
    store, meeting = meet(place.host, place.port, place.rank, place.size, timeout_s)
    dist.init_process_group(
        "nccl" if world.device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=world.device if world.device.type == "cuda" else None,
    )
    try:
        yield replace(world, meeting=meeting)
    except BaseException as error:
        _forget(error)
        raise
    finally:
        dist.destroy_process_group()


def _forget(error: BaseException | None) -> None:
    """Let go of what a step that failed was computing with: of DDP too, which must not outlive the process group."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def pick_device(device: str | None, local_rank: int) -> torch.device:
    """The device of a rank: its own GPU if there are any."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise UsageError(f"a device is cuda or cpu: got {device!r}")
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device was found: leave --device out, or use --device cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} are visible. Start as many "
            f"processes per node as there are GPUs."
        )
    return torch.device("cuda", local_rank)
