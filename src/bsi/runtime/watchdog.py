"""A rank that hangs takes all others with it, silently: they wait for it in a collective. The watchdog says who it was.

The loop tells the watchdog where it is: a step and a phase of it. A thread publishes that in the store that the ranks
met at, through a connection of its own. When a rank has not moved for `limit_s`, its thread compares all ranks: those
furthest behind are the ones that everyone waits for. It names them, writes where each of its own threads is, and ends
the process, since a thread that is stuck in a collective cannot be asked to.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs lack it

from bsi.runtime.distributed import Place
from bsi.runtime.rendezvous import Meeting, connect

__all__ = ["HUNG", "Phase", "Watchdog", "watching"]

HUNG = 1  # exit code

Phase = Literal["start", "data", "compute", "update", "evaluate", "save"]
ORDER: tuple[Phase, ...] = ("start", "data", "compute", "update", "evaluate", "save")


class Watchdog:
    """Where this rank is, and since when. `at` is called by the loop, and costs an assignment."""

    def __init__(self, place: Place, limit_s: float, meeting: Meeting | None) -> None:
        self.place, self.meeting, self.limit_s = place, meeting, limit_s
        self._where: tuple[int, Phase] = (0, "start")
        self._since = math.inf  # the ranks have met with a time limit of its own; from the first step on, time counts
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bsi-watchdog", daemon=True)
        self._thread.start()

    def at(self, step: int, phase: Phase) -> None:
        self._where, self._since = (step, phase), time.monotonic()

    @property
    def where(self) -> tuple[int, Phase]:
        """The step and the phase of it that were told last."""
        return self._where

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        store = self._connect()
        tick = min(5.0, self.limit_s / 4)
        while not self._stopped.wait(tick):
            self._publish(store)
            if time.monotonic() - self._since > self.limit_s:
                # Once more, after the others had time to publish where they are stuck.
                if self._stopped.wait(2 * tick) or time.monotonic() - self._since <= self.limit_s:
                    continue
                self._give_up(store)

    def _connect(self) -> Store | None:
        return None if self.meeting is None else connect(self.meeting, serve=False, timeout_s=10.0)

    def _publish(self, store: Store | None) -> None:
        step, phase = self._where
        if store is not None:
            with contextlib.suppress(RuntimeError):  # the rank that holds the store is gone: the time-out still works
                store.set(f"at/{self.place.rank}", f"{step} {phase}")

    def _give_up(self, store: Store | None) -> None:
        places = {self.place.rank: self._where}
        if store is not None:
            with contextlib.suppress(RuntimeError):
                places |= _read_places(store, self.place.size)
        sys.stderr.write(verdict(self.place.rank, places, self.place.size, self.limit_s) + "\n")
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(HUNG)


def _read_places(store: Store, size: int) -> dict[int, tuple[int, Phase]]:
    places: dict[int, tuple[int, Phase]] = {}
    for rank in range(size):
        if store.check([f"at/{rank}"]):
            step, phase = store.get(f"at/{rank}").decode().split()
            places[rank] = (int(step), next(known for known in ORDER if known == phase))
    return places


def verdict(me: int, places: dict[int, tuple[int, Phase]], size: int, limit_s: float) -> str:
    """Who everyone waits for: the ranks furthest behind, and those never heard of."""

    def progress(rank: int) -> tuple[int, int]:
        step, phase = places[rank]
        return step, ORDER.index(phase)

    behind = [rank for rank in places if progress(rank) == min(map(progress, places))]
    named = [f"rank {rank} hangs in step {places[rank][0]} ({places[rank][1]})" for rank in behind]
    named += [f"rank {rank} was never heard of" for rank in range(size) if rank not in places]
    waiting = [f"rank {rank} in step {places[rank][0]} ({places[rank][1]})" for rank in places if rank not in behind]
    rest = f"; waiting for it: {', '.join(waiting[:8])}" if waiting else ""
    return f"bsi train: no progress for {limit_s:.0f} s on rank {me}: {', '.join(named[:8])}{rest}"


@contextmanager
def watching(place: Place, limit_s: float, meeting: Meeting | None = None) -> Iterator[Watchdog]:
    """Watch while the block runs. Without a meeting there is one rank, which can only say where it is itself."""
    watchdog = Watchdog(place, limit_s, meeting)
    try:
        yield watchdog
    finally:
        watchdog.stop()
