"""The page's server, on this machine only.

GET  /TOKEN/            the page and its files
GET  /TOKEN/about       the model's description, the offered choices and the limits
GET  /TOKEN/images      test images as values
POST /TOKEN/run         a request; the answer streams one line of JSON per step (`workbench.py`)

Only programs on this machine that know the address have access. Others are rejected before any work:

- A connection must send the headers of a request within a few seconds. At most 64 connections may wait for one; a new
  connection then replaces the one that has waited longest, so idle connections cannot block the page.
- The address holds a random token.
- The Host header must name this machine. A foreign name that resolves to 127.0.0.1 (DNS rebinding) does not.
- Requests that a browser makes for a page of another site (Origin, Sec-Fetch-Site) are rejected.

A few requests are read and computed at a time; a body is limited in size and in the time it takes. Each line is
computed in a thread once the line before has been sent, so a slow client delays only its own request. When a client
disconnects, its request ends after the step in progress. The Content-Security-Policy keeps the page from loading
anything from elsewhere and from being framed.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Generator, Iterator
from importlib import resources
from threading import BoundedSemaphore

import anyio
import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from bsi.app.workbench import Frame, Request, Workbench, encode
from bsi.errors import BsiError, UsageError

HOSTS = ("127.0.0.1", "localhost")
JOBS = 3  # requests computed at once
JOB_SECONDS, HEADER_SECONDS, BODY_SECONDS = 600.0, 5.0, 10.0
MAX_WAITING = 64  # connections without a request
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def create_app(bench: Workbench, token: str, jobs: int = JOBS) -> Guard:
    """The page of one model behind a token."""
    slots = BoundedSemaphore(jobs)
    # All files of the page, read once. A requested name is only looked up here, never joined to a folder.
    files = {
        file.name: Response(file.read_bytes(), media_type=MEDIA_TYPES[file.name.rpartition(".")[2]])
        for file in (resources.files("bsi.app") / "page").iterdir()
    }
    about = JSONResponse(bench.about)
    images = JSONResponse({"count": len(bench.images), "values": encode(bench.images)})

    def file(request: HTTPRequest) -> Response:
        name = request.path_params.get("name", "index.html")
        return files[name] if name in files else _error(404, "there is no such file here.")

    async def run(request: HTTPRequest) -> Response:
        if not slots.acquire(blocking=False):
            return _error(429, f"{jobs} requests are in progress: try again in a moment.", {"Retry-After": "1"})
        try:
            body = await _body(request, bench.limits.body)
            return RunResponse(lines(bench.frames(Request.model_validate_json(body))), slots)
        except BaseException:
            slots.release()
            raise

    def rejected(request: HTTPRequest, error: Exception) -> Response:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            return _error(422, ": ".join([*(str(part) for part in first["loc"][:1]), first["msg"]]))
        return _error(error.status_code, error.detail) if isinstance(error, HTTPException) else _error(422, str(error))

    app = Starlette(
        routes=[
            Route("/about", lambda request: about),
            Route("/images", lambda request: images),
            Route("/run", run, methods=["POST"]),
            Route("/", file),
            Route("/{name}", file),
        ],
        exception_handlers=dict.fromkeys((BsiError, HTTPException, ValidationError), rejected),
    )
    app.router.redirect_slashes = False
    return Guard(app, token)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


async def _body(request: HTTPRequest, most: int) -> bytes:
    """The body of a request, read up to the limits of size and time."""
    too_large = HTTPException(413, f"the body must have at most {most} bytes")
    length = request.headers.get("content-length", "0")
    if len(length) > 12 or int(length) > most:
        raise too_large
    body = b""
    with anyio.move_on_after(BODY_SECONDS):
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_large
        except ClientDisconnect:
            raise HTTPException(400, "the client has disconnected") from None
        return body
    raise HTTPException(408, f"the body took more than {BODY_SECONDS:g} seconds")


def lines(frames: Iterator[Frame]) -> Generator[bytes, None, None]:
    """Frames as lines. An error is the last line, since the status has been sent already."""
    try:
        for frame in frames:
            yield frame.line()
    except BsiError as error:
        yield json.dumps({"error": str(error)}).encode() + b"\n"


class RunResponse(StreamingResponse):
    """Lines, streamed as they are computed. Releases its slot when all are sent or the client has disconnected."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: Generator[bytes, None, None], slots: BoundedSemaphore) -> None:
        super().__init__(lines)  # starlette runs a generator in a thread
        self._lines, self._slots = lines, slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with anyio.move_on_after(JOB_SECONDS):
                await super().__call__(scope, receive, send)
        finally:
            self._lines.close()  # no thread runs it now: canceling waits for the thread's current line
            self._slots.release()


class Guard:
    """ASGI middleware that checks the token, the host and the origin; the application sees the path after the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        given, slash, rest = scope["path"].removeprefix("/").partition("/")
        answer: ASGIApp | None = self._rejection(given + slash, Headers(scope=scope))
        if answer is None:
            answer, scope = self.app, {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}
        await answer(scope, receive, send_with_headers)

    def _rejection(self, given: str, headers: Headers) -> Response | None:
        # The comparison takes the same time for all wrong tokens.
        if not secrets.compare_digest(given.encode(), f"{self.token}/".encode()):
            return _error(403, "open the complete address that `bsi view` printed, with its token")
        hosts = headers.getlist("host")
        name = hosts[0].rpartition(":")[0] or hosts[0] if hosts else ""
        if len(hosts) != 1 or name not in HOSTS:
            return _error(421, f"the Host header must be {' or '.join(HOSTS)}")
        foreign_origin = headers.get("origin", f"http://{hosts[0]}") != f"http://{hosts[0]}"
        if foreign_origin or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _error(403, "requests from other sites are rejected")
        return None


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with limits for connections that wait for a request: without a token, they must cost little."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        else:
            self._stop_waiting()

    def _wait(self) -> None:
        """Start the time for the headers of the next request; later bytes of the same headers do not extend it."""
        if self.deadline is None and not self.transport.is_closing():
            self.deadline = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
            waiting = {
                connection: connection.deadline.when()
                for connection in self.connections
                if isinstance(connection, GuardedProtocol) and connection.deadline is not None
            }
            if len(waiting) > MAX_WAITING:
                min(waiting, key=waiting.__getitem__).transport.abort()

    def _stop_waiting(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def listen(port: int) -> socket.socket:
    """A socket on the loopback interface; port 0 selects a free one."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(f"cannot listen on port {port}: {reason}. Choose another --port, or leave it out.") from error


def server_of(app: Guard) -> uvicorn.Server:
    """A server for `run(sockets=[listen(0)])`, which serves until Ctrl-C."""
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=16 << 10,
    )
    return uvicorn.Server(config)
