"""events.jsonl of a run's checkpoints: every start, every resumption and its source, the end; and the failure rates.

A resumption that no clean end came before was a failure; its source says which level answered for it. Pure but for two
small functions that read and append lines. No torch here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shoestring.runlog import append_jsonl, read_jsonl
from shoestring.state.levels.policy import LEVELS, Rate, prior_rates

EVENTS = "events.jsonl"
LONGEST_LIFE_S = 90 * 86400.0  # more is a clock that jumped


@dataclass(frozen=True)
class Event:
    kind: str  # started, resumed, stopped, finished
    time: float
    step: int
    life: str
    source: str | None = None  # of a resumption: memory, peer memory, disk, remote


def read_events(folder: Path) -> list[Event]:
    """Rows that are no events are left out: the file only informs."""
    rows = read_jsonl(folder / EVENTS)
    fields = {"kind", "time", "step", "life", "source"}
    return [
        Event(**row)
        for row in rows
        if set(row) == fields and isinstance(row["time"], int | float) and isinstance(row["kind"], str)
    ]


def append_event(folder: Path, event: Event) -> None:
    """Where it can be written: a run whose disk is full goes on from memory."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        append_jsonl(folder / EVENTS, asdict(event))


def level_of(source: str | None) -> str:
    """The level that answered: the farthest of those a mixed restore names."""
    words = {"memory": "memory", "peer memory": "peer", "disk": "disk", "disk of another host": "disk"}
    named = [words.get(part, part) for part in (source or "disk").split(" and ")]
    return max(named, key=lambda one: LEVELS.index(one) if one in LEVELS else 0)


def rates_from_events(
    events: Sequence[Event], levels: Sequence[str], num_gpus: int, mttf_hours: float | None, now: float
) -> dict[str, Rate]:
    """The posterior of every level's failure rate after what this run has seen."""
    rates = prior_rates(levels, num_gpus, mttf_hours)
    observed = 0.0
    counts = dict.fromkeys(levels, 0)
    ends = [*(e.time for e in events[1:]), now]  # of each life: the next event, or now
    for event, end in zip(events, ends, strict=False):
        if event.kind in ("started", "resumed"):
            observed += min(max(end - event.time, 0.0), LONGEST_LIFE_S)
    for before, event in itertools.pairwise(events):
        if event.kind in ("started", "resumed") and before.kind in ("started", "resumed"):
            level = level_of(event.source) if event.kind == "resumed" else levels[-1]
            taker = next((one for one in LEVELS[LEVELS.index(level) :] if one in counts), levels[-1])
            counts[taker] += 1
    return {level: rate.after(observed, counts[level]) for level, rate in rates.items()}
