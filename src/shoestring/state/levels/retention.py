"""Which checkpoints on disk stay: the last few, every so many steps, and those with the best validation loss.

No torch here: the agent deletes too.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoestring.state.checkpoint_files import GONE, HOST_MANIFEST, MANIFEST, hidden


@dataclass(frozen=True)
class Keep:
    last: int = 2
    every: int = 0  # also every checkpoint whose step is a multiple of this; 0 is off
    best: int = 0  # also so many with the lowest validation loss

    def kept(self, steps: Iterable[int], losses: Mapping[int, float]) -> set[int]:
        """The steps that stay. The newest always does."""
        ordered = sorted(set(steps))
        found = set(ordered[-max(self.last, 1) :])
        if self.every:
            found |= {s for s in ordered if s % self.every == 0}
        if self.best:
            spans = zip([-1, *ordered], ordered, strict=False)
            measured = {s: loss for before, s in spans if (loss := _loss_between(before, s, losses)) is not None}
            found |= set(sorted(measured, key=lambda s: (measured[s], -s))[: self.best])
        return found


def _loss_between(before: int, step: int, losses: Mapping[int, float]) -> float | None:
    """The last validation loss since the checkpoint before; None where it was not measured since then."""
    since = [s for s in losses if before < s <= step]
    return losses[max(since)] if since else None


def prune_steps(folder: Path, keep: Keep, metrics: Path, also: int | None = None) -> list[Path]:
    """Delete the complete checkpoints in a folder that are not to be kept; the newest, and the step `also`, stay."""
    complete = {
        int(p.name[5:]): p
        for p in folder.glob("step-*")
        if p.name[5:].isdigit() and ((p / MANIFEST).is_file() or (p / HOST_MANIFEST).is_file())
    }
    kept = keep.kept(complete, validation_losses(metrics) if keep.best else {})
    doomed = [p for step, p in sorted(complete.items()) if step not in kept and step != also]
    for path in doomed:
        # Renamed first: a half deleted checkpoint must not look like a checkpoint.
        gone = hidden(path, GONE)
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(OSError):  # the trainer may have been faster
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    return doomed


def validation_losses(metrics: Path) -> dict[int, float]:
    losses: dict[int, float] = {}
    with contextlib.suppress(OSError):
        for line in metrics.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                if row.get("val_loss") is not None:
                    losses[int(row["step"])] = float(row["val_loss"])
    return losses
