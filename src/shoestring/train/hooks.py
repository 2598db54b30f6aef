"""The two points where a method may act in a training step.

before_step runs after the gradients are summed and clipped and before the optimizer (masked decay belongs
here: before the clip it would rescale its own strength); after_step runs when the weights have moved (mask
refresh, a Format switch, the outer step of local SGD). Hooks run in list order, see `run` and nothing else,
and their state belongs to every checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoestring.train.trainer import Run


class Hook:
    """Override what you need."""

    def before_step(self, run: Run) -> None: ...

    def after_step(self, run: Run) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
