"""Warm-up: what a request should not wait for is made before the first one.

Capturing a graph takes tens of milliseconds, the time of many steps. A controller that changes the number of drafts,
and requests that end one by one, would meet new shapes for a long time, and each capture would look like a slow step.
So numbers of requests and of drafts are padded to few sizes (graphs.py, draft_length.py), and all of those that an
engine can meet are captured here, for greedy and for drawn tokens. The KV cache gets its memory first, because graphs
hold its address. Passes outside of graphs (prompts that a drafter reads, steps in which few requests have drafts) have
kernels in a few variants, which are compiled here (`Runner.warm_up_kernels`): a compilation takes the time of a hundred
steps. Matrix products load a kernel for many numbers of rows, the time of ten steps each: rows are padded to few
numbers (`place_rows`), which are all met here.

Left out, and made when first needed: graphs of cut sampling (top_k, top_p, min_p), graphs again when the KV cache
outgrows what was reserved, cuDNN's plans for long prompts (prompt_attention.py), and prompts that the target reads in
steps too large for a graph. Such steps are not taken for slow ones (`Engine.num_graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence

from shoestring.model.skip import SkipSet
from shoestring.serve.engine.capacity import bytes_per_position, free_bytes
from shoestring.serve.engine.graphs import SamplingKind
from shoestring.serve.engine.runner import Runner
from shoestring.serve.speculative.draft_length import DraftLengthController
from shoestring.serve.speculative.drafter import Drafter

KINDS: tuple[SamplingKind, ...] = ("greedy", "drawn")
MEMORY_SHARE = 0.25  # of the free memory that the KV cache may take before it is needed


def warm_up_steps(
    runner: Runner,
    max_requests: int,
    max_context: int,
    chunk: int,
    lengths: Sequence[int] = (),
    skip: SkipSet | None = None,
) -> None:
    """`lengths`: drafts per request that a step may have; `skip`: the skip set that most requests have."""
    runner.refresh()  # on a CPU this compiles the decode step in C++
    if not runner.fast:
        return
    reserve(runner, max_requests, max_context)
    runner.warm_up_prefill(max_requests, chunk, KINDS, skip)
    runner.warm_up_decode(max_requests, KINDS, [1, *(g + 1 for g in lengths)], skip)
    runner.warm_up_kernels(chunk)


def warm_up_drafting(
    runner: Runner,
    drafter: Drafter | None,
    controller: DraftLengthController,
    max_requests: int,
    max_context: int,
    chunk: int,
) -> None:
    """Warm up the drafter, and measure the passes that its controller needs to know."""
    if not runner.fast:
        return
    if drafter is not None:
        drafter.warm_up(max_requests, KINDS, controller.lengths, max_context)
    rows = 1
    while rows < 2 * min(max_requests * (1 + max(controller.lengths)), chunk):  # up to the next power of two
        controller.costs.pass_seconds(rows)
        rows *= 2


def reserve(runner: Runner, max_requests: int, max_context: int) -> None:
    """Reserve memory for so many requests of full length, or as much as is a small part of what is free."""
    pool, spec = runner.cache.pool, runner.model.spec
    num = min(pool.num_blocks, max_requests * pool.blocks_for(max_context))
    each = bytes_per_position(spec, runner.model.compute_dtype) * pool.block_size
    if runner.device.type == "cuda":
        num = min(num, int(MEMORY_SHARE * free_bytes(runner.device) // each))
    pool.num_touched = max(pool.num_touched, num)
