"""Load on a server: `shoestring bench serve MODEL_OR_URL`.

Sends the plan of load.py to any server with OpenAI's /v1/completions (a URL), or to one of ours started for
the purpose (a model), and reports what users feel:

    TTFT     time to first token: from the planned arrival, so that a client that falls behind cannot hide it
    TPOT     time per output token after the first, one value a request
    ITL      time between two pieces of one answer
    goodput  requests per second that kept both promises of the SLO (TTFT and TPOT)

Prompts are token ids drawn at random from a real text, so that no two share a prefix that a cache could
answer, and every answer runs to its planned length.

The rows of docs/server.md, a model of 135M parameters in its fastest mode on a CPU (3 minutes each):

    python -m shoestring.bench.serve --rate 0.4
    python -m shoestring.bench.serve --trace AzureLLMInferenceTrace_conv.csv --rate 0.6 --seconds 150
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoestring.bench.load import Planned, bodies_for, fit, from_trace, mean_rate, poisson
from shoestring.bench.results import markdown, newest, provenance, record, significant
from shoestring.errors import UserError, as_command
from shoestring.report import Curves, Series, Table, write_report
from shoestring.runlog import RunLog, new_run_folder

try:
    import httpx
except ModuleNotFoundError as error:
    raise UserError(
        "loading a server needs the package httpx, which is not installed; pip install 'shoestring[bench]'"
    ) from error

TIMEOUT_S = 600.0
MODEL = "SmolLM2-135M-Instruct"  # of the rows that are kept


@dataclass
class Sent:
    """One request and what came of it; times are seconds after the start."""

    planned: Planned
    began: float = 0.0  # later than planned.at when the client could not keep up
    pieces: list[float] = field(default_factory=list)  # when each piece of text arrived
    ended: float = 0.0
    num_tokens: int = 0
    text: str = ""
    status: int = 0  # of HTTP; 0: no answer at all
    error: str = ""

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.error and bool(self.pieces)

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.planned.at

    @property
    def tpot(self) -> float:
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.pieces)]


@dataclass(frozen=True)
class Slo:
    ttft_s: float = 1.0
    tpot_s: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("slo_ttft", self.ttft_s), ("slo_tpot", self.tpot_s)):
            if not value > 0:
                raise UserError(f"{name}={value} is a promise that nobody keeps; give seconds above 0")

    def kept(self, sent: Sent) -> bool:
        return sent.whole and sent.ttft <= self.ttft_s and sent.tpot <= self.tpot_s


@dataclass(frozen=True)
class Summary:
    num_sent: int
    num_whole: int
    num_refused: int  # 429
    num_failed: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    goodput: float
    ttft: tuple[float, float, float]  # p50, p90, p99 in seconds
    tpot: tuple[float, float, float]
    itl: tuple[float, float, float]
    client_lag_p99: float  # how late the client itself was


def summarize(sent: Sequence[Sent], slo: Slo) -> Summary:
    if not sent:
        raise UserError("the plan holds no request; give a longer time or a higher rate")
    whole = [s for s in sent if s.whole]
    seconds = max([s.ended for s in sent] + [1e-9])
    refused = sum(s.status == 429 for s in sent)
    return Summary(
        len(sent),
        len(whole),
        refused,
        len(sent) - len(whole) - refused,
        seconds,
        len(whole) / seconds,
        sum(s.num_tokens for s in whole) / seconds,
        sum(slo.kept(s) for s in sent) / seconds,
        percentiles([s.ttft for s in whole]),
        percentiles([s.tpot for s in whole if s.num_tokens > 1]),
        percentiles([gap for s in whole for gap in s.gaps]),
        percentiles([s.began - s.planned.at for s in sent])[2],
    )


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The 50th, 90th and 99th, each a value that occurred."""
    if not values:
        nan = float("nan")
        return nan, nan, nan
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(0.5 * last)], ordered[round(0.9 * last)], ordered[round(0.99 * last)]


# -- sending -----------------------------------------------------------------------------------------


async def send_all(
    url: str,
    plan: Sequence[Planned],
    bodies: Sequence[dict[str, Any]],
    *,
    api_key: str | None = None,
    done: Callable[[], None] = lambda: None,
) -> list[Sent]:
    """Send every request at its time and read all answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=TIMEOUT_S) as client:
        start = time.perf_counter()

        async def one(planned: Planned, body: dict[str, Any]) -> Sent:
            await asyncio.sleep(max(0.0, start + planned.at - time.perf_counter()))
            sent = Sent(planned, began=time.perf_counter() - start)
            await read_stream(client, url, body, sent, lambda: time.perf_counter() - start)
            sent.ended = time.perf_counter() - start
            done()
            return sent

        return list(await asyncio.gather(*map(one, plan, bodies)))


async def read_stream(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], sent: Sent, now: Callable[[], float]
) -> None:
    """Ask for one streamed completion and note in `sent` what arrives and when."""
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            sent.status = answer.status_code
            if answer.status_code != 200:
                sent.error = (await answer.aread()).decode(errors="replace")[:300]
                return
            ended = False
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    break
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    sent.error = str(chunk["error"])[:300]
                    return
                text = "".join(choice["text"] for choice in chunk["choices"])
                # A last piece without text tells that the answer ended, which a user notices, too.
                if text or any(choice.get("finish_reason") for choice in chunk["choices"]):
                    sent.pieces.append(now())
                    sent.text += text
                if chunk.get("usage"):
                    sent.num_tokens = chunk["usage"]["completion_tokens"]
            if not ended:
                sent.error = "the stream broke off before [DONE]"
    except (httpx.HTTPError, ValueError, KeyError) as error:
        sent.error = f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Target:
    url: str
    model: str
    max_context: int
    pool: tuple[int, ...]  # token ids of a real text


def look_at(url: str, *, api_key: str | None = None) -> Target:
    """Ask a server for its model, its context and the tokens of some text."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
            listed = client.get("/v1/models")
            if listed.status_code != 200:
                raise UserError(f"{url}/v1/models answers {listed.status_code}: {listed.text[:200]}")
            card = listed.json()["data"][0]
            text = Path(json.__file__).read_text(encoding="utf-8")
            tokens = client.post("/tokenize", json={"model": card["id"], "prompt": text})
            if tokens.status_code != 200:
                raise UserError(
                    f"{url}/tokenize answers {tokens.status_code}; prompts of known length need that route, "
                    "which Shoestring's and vLLM's servers have"
                )
            answer = tokens.json()
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise UserError(f"no OpenAI-compatible server answers at {url}: {error}") from None
    context = card.get("max_model_len") or answer.get("max_model_len") or 2048
    return Target(url, card["id"], int(context), tuple(answer["tokens"]))


@contextmanager
def at_url(target: str, serve_options: str) -> Iterator[str]:
    """The URL of `target`: a running server's, or that of one started for a model with these options."""
    if target.startswith(("http://", "https://")):
        yield target.rstrip("/").removesuffix("/v1")
        return
    try:
        options = shlex.split(serve_options)
    except ValueError as error:
        raise UserError(f"--serve-options {serve_options!r} cannot be read: {error}") from None
    with own_server(target, options) as url:
        yield url


@contextmanager
def own_server(model: str, options: Sequence[str], *, wait_s: float = 600.0) -> Iterator[str]:
    """`shoestring serve MODEL` in a process of its own on a free port; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "shoestring", "serve", model, "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    said: list[str] = []
    try:
        _await_health(url, process, said, wait_s)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _await_health(url: str, process: subprocess.Popen[str], said: list[str], wait_s: float) -> None:
    assert process.stderr is not None
    # Read all the time: a full pipe would stop the server at its next log line.
    threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True).start()
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if process.poll() is not None:
            time.sleep(0.2)
            raise UserError(f"the server did not start: {' '.join(said[-3:]).strip() or 'it said nothing'}")
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise UserError(f"the server was not ready after {wait_s:.0f} s")


def run_load(
    url: str,
    plan: Sequence[Planned],
    slo: Slo,
    case: str,
    *,
    seed: int = 0,
    api_key: str | None = None,
    save: bool = False,
    about: dict[str, Any] | None = None,
    note: str = "",
) -> Summary:
    """Load a server, print the table, write a run folder with requests.jsonl and report.html.

    `save` also records a line in results/, whose config has `about` in it: what a client cannot ask a server.
    """
    target = look_at(url, api_key=api_key)
    plan, shortened = fit(plan, target.max_context)
    folder = new_run_folder("bench-serve")
    log = RunLog(folder)
    if shortened:
        log.say(f"{shortened} of {len(plan)} requests were shortened to the context of {target.max_context}")
    bodies = bodies_for(plan, target.pool, target.model, seed)
    with log.progress(len(plan), "requests") as bar:
        sent = asyncio.run(send_all(url, plan, bodies, api_key=api_key, done=lambda: bar.advance(1)))
    summary = summarize(sent, slo)
    shown = summary_table(summary, slo)
    shown.print()
    with (folder / "requests.jsonl").open("w") as f:
        f.writelines(json.dumps(as_line(s)) + "\n" for s in sent)
    config = {
        "model": target.model,
        "rate": round(mean_rate(plan), 3),
        "num_requests": len(plan),
        "num_shortened": shortened,
        "max_context": target.max_context,
        "prompt_tokens": round(statistics.mean(ask.num_prompt for ask in plan), 1),
        "new_tokens": round(statistics.mean(ask.num_new for ask in plan), 1),
        "seed": seed,
        "slo_ttft_s": slo.ttft_s,
        "slo_tpot_s": slo.tpot_s,
        **(about or {}),
    }
    log.save_config(config)
    report = write_report(folder, f"Load on {target.model}", [shown, *latency_curves(sent)], subtitle=case)
    log.say(f"every request is in {folder / 'requests.jsonl'}, the plots in {report}")
    log.close()
    for error in sorted({s.error for s in sent if s.error and s.status != 429})[:3]:
        print(f"failed: {error}", file=sys.stderr)
    if save:
        record_summary(case, summary, config, note)
    return summary


def as_line(sent: Sent) -> dict[str, Any]:
    return {**asdict(sent.planned), **{k: v for k, v in asdict(sent).items() if k not in ("planned", "text")}}


# -- telling -----------------------------------------------------------------------------------------


def summary_table(s: Summary, slo: Slo) -> Table:
    def ms(values: tuple[float, float, float]) -> list[float]:
        return [round(1000 * v, 1 if v < 1 else None) for v in values]

    note = (
        f"{s.num_whole} of {s.num_sent} answered whole in {s.seconds:.1f} s ({s.num_refused} refused with 429, "
        f"{s.num_failed} failed): {s.requests_per_s:.2f} requests/s, {s.tokens_per_s:.1f} tokens/s; "
        f"goodput {s.goodput:.2f} requests/s (TTFT <= {slo.ttft_s:g} s and TPOT <= {1000 * slo.tpot_s:g} ms)"
    )
    if s.client_lag_p99 > 0.05:
        note += f"; the CLIENT was up to {1000 * s.client_lag_p99:.0f} ms late (p99): use a faster one"
    rows = [["TTFT, ms", *ms(s.ttft)], ["TPOT, ms", *ms(s.tpot)], ["ITL, ms", *ms(s.itl)]]
    return Table("Load", ["", "p50", "p90", "p99"], rows, note)


def latency_curves(sent: Sequence[Sent]) -> list[Curves]:
    whole = [s for s in sent if s.whole]
    return [
        Curves(
            "Time to first token", [_share("TTFT", [s.ttft for s in whole])], "seconds", "share of requests"
        ),
        Curves(
            "Time per token",
            [
                _share("TPOT", [1000 * s.tpot for s in whole if s.num_tokens > 1]),
                _share("ITL", [1000 * gap for s in whole for gap in s.gaps]),
            ],
            "milliseconds",
            "share",
        ),
        Curves(
            "Time to first token over the run",
            [Series("TTFT", [s.planned.at for s in whole], [s.ttft for s in whole])],
            "arrival, seconds",
            "seconds",
        ),
    ]


def _share(name: str, values: Sequence[float], points: int = 200) -> Series:
    """The distribution: for each value, the share of values that are not larger."""
    ordered = sorted(values)
    if not ordered:
        return Series(name, [], [])
    ranks = sorted({round(i * (len(ordered) - 1) / (points - 1)) for i in range(points)})
    return Series(name, [ordered[r] for r in ranks], [(r + 1) / len(ordered) for r in ranks])


def record_summary(case: str, s: Summary, config: dict[str, Any], note: str = "") -> None:
    if not s.num_whole:
        raise UserError("no request was answered whole, so there is nothing to record")

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):  # percentiles of nothing are left out: JSON has no NaN
            return [significant(v) for v in value if not math.isnan(v)]
        return significant(value) if isinstance(value, float) else value

    record(
        bench="serve",
        case=case,
        metric="goodput",
        unit="requests/s",
        samples=[s.goodput],
        quality={name: plain(value) for name, value in asdict(s).items()},
        config=config,
        note=note,
    )


def table() -> str:
    lines = newest("serve")
    if not lines:
        return "Not measured yet."
    header = ["load", "tokens in, out (mean)", "requests/s asked", "answered whole", "tokens/s"]
    header += [f"{name} p50 / p90 / p99, ms" for name in ("TTFT", "TPOT", "ITL")]
    rows = [
        [
            n["case"],
            f"{n['config']['prompt_tokens']:.0f}, {n['config']['new_tokens']:.0f}",
            f"{n['config']['rate']:g}",
            f"{n['quality']['num_whole']} of {n['quality']['num_sent']}",
            f"{n['quality']['tokens_per_s']:.1f}",
            *(" / ".join(f"{1000 * v:,.0f}" for v in n["quality"][name]) for name in ("ttft", "tpot", "itl")),
            f"{n['value']:.2f} ({n['config']['slo_ttft_s']:g} s, {1000 * n['config']['slo_tpot_s']:g} ms)",
        ]
        for n in lines
    ]
    notes = "".join(f"\n- {n['case']}: {n['note']}" for n in lines if n["note"])
    header.append("goodput, requests/s (TTFT, TPOT promised)")
    return markdown(header, rows) + (f"\n{notes}" if notes else "") + provenance(lines)


# -- the rows of docs/server.md ----------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="arrivals and lengths; without it arrivals are Poisson")
    parser.add_argument("--rate", type=float, default=0.15)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="without a trace")
    parser.add_argument("--new-tokens", type=int, default=32, help="without a trace")
    parser.add_argument("--max-context", type=int, default=256, help="what is longer is shortened to it")
    parser.add_argument("--slo-ttft", type=float, default=2.0)
    parser.add_argument("--slo-tpot", type=float, default=0.2)
    parser.add_argument("--note", default="", help="what else a reader of the line should know")
    args = parser.parse_args()
    load, lengths = "Poisson", {"num_prompt": args.prompt_tokens, "num_new": args.new_tokens}
    plan = poisson(args.rate, args.seconds, **lengths)
    if args.trace:
        load, plan = args.trace.stem, from_trace(args.trace, args.seconds, rate=args.rate)
    slo = Slo(args.slo_ttft, args.slo_tpot)
    note = "; ".join(filter(None, (args.note, f"load average before it {os.getloadavg()[0]:.1f}")))
    options = ["--int8-activations", "--max-context", str(args.max_context)]
    with tempfile.TemporaryDirectory() as folder:
        weights = pack_smollm2(Path(folder) / MODEL)
        about = {"load": load, "weights": weights, "server": shlex.join(options)}
        with own_server(str(Path(folder) / MODEL), options) as url:
            run_load(url, plan, slo, f"{load}, {MODEL}", save=True, about=about, note=note)


def pack_smollm2(folder: Path) -> str:
    """Write the model in the fastest form that a CPU has here (bench/cpu_decode.py); returns what it is."""
    from shoestring.bench.cpu_decode import FORMATS  # torch, which a load on a URL does without
    from shoestring.formats import IntAsym, convert, pack, parse_format
    from shoestring.model import load_model, save_model
    from shoestring.model.gguf import need_smollm2
    from shoestring.model.untie import untie_head

    loaded = load_model(need_smollm2())
    model = loaded.model
    convert(model, [("*", parse_format(FORMATS[0]))])
    pack(model)
    untie_head(model, IntAsym(8, 0, symmetric=True))
    save_model(folder, model, loaded.tokenizer)
    return f"{FORMATS[0]}, head int8"


if __name__ == "__main__":
    as_command(main)
