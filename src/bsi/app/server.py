"""The addresses of the page, and the server that answers there on this machine alone.

GET  /TOKEN/            the page, and the files it is made of
GET  /TOKEN/about       what the model is, and what may be asked of it
GET  /TOKEN/images      the test images, as values
POST /TOKEN/run         a request (`asks.py`); one line of JSON for each step of its trajectory (`workbench.py`)
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Generator, Iterator
from importlib import resources
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from bsi.app.asks import Ask
from bsi.app.guard import Guard
from bsi.app.jobs import Busy, JobResponse, Slots
from bsi.app.workbench import Frame, Workbench, encoded
from bsi.errors import BsiError, UsageError

__all__ = ["create_app", "listen", "server_of"]

HTML, CSS, SCRIPT = "text/html; charset=utf-8", "text/css; charset=utf-8", "text/javascript; charset=utf-8"
# All files there are: a path is looked up here and never joined to a folder.
FILES = {
    "": ("index.html", HTML),
    "page.css": ("page.css", CSS),
    "main.js": ("main.js", SCRIPT),
    "history.js": ("history.js", SCRIPT),
    "sheets.js": ("sheets.js", SCRIPT),
    "pixel.js": ("pixel.js", SCRIPT),
    "easel.js": ("easel.js", SCRIPT),
}
JOBS = 3  # at once: each has the processor for itself while it makes a step
CONNECTIONS = 128  # open at once; more are answered 503 by the server itself


def create_app(bench: Workbench, token: str, jobs: int = JOBS) -> Guard:
    """The page of one model, behind a token."""
    app = FastAPI(title="bsi view", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    slots = Slots(jobs)
    files = {name: (_read(file), kind) for name, (file, kind) in FILES.items()}

    @app.get("/about")
    def about() -> dict[str, Any]:
        return bench.about.plain()

    @app.get("/images")
    def images() -> dict[str, Any]:
        return {"count": len(bench.images), "values": encoded(bench.images)}

    @app.post("/run")
    def run(ask: Ask) -> Response:
        frames = bench.frames(ask)
        slots.take()
        return JobResponse(lines(frames), slots)

    @app.get("/{name}")
    @app.get("/")
    def file(name: str = "") -> Response:
        if name not in files:
            return JSONResponse({"error": "there is no such file here"}, 404)
        content, kind = files[name]
        return Response(content, media_type=kind)

    @app.exception_handler(Busy)
    def busy(request: Request, error: Busy) -> Response:
        return JSONResponse({"error": str(error)}, 429, headers={"Retry-After": "1"})

    @app.exception_handler(BsiError)
    def refused(request: Request, error: BsiError) -> Response:
        return JSONResponse({"error": str(error)}, 422)

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return JSONResponse({"error": f"{where}: {first['msg']}".removeprefix(": ")}, 422)

    return Guard(app, token, bench.about.limits.body)


def lines(frames: Iterator[Frame]) -> Generator[bytes, None, None]:
    """Frames as lines. What goes wrong on the way is a line too: the answer has begun, and its status is sent."""
    try:
        for frame in frames:
            yield frame.line()
    except BsiError as error:
        yield json.dumps({"error": str(error)}).encode() + b"\n"


def _read(file: str) -> bytes:
    return (resources.files("bsi.app") / "page" / file).read_bytes()


def listen(port: int) -> socket.socket:
    """A socket on the loopback interface; port 0 is any free one."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be had ({os.strerror(error.errno or 0)})"
        raise UsageError(f"port {port} {why}: choose another --port, or leave it out") from error
    except OverflowError as error:
        raise UsageError(f"a port lies in 0 .. 65535: got {port}") from error


def server_of(app: Guard) -> uvicorn.Server:
    """What `run(sockets=[listen(0)])` serves until Ctrl-C."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=16 << 10,
        )
    )
