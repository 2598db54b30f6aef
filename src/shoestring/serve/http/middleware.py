"""What happens to every request around its handler.

`RequestMiddleware` checks the Host header and the API key, gives the request an id and writes one log line. An internal
error goes to the log, never to the client. It calls the handlers of POST itself; other requests, and paths that nobody
knows, go through FastAPI.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoestring.serve.http.connection import Exchange
from shoestring.serve.http.request_schema import ApiError
from shoestring.serve.http.responses import CompletionResponse

log = logging.getLogger("shoestring.serve")

OPEN_PATHS = ("/", "/health", "/web/app.js", "/web/markdown.js", "/web/style.css")  # no key needed
ADMIN_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # their handlers ask for a key of their own
CLIENT_LEFT = 499  # nginx's code; only in the log
MAX_HOST = 255  # characters of a name that is remembered


@dataclass(slots=True)
class RequestNote:
    """What is known of a request beside its ASGI scope, where it is kept under "shoestring"."""

    id: str
    client: str  # whose turn it takes where clients wait for each other
    headers: dict[bytes, bytes]
    exchange: Exchange
    send: Send  # for parts of a stream, which no middleware looks at
    arrived: float = 0.0  # its whole body
    response: CompletionResponse | None = None


def note_of(request: Request) -> RequestNote:
    note = request.scope["shoestring"]
    assert isinstance(note, RequestNote)
    return note


Handler = Callable[[Request], Awaitable[ASGIApp]]


class RequestMiddleware:
    """For every request: API key, request id, log line, and the answer to an internal error.

    `handlers` are those of POST by path; all other requests go to `app`.
    """

    def __init__(
        self, app: ASGIApp, handlers: dict[str, Handler], api_keys: Sequence[str], hosts: tuple[str, ...] | None
    ) -> None:
        """`hosts`: names that clients may call the server by, beside addresses and localhost; asked without a key."""
        self.app, self._handlers = app, handlers
        self._keys = [key.encode() for key in api_keys]
        self._hosts = None if self._keys else hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode("latin-1") if 0 < len(given) <= 64 and given.isalnum() else secrets.token_hex(8)
        # Whose turn the request takes where clients wait for each other.
        key = hashlib.blake2b(headers.get(b"authorization", b""), digest_size=8).hexdigest() if self._keys else ""
        client = f"{key} {network_of(scope['client'][0]) if scope.get('client') else ''}"
        note = scope["shoestring"] = RequestNote(request_id, client, headers, scope["exchange"], send)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            host = headers.get(b"host", b"").decode("latin-1")
            if self._hosts is not None and not is_known_host(host, self._hosts):
                error = ApiError(
                    403,
                    f"this server does not go by the name {host[:100]!r}; "
                    "start it with --allow-host NAME, or with --api-key, which makes names irrelevant",
                    code="host_not_allowed",
                )
                await error_response(None, error)(scope, receive, send_with_id)
            elif not self._allowed(scope["path"], headers.get(b"authorization", b"")):
                error = ApiError(
                    401,
                    "wrong or missing API key; send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error_response(None, error)(scope, receive, send_with_id)
            elif scope["method"] == "POST" and (handler := self._handlers.get(scope["path"])) is not None:
                try:
                    response = await handler(Request(scope, receive, send))
                except ApiError as error:
                    response = error_response(None, error)
                await response(scope, receive, send_with_id)
            else:
                await self.app(scope, receive, send_with_id)
        except ClientDisconnect:  # before its whole body arrived
            status = status or CLIENT_LEFT
        except Exception:
            log.exception("request %s failed", request_id)
            if status == 0:
                await _internal_error(request_id)(scope, receive, send_with_id)
        finally:
            _log_line(scope, request_id, status, time.monotonic() - began, note.response)

    def _allowed(self, path: str, authorization: bytes) -> bool:
        if not self._keys or path in OPEN_PATHS or (path in ADMIN_PATHS and path in self._handlers):
            return True
        return has_key(authorization, self._keys)


def has_key(authorization: bytes, keys: Sequence[bytes]) -> bool:
    """Whether a header carries one of them."""
    kind, _, key = authorization.partition(b" ")
    # Every key is compared, in constant time, so that the time tells nothing about them.
    matches = [secrets.compare_digest(key.strip(), known) for known in keys]
    return kind.lower() == b"bearer" and any(matches)


@lru_cache(maxsize=1024)
def network_of(address: str) -> str:
    """The address of a client; of IPv6 its /64, because one client has all of that."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # of a proxy's header
        return address[:64]
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def is_known_host(header: str, names: tuple[str, ...]) -> bool:
    """Whether a Host header is an address, localhost or one of these names.

    A page of another site can have its own name resolve to this machine (DNS rebinding) and then read answers as its
    own. Its requests carry that name. An address cannot be rebound, and only a browser sends a Host against its user's
    will, so a request without one is let in.
    """
    return (_is_known if len(header) <= MAX_HOST else _is_known.__wrapped__)(header, names)


@lru_cache(maxsize=1024)
def _is_known(header: str, names: tuple[str, ...]) -> bool:
    name = header.rsplit(":", 1)[0] if header.rpartition(":")[2].isdecimal() else header
    name = name.lower().rstrip(".")
    if not name or "*" in names or name in names or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _log_line(scope: Scope, request_id: str, status: int, seconds: float, response: CompletionResponse | None) -> None:
    """One line per request: sizes, status and time, never its text."""
    text = f"{request_id} {scope['method']} {scope['path'][:80]!r} {status} {seconds:.3f}s"
    if response is not None:
        reasons = ",".join(sorted({c.finish_reason or "cut" for c in response.choices}))
        text += f" prompt={sum(len(p) for p in response.prompts)} new={response.num_new} finish={reasons}"
    level = logging.DEBUG if scope["path"] in ("/health", "/metrics", "/stats") else logging.INFO
    log.log(level, "%s", text)


def error_response(_request: Request | None, error: Any) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, headers=error.headers)


def _internal_error(request_id: str) -> Response:
    message = f"internal error; the server's log says more (request {request_id})"
    return error_response(None, ApiError(500, message))


async def internal_error_response(request: Request, _error: Any) -> Response:
    """Starlette raises the error again afterwards, and `RequestMiddleware` logs it."""
    return _internal_error(note_of(request).id)


def no_such_path(path: str) -> str:
    return f"there is no such path: {path[:100]}; docs/guides/serve.md lists them, /v1/completions is one"


def http_error_response(request: Request, error: Any) -> Response:
    """Starlette's own errors (no such route, wrong method) in OpenAI's form."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    allowed = next((v for k, v in (error.headers or {}).items() if k.lower() == "allow"), "another one")
    message = {404: no_such_path(path), 405: f"{path} does not take {request.method[:20]}; it takes {allowed}"}.get(
        error.status_code, str(error.detail)
    )
    return error_response(None, ApiError(error.status_code, message, headers=dict(error.headers or {})))
