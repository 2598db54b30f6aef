"""The runner: one forward of the model over the rows of a step.

A `Batch` is what a step computes, as plain numbers: whose rows (spans of blocks), their tokens, and the rows whose
logits are needed. The runner writes keys and values, chooses the attention and returns logits, or the tokens chosen
from them. It knows nothing of requests, scheduling or verification. The engine's target and a draft model each have
one.

Three ways to compute a step, the first that can:

    graph   few rows per request, or few in all: a program with fixed addresses, on a GPU a CUDA graph
            (graphs.py, prefill_graph.py, draft_chain_graph.py; step_kinds.py lists them)
    fused   any rows: the fused forward over blocks read in place (fused_decoder.py)
    plain   `Decoder.forward` over gathered keys and values: on a CPU, under tensor parallelism, with hooks, or when a
            skip policy watches the residual stream. On a CPU, a model whose layers round their inputs to 8 bits
            computes a single row in one call or a few (cpu_decode.py)

Rows may have adapters (adapters.py), which graphs and the fused forward read beside the weights. The one-kernel step of
one row and the CPU's single call compute the base model only.

`skip` is the set of sublayers that a step leaves out, None for the whole model. A batch has one set.

Shapes: T rows of the step, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels.runtime.triton_backend import fall_back, triton_usable
from shoestring.model.skip import SkipSet, Watch
from shoestring.model.transformer import Decoder
from shoestring.serve.engine.adapters import AdapterBank, RowAdapters
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.cpu_decode import CompiledDecodeStep, executor_of
from shoestring.serve.engine.draft_chain_graph import holds_chain, launch_chain
from shoestring.serve.engine.embedding import Pooling, embedding_parts
from shoestring.serve.engine.fused_decoder import FusedDecoder, not_alone, unusable, unusable_experts
from shoestring.serve.engine.graphs import ROWS_EACH, GraphCache, LogitMap, PendingTokens, identity
from shoestring.serve.engine.kv_cache import KVCache, cache_root, weights_id
from shoestring.serve.engine.logit_rules import TokenLogprob, prompt_logprob_parts
from shoestring.serve.engine.place_rows import few_sizes, place_rows
from shoestring.serve.engine.prefill_graph import holds_prefill, launch_prefill
from shoestring.serve.engine.prompt_attention import limit_cudnn_plans
from shoestring.serve.engine.sampling import Sampling
from shoestring.serve.engine.step_kinds import STEP_KINDS, Batch, StepKindName, StepLimits
from shoestring.state.reshard.version import WeightsVersion

LONG_PASS = 50_000_000  # parameters from which one eager pass is a measure: it takes long, a hiccup is a small part

LaunchKind = Literal["decode", "next", "prefill", "chain", "logits", "fused"]


class Runner:
    def __init__(
        self, model: Decoder, pool: BlockPool, *, graphs: bool | None = None, map_logits: LogitMap = identity
    ) -> None:
        """`graphs`: whether steps run fused and, on a GPU, as CUDA graphs; None: where there are kernels for it.
        `map_logits` maps logits to the ids that tokens have outside, for a model whose head knows only some."""
        self.model, self._wanted, self._map_logits = model, graphs, map_logits
        self.cache = KVCache(model.plan, pool)
        self._fused: FusedDecoder | None = None
        self._graphs: GraphCache | None = None
        self._cpu: CompiledDecodeStep | None = None  # few rows on a CPU, inputs rounded to 8 bits
        self._weights: object = None  # `weights_id` at the last `refresh`
        self.version: WeightsVersion | None = None  # of weights that were written with `weights_written`
        self._roots: dict[tuple[torch.dtype, str, str], bytes] = {}  # by dtype, skip set and adapter
        self.adapters = AdapterBank(model)
        self._warmed = 0  # rows of the largest warm-up pass with these weights
        if graphs and (unusable(model) or FusedDecoder.unsupported(model.plan)):
            raise UserError(
                "graphs=True, but this model cannot run fused: it is sharded or its modules have hooks; "
                "leave graphs out to let the engine decide"
            )

    @property
    def device(self) -> torch.device:
        return self.model.device

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
            wanted = wanted and triton_usable(self.model.norm.weight)
        if not wanted or not_alone(self.model):
            return False
        reason = None if self._fused is not None else FusedDecoder.unsupported(self.model.plan)
        reason = reason or unusable_experts(self.model)  # weights may change between requests
        return reason is None or fall_back(f"steps are not fused for {reason}")

    @property
    def in_one_kernel(self) -> bool:
        """Whether a step of one row is one kernel (kernels/step/row_step.py); the first one tells."""
        return self._fused is not None and self._fused.in_one_kernel

    def refresh(self) -> None:
        """Before a request's first step: notice changed weights. They may not change while a request runs."""
        weights = weights_id(self.model)
        changed = weights != self._weights
        if not self.fast:
            self._fused = self._graphs = None
            made = self._refresh_cpu(changed)
        elif made := self._fused is None or changed:
            self._fused = self._graphs = None  # free before the copies are made
            self._fused = FusedDecoder(self.model)
            self._graphs = GraphCache(self._fused, self.cache, self._map_logits, self.adapters)
        if made or changed:
            self._weights = weights_id(self.model)  # building the fused copies may have moved them
            self._roots.clear()
            self._warmed = 0

    def announce_weights(self, step: int) -> None:
        """New weights are being pulled here: the processes that follow this one pull theirs."""

    def agree_on_weights(self, version: WeightsVersion) -> bool:
        """Whether all processes have those weights and write them now."""
        return True

    @torch.no_grad()
    def weights_written(self, version: WeightsVersion) -> None:
        """The model's weights were written in place: bring all copies up to date. Graphs stay; what was computed before
        is not found in the prefix cache again."""
        if self._fused is not None:
            self._fused.rewrite_copies(self.model)
        if self._cpu is not None:
            self._refresh_cpu(changed=True)
        self.version = version
        self._weights = weights_id(self.model)
        self._roots.clear()

    def _refresh_cpu(self, changed: bool) -> bool:
        executor = executor_of(self.model) if self.device.type == "cpu" else None
        if executor is None:
            self._cpu = None
        elif self._cpu is None or changed:
            self._cpu = executor(self.model)
            return True
        return False

    def cache_root(self, skip_set: str = "", adapter: str = "") -> bytes:
        """`cache_root` for the weights that the last `refresh` saw."""
        if self._weights is None:
            self.refresh()
        key = self.model.compute_dtype, skip_set, adapter
        if key not in self._roots:
            weights = self._weights if self.version is None else (self.version, self._weights)
            self._roots[key] = cache_root(self.model, skip_set, weights, adapter)
        return self._roots[key]

    # -- a step ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def forward(
        self, batch: Batch, skip: SkipSet | None = None, watch: Watch | None = None, *, once: bool = False
    ) -> Tensor:
        """Logits [R, V] of the batch's `rows`, in compute dtype or fp32. `watch` sees the residual stream. `once`: a
        number of rows that will hardly come again, not worth a graph or an attention launch of its own."""
        if watch is not None or not self.ready():
            return self._plain(batch, skip, watch)
        num_rows = sum(s.num for s in batch.spans)
        single = not isinstance(batch.tokens, Tensor) or num_rows == len(batch.spans)
        if single and not once and self.graphs.holds_decode(batch.spans):
            self.on_launch("logits", num_rows)
            logits = self.graphs.logits(batch.spans, batch.tokens, skip)
            if len(batch.rows) == num_rows:
                return logits
            return logits[torch.tensor(list(batch.rows), device=self.device, dtype=torch.int64)]
        self.on_launch("fused", num_rows)
        return self._run_fused(batch, skip, once)

    def on_launch(self, kind: LaunchKind, num_rows: int, num_passes: int = 1) -> None:
        """Called for every launch of a fused step; does nothing. For measurements and tests to replace."""

    @torch.no_grad()
    def launch_decode(
        self, batch: Batch, samplings: Sequence[Sampling], skip: SkipSet | None = None
    ) -> PendingTokens | None:
        """Launch a step in which the device chooses a token after every row, one Sampling per span; None where that is
        not possible."""
        if not self.ready() or len(batch.rows) != sum(s.num for s in batch.spans):
            return None
        if not self.graphs.holds_decode(batch.spans):
            return None
        if batch.device_drafts:
            self.graphs.load_drafts(batch.spans, batch.device_drafts)
        self.on_launch("decode", len(batch.rows))
        return self.graphs.launch(batch.spans, batch.tokens, samplings, skip)

    @torch.no_grad()
    def launch_next(
        self, spans: Sequence[RowSpan], samplings: Sequence[Sampling], skip: SkipSet | None = None, num_steps: int = 1
    ) -> list[PendingTokens]:
        """Launch the steps after the last launch, one row each, on the tokens that it chose. Several are one launch;
        the spans are those of the first."""
        self.on_launch("next", len(spans), num_steps)
        if num_steps == 1:
            return [self.graphs.launch(spans, None, samplings, skip)]
        return self.graphs.launch_steps(spans, samplings, skip, num_steps)

    @torch.no_grad()
    def launch_prefill(
        self, batch: Batch, samplings: Sequence[Sampling], skip: SkipSet | None = None
    ) -> PendingTokens | None:
        """`launch_decode` for a step with prefills: a token after the last row of the first spans, one for each
        Sampling; None where that is not possible, or not worth a graph yet."""
        if not self.ready() or batch.device_drafts or not holds_prefill(batch.spans):
            return None
        assert not isinstance(batch.tokens, Tensor)
        pending = launch_prefill(self.graphs, batch.spans, batch.tokens, samplings, skip)
        if pending is not None:
            self.on_launch("prefill", sum(s.num for s in batch.spans))
        return pending

    @torch.no_grad()
    def launch_chain(
        self, batch: Batch, samplings: Sequence[Sampling], num_tokens: int, skip: SkipSet | None = None
    ) -> PendingTokens | None:
        """`launch_decode` for the last row of each span, then num_tokens - 1 times for the token just chosen, in one
        launch; None where that is not possible. The spans' blocks must hold those rows, too."""
        if not self.ready() or len(batch.rows) != sum(s.num for s in batch.spans):
            return None
        assert not isinstance(batch.tokens, Tensor)
        if not holds_chain(batch.spans):
            return None
        self.on_launch("chain", len(batch.spans), num_tokens)
        return launch_chain(self.graphs, batch.spans, batch.tokens, samplings, num_tokens, skip)

    def prepare(self, kinds: Sequence[StepKindName], limits: StepLimits, *, rehearse: bool = False) -> None:
        """Make the graphs of steps of these kinds, run the passes of those that have none: so their kernels are
        compiled and loaded. Prefills first: their graphs need the largest tables. `rehearse`: in a rehearsal
        (compile_ahead.py), which only meets the kernels."""
        if not self.ready():
            return
        for name in kinds:
            kind = STEP_KINDS[name]
            if name == "eager" and not rehearse:
                if self._warmed >= limits.max_rows:
                    continue
                self._warmed = limits.max_rows
            for size in (kind.rehearsed if rehearse else kind.sizes)(limits, self):
                kind.make(self, size, limits)

    @property
    def fused(self) -> FusedDecoder:
        """Where the runner is `ready`."""
        assert self._fused is not None
        return self._fused

    @property
    def graphs(self) -> GraphCache:
        """Where the runner is `ready`."""
        assert self._graphs is not None
        return self._graphs

    @property
    def num_graphs(self) -> int:
        """Graphs made so far."""
        return 0 if self._graphs is None else self._graphs.num_graphs

    def ready(self) -> bool:
        """Whether the next step runs fused; weights and hooks that changed are noticed by `refresh`."""
        if self._fused is None and self.fast:
            self.refresh()
        return self._fused is not None

    def _plain(self, batch: Batch, skip: SkipSet | None, watch: Watch | None) -> Tensor:
        short = self._cpu.taken(batch.spans) if self._cpu is not None and skip is None and watch is None else []
        short = [i for i in short if batch.spans[i].adapter < 0]
        if not short:
            return self._by_the_model(batch, skip, watch)
        if len(short) == len(batch.spans):
            return self._in_one_call(batch)
        (few, at), (others, rest) = part_of(batch, short), part_of(batch, sorted({*range(len(batch.spans))} - {*short}))
        found = torch.cat([self._in_one_call(few), self._by_the_model(others, skip, watch)])
        return found[torch.tensor([*at, *rest]).argsort()]

    def _in_one_call(self, batch: Batch) -> Tensor:
        assert self._cpu is not None
        tokens = batch.tokens.tolist() if isinstance(batch.tokens, Tensor) else batch.tokens
        return self._map_logits(self._cpu.logits(tokens, batch.spans, batch.rows, self.cache))

    def _by_the_model(self, batch: Batch, skip: SkipSet | None, watch: Watch | None) -> Tensor:
        device, tokens = self.device, batch.tokens
        if not isinstance(tokens, Tensor):
            tokens = torch.tensor(list(tokens), device=device)
        positions = [p for span in batch.spans for p in range(span.start, span.stop)]
        # A model without these arguments works as long as they are not needed.
        options: dict[str, Any] = {} if skip is None else {"skip": skip}
        if watch is not None:
            options["watch"] = watch
        with _few_plans(batch), self.adapters.applied(row_slots(batch.spans)):
            logits = self.model(
                tokens[None],
                torch.tensor([positions], device=device),
                attend=self.cache.plan(batch.spans, device),
                rows=torch.tensor(list(batch.rows), device=device, dtype=torch.int64),
                **options,
            )
        return self._map_logits(logits)

    def _run_fused(self, batch: Batch, skip: SkipSet | None, by_table: bool) -> Tensor:
        fused, spec = self.fused, self.model.spec
        self.cache.reserve(spec.num_kv_heads, spec.head_dim, fused.dtype, fused.device)
        rows = place_rows(batch.spans, self.cache.pool.block_size, spec.num_heads, spec.num_kv_heads, by_table=by_table)
        num, num_wanted = len(rows.positions_T), len(batch.rows)
        tokens, wanted = batch.tokens, _tensor(batch.rows, few_sizes(num_wanted))
        known = [] if isinstance(tokens, Tensor) else [_tensor(tokens, num)]
        if any(s.adapter >= 0 for s in batch.spans):
            slots = row_slots(batch.spans)
            known.append(torch.tensor([*slots, *[-1] * (num - len(slots))], dtype=torch.int32))
        rows, (wanted, *known) = rows.to(fused.device, wanted, *known)
        if any(s.adapter >= 0 for s in batch.spans):
            rows = replace(rows, adapters=RowAdapters(self.adapters.stacks, known.pop()))
        given = F.pad(tokens, (0, num - len(tokens))) if isinstance(tokens, Tensor) else known[0]
        with _few_plans(batch):
            x_TD = fused.hidden(given, rows, self.cache, skip)
        return self._map_logits(fused.logits(x_TD.index_select(0, wanted))[:num_wanted])

    def discard_nonfinite(self, blocks: Sequence[int]) -> None:
        """Zeros instead of NaN and infinity among the keys and values of these blocks."""
        self.cache.discard_nonfinite(blocks)

    def prompt_logprob_parts(
        self, tokens: Sequence[int], num_top: int, chunk: int, slot: int = -1
    ) -> Iterator[list[TokenLogprob | None]]:
        """Log-probabilities of a prompt's tokens, each with the `num_top` likeliest; the KV cache is not used. `slot`:
        of an adapter."""
        parts = prompt_logprob_parts(self.model, tokens, num_top, chunk)
        while True:
            with self.adapters.applied([slot]):
                part = next(parts, None)
            if part is None:
                return
            yield part

    def embedding_parts(self, texts: Sequence[Sequence[int]], pooling: Pooling, chunk: int) -> Iterator[Tensor | None]:
        """The vectors of texts that are computed together (embedding.py); the KV cache is not used."""
        return embedding_parts(self.model, texts, pooling, chunk)

    def measure_seconds(self, num_rows: int, skip: SkipSet | None = None) -> float:
        """Seconds of a forward over this many rows, the best of a few or a long one, on a cache of its own. More rows
        than one request can have in a decode step belong to several requests."""
        size, positions = self.cache.pool.block_size, self.model.spec.max_positions
        # Two rows each fill a graph without padding, like most real steps of so many rows.
        each = min(num_rows if num_rows <= ROWS_EACH[-1] else 2, positions)
        pages, num = -(-each // size), -(-num_rows // each)
        pool = BlockPool(num * pages, size)
        spans = [
            RowSpan(list(range(n * pages, (n + 1) * pages)), 0, min(each, num_rows - n * each)) for n in range(num)
        ]
        apart = self.apart(pool)
        batch = Batch(spans, [0] * num_rows, range(num_rows))
        # The first fused one compiles and captures. All ranks of a split model do equally many, so no clock decides.
        passes = 6 if apart.fast else 2 if self.model.spec.num_params() < LONG_PASS else 1
        seconds = []
        for _ in range(passes):
            began = time.perf_counter()
            apart.forward(batch, skip).argmax(-1).tolist()  # waits for the device
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    def apart(self, pool: BlockPool) -> Runner:
        """The same model with a cache of its own."""
        apart = Runner(self.model, pool, graphs=self._wanted, map_logits=self._map_logits)
        apart.adapters = self.adapters
        if self.ready():
            apart._fused = self.fused
            apart._graphs = GraphCache(self.fused, apart.cache, self._map_logits, self.adapters)
        else:
            self.refresh()  # there may have been no step yet
            apart._cpu = self._cpu
        return apart


def part_of(batch: Batch, chosen: Sequence[int]) -> tuple[Batch, list[int]]:
    """These requests of a batch, and which of its wanted rows are theirs."""
    tokens = batch.tokens.tolist() if isinstance(batch.tokens, Tensor) else batch.tokens
    ends = list(accumulate(span.num for span in batch.spans))
    rows = [row for i in chosen for row in range(ends[i] - batch.spans[i].num, ends[i])]
    moved = {row: index for index, row in enumerate(rows)}
    wanted = [index for index, row in enumerate(batch.rows) if row in moved]
    spans, own = [batch.spans[i] for i in chosen], [moved[batch.rows[index]] for index in wanted]
    return Batch(spans, [tokens[row] for row in rows], own), wanted


def row_slots(spans: Sequence[RowSpan]) -> list[int]:
    """The adapter of each row."""
    return [span.adapter for span in spans for _ in range(span.num)]


def _few_plans(batch: Batch) -> AbstractContextManager[None]:
    return limit_cudnn_plans(s.num if s.start == 0 else 0 for s in batch.spans)


def _tensor(numbers: Sequence[int], num: int) -> Tensor:
    """[num] on the host, zeros at the end; through an array, in a sixth of the time of torch.tensor."""
    values = array("q", numbers)
    values.extend([0] * (num - len(values)))
    return torch.from_numpy(np.asarray(values))
