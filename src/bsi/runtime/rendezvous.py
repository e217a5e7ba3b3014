"""Where ranks meet: a key-value store that forgets what earlier attempts wrote.

torchrun keeps one store for all restarts of a run (seen in torch 2.13), and its keys stay: a rank that was started
again may read the address of a peer that died, and wait for it for ever. Here the ranks of one attempt first agree on a
token that no other attempt had, and then use only keys that begin with it:

    rank r      hello/r <- a nonce of its own
    rank 0      reply/r <- that nonce and the token
    rank r      ack/r   <- the token, once the reply repeats its own nonce
    rank 0      goes on when every ack is the token

An old hello gets a reply that nobody waits for; an old reply has the wrong nonce, an old ack the wrong token.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch's stubs lack them

from bsi.errors import BsiError

__all__ = ["Meeting", "connect", "meet"]

POLL_S = 0.02


@dataclass(frozen=True)
class Meeting:
    """The host and port of the store, and what this attempt's keys begin with."""

    host: str
    port: int
    token: str = ""


def connect(meeting: Meeting, serve: bool, timeout_s: float) -> Store:
    """A connection of one's own; the rank that serves holds the store as well."""
    store = TCPStore(
        meeting.host, meeting.port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return PrefixStore(f"bsi/{meeting.token}", store) if meeting.token else store


def meet(host: str, port: int, rank: int, size: int, timeout_s: float) -> tuple[Store, Meeting]:
    """A store for this attempt alone, once all ranks are there."""
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = connect(Meeting(host, port), serve=rank == 0 and not launcher_serves, timeout_s=timeout_s)
    agree = _give_token if rank == 0 else _take_token
    token = agree(store, rank, size, time.monotonic() + timeout_s)
    return PrefixStore(f"bsi/{token}", store), Meeting(host, port, token)


def _give_token(store: Store, rank: int, size: int, deadline: float) -> str:
    token, waiting = uuid.uuid4().hex, set(range(1, size))
    while waiting:
        for other in sorted(waiting):
            hello = _read(store, f"bsi/hello/{other}")
            if hello:
                store.set(f"bsi/reply/{other}", f"{hello} {token}")
            if _read(store, f"bsi/ack/{other}") == token:
                waiting.discard(other)
        _wait(deadline, f"ranks {', '.join(map(str, sorted(waiting)))} did not come")
    return token


def _take_token(store: Store, rank: int, size: int, deadline: float) -> str:
    nonce = uuid.uuid4().hex
    store.set(f"bsi/hello/{rank}", nonce)
    while True:
        heard, _, token = _read(store, f"bsi/reply/{rank}").partition(" ")
        if heard == nonce:
            store.set(f"bsi/ack/{rank}", token)
            return token
        _wait(deadline, "rank 0 did not come")


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise BsiError(f"the ranks did not meet in time: {what}. Were as many started as the launcher says?")
    time.sleep(POLL_S)
