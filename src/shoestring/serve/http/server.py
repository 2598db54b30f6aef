"""`shoestring serve`: a model behind an OpenAI-compatible server, from its path to a clean exit.

The port is taken before the model is loaded, so that a port in use is reported at once. SIGTERM or Ctrl-C drains:
new connections are refused, what runs goes on for `drain_s` seconds, what is left then is told so and ended,
and the process exits with 0. A second Ctrl-C does not wait. An engine that is stuck does not hold the process: clients
get their errors from the event loop, and the exit is bounded (code 2, or 1 where another process failed).

The command has HTTP in a process of its own (http_process.py). A `Service` in a Python program has both in its process.

fastapi, uvicorn and prometheus_client come with `pip install 'shoestring[serve]'`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from shoestring.errors import UserError
from shoestring.formats import keep_decoded
from shoestring.formats.int8_activations import quantize_activations
from shoestring.hub import hub_id
from shoestring.json_files import read_text
from shoestring.model.adapter_folder import AdapterFile, read_adapter
from shoestring.model.chat import fault
from shoestring.model.folder import LoadedModel, load_model
from shoestring.model.skip import SkipSet
from shoestring.model.tokenizer import Tokenizer
from shoestring.model.transformer import Decoder

try:
    from shoestring.serve.http.engine_client import EngineClient
    from shoestring.serve.http.engine_thread import EngineThread
    from shoestring.serve.http.follower import WeightFollower
    from shoestring.serve.http.grammar import Grammars
    from shoestring.serve.http.http_process import HttpProcess
    from shoestring.serve.http.http_server import HttpServer, log_to_stderr, objects_frozen
    from shoestring.serve.http.metrics import Metrics
    from shoestring.serve.http.request_schema import ApiError
    from shoestring.serve.http.serve_options import ServeOptions
except ModuleNotFoundError as error:
    if (error.name or "").startswith("shoestring"):
        raise
    raise UserError(
        f"the server needs the package {error.name}, which is not installed; pip install 'shoestring[serve]'"
    ) from error

from shoestring.paths import find_model
from shoestring.runlog import run_of
from shoestring.serve.engine.capacity import blocks_by_memory, requests_by_memory
from shoestring.serve.engine.cpu_decode import begin_compiling
from shoestring.serve.engine.encoder import EncoderEngine, TextEncoder, folder_pooling, is_encoder, load_encoder
from shoestring.serve.engine.engine import Engine
from shoestring.serve.engine.logit_rules import VerifyWithRules
from shoestring.serve.engine.skip_policy import SkipPolicy
from shoestring.serve.engine.tensor_parallel import Ranks, open_ranks
from shoestring.serve.engine.weight_pull import BackgroundPull
from shoestring.serve.engine.weight_update import WeightTarget
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.drafter_stack import open_drafter
from shoestring.serve.speculative.verify import verify
from shoestring.state.reshard.exchange import parse_address

__all__ = ["EngineStuck", "ServeOptions", "Service", "listen", "main"]

log = logging.getLogger("shoestring.serve")

FEW_REQUESTS = 8  # where the number is neither given nor measured
STOP_S = 10.0  # for the engine to end its step, and again for the process to end


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
        http_process: HttpProcess | None = None,
        adapters: Mapping[str, AdapterFile] | None = None,
    ) -> None:
        """`http_process` serves HTTP; None: this one does. `adapters`: to begin with."""
        self.options, self.url = options, url_of(listener)
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
            for each, file in (adapters or {}).items():
                self.engine.adapters.load(each, file)
            if measures:
                max_running = self.engine.limit_requests()
        self.engine.warm_up()  # no request waits for graphs
        self.engine_thread = EngineThread(
            self.engine,
            Metrics(name, options.metrics_prefix),
            max_running=max_running,
            on_update=options.on_update,
            update_wait_s=options.update_wait_s,
        )
        self.followers: list[WeightFollower] = []
        if options.follow is not None:
            if isinstance(model, TextEncoder):
                raise UserError("an encoder cannot follow a training run; leave --follow out")
            target = WeightTarget(model) if ranks is None else ranks.weight_target(model)
            address = parse_address(options.follow)
            self._follow(address, target)
        if options.follow_drafter is not None:
            address, target = parse_address(options.follow_drafter), _draft_target(drafter)
            self._follow(address, target)
        if ranks is not None:
            ranks.failure_watch.on_failure = self._rank_failed
        facts = self.engine_thread.facts(max(64, 2 * max_running) if options.max_queue is None else options.max_queue)
        grammars = Grammars(tokenizer, facts.vocab_size, facts.eos_ids)
        if http_process is None:
            self.client = EngineClient(facts, self.engine_thread, tokenizer, self.engine_thread.latest)
            self.engine_thread.on_report = self.client.deliver
            http = HttpServer(options, name, tokenizer, self.client, grammars, listener)
            self.server = http.server
            self.stop: Callable[[], None] = http.stop  # begin to drain; from any thread
            self._run_http: Callable[[Callable[[], None]], None] = partial(http.run, None)
        else:
            http_process.open(listener, name, options.pooling, tokenizer, facts, self.engine_thread)
            self.stop = http_process.stop
            self._run_http = partial(http_process.run, self.engine_thread, grammars)

    def _follow(self, address: tuple[str, int], target: WeightTarget) -> None:
        older, hosts = self.options.follow_older, self.options.follow_hosts
        self.followers.append(WeightFollower(address, target, self.engine_thread, older=older, hosts=hosts))

    def run(self, on_started: Callable[[], None] = lambda: None) -> None:
        self.engine_thread.start()
        for follower in self.followers:
            follower.start()
        try:
            with objects_frozen():
                self._run_http(on_started)
        finally:
            for follower in self.followers:
                follower.stop()
            self.engine_thread.stop(STOP_S)
        if self.engine_thread.alive:
            raise EngineStuck(f"the engine is stuck in a step since {self.engine_thread.seconds_in_step:.0f} s")

    def _rank_failed(self, message: str) -> None:
        """Another process is gone or stuck, and the engine waits for it: end what it cannot end itself."""
        log.error("%s; every text is ended and the server stops", message)
        gone = ApiError(503, f"{message}; the server must be restarted", code="rank_failed")
        self.engine_thread.give_up(gone)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


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
    apart: bool = False,
) -> None:
    """Serve a model (Hugging Face folder, run folder or .gguf file) until a signal ends it.

    `skips(loaded)` gives the policy of requests and the set of drafts, where sublayers are to be skipped. `apart`: HTTP
    has a process of its own, which is faster with many streams; for a program that has no other threads yet."""
    options = options or ServeOptions()
    template = None if options.chat_template is None else _read_template(options.chat_template)
    with ExitStack() as stack:
        http_process = None
        if apart and os.environ.get("RANK", "0") == "0":
            http_process = HttpProcess.fork(options)
            stack.callback(http_process.close)
        _main(model_path, options, template, torch.device(device), dtype, skips, http_process)


def _main(
    model_path: str | Path,
    options: ServeOptions,
    template: str | None,
    device: torch.device,
    dtype: torch.dtype,
    skips: Callable[[LoadedModel], tuple[SkipPolicy | None, SkipSet | None]] | None,
    http_process: HttpProcess | None,
) -> None:
    ranks = open_ranks(str(device), lost_after_s=options.rank_timeout_s)
    if ranks is not None and not ranks.first:
        loaded = load_model(model_path, dtype=dtype, packed=options.int8_activations)
        adapters = _read_adapters(options, loaded.model, "")
        ranks.share(loaded.model)
        _convert(loaded.model, options, dtype)
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, signal.SIG_IGN)  # the first process drains and needs this one meanwhile
        pull = None
        if options.follow is not None:
            target = ranks.weight_target(loaded.model)
            pull = BackgroundPull(parse_address(options.follow), target, options.follow_hosts)
        ranks.follow(loaded.model, pull, adapters)
        return ranks.close()
    try:
        with listen(options.host, options.port) as listener:
            if is_encoder(find_model(model_path)):
                return _serve_encoder(model_path, options, listener, device, dtype, ranks, http_process)
            _serve(model_path, options, listener, template, device, dtype, skips, ranks, http_process)
    except EngineStuck as error:
        signal.alarm(int(STOP_S))  # leaving Python may wait for the stuck thread
        if ranks is not None:
            ranks.failure_watch.announce(error)
        raise
    finally:
        if ranks is not None:
            ranks.end()


def _name_of(path: str | Path) -> str:
    """What clients call a model: the name of its run, folder or file, or of its id on the hub."""
    if hub_id(path) and not Path(path).exists():
        name = str(path).partition("@")[0].rpartition("/")[2]
    else:
        folder = Path(path).resolve()
        # The finished model of every run is in its model/.
        name = (run_of(folder) or folder if folder.name == "model" else folder).name
    return name.removesuffix(".gguf")


def _serve_encoder(
    path: str | Path,
    options: ServeOptions,
    listener: socket.socket,
    device: torch.device | str,
    dtype: torch.dtype,
    ranks: Ranks | None,
    http_process: HttpProcess | None,
) -> None:
    folder = find_model(path)
    if ranks is not None or options.drafter is not None or options.adapters:
        raise UserError(f"{path} is an encoder: it is served by one process, without a drafter and adapters")
    encoder = load_encoder(folder, device=device, dtype=dtype)
    log_to_stderr()
    name = options.model_name or _name_of(path)
    options = _with_pooling(options, folder)
    service = Service(encoder, encoder.tokenizer, options, listener, name, http_process=http_process)
    service.run(lambda: log.info("serving %s (an encoder: embeddings only) at %s/v1", name, service.url))
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
    http_process: HttpProcess | None,
) -> None:
    # A model for several ranks is sharded first and then sent to its device.
    start = device if ranks is None else "cpu"
    log_to_stderr()
    on_cpu = torch.device(device).type == "cpu"
    if options.int8_activations and on_cpu and (line := begin_compiling()) is not None:
        log.info("%s", line)
    loaded = load_model(model_path, device=start, dtype=dtype, packed=options.int8_activations)
    if loaded.tokenizer is None:
        raise UserError(f"{model_path} has no tokenizer, and a server talks in text; add tokenizer.json")
    if template is not None:
        loaded.tokenizer.chat_template, loaded.tokenizer.tool_use_template = template, None
    policy, draft_skip = (None, None) if skips is None else skips(loaded)
    name = options.model_name or _name_of(model_path)
    adapters = _read_adapters(options, loaded.model, name)
    if ranks is not None:
        ranks.share(loaded.model)
    _convert(loaded.model, options, dtype)
    drafter = None
    if options.drafter is not None:
        drafter = open_drafter(options.drafter, loaded.model, device=str(device), dtype=dtype)
    options = _with_pooling(options, loaded.path)
    extras = drafter, policy, draft_skip, ranks, http_process, adapters
    service = Service(loaded.model, loaded.tokenizer, options, listener, name, *extras)
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
    line = f"serving {name}{chat} at {service.url}/v1, playground at {service.url}/"
    service.run(lambda: log.info("%s", line))
    log.info("stopped")


def _read_adapters(options: ServeOptions, model: Decoder, name: str) -> dict[str, AdapterFile]:
    """`name`: the model's."""
    if name in options.adapter_places:
        raise UserError(f"--adapter {name} has the name of the model itself; give it another")
    return {name: read_adapter(place, model) for name, place in options.adapter_places.items()}


def _convert(model: Decoder, options: ServeOptions, dtype: torch.dtype) -> None:
    model.eval()
    if options.int8_activations:
        quantize_activations(model, compute_dtype=dtype)
    if model.device.type == "cpu":  # no kernels for packed weights there: decoded once
        keep_decoded(model, dtype=dtype)


def _read_template(path: Path) -> str:
    template = read_text(path)
    broken = fault(template)
    if broken is not None:
        raise UserError(f"the chat template {path} is broken, {broken}")
    return template
