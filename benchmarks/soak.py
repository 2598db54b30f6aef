"""A server under many clients for a long time: is every answer whole, and does memory stay flat?

    python -m benchmarks.soak --seconds 600 --clients 64

A tiny random model is served in its own process. Each client sends a request, compares the answer with offline decoding
of that prompt and seed, and repeats; some of them disconnect in the middle of an answer. At the end all KV blocks must
be free. Arithmetic is fp64, so that a text does not depend on its batch, and a difference is a defect, not a rounding
error.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import torch

from benchmarks.processes import child_environment
from benchmarks.results import markdown, newest, provenance, record, significant
from shoestring.errors import as_command
from shoestring.evals.server_load import Planned, Sent, percentiles, read_stream
from shoestring.model import Decoder, ModelSpec, Tokenizer
from shoestring.serve import Engine, Sampling

TEXTS = ["The quick brown fox jumps over the lazy dog. ", "def main(argv):\n    return 0\n", "Bären, 日本語, 🙂. "]
NUM_QUESTIONS = 96


def tiny_model() -> tuple[Decoder, Tokenizer]:
    """The same model on every call: the server and the expected answers use different processes."""
    tokenizer = Tokenizer.train([text * 3 for text in TEXTS], 300)
    spec = ModelSpec(
        vocab_size=tokenizer.vocab_size, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        d_ff=48, max_positions=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Decoder(spec).double()
    model.compute_dtype = torch.float64
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(0, 0.4)
    return model.eval(), tokenizer


@dataclass(frozen=True)
class Question:
    body: dict[str, Any]
    answer: str


def questions(seed: int) -> list[Question]:
    """Prompts of many lengths, greedy and sampled, with the text that offline decoding gives."""
    model, tokenizer = tiny_model()
    noise = random.Random(seed)
    prompts = [f"{i} " + "".join(noise.choices(TEXTS, k=noise.randint(1, 4))) for i in range(NUM_QUESTIONS)]
    samplings = [
        Sampling(temperature=noise.choice([0.0, 0.9]), seed=i, max_tokens=noise.randint(4, 60))
        for i in range(NUM_QUESTIONS)
    ]
    made = Engine(model, tokenizer).generate(prompts, samplings)
    return [
        Question(
            {
                "prompt": prompt,
                "temperature": s.temperature,
                "seed": s.seed,
                "max_tokens": s.max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            text.text,
        )
        for prompt, s, text in zip(prompts, samplings, made, strict=True)
    ]


@dataclass
class Outcome:
    counts: Counter[str]  # whole, wrong, failed, left, refused
    ttft: list[float]
    gaps: list[float]  # between pieces of one answer
    seconds: list[float]  # of whole answers
    rss_mb: list[float]  # once a second
    kv_usage: float  # after the last client has gone
    first_wrong: str = ""

    @property
    def growth(self) -> float:
        """Relative growth of memory from the second to the last third of the run."""
        third = max(1, len(self.rss_mb) // 3)
        return max(self.rss_mb[-third:]) / max(self.rss_mb[-2 * third : -third] or self.rss_mb[:1]) - 1


async def soak(
    url: str, asked: list[Question], *, clients: int, seconds: float, leaving: float, pid: int, seed: int = 0
) -> Outcome:
    outcome = Outcome(Counter(), [], [], [], [], 1.0)
    end = time.perf_counter() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(limits=limits, timeout=120) as client:

        async def one(number: int) -> None:
            noise = random.Random(seed * 1000 + number)
            while time.perf_counter() < end:
                question = noise.choice(asked)
                if noise.random() < leaving:
                    # First the wait, then the sum: += would read the count before it.
                    left = await leave_midway(client, url, question, noise.random())
                    outcome.counts["left"] += left
                    continue
                sent = Sent(Planned(time.perf_counter(), 0, 0))
                await read_stream(client, url, question.body, sent, time.perf_counter)
                kind = judge(sent, question)
                outcome.counts[kind] += 1
                if kind == "whole":
                    outcome.ttft.append(sent.ttft)
                    outcome.gaps += sent.gaps
                    outcome.seconds.append(sent.pieces[-1] - sent.planned.at)
                elif kind == "refused":
                    await asyncio.sleep(0.2)
                elif not outcome.first_wrong:
                    outcome.first_wrong = f"{kind}: {sent.error or sent.text!r} for {question}"

        async def watch_memory() -> None:
            server = psutil.Process(pid)
            while time.perf_counter() < end:
                outcome.rss_mb.append(server.memory_info().rss / 2**20)
                await asyncio.sleep(1.0)

        await asyncio.gather(watch_memory(), *(one(i) for i in range(clients)))
        for _ in range(100):
            stats = (await client.get(f"{url}/stats")).json()
            outcome.kv_usage = stats["kv_usage"]
            if stats["num_running"] == stats["num_waiting"] == outcome.kv_usage == 0:
                break
            await asyncio.sleep(0.1)
    return outcome


def judge(sent: Sent, question: Question) -> str:
    if sent.status == 429:
        return "refused"
    if sent.status != 200 or sent.error:
        return "failed"
    return "whole" if sent.text == question.answer else "wrong"


async def leave_midway(client: httpx.AsyncClient, url: str, question: Question, when: float) -> int:
    """Ask, read a part, and close the connection; 1 if the answer was not over by then."""
    body = {**question.body, "max_tokens": 300, "ignore_eos": True}
    wanted = 1 + int(when * 8)
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return 0
        async for line in answer.aiter_lines():
            wanted -= line.startswith("data: ")
            if wanted <= 0:
                return 1
    return 0


def serve_tiny(port: int, max_requests: int, drafter: str | None) -> None:
    from shoestring.serve.http.server import ServeOptions, Service, listen
    from shoestring.serve.speculative.drafter_stack import open_drafter

    torch.set_num_threads(1)
    model, tokenizer = tiny_model()
    options = ServeOptions(port=port, max_requests=max_requests, max_queue=256)
    guess = None if drafter is None else open_drafter(drafter, model)
    Service(model, tokenizer, options, listen("127.0.0.1", port), "tiny", guess).run()


def run(
    *, clients: int, seconds: float, leaving: float = 0.3, max_requests: int = 32, drafter: str | None = "ngram"
) -> Outcome:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.soak", "--serve-port", str(port)]
    command += ["--max-requests", str(max_requests), "--drafter", drafter or "none"]
    server = subprocess.Popen(command, env=child_environment())
    try:
        asked = questions(seed=0)
        url = f"http://127.0.0.1:{port}"
        _await(url, server)
        return asyncio.run(soak(url, asked, clients=clients, seconds=seconds, leaving=leaving, pid=server.pid))
    finally:
        server.terminate()
        server.wait(60)


def _await(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise RuntimeError("the server was not ready after two minutes")


def table() -> str:
    lines = newest("soak")
    rows = [
        [n["case"], n["device"],
         f"{n['config']['seconds']:.0f}", f"{q['whole']:,}", str(q.get("wrong", 0)), f"{q['left']:,}",
         *(" / ".join(f"{ms:,.0f}" for ms in q[name]) for name in ("ttft_ms", "gap_ms", "answer_ms")),
         f"{q['rss_mb'][0]:.0f} -> {q['rss_mb'][1]:.0f} ({q['rss_growth']:+.2%} in the last third)"]
        for n in lines for q in [n["quality"]]
    ]  # fmt: skip
    header = ["load", "machine", "seconds", "completed", "wrong", "aborted by the client"]
    header += [f"{name} p50 / p90 / p99, ms" for name in ("first token", "between chunks", "whole answer")]
    return markdown([*header, "memory of the server, MB"], rows) + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--leaving", type=float, default=0.3, help="share of requests whose client leaves midway")
    parser.add_argument("--max-requests", type=int, default=32)
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--serve-port", type=int, default=0, help=argparse.SUPPRESS)  # the server's process
    args = parser.parse_args()
    drafter = None if args.drafter == "none" else args.drafter
    if args.serve_port:
        serve_tiny(args.serve_port, args.max_requests, drafter)
        return
    outcome = run(
        clients=args.clients,
        seconds=args.seconds,
        leaving=args.leaving,
        max_requests=args.max_requests,
        drafter=drafter,
    )
    times = {
        name: [significant(1000 * p) for p in percentiles(values)]
        for name, values in (("ttft", outcome.ttft), ("gap", outcome.gaps), ("answer", outcome.seconds))
    }
    counts, memory = dict(sorted(outcome.counts.items())), [round(outcome.rss_mb[i], 1) for i in (0, -1)]
    print(f"answers: {counts}; ms p50, p90, p99: {times}")
    print(
        f"server memory {memory} MB ({outcome.growth:+.2%} in the last third); "
        f"keys and values in use at the end {outcome.kv_usage:g}"
    )
    options = ("clients", "seconds", "leaving", "max_requests", "drafter")
    record(
        bench="soak",
        case=f"{args.clients} clients, {args.leaving:.0%} of requests left midway",
        metric="ttft_p99",
        unit="ms",
        samples=[times["ttft"][-1]],
        quality={
            **counts,
            **{f"{name}_ms": values for name, values in times.items()},
            "kv_usage_at_end": outcome.kv_usage,
            "rss_mb": memory,
            "rss_growth": round(outcome.growth, 4),
        },
        config={name: getattr(args, name) for name in options},
    )
    if outcome.counts["wrong"] or outcome.counts["failed"] or outcome.kv_usage:
        sys.exit(f"NOT GOOD: {outcome.first_wrong or 'keys and values were not freed'}")


if __name__ == "__main__":
    as_command(main)
