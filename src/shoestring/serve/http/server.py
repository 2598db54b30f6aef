"""`shoestring serve`: a model behind an OpenAI-compatible server, from its path to a clean exit.

The port is taken before the model is loaded, so that a port in use is reported at once. SIGTERM or Ctrl-C drains:
new connections are refused, what runs goes on for `drain_s` seconds, what is left then is told so and ended,
and the process exits with 0. A second Ctrl-C does not wait. An engine that is stuck does not hold the process: clients
get their errors from the event loop, and the exit is bounded (code 2, or 1 where another process failed).

fastapi, uvicorn and prometheus_client come with `pip install 'shoestring[serve]'`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import torch

from shoestring.errors import UserError
from shoestring.formats import keep_decoded
from shoestring.formats.int8_activations import quantize_activations
from shoestring.hub import hub_id
from shoestring.model.chat import fault
from shoestring.model.folder import LoadedModel, load_model
from shoestring.model.skip import SkipSet
from shoestring.model.tokenizer import Tokenizer
from shoestring.model.transformer import Decoder

try:
    import uvicorn

    from shoestring.serve.http.app import Api, ApiSettings
    from shoestring.serve.http.connection import ConnectionLimits, LimitedConnection
    from shoestring.serve.http.engine_thread import EngineThread, OnUpdate
    from shoestring.serve.http.follower import WeightFollower
    from shoestring.serve.http.metrics import Metrics
    from shoestring.serve.http.request_schema import ApiError
    from shoestring.serve.http.tool_calls import FORMAT_NAMES
except ModuleNotFoundError as error:
    if (error.name or "").startswith("shoestring"):
        raise
    raise UserError(
        f"the server needs the package {error.name}, which is not installed; pip install 'shoestring[serve]'"
    ) from error

from shoestring.paths import find_model
from shoestring.serve.engine.capacity import blocks_by_memory, requests_by_memory
from shoestring.serve.engine.embedding import POOLINGS, Pooling
from shoestring.serve.engine.encoder import EncoderEngine, TextEncoder, folder_pooling, is_encoder, load_encoder
from shoestring.serve.engine.engine import Engine
from shoestring.serve.engine.logit_rules import VerifyWithRules
from shoestring.serve.engine.rank_failure import LOST_AFTER_S
from shoestring.serve.engine.skip_policy import SkipPolicy
from shoestring.serve.engine.tensor_parallel import Ranks, open_ranks
from shoestring.serve.engine.weight_pull import BackgroundPull
from shoestring.serve.engine.weight_update import WeightTarget
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.drafter_stack import open_drafter
from shoestring.serve.speculative.verify import verify
from shoestring.state.reshard.exchange import parse_address

log = logging.getLogger("shoestring.serve")

FEW_REQUESTS = 8  # where the number is neither given nor measured
STOP_S = 10.0  # for the engine to end its step, and again for the process to end


@dataclass(frozen=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    model_name: str | None = None  # what clients call the model; default: the name of its folder
    api_keys: tuple[str, ...] = ()  # none: no key is needed
    max_requests: int | None = None  # texts computed at the same time; default: by memory and measured steps
    max_queue: int | None = None  # texts that may wait; one more is a 429; default: twice max_requests, 64 at least
    max_context: int | None = None  # default: the model's positions
    chunk: int = 512  # rows per step
    num_blocks: int | None = None  # key/value memory in blocks of 16 positions; default: grows with need
    drafter: str | None = None  # 'ngram', the path of a draft model, or several joined by '+'
    deadline_s: float = 600.0  # a request that takes longer is ended
    drain_s: float = 30.0  # time to finish after SIGTERM
    rank_timeout_s: float = LOST_AFTER_S  # a process of several that is silent for longer has failed
    max_body_mb: float = 4.0
    max_connections: int = 512
    header_timeout_s: float = 10.0  # to send a request's header in
    body_timeout_s: float = 60.0  # to send its body in
    read_timeout_s: float = 60.0  # a client that reads nothing for so long is disconnected
    allow_hosts: tuple[str, ...] = ()  # more names of this server, '*' for any; checked while there is no key
    allow_origins: tuple[str, ...] = ()  # web pages of other sites that may call; none: CORS is off
    metrics_prefix: str = "shoestring"
    chat_template: Path | None = None  # a Jinja file, instead of the model's own
    tool_format: str = "auto"  # how the model writes tool calls; auto: what its chat template says
    pooling: str = "auto"  # of embeddings: mean, last, cls; auto: what the folder says, else mean
    int8_activations: bool = False  # on a CPU: int layers round their inputs to 8 bits
    follow: str | None = None  # HOST:PORT of a training run whose weights are taken over
    on_update: OnUpdate = "drain"  # what happens to running texts then
    update_wait_s: float = 30.0  # that `drain` waits for them
    follow_drafter: str | None = None  # HOST:PORT of a training run of the draft model
    follow_older: bool = False  # also take a step before the one that is served

    def __post_init__(self) -> None:
        for name, good, allowed in (
            (
                "host",
                self.host.strip() != "",  # to a socket, no name means every address
                "an address or name of this machine, such as 127.0.0.1, ::1 or localhost, or 0.0.0.0 for all",
            ),
            ("port", 0 <= self.port < 65536, "0 to 65535"),
            ("max_requests", self.max_requests is None or self.max_requests >= 1, "1 or more"),
            ("max_queue", self.max_queue is None or self.max_queue >= 0, "0 or more"),
            ("deadline_s", self.deadline_s > 0, "more than 0"),
            ("drain_s", self.drain_s >= 0, "0 or more"),
            ("rank_timeout_s", self.rank_timeout_s >= 1, "1 or more"),
            ("max_body_mb", self.max_body_mb > 0, "more than 0"),
            ("max_connections", self.max_connections >= 1, "1 or more"),
            ("header_timeout_s", self.header_timeout_s > 0, "more than 0"),
            ("body_timeout_s", self.body_timeout_s > 0, "more than 0"),
            ("read_timeout_s", self.read_timeout_s > 0, "more than 0"),
            (
                "allow_hosts",
                not any("/" in name or not name.strip() for name in self.allow_hosts),
                "names such as llm.example.org, without http:// and path, or '*' for any",
            ),
            ("tool_format", self.tool_format in ("auto", *FORMAT_NAMES), "auto, " + ", ".join(FORMAT_NAMES)),
            ("pooling", self.pooling in ("auto", *POOLINGS), "auto, " + ", ".join(POOLINGS)),
            ("on_update", self.on_update in ("drain", "recompute"), "drain or recompute"),
            ("update_wait_s", self.update_wait_s >= 0, "0 or more"),
            ("metrics_prefix", self.metrics_prefix.isidentifier(), "a name of letters, digits and _"),
        ):
            if not good:
                raise UserError(f"{name}={getattr(self, name)!r} is not allowed; give {allowed}")
        for address in (self.follow, self.follow_drafter):
            if address is not None:
                parse_address(address)
        if self.follow_drafter is not None and self.drafter is None:
            raise UserError("--follow-drafter needs a draft model to update; give --drafter its folder")
        if any(not key.isascii() or not key.strip() for key in self.api_keys):
            raise UserError("an API key is empty or not ASCII; a header could not carry it")


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Exclude what exists now (modules, weights, graphs) from garbage collection while the server runs: a full
    collection over all of it takes as long as a hundred steps, during which no request gets a token."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class EngineStuck(UserError):
    """The engine's step did not end, so the engine could not be stopped."""


def _draft_target(drafter: Drafter | None) -> WeightTarget:
    models = [] if drafter is None else [runner.model for runner in drafter.runners()]
    if len(models) != 1:
        raise UserError(f"--follow-drafter needs a --drafter with one draft model; there are {len(models)}")
    return WeightTarget(models[0])


class Service:
    """A model being served: `run` blocks until `stop` is called or a signal comes."""

    def __init__(
        self,
        model: Decoder | TextEncoder,
        tokenizer: Tokenizer,
        options: ServeOptions,
        listener: socket.socket,
        name: str,
        drafter: Drafter | None = None,
        skip: SkipPolicy | None = None,
        draft_skip: SkipSet | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.options, self._listener = options, listener
        self.engine: Engine | EncoderEngine
        max_running = options.max_requests or FEW_REQUESTS
        if isinstance(model, TextEncoder):
            self.engine = EncoderEngine(model, max_context=options.max_context, chunk=options.chunk)
        else:
            if options.pooling == "cls":
                raise UserError("pooling=cls is for encoders: a decoder's first token sees no other; give mean or last")
            # Measured below, where this process alone computes the steps.
            measures = options.max_requests is None and ranks is None
            context = options.max_context or model.spec.default_context
            place = (model.spec, context, model.compute_dtype, model.device)
            if measures:
                max_running = requests_by_memory(*place)
            self.engine = Engine(
                model,
                tokenizer,
                max_requests=max_running,
                most_blocks=blocks_by_memory(*place) if ranks is None else None,
                max_context=options.max_context,
                chunk=options.chunk,
                num_blocks=options.num_blocks,
                drafter=drafter,
                skip=skip,
                draft_skip=draft_skip,
                ranks=ranks,
                # The coupled rule: texts are a function of their seed, with a drafter or without.
                rule="coupled",
                verify=VerifyWithRules(verify),
            )
            if measures:
                max_running = self.engine.limit_requests()
        self.engine.warm_up()  # no request waits for graphs
        self.engine_thread = EngineThread(
            self.engine,
            Metrics(name, options.metrics_prefix),
            max_running=max_running,
            max_queue=max(64, 2 * max_running) if options.max_queue is None else options.max_queue,
            on_update=options.on_update,
            update_wait_s=options.update_wait_s,
        )
        self.followers: list[WeightFollower] = []
        if options.follow is not None:
            if isinstance(model, TextEncoder):
                raise UserError("an encoder cannot follow a training run; leave --follow out")
            target = WeightTarget(model) if ranks is None else ranks.weight_target(model)
            address = parse_address(options.follow)
            self.followers.append(WeightFollower(address, target, self.engine_thread, older=options.follow_older))
        if options.follow_drafter is not None:
            address, target = parse_address(options.follow_drafter), _draft_target(drafter)
            self.followers.append(WeightFollower(address, target, self.engine_thread, older=options.follow_older))
        if ranks is not None:
            ranks.failure_watch.on_failure = self._rank_failed
        settings = ApiSettings(
            name,
            options.api_keys,
            int(options.max_body_mb * 2**20),
            options.deadline_s,
            options.allow_origins,
            _host_names(options),
            options.body_timeout_s,
            tool_format=options.tool_format,
            pooling=cast(Pooling, "mean" if options.pooling == "auto" else options.pooling),
        )
        limits = ConnectionLimits(options.header_timeout_s, options.read_timeout_s, options.max_connections)
        self._api = Api(self.engine_thread, tokenizer, settings)
        config = uvicorn.Config(
            self._api.app(),
            http=partial(LimitedConnection, limits, {}),  # type: ignore[arg-type]
            ws="none",  # a WebSocket would leave LimitedConnection
            timeout_keep_alive=min(5.0, options.header_timeout_s),  # type: ignore[arg-type]
            backlog=128,  # so many new connections are taken in one turn of the event loop
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            # Requests left after the drain get an error; these seconds are for sending it.
            timeout_graceful_shutdown=int(options.drain_s) + 5,
        )
        self.server = _Server(config, self._drain)

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        self.engine_thread.start()
        for follower in self.followers:
            follower.start()
        try:
            with objects_frozen():
                asyncio.run(self.server.serve([self._listener]))
        finally:
            for follower in self.followers:
                follower.stop()
            self.engine_thread.stop(STOP_S)
            self._api.workers.stop()
        if self.engine_thread.alive:
            raise EngineStuck(f"the engine is stuck in a step since {self.engine_thread.seconds_in_step:.0f} s")

    def stop(self) -> None:
        """Begin to drain; from any thread."""
        self.server.handle_exit(0, None)

    def _rank_failed(self, message: str) -> None:
        """Another process is gone or stuck, and the engine waits for it: end what it cannot end itself."""
        log.error("%s; every text is ended and the server stops", message)
        gone = ApiError(503, f"{message}; the server must be restarted", code="rank_failed")
        self.engine_thread.close(gone)
        self.engine_thread.abort_all(gone)

    def _drain(self) -> None:
        log.info("draining: %d texts to finish, %.0f s at most", self.engine_thread.num_open, self.options.drain_s)
        self.engine_thread.close(
            ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})
        )
        end = ApiError(503, "the server shut down before this text was finished", code="draining")
        timer = threading.Timer(self.options.drain_s, self.engine_thread.abort_all, [end])
        timer.daemon = True
        timer.start()


class _Server(uvicorn.Server):
    """uvicorn's server, which reports when it begins to drain and does not exit by the signal afterwards."""

    def __init__(self, config: uvicorn.Config, on_drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_drain = on_drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        self._on_drain()


def _host_names(options: ServeOptions) -> tuple[str, ...]:
    """What clients may call this server; a port in a name does not matter."""
    given = (name.strip().lower().rstrip(".") for name in options.allow_hosts)
    return (options.host.lower(), socket.gethostname().lower(), *(name.rsplit(":", 1)[0] for name in given))


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with --host, --port"
        ) from None
    return listener


def main(
    model_path: str | Path,
    options: ServeOptions | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    skips: Callable[[LoadedModel], tuple[SkipPolicy | None, SkipSet | None]] | None = None,
) -> None:
    """Serve a model (Hugging Face folder, run folder or .gguf file) until a signal ends it.

    `skips(loaded)` gives the policy of requests and the set of drafts, where sublayers are to be skipped."""
    options = options or ServeOptions()
    template = None if options.chat_template is None else _read_template(options.chat_template)
    ranks = open_ranks(str(device), lost_after_s=options.rank_timeout_s)
    if ranks is not None and not ranks.first:
        loaded = load_model(model_path, dtype=dtype)
        ranks.share(loaded.model)
        _convert(loaded.model, options, dtype)
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, signal.SIG_IGN)  # the first process drains and needs this one meanwhile
        pull = None
        if options.follow is not None:
            pull = BackgroundPull(parse_address(options.follow), ranks.weight_target(loaded.model))
        ranks.follow(loaded.model, pull)
        return ranks.close()
    try:
        with listen(options.host, options.port) as listener:
            if is_encoder(find_model(model_path)):
                return _serve_encoder(model_path, options, listener, device, dtype, ranks)
            _serve(model_path, options, listener, template, device, dtype, skips, ranks)
    except EngineStuck as error:
        signal.alarm(int(STOP_S))  # leaving Python may wait for the stuck thread
        if ranks is not None:
            ranks.failure_watch.announce(error)
        raise
    finally:
        if ranks is not None:
            ranks.end()


def _name_of(path: str | Path) -> str:
    """What clients call a model: the name of its folder or file, or of its id on the hub."""
    name = str(path).partition("@")[0] if hub_id(path) and not Path(path).exists() else Path(path).resolve().name
    return name.rpartition("/")[2].removesuffix(".gguf")


def _serve_encoder(
    path: str | Path,
    options: ServeOptions,
    listener: socket.socket,
    device: torch.device | str,
    dtype: torch.dtype,
    ranks: Ranks | None,
) -> None:
    folder = find_model(path)
    if ranks is not None or options.drafter is not None:
        raise UserError(f"{path} is an encoder: it is served by one process and without a drafter")
    encoder = load_encoder(folder, device=device, dtype=dtype)
    _log_to_stderr()
    name = options.model_name or _name_of(path)
    service = Service(encoder, encoder.tokenizer, _with_pooling(options, folder), listener, name)
    log.info("serving %s (an encoder: embeddings only) at %s/v1", name, service.url)
    service.run()
    log.info("stopped")


def _with_pooling(options: ServeOptions, folder: Path) -> ServeOptions:
    """With the pooling that the folder asks for, where the user has not chosen one."""
    if options.pooling != "auto" or not folder.is_dir():
        return options
    return replace(options, pooling=folder_pooling(folder) or "auto")


def _serve(
    model_path: str | Path,
    options: ServeOptions,
    listener: socket.socket,
    template: str | None,
    device: torch.device | str,
    dtype: torch.dtype,
    skips: Callable[[LoadedModel], tuple[SkipPolicy | None, SkipSet | None]] | None,
    ranks: Ranks | None,
) -> None:
    # A model for several ranks is sharded first and then sent to its device.
    loaded = load_model(model_path, device=device if ranks is None else "cpu", dtype=dtype)
    if loaded.tokenizer is None:
        raise UserError(f"{model_path} has no tokenizer, and a server talks in text; add tokenizer.json")
    if template is not None:
        loaded.tokenizer.chat_template, loaded.tokenizer.tool_use_template = template, None
    policy, draft_skip = (None, None) if skips is None else skips(loaded)
    if ranks is not None:
        ranks.share(loaded.model)
    _convert(loaded.model, options, dtype)
    _log_to_stderr()
    name = options.model_name or _name_of(model_path)
    drafter = None
    if options.drafter is not None:
        drafter = open_drafter(options.drafter, loaded.model, device=str(device), dtype=dtype)
    options = _with_pooling(options, loaded.path)
    service = Service(loaded.model, loaded.tokenizer, options, listener, name, drafter, policy, draft_skip, ranks)
    if options.host not in ("127.0.0.1", "localhost", "::1") and not options.api_keys:
        log.warning("anybody who reaches %s may use this model; --api-key asks for a key", options.host)
    template = loaded.tokenizer.chat_template
    chat = " (no chat template: completions only)" if template is None else ""
    if template is not None and (broken := fault(template)) is not None:
        log.warning(
            "the chat template of %s is broken, %s; chats are refused (400), completions work; "
            "--chat-template gives another",
            *(model_path, broken),
        )
    running = service.engine_thread.max_running
    how = "--max-requests" if options.max_requests else "by memory and measured steps, --max-requests changes it"
    log.info("up to %d texts at the same time (%s)", running, how)
    log.info("serving %s%s at %s/v1, playground at %s/", name, chat, service.url, service.url)
    service.run()
    log.info("stopped")


def _convert(model: Decoder, options: ServeOptions, dtype: torch.dtype) -> None:
    model.eval()
    if options.int8_activations:
        quantize_activations(model, compute_dtype=dtype)
    if model.device.type == "cpu":  # no kernels for packed weights there: decoded once
        keep_decoded(model, dtype=dtype)


def _read_template(path: Path) -> str:
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the chat template {path}: {error}") from None
    broken = fault(template)
    if broken is not None:
        raise UserError(f"the chat template {path} is broken, {broken}")
    return template


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
