"""Access control: only programs on this machine that know the address have access. Others are rejected before any work.

- A connection must send the headers of a request within a few seconds. At most 64 connections may wait for one; a new
  connection then replaces the one that has waited longest, so idle connections cannot block the page.
- The address holds a random token, `/TOKEN/...`.
- The Host header must name this machine. A foreign name that resolves to 127.0.0.1 (DNS rebinding) does not.
- Requests that a browser makes for a page of another site (Origin, Sec-Fetch-Site) are rejected.
- A body is limited in size and in the time it takes.

The Content-Security-Policy keeps the page from loading anything from elsewhere and from being framed.
"""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HOSTS = ("127.0.0.1", "localhost")
MAX_WAITING = 64  # connections without a request
MAX_REQUESTS = 128  # in progress
HEADER_SECONDS, BODY_SECONDS = 5.0, 10.0
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


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


class Guard:
    """ASGI middleware; the application sees the path after the token and bodies of at most `max_body` bytes."""

    def __init__(self, app: ASGIApp, token: str, max_body: int) -> None:
        self.app, self.token, self.max_body = app, token, max_body
        self.requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no websockets
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        try:
            path = _path_after_token(scope["path"], self.token)
            _check_origin(headers)
            if self.requests >= MAX_REQUESTS:
                raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_REQUESTS} requests are in progress")
            self.requests += 1
            try:
                receive = await self._read_body(headers, receive)
                await self.app({**scope, "path": path, "raw_path": path.encode()}, receive, send_with_headers)
            finally:
                self.requests -= 1
        except HTTPException as rejected:
            await PlainTextResponse(rejected.detail, rejected.status_code)(scope, receive, send_with_headers)
        except ClientDisconnect:
            return

    async def _read_body(self, headers: Headers, receive: Receive) -> Receive:
        """Read the body up to the limit, and return a `receive` that replays it and then waits for a disconnect."""
        too_large = HTTPException(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body must have at most {self.max_body} bytes"
        )
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            raise HTTPException(HTTPStatus.BAD_REQUEST, "Content-Length must be a number")
        if len(length) > 12 or int(length) > self.max_body:
            raise too_large
        body, more = b"", True
        with anyio.move_on_after(BODY_SECONDS):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body, more = body + message.get("body", b""), message.get("more_body", False)
                if len(body) > self.max_body:
                    raise too_large
        if more:
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, f"the body took more than {BODY_SECONDS:g} seconds")
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return replay


def _path_after_token(path: str, token: str) -> str:
    """The path behind `/TOKEN`. The comparison takes the same time for every wrong token."""
    given, slash, rest = path.removeprefix("/").partition("/")
    if not (slash and secrets.compare_digest(given.encode(), token.encode())):
        raise HTTPException(HTTPStatus.FORBIDDEN, "open the complete address that `bsi view` printed, with its token")
    return f"/{rest}"


def _check_origin(headers: Headers) -> None:
    hosts = headers.getlist("host")
    name = hosts[0].rpartition(":")[0] or hosts[0] if hosts else ""
    if len(hosts) != 1 or name not in HOSTS:
        raise HTTPException(HTTPStatus.MISDIRECTED_REQUEST, f"the Host header must be {' or '.join(HOSTS)}")
    foreign_origin = headers.get("origin", f"http://{hosts[0]}") != f"http://{hosts[0]}"
    if foreign_origin or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise HTTPException(HTTPStatus.FORBIDDEN, "requests from other sites are rejected")
