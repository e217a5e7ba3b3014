"""A rank that hangs takes all others with it, silently: they wait for it in a collective. The watchdog says who it was.

The loop tells the watchdog where it is: a step and a phase of it. A thread publishes that in the store that the ranks
met at, through a connection of its own. When a rank has not moved for `limit_s`, its thread compares all ranks: those
furthest behind are the ones that everyone waits for. It names them, writes where each of its own threads is, and ends
the process, since a thread that is stuck in a collective cannot be asked to.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch's stubs leave them out

from bsi.training.distributed import Place

__all__ = ["HUNG", "Phase", "Watchdog", "watching"]

HUNG = 1  # exit code

Phase = Literal["start", "data", "forward", "backward", "update", "evaluate", "save"]
ORDER: tuple[Phase, ...] = ("start", "data", "forward", "backward", "update", "evaluate", "save")


class Watchdog:
    """Where this rank is, and since when. `at` is called by the loop, and costs an assignment."""

    def __init__(self, place: Place, limit_s: float) -> None:
        self.place, self.limit_s = place, limit_s
        self._where: tuple[int, Phase] = (0, "start")
        self._since = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bsi-watchdog", daemon=True)
        self._thread.start()

    def at(self, step: int, phase: Phase) -> None:
        self._where, self._since = (step, phase), time.monotonic()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        place, store = self.place, self._connect()
        tick = min(5.0, self.limit_s / 4)
        while not self._stopped.wait(tick):
            step, phase = self._where
            if store is not None:
                store.set(f"bsi/at/{place.rank}", f"{step} {phase}")
            if time.monotonic() - self._since > self.limit_s:
                # Once more, after the others had time to publish where they are stuck.
                if self._stopped.wait(2 * tick) or time.monotonic() - self._since <= self.limit_s:
                    continue
                self._give_up(store)

    def _connect(self) -> Store | None:
        if self.place.size == 1:
            return None
        return TCPStore(
            self.place.host, self.place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
        )

    def _give_up(self, store: Store | None) -> None:
        places = {self.place.rank: self._where}
        for rank in range(self.place.size):
            if store is not None and store.check([f"bsi/at/{rank}"]):
                step, phase = store.get(f"bsi/at/{rank}").decode().split()
                places[rank] = (int(step), next(known for known in ORDER if known == phase))
        sys.stderr.write(verdict(self.place.rank, places, self.place.size, self.limit_s) + "\n")
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(HUNG)


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
def watching(place: Place, limit_s: float) -> Iterator[Watchdog]:
    watchdog = Watchdog(place, limit_s)
    try:
        yield watchdog
    finally:
        watchdog.stop()
