"""The kinds of steps that run fused, and what is made of each before the first request.

    kind      a step                                        its shape, which is its key     launched by
    decode    few rows of each request                      DecodeShape (graphs.py)         Runner.launch_decode
    prefill   chunks of prompts beside decoding requests    PrefillShape                    Runner.launch_prefill
    chain     the passes of a draft model                   ChainShape                      Runner.launch_chain
    eager     any rows, kernel by kernel, without a graph   EagerPass                       Runner.forward

`STEP_KINDS` has a row for each: all sizes that an engine within `StepLimits` may meet; those that a rehearsal
(kernels/runtime/compile_ahead.py) goes through, fewer, since it only meets every kernel once; and how one is made.
`Runner.prepare` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from shoestring.kernels.attention.paged_attention import most_programs
from shoestring.model.skip import SkipSet
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.draft_chain_graph import CHAIN_ROWS, ChainShape
from shoestring.serve.engine.graphs import (
    MAX_ROWS,
    REQUESTS,
    REQUESTS_DRAFTED,
    DecodeShape,
    DeviceDraft,
    SamplingKind,
    sizes_up_to,
)
from shoestring.serve.engine.place_rows import EAGER_SPLITS, MANY, row_sizes
from shoestring.serve.engine.prefill_graph import PREFILL_REQUESTS, PREFILL_ROWS, PrefillShape

if TYPE_CHECKING:
    from shoestring.serve.engine.runner import Runner

WARM_LOGITS = 256  # rows with logits, at most, in an eager pass
PROMPT = (0, 24)  # start and rows of a whole prompt in an eager pass
REHEARSED_DRAFTS = 2  # of a chain: every later pass has the kernels of the second

StepKindName = Literal["decode", "prefill", "chain", "eager"]


@dataclass(frozen=True)
class StepLimits:
    """What steps may come. Each kind reads what concerns it."""

    max_requests: int = 1
    samplings: Sequence[SamplingKind] = ("greedy",)
    skip: SkipSet | None = None
    rows_each: Sequence[int] = (1,)  # of decode steps
    grouped: bool = True  # several decode steps may be one launch
    max_rows: int = PREFILL_ROWS[0]  # of a prefill or an eager pass
    lengths: Sequence[int] = ()  # of draft chains
    rehearsed: Sequence[int] = ()  # numbers of requests that a rehearsal of decode steps and chains goes through


@dataclass(frozen=True)
class Batch:
    """The rows of a step, request by request."""

    spans: Sequence[RowSpan]  # whose rows, in order
    tokens: Sequence[int] | Tensor  # [T], one per row; a tensor where they are on the device already
    rows: Sequence[int]  # the rows whose logits are wanted
    device_drafts: Sequence[DeviceDraft] = ()  # drafts that are still on the device; their tokens above are -1


class EagerPass(NamedTuple):
    requests: Sequence[tuple[int, int]]  # start and rows of each
    num_rows: int = 0  # exactly so many; 0: all of them


class StepKind(NamedTuple):
    sizes: Callable[[StepLimits, Runner], Iterator[Any]]
    rehearsed: Callable[[StepLimits, Runner], Iterator[Any]]
    make: Callable[[Runner, Any, StepLimits], None]


def decode_sizes(limits: StepLimits, runner: Runner) -> Iterator[DecodeShape]:
    for each in limits.rows_each:
        sizes = sizes_up_to(limits.max_requests, REQUESTS if each == 1 else REQUESTS_DRAFTED)
        for shape in _decode_shapes(sizes[::-1], limits.samplings, [each], limits.skip):  # tables grow once
            yield shape
            if runner.adapters.names:
                yield shape._replace(adapted=True)


def rehearsed_decode(limits: StepLimits, runner: Runner) -> Iterator[DecodeShape]:
    return _decode_shapes(limits.rehearsed, limits.samplings, limits.rows_each, limits.skip)


def _decode_shapes(
    nums: Sequence[int], kinds: Sequence[SamplingKind], rows_each: Sequence[int], skip: SkipSet | None
) -> Iterator[DecodeShape]:
    for num, kind, each in product(nums, kinds, rows_each):
        if num * each <= MAX_ROWS:
            yield DecodeShape(num, each, kind, skip)


def prefill_sizes(limits: StepLimits, runner: Runner) -> Iterator[PrefillShape]:
    # The largest first: tables grow once, and smaller graphs reuse the memory of larger ones.
    nums, rows = sizes_up_to(limits.max_requests, PREFILL_REQUESTS), sizes_up_to(limits.max_rows, PREFILL_ROWS)
    for num, num_rows, kind in product(nums[::-1], rows[::-1], limits.samplings):
        yield PrefillShape(num, num_rows, kind, limits.skip)


def rehearsed_prefill(limits: StepLimits, runner: Runner) -> Iterator[PrefillShape]:
    for num, kind in product(sizes_up_to(limits.max_requests, PREFILL_REQUESTS)[::-1], limits.samplings):
        yield PrefillShape(num, PREFILL_ROWS[0], kind)


def chain_sizes(limits: StepLimits, runner: Runner) -> Iterator[ChainShape]:
    nums = sizes_up_to(limits.max_requests, REQUESTS_DRAFTED)[::-1]
    return _chain_shapes(nums, limits.samplings, limits.lengths, runner)


def rehearsed_chains(limits: StepLimits, runner: Runner) -> Iterator[ChainShape]:
    return _chain_shapes(limits.rehearsed, limits.samplings, [REHEARSED_DRAFTS], runner)


def _chain_shapes(
    nums: Sequence[int], kinds: Sequence[SamplingKind], lengths: Sequence[int], runner: Runner
) -> Iterator[ChainShape]:
    for num, kind in product(nums, kinds):
        ways = (False, True) if num == 1 and runner.fused.short_context < math.inf else (False,)
        for each, length, long in product(CHAIN_ROWS, lengths, ways):
            if num * each <= MAX_ROWS:
                yield ChainShape(num, each, kind, None, length, long)


def eager_sizes(limits: StepLimits, runner: Runner) -> Iterator[EagerPass]:
    return _eager_passes(row_sizes(max(MANY, limits.max_rows)), runner)


def rehearsed_eager(limits: StepLimits, runner: Runner) -> Iterator[EagerPass]:
    return _eager_passes([PREFILL_ROWS[0]], runner)


def _eager_passes(sizes: Sequence[int], runner: Runner) -> Iterator[EagerPass]:
    """Passes of every kind with so many rows."""
    many = most_programs() // (EAGER_SPLITS * runner.model.spec.num_kv_heads) + 1  # keys are not cut into ranges
    later, few, one = (24, 24), (16, 2), (16, 1)
    for num in sizes:
        yield EagerPass([later] * -(-num // 24), num)
    for row, n, more in product((few, one), (1, many), ([], [later])):
        yield EagerPass([row] * n + more)
    # Whole prompts are not padded: only powers of two are met.
    for n in sorted({-(-num // 24) for num in sizes if num & (num - 1) == 0}):
        yield EagerPass([PROMPT] * n)


def _make_graph(runner: Runner, shape: Any, limits: StepLimits) -> None:
    runner.graphs.prepare(shape, grouped=limits.grouped)


def run_eager(runner: Runner, eager: EagerPass, limits: StepLimits) -> None:
    """On a cache of its own, where the runner is `ready`."""
    kinds, num_rows = eager
    size, positions = runner.cache.pool.block_size, runner.model.spec.max_positions
    pages = -(-max(start + rows for start, rows in kinds) // size)
    spans = [
        RowSpan(list(range(n * pages, (n + 1) * pages)), start, rows)
        for n, (start, rows) in enumerate(kinds)
        if start + rows <= positions
    ]
    if not spans:
        return
    if num_rows:  # the last span is cut
        spans[-1] = replace(spans[-1], num=num_rows - sum(span.num for span in spans[:-1]))
    num = sum(span.num for span in spans)
    wanted = range(num) if num_rows and num <= WARM_LOGITS else [0]
    apart = runner.apart(BlockPool(len(kinds) * pages, size))
    apart.forward(Batch(spans, [0] * num, wanted), once=kinds[0] != PROMPT)


STEP_KINDS: dict[StepKindName, StepKind] = {
    "prefill": StepKind(prefill_sizes, rehearsed_prefill, _make_graph),
    "decode": StepKind(decode_sizes, rehearsed_decode, _make_graph),
    "chain": StepKind(chain_sizes, rehearsed_chains, _make_graph),
    "eager": StepKind(eager_sizes, rehearsed_eager, run_eager),
}
