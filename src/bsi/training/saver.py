"""Saves beside the training: the state is copied at once, and written by a thread while the next steps run.

`latest` moves only when everything is on the disk, so a crash in the middle costs the new checkpoint and nothing else.
At most one save is under way; an error of the last one is raised by the next, or at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from bsi.recipe import Keep
from bsi.runtime import checkpoint
from bsi.runtime.checkpoint import Snapshot

__all__ = ["Saver"]


class Saver:
    """Writes snapshots into a run's checkpoints, one after the other."""

    def __init__(self, root: Path, keep: Keep, still_ours: Callable[[], None]) -> None:
        self.root, self.keep, self.still_ours = root, keep, still_ours
        self._saved_at = time.monotonic()
        self.has_saved = (root / checkpoint.LATEST).is_file()  # a run that goes on begins with what was saved
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="bsi-save")
        self._under_way: Future[None] | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the last save was finished, or since the start."""
        return time.monotonic() - self._saved_at

    def save(self, snapshot: Snapshot) -> None:
        self.wait()
        self._under_way = self._pool.submit(self._write, snapshot)
        if not self.keep.background:
            self.wait()

    def _write(self, snapshot: Snapshot) -> None:
        checkpoint.save(self.root, snapshot, self.keep, self.still_ours)
        self._saved_at, self.has_saved = time.monotonic(), True

    def wait(self) -> None:
        """Until what was begun is on the disk."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            _until_done(under_way)
            under_way.result()

    def close(self) -> None:
        """Let what was begun come to its end, also where a later step failed: it is that step's error that counts."""
        if self._under_way is not None:
            _until_done(self._under_way)
        self._pool.shutdown()


def _until_done(save: Future[None]) -> None:
    """In short waits: a signal may reach another thread than this one, which alone can act on it."""
    while not wait([save], timeout=0.2).done:
        pass
