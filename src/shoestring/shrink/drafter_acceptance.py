"""How good a drafter is: guesses kept, tokens per pass of the target, tokens per second, through the real engine.

    acceptance        of the guesses that were looked at, the share that was kept. A guess behind a wrong one is never
                      looked at, so this estimates the chance alpha that a guess is right, whatever the number of
                      guesses per step. (Kept / drafted, as engines often report, falls with that number.)
    accepted_length   tokens a request gains per pass of the target: 1 + kept guesses
    at                the same chance for the first, second, ... guess
    tokens_per_s      of the whole run, prompts read included

`measure_acceptance` uses a fixed number of guesses, so that drafters compare; `measure_rate` leaves the number to
the draft-length controller, as a server does.
"""

from __future__ import annotations

import json
import time
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


class Counting(Drafter):
    """A drafter that keeps count of how another one's guesses fare, place by place."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.tested: list[int] = []  # by place: guesses whose predecessors were all right
        self.kept: list[int] = []
        self.num_rounds = 0  # passes of the target for a request that was past its prompt

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        return self.drafter.propose(requests, n)

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.drafter.observe(request, num_drafted, num_accepted)
        if len(request.tokens) - num_accepted - 1 == request.num_prompt:
            return  # the pass that read the prompt's end: nothing could be guessed yet
        self.num_rounds += 1
        missing = num_drafted - len(self.tested)
        self.tested += [0] * missing
        self.kept += [0] * missing
        for place in range(min(num_drafted, num_accepted + 1)):
            self.tested[place] += 1
            self.kept[place] += place < num_accepted

    def release(self, request: Request) -> None:
        self.drafter.release(request)


@dataclass(frozen=True)
class Acceptance:
    acceptance: float
    accepted_length: float
    at: list[float] = field(default_factory=list)
    num_tokens: int = 0
    tokens_per_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
    """Greedy, or drawn at a temperature and judged by the token rule, whose chance is sum min(p, q). `engine`: one of
    the target's, made for such prompts, that has no requests now; its graphs are there already."""
    counting = Counting(drafter)
    rule: RuleName = "coupled" if temperature == 0 else "token"
    if engine is None:
        engine = engine_for(target, prompts, max_tokens, max_requests)
    engine.use_drafter(counting, num_drafts)
    engine.rule = rule
    before = engine.stats.num_new_tokens
    seconds = _run(engine, prompts, max_tokens, temperature)
    num_new = engine.stats.num_new_tokens - before
    tested, kept = sum(counting.tested), sum(counting.kept)
    rates = [k / t if t else 0.0 for k, t in zip(counting.kept, counting.tested, strict=True)]
    return Acceptance(
        kept / tested if tested else 0.0,
        1 + kept / max(1, counting.num_rounds),
        [round(r, 4) for r in rates],
        num_new,
        num_new / seconds,
    )


def measure_rate(
    target: Decoder,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    max_requests: int = 1,
    num_drafts: int | None = None,
    temperature: float = 0.0,
    repeats: int = 1,
    warm: bool = True,
) -> list[float]:
    """Tokens per second, per repeat, under the coupled rule; `num_drafts` None: chosen by the engine as it goes.

    One engine for all: what it learns (step costs, acceptance) stays, as in a server. `warm` runs once unmeasured.
    """
    engine = engine_for(target, prompts, max_tokens, max_requests)
    engine.use_drafter(drafter, num_drafts)
    if warm:
        _run(engine, prompts, max_tokens, temperature)
    rates = []
    for _ in range(repeats):
        before = engine.stats.num_new_tokens
        seconds = _run(engine, prompts, max_tokens, temperature)
        rates.append((engine.stats.num_new_tokens - before) / seconds)
    return rates


def engine_for(target: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int, max_requests: int) -> Engine:
    """Without a drafter. Without the prefix cache, so that a repeat does the work of the first time."""
    context = min(target.spec.max_positions, max(map(len, prompts)) + max_tokens)
    return Engine(target, max_requests=max_requests, max_context=context, prefix_cache=False)


def _run(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float) -> float:
    """Seconds to complete all prompts. Texts go on behind their end, so that every run has the same length."""
    samplings = [
        Sampling(temperature=temperature, seed=i, max_tokens=max_tokens, ignore_eos=True) for i in range(len(prompts))
    ]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    engine.generate([list(p) for p in prompts], samplings)
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
    """Rows of the trained drafter, an untrained one and n-gram lookup, kept in `path`; read where that is there."""
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
    plain = measure_rate(target, None, prompts[:4], max_tokens=max_tokens)[0]
    for row in rows:
        drafter = make_drafter(row["drafter"])
        row["tokens_per_s"] = measure_rate(target, drafter, prompts[:4], max_tokens=max_tokens)[0]
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
