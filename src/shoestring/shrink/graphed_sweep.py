"""Column-by-column sweeps (GPTQ, SparseGPT) as CUDA graphs.

A sweep over a 1536-wide layer launches some 20,000 tiny kernels, and most of the time passes between them. The layers
of a model have few shapes: the first layer of a shape runs eagerly and is captured, the others replay the graph with
their own numbers. A graph is used only if it reproduces the eager result bit for bit.

On a CPU nothing is captured, and columns are processed by one thread (`one_thread`): the work between two barriers is
microseconds, and where another process has one of the cores each barrier waits for the scheduler. Work that falls into
pieces is done a piece a thread (`piece_by_piece`), for the same reason: threads then wait for each other once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoestring.kernels.runtime.capture_stream import on_capture_stream

# Graph, inputs and outputs by shape and settings; None: the capture failed.
_GRAPHS: dict[Hashable, tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]] | None] = {}
_LIMIT = 12
Found = TypeVar("Found")


@contextmanager
def one_thread() -> Iterator[None]:
    """For many small operations on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def piece_by_piece(run: Callable[[Tensor], Found], pieces: Sequence[Tensor]) -> list[Found]:
    """[run(piece), ...] without gradients. On a CPU every piece is computed by one thread, so that results do not
    depend on how many there are."""

    def run_piece(piece: Tensor) -> Found:
        with torch.no_grad():  # not inherited by threads
            return run(piece)

    if pieces[0].is_cuda:
        return [run_piece(piece) for piece in pieces]
    threads = min(torch.get_num_threads(), len(pieces))
    with one_thread():  # which new threads take over
        if threads == 1:
            return [run_piece(piece) for piece in pieces]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(run_piece, pieces))


def sweep(key: Hashable, run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """run(*inputs), which must be a pure function of them and of `key`."""
    if not inputs[0].is_cuda:
        return run(*inputs)
    key = (key, inputs[0].device, tuple((t.shape, t.dtype) for t in inputs))
    if key not in _GRAPHS:
        while len(_GRAPHS) >= _LIMIT:
            del _GRAPHS[next(iter(_GRAPHS))]
        found, _GRAPHS[key] = _capture(run, inputs)
        return found
    entry = _GRAPHS[key]
    if entry is None:
        return run(*inputs)
    graph, held, out = entry
    for old, new in zip(held, inputs, strict=True):
        old.copy_(new)
    graph.replay()
    return tuple(t.clone() for t in out)


def _capture(
    run: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]] | None]:
    """The result for these inputs, and the graph or None."""
    held = tuple(t.clone() for t in inputs)
    with on_capture_stream():
        found = tuple(t.clone() for t in run(*held))
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(*held)
        graph.replay()
        if all(torch.equal(a, b) for a, b in zip(out, found, strict=True)):
            return found, (graph, held, out)
        reason = "its result differs"
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
    warnings.warn(f"column sweeps run without a CUDA graph: {reason}", stacklevel=4)
    return found, None
