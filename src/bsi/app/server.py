"""The page's server, on this machine only.

GET  /TOKEN/            the page and its files
GET  /TOKEN/about       the model's description, the offered choices and the limits
GET  /TOKEN/images      test images as values
POST /TOKEN/run         a request; the answer streams one line of JSON per step (`workbench.py`)

A few requests are computed at a time. Each line is computed in a thread once the line before has been sent, so a slow
client delays only its own request. When a client disconnects, its request ends after the step in progress.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Generator, Iterator
from importlib import resources
from threading import BoundedSemaphore
from typing import Any

import anyio
import uvicorn
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from bsi.app.guard import Guard, GuardedProtocol
from bsi.app.workbench import Frame, Request, Workbench, encode
from bsi.errors import BsiError, UsageError

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
JOBS = 3  # requests computed at once
JOB_SECONDS = 600.0


def create_app(bench: Workbench, token: str, jobs: int = JOBS) -> Guard:
    """The page of one model behind a token."""
    app = FastAPI(title="bsi view", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    slots = BoundedSemaphore(jobs)
    # All files of the page, read once. A requested name is only looked up here, never joined to a folder.
    files = {
        file.name: Response(file.read_bytes(), media_type=MEDIA_TYPES[file.name.rpartition(".")[2]])
        for file in (resources.files("bsi.app") / "page").iterdir()
    }

    @app.get("/about")
    def about() -> dict[str, Any]:
        return bench.about

    @app.get("/images")
    def images() -> dict[str, Any]:
        return {"count": len(bench.images), "values": encode(bench.images)}

    @app.post("/run")
    def run(request: Request) -> Response:
        frames = bench.frames(request)
        if not slots.acquire(blocking=False):
            return _error(f"{jobs} requests are in progress: try again in a moment.", 429, {"Retry-After": "1"})
        return JobResponse(lines(frames), slots)

    @app.get("/{name}")
    @app.get("/")
    def file(name: str = "index.html") -> Response:
        return files[name] if name in files else _error("there is no such file here.", 404)

    @app.exception_handler(BsiError)
    def rejected(request: HTTPRequest, error: BsiError) -> Response:
        return _error(str(error), 422)

    @app.exception_handler(HTTPException)
    def invalid(request: HTTPRequest, error: HTTPException) -> Response:
        return _error(str(error.detail), error.status_code)

    @app.exception_handler(RequestValidationError)
    def malformed(request: HTTPRequest, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return _error(f"{where}: {first['msg']}".removeprefix(": "), 422)

    return Guard(app, token, bench.limits.body)


def _error(message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


def lines(frames: Iterator[Frame]) -> Generator[bytes, None, None]:
    """Frames as lines. An error is the last line, since the status has been sent already."""
    try:
        for frame in frames:
            yield frame.line()
    except BsiError as error:
        yield json.dumps({"error": str(error)}).encode() + b"\n"


class JobResponse(StreamingResponse):
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


def listen(port: int) -> socket.socket:
    """A socket on the loopback interface; port 0 selects a free one."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        reason = "it is taken" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
        raise UsageError(f"cannot listen on port {port}: {reason}. Choose another --port, or leave it out.") from error
    except OverflowError as error:
        raise UsageError(f"--port must be 0 to 65535, got {port}.") from error


def server_of(app: Guard) -> uvicorn.Server:
    """A server for `run(sockets=[listen(0)])`, which serves until Ctrl-C."""
    return uvicorn.Server(
        uvicorn.Config(
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
    )
