"""Load on a server: `shoestring bench serve MODEL_OR_URL`.

Sends planned requests to any server with OpenAI's /v1/completions (a URL), or to one of ours started for the purpose (a
model). The plan is made before the first request is sent:

    poisson     a rate per second, one length of prompt and answer for all
    from_trace  the arrivals and lengths of a recorded trace (CSV with columns TIMESTAMP, ContextTokens,
                GeneratedTokens, as in the Azure LLM inference traces), sped up or slowed down

Both are open loops: a request is sent at its time, whether or not earlier ones were answered. (A client that waits for
answers cannot overload a server, and hides its queue.) Reported are

    TTFT     time to first token: from the planned arrival, so that a slow client cannot hide it
    TPOT     time per output token after the first, one value per request
    ITL      time between two pieces of one answer
    goodput  requests per second that met both targets of the SLO (TTFT and TPOT)

Prompts are token ids drawn at random from a real text, so that no two of a plan share a cached prefix, and every answer
runs to its planned length. benchmarks/serve.py measures the rows of docs/results/serving.md with this.
"""

from __future__ import annotations

import asyncio
import csv
import datetime
import itertools
import json
import math
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shoestring.errors import UserError
from shoestring.evals.result_line import result_line, significant
from shoestring.report import Curves, Series, Table, write_report
from shoestring.runlog import RunLog, append_jsonl, new_run_folder

try:
    import httpx
except ModuleNotFoundError as error:
    raise UserError(
        "loading a server needs the package httpx, which is not installed; pip install 'shoestring[bench]'"
    ) from error

TIMEOUT_S = 600.0  # of one request
START_S = 600.0  # until a server that we start is ready
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


# -- the plan ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    at: float  # seconds after the start
    num_prompt: int
    num_new: int


def poisson(rate: float, seconds: float, *, num_prompt: int, num_new: int, seed: int = 0) -> list[Planned]:
    """Independent arrivals: the gaps between them are exponential with mean 1/rate."""
    _check(rate, seconds)
    noise = random.Random(seed)
    ats = itertools.accumulate(noise.expovariate(rate) for _ in itertools.count())
    return [Planned(at, num_prompt, num_new) for at in itertools.takewhile(lambda at: at < seconds, ats)]


def from_trace(path: Path, seconds: float, *, rate: float | None = None) -> list[Planned]:
    """The first arrivals of a trace; `rate` scales its time to this many per second."""
    _check(1.0 if rate is None else rate, seconds)
    arrivals = list(_read_trace(path))
    if not arrivals:
        raise UserError(f"the trace {path} has no request in it; its columns must be {', '.join(COLUMNS)}")
    start = arrivals[0].at
    arrivals = [replace(a, at=a.at - start) for a in arrivals]
    length = arrivals[-1].at
    speed = 1.0 if rate is None or length <= 0 else rate * length / len(arrivals)
    return [replace(a, at=a.at / speed) for a in arrivals if a.at / speed < seconds]


def _check(rate: float, seconds: float) -> None:
    if not 0 < rate < math.inf:
        raise UserError(f"{rate:g} is not a rate in requests per second; give a number above 0")
    if not 0 < seconds < math.inf:
        raise UserError(f"requests cannot be sent for {seconds:g} seconds; give a number above 0")


def fit(plan: Sequence[Planned], max_context: int) -> tuple[list[Planned], int]:
    """Shorten requests that do not fit the model's context; also returns how many.

    An answer is cut to half of the context, a prompt to what the answer leaves.
    """
    fitted = []
    for ask in plan:
        new = min(ask.num_new, max(1, max_context // 2))
        fitted.append(replace(ask, num_prompt=max(1, min(ask.num_prompt, max_context - new)), num_new=new))
    return fitted, sum(a != b for a, b in zip(fitted, plan, strict=True))


def mean_rate(plan: Sequence[Planned]) -> float:
    gaps = [b.at - a.at for a, b in itertools.pairwise(plan)]
    return 1 / statistics.mean(gaps) if gaps and sum(gaps) > 0 else 0.0


def _read_trace(path: Path) -> Iterator[Planned]:
    try:
        with path.open(newline="", encoding="utf-8") as f:
            reader = csv.DictReader(f)
            missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"the trace {path} has no column {missing[0]}; it must have {', '.join(COLUMNS)}")
            for number, row in enumerate(reader, 2):
                try:
                    yield Planned(_seconds(row[COLUMNS[0]]), int(row[COLUMNS[1]]), max(1, int(row[COLUMNS[2]])))
                except (TypeError, ValueError):
                    raise UserError(f"line {number} of {path} is not a time and two numbers: {row}") from None
    except OSError as error:
        raise UserError(f"cannot read the trace {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"the trace {path} is not UTF-8 text; it must be a CSV with {', '.join(COLUMNS)}") from None


def _seconds(text: str) -> float:
    """A number of seconds, or a date with time; Python reads at most six digits after the second."""
    try:
        return float(text)
    except ValueError:
        whole, _, fraction = text.strip().partition(".")
        return datetime.datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")


# -- results ---------------------------------------------------------------------------------------------


@dataclass
class Sent:
    """One request and its answer; times are seconds after the start."""

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
                raise UserError(f"{name}={value} is not a target; give seconds above 0")

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
            ended = finished = False
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
                last = any(choice.get("finish_reason") for choice in chunk["choices"])
                finished = finished or last
                # The last piece may have no text, but a user notices that the answer has ended.
                if text or last:
                    sent.pieces.append(now())
                    sent.text += text
                if chunk.get("usage"):
                    sent.num_tokens = chunk["usage"]["completion_tokens"]
            # `transformers serve` sends no [DONE], but why an answer ended, and its tokens.
            if not ended and not (finished and sent.num_tokens):
                sent.error = "the stream broke off before [DONE]"
    except (httpx.HTTPError, ValueError, KeyError) as error:
        sent.error = f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Target:
    url: str
    model: str
    max_context: int
    pool: tuple[int, ...]  # token ids of a real text
    # Of a server that knows the common fields only: prompts are text, and an answer may end early.
    decode: Callable[[Sequence[int]], str] | None = None


def bodies_for(plan: Sequence[Planned], target: Target, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of the planned lengths (as text: about) that share no beginning, and answers that run to theirs, where
    the server can be asked for that. Plans of one server need a seed each, or its prefix cache helps."""
    noise = random.Random(seed)
    asked: dict[str, Any] = {"model": target.model, "temperature": 0, "stream": True}
    if target.decode is None:
        asked |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    return [asked | {"prompt": _prompt(ask, target, noise), "max_tokens": ask.num_new} for ask in plan]


def _prompt(ask: Planned, target: Target, noise: random.Random) -> list[int] | str:
    if target.decode is None:
        return noise.choices(target.pool, k=ask.num_prompt)
    # Text that was in one piece has about as many tokens when it is read again; tokens drawn one by one have fewer. Two
    # may begin at the same place, so a number stands in front.
    first = noise.randrange(len(target.pool))
    piece = itertools.islice(itertools.cycle(target.pool), first, first + max(1, ask.num_prompt - 4))
    return f"{noise.randrange(10**6):06d} {target.decode(list(piece))}"


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
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
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
def own_server(model: str, options: Sequence[str]) -> Iterator[str]:
    """`shoestring serve MODEL` in a process of its own on a free port; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "shoestring", "serve", model, "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    said: list[str] = []
    try:
        _await_health(url, process, said)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _await_health(url: str, process: subprocess.Popen[str], said: list[str]) -> None:
    assert process.stderr is not None
    # Drained all the time: a full pipe would block the server.
    threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True).start()
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            time.sleep(0.2)
            raise UserError(f"the server did not start: {' '.join(said[-3:]).strip() or 'it said nothing'}")
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise UserError(f"the server was not ready after {START_S:.0f} s")


def run_load(
    server: str | Target,
    plan: Sequence[Planned],
    slo: Slo,
    case: str,
    *,
    seed: int = 0,
    api_key: str | None = None,
    save: Path | None = None,
    about: dict[str, Any] | None = None,
    note: str = "",
) -> Summary:
    """Load a server, print the table, write a run folder with requests.jsonl and report.html.

    `server` is its URL, or what is known of one that cannot be asked (`look_at`). `save` is a file to which one result
    line is appended; `about` is added to its config.
    """
    check_save(save)
    target = look_at(server, api_key=api_key) if isinstance(server, str) else server
    plan, shortened = fit(plan, target.max_context)
    folder = new_run_folder("bench-serve")
    log = RunLog(folder)
    if shortened:
        log.say(f"{shortened} of {len(plan)} requests were shortened to the context of {target.max_context}")
    bodies = bodies_for(plan, target, seed)
    with log.progress(len(plan), "requests") as bar:
        sent = asyncio.run(send_all(target.url, plan, bodies, api_key=api_key, done=lambda: bar.advance(1)))
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
    if save is not None:
        append_jsonl(save, summary_line(case, summary, config, note))
        print(f"the result line is in {save}")
    return summary


def check_save(path: Path | None) -> None:
    """UserError for a file that cannot be written, before the load begins."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"--save {path} is a folder; give a file, such as {path / 'serve.jsonl'}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--save {path}: there is no folder {path.parent}; make it, or give another file")


def as_line(sent: Sent) -> dict[str, Any]:
    return {**asdict(sent.planned), **{k: v for k, v in asdict(sent).items() if k not in ("planned", "text")}}


# -- reporting -----------------------------------------------------------------------------------------


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
        Curves("Time to first token", [_share("TTFT", [s.ttft for s in whole])], "seconds", "share of requests"),
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


def _share(name: str, values: Sequence[float]) -> Series:
    """The cumulative distribution, at 200 points at most: for each value, the share of values that are not larger."""
    ordered = sorted(values)
    if not ordered:
        return Series(name, [], [])
    ranks = sorted({round(i * (len(ordered) - 1) / 199) for i in range(200)})
    return Series(name, [ordered[r] for r in ranks], [(r + 1) / len(ordered) for r in ranks])


def summary_line(case: str, s: Summary, config: dict[str, Any], note: str = "") -> dict[str, Any]:
    """The summary in the schema of results/serve.jsonl."""
    if not s.num_whole:
        raise UserError("no request was answered whole, so there is nothing to record")

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):  # percentiles of nothing are left out: JSON has no NaN
            return [significant(v) for v in value if not math.isnan(v)]
        return significant(value) if isinstance(value, float) else value

    return result_line(
        bench="serve",
        case=case,
        metric="goodput",
        unit="requests/s",
        samples=[s.goodput],
        quality={name: plain(value) for name, value in asdict(s).items()},
        config=config,
        note=note,
    )
