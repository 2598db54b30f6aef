"""The HTTP side: routes, keys, limits, streams. OpenAI's API over an `EngineClient`.

A handler reads a body of bounded size in bounded time. Worker threads (request_workers.py) validate it
(request_schema.py) and turn it into a `ParsedRequest` (request_parsing.py). The handler submits one `PendingChoice` per
text (engine_client.py) and writes the deltas that come back in OpenAI's form (responses.py). Its choices are cancelled
when the client disconnects (`_Watch`).

`RequestMiddleware` (middleware.py) runs before every route.

Nothing on the event loop may take more than some milliseconds: all streams wait for it.

Left out: TLS and rate limits per key, which belong to the proxy in front; images.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoestring import __version__
from shoestring.errors import UserError
from shoestring.json_files import check_path
from shoestring.model.tokenizer import Tokenizer
from shoestring.serve.engine.embedding import Pooling
from shoestring.serve.engine.logit_rules import SamplingWithRules
from shoestring.serve.http.connection import Exchange
from shoestring.serve.http.engine_client import EngineClient, OutputCollector
from shoestring.serve.http.engine_messages import ChoiceDelta, EmbeddingJob, PendingChoice, deadline_error
from shoestring.serve.http.grammar import GrammarCache
from shoestring.serve.http.middleware import (
    ADMIN_PATHS,
    CLIENT_LEFT,
    OPEN_PATHS,
    Handler,
    RequestMiddleware,
    RequestNote,
    error_response,
    has_key,
    http_error_response,
    internal_error_response,
    no_such_path,
    note_of,
)
from shoestring.serve.http.request_parsing import (
    Limits,
    ParsedRequest,
    detokenize,
    grammar_of,
    parse_chat,
    parse_completion,
    parse_embedding,
    tokenize,
    tools_of,
)
from shoestring.serve.http.request_schema import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
    read_json,
    validated,
    without_effect,
)
from shoestring.serve.http.request_workers import LIGHT_BYTES, MAX_JOBS, RETRY_S, Lane, RequestWorkers, as_exception
from shoestring.serve.http.responses import CompletionResponse, embedding_response, written
from shoestring.serve.http.responses_api import ResponseObject, ResponsesBody
from shoestring.serve.http.tool_calls import detect_format, format_named

T = TypeVar("T")
log = logging.getLogger("shoestring.serve")

WEB = Path(__file__).parent / "web"
PAGE_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
SILENT_S = 5.0  # an engine that was not heard of for longer is not healthy
KEEP_ALIVE_S = 15.0  # an idle stream sends a comment at least this often
HEADER_S = 0.05  # a stream's header waits for its first event, so that both are one write, but no longer than this
LATE_S = 2.0  # the engine ends requests at their deadline, between two steps; this much later the event loop does
DRAINED_BODIES = 8  # a body this many times too large is still read to its end, so that the 413 arrives
MAX_BODIES_BYTES = 256 << 20  # of all bodies that are being read or wait; where one may be larger, two of them
READ_INLINE = 2048  # bytes of a body: fractions of a millisecond
RENDERED_INLINE = 4096  # tokens and log-probabilities; more are written on a worker thread
EVENT_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"  # these three have no default
)


@dataclass(frozen=True)
class ApiSettings:
    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    deadline_s: float = 600.0
    allow_origins: tuple[str, ...] = ()
    # Names that clients may call the server by, beside addresses and localhost; checked while there is no key.
    hosts: tuple[str, ...] | None = None
    body_timeout_s: float = 60.0  # to send a body in
    max_wait_s: float = 30.0  # for a worker thread
    tool_format: str = "auto"  # how the model writes tool calls; auto: what its chat template says
    pooling: Pooling = "mean"  # of embeddings
    admin_key: str | None = None
    adapter_folder: Path | None = None  # from below which adapters are loaded


class Api:
    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, grammars: GrammarCache, settings: ApiSettings
    ) -> None:
        facts = engine.facts
        self.engine, self.tokenizer, self.grammars, self.settings = engine, tokenizer, grammars, settings
        sizes = facts.vocab_size, facts.max_context, engine.max_texts
        self.limits = Limits(*sizes, facts.eos_ids, tokenizer.spelling(), causal=facts.writes)
        template = tokenizer.tool_template
        self.tool_format = None
        if template is not None:
            wanted = settings.tool_format
            self.tool_format = detect_format(template) if wanted == "auto" else format_named(wanted, template)
        self.created = int(time.time())
        self._token_bytes = tokenizer.token_bytes
        # One client may hold a quarter of it: as many requests as it may have texts.
        max_jobs = max(MAX_JOBS, 4 * engine.max_texts)
        self.workers = RequestWorkers(min(settings.max_wait_s, settings.deadline_s), max_jobs)
        self.bodies_bytes = 0  # that are being read or wait

    def app(self) -> ASGIApp:
        app = RequestMiddleware(self.routes(), self._post_routes, self.settings.api_keys, self.settings.hosts)
        if not self.settings.allow_origins:
            return app
        return CORSMiddleware(
            app,
            allow_origins=list(self.settings.allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )

    @property
    def _post_routes(self) -> dict[str, Handler]:
        admin = self.load_adapter, self.unload_adapter
        return {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat_completions,
            "/v1/responses": self.responses,
            "/v1/embeddings": self.embeddings,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            **({} if self.settings.admin_key is None else dict(zip(ADMIN_PATHS, admin, strict=True))),
        }

    def routes(self) -> FastAPI:
        """All of them; those of POST for the answers to other methods, and for the reference pages."""
        app = FastAPI(title="Shoestring", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
        routes: list[tuple[str, str, Any]] = [
            *(("POST", path, handler) for path, handler in self._post_routes.items()),
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
            if method == "POST":  # they read their bodies themselves: nothing here needs FastAPI's own route
                app.add_route(path, handler, methods=[method])
            else:
                app.add_api_route(path, handler, methods=[method], response_model=None)
        app.add_exception_handler(ApiError, error_response)
        app.add_exception_handler(HTTPException, http_error_response)
        app.add_exception_handler(Exception, internal_error_response)  # else Starlette answers, in plain text
        return app

    # -- generation -----------------------------------------------------------------------------------------
    async def completions(self, request: Request) -> ASGIApp:
        """Continue one or several prompts."""
        self._check_writes()
        async with _Body(self, request) as content:
            body = await self._read(request, len(content), lambda: CompletionBody.parse(read_json(content)))
            adapter = self._check_model(body.model)
            parsed = await self._read(
                request, len(content), lambda: parse_completion(body, self.tokenizer, self.limits)
            )
        return await self._respond(request, parsed, adapter)

    async def chat_completions(self, request: Request) -> ASGIApp:
        """Answer a chat; the model needs a chat template."""
        self._check_writes()
        async with _Body(self, request) as content:
            body = await self._read(request, len(content), lambda: ChatBody.parse(read_json(content)))
            adapter = self._check_model(body.model)
            parsed = await self._parse_chat(request, len(content), body)
        return await self._respond(request, parsed, adapter)

    async def responses(self, request: Request) -> ASGIApp:
        """Answer a chat in the form of OpenAI's Responses API; nothing is stored."""
        self._check_writes()

        def read() -> tuple[ResponsesBody, ChatBody]:
            body = ResponsesBody.parse(read_json(content))
            return body, body.as_chat()

        async with _Body(self, request) as content:
            body, chat = await self._read(request, len(content), read)
            adapter = self._check_model(chat.model)
            parsed = await self._parse_chat(request, len(content), chat)
        return await self._respond(request, parsed, adapter, body)

    async def _parse_chat(self, request: Request, size: int, body: ChatBody) -> ParsedRequest:
        tools = tools_of(body, self.tokenizer, self.tool_format)
        source = grammar_of(body, tools, self.tokenizer)
        return await self._work(
            request,
            size,
            lambda: parse_chat(body, self.tokenizer, self.limits, self.grammars, tools, source),
            "grammar" if self.grammars.must_compile(source) else None,
        )

    async def embeddings(self, request: Request) -> Response:
        """Vectors of texts."""
        async with _Body(self, request) as content:
            body = await self._work(request, len(content), lambda: validated(EmbeddingBody, read_json(content)))
            if self._check_model(body.model) is not None:
                raise ApiError(400, "embeddings are computed without adapters; give the model's name", param="model")
            asked = (self.tokenizer, self.limits, self.settings.pooling, self.engine.facts.d_model)
            parsed = await self._work(request, len(content), lambda: parse_embedding(body, *asked))
        collector, note = OutputCollector(), note_of(request)
        choice = PendingChoice(
            *([], SamplingWithRules(), time.monotonic() + self.settings.deadline_s),
            embedding=EmbeddingJob(parsed.texts, parsed.pooling),
            client=note.client,
            arrived=note.arrived,
        )
        self.engine.submit([choice], collector)
        with _Watch(self.engine, note.exchange, collector, [choice]):
            unread = await collector.take()
        if unread is None:
            return Response(status_code=CLIENT_LEFT)  # never sent
        if (error := unread[0].error) is not None:
            raise error
        vectors = unread[0].vectors_ND
        assert vectors is not None
        shape = (choice.num_prompt, parsed.dimensions, parsed.as_base64)
        answer = await self._work(
            request,
            vectors.numel(),
            lambda: written(embedding_response(self.settings.model_name, vectors, *shape)).encode(),
            "render",
        )
        headers = without_effect(["user"] * (body.user is not None))
        return Response(answer, media_type="application/json", headers=headers)

    async def _respond(
        self, request: Request, parsed: ParsedRequest, adapter: str | None, body: ResponsesBody | None = None
    ) -> ASGIApp:
        """`body`: the answer is a response object, not a completion."""
        collected = CompletionResponse(
            adapter or self.settings.model_name,
            self.tokenizer,
            parsed.prompts,
            parsed.echo,
            parsed.n,
            parsed.num_logprobs is not None,
            parsed.chat,
            parsed.include_usage,
            parsed.mark_drafts,
            parsed.tools,
        )
        response = collected if body is None else ResponseObject(collected, body)
        headers = parsed.headers
        collector, note = OutputCollector(), note_of(request)
        deadline = time.monotonic() + self.settings.deadline_s
        score = parsed.num_logprobs if parsed.echo is not None else None
        choices = [
            PendingChoice(
                *(parsed.prompts[i // parsed.n], sampling, deadline, score, parsed.no_new_tokens),
                adapter=adapter,
                client=note.client,
                arrived=note.arrived,
            )
            for i, sampling in enumerate(parsed.samplings)
        ]
        note.response = collected
        self.engine.submit(choices, collector)
        watch = _Watch(self.engine, note.exchange, collector, choices, reminds=parsed.stream)
        if parsed.stream:
            told = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            return partial(self._stream, request, response, collector, watch, [*EVENT_HEADERS, *told])
        with watch:
            while not response.done:
                unread = await collector.take()
                if unread is None:
                    return Response(status_code=CLIENT_LEFT)  # never sent
                for index, delta in unread.items():
                    if delta.error is not None:
                        raise delta.error
                    response.add(index, delta)
        if response.size <= RENDERED_INLINE:
            return JSONResponse(response.whole(), headers=headers)
        text = await self._work(request, response.size, lambda: written(response.whole()).encode(), "render")
        return Response(text, media_type="application/json", headers=headers)

    async def _stream(
        self,
        request: Request,
        response: CompletionResponse | ResponseObject,
        collector: OutputCollector,
        watch: _Watch,
        headers: list[tuple[bytes, bytes]],
        _scope: Scope,
        _receive: Receive,
        send: Send,
    ) -> None:
        """Only the header goes through the middleware, parts straight to the connection.

        Its request was admitted, so what fails from here on is an event of the stream, not a status."""
        write = note_of(request).send

        def part(chunks: Sequence[str], *, more: bool = True) -> Message:
            return {"type": "http.response.body", "body": "".join(chunks).encode(), "more_body": more}

        with watch:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                if first := response.first_chunks():
                    await write(part(first))
                begun = bool(first)  # the header is on its way: the connection writes it with the first part
                while not response.done:
                    unread = await collector.take()
                    if unread is None:
                        return
                    chunks: list[str] = []
                    for index, delta in sorted(unread.items()):
                        response.add(index, delta)
                        if delta.size > RENDERED_INLINE:
                            write_chunks = partial(response.chunks, index, delta)
                            chunks += await self._work(request, delta.size, write_chunks, "render")
                        elif delta.error is None or delta.token_ids:  # an error may come with the last tokens
                            chunks += response.chunks(index, delta)
                        if delta.error is not None:
                            await write(part([*chunks, *response.error_chunks(delta.error)], more=False))
                            return
                    watch.silent = False
                    if response.done:  # with the last text: one write less
                        await write(part([*chunks, *response.last_chunks()], more=False))
                    elif chunks or not unread:
                        await write(part(chunks or ([": waiting\n\n"] if begun else [])))
                        begun = True
            except ClientDisconnect:  # while a worker thread wrote events
                return
            except ApiError as told:  # e.g. the worker threads have too much to do
                await write(part(response.error_chunks(told), more=False))
            except Exception:
                log.exception("a stream broke")
                error = ApiError(500, "internal error; the server's log says more")
                await write(part(response.error_chunks(error)[:1], more=False))

    # -- other routes --------------------------------------------------------------------------------------
    async def tokenize(self, request: Request) -> Response:
        """The token ids of a prompt or a chat."""

        def encode(body: TokenizeBody) -> bytes:
            ids = tokenize(body, self.tokenizer)
            answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": self.limits.max_context}
            if body.return_token_strs:  # bytes of a character that others complete become replacement characters
                answer["token_strs"] = [self._token_bytes(i).decode("utf-8", "replace") for i in ids]
            return written(answer).encode()

        async with _Body(self, request) as content:
            body = await self._work(request, len(content), lambda: validated(TokenizeBody, read_json(content)))
            self._check_model(body.model)
            lane: Lane | None = None if len(content) <= LIGHT_BYTES else "tokens"
            answer = await self._work(request, len(content), lambda: encode(body), lane)
        return Response(answer, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        async with _Body(self, request) as content:
            body = await self._work(request, len(content), lambda: validated(DetokenizeBody, read_json(content)))
            self._check_model(body.model)
            lane: Lane | None = None if len(content) <= LIGHT_BYTES else "tokens"
            work = partial(detokenize, body, self.tokenizer, self.limits)
            text = await self._work(request, len(content), work, lane)
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self) -> Response:
        """What a client needs beside /tokenize to do without the tokenizer's files (lm-eval, as from vLLM)."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: self.tokenizer.special.get(name) for name in names}
        return JSONResponse({**special, "chat_template": self.tokenizer.chat_template})

    async def models(self) -> Response:
        """The served model, with its context as `max_model_len`, and its adapters."""
        names = (None, *self.engine.snapshot.adapters)
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in names]})

    async def model(self, name: str) -> Response:
        """The same by its name."""
        return JSONResponse(self._model_card(self._check_model(name, exact=True)))

    def _model_card(self, adapter: str | None) -> dict[str, Any]:
        version = self.engine.snapshot.version
        weights = {} if version is None else {"weights": {"version": str(version), **asdict(version)}}
        return {
            "id": adapter or self.settings.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "shoestring",
            "max_model_len": self.limits.max_context,
            **({} if adapter is None else {"parent": self.settings.model_name}),
            **weights,
        }

    async def load_adapter(self, request: Request) -> Response:
        """Serve one more adapter, from below the server's adapter folder; needs the admin key."""
        body = await self._admin_body(request, LoadAdapterBody)
        if body.lora_name == self.settings.model_name:
            raise ApiError(400, f"{body.lora_name!r} is the name of the model itself; give another", param="lora_name")
        assert self.settings.adapter_folder is not None
        place = place_below(self.settings.adapter_folder, body.lora_path)
        await asyncio.to_thread(self.engine.port.change_adapter, body.lora_name, str(place))
        return Response(f"Success: LoRA adapter {body.lora_name!r} added successfully.", media_type="text/plain")

    async def unload_adapter(self, request: Request) -> Response:
        """Serve an adapter no more; texts that have begun are finished with it. Needs the admin key."""
        body = await self._admin_body(request, UnloadAdapterBody)
        await asyncio.to_thread(self.engine.port.change_adapter, body.lora_name, "")
        return Response(f"Success: LoRA adapter {body.lora_name!r} removed successfully.", media_type="text/plain")

    async def _admin_body(self, request: Request, kind: type[BaseModel]) -> Any:
        """As if the path did not exist for those without the key."""
        given = note_of(request).headers.get(b"authorization", b"")
        if not has_key(given, [(self.settings.admin_key or "").encode()]):
            raise ApiError(404, no_such_path(request.url.path))
        async with _Body(self, request) as content:
            return await self._work(request, len(content), lambda: validated(kind, read_json(content)))

    async def health(self) -> Response:
        """200 while requests are answered; 503 while draining, or when the engine has died, is stuck or stopped."""
        if not self.engine.alive:
            return JSONResponse({"status": "dead"}, 503)
        if (closed := self.engine.closed) is not None:
            return JSONResponse({"status": closed.code or "closed", "reason": str(closed)}, 503)
        if (seconds := self.engine.port.seconds_silent) > SILENT_S:
            return JSONResponse({"status": "silent", "reason": f"nothing of the engine for {seconds:.0f} s"}, 503)
        if (seconds := self.engine.port.seconds_in_step) > self.settings.deadline_s:
            return JSONResponse({"status": "stuck", "reason": f"a step takes {seconds:.0f} s already"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        text = await self.workers.run("render", note_of(request).client, 0, self.engine.port.metrics_text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stats(self) -> Response:
        """The state that the playground shows, as JSON."""
        snapshot, facts = self.engine.snapshot, self.engine.facts
        busy = self.engine.num_open > 0
        return JSONResponse(
            {
                "model": self.settings.model_name,
                "drafter": snapshot.drafts,
                "chat": self.tokenizer.chat_template is not None,
                "max_context": self.limits.max_context,
                "max_running": facts.max_running,
                "max_queue": facts.max_queue,
                "num_running": snapshot.num_running,
                "num_waiting": snapshot.num_waiting,
                "kv_usage": snapshot.kv_usage,
                "tokens_per_s": round(snapshot.tokens_per_s, 1) if busy else 0.0,
                "num_prompt_tokens": snapshot.num_prompt_tokens,
                "num_new_tokens": snapshot.num_new_tokens,
                "num_drafted": snapshot.num_drafted,
                "num_accepted": snapshot.num_accepted,
            }
        )

    async def version(self) -> Response:
        """The version of Shoestring."""
        return JSONResponse({"version": __version__})

    async def page(self) -> Response:
        """The playground. It is told whether a key is needed, so that it makes no call that must fail."""
        page = _file("index.html", {"Content-Security-Policy": PAGE_POLICY})
        if self.settings.api_keys:
            page.body = bytes(page.body).replace(b"<html ", b'<html data-key="required" ', 1)
            page.headers["content-length"] = str(len(page.body))
        return page

    async def page_part(self, name: str) -> Response:
        """The playground's script and style."""
        if f"/web/{name}" not in OPEN_PATHS:
            raise ApiError(404, "there is no such page")
        return _file(name, {})

    # -- reading --------------------------------------------------------------------------------------------
    async def _read(self, request: Request, size: int, work: Callable[[], T]) -> T:
        """`work()` on a worker thread, or here where it is so small that a thread costs more."""
        if size > READ_INLINE:
            return await self._work(request, size, work)
        try:
            return work()
        except Exception:
            raise
        except BaseException as raised:
            raise as_exception(raised) from raised

    async def _work(self, request: Request, size: int, work: Callable[[], T], lane: Lane | None = None) -> T:
        """`work()` on a worker thread; `size` is what it is about, in bytes. Not begun if the client leaves."""
        lane = lane or ("light" if size <= LIGHT_BYTES else "heavy")
        note = note_of(request)
        job = asyncio.ensure_future(self.workers.run(lane, note.client, size, work))
        futures: list[asyncio.Future[Any]] = [job, note.exchange.gone]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            job.cancel()
            raise ClientDisconnect
        return job.result()

    def _check_writes(self) -> None:
        if not self.engine.facts.writes:
            raise ApiError(400, "this model is an encoder: it computes embeddings (/v1/embeddings) and writes no text")

    def _check_model(self, name: str | None, exact: bool = False) -> str | None:
        """The adapter of this name; None: the model itself. Without keys and adapters the server is its user's own, and
        any name means the one model: clients insist on theirs."""
        served, adapters = self.settings.model_name, self.engine.snapshot.adapters
        if name is None or name == served:
            return None
        strict = exact or self.settings.api_keys or adapters or self.settings.admin_key is not None
        if strict and name not in adapters:
            known = ", ".join(map(repr, [served, *adapters][:20]))
            raise ApiError(
                404,
                f"there is no model {name[:100]!r} here; this server has {known}",
                param="model",
                code="model_not_found",
            )
        return name if name in adapters else None


class _Body:
    """The body of a request, which must say that it is JSON. Counts among the bodies in memory until it is parsed."""

    def __init__(self, api: Api, request: Request) -> None:
        self._api, self._request, self._size = api, request, 0

    async def __aenter__(self) -> bytes:
        note, seconds = note_of(self._request), self._api.settings.body_timeout_s
        # A page of another site may post plain text without a CORS preflight, but not JSON.
        kind = note.headers.get(b"content-type", b"")
        if kind != b"application/json" and kind.split(b";")[0].strip().lower() != b"application/json":
            raise ApiError(415, "send the body as JSON, with the header Content-Type: application/json")
        try:
            if note.exchange.more_body:
                async with asyncio.timeout(seconds):
                    content = await self._receive(note)
            else:  # it has come already, as most do
                content = await self._receive(note)
        except BaseException as error:
            self._api.bodies_bytes -= self._size
            if isinstance(error, TimeoutError):
                raise ApiError(
                    408,
                    f"the request body did not arrive within {seconds:.0f} seconds",
                    code="body_timeout",
                    headers={"Connection": "close"},
                ) from None
            raise
        note.arrived = time.monotonic()  # latencies count from here
        return content

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._api.bodies_bytes -= self._size

    async def _receive(self, note: RequestNote) -> bytes:
        """A body that is not too large."""
        limit = self._api.settings.max_body_bytes
        declared = note.headers.get(b"content-length", b"")
        size = int(declared) if declared.isdigit() and len(declared) < 19 else 0
        parts: list[bytes] = []
        if size <= DRAINED_BODIES * limit:
            size, more = 0, True
            while more and size <= DRAINED_BODIES * limit:
                message = await note.exchange.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part, more = message["body"], message["more_body"]
                size += len(part)
                if size <= limit:
                    self._keep(part)
                    parts.append(part)
        if size > limit:
            raise ApiError(
                413, f"the request body is larger than the {limit} bytes that this server takes", code="too_large"
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _keep(self, part: bytes) -> None:
        api = self._api
        if part and api.bodies_bytes + len(part) > max(MAX_BODIES_BYTES, 2 * api.settings.max_body_bytes):
            raise ApiError(
                503,
                "the server is reading too many large requests at once; try again later",
                code="overloaded",
                headers={"Retry-After": str(RETRY_S), "Connection": "close"},
            )
        self._size += len(part)
        api.bodies_bytes += len(part)


class _Watch:
    """Cancels choices when their client disconnects, and at the end where some are left. `reminds` a stream to
    say something. An engine that is stuck in a step does not keep the deadline; then it is kept here.

    One timer does both: a time-out per event costs more than an event.
    """

    def __init__(
        self,
        engine: EngineClient,
        exchange: Exchange,
        collector: OutputCollector,
        choices: list[PendingChoice],
        *,
        reminds: bool = False,
    ) -> None:
        self._engine, self._gone, self._collector, self._choices = engine, exchange.gone, collector, choices
        self._reminds = reminds
        self.silent = True  # nothing was written since the timer was set
        self._late_at = choices[0].deadline + LATE_S
        self._gone.add_done_callback(self._leave)
        self._set_timer(HEADER_S)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._gone.remove_done_callback(self._leave)
        self._engine.cancel(self._choices)

    def _leave(self, _gone: asyncio.Future[None]) -> None:
        self._engine.cancel(self._choices)
        self._collector.close()

    def _set_timer(self, remind_s: float = math.inf) -> None:
        wait = self._late_at - time.monotonic()
        wait = min(wait, remind_s, KEEP_ALIVE_S / 2) if self._reminds else wait
        self._timer = asyncio.get_running_loop().call_later(wait, self._look)

    def _look(self) -> None:
        if not self._reminds or time.monotonic() >= self._late_at:
            for index, choice in enumerate(self._choices):
                self._collector.put(index, ChoiceDelta(error=deadline_error(choice)))
            return
        if self.silent:
            self._collector.remind()
        self.silent = True
        self._set_timer()


def place_below(folder: Path, given: str) -> Path:
    """The folder of an adapter, with all links followed; a 400 for what does not lie below `folder`."""
    root = folder.resolve()
    try:
        check_path(given)
        place = (root / given).resolve()
        inside = [place, *(path.resolve() for path in place.iterdir())] if place.is_dir() else []
    except (OSError, RuntimeError, UserError):
        inside = []
    if not inside or not all(path.is_relative_to(root) for path in inside) or place == root:
        raise ApiError(
            400, f"lora_path {given[:100]!r} is no folder below this server's --adapter-folder", param="lora_path"
        )
    return place


def _file(name: str, headers: dict[str, str]) -> Response:
    """A part of the page, always whole: starlette's FileResponse would answer bad ranges in a form of its own."""
    kind = PAGE_KINDS[Path(name).suffix]
    return Response(
        (WEB / name).read_bytes(), media_type=kind, headers={**headers, "X-Content-Type-Options": "nosniff"}
    )
