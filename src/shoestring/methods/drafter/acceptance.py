"""How good a drafter is: accepted drafts, tokens per pass of the target, tokens per second, through the real engine.

    acceptance        accepted drafts as a share of the verified ones. A draft behind a rejected one is not verified, so
                      this estimates the chance alpha that a draft is right, whatever the draft length. (Accepted /
                      drafted, as engines often report, falls with the draft length.)
    accepted_length   tokens a request gains per pass of the target: 1 + accepted drafts; passes without drafts count.
                      A lookup that seldom finds anything may have a high acceptance and gain next to nothing.
    offered           share of those passes that had drafts
    at                acceptance of the first, second, ... draft
    tokens_per_s      of the whole run, prefill included

`measure_acceptance` uses a fixed draft length, so that drafters compare; `measure_rate` leaves it to the draft-length
controller, as a server does.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoestring.json_files import Fields, read_object
from shoestring.model import Decoder
from shoestring.report import Table
from shoestring.runlog import write_atomically
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.request import Draft, Request
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.verify import RuleName

COMPARED = ("drafter", "before training", "ngram")


class Tally:
    """Verified and accepted drafts by position, and passes."""

    def __init__(self) -> None:
        self.tested: list[int] = []  # by position: drafts whose predecessors were all accepted
        self.kept: list[int] = []
        self.num_offered = 0  # passes with drafts
        self.num_rounds = 0  # passes of the target for a request that was past its prompt, also those without drafts

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.num_offered += 1
        missing = num_drafted - len(self.tested)
        self.tested += [0] * missing
        self.kept += [0] * missing
        for place in range(min(num_drafted, num_accepted + 1)):
            self.tested[place] += 1
            self.kept[place] += place < num_accepted


class Counting(Drafter):
    """Wraps a drafter and counts, for requests of each temperature apart."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.tallies: defaultdict[float, Tally] = defaultdict(Tally)

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        for request in requests:
            self.tallies[request.sampling.temperature].num_rounds += 1
        return self.drafter.propose(requests, n)

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.drafter.observe(request, num_drafted, num_accepted)
        self.tallies[request.sampling.temperature].add(num_drafted, num_accepted)

    def release(self, request: Request) -> None:
        self.drafter.release(request)


@dataclass(frozen=True)
class Acceptance:
    acceptance: float
    accepted_length: float
    at: list[float] = field(default_factory=list)
    num_tokens: int = 0
    tokens_per_s: float = 0.0
    offered: float = 1.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def least_at(measured: Sequence[Sequence[float]]) -> list[float]:
    """The lowest acceptance of each place: what a controller that does not know the temperature may begin with."""
    return [min(place) for place in zip(*measured, strict=False)]


def measure_acceptance(
    target: Decoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    num_drafts: int = 4,
    max_tokens: int = 64,
    temperature: float = 0.0,
    max_requests: int = 8,
    engine: Engine | None = None,
) -> Acceptance:
    """Greedy under the coupled rule, or sampled under the token rule, which accepts with sum min(p, q). `engine`: an
    idle one of the target to reuse, with its graphs."""
    found = measure_together(
        target,
        drafter,
        prompts,
        (temperature,),
        num_drafts=num_drafts,
        max_tokens=max_tokens,
        max_requests=max_requests,
        engine=engine,
    )
    return found[temperature]


def measure_together(
    target: Decoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    num_drafts: int = 4,
    max_tokens: int = 64,
    max_requests: int = 8,
    engine: Engine | None = None,
) -> dict[float, Acceptance]:
    """By temperature, every prompt at each of them in one run: greedy text is the same under every rule. Their tokens
    per second are those of the run."""
    counting = Counting(drafter)
    rule: RuleName = "token" if any(temperatures) else "coupled"
    if engine is None:
        engine = engine_for(target, prompts, max_tokens, max_requests)
    engine.use_drafter(counting, num_drafts)
    engine.rule = rule
    before = engine.stats.num_new_tokens
    seconds = _run(engine, prompts, max_tokens, temperatures)
    num_new = engine.stats.num_new_tokens - before
    return {t: _acceptance(counting.tallies[t], num_new // len(temperatures), num_new / seconds) for t in temperatures}


def _acceptance(tally: Tally, num_tokens: int, tokens_per_s: float) -> Acceptance:
    tested, kept = sum(tally.tested), sum(tally.kept)
    rates = [k / t if t else 0.0 for k, t in zip(tally.kept, tally.tested, strict=True)]
    passes = max(1, tally.num_rounds)
    return Acceptance(
        kept / tested if tested else 0.0,
        1 + kept / passes,
        [round(r, 4) for r in rates],
        num_tokens,
        tokens_per_s,
        tally.num_offered / passes,
    )


def measure_rate(target: Decoder, drafter: Drafter | None, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
    """Greedy tokens per second, one request at a time, after a warm-up run in which the engine learns its step costs
    and the acceptance."""
    engine = engine_for(target, prompts, max_tokens, max_requests=1)
    engine.use_drafter(drafter, None)
    _run(engine, prompts, max_tokens, (0.0,))
    before = engine.stats.num_new_tokens
    seconds = _run(engine, prompts, max_tokens, (0.0,))
    return (engine.stats.num_new_tokens - before) / seconds


def engine_for(target: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int, max_requests: int) -> Engine:
    """An engine without a drafter, and without a prefix cache, which would make repeats cheaper."""
    context = min(target.spec.max_positions, max(map(len, prompts)) + max_tokens)
    return Engine(target, max_requests=max_requests, max_context=context, prefix_cache=False)


def _run(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, temperatures: Sequence[float]) -> float:
    """Seconds to complete all prompts. Ends of text are ignored, so that every run has the same length."""
    texts = [list(prompt) for _ in temperatures for prompt in prompts]
    samplings = [
        Sampling(temperature=t, seed=i, max_tokens=max_tokens, ignore_eos=True)
        for t in temperatures
        for i in range(len(prompts))
    ]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    engine.generate(texts, samplings)
    return time.perf_counter() - began


# -- as a stage of a run -------------------------------------------------------------------------------------


def compare_drafters(
    target: Decoder,
    make_drafter: Callable[[str], Drafter],
    prompts: Sequence[Sequence[int]],
    path: Path,
    *,
    num_drafts: int,
    max_tokens: int,
) -> list[dict[str, Any]]:
    """Rows for the trained drafter, an untrained one and n-gram lookup; written to `path`, or read where it exists."""
    if path.is_file():
        return Fields(read_object(path), str(path)).list("rows")
    rows = []
    for name in COMPARED:
        row: dict[str, Any] = {"drafter": name}
        for label, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
            found = measure_acceptance(target, make_drafter(name), prompts, num_drafts=num_drafts, **options)
            row[label] = found.to_json()
        rows.append(row)
    plain = measure_rate(target, None, prompts[:4], max_tokens)
    for row in rows:
        row["tokens_per_s"] = measure_rate(target, make_drafter(row["drafter"]), prompts[:4], max_tokens)
        row["speedup"] = row["tokens_per_s"] / plain
    content = {"num_prompts": len(prompts), "num_drafts": num_drafts, "tokens_per_s_alone": plain, "rows": rows}
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return rows


def acceptance_table(rows: list[dict[str, Any]], note: str) -> Table:
    header = ["drafter", "acceptance", "tokens per pass", "sampled: acceptance", "tokens per pass", "tokens/s"]
    cells = [
        [
            row["drafter"],
            round(row["greedy"]["acceptance"], 3),
            round(row["greedy"]["accepted_length"], 2),
            round(row["sampled"]["acceptance"], 3),
            round(row["sampled"]["accepted_length"], 2),
            round(row["tokens_per_s"], 1),
            round(row["speedup"], 2),
        ]
        for row in rows
    ]
    return Table("Acceptance", [*header, "times plain"], cells, note)
