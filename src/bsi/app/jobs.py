"""Work for a page, a few jobs at a time. A job is a generator of lines; it goes on only while its client listens.

Each line is computed in a thread when the one before has been taken, so that a slow client slows its own job alone and
nothing piles up. A client that leaves, and a job that takes too long, end it after the line in the making.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from threading import BoundedSemaphore

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from bsi.errors import BsiError

__all__ = ["Busy", "JobResponse", "Slots"]

SECONDS = 600.0  # a page that has not finished by then is asleep, or malicious


class Busy(BsiError):
    """As many jobs as there may be are under way."""


class Slots:
    """At most `count` jobs at once; who comes later is told so at once, rather than kept waiting."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = BoundedSemaphore(count)

    def take(self) -> None:
        if not self._free.acquire(blocking=False):
            raise Busy(f"{self.count} requests are being worked on: try again in a moment")

    def give_back(self) -> None:
        self._free.release()


class JobResponse(StreamingResponse):
    """The lines of a job, streamed as they are made. It holds a slot from before it exists until it is sent or left."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: Generator[bytes, None, None], slots: Slots, seconds: float = SECONDS) -> None:
        super().__init__(_in_threads(lines))
        self._lines, self._slots, self._seconds = lines, slots, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with anyio.move_on_after(self._seconds):
                await super().__call__(scope, receive, send)
        finally:
            self._lines.close()  # no thread is in it: a canceled wait for one ends when the thread does
            self._slots.give_back()


async def _in_threads(lines: Generator[bytes, None, None]) -> AsyncIterator[bytes]:
    while (line := await anyio.to_thread.run_sync(next, lines, None)) is not None:
        yield line
