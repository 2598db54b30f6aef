"""Steps with fixed addresses: what a CUDA graph can hold, and the graphs.

A decode step of N requests with Q rows each (Q - 1 drafts) is one program: embedding, decoder layers, writing of keys
and values, attention, head, choice of tokens. Everything that changes from step to step is in device buffers, so on a
GPU the program is captured once and replayed with a single launch. Graphs are made when first needed, keyed by

    (requests, rows each, how tokens are chosen, skip set, long context or not, steps of a launch, adapters or not)

with the first two padded upwards (`DecodeShape`); padding rows write nothing. `CapturedStep` is such a program;
`DecodeGraph` here, `PrefillGraph` (prefill_graph.py) and `DraftChainGraph` (draft_chain_graph.py) are the three kinds.
Each has a shape, which is its key and makes it; step_kinds.py has the shapes to prepare. `GraphCache` holds the graphs
and the buffers they share. Without a GPU the same program runs eagerly, which is how it is tested. Steps with
several rows each are padded to few sizes, so that all of them can be captured during warm-up; `num_graphs` counts, so
that the time of a capture is not taken for the time of a step.

The first kernel of a program reads one buffer of integers from the host's memory, and the last one writes the chosen
tokens there (kernels/runtime/host_ring.py): a step is one command of the stream. The integers:

    token      -1: the token that the previous launch chose in this row, which never left the device
    position, slot (place of the row's keys and values), seed
    where in the block tables to note the row's block: tables stay on the device and grow there
    a tile per request (kernels/attention/paged_attention.py), its numbers in 32 bits

A block table is copied whole only when another request takes its row. When a request ends, all behind it move up, and
the tables that changed are copied together. `PendingTokens.tokens` waits for the chosen tokens: the one host sync of a
step, and it can come after the next step has been launched.

Shapes: N requests, Q rows each, R = N Q rows, W blocks per table, V vocabulary.
"""

from __future__ import annotations

import gc
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shoestring.kernels.attention.paged_attention import splits_for
from shoestring.kernels.gemv.embed_argmax import NO_TOKEN, argmax_token_
from shoestring.kernels.runtime.capture_stream import on_capture_stream
from shoestring.kernels.runtime.compile_ahead import rehearsed
from shoestring.kernels.runtime.host_ring import HostRing, Receipt, to_device
from shoestring.kernels.runtime.triton_backend import fall_back
from shoestring.kernels.sampling.sample_tokens import PARAMETERS, sample_tokens_
from shoestring.model.skip import SkipSet
from shoestring.serve.engine.adapters import AdapterBank, RowAdapters
from shoestring.serve.engine.block_pool import RowSpan
from shoestring.serve.engine.fused_decoder import AttentionTiles, FusedDecoder, RowPlacement
from shoestring.serve.engine.kv_cache import KVCache
from shoestring.serve.engine.sampling import Sampling, parameters

SamplingKind = Literal["logits", "greedy", "drawn", "cut"]
LogitMap = Callable[[Tensor], Tensor]

DeviceDraft = tuple[int, Tensor, int, int]  # whose (index of a span), tokens [N, G], row in them, how many

REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
REQUESTS_DRAFTED = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # the same where they have several rows each
ROWS_EACH = (1, 2, 3, 5, 9, 16)  # those of 1, 2, 4 and 8 drafts among them
MAX_ROWS = 512
MAX_GRAPHS = 512  # then the least recently used one is dropped
MAX_PADDING = 6  # rows of a graph per row of the step; kernel by kernel the step would take longer
PADDING = Sampling()  # of rows that are none
STEPS_PER_LAUNCH = (4, 2)  # steps of one launch, where they take no longer than GROUP_SECONDS without a context
GROUP_SECONDS = 0.004
GROUPED_REQUESTS = 4  # at most, of such steps


class GraphShape(Protocol):
    """What differs between the graphs of a kind, and so the key of one; shapes of two kinds are never equal."""

    @property
    def num_requests(self) -> int: ...
    @property
    def adapted(self) -> bool: ...
    def __hash__(self) -> int: ...
    def make(self, owner: GraphCache) -> CapturedStep: ...


def identity(logits: Tensor) -> Tensor:
    return logits


class PendingTokens:
    """The tokens of a launched step, request by request."""

    def __init__(self, receipt: Receipt, chosen_R: Tensor, nums: Sequence[int], rows_each: int, first: int = 0) -> None:
        """`chosen_R`: where they are on the device, until the next launch; `first`: of them among the launch's."""
        self._receipt, self._nums, self._each, self.chosen_R, self._first = receipt, nums, rows_each, chosen_R, first

    def tokens(self) -> list[list[int]]:
        """The tokens chosen after each request's rows; waits for the device."""
        chosen, each = self._receipt.values(), self._each
        return [chosen[at : at + num] for at, num in zip(itertools.count(self._first, each), self._nums, strict=False)]

    def wait(self) -> None:
        """Until the device has finished the step."""
        self._receipt.wait()


class GraphCache:
    def __init__(
        self, fused: FusedDecoder, cache: KVCache, map_logits: LogitMap = identity, adapters: AdapterBank | None = None
    ) -> None:
        """`map_logits` maps the model's logits to the tokens they are chosen from."""
        self.fused, self.cache, self.map_logits, self.adapters = fused, cache, map_logits, adapters
        self._adapters_seen = 0  # generation of the adapters' stacks
        self._width = cache.pool.blocks_for(fused.spec.max_positions)
        # One more entry after the tables, where padding rows write.
        self._tables = torch.zeros(0, dtype=torch.int32, device=fused.device)
        # Per table row: the blocks of which request, and how many of them are on the device.
        self._known: list[tuple[Sequence[int], int]] = []
        self.last_R = torch.zeros(MAX_ROWS, dtype=torch.int64, device=fused.device)
        self._graphs: dict[GraphShape, CapturedStep] = {}
        self._seen: set[GraphShape] = set()
        self._num_moves = cache.num_moves
        self._num_reserved = -1  # blocks that the cache has memory for
        self.num_graphs = 0
        self.prefills: list[PendingTokens] = []  # the last steps with prefills, oldest first
        self._pool = torch.cuda.graph_pool_handle() if fused.device.type == "cuda" else None

    # -- what the runner calls ------------------------------------------------------------------------------
    def holds_decode(self, spans: Sequence[RowSpan]) -> bool:
        """Whether a decode graph holds these rows and pays off: few rows each, and not mostly padding."""
        num_each = max(s.num for s in spans)
        if len(spans) > REQUESTS[-1] or num_each > ROWS_EACH[-1]:
            return False
        num, each = self.padded(spans)
        return num * each <= min(MAX_ROWS, MAX_PADDING * sum(s.num for s in spans) + 8)

    def logits(self, spans: Sequence[RowSpan], tokens: Sequence[int] | Tensor, skip: SkipSet | None) -> Tensor:
        """Logits of every row, [T, V]."""
        graph, _ = self._launch(spans, tokens, None, skip)
        index = [n * graph.rows_each + i for n, s in enumerate(spans) for i in range(s.num)]
        if index == list(range(len(index))):
            return graph.logits[: len(index)].clone()
        return graph.logits[torch.tensor(index, device=self.fused.device)]

    def launch(
        self,
        spans: Sequence[RowSpan],
        tokens: Sequence[int] | Tensor | None,
        samplings: Sequence[Sampling],
        skip: SkipSet | None,
    ) -> PendingTokens:
        """Choose the token after each row, one Sampling per request. `tokens` None: those that the previous launch
        chose for the same requests, one position before."""
        graph, receipt = self._launch(spans, tokens, samplings, skip)
        return PendingTokens(receipt, graph.chosen, [s.num for s in spans], graph.rows_each)

    def launch_steps(
        self, spans: Sequence[RowSpan], samplings: Sequence[Sampling], skip: SkipSet | None, num_steps: int
    ) -> list[PendingTokens]:
        """Several steps in one launch, one row each: the first as `launch` without tokens, the others on the tokens of
        the one before. The spans' blocks hold all of their rows."""
        shape = self._shape(spans, samplings, skip, num_steps)
        # With the rows of later steps, which note their blocks in the tables: they are not sent again for them.
        graph: DecodeGraph = self.graph(shape, [RowSpan(s.blocks, s.start, s.num * num_steps) for s in spans])
        graph.fill(spans, None, samplings)
        receipt, nums = graph.launch(), [s.num for s in spans]
        return [PendingTokens(receipt, graph.chosen, nums, 1, i * shape.num_requests) for i in range(num_steps)]

    def steps_per_launch(self, spans: Sequence[RowSpan], samplings: Sequence[Sampling], skip: SkipSet | None) -> int:
        """How many steps of these requests, one row each, to launch at once; 1 where they differ in their program."""
        shape = self._shape(spans, samplings, skip)
        found = self._graphs.get(shape)
        most = found.steps_per_launch if isinstance(found, DecodeGraph) else 1
        later = [replace(s, start=s.start + most - 1) for s in spans]
        return most if self._shape(later, samplings, skip) == shape else 1

    def _shape(
        self, spans: Sequence[RowSpan], samplings: Sequence[Sampling] | None, skip: SkipSet | None, num_steps: int = 1
    ) -> DecodeShape:
        """Of the decode graph that holds these rows."""
        (num, each), adapted = self.padded(spans), any(s.adapter >= 0 for s in spans)
        long = self.long_differs(num * each, skip, adapted) and spans[0].stop > self.fused.short_context
        return DecodeShape(num, each, sampling_kind(samplings), skip, long, num_steps, adapted)

    def load_drafts(self, spans: Sequence[RowSpan], device_drafts: Sequence[DeviceDraft]) -> None:
        """Copy drafts that are on the device to where a launch of these spans reads them: behind the first row of
        each request. Their tokens are given to the launch as -1."""
        each = self.padded(spans)[1]
        if len(spans) == 1 == len(device_drafts):
            _, tokens_NG, row, num = device_drafts[0]
            self.last_R[1 : 1 + num] = tokens_NG[row, :num]
            return
        by_source: dict[int, tuple[Tensor, list[int], list[int]]] = {}
        for n, tokens_NG, row, num in device_drafts:
            _, to, of = by_source.setdefault(id(tokens_NG), (tokens_NG, [], []))
            to += range(n * each + 1, n * each + 1 + num)
            of += range(row * tokens_NG.shape[1], row * tokens_NG.shape[1] + num)
        for tokens_NG, to, of in by_source.values():
            both = _to_device([*to, *of], torch.int64, self.fused.device)
            self.last_R[both[: len(to)]] = tokens_NG.flatten()[both[len(to) :]]

    # -- one launch -----------------------------------------------------------------------------------------
    def _launch(
        self,
        spans: Sequence[RowSpan],
        tokens: Sequence[int] | Tensor | None,
        samplings: Sequence[Sampling] | None,
        skip: SkipSet | None,
    ) -> tuple[DecodeGraph, Receipt]:
        shape = self._shape(spans, samplings, skip)
        graph: DecodeGraph = self.graph(shape, spans)
        ids: Sequence[int] | None
        if isinstance(tokens, Tensor):
            assert len(tokens) == len(spans) and all(s.num == 1 for s in spans)
            rows = slice(None, len(spans) * shape.rows_each, shape.rows_each)
            self.last_R[rows] = tokens
            ids = None
        else:
            ids = tokens
        graph.fill(spans, ids, samplings)
        return graph, graph.launch()

    def long_differs(self, num_rows: int, skip: SkipSet | None, adapted: bool = False) -> bool:
        """Whether a step is another program beyond the short context."""
        one_kernel = skip is None and not adapted and self.fused.in_one_kernel
        return num_rows == 1 and self.fused.short_context < math.inf and not one_kernel

    def padded(self, spans: Sequence[RowSpan]) -> tuple[int, int]:
        """Requests and rows each of the graph that holds these rows."""
        each = padded_size(max(s.num for s in spans), ROWS_EACH)
        return padded_size(len(spans), REQUESTS if each == 1 else REQUESTS_DRAFTED), each

    def prepare(self, shape: GraphShape, *, grouped: bool = True) -> None:
        """Make the graph of this shape now, unless it exists, and those that go with it."""
        for companion in self.find(shape).companions(grouped):
            self.prepare(companion, grouped=grouped)

    def graph(self, shape: GraphShape, spans: Sequence[RowSpan]) -> Any:
        """The graph of this shape, made when first needed, with block tables and KV cache ready for these rows."""
        found = self.find(shape)
        self._send_tables(spans)
        return found

    def find(self, shape: GraphShape) -> CapturedStep:
        if self.cache.pool.num_touched > self._num_reserved:
            spec, self._num_reserved = self.fused.spec, self.cache.pool.num_touched
            self.cache.reserve(spec.num_kv_heads, spec.head_dim, self.fused.dtype, self.fused.device)
        if self.cache.num_moves != self._num_moves:
            self._drop(*self._graphs)
            self._num_moves = self.cache.num_moves
        if self.adapters is not None and self.adapters.generation != self._adapters_seen:
            self._drop(*(held for held in self._graphs if held.adapted))
            self._adapters_seen = self.adapters.generation
        self._resize_tables(shape.num_requests)
        found = self._graphs.pop(shape, None)
        if found is None:
            if len(self._graphs) == MAX_GRAPHS:
                self._drop(next(iter(self._graphs)))
            found = shape.make(self)
            if rehearsed() is not None:  # nothing was captured
                return found
            self.num_graphs += 1
        self._graphs[shape] = found  # at the end: the most recently used
        return found

    def seen_before(self, shape: GraphShape) -> bool:
        """Whether this graph exists or was needed before; one that is needed once is not worth its capture."""
        known = shape in self._graphs or shape in self._seen
        self._seen.add(shape)
        return known

    def _drop(self, *shapes: GraphShape) -> None:
        if self.fused.device.type == "cuda":
            torch.cuda.synchronize(self.fused.device)  # one of them may be running
        for shape in shapes:
            del self._graphs[shape]
        if shapes and not self._graphs:
            self.leave_pool()

    def leave_pool(self) -> None:
        """Give later graphs a new memory pool. The allocator adds no graph to a pool that all others have left, and
        after a failed capture the pool may be in that state."""
        if self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()

    def _resize_tables(self, num: int) -> None:
        if self._tables.numel() < num * self._width + 1:
            # Graphs hold the address of the old tables.
            self._drop(*self._graphs)
            self._known = [((), 0)] * num
            self._tables = torch.zeros(num * self._width + 1, dtype=torch.int32, device=self.fused.device)

    @property
    def table_entries(self) -> Tensor:
        """Of all tables, one after the other, and the one that padding rows write to."""
        return self._tables

    def tables(self, num: int) -> Tensor:
        return self._tables[: num * self._width].view(num, self._width)

    def _send_tables(self, spans: Sequence[RowSpan]) -> None:
        """Make row n of the tables hold the blocks of span n below its first row; one copy for all that changed."""
        size, changed = self.cache.pool.block_size, []
        for n, span in enumerate(spans):
            blocks, num_known = self._known[n]
            if blocks is not span.blocks or num_known * size < span.start:
                changed.append(n)
                num_known = len(span.blocks)
            elif num_known * size >= span.stop:
                continue
            self._known[n] = span.blocks, max(num_known, -(-span.stop // size))
        if not changed:
            return
        rows_MW = np.zeros((len(changed), max(len(spans[n].blocks) for n in changed)), dtype=np.int32)
        for row_W, n in zip(rows_MW, changed, strict=True):
            row_W[: len(spans[n].blocks)] = spans[n].blocks
        here = torch.from_numpy(np.array(changed)), torch.from_numpy(rows_MW)
        at_M, sent_MW = to_device(here, self.fused.device)
        tables_NW = self._tables[:-1].view(-1, self._width)
        tables_NW[:, : sent_MW.shape[1]].index_copy_(0, at_M, sent_MW)

    @property
    def padding(self) -> int:
        """The table entry that padding rows write to."""
        return self._tables.numel() - 1

    def place(self, n_T: np.ndarray, page_T: np.ndarray) -> np.ndarray:
        """The table entries for block `page` of request n."""
        return n_T * self._width + page_T

    def note_blocks(self, at: Tensor, block: Tensor) -> None:
        """Part of a program: write block numbers into the tables."""
        self._tables.index_copy_(0, at, block.to(torch.int32))


class CapturedStep(ABC):
    """A program over rows, and on a GPU its CUDA graph. Its input is one buffer of integers: five per row (token,
    position, slot, table entry of its block, block number), the seeds of the rows that tokens are chosen for, and the
    numbers that a subclass adds. Its output are the chosen tokens. Both pass through a `HostRing`."""

    nonfinite = NO_TOKEN  # what is chosen where logits are not finite

    def __init__(
        self,
        owner: GraphCache,
        num_requests: int,
        num_rows: int,
        num_chosen: int,
        num_own: int,
        kind: SamplingKind,
        skip: SkipSet | None,
        chosen: Tensor,
        num_steps: int = 1,
        adapted: bool = False,
    ) -> None:
        """`num_chosen`: rows that tokens are chosen for; `num_own`: integers that the subclass adds; `chosen`: where
        the program leaves its tokens; `num_steps`: that many buffers of integers, one after the other; `adapted`: some
        rows have adapters."""
        self.owner, self.num_requests, self.num_rows = owner, num_requests, num_rows
        self.kind, self.skip, self.chosen, device = kind, skip, chosen, owner.fused.device
        self._own_at = 5 * num_rows + num_chosen  # where the integers of the subclass begin
        self._num_each, self.num_steps = self._own_at + num_own, num_steps
        self._numbers = torch.zeros(num_steps * self._num_each, dtype=torch.int64, device=device)
        self.parameters_4R = torch.zeros(len(PARAMETERS), num_chosen, dtype=torch.float64, device=device)
        self.arrived_R = torch.zeros(num_chosen, dtype=torch.int32, device=device)  # by argmax_token_
        self._sent: list[Sampling] | None = None
        # Not among the integers: products read them before the kernels before them have ended.
        self._slots_T = torch.full((num_rows if adapted else 0,), -1, dtype=torch.int32, device=device)
        self._slots_sent: list[int] | None = None
        self._seeds: Sequence[int] = [0] * num_chosen
        self.logits = torch.empty(0, device=device)
        self._ring = HostRing(self._numbers.numel(), 0 if kind == "logits" else chosen.numel(), device)
        self.replay: Callable[[], None] = self._whole_program
        self._seconds = math.inf  # of a replay, of padding: without the time that contexts take
        if device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        # All rows are padding while the program runs to compile its kernels; of the state only `last_R` would change.
        nothing = np.zeros(self._numbers.numel(), dtype=np.int64)
        for step in range(self.num_steps):
            self._pad(nothing[step * self._num_each :])
        self._numbers.copy_(torch.from_numpy(nothing))  # for a rehearsal, in which no kernel reads the ring
        self._ring.restart(nothing)
        last = self.owner.last_R.clone()
        with on_capture_stream():
            self._whole_program()
        if rehearsed() is not None:
            self.owner.last_R.copy_(last)
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with no_collection(), torch.cuda.graph(graph, pool=self.owner._pool, capture_error_mode="thread_local"):
                self._whole_program()
            graph.replay()  # the first replay uploads the graph, which takes longer
            self.replay = graph.replay
            self._seconds = seconds_of(graph.replay)
        except RuntimeError as error:  # e.g. a Format whose linear waits for the host: the program runs eagerly
            torch.cuda.synchronize()
            self.owner.leave_pool()
            fall_back(f"a {type(self).__name__} could not be captured as a CUDA graph ({error})")
        self._ring.restart(nothing)
        self.owner.last_R.copy_(last)

    def launch(self) -> Receipt:
        """Of what `fill` wrote; the tokens come with the receipt."""
        self.replay()
        return self._ring.launched()

    def companions(self, grouped: bool) -> Iterator[GraphShape]:
        """Shapes to make along with this one; `grouped`: those of several steps in a launch, too."""
        return iter(())

    def _whole_program(self) -> None:
        self._ring.take_(self._numbers, self.owner.table_entries, self.num_rows, self.num_steps)
        self._program()
        self._ring.give_(self.chosen)

    @abstractmethod
    def _program(self) -> None: ...

    def _rows(self, step: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and slots."""
        first = step * self._num_each
        given, position, slot = self._numbers[first : first + 3 * self.num_rows].view(3, self.num_rows)
        return given, position, slot

    @property
    def _adapters(self) -> RowAdapters | None:
        bank = self.owner.adapters
        return RowAdapters(bank.stacks, self._slots_T) if bank is not None and len(self._slots_T) else None

    def _send_slots(self, rows: list[int]) -> None:
        """The adapter of each row; the rows after them are padding."""
        rows += [-1] * (len(self._slots_T) - len(rows))
        if len(self._slots_T) and rows != self._slots_sent:
            self._slots_T.copy_(to_pinned(rows, torch.int32, self._slots_T.device), non_blocking=True)
            self._slots_sent = rows

    @property
    def seeds_R(self) -> Tensor:
        return self._numbers[5 * self.num_rows : self._own_at]

    def _choose(self, logits_RV: Tensor, position_R: Tensor, out_R: Tensor) -> None:
        """Part of a program: choose the tokens after rows at these positions."""
        if self.kind == "greedy":
            argmax_token_(logits_RV, out_R, self.arrived_R, self.nonfinite)
        else:
            given = self.parameters_4R, self.seeds_R, position_R + 1
            sample_tokens_(logits_RV, *given, out_R, cuts=self.kind == "cut", nonfinite=self.nonfinite)

    def _pad(self, numbers: np.ndarray) -> np.ndarray:
        """Make all rows padding; returns a view of them."""
        rows_5R = numbers[: 5 * self.num_rows].reshape(5, self.num_rows)
        rows_5R[:] = np.array([0, 0, -1, self.owner.padding, 0])[:, None]
        return rows_5R

    def _write(self, located: RowLocations, row_T: np.ndarray, tokens: Sequence[int] | None) -> np.ndarray:
        """Write the integers of the next launch's first step; returns those that are the subclass's to write. `row_T`:
        the program's row for each row."""
        size, numbers = self.owner.cache.pool.block_size, self._ring.slot()
        rows_5R = self._pad(numbers)
        rows_5R[0, row_T] = -1 if tokens is None else tokens
        rows_5R[1, row_T] = located.position_T
        rows_5R[2, row_T] = located.block_T * size + located.position_T % size
        rows_5R[3, row_T] = self.owner.place(located.span_T, located.position_T // size)
        rows_5R[4, row_T] = located.block_T
        numbers[5 * self.num_rows : self._own_at] = self._seeds
        return numbers[self._own_at : self._num_each]

    def _send_samplings(self, rows: list[Sampling]) -> None:
        """One for each row that a token is chosen for; the rows after them are padding."""
        if self.kind not in ("drawn", "cut"):
            return
        rows += [PADDING] * (self.parameters_4R.shape[1] - len(rows))
        if rows == self._sent:
            return
        settings, self._seeds = parameters(rows)
        host = to_pinned(settings, torch.float64, self._numbers.device)
        self.parameters_4R.copy_(host, non_blocking=True)
        self._sent = rows


class DecodeShape(NamedTuple):
    num_requests: int
    rows_each: int
    kind: SamplingKind
    skip: SkipSet | None = None
    long: bool = False  # a context beyond FusedDecoder.short_context
    num_steps: int = 1  # so many steps one after the other, with one row each
    adapted: bool = False  # some rows have adapters

    def make(self, owner: GraphCache) -> DecodeGraph:
        return DecodeGraph(owner, *self)


class DecodeGraph(CapturedStep):
    """Every request has the same number of rows, and a token is chosen after each. It adds a tile per request."""

    def __init__(
        self,
        owner: GraphCache,
        num_requests: int,
        rows_each: int,
        kind: SamplingKind,
        skip: SkipSet | None,
        long: bool = False,
        num_steps: int = 1,
        adapted: bool = False,
        chosen: Tensor | None = None,
    ) -> None:
        """As in `DecodeShape`. `chosen`: where the tokens are; None: in `last_R`."""
        self.rows_each, self.long, num_rows = rows_each, long, num_requests * rows_each
        self.num_splits = splits_for(num_requests, owner.fused.spec.num_kv_heads)
        assert num_steps == 1 or (rows_each == 1 and kind != "logits")
        if chosen is None:
            chosen = owner.last_R[:num_rows] if num_steps == 1 else owner.last_R.new_zeros(num_steps * num_rows)
        sizes = num_requests, num_rows, num_rows, 2 * num_requests
        super().__init__(owner, *sizes, kind, skip, chosen, num_steps, adapted)

    def _program(self) -> None:
        owner = self.owner
        last = owner.last_R[: self.num_rows]
        for step in range(self.num_steps):
            given, position, slot = self._rows(step)
            own = self._numbers[step * self._num_each + self._own_at : (step + 1) * self._num_each]
            tiles_N4 = own.view(torch.int32).view(self.num_requests, 4)
            tiles = AttentionTiles(tiles_N4, self.rows_each, self.num_splits)
            rows = RowPlacement(position, slot, owner.tables(self.num_requests), (tiles,), adapters=self._adapters)
            logits = owner.map_logits(owner.fused.row_logits(given, rows, owner.cache, self.skip, last, self.long))
            if self.kind == "logits":
                self.logits = logits
                return
            if self.num_steps > 1:
                last = self.chosen.view(self.num_steps, self.num_rows)[step]
            self._choose(logits, position, last)
        if self.num_steps > 1:
            owner.last_R[: self.num_rows].copy_(last)

    def companions(self, grouped: bool) -> Iterator[GraphShape]:
        if self.num_steps > 1:
            return
        adapted = len(self._slots_T) > 0
        shape = DecodeShape(self.num_requests, self.rows_each, self.kind, self.skip, self.long, adapted=adapted)
        for num_steps in self.group_sizes if grouped else ():
            yield shape._replace(num_steps=num_steps)
        # Only this graph, once made, tells whether the other differs.
        if not self.long and self.owner.long_differs(self.num_rows, self.skip, adapted):
            yield shape._replace(long=True)

    @property
    def steps_per_launch(self) -> int:
        """How many such steps to launch at once, where they follow each other: the device waits between two launches,
        which counts where steps are short, and tokens come all at once, which counts where they are long."""
        return self.group_sizes[0] if self.group_sizes else 1

    @property
    def group_sizes(self) -> Sequence[int]:
        """Numbers of steps of one launch that such steps may come in. A rehearsal meets all of them: it takes no
        time that would tell."""
        if self.rows_each > 1 or self.kind == "logits" or self.num_requests > GROUPED_REQUESTS:
            return ()
        if rehearsed() is not None:
            return STEPS_PER_LAUNCH
        return [num for num in STEPS_PER_LAUNCH if num * self._seconds <= GROUP_SECONDS][:1]

    def fill(
        self, spans: Sequence[RowSpan], tokens: Sequence[int] | None, samplings: Sequence[Sampling] | None
    ) -> None:
        """Write the integers of the next launch. `tokens`: request by request; None: all are on the device."""
        self._send_samplings([s for s in samplings or () for _ in range(self.rows_each)])
        self._send_slots([s.adapter for s in spans for _ in range(self.rows_each)])
        located = locate_rows(spans, self.owner.cache.pool.block_size)
        own = self._write(located, located.span_T * self.rows_each + located.offset_T, tokens)
        tiles_N4 = own.view(np.int32).reshape(self.num_requests, 4)
        n_N = np.arange(len(spans))
        fill_tiles(tiles_N4, n_N, n_N * self.rows_each, located.start_N, located.num_N)
        for step in range(1, self.num_steps):
            self._write_later(spans, located.num_N, step)

    def _write_later(self, spans: Sequence[RowSpan], num_N: np.ndarray, step: int) -> None:
        """The integers of a later step of the launch: those of the step before, each row one position further."""
        size, n = self.owner.cache.pool.block_size, len(num_N)
        before_I, after_I = self._ring.slot().reshape(self.num_steps, -1)[step - 1 : step + 1]
        after_I[:] = before_I
        rows_5R = after_I[: 5 * self.num_rows].reshape(5, self.num_rows)
        rows_5R[1:3, :n] += num_N
        after_I[self._own_at :].view(np.int32).reshape(-1, 4)[:n, 2] += num_N.astype(np.int32)
        for row in np.flatnonzero((rows_5R[1, :n] % size == 0) & (num_N > 0)).tolist():
            page = int(rows_5R[1, row]) // size
            block = spans[row].blocks[page]
            rows_5R[2:, row] = block * size, self.owner.place(np.array(row), np.array(page)), block


def fill_tiles(tiles_L4: np.ndarray, *columns: np.ndarray) -> None:
    """Columns: table, first row, its position, number of rows. The other tiles do nothing."""
    num = len(columns[0])
    for i, column in enumerate(columns):
        tiles_L4[:num, i] = column
    tiles_L4[num:] = 0


def sampling_kind(samplings: Sequence[Sampling] | None) -> SamplingKind:
    if samplings is None:
        return "logits"
    drawn = [s for s in samplings if not s.greedy]
    if any(s.cuts for s in drawn):
        return "cut"
    return "drawn" if drawn else "greedy"


def seconds_of(replay: Callable[[], None]) -> float:
    """Of a replay on the device, which is waited for."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@contextmanager
def no_collection() -> Iterator[None]:
    """Collecting an engine that is gone may destroy its graphs, which breaks a capture in progress."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def sizes_up_to(num: int, sizes: Sequence[int]) -> list[int]:
    """The padded sizes of 1 to `num`."""
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < num]


def padded_size(num: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= num)


class RowLocations(NamedTuple):
    """The rows of a step's spans, span by span."""

    start_N: np.ndarray
    num_N: np.ndarray
    span_T: np.ndarray  # index of the row's span
    offset_T: np.ndarray  # of the row in its span
    position_T: np.ndarray
    block_T: np.ndarray  # that holds the position


def locate_rows(spans: Sequence[RowSpan], size: int) -> RowLocations:
    if len(spans) == 1:  # the same with fewer calls: between two steps of one request the device waits for the host
        (span,) = spans
        offset_T = np.arange(span.num)
        position_T = offset_T + span.start
        block_T = np.array([span.blocks[at // size] for at in range(span.start, span.stop)], dtype=np.int64)
        return RowLocations(
            np.array([span.start]), np.array([span.num]), np.zeros_like(offset_T), offset_T, position_T, block_T
        )
    start_N, num_N = np.array([s.start for s in spans]), np.array([s.num for s in spans])
    span_T = np.arange(len(spans)).repeat(num_N)
    offset_T = np.arange(len(span_T)) - (num_N.cumsum() - num_N)[span_T]
    position_T = start_N[span_T] + offset_T
    pages = zip(span_T.tolist(), (position_T // size).tolist(), strict=True)
    block_T = np.array([spans[n].blocks[page] for n, page in pages], dtype=np.int64)
    return RowLocations(start_N, num_N, span_T, offset_T, position_T, block_T)


def pinned(num: int, device: torch.device) -> Tensor:
    """A host buffer of so many integers that can be copied to the device asynchronously."""
    return torch.empty(num, dtype=torch.int64, pin_memory=device.type == "cuda")


def to_pinned(values: list[int] | list[list[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def _to_device(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return to_pinned(values, dtype, device).to(device, non_blocking=True)
