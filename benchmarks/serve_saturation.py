"""A server at saturation beside the engine alone and beside `transformers serve`, in one run on one machine.

    python -m benchmarks.serve_saturation                  a 1B shape on a GPU, about a minute
    python -m benchmarks.serve_saturation --requests 128   so many texts at once, instead of what the server chooses
    python -m benchmarks.serve_saturation --shape tiny --requests 8 --seconds 4 --device cpu

As many clients as the server computes texts ask one request after the other, each with a prompt of its own, and read
the stream. Tokens per second are those of all texts, over the time from the first request to the last answer. `engine`
is `Engine.generate` of the same prompts in this process: what HTTP, JSON, detokenizing and events leave of it is the
ratio of the server's line. Clients run in processes of their own and speak HTTP/1.1 over plain sockets, so that they
are not what is measured. Weights are random, texts run to their full length. The three are measured one after the
other, once all are up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.results import markdown, newest, provenance, record
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import UserError, as_command
from shoestring.evals.server_load import percentiles
from shoestring.model import Decoder, ModelSpec, Tokenizer, load_model, save_model
from shoestring.model.parallel import init_weights
from shoestring.serve import Engine, Sampling

BENCH = "serve_saturation"
SHAPES = {"1b": ModelSpec(8192, 2048, 16, 32, 8, 64, 8192, 4096), "tiny": ModelSpec(1024, 64, 2, 4, 2, 16, 128, 1024)}
CLIENTS = 8  # processes
PEER_BLOCK = 32  # positions
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--requests", type=int, help="clients; default: as many texts as the server chose")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0, help="for which requests are begun")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=float, default=115.0, help="seconds in all; the peer gets what is left")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        for line in sys.stdin:
            print(json.dumps(asyncio.run(client(json.loads(line)))), flush=True)
        return
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {text}", flush=True)

    def left() -> float:
        return args.limit - (time.monotonic() - began)

    device = pick_device(args.device)
    dtype = pick_dtype("auto", device)
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(clients())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / f"llama-{args.shape}"
        make_model(folder, args.shape, device, dtype)
        say("model written")
        context = args.prompt_tokens + args.new_tokens + 8
        command = [sys.executable, "-m", "shoestring", "serve", str(folder), "--max-context", str(context)]
        command += ["--max-requests", str(args.requests)] if args.requests else []
        ours = stack.enter_context(server([*command, "--device", str(device)], Path(f"{folder}.log")))
        num = args.requests or int(json.loads(ours.ready("/stats", left()))["max_running"])
        peer = None
        if not args.no_peer:
            command = peer_command(folder, context, num, device, dtype, batch_tokens=512)
            peer = stack.enter_context(server(command, Path(f"{folder}.peer.log")))
        ours.ready("/health", left())
        say(f"shoestring serve is ready, {num} texts at the same time")
        sizes: dict[str, Any] = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
        load = {"num": num, "seconds": args.seconds, "vocab": SHAPES[args.shape].vocab_size, **sizes}
        engine = build_engine(folder, num, context, device, dtype)
        say("the engine is ready")
        why_not = None
        if peer is not None:
            try:
                peer.ready("/health", left() - 2 * args.seconds - 20)
                say("transformers serve is ready")
            except UserError as error:
                why_not = str(error)
        rate = offline(engine, num, **sizes)
        say(f"engine alone: {rate:,.0f} tokens/s")
        rate_apart = offline(engine, num, apart=True, **sizes)
        say(f"engine alone, texts that end one after the other: {rate_apart:,.0f} tokens/s")
        config = {"model": args.shape, "requests": num, "batch": num, "context": context, **sizes}
        kind: dict[str, Any] = {"bench": BENCH, "metric": "tokens", "unit": "tokens/s", "config": config}
        record(case="engine, offline", samples=[rate], **kind)
        kind |= {"baseline": "engine, offline", "baseline_value": rate}
        ratio = rate_apart / rate
        record(case="engine, texts that end one after the other", samples=[rate_apart], ratio=ratio, **kind)
        before = ours.thread_seconds()
        found = saturate(processes, ours.url, {**load, "model": folder.name, "prompt_ids": True})
        say(f"shoestring serve: {told(found)}; {found['rate'] / rate:.0%} of the engine")
        spent = sorted((s - before.get(t, 0.0) for t, s in ours.thread_seconds().items()), reverse=True)
        say(f"processor seconds of its threads: {', '.join(f'{s:.1f}' for s in spent[:4])}")
        record(case="shoestring serve", samples=[found["rate"]], ratio=found["rate"] / rate, quality=found, **kind)
        if peer is None:
            return
        load |= {"model": str(folder), "prompt_ids": False}
        try:
            if why_not is not None:
                raise UserError(why_not)
            # The first request makes its cache and graphs.
            saturate(processes, peer.url, {**load, "num": 1, "seconds": 0.1, "timeout": left() - 10})
            load["seconds"] = min(args.seconds, max(2.0, left() - 8))
            found = saturate(processes, peer.url, {**load, "timeout": left()})
            say(f"transformers serve: {told(found)}")
            record(
                case="transformers serve", samples=[found["rate"]], ratio=found["rate"] / rate, quality=found, **kind
            )
        except UserError as error:
            say(f"transformers serve was not measured: {error}; {tail(peer.log)}")


def told(found: dict[str, Any]) -> str:
    return (
        f"{found['rate']:,.0f} tokens/s, {found['requests_per_s']:.1f} requests/s, first token p50 "
        f"{1000 * found['ttft'][0]:.0f} ms, p99 {1000 * found['ttft'][2]:.0f} ms, "
        f"{found['failed']} failed {found['error']}"
    )


# -- what is served --------------------------------------------------------------------------------------------


def make_model(folder: Path, shape: str, device: torch.device, dtype: torch.dtype) -> None:
    text = "\n".join(p.read_text(errors="ignore") for p in sorted(Path(json.__file__).parents[1].glob("*.py"))[:60])
    tokenizer = Tokenizer.train([text], SHAPES[shape].vocab_size)
    spec = replace(SHAPES[shape], vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
    with torch.device("meta"):
        model = Decoder(spec)
    model.to_empty(device=device)
    torch.manual_seed(0)
    if device.type == "cuda":
        for parameter in model.parameters():  # drawn on the device: init_weights draws by name, on the host
            torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
    else:
        init_weights(model, 0)
    save_model(folder, model.to(dtype), tokenizer)


def peer_command(
    folder: Path, context: int, num: int, device: torch.device, dtype: torch.dtype, *, batch_tokens: int
) -> list[str]:
    """`transformers serve` with room for `num` texts. By default it takes most of the memory, and with sdpa (flash
    attention is a package of its own) each of its steps has a mask over all of that."""
    name = "bfloat16" if dtype == torch.bfloat16 else "float32"
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--continuous-batching"]
    command += ["--device", str(device), "--dtype", name, "--cb-max-batch-tokens", str(batch_tokens)]
    blocks = num * -(-context // PEER_BLOCK)
    return [*command, "--cb-block-size", str(PEER_BLOCK), "--cb-num-blocks", str(blocks)]


def build_engine(folder: Path, num: int, context: int, device: torch.device, dtype: torch.dtype) -> Engine:
    loaded = load_model(folder, device=device, dtype=dtype)
    engine = Engine(loaded.model.eval(), loaded.tokenizer, max_requests=num, max_context=context)
    engine.warm_up()
    return engine


def offline(engine: Engine, num: int, *, prompt_tokens: int, new_tokens: int, apart: bool = False) -> float:
    """Tokens per second of the engine by itself, over three times as many texts as run at once. Texts that begin
    together end together, and their prompts are read together; `apart`: they end one after the other, as under load."""
    draw, vocab = random.Random(1), engine.vocab_size

    def texts(count: int) -> list[list[int]]:
        return [[draw.randrange(10, vocab) for _ in range(prompt_tokens)] for _ in range(count)]

    whole = Sampling(max_tokens=new_tokens, ignore_eos=True)
    engine.generate(texts(num), whole)
    prompts, samplings = texts(3 * num), [whole] * (3 * num)
    if apart:
        samplings[:num] = [replace(whole, max_tokens=draw.randint(1, new_tokens)) for _ in range(num)]
    began = time.perf_counter()
    done = engine.generate(prompts, samplings)
    return sum(len(c.token_ids) for c in done) / (time.perf_counter() - began)


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def ready(self, path: str, seconds: float) -> str:
        """Its answer at this path, once it has one."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise UserError(f"the server did not start: {tail(self.log)}")
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return str(answer.read().decode())
            time.sleep(0.1)
        raise UserError(f"the server was not ready in time: {tail(self.log)}")

    def thread_seconds(self) -> dict[int, float]:
        """Processor time of each thread of its processes."""
        first = psutil.Process(self.process.pid)
        threads = [t for process in (first, *first.children()) for t in process.threads()]
        return {t.id: t.user_time + t.system_time for t in threads}


@contextlib.contextmanager
def server(command: list[str], log: Path) -> Iterator[Server]:
    """The command, started with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as file:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=file, stderr=file)
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()


def tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-4:])[-600:]


# -- load ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def clients() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that take a load per line and answer with a line; started early, because imports take seconds."""
    command = [sys.executable, "-m", "benchmarks.serve_saturation", "--client"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(min(CLIENTS, max(1, (os.cpu_count() or 2) - 2)))]
    try:
        yield started
    finally:
        for process in started:
            process.kill()


def saturate(processes: list[subprocess.Popen[str]], url: str, load: dict[str, Any]) -> dict[str, Any]:
    """Closed loop: every client asks again as soon as it has its answer."""
    used = processes[: load["num"]]
    for i, process in enumerate(used):
        part = {**load, "url": url, "num": len(range(i, load["num"], len(used))), "seed": i}
        assert process.stdin is not None
        print(json.dumps(part), file=process.stdin, flush=True)
    parts = [json.loads(process.stdout.readline()) for process in used if process.stdout is not None]
    answers = [a for part in parts for a in part["answers"]]
    if not answers:
        raise UserError(f"no answer came: {parts[0]['error']}")
    first, last = min(a[0] for a in answers), max(a[2] for a in answers)
    return {
        "rate": sum(a[3] for a in answers) / (last - first),
        "requests_per_s": len(answers) / (last - first),
        "ttft": list(percentiles([a[1] - a[0] for a in answers])),
        "tpot": statistics.median((a[2] - a[1]) / max(1, a[3] - 1) for a in answers),
        "failed": sum(part["failed"] for part in parts),
        "error": next((part["error"] for part in parts if part["error"]), ""),
    }


async def client(load: dict[str, Any]) -> dict[str, Any]:
    """Some of the clients; (began, first piece, ended, tokens) of every answer."""
    answers: list[tuple[float, float, float, int]] = []
    errors: list[str] = []
    host, _, port = load["url"].removeprefix("http://").partition(":")
    draw = random.Random(load["seed"])
    end = time.time() + load["seconds"]

    async def talk() -> None:
        line: Connection | None = None  # kept from one request to the next, as OpenAI's client does
        while time.time() < end and len(errors) < 20:
            try:
                async with asyncio.timeout(load.get("timeout")):
                    line = line or await asyncio.open_connection(host, int(port), limit=1 << 20)
                    answers.append(await ask(*line, host, body_for(draw, load)))
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                errors.append(f"{type(error).__name__}: {error}"[:300])
                if line is not None:
                    line[1].close()
                line = None
                await asyncio.sleep(0.2)
        if line is not None:
            line[1].close()

    await asyncio.gather(*(talk() for _ in range(load["num"])))
    return {"answers": answers, "failed": len(errors), "error": errors[0] if errors else ""}


def body_for(draw: random.Random, load: dict[str, Any]) -> bytes:
    prompt: Any = [draw.randrange(10, load["vocab"]) for _ in range(load["prompt_tokens"])]
    if not load["prompt_ids"]:  # that server takes texts only; about as many tokens
        prompt = " ".join(f"x{t % 97}" for t in prompt[: len(prompt) // 2])
    body = {
        "model": load["model"],
        "prompt": prompt,
        "max_tokens": load["new_tokens"],
        "temperature": 0,
        "stream": True,
    }
    if load["prompt_ids"]:
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode()


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, body: bytes
) -> tuple[float, float, float, int]:
    began = time.time()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    status = (await reader.readline()).decode()
    if " 200 " not in status:
        rest = await reader.read(400)
        raise ValueError(f"{status.strip()} {rest[-200:]!r}")
    first, pieces, tokens = 0.0, 0, 0
    while (line := await reader.readline()) != b"0\r\n":  # the last chunk
        if not line:
            raise ValueError("the connection was closed within the answer")
        if not line.startswith(b"data: {"):
            continue
        if b'"usage":{' in line:
            tokens = json.loads(line[6:])["usage"]["completion_tokens"]
        elif b'"choices"' in line:
            pieces += 1
            first = first or time.time()
    await reader.readline()
    if not first:
        raise ValueError("the stream had no text")
    return began, first, time.time(), tokens or pieces


def table() -> str:
    lines = newest(BENCH)
    if not lines:
        return "Not measured yet."
    rows = [
        [
            n["case"],
            f"{n['config']['requests']}",
            f"{n['value']:,.0f}",
            "1" if n["ratio"] is None else f"{n['ratio']:.2f}",
            "" if not n["quality"] else f"{n['quality']['requests_per_s']:.1f}",
            ""
            if not n["quality"]
            else f"{1000 * n['quality']['ttft'][0]:,.0f} / {1000 * n['quality']['ttft'][2]:,.0f}",
        ]
        for n in lines
    ]
    header = ["", "texts at once", "tokens/s", "of the engine", "requests/s", "first token p50 / p99, ms"]
    notes = "".join(f"\n- {n['case']}: {n['note']}" for n in lines if n["note"])
    return markdown(header, rows) + (f"\n{notes}" if notes else "") + provenance(lines)


if __name__ == "__main__":
    as_command(main)
