"""Ranks: discovery, rendezvous, collectives, and a watchdog that names a rank that hangs.

`torchrun -m bsi train ...` sets RANK, WORLD_SIZE, LOCAL_RANK and the address of the rendezvous. Plain
`srun bsi train ...` sets SLURM_PROCID and related variables, and the rendezvous is on the first host of the step.
Without either there is one rank and no process group. Ranks use NCCL on GPUs and gloo on CPUs.
"""

from __future__ import annotations

import faulthandler
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch's stubs lack them

from bsi.errors import BsiError, CorruptCheckpoint, DataError, UsageError

POLL_S = 0.02
ELSEWHERE = "this rank stops because another one has failed. The error is printed by that rank."
HUNG = 1  # exit code of a rank that the watchdog ends
LAUNCHERS = "torchrun and srun set it; unset it to run a single rank."

Phase = Literal["start", "data", "compute", "update", "journal", "evaluate", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Place:
    """The rank of this process, the number of ranks, the address of their rendezvous, and the ranks on this host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    host: str = "localhost"
    port: int = 0
    local_size: int = 1


def find_place(env: Mapping[str, str]) -> Place:
    """The place given by torchrun's variables, else by those of an srun step, else a single rank."""

    def number(name: str, default: int | None = None) -> int:
        text = env.get(name, "")
        if not text and default is not None:
            return default
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise UsageError(f"{name} in the environment must be a whole number, got {text!r}. {LAUNCHERS}")
        return int(text)

    host = env.get("MASTER_ADDR", "")
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size, local_size = number("RANK"), number("WORLD_SIZE"), number("LOCAL_WORLD_SIZE", 1)
        if rank >= size:
            raise UsageError(f"RANK must be less than WORLD_SIZE, got RANK={rank} and WORLD_SIZE={size}. {LAUNCHERS}")
        return Place(rank, size, number("LOCAL_RANK", 0), host or "localhost", number("MASTER_PORT", 29500), local_size)
    # SLURM_STEP_NUM_TASKS is set by srun; the shell of sbatch has only the job's variables and is one process.
    if "SLURM_PROCID" in env and (size := number("SLURM_STEP_NUM_TASKS", 1)) > 1:
        host = host or first_host(env.get("SLURM_STEP_NODELIST", "localhost"))
        port = number("MASTER_PORT", 20000 + number("SLURM_JOB_ID", 0) % 20000)
        local_size = -(-size // max(1, number("SLURM_STEP_NUM_NODES", size)))
        return Place(number("SLURM_PROCID"), size, number("SLURM_LOCALID", 0), host, port, local_size)
    return Place()


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: `gpu[003-006,9],login` -> `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodes)
    if not match:
        raise UsageError(f"cannot read Slurm's list of nodes, got {nodes!r}. Set MASTER_ADDR.")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + suffix


class FailedTogether(Exception):
    """Shared work failed on at least one rank; it is raised on all ranks. `error` is the error to raise on this one."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class World:
    """The ranks of a run and the device of this one. With a single rank no method communicates."""

    place: Place
    device: torch.device
    token: str = ""
    """The name of this attempt in the ranks' store, empty with a single rank."""

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
        """The sum over ranks, in place. The host does not wait for the result."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank, with the same result on all. The host waits for the result."""
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
        """Replace the tensor by the first rank's, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on every rank if the block raises a BsiError on one: its own error there, a short note elsewhere."""
        error = None
        try:
            yield
        except BsiError as raised:
            error = raised
        codes = self.gather(torch.tensor([0 if error is None else error.code], device=self.device))
        if error is not None:
            raise error
        if code := max(map(int, codes)):
            known = {kind.code: kind for kind in (UsageError, DataError, CorruptCheckpoint)}
            raise known.get(code, BsiError)(ELSEWHERE)

    def fail_together(self, error: Exception | None) -> None:
        """Raise FailedTogether on all ranks if one has an error: the others would wait for its results."""
        if self.any(error is not None):
            raise FailedTogether(error or BsiError(ELSEWHERE))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: str | None, timeout_s: float, alone: bool = False) -> Iterator[World]:
    """Join the process group while the block runs. `device` is cuda, cpu, or None for a GPU if there is one.

    A single rank has a process group only with `alone`.
    """
    place = find_place(os.environ)
    world = World(place, pick_device(device, place.local_rank))
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(world.device)
    if place.size == 1 and not alone:
        yield world
        return
    store, token = meet(place, timeout_s) if place.size > 1 else (HashStore(), "")
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=place.rank, world_size=place.size,
        timeout=timedelta(seconds=timeout_s), device_id=world.device if cuda else None,
    )  # fmt: skip
    try:
        yield replace(world, token=token)
    except BaseException as error:
        # Release the local variables of a failed step: DDP, one of them, must not outlive the process group.
        failed: BaseException | None = error
        while failed is not None:
            traceback.clear_frames(failed.__traceback__)
            failed = failed.__cause__ or failed.__context__
        raise
    finally:
        dist.destroy_process_group()


def pick_device(device: str | None, local_rank: int) -> torch.device:
    """The device of a rank: a GPU of its own, or the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise UsageError(f"device must be cuda or cpu, got {device!r}.")
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device was found. Leave --device out, or use --device cpu.")
    if local_rank >= (count := torch.cuda.device_count()):
        raise UsageError(f"local rank {local_rank} has no GPU of its own, got {count} GPUs. Start one process each.")
    return torch.device("cuda", local_rank)


# ---- Rendezvous ------------------------------------------------------------------------------------------------------
#
# torchrun keeps one key-value store for all restarts of a run (torch 2.13), with the keys of earlier attempts: a
# restarted rank could read the address of a dead peer and wait for it. So the ranks of an attempt first agree on a
# token, and then use keys that begin with it:
#
#     rank r      hello/r <- its own nonce
#     rank 0      reply/r <- that nonce and the token
#     rank r      ack/r   <- the token, once the reply repeats its nonce
#     rank 0      continues when every ack is the token
#
# Messages of earlier attempts are ignored: an old reply has the wrong nonce, and an old ack the wrong token.


def connect(place: Place, token: str, timeout_s: float, serve: bool = False) -> Store:
    """A new connection to the store; with `serve`, this process also hosts the store."""
    limit = timedelta(seconds=timeout_s)
    store = TCPStore(place.host, place.port, is_master=serve, wait_for_workers=False, timeout=limit)
    return PrefixStore(f"bsi/{token}", store) if token else store


def meet(place: Place, timeout_s: float) -> tuple[Store, str]:
    """The store and the token of this attempt, once all ranks are connected to it."""
    deadline = time.monotonic() + timeout_s
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = connect(place, "", timeout_s, serve=place.rank == 0 and not launcher_serves)

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    def pause(missing: str) -> None:
        if time.monotonic() > deadline:
            limit = f"the ranks did not meet within {timeout_s:.0f} s"
            raise BsiError(f"{limit}: {missing} did not come. Start as many ranks as the launcher announces.")
        time.sleep(POLL_S)

    if place.rank == 0:
        token, waiting = uuid.uuid4().hex, set(range(1, place.size))
        while waiting:
            for other in sorted(waiting):
                if nonce := read(f"bsi/hello/{other}"):
                    store.set(f"bsi/reply/{other}", f"{nonce} {token}")
                if read(f"bsi/ack/{other}") == token:
                    waiting.discard(other)
            if waiting:
                pause(f"ranks {', '.join(map(str, sorted(waiting)))}")
    else:
        nonce = uuid.uuid4().hex
        store.set(f"bsi/hello/{place.rank}", nonce)
        while not (reply := read(f"bsi/reply/{place.rank}")).startswith(f"{nonce} "):
            pause("rank 0")
        token = reply.partition(" ")[2]
        store.set(f"bsi/ack/{place.rank}", token)
    return PrefixStore(f"bsi/{token}", store), token


class Mail:
    """Messages between the ranks of an attempt, for threads other than the main one, which alone uses collectives."""

    def __init__(self, world: World, name: str, timeout_s: float) -> None:
        self._store = connect(world.place, f"{world.token}/{name}", timeout_s)
        self._deadline = math.inf

    def send(self, key: str, text: str) -> None:
        self._store.set(key, f" {text}")  # a space, since an empty value is not distinguished from none

    def receive(self, key: str) -> str:
        """Wait for a message. A message can be received any number of times."""
        while not self._store.check([key]):
            if time.monotonic() > self._deadline:
                raise BsiError(f"no message {key!r} from another rank")
            time.sleep(POLL_S)
        return self._store.get(key).decode()[1:]

    def limit(self, seconds: float) -> None:
        """Wait no longer than this from now on."""
        self._deadline = time.monotonic() + seconds


# ---- The watchdog ----------------------------------------------------------------------------------------------------


class Watchdog:
    """Ends a run in which a rank hangs, and names the rank. Works in a `with` block; without a token, for this rank.

    The loop calls `at` with the step and its phase. A thread publishes both in the ranks' store, over its own
    connection. If this rank has made no progress for `limit_s`, the thread compares all ranks: those furthest behind
    are the ones that the others wait for. It names them, prints the stack of every thread and ends the process, since
    a thread that is stuck in a collective cannot be interrupted.
    """

    def __init__(self, place: Place, limit_s: float, token: str = "") -> None:
        self.place, self.limit_s, self.token = place, limit_s, token
        self.where: tuple[int, Phase] = (0, "start")
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._since = math.inf  # the rendezvous has its own time limit: time counts from the first call of `at`
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bsi-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def at(self, step: int, phase: Phase) -> None:
        """Record progress. The cost is that of an assignment."""
        self.where, self._since = (step, phase), time.monotonic()

    def _watch(self) -> None:
        store = connect(self.place, self.token, timeout_s=10.0) if self.token else None
        tick = min(5.0, self.limit_s / 4)
        while not self._stopped.wait(tick):
            if self._launcher is not None and os.getppid() != self._launcher:
                self._launcher = None
                os.kill(os.getpid(), signal.SIGTERM)  # torchrun was killed: save and exit, as after its SIGTERM
            if store is not None:
                with suppress(RuntimeError):  # the rank that serves the store has ended
                    store.set(f"at/{self.place.rank}", "{} {}".format(*self.where))
            # Wait again before the end, so that the other ranks can publish where they are stuck.
            if self._hangs() and not self._stopped.wait(2 * tick) and self._hangs():
                self._give_up(store)

    def _hangs(self) -> bool:
        return time.monotonic() - self._since > self.limit_s

    def _give_up(self, store: Store | None) -> None:
        places = {self.place.rank: self.where}
        if store is not None:
            with suppress(RuntimeError):
                for rank in range(self.place.size):
                    if store.check([f"at/{rank}"]):
                        step, phase = store.get(f"at/{rank}").decode().split()
                        places[rank] = (int(step), PHASES[PHASES.index(phase)])
        with suppress(OSError):  # a log that cannot be written
            sys.stderr.write(verdict(self.place.rank, places, self.place.size, self.limit_s) + "\n")
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            sys.stderr.flush()
        os._exit(HUNG)


def verdict(me: int, places: dict[int, tuple[int, Phase]], size: int, limit_s: float) -> str:
    """A message that names the ranks that the others wait for: those furthest behind, and those that never reported."""
    progress = {rank: (step, PHASES.index(phase)) for rank, (step, phase) in places.items()}
    named, waiting = [], []
    for rank, (step, phase) in places.items():
        if progress[rank] == min(progress.values()):
            named.append(f"rank {rank} hangs in step {step} ({phase})")
        else:
            waiting.append(f"rank {rank} in step {step} ({phase})")
    named += [f"rank {rank} never reported" for rank in range(size) if rank not in places]
    rest = f"; waiting for it: {', '.join(waiting[:8])}" if waiting else ""
    return f"bsi train: no progress for {limit_s:.0f} s on rank {me}: {', '.join(named[:8])}{rest}"
