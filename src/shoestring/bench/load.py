"""When requests arrive and how long they are: a plan made before the first one is sent.

    poisson     a rate per second, one length of prompt and answer for all
    from_trace  the arrivals and lengths of a recorded trace (CSV with columns TIMESTAMP, ContextTokens,
                GeneratedTokens, as the Azure LLM inference traces have them), sped up or slowed down

Both are open loops: a request is sent when its time has come, whether or not earlier ones were answered. A
client that waits for answers before it asks again cannot overload a server, and hides its queue.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoestring.errors import UserError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


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
    """The first arrivals of a trace; `rate` stretches or squeezes its time so that this many come per second."""
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
        raise UserError(f"{rate:g} is no rate of requests per second; give a number above 0")
    if not 0 < seconds < math.inf:
        raise UserError(f"requests cannot be sent for {seconds:g} seconds; give a number above 0")


def fit(plan: Sequence[Planned], max_context: int) -> tuple[list[Planned], int]:
    """Shorten what does not fit the model's context; also how many had to be shortened.

    The prompt is shortened first, to what the answer leaves; an answer never takes more than half.
    """
    fitted = []
    for ask in plan:
        new = min(ask.num_new, max(1, max_context // 2))
        fitted.append(replace(ask, num_prompt=max(1, min(ask.num_prompt, max_context - new)), num_new=new))
    return fitted, sum(a != b for a, b in zip(fitted, plan, strict=True))


def bodies_for(
    plan: Sequence[Planned], pool: Sequence[int], model: str, seed: int = 0
) -> list[dict[str, Any]]:
    noise = random.Random(seed)
    return [
        {
            "model": model,
            "prompt": noise.choices(pool, k=ask.num_prompt),
            "max_tokens": ask.num_new,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for ask in plan
    ]


def mean_rate(plan: Sequence[Planned]) -> float:
    gaps = [b.at - a.at for a, b in itertools.pairwise(plan)]
    return 1 / statistics.mean(gaps) if gaps and sum(gaps) > 0 else 0.0


def _read_trace(path: Path) -> Iterator[Planned]:
    try:
        with path.open(newline="", encoding="utf-8") as f:
            reader = csv.DictReader(f)
            missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
            if missing:
                raise UserError(
                    f"the trace {path} has no column {missing[0]}; it must have {', '.join(COLUMNS)}"
                )
            for number, row in enumerate(reader, 2):
                try:
                    yield Planned(
                        _seconds(row[COLUMNS[0]]), int(row[COLUMNS[1]]), max(1, int(row[COLUMNS[2]]))
                    )
                except (TypeError, ValueError):
                    raise UserError(f"line {number} of {path} is not a time and two numbers: {row}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the trace {path}: {error}") from None


def _seconds(text: str) -> float:
    """A number of seconds, or a date with time; Python reads at most six digits after the second."""
    try:
        return float(text)
    except ValueError:
        whole, _, fraction = text.strip().partition(".")
        return datetime.datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
