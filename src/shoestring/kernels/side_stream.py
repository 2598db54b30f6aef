"""Work beside the current stream, always on the same other one: what a capture needs to run before it.

torch gives out its 32 streams in turn, and every stream that a matrix product runs on gets a workspace of its own,
32 MiB on a Hopper GPU, which is kept for good. A new stream for every capture had a gigabyte of these in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def side_stream(device: int) -> Any:
    return torch.cuda.Stream(device)


@contextmanager
def beside() -> Iterator[None]:
    """Inside, work goes to the side stream of the current GPU, behind what was launched before and before what comes
    after."""
    current, side = torch.cuda.current_stream(), side_stream(torch.cuda.current_device())
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)
