"""Who may ask: programs on this machine that were given the address. Everything else is refused before it costs work.

- The address holds a random token: `/TOKEN/...`. Without it there is nothing here.
- The Host header names this machine: a name that someone points at 127.0.0.1 (DNS rebinding) does not.
- Requests that a browser makes for another site's page (Origin, Sec-Fetch-Site) are refused.
- A body is read up to a limit, and for a limited time, before anything looks at it.

The page itself may load nothing from elsewhere and be framed by nobody (Content-Security-Policy).
"""

from __future__ import annotations

import secrets
from http import HTTPStatus

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard"]

HOSTS = ("127.0.0.1", "localhost")
BODY_SECONDS = 10.0
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Guard:
    """An application behind a token; it sees the path after the token, and bodies of at most `most_bytes`."""

    def __init__(self, app: ASGIApp, token: str, most_bytes: int) -> None:
        self.app, self.token, self.most_bytes = app, token, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no websockets here
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        try:
            _check_origin(Headers(scope=scope))
            path = _after_token(scope["path"], self.token)
            receive = await self._read(Headers(scope=scope), receive)
        except Refused as refused:
            await PlainTextResponse(refused.reason, refused.status)(scope, receive, send_guarded)
            return
        except ClientDisconnect:
            return
        await self.app({**scope, "path": path, "raw_path": path.encode()}, receive, send_guarded)

    async def _read(self, headers: Headers, receive: Receive) -> Receive:
        """The whole body, up to the limit; then whatever comes after it, such as the client's leaving."""
        claimed = headers.get("content-length", "0")
        if not claimed.isdecimal():
            raise Refused(HTTPStatus.BAD_REQUEST, "Content-Length is a number")
        if len(claimed) > 12 or int(claimed) > self.most_bytes:
            raise _too_large(self.most_bytes)
        body, more = b"", True
        with anyio.move_on_after(BODY_SECONDS):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body, more = body + message.get("body", b""), message.get("more_body", False)
                if len(body) > self.most_bytes:
                    raise _too_large(self.most_bytes)
        if more:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"the body took more than {BODY_SECONDS:g} seconds")
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay


def _too_large(most: int) -> Refused:
    return Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {most} bytes here")


def _check_origin(headers: Headers) -> None:
    hosts = headers.getlist("host")
    name = hosts[0].rpartition(":")[0] or hosts[0] if hosts else ""
    if len(hosts) != 1 or name not in HOSTS:
        raise Refused(HTTPStatus.MISDIRECTED_REQUEST, f"this page is at {' or '.join(HOSTS)} alone")
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{hosts[0]}":
        raise Refused(HTTPStatus.FORBIDDEN, "requests from other sites are refused")
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Refused(HTTPStatus.FORBIDDEN, "requests from other sites are refused")


def _after_token(path: str, token: str) -> str:
    """The path behind `/TOKEN`; a wrong token takes as long to refuse as a nearly right one."""
    given, slash, rest = path.removeprefix("/").partition("/")
    if not (slash and secrets.compare_digest(given.encode(), token.encode())):
        raise Refused(HTTPStatus.FORBIDDEN, "open the whole address that `bsi view` printed, token included")
    return f"/{rest}"
