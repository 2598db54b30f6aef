"""Decoding steps with fixed addresses: what a CUDA graph can hold, and the graphs.

A step of N requests with Q rows each (Q - 1 drafts) is one program: embedding, blocks, writing of keys and values,
attention, head and the choice of tokens. Everything that changes from step to step lies in device buffers, so on
a GPU the program is captured once and replayed with a single launch. Graphs are made when first needed, keyed by

    (requests, rows each, how tokens are chosen, skip set)

with the first two padded upwards; padding rows write nothing. Steps that read prompts (read_graph.py) and drafts behind
each other (chain_graph.py) are programs of the same kind. Elsewhere the same program simply runs, which is
how it is tested without a GPU. Steps with several rows each are padded to few sizes, so that all of them can be made
before the first request (`prepare`); `num_made` counts, so that nobody takes the making for the cost of a step.

One buffer of numbers is copied to the device before a launch:

    token      -1: the token that the previous launch chose in this row, which never left the device
    position, slot (place of the row's keys and values), seed
    where in the block tables to note the row's block: tables stay on the device and grow there
    a tile per request (kernels/paged_attention.py), its numbers in 32 bits

A block table is copied whole only when another request takes its row; when a request ends all behind it move up, so
the tables that changed travel together. `Flight.tokens` waits for the chosen
tokens: the one host sync of a step, and it can come after the next step has been launched.

Shapes: N requests, Q rows each, R = N Q rows, W blocks per table, V vocabulary.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoestring.kernels.backend import fall_back
from shoestring.kernels.draw import PARAMETERS, draw_tokens_
from shoestring.kernels.paged_attention import splits_for
from shoestring.kernels.side_stream import beside
from shoestring.kernels.step_ends import best_token_
from shoestring.model.skip import SkipSet
from shoestring.serve.fused import FusedDecoder, Rows, Tiles, to_device
from shoestring.serve.kv_cache import KVCache, Span
from shoestring.serve.sampling import Sampling, parameters

Kind = Literal["logits", "greedy", "drawn", "cut"]
Spread = Callable[[Tensor], Tensor]

Guess = tuple[int, Tensor, int, int]  # whose (index of a span), tokens [N, G], row in them, how many

REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
REQUESTS_DRAFTED = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # the same where they have several rows each
ROWS_EACH = (1, 2, 3, 5, 9, 16)  # those of 1, 2, 4 and 8 drafts among them
MAX_ROWS = 512
MAX_GRAPHS = 512  # the one that was not asked for longest goes
PADDED = 6  # times as many rows as are asked for; launched one by one they would take longer


def as_it_is(logits: Tensor) -> Tensor:
    return logits


class Flight:
    """The tokens of a launched step, request by request."""

    def __init__(self, chosen_R: Tensor, nums: Sequence[int], rows_each: int) -> None:
        self._nums, self._each, self.chosen_R = nums, rows_each, chosen_R
        self._event: torch.cuda.Event | None = None
        if chosen_R.is_cuda:
            self._host = torch.empty(chosen_R.shape, dtype=chosen_R.dtype, pin_memory=True)
            self._host.copy_(chosen_R, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = chosen_R.clone()

    def tokens(self) -> list[list[int]]:
        """What each row's token is followed by; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        chosen = self._host.tolist()
        return [chosen[n * self._each : n * self._each + num] for n, num in enumerate(self._nums)]

    def wait(self) -> None:
        """Until the device is done with the step; its tokens may be nobody's."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()


class StepGraphs:
    def __init__(self, fused: FusedDecoder, cache: KVCache, spread: Spread = as_it_is) -> None:
        """`spread` maps the model's logits to the tokens they are chosen from."""
        self.fused, self.cache, self.spread = fused, cache, spread
        self._width = cache.pool.blocks_for(fused.spec.max_positions)
        # Behind the tables one more number, where padding rows write.
        self._tables = torch.zeros(0, dtype=torch.int32, device=fused.device)
        # Per table row: whose blocks, and how many are there.
        self._known: list[tuple[Sequence[int], int]] = []
        self.last_R = torch.zeros(MAX_ROWS, dtype=torch.int64, device=fused.device)
        self._graphs: dict[tuple[object, ...], CapturedStep] = {}
        self._asked: set[tuple[object, ...]] = set()
        self._num_moves = cache.num_moves
        self.num_made = 0
        self.reads: list[Flight] = []  # the last steps that read prompts
        self._pool = torch.cuda.graph_pool_handle() if fused.device.type == "cuda" else None

    # -- what the runner calls ------------------------------------------------------------------------------
    def fits(self, spans: Sequence[Span]) -> bool:
        """Whether a step of these rows is worth a graph: few rows each, and not nearly all of it padding."""
        num_each = max(s.num for s in spans)
        if len(spans) > REQUESTS[-1] or num_each > ROWS_EACH[-1]:
            return False
        num, each = self.padded(spans)
        return num * each <= min(MAX_ROWS, PADDED * sum(s.num for s in spans) + 8)

    def logits(self, spans: Sequence[Span], tokens: Sequence[int] | Tensor, skip: SkipSet | None) -> Tensor:
        """Logits of every row, [T, V]."""
        graph = self._launch(spans, tokens, None, skip)
        index = [n * graph.rows_each + i for n, s in enumerate(spans) for i in range(s.num)]
        if index == list(range(len(index))):
            return graph.logits[: len(index)].clone()
        return graph.logits[torch.tensor(index, device=self.fused.device)]

    def choose(
        self,
        spans: Sequence[Span],
        tokens: Sequence[int] | Tensor | None,
        samplings: Sequence[Sampling],
        skip: SkipSet | None,
    ) -> Flight:
        """The token that follows each row, one Sampling a request. `tokens` None: those of the launch before,
        whose rows these are one position further on."""
        graph = self._launch(spans, tokens, samplings, skip)
        return Flight(self.last_R[: graph.num_rows], [s.num for s in spans], graph.rows_each)

    def take(self, spans: Sequence[Span], guesses: Sequence[Guess]) -> None:
        """Lay guesses that are on the device where a launch of these spans finds them: behind the first row of each
        request, whose tokens there are given as -1."""
        each = self.padded(spans)[1]
        if len(spans) == 1 == len(guesses):
            _, tokens_NG, row, num = guesses[0]
            self.last_R[1 : 1 + num] = tokens_NG[row, :num]
            return
        by_source: dict[int, tuple[Tensor, list[int], list[int]]] = {}
        for n, tokens_NG, row, num in guesses:
            _, to, of = by_source.setdefault(id(tokens_NG), (tokens_NG, [], []))
            to += range(n * each + 1, n * each + 1 + num)
            of += range(row * tokens_NG.shape[1], row * tokens_NG.shape[1] + num)
        for tokens_NG, to, of in by_source.values():
            both = _to_device([*to, *of], torch.int64, self.fused.device)
            self.last_R[both[: len(to)]] = tokens_NG.flatten()[both[len(to) :]]

    # -- one launch -----------------------------------------------------------------------------------------
    def _launch(
        self,
        spans: Sequence[Span],
        tokens: Sequence[int] | Tensor | None,
        samplings: Sequence[Sampling] | None,
        skip: SkipSet | None,
    ) -> StepGraph:
        num, each = self.padded(spans)
        kind, id = kind_of(samplings), "" if skip is None else skip.id
        graph = self.graph((num, each, kind, id), spans, lambda: StepGraph(self, num, each, kind, skip))
        ids: Sequence[int] | None
        if isinstance(tokens, Tensor):
            assert len(tokens) == len(spans) and all(s.num == 1 for s in spans)
            rows = slice(None, len(spans) * each, each)
            self.last_R[rows] = tokens
            ids = None
        else:
            ids = tokens
        graph.fill(spans, ids, samplings)
        graph.replay()
        return graph

    def padded(self, spans: Sequence[Span]) -> tuple[int, int]:
        """Requests and rows each of the graph that holds these rows."""
        each = at_least(max(s.num for s in spans), ROWS_EACH)
        return at_least(len(spans), REQUESTS if each == 1 else REQUESTS_DRAFTED), each

    def prepare(self, num: int, each: int, kind: Kind, skip: SkipSet | None = None) -> None:
        """Make the graph of such a step now, if it is not there."""
        key = (num, each, kind, "" if skip is None else skip.id)
        self.find(key, num, lambda: StepGraph(self, num, each, kind, skip))

    def graph(self, key: tuple[object, ...], spans: Sequence[Span], make: Callable[[], CapturedStep]) -> Any:
        """The graph of this key, made when first needed; tables and cache are ready for these rows."""
        num_requests = key[0]
        assert isinstance(num_requests, int)
        found = self.find(key, num_requests, make)
        self._send_tables(spans)
        return found

    def find(
        self, key: tuple[object, ...], num_requests: int, make: Callable[[], CapturedStep]
    ) -> CapturedStep:
        spec = self.fused.spec
        self.cache.reserve(spec.num_kv_heads, spec.head_dim, self.fused.dtype, self.fused.device)
        if self.cache.num_moves != self._num_moves:
            self._drop(*self._graphs)
            self._num_moves = self.cache.num_moves
        self._fit_tables(num_requests)
        found = self._graphs.pop(key, None)
        if found is None:
            if len(self._graphs) == MAX_GRAPHS:
                self._drop(next(iter(self._graphs)))
            found = make()
            self.num_made += 1
        self._graphs[key] = found  # the last that was asked for
        return found

    def met(self, key: tuple[object, ...]) -> bool:
        """Whether the graph is there, or was asked for before: one that is wanted once is not worth making."""
        known = key in self._graphs or key in self._asked
        self._asked.add(key)
        return known

    def _drop(self, *keys: tuple[object, ...]) -> None:
        if self.fused.device.type == "cuda":
            torch.cuda.synchronize(self.fused.device)  # one of them may be running
        for key in keys:
            del self._graphs[key]
        if keys and not self._graphs:
            self.leave_pool()

    def leave_pool(self) -> None:
        """Later graphs share other memory. The allocator takes no new one into a pool that all others have left, and
        after a capture that failed the pool may be such a one."""
        if self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()

    def _fit_tables(self, num: int) -> None:
        if len(self._tables) < num * self._width + 1:
            # Graphs hold the address of the old tables.
            self._drop(*self._graphs)
            self._known = [((), 0)] * num
            self._tables = torch.zeros(num * self._width + 1, dtype=torch.int32, device=self.fused.device)

    def tables(self, num: int) -> Tensor:
        return self._tables[: num * self._width].view(num, self._width)

    def _send_tables(self, spans: Sequence[Span]) -> None:
        """Make row n of the tables hold the blocks of span n below its first row: all that changed in one copy."""
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
        """Where in the tables padding rows write."""
        return len(self._tables) - 1

    def place(self, n_T: np.ndarray, page_T: np.ndarray) -> np.ndarray:
        """Where in the tables the number of request n's block `page` is."""
        return n_T * self._width + page_T

    def note_blocks(self, at: Tensor, block: Tensor) -> None:
        """Part of a program: write numbers of blocks into the tables."""
        self._tables.index_copy_(0, at, block.to(torch.int32))


class CapturedStep(ABC):
    """A program over rows whose numbers lie in one buffer, and on a GPU its graph. Behind five numbers of every row
    (token, position, slot, where its block belongs in the tables, its number) and the seeds of the rows that tokens
    are chosen for come those that a kind of program has of its own."""

    def __init__(
        self,
        owner: StepGraphs,
        num_requests: int,
        num_rows: int,
        num_chosen: int,
        num_own: int,
        kind: Kind,
        skip: SkipSet | None,
    ) -> None:
        """`num_chosen`: rows that tokens are chosen for; `num_own`: numbers of its own."""
        self.owner, self.num_requests, self.num_rows = owner, num_requests, num_rows
        self.kind, self.skip, device = kind, skip, owner.fused.device
        self._own_at = 5 * num_rows + num_chosen  # where its own numbers begin
        self._numbers = torch.zeros(self._own_at + num_own, dtype=torch.int64, device=device)
        self.parameters_4R = torch.zeros(len(PARAMETERS), num_chosen, dtype=torch.float64, device=device)
        self._sent: list[Sampling] | None = None
        self._seeds: Sequence[int] = [0] * num_chosen
        self.logits = torch.empty(0, device=device)
        self.replay: Callable[[], None] = self._program
        if device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        # All rows are padding while the program runs to compile its kernels: only the last tokens would change.
        self._rows_5R[2:4] = torch.tensor([[-1], [self.owner.padding]], device=self._numbers.device)
        last = self.owner.last_R.clone()
        with beside():
            self._program()
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                no_collection(),
                torch.cuda.graph(graph, pool=self.owner._pool, capture_error_mode="thread_local"),
            ):
                self._program()
            graph.replay()  # the first time it is sent to the device, which takes longer
            self.replay = graph.replay
        except RuntimeError as error:  # a Format whose product waits for the host, say: launched one by one
            torch.cuda.synchronize()
            self.owner.leave_pool()
            fall_back(f"a {type(self).__name__} could not be captured as a CUDA graph ({error})")
        self.owner.last_R.copy_(last)

    @abstractmethod
    def _program(self) -> None: ...

    @property
    def _rows_5R(self) -> Tensor:
        return self._numbers[: 5 * self.num_rows].view(5, self.num_rows)

    @property
    def seeds_R(self) -> Tensor:
        return self._numbers[5 * self.num_rows : self._own_at]

    def _place(self) -> tuple[Tensor, Tensor, Tensor]:
        """Part of a program: note the rows' blocks. Their tokens, positions and slots."""
        given, position, slot, at, block = self._rows_5R
        self.owner.note_blocks(
            at, block.view(torch.int32)[::2]
        )  # as they are, without a kernel that converts
        return given, position, slot

    def _choose(self, logits_RV: Tensor, position_R: Tensor, out_R: Tensor) -> None:
        """Part of a program: the tokens behind rows at these positions."""
        if self.kind == "greedy":
            best_token_(logits_RV, out_R)
        else:
            given = self.parameters_4R, self.seeds_R, position_R + 1
            draw_tokens_(logits_RV, *given, out_R, cuts=self.kind == "cut")

    def _host(self, laid: Laid, row_T: np.ndarray, tokens: Sequence[int] | None) -> Tensor:
        """Numbers of the next replay, those of its own still to be set. `row_T`: where each of the rows goes."""
        size = self.owner.cache.pool.block_size
        host = pinned(len(self._numbers), self._numbers.device)
        numbers = host.numpy()
        rows_5R = numbers[: 5 * self.num_rows].reshape(5, self.num_rows)
        rows_5R[:] = np.array([0, 0, -1, self.owner.padding, 0])[:, None]  # of padding
        rows_5R[0, row_T] = -1 if tokens is None else tokens
        rows_5R[1, row_T] = laid.at_T
        rows_5R[2, row_T] = laid.block_T * size + laid.at_T % size
        rows_5R[3, row_T] = self.owner.place(laid.of_T, laid.at_T // size)
        rows_5R[4, row_T] = laid.block_T
        numbers[5 * self.num_rows : self._own_at] = self._seeds
        return host

    def _send_samplings(self, rows: list[Sampling]) -> None:
        """One for each row that a token is chosen for; those that are missing belong to padding."""
        if self.kind not in ("drawn", "cut"):
            return
        rows += [Sampling()] * (self.parameters_4R.shape[1] - len(rows))
        if rows == self._sent:
            return
        settings, self._seeds = parameters(rows)
        host = to_pinned(settings, torch.float64, self._numbers.device)
        self.parameters_4R.copy_(host, non_blocking=True)
        self._sent = rows


class StepGraph(CapturedStep):
    """Every request has equally many rows, each followed by a token. Its own numbers: a tile per request."""

    def __init__(
        self,
        owner: StepGraphs,
        num_requests: int,
        rows_each: int,
        kind: Kind,
        skip: SkipSet | None,
    ) -> None:
        self.rows_each, num_rows = rows_each, num_requests * rows_each
        self.num_splits = splits_for(num_requests, owner.fused.spec.num_kv_heads)
        super().__init__(owner, num_requests, num_rows, num_rows, 2 * num_requests, kind, skip)

    def _program(self) -> None:
        owner = self.owner
        given, position, slot = self._place()
        last = owner.last_R[: self.num_rows]
        tiles_N4 = self._numbers[self._own_at :].view(torch.int32).view(self.num_requests, 4)
        tiles = Tiles(tiles_N4, self.rows_each, self.num_splits)
        rows = Rows(position, slot, owner.tables(self.num_requests), (tiles,))
        hidden = owner.fused.hidden(given, rows, owner.cache, self.skip, last)
        logits = owner.spread(owner.fused.logits(hidden))
        if self.kind == "logits":
            self.logits = logits
        else:
            self._choose(logits, position, last)

    def fill(
        self,
        spans: Sequence[Span],
        tokens: Sequence[int] | None,
        samplings: Sequence[Sampling] | None,
    ) -> None:
        """Send the numbers of the next replay. `tokens` lie request behind request; None: all from the device."""
        self._send_samplings([s for s in samplings or () for _ in range(self.rows_each)])
        laid = lay(spans, self.owner.cache.pool.block_size)
        host = self._host(laid, laid.of_T * self.rows_each + laid.i_T, tokens)
        tiles_N4 = host.numpy()[self._own_at :].view(np.int32).reshape(self.num_requests, 4)
        n_N = np.arange(len(spans))
        fill_tiles(tiles_N4, n_N, n_N * self.rows_each, laid.start_N, laid.num_N)
        self._numbers.copy_(host, non_blocking=True)


def fill_tiles(tiles_L4: np.ndarray, *columns: np.ndarray) -> None:
    """Table, first row, its position, rows; tiles behind these do nothing."""
    num = len(columns[0])
    for i, column in enumerate(columns):
        tiles_L4[:num, i] = column
    tiles_L4[num:] = 0


def kind_of(samplings: Sequence[Sampling] | None) -> Kind:
    if samplings is None:
        return "logits"
    drawn = [s for s in samplings if not s.greedy]
    if any(s.cuts for s in drawn):
        return "cut"
    return "drawn" if drawn else "greedy"


@contextmanager
def no_collection() -> Iterator[None]:
    """The garbage of an engine that is gone may hold graphs, and to destroy one spoils a capture that is under way."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def up_to(num: int, sizes: Sequence[int]) -> list[int]:
    """The sizes that hold 1 to `num`."""
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < num]


def at_least(num: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= num)


class Laid(NamedTuple):
    """Rows of spans, span behind span."""

    start_N: np.ndarray
    num_N: np.ndarray
    of_T: np.ndarray  # whose span a row belongs to
    i_T: np.ndarray  # the how many-th of its span it is
    at_T: np.ndarray  # its position
    block_T: np.ndarray  # where that lies


def lay(spans: Sequence[Span], size: int) -> Laid:
    start_N, num_N = np.array([s.start for s in spans]), np.array([s.num for s in spans])
    of_T = np.arange(len(spans)).repeat(num_N)
    i_T = np.arange(len(of_T)) - (num_N.cumsum() - num_N)[of_T]
    at_T = start_N[of_T] + i_T
    pages = zip(of_T.tolist(), (at_T // size).tolist(), strict=True)
    block_T = np.array([spans[n].blocks[page] for n, page in pages], dtype=np.int64)
    return Laid(start_N, num_N, of_T, i_T, at_T, block_T)


def pinned(num: int, device: torch.device) -> Tensor:
    """Room for so many integers on the host, from where they are copied to the device."""
    return torch.empty(num, dtype=torch.int64, pin_memory=device.type == "cuda")


def to_pinned(values: list[int] | list[list[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def _to_device(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return to_pinned(values, dtype, device).to(device, non_blocking=True)
