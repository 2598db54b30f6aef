"""What a fuzz case may end in, and the table of a whole campaign."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

from benchmarks.results import record

Outcome = Literal["ok", "clean", "traceback", "hang", "abort"]
# ok: accepted, and the result is what an undamaged input would give or a legal one.
# clean: refused with an error that a user can read, and nothing was written.
# traceback: an exception that is no ShoestringError, or an HTTP status of 500.
# hang: not done in the case's time.
# abort: ended by a signal, or by the operating system for its memory.
BAD: tuple[Outcome, ...] = ("traceback", "hang", "abort")
SEED = int(os.environ.get("SHOESTRING_FUZZ_SEED", "4"))  # of the campaigns: another one draws other cases
_SIGNALS = {-int(signal.SIGKILL), -int(signal.SIGSEGV), -int(signal.SIGBUS), -int(signal.SIGABRT), -int(signal.SIGILL)}


def lab_seeds(num: int) -> range:
    """Seeds of the cases of a campaign: behind those of the suite, and others for each seed of the campaigns."""
    first = 1000 + 10_000 * SEED
    return range(first, first + num)


@dataclass
class Tally:
    """The outcomes of one kind of case. `details` holds one line for every case that ended badly."""

    kind: str
    counts: Counter[Outcome] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    largest_gap_s: float = 0.0  # between two tokens of a well-behaved stream, or before its first

    def add(self, outcome: Outcome, case: str, told: str = "") -> None:
        self.counts[outcome] += 1
        if outcome in BAD:
            self.details.append(f"{outcome}: {case}: {told[-600:]}")

    @property
    def cases(self) -> int:
        return sum(self.counts.values())

    def check(self) -> None:
        """Fail with every bad case. A campaign that tried nothing fails too."""
        assert self.cases, f"{self.kind}: no case was tried"
        assert not self.details, f"{self.kind}: {len(self.details)} of {self.cases} ended badly\n" + "\n".join(
            self.details[:20]
        )

    def save(self, seed: int = SEED) -> None:
        """One line per column of the table in results/fuzz.jsonl."""
        values: dict[str, float] = {name: self.counts[name] for name in get_args(Outcome)}
        values |= {"cases": self.cases, "largest_gap_s": self.largest_gap_s}
        for metric, value in values.items():
            unit = "s" if metric.endswith("_s") else "cases"
            record(bench="fuzz", case=self.kind, metric=metric, samples=[value], unit=unit, config={"seed": seed})


def outcome_of_process(returncode: int | None, stderr: str) -> Outcome:
    """The outcome of a command: None is a command that was stopped at its time limit."""
    if returncode is None:
        return "hang"
    if returncode in _SIGNALS or returncode > 128:
        return "abort"
    if "Traceback (most recent call last)" in stderr or "is a bug in" in stderr:
        return "traceback"
    return "ok" if returncode == 0 else "clean"
