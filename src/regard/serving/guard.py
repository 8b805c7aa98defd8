"""The guard before all addresses: names of hosts, origins, the token, the size of bodies, and headers of answers."""

import hmac
import ipaddress
import time
from collections.abc import Iterable
from typing import Any

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from regard.errors import ArgumentError
from regard.serving.settings import Entrance, RequestLimits
from regard.serving.worker import Refused

OPEN = ("/", "/live.js", "/live.css", "/health", "/favicon.ico")
"""The addresses that need no token: the page asks its reader for it."""
BODY_TOKENS = ("/translate", "/languages")
"""The addresses that may have the token in their body, as LibreTranslate's clients send it."""
CHANGING = ("POST", "PUT", "PATCH", "DELETE")
POLICY = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "img-src 'self' data: blob:",
    "worker-src blob:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
))  # fmt: skip
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer. There is no header of CORS: pages of other origins read nothing."""


class _NoReader(Exception):
    """The client has taken nothing of its answer for as long as a whole answer may take."""


class Guard:
    def __init__(self, app: Any, entrance: Entrance, limits: RequestLimits) -> None:
        self._app, self._entrance, self._limits = app, entrance, limits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            with anyio.move_on_after(self._limits.max_seconds) as time_to_take:
                await send(message)
            if time_to_take.cancelled_caught:
                raise _NoReader

        app = self._app
        try:
            self._check(scope)
        except Refused as error:
            app = refusal(error)
        try:
            await app(scope, self._bounded(receive, self._limits.max_body), with_headers)
        except* (_NoReader, ClientDisconnect):
            pass  # the server closes the connection, because the answer is not whole

    def _check(self, scope: Any) -> None:
        headers, method = Headers(scope=scope), scope["method"]
        hosts = headers.getlist("host")
        if len(hosts) != 1 or host_name(hosts[0]) not in self._entrance.hosts:
            raise Refused(421, "this server answers to other names: start it with --allow-host NAME")
        origins = headers.getlist("origin")
        # An origin is compared as it came: one that no parser can read is foreign too.
        is_foreign = any(origin.lower().partition("://")[2] != hosts[0].lower() for origin in origins)
        if is_foreign or (headers.get("sec-fetch-site") in ("cross-site", "same-site") and method in CHANGING):
            raise Refused(403, "pages of other origins may not use this server")
        lengths, most = headers.getlist("content-length"), self._limits.max_body
        if any(not one.isascii() or not one.isdigit() for one in lengths) or len(set(lengths)) > 1:
            raise Refused(400, "content-length must be one whole number")
        if lengths and (len(lengths[0]) > 15 or int(lengths[0]) > most):
            raise too_large(most)
        kind, _, given = headers.get("authorization", "").partition(" ")
        scope["state"] = {
            **scope.get("state", {}),
            "is_known": self.knows(given.strip() if kind.lower() == "bearer" else ""),
        }
        path = scope["path"]
        if not scope["state"]["is_known"] and path not in (*OPEN, *BODY_TOKENS):
            raise unknown()

    def knows(self, given: str) -> bool:
        token = self._entrance.token
        return token is None or hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())

    def _bounded(self, receive: Any, most: int) -> Any:
        """The channel of a request, whose body is neither longer nor slower than allowed."""
        left, ends_at, is_whole = most, time.monotonic() + self._limits.max_seconds, False

        async def bounded() -> Any:
            nonlocal left, is_whole
            if is_whole:
                return await receive()
            with anyio.move_on_after(ends_at - time.monotonic()):
                message = await receive()
                left -= len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
                if left < 0:
                    raise too_large(most)
                return message
            raise Refused(408, f"the request came too slowly: it has {self._limits.max_seconds:g} seconds")

        return bounded


def host_name(host: str) -> str:
    """The name in a Host header, without its port.

    >>> host_name("Example.org:80"), host_name("[::1]:8000"), host_name("[::1]")
    ('example.org', '[::1]', '[::1]')
    """
    return (host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]).lower().rstrip(".")


def allowed_hosts(host: str, named: Iterable[str]) -> frozenset[str]:
    """The names of this machine by itself, the address that is listened on, and those that were named."""
    own = f"[{host}]" if ":" in host else host
    return frozenset({"localhost", "127.0.0.1", "[::1]", own.lower(), *(host_name(one) for one in named)})


def too_large(most: int) -> Refused:
    return Refused(413, f"a request has at most {most:,} bytes")


def unknown() -> Refused:
    return Refused(401, "send the token of this server: Authorization: Bearer TOKEN")


def refusal(error: Refused, *, openai: bool = False) -> JSONResponse:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    content = {"message": str(error), "type": kind, "code": None, "param": None} if openai else str(error)
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    headers |= {"www-authenticate": "Bearer"} if error.status == 401 else {}
    headers |= {"connection": "close"} if error.status in (408, 413) else {}
    return JSONResponse({"error": content}, status_code=error.status, headers=headers)


def refuse_open(host: str, token: str | None) -> None:
    """Refuse to listen on other than this machine's own address without a token."""
    try:
        is_own = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = host == "localhost"
    if not is_own and token is None:
        raise ArgumentError(f"host {host} lets others in: give a token_file with a secret")
