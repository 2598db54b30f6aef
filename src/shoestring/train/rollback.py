"""Going back after a bad step: which steps' data are skipped, and when a loss counts as a spike.

A step whose gradient is NaN or infinite, or a loss far above the recent ones, raises BadStepError (`LossWatch` here,
GradientWatch in gradients.py). With rollback=auto the trainer discards the versions that the bad step is part of,
resumes the newest older one, and leaves out the data of the steps from there to the bad one: the same data would lead
to the same step again. `SkippedSteps` remembers what is left out and belongs to the checkpoint, so that a run resumed
later sees the same data.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from typing import Any, Literal

from shoestring.errors import UserError

RollbackMode = Literal["off", "ask", "auto"]
SKIPPED = "private@skipped"  # its name among the parts: a checkpoint without it fits, too
MOST_ROLLBACKS = 3  # from one version; then the data is not the reason
RECENT, SPIKE_STDS, SPIKE_FACTOR = 20, 6.0, 1.3


class BadStepError(UserError):
    """`step`: the first whose state must not be used; `until`: the last whose data may be the reason."""

    def __init__(self, message: str, step: int, until: int | None = None) -> None:
        super().__init__(message)
        self.step, self.until = step, step if until is None else until


class LossWatch:
    """Compares every logged loss with the last RECENT ones."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._last_step = 0

    def see(self, step: int, loss: float) -> None:
        """BadStepError where the loss is a spike; the steps since the line before are to blame."""
        if len(self._losses) == RECENT:
            mean, deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
            if loss > max(mean + SPIKE_STDS * deviation, SPIKE_FACTOR * mean):
                raise BadStepError(
                    f"step {step}: the loss is {loss:.4g} after {mean:.4g} on average, the run stops here",
                    self._last_step + 1,
                    step,
                )
        self._losses.append(loss)
        self._last_step = step


class SkippedSteps:
    """Maps a step to the step whose data it sees."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, int]] = []  # (from this step on, so many are left out)
        self.bad: int | None = None  # the run is going back because of this step
        self._next_data = 0  # then: the first data that is not left out
        self._times: Counter[int] = Counter()  # of this process: an older version does not know of later windows

    def data_step(self, step: int) -> int:
        return step + sum(count for at, count in self.windows if step >= at)

    def go_back(self, error: BadStepError) -> None:
        """Before a version is loaded, which may not know of windows that the bad step had."""
        self.bad, self._next_data = error.step, self.data_step(error.until - 1) + 1

    def begin(self, resumed: int) -> None:
        """The run is at `resumed` finished steps: after a bad one, the data up to it is left out from now on."""
        bad, self.bad = self.bad, None
        if bad is None:
            return
        assert bad > resumed, (bad, resumed)
        self._times[resumed] += 1
        if self._times[resumed] > MOST_ROLLBACKS:
            raise UserError(
                f"the run went back to step {resumed} {MOST_ROLLBACKS} times: the data is not the reason; go on with a "
                "lower lr"
            )
        self.windows.append((resumed, self._next_data - self.data_step(resumed)))

    def state_dict(self) -> dict[str, Any]:
        return {"windows": [list(w) for w in self.windows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.windows = [(int(at), int(count)) for at, count in state["windows"]]
