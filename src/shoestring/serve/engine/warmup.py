"""Warm-up: what a request should not wait for is made before the first one.

Capturing a graph takes tens of milliseconds, the time of many steps. A controller that changes the number of drafts,
and requests that end one by one, would meet new shapes for a long time, and each capture would look like a slow step.
So numbers of requests and of drafts are padded to few sizes (graphs.py, draft_length.py), and all of those that an
engine can meet are captured here, for greedy and for drawn tokens. The KV cache gets its memory first, because graphs
hold its address. Passes outside of graphs (long prompts, steps in which few requests have drafts) have kernels in a few
variants, which are compiled here (the kind `eager` of step_kinds.py): a compilation takes the time of a hundred steps.
Matrix products load a kernel for many numbers of rows, the time of ten steps each: rows are padded to few numbers
(`place_rows`), which are all met here.

On a machine that has not run such a model before, dozens of kernels are compiled first. `compile_ahead` meets them in a
rehearsal and compiles them in threads, for a first text without any other warm-up, too.

Left out, and made when first needed: graphs of cut sampling (top_k, top_p, min_p), graphs again when the KV cache
outgrows what was reserved, cuDNN's plans for long prompts (prompt_attention.py), and prompts that the target reads in
steps too large for a graph. Such steps are not taken for slow ones (`Drafting.num_graphs`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from shoestring import __version__
from shoestring.formats.convert import formats_of
from shoestring.kernels.attention.paged_attention import splits_for
from shoestring.kernels.runtime.compile_ahead import compiles_ahead, rehearsal
from shoestring.model.skip import SkipSet
from shoestring.paths import cache_folder
from shoestring.serve.engine.capacity import bytes_per_position, free_bytes
from shoestring.serve.engine.graphs import REQUESTS, SamplingKind, sampling_kind, sizes_up_to
from shoestring.serve.engine.runner import Runner
from shoestring.serve.engine.scheduler import Scheduler
from shoestring.serve.engine.skip_policy import SkipSets
from shoestring.serve.engine.step_kinds import PROMPT, EagerPass, StepLimits, run_eager
from shoestring.serve.speculative.draft_length import DraftLengthController
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.drafting import Drafting

KINDS: tuple[SamplingKind, ...] = ("greedy", "drawn")
MEMORY_SHARE = 0.25  # of the free memory that the KV cache may take before it is needed


class WarmUp:
    """The warm-up of an engine."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, skip_sets: SkipSets, drafting: Drafting, max_context: int
    ) -> None:
        self._runner, self._scheduler, self._skip_sets = runner, scheduler, skip_sets
        self._drafting, self._max_context = drafting, max_context
        self.done = False

    @torch.no_grad()
    def run(self, kinds: Sequence[SamplingKind], *, prefills: bool) -> None:
        drafting, controller = self._drafting, self._drafting.controller
        sizes = self._scheduler.max_requests, self._max_context, self._scheduler.chunk
        lengths = controller.lengths if controller else ()
        self.compile_ahead(kinds, lengths, prefills)
        grouped = drafting.drafter is None
        warm_up_steps(self._runner, *sizes, lengths, self._skip_sets.usual, kinds, prefills, grouped)
        if controller is not None:
            warm_up_drafting(self._runner, drafting.drafter, controller, *sizes, kinds, prefills)
        drafting.warmed_up()
        self.done = True

    def compile_ahead(self, kinds: Sequence[SamplingKind], lengths: Sequence[int] | None, prefills: bool) -> None:
        runners, most = self._drafting.runners(), self._scheduler.max_requests
        grouped = self._drafting.drafter is None
        compile_ahead(self._runner, runners, most, kinds, lengths, self._skip_sets.usual, prefills, grouped)

    def before_first_step(self) -> None:
        """Where nobody has warmed up: what the requests that are there need, and with a controller all."""
        kind = sampling_kind([r.sampling for r in (*self._scheduler.waiting, *self._scheduler.running)])
        if self._drafting.controller is None:
            self.compile_ahead([kind], None, prefills=False)
            self.done = True
        else:
            alone = self._scheduler.max_requests == 1
            self.run([kind] if alone else KINDS, prefills=not alone)


def compile_ahead(
    runner: Runner,
    drafters: Sequence[Runner],
    max_requests: int,
    kinds: Sequence[SamplingKind],
    lengths: Sequence[int] | None,
    skip: SkipSet | None,
    prefills: bool,
    grouped: bool,
) -> None:
    """Compile what first steps need, in threads, unless that was done on this machine before. `lengths`: what warm-up
    with drafts of these lengths needs; None: no warm-up follows. `grouped`: several steps may be one launch."""
    # A step over experts indexes with what a kernel wrote, so it cannot be rehearsed.
    able = [r for r in (runner, *drafters) if r.device.type == "cuda" and r.fast and r.model.spec.experts is None]
    if runner not in able or not compiles_ahead():
        return
    mark = _mark(able, max_requests, tuple(kinds), lengths, skip, prefills, grouped)
    if mark.exists():
        return
    sizes = sizes_up_to(max_requests, REQUESTS) if lengths is not None else [1]

    def nums(of: Runner) -> list[int]:
        """Numbers of requests with different kernels: those differ by the ranges of keys."""
        return list({splits_for(num, of.model.spec.num_kv_heads): num for num in sizes}.values())

    for fused in able:  # before: their weights are made by kernels, which a rehearsal does not launch
        fused.ready()
    done = False
    rows_each = [1, *(g + 1 for g in lengths or ())]
    with rehearsal() as missing, suppress(Exception):  # told by the real step
        decode = StepLimits(max_requests, kinds, skip, rows_each, grouped, rehearsed=nums(runner))
        runner.prepare(["decode"], decode, rehearse=True)
        run_eager(runner, EagerPass([PROMPT]), decode)
        if prefills:
            runner.prepare(["prefill"], StepLimits(max_requests, kinds), rehearse=True)
        for drafting in able[1:]:
            if prefills:
                drafting.prepare(["prefill"], StepLimits(max_requests), rehearse=True)
            drafting.prepare(["chain"], StepLimits(max_requests, kinds, rehearsed=nums(drafting)), rehearse=True)
        for warmed in able if lengths is not None else ():
            warmed.prepare(["eager"], StepLimits(), rehearse=True)
        done = True
    if not missing.compile() or not done:
        return
    with suppress(OSError):  # a cache that cannot be written: again next time
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _mark(runners: Sequence[Runner], *settings: object) -> Path:
    """The empty file that says that such kernels were compiled."""
    device = torch.cuda.get_device_name(runners[0].device)
    models = [
        (r.model.spec, r.model.compute_dtype, sorted({f.label for f in formats_of(r.model).values()})) for r in runners
    ]
    key = repr((__version__, torch.__version__, device, models, settings))
    return cache_folder() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.compiled"


def warm_up_steps(
    runner: Runner,
    max_requests: int,
    max_context: int,
    chunk: int,
    lengths: Sequence[int] = (),
    skip: SkipSet | None = None,
    kinds: Sequence[SamplingKind] = KINDS,
    prefills: bool = True,
    grouped: bool = True,
) -> None:
    """`lengths`: drafts per request that a step may have; `skip`: the skip set that most requests have; `prefills`:
    graphs of prefills, too; `grouped`: and of several steps in a launch."""
    runner.refresh()  # on a CPU this compiles the decode step in C++
    if not runner.fast:
        return
    reserve(runner, max_requests, max_context)
    rows_each = [1, *(g + 1 for g in lengths)]
    limits = StepLimits(max_requests, kinds, skip, rows_each, grouped, max_rows=chunk)
    runner.prepare(["prefill", "decode", "eager"] if prefills else ["decode", "eager"], limits)


def warm_up_drafting(
    runner: Runner,
    drafter: Drafter | None,
    controller: DraftLengthController,
    max_requests: int,
    max_context: int,
    chunk: int,
    kinds: Sequence[SamplingKind] = KINDS,
    prefills: bool = True,
) -> None:
    """Warm up the drafter, and measure the passes that its controller needs to know."""
    if not runner.fast:
        return
    if drafter is not None:
        drafter.warm_up(max_requests, kinds, controller.lengths, max_context, prefills=prefills)
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
