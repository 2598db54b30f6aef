"""The runner: one forward of the model over the rows of a step.

A `Batch` is what a step computes, as plain numbers: whose rows (spans of blocks), which tokens stand in them and
of which rows logits are wanted. The runner writes keys and values, chooses the attention and returns logits, or
the tokens chosen from them; it knows nothing of requests, scheduling or verification. The engine's target and a
draft model each have one.

Three ways to compute a step, the first that can:

    graph   few rows per request, or few in all: a program with fixed addresses, on a GPU a CUDA graph
            (cuda_graphs.py, read_graph.py)
    fused   any rows: the fused forward over blocks read in place (fused.py)
    plain   `Decoder.forward` over gathered keys and values: on a CPU, under tensor parallelism, with hooks, or
            when somebody watches the residual stream. Layers that round their inputs to 8 bits, on a CPU,
            compute a single row in one call (token_step.py) or few (cpu_step.py)

`skip` is the set of sublayers that this step leaves out, None for the whole model. A batch holds one set.

Shapes: T rows of the step, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels.backend import triton_usable
from shoestring.kernels.paged_attention import PROGRAMS, prefill_rows, splits_for
from shoestring.model.skip import SkipSet, Watch
from shoestring.model.transformer import Decoder
from shoestring.serve.blocks import BlockPool
from shoestring.serve.chain_graph import chain_fits, launch_chain, prepare_chains
from shoestring.serve.cpu_step import CpuStep, steppable
from shoestring.serve.cuda_graphs import (
    MAX_ROWS,
    REQUESTS,
    REQUESTS_DRAFTED,
    ROWS_EACH,
    Flight,
    Guess,
    Kind,
    Spread,
    StepGraphs,
    as_it_is,
    up_to,
)
from shoestring.serve.fused import FusedDecoder, Rows, Tiles, fusable
from shoestring.serve.kv_cache import KVCache, Span, cache_root, weights_id
from shoestring.serve.logits import TokenLogprob, prompt_logprobs
from shoestring.serve.read_graph import launch_read, prepare_reads, read_fits, tiles_of
from shoestring.serve.sampling import Sampling
from shoestring.serve.token_step import TokenStep, compilable
from shoestring.serve.whole_texts import few_plans

EAGER_SPLITS = 8  # ranges that keys are cut into where few requests are no graph; else 1
WIDTH = 16  # tables have a multiple of so many blocks
LAUNCH_ROWS = 512  # rows of whole texts of one length for a launch of their own; else all go by table in one
# Rows by table are padded to powers of two up to FINE, to multiples of FINE up to MANY and of COARSE up to MOST.
FINE, MANY, COARSE, MOST = 64, 512, 256, 2048
WARM_LOGITS = 256  # rows with logits, at most, that are met before the first request


@dataclass(frozen=True)
class Batch:
    """Rows of a step, request behind request."""

    spans: Sequence[Span]  # whose rows, in order
    tokens: Sequence[int] | Tensor  # [T], one per row; a tensor where they are on the device already
    rows: Sequence[int]  # the rows whose logits are wanted
    guesses: Sequence[Guess] = ()  # tokens that are -1 above because they are still on the device


class Runner:
    def __init__(
        self, model: Decoder, pool: BlockPool, *, graphs: bool | None = None, spread: Spread = as_it_is
    ) -> None:
        """`graphs`: whether steps run fused and, on a GPU, as CUDA graphs; None: where there are kernels for it.
        `spread` maps logits to the ids that tokens have outside, for a model whose head knows only some."""
        self.model, self._wanted, self._spread = model, graphs, spread
        self.cache = KVCache(model.spec, pool)
        self._fused: FusedDecoder | None = None
        self._graphs: StepGraphs | None = None
        self._cpu: CpuStep | TokenStep | None = None  # one row on a CPU, with inputs rounded to 8 bits
        self._weights: object = None  # those that were there at the last `refresh`
        self._roots: dict[tuple[torch.dtype, str], bytes] = {}  # by dtype and skip set
        self._warmed = 0  # rows of the largest pass that these weights were warmed for
        if graphs and not fusable(model):
            raise UserError(
                "graphs=True, but this model cannot run fused: it is sharded or its modules have hooks; "
                "leave graphs out to let the engine decide"
            )

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    @property
    def fast(self) -> bool:
        """Whether steps can run fused."""
        wanted = self._wanted
        if wanted is None:
            wanted = self.device.type == "cuda" and self.model.compute_dtype in (
                torch.float32,
                torch.bfloat16,
                torch.float16,
            )
            wanted = wanted and triton_usable(self.model.embed.weight)
        return wanted and fusable(self.model)

    def refresh(self) -> None:
        """Before a request's first step: notice weights that changed. Within a request they may not."""
        weights = weights_id(self.model)
        changed = weights != self._weights
        if not self.fast:
            self._fused = self._graphs = None
            made = self._refresh_cpu(changed)
        elif made := self._fused is None or changed:
            self._fused = self._graphs = None  # free before the copies are made
            self._fused = FusedDecoder(self.model)
            self._graphs = StepGraphs(self._fused, self.cache, self._spread)
        if made or changed:
            self._weights = weights_id(self.model)  # making may have moved them
            self._roots.clear()
            self._warmed = 0

    def _refresh_cpu(self, changed: bool) -> bool:
        if self.device.type != "cpu" or not steppable(self.model):
            self._cpu = None
        elif self._cpu is None or changed:
            self._cpu = (TokenStep if compilable(self.model.spec) else CpuStep)(self.model)
            return True
        return False

    def root(self, skip_set: str = "") -> bytes:
        """`cache_root` for the weights that the last `refresh` saw."""
        if self._weights is None:
            self.refresh()
        key = self.model.compute_dtype, skip_set
        if key not in self._roots:
            self._roots[key] = cache_root(self.model, skip_set, self._weights)
        return self._roots[key]

    # -- a step ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def forward(
        self, batch: Batch, skip: SkipSet | None = None, watch: Watch | None = None, *, once: bool = False
    ) -> Tensor:
        """Logits [R, V] of the batch's `rows`, in compute dtype or fp32. `watch` is shown the residual stream. `once`:
        rows of a number that will hardly come again, not worth a graph nor a launch of their own."""
        if watch is not None or not self.ready():
            return self._plain(batch, skip, watch)
        assert self._graphs is not None
        num_rows = sum(s.num for s in batch.spans)
        single = not isinstance(batch.tokens, Tensor) or num_rows == len(batch.spans)
        if single and not once and self._graphs.fits(batch.spans):
            logits = self._graphs.logits(batch.spans, batch.tokens, skip)
            if len(batch.rows) == num_rows:
                return logits
            return logits[torch.tensor(list(batch.rows), device=self.device, dtype=torch.int64)]
        return self._run_fused(batch, skip, once)

    @torch.no_grad()
    def choose(
        self, batch: Batch, samplings: Sequence[Sampling], skip: SkipSet | None = None
    ) -> Flight | None:
        """Launch a step whose every row is followed by a token chosen on the device, one Sampling a span; None
        where that is not possible. `flight.tokens()` has the tokens."""
        if not self.ready() or len(batch.rows) != sum(s.num for s in batch.spans):
            return None
        assert self._graphs is not None
        if not self._graphs.fits(batch.spans):
            return None
        if batch.guesses:
            self._graphs.take(batch.spans, batch.guesses)
        return self._graphs.choose(batch.spans, batch.tokens, samplings, skip)

    @torch.no_grad()
    def choose_next(
        self, spans: Sequence[Span], samplings: Sequence[Sampling], skip: SkipSet | None = None
    ) -> Flight:
        """The step after the `choose` just launched, one row each, on the tokens it chose."""
        assert self._graphs is not None
        return self._graphs.choose(spans, None, samplings, skip)

    @torch.no_grad()
    def read(self, batch: Batch, samplings: Sequence[Sampling], skip: SkipSet | None = None) -> Flight | None:
        """`choose` for a step with texts that are read: a token behind the last row of the first spans, one for each
        Sampling; None where that is not possible, or not worth it yet."""
        if not self.ready() or batch.guesses or not read_fits(batch.spans):
            return None
        assert self._graphs is not None and not isinstance(batch.tokens, Tensor)
        return launch_read(self._graphs, batch.spans, batch.tokens, samplings, skip)

    @torch.no_grad()
    def chain(
        self, batch: Batch, samplings: Sequence[Sampling], num_tokens: int, skip: SkipSet | None = None
    ) -> Flight | None:
        """`choose` for the last row of each span, and then num_tokens - 1 times the same for the token just
        chosen, in one launch; None where that is not possible. The spans' blocks must hold those rows, too."""
        if not self.ready() or len(batch.rows) != sum(s.num for s in batch.spans):
            return None
        assert self._graphs is not None and not isinstance(batch.tokens, Tensor)
        if not chain_fits(batch.spans):
            return None
        return launch_chain(self._graphs, batch.spans, batch.tokens, samplings, num_tokens, skip)

    def prepare(
        self, max_requests: int, kinds: Sequence[Kind], rows_each: Sequence[int], skip: SkipSet | None = None
    ) -> None:
        """Make the graphs of steps of 1 to max_requests requests with so many rows each."""
        if self.ready():
            assert self._graphs is not None
            for each in rows_each:
                sizes = up_to(max_requests, REQUESTS if each == 1 else REQUESTS_DRAFTED)
                for num, kind in product(reversed(sizes), kinds):  # the most first: tables grow once
                    if num * each <= MAX_ROWS:
                        self._graphs.prepare(num, each, kind, skip)

    def prepare_reads(
        self, max_requests: int, max_rows: int, kinds: Sequence[Kind], skip: SkipSet | None = None
    ) -> None:
        """The same for `read`, of so many rows altogether. To be made first: they need the largest tables."""
        if self.ready():
            assert self._graphs is not None
            prepare_reads(self._graphs, max_requests, max_rows, kinds, skip)

    def prepare_chains(self, max_requests: int, kinds: Sequence[Kind], lengths: Sequence[int]) -> None:
        """The same for `chain`, of so many tokens."""
        if self.ready():
            assert self._graphs is not None
            for num, kind in product(reversed(up_to(max_requests, REQUESTS_DRAFTED)), kinds):
                prepare_chains(self._graphs, num, kind, lengths)

    @property
    def num_made(self) -> int:
        """Graphs made so far."""
        return 0 if self._graphs is None else self._graphs.num_made

    def ready(self) -> bool:
        """Whether the next step runs fused; weights and hooks that changed are noticed by `refresh`."""
        if self._fused is None and self.fast:
            self.refresh()
        return self._fused is not None

    def _plain(self, batch: Batch, skip: SkipSet | None, watch: Watch | None) -> Tensor:
        single = len(batch.tokens) == 1 and list(batch.rows) == [0] and skip is None and watch is None
        if self._cpu is not None and single:
            return self._spread(self._cpu.logits(int(batch.tokens[0]), batch.spans[0], self.cache))
        device = self.device
        tokens = batch.tokens
        if not isinstance(tokens, Tensor):
            tokens = torch.tensor(list(tokens), device=device)
        positions = [p for span in batch.spans for p in range(span.start, span.stop)]
        # Models that know nothing of skipping may stand here, too.
        options: dict[str, Any] = {} if skip is None else {"skip": skip}
        if watch is not None:
            options["watch"] = watch
        with _few_plans(batch):
            logits = self.model(
                tokens[None],
                torch.tensor([positions], device=device),
                attend=self.cache.plan(batch.spans, device),
                rows=torch.tensor(list(batch.rows), device=device, dtype=torch.int64),
                **options,
            )
        return self._spread(logits)

    def _run_fused(self, batch: Batch, skip: SkipSet | None, by_table: bool) -> Tensor:
        fused, spec = self._fused, self.model.spec
        assert fused is not None
        self.cache.reserve(spec.num_kv_heads, spec.head_dim, fused.dtype, fused.device)
        rows = place_rows(
            batch.spans, self.cache.pool.block_size, spec.num_heads, spec.num_kv_heads, by_table=by_table
        )
        num, num_wanted = len(rows.positions_T), len(batch.rows)
        tokens, wanted = batch.tokens, _tensor(batch.rows, few_sizes(num_wanted))
        known = [] if isinstance(tokens, Tensor) else [_tensor(tokens, num)]
        rows, (wanted, *known) = rows.to(fused.device, wanted, *known)
        given = F.pad(tokens, (0, num - len(tokens))) if isinstance(tokens, Tensor) else known[0]
        with _few_plans(batch):
            x_TD = fused.hidden(given, rows, self.cache, skip)
        return self._spread(fused.logits(x_TD.index_select(0, wanted))[:num_wanted])

    def prompt_logprobs(self, tokens: Sequence[int], num_top: int) -> list[TokenLogprob | None]:
        """Log-probabilities of a prompt's tokens, each with the `num_top` likeliest; no cache is touched."""
        return prompt_logprobs(self.model, tokens, num_top)

    def seconds(self, num_rows: int, skip: SkipSet | None = None) -> float:
        """Seconds of a forward over this many rows, the best of a few; on a cache of its own. More rows than one
        request's drafts have belong to several requests."""
        size, positions = self.cache.pool.block_size, self.model.spec.max_positions
        # Two each: as many requests fill a graph without padding, as real steps of so many rows mostly do.
        each = min(num_rows if num_rows <= ROWS_EACH[-1] else 2, positions)
        pages, num = -(-each // size), -(-num_rows // each)
        pool = BlockPool(num * pages, size)
        spans = [
            Span(list(range(n * pages, (n + 1) * pages)), 0, min(each, num_rows - n * each))
            for n in range(num)
        ]
        apart = self._apart(pool)
        batch = Batch(spans, [0] * num_rows, range(num_rows))
        seconds = []
        for _ in range(6 if apart.fast else 2):  # the first fused one compiles and captures
            began = time.perf_counter()
            apart.forward(batch, skip).argmax(-1).tolist()  # waits for the device
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def warm(self, most_rows: int) -> None:
        """Passes like those that run as no graph (prompts, what a drafter reads first, uneven steps), for nobody, so
        that all of their kernels are compiled and loaded. `most_rows`: of a pass."""
        if not self.ready() or self._warmed >= most_rows:
            return
        self._warmed = most_rows
        size, spec = self.cache.pool.block_size, self.model.spec
        many = PROGRAMS // (EAGER_SPLITS * spec.num_kv_heads) + 1  # requests whose keys are not cut
        prompt, later, few, one = (0, 24), (24, 24), (16, 2), (16, 1)  # start, rows
        sizes = row_sizes(max(MANY, most_rows))
        passes = [([later] * -(-num // 24), num) for num in sizes]
        passes += [([row] * n + more, 0) for row in (few, one) for n in (1, many) for more in ([], [later])]
        # Whole texts are not padded: the more rows the fewer numbers of them.
        whole = {-(-num // 24) for num in sizes if num & (num - 1) == 0}
        passes += [([prompt] * n, 0) for n in sorted(whole)]
        for kinds, num_rows in passes:
            pages = -(-max(start + rows for start, rows in kinds) // size)
            spans = [
                Span(list(range(n * pages, (n + 1) * pages)), start, rows)
                for n, (start, rows) in enumerate(kinds)
                if start + rows <= spec.max_positions
            ]
            if num_rows and spans:  # exactly so many: the last is cut
                spans[-1] = replace(spans[-1], num=num_rows - sum(span.num for span in spans[:-1]))
            if spans:
                num = sum(span.num for span in spans)
                apart = self._apart(BlockPool(len(kinds) * pages, size))
                wanted = range(num) if num_rows and num <= WARM_LOGITS else [0]
                apart.forward(Batch(spans, [0] * num, wanted), once=kinds[0] != prompt)

    def _apart(self, pool: BlockPool) -> Runner:
        """The same model with a cache of its own."""
        apart = Runner(self.model, pool, graphs=self._wanted, spread=self._spread)
        if self.ready():
            assert self._fused is not None
            apart._fused = self._fused
            apart._graphs = StepGraphs(self._fused, apart.cache, self._spread)
        return apart


def _few_plans(batch: Batch) -> AbstractContextManager[None]:
    return few_plans(s.num if s.start == 0 else 0 for s in batch.spans)


def few_sizes(num: int) -> int:
    """The number that so many rows are padded to; a pass over more than MOST takes so long that nothing is gained."""
    if num <= FINE:
        return 1 << max(0, num - 1).bit_length()
    if num > MOST:
        return num
    step = FINE if num <= MANY else COARSE
    return -(-num // step) * step


def row_sizes(most: int) -> list[int]:
    """Those that up to `most` rows are padded to, 1 apart; of those above MOST one."""
    sizes = [2]
    while sizes[-1] < min(most, MOST):
        sizes.append(few_sizes(sizes[-1] + 1))
    return [*sizes, 2 * MOST] if most >= 2 * MOST else sizes


def place_rows(
    spans: Sequence[Span], size: int, num_heads: int, num_groups: int, *, by_table: bool = False
) -> Rows:
    """Where the rows of a step lie, as tensors on the host. Kernels are compiled for rows of a tile, ranges of keys and
    whether a table's width is a multiple of 16, so each has few values here, which `Runner.warm` meets. Products choose
    their kernels by the number of rows and load each when first met, which can take longer than ten steps: rows that go
    by table are padded to few numbers, behind the last. `by_table`: whole texts, too."""
    start_N, num_N = np.array([(s.start, s.num) for s in spans]).T
    first_N = num_N.cumsum() - num_N  # each span's first row
    num_pages = [-(-s.stop // size) for s in spans]
    width = -(-max(num_pages) // WIDTH) * WIDTH
    tables_LW = np.zeros((len(spans), width), dtype=np.int32)
    for row_W, span, num in zip(tables_LW, spans, num_pages, strict=True):
        row_W[:num] = span.blocks[:num]
    of_T = np.arange(len(spans)).repeat(num_N)
    at_T = np.arange(len(of_T)) + (start_N - first_N)[of_T]
    slots_T = tables_LW[of_T, at_T // size].astype(np.int64) * size + at_T % size
    tiles, each = [], prefill_rows(num_heads, num_groups)
    few, many = np.flatnonzero(num_N <= ROWS_EACH[-1]), np.flatnonzero(num_N > ROWS_EACH[-1])
    if len(few):
        most = 1 if num_N[few].max() == 1 else ROWS_EACH[-1]
        splits = EAGER_SPLITS if splits_for(len(few), num_groups) >= EAGER_SPLITS else 1
        tiles.append(Tiles(_tiles(few, first_N[few], start_N[few], num_N[few]), most, splits))
    if len(many):
        tiles.append(Tiles(_tiles(*tiles_of(many, first_N, start_N, num_N, each)), each, 1))
    prompts = None
    if not by_table and not start_N.any():
        found, row = [], 0
        for num, group in groupby(spans, key=lambda s: s.num):
            count = len(list(group))
            found.append((row, count, num))
            row += count * num
        if len(found) == 1 or row >= LAUNCH_ROWS * len(found):
            prompts = tuple(found)
    padded = prompts is None and num_N.max() > 1
    if padded:
        padding = (0, few_sizes(len(at_T)) - len(at_T))
        at_T, slots_T = np.pad(at_T, padding), np.pad(slots_T, padding, constant_values=-1)
    at, slots, tables = (torch.from_numpy(numbers) for numbers in (at_T, slots_T, tables_LW))
    return Rows(at, slots, tables, tuple(tiles), prompts, padded)


def _tiles(*columns: np.ndarray) -> Tensor:
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.int32))


def _tensor(numbers: Sequence[int], num: int) -> Tensor:
    """[num] on the host, zeros at the end; an array between takes a sixth of the time of torch.tensor."""
    values = array("q", numbers)
    values.extend([0] * (num - len(values)))
    return torch.from_numpy(np.asarray(values))
