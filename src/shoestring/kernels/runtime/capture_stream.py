"""One stream per GPU for captures of CUDA graphs and for the warm-up before them.

torch hands out its 32 streams in turn, and every stream that runs a matrix product gets its own workspace, 32 MiB on a
Hopper GPU, which is never freed. A new stream per capture added up to a gigabyte.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def capture_stream(device: int) -> Any:
    return torch.cuda.Stream(device)


@contextmanager
def on_capture_stream() -> Iterator[None]:
    """Run on the capture stream of the current GPU, ordered after what was launched before and before what follows."""
    current, capture = torch.cuda.current_stream(), capture_stream(torch.cuda.current_device())
    capture.wait_stream(current)
    with torch.cuda.stream(capture):
        yield
    current.wait_stream(capture)
