"""A function that is stopped by Ctrl-C in the middle of its work."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any


def dying(limit: int, action: Callable[..., Any]) -> Callable[..., Any]:
    """`action` for so many calls; the next one is Ctrl-C."""
    calls = itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) > limit:
            raise KeyboardInterrupt
        return action(*args, **kwargs)

    return call
