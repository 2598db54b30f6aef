"""What a request should not wait for, made before the first one: graphs of all steps, and the costs of drafts.

A graph takes tens of milliseconds to make, the time of many steps. A controller that changes the number of drafts, and
requests that end one by one, would meet new shapes for a long time, and each meeting would look like a slow step.
So numbers of requests and of drafts are padded to few sizes (cuda_graphs.py, goodput.py), and here all of them that
an engine can meet are made at once, for greedy and for drawn tokens; keys and values get their memory first, because
graphs hold its address. What runs as no graph (texts that a drafter reads, steps in which few requests have drafts)
has kernels in a few variants, which are compiled here, too (`Runner.warm`): a compilation takes the time of a hundred
steps. Products load a kernel of their own for many a number of rows, which takes as long as ten: rows are padded to
few numbers (`place_rows`), which all are met here.

Left out: tokens that are cut (top_k, top_p, min_p), whose graphs are made when first needed, as are those of an
engine whose keys and values are too large to be reserved; such steps are not taken for slow ones (`num_made`). So are
cuDNN's plans for long texts read at once (whole_texts.py), of which there are few; and prompts that the target reads
whole in steps too large for a graph (read_graph.py) have all numbers of rows, with a drafter or without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from shoestring.model.skip import SkipSet
from shoestring.serve.cuda_graphs import Kind
from shoestring.serve.drafters import Drafter
from shoestring.serve.goodput import Goodput, Prospects, no
from shoestring.serve.request import Request
from shoestring.serve.runner import Runner

KINDS: tuple[Kind, ...] = ("greedy", "drawn")
SHARE = 0.25  # of the free memory that keys and values may take before they are needed


def prepare_steps(
    runner: Runner,
    max_requests: int,
    max_context: int,
    chunk: int,
    lengths: Sequence[int] = (),
    skip: SkipSet | None = None,
) -> None:
    """Of an engine that may draft so many tokens; `skip`: the set that its requests mostly have."""
    runner.refresh()  # a CPU's step in C++ is compiled when it is first made
    if not runner.fast:
        return
    reserve(runner, max_requests, max_context)
    runner.prepare_reads(max_requests, chunk, KINDS, skip)
    runner.prepare(max_requests, KINDS, [1, *(g + 1 for g in lengths)], skip)
    runner.warm(chunk)


def prepare_drafting(
    runner: Runner, drafter: Drafter | None, goodput: Goodput, max_requests: int, max_context: int, chunk: int
) -> None:
    """What a drafter needs, and what its controller asks about steps."""
    if not runner.fast:
        return
    if drafter is not None and hasattr(drafter, "prepare"):
        drafter.prepare(max_requests, KINDS, goodput.lengths, max_context)
    rows = 1
    while rows < 2 * min(max_requests * (1 + max(goodput.lengths)), chunk):  # the next power of two, too
        goodput.costs(rows)
        rows *= 2


def reserve(runner: Runner, max_requests: int, max_context: int) -> None:
    """Memory for so many requests of full length now, where that is a small part of what is free."""
    pool, spec = runner.cache.pool, runner.model.spec
    num = min(pool.num_blocks, max_requests * pool.blocks_for(max_context))
    each = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * pool.block_size
    if runner.device.type == "cuda":
        free = torch.cuda.mem_get_info(runner.device)[0]
        if num * each * runner.model.compute_dtype.itemsize > SHARE * free:
            return
    pool.num_touched = max(pool.num_touched, num)


def num_made(runner: Runner, drafter: Drafter | None) -> int:
    """Graphs that an engine has made so far."""
    return runner.num_made + int(getattr(drafter, "num_made", 0))


def prospects(
    drafter: Drafter | None, requests: Sequence[Request], room: Callable[[Request], int], each: int
) -> Prospects:
    """What a controller asks about those requests that may gain more than one token (`room`): drafts that `each` rows
    hold and a text can use, tokens that a text may still gain, and whether the drafter has to read texts first."""
    rooms = {r: num for r in requests if (num := room(r)) > 1}
    if not rooms:
        return 0, 0.0, no
    limit = max(0, min(each, max(rooms.values())) - 1)
    behind = getattr(drafter, "behind", None)
    return limit, sum(rooms.values()) / len(rooms), no if behind is None else partial(behind, list(rooms))


def caught_up(drafter: Drafter | None) -> bool:
    """Whether its last proposal took longer because of a text that it had not read yet."""
    return bool(getattr(drafter, "caught_up", False))
