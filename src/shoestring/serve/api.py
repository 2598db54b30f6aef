"""The HTTP side: routes, keys, limits, streams. OpenAI's API over an `EngineLoop`.

A handler reads a body of bounded size, checks it (schema.py), turns it into an `Ask` on a worker thread
(asks.py), submits one job per text and tells what comes back (answers.py). A task per request waits for the
client to go away and cancels its jobs then, streaming or not.

`Gate` stands before every route: it asks for the key, gives the request an id, writes one log line, and makes
sure that what went wrong inside reaches the log and never the client.

Left out: TLS and rate limits per key, which belong to the proxy in front; tools; images.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoestring import __version__
from shoestring.model.tokenizer import Tokenizer
from shoestring.serve.answers import Answer, event, token_bytes
from shoestring.serve.asks import Ask, Limits, chat_ask, chat_text, check_ids, completion_ask
from shoestring.serve.grammar import Grammars
from shoestring.serve.loop import EngineLoop, Job, Mailbox
from shoestring.serve.schema import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    read_json,
    validated,
)

log = logging.getLogger("shoestring.serve")

WEB = Path(__file__).parent / "web"
PAGE_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
OPEN_PATHS = ("/", "/health", "/web/app.js", "/web/style.css")  # no key needed
KEEP_ALIVE_S = 15.0  # a stream that has nothing to say yet sends a comment this often
GONE = 499  # in the log alone, as other servers have it: the client left
DRAINED_BODIES = 8  # a body this many times too large is still read to its end, so that the 413 arrives
PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"


@dataclass(frozen=True)
class ApiSettings:
    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    deadline_s: float = 600.0
    allow_origins: tuple[str, ...] = ()


class Api:
    def __init__(self, loop: EngineLoop, tokenizer: Tokenizer, settings: ApiSettings) -> None:
        engine = loop.engine
        self.loop, self.tokenizer, self.settings = loop, tokenizer, settings
        vocab = engine.model.spec.vocab_size
        eos_ids = tuple(t for t in sorted(engine.eos_ids) if t < vocab)
        max_texts = loop.max_running + loop.max_queue
        self.limits = Limits(vocab, engine.max_context, max_texts, eos_ids, tokenizer.spelling())
        self.grammars = Grammars(tokenizer, vocab, eos_ids)
        self.created = int(time.time())
        self._token_bytes = token_bytes(tokenizer)
        self._watchers: set[asyncio.Task[None]] = set()

    def app(self) -> FastAPI:
        app = FastAPI(
            title="Shoestring", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
        )
        routes: list[tuple[str, str, Any]] = [
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/tokenizer_info", self.tokenizer_info),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.metrics),
            ("GET", "/stats", self.stats),
            ("GET", "/version", self.version),
            ("GET", "/", self.page),
            ("GET", "/web/{name}", self.page_part),
        ]
        for method, path, handler in routes:
            app.add_api_route(path, handler, methods=[method], response_model=None)
        app.add_exception_handler(ApiError, _tell)
        app.add_exception_handler(HTTPException, _tell_http)
        app.add_middleware(Gate, settings=self.settings)
        if self.settings.allow_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=list(self.settings.allow_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        return app

    # -- generation -----------------------------------------------------------------------------------------
    async def completions(self, request: Request) -> Response:
        body = CompletionBody.parse(await self._read(request))
        self._check_model(body.model)
        ask = await asyncio.to_thread(completion_ask, body, self.tokenizer, self.limits)
        return await self._answer(request, ask)

    async def chat_completions(self, request: Request) -> Response:
        body = ChatBody.parse(await self._read(request))
        self._check_model(body.model)
        ask = await asyncio.to_thread(chat_ask, body, self.tokenizer, self.limits, self.grammars)
        return await self._answer(request, ask)

    async def _answer(self, request: Request, ask: Ask) -> Response:
        answer = Answer(
            self.settings.model_name,
            self._token_bytes,
            ask.prompts,
            ask.echo,
            ask.n,
            ask.num_logprobs is not None,
            ask.chat,
            ask.include_usage,
            ask.mark_drafts,
        )
        mailbox = Mailbox()
        deadline = time.monotonic() + self.settings.deadline_s
        score = ask.num_logprobs if ask.echo is not None else None
        jobs = [
            Job(
                ask.prompts[i // ask.n],
                sampling,
                mailbox,
                i,
                deadline,
                score,
                ask.no_new_tokens,
            )
            for i, sampling in enumerate(ask.samplings)
        ]
        request.scope["shoestring"]["answer"] = answer
        self.loop.submit(jobs)
        self._watch(request, mailbox, jobs)
        if ask.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            events = self._events(answer, mailbox, jobs)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        try:
            while not answer.done:
                unread = await mailbox.take()
                if unread is None:
                    return Response(status_code=499)  # nobody reads this
                for index, delta in unread.items():
                    if delta.error is not None:
                        raise delta.error
                    answer.add(index, delta)
        finally:
            self.loop.cancel(jobs)
        return JSONResponse(answer.whole())

    async def _events(self, answer: Answer, mailbox: Mailbox, jobs: list[Job]) -> AsyncIterator[str]:
        try:
            while not answer.done:
                try:
                    unread = await asyncio.wait_for(mailbox.take(), KEEP_ALIVE_S)
                except TimeoutError:
                    yield ": waiting\n\n"
                    continue
                if unread is None:
                    return
                for index, delta in sorted(unread.items()):
                    if delta.error is not None:
                        yield event(delta.error.body())
                        yield "data: [DONE]\n\n"
                        return
                    answer.add(index, delta)
                    for chunk in answer.chunks(index, delta):
                        yield chunk
            for chunk in answer.last_chunks():
                yield chunk
        except Exception:
            log.exception("a stream broke")
            yield event(ApiError(500, "internal error; the server's log says more").body())
        finally:
            self.loop.cancel(jobs)

    def _watch(self, request: Request, mailbox: Mailbox, jobs: list[Job]) -> None:
        """Cancel the jobs when the client goes away. Ends by itself: a finished response counts as gone."""

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.loop.cancel(jobs)
            mailbox.close()

        task = asyncio.create_task(watch())
        self._watchers.add(task)  # the event loop itself holds tasks weakly
        task.add_done_callback(self._watchers.discard)

    # -- the rest -------------------------------------------------------------------------------------------
    async def tokenize(self, request: Request) -> Response:
        body = validated(TokenizeBody, await self._read(request))
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages")

        def encode() -> list[int]:
            if body.messages is not None:
                chat = ChatBody.parse({"messages": body.messages}).chat
                return self.tokenizer.encode(chat_text(chat, self.tokenizer), special=False)
            return self.tokenizer.encode(body.prompt, special=body.add_special_tokens)

        ids = await asyncio.to_thread(encode)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.limits.max_context})

    async def detokenize(self, request: Request) -> Response:
        body = validated(DetokenizeBody, await self._read(request))
        self._check_model(body.model)
        check_ids(body.tokens, self.limits, "tokens")
        text = await asyncio.to_thread(self.tokenizer.decode, body.tokens, body.skip_special_tokens)
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self) -> Response:
        """What a client needs beside /tokenize to do without the tokenizer's files (lm-eval, as from vLLM)."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        told = {name: self.tokenizer.special.get(name) for name in names}
        return JSONResponse({**told, "chat_template": self.tokenizer.chat_template})

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.settings.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "shoestring",
            "max_model_len": self.limits.max_context,
        }

    async def health(self) -> Response:
        if not self.loop.alive:
            return JSONResponse({"status": "dead"}, 503)
        if self.loop.closed is not None:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        return Response(self.loop.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stats(self) -> Response:
        state = self.loop.state
        busy = self.loop.num_open > 0
        return JSONResponse(
            {
                "model": self.settings.model_name,
                "drafter": self.loop.engine.drafter is not None,
                "chat": self.tokenizer.chat_template is not None,
                "max_context": self.limits.max_context,
                "max_running": self.loop.max_running,
                "max_queue": self.loop.max_queue,
                "num_running": state.num_running,
                "num_waiting": state.num_waiting,
                "kv_usage": state.kv_usage,
                "tokens_per_s": round(state.tokens_per_s, 1) if busy else 0.0,
                "num_prompt_tokens": state.num_prompt_tokens,
                "num_new_tokens": state.num_new_tokens,
                "num_drafted": state.num_drafted,
                "num_accepted": state.num_accepted,
            }
        )

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def page(self) -> Response:
        return _file("index.html", {"Content-Security-Policy": PAGE_POLICY})

    async def page_part(self, name: str) -> Response:
        if f"/web/{name}" not in OPEN_PATHS:
            raise ApiError(404, "there is no such page")
        return _file(name, {})

    # -- reading --------------------------------------------------------------------------------------------
    async def _read(self, request: Request) -> dict[str, Any]:
        """The JSON object in the body, of bounded size."""
        # A page of another site may post plain text without asking the browser's permission first; JSON not.
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "send the body as JSON, with the header Content-Type: application/json")
        limit = self.settings.max_body_bytes
        parts: list[bytes] = []
        told = request.headers.get("content-length", "")
        size = int(told) if told.isdecimal() and len(told) < 19 else 0
        if size <= DRAINED_BODIES * limit:
            size = 0
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                elif size > DRAINED_BODIES * limit:
                    break
        if size > limit:
            raise ApiError(
                413,
                f"the request body is larger than the {limit} bytes that this server takes",
                code="too_large",
            )
        body = b"".join(parts)
        # Checking a large body takes a while, too.
        return read_json(body) if len(body) < 65536 else await asyncio.to_thread(read_json, body)

    def _check_model(self, name: str | None) -> None:
        served = self.settings.model_name
        if name is not None and name != served:
            raise ApiError(
                404,
                f"there is no model {name[:100]!r} here; this server has {served!r}",
                param="model",
                code="model_not_found",
            )


class Gate:
    """Key, request id, log line and last resort of every request."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self.app = app
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = (
            given.decode("latin-1") if 0 < len(given) <= 64 and given.isalnum() else secrets.token_hex(8)
        )
        note: dict[str, Any] = {}
        scope["shoestring"] = note
        status = 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if not self._allowed(scope["path"], headers.get(b"authorization", b"")):
                error = ApiError(
                    401,
                    "wrong or missing API key; send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await _tell(None, error)(scope, receive, tell)
            else:
                await self.app(scope, receive, tell)
        except ClientDisconnect:  # before all of its body was here: nobody is left to answer
            status = status or GONE
        except Exception:
            log.exception("request %s failed", request_id)
            if status == 0:
                failed = ApiError(500, f"internal error; the server's log says more (request {request_id})")
                await _tell(None, failed)(scope, receive, tell)
        finally:
            _log_line(scope, request_id, status, time.monotonic() - began, note.get("answer"))

    def _allowed(self, path: str, authorization: bytes) -> bool:
        if not self._keys or path in OPEN_PATHS:
            return True
        kind, _, key = authorization.partition(b" ")
        # Every key is compared, in constant time: how long this takes tells nothing about any of them.
        matches = [secrets.compare_digest(key.strip(), known) for known in self._keys]
        return kind.lower() == b"bearer" and any(matches)


def _log_line(scope: Scope, request_id: str, status: int, seconds: float, answer: Answer | None) -> None:
    """One line per request: what was asked and how it went, never what it said."""
    text = f"{request_id} {scope['method']} {scope['path'][:80]!r} {status} {seconds:.3f}s"
    if answer is not None:
        reasons = ",".join(sorted({c.finish_reason or "cut" for c in answer.choices}))
        text += f" prompt={sum(len(p) for p in answer.prompts)} new={answer.num_new} finish={reasons}"
    level = logging.DEBUG if scope["path"] in ("/health", "/metrics", "/stats") else logging.INFO
    log.log(level, "%s", text)


def _file(name: str, headers: dict[str, str]) -> Response:
    """A part of the page, always whole: a file response would answer odd ranges in a form of its own."""
    kind = PAGE_KINDS[Path(name).suffix]
    return Response(
        (WEB / name).read_bytes(), media_type=kind, headers={**headers, "X-Content-Type-Options": "nosniff"}
    )


def _tell(_request: Request | None, error: Any) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, headers=error.headers)


def _tell_http(request: Request, error: Any) -> Response:
    """Starlette's own errors (no such route, wrong method) in OpenAI's form."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    allowed = next((v for k, v in (error.headers or {}).items() if k.lower() == "allow"), "another one")
    message = {
        404: f"there is no such path: {path}; docs/server.md lists them, /v1/completions is one",
        405: f"{path} does not take {request.method[:20]}; it takes {allowed}",
    }.get(error.status_code, str(error.detail))
    return _tell(None, ApiError(error.status_code, message, headers=dict(error.headers or {})))
