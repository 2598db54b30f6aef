"""Several drafts as one program: a draft model's passes follow each other on the device.

The first pass reads what is new since the last proposal, a few rows per request, and chooses a token for each; the
others read one row per request, the token of the pass before. Positions, slots and tiles of all passes are known
beforehand, so the host sends numbers once, launches once (on a GPU the whole chain is one CUDA graph) and waits
once. Passes launched one by one would cost a small drafter more time on the host than on the GPU.

Shapes: N requests, Q rows each in the first pass, R = N Q, G drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from shoestring.kernels.draw import draw_tokens_
from shoestring.kernels.step_ends import best_token_
from shoestring.model.skip import SkipSet
from shoestring.serve.cuda_graphs import (
    MAX_ROWS,
    REQUESTS_DRAFTED,
    Flight,
    Kind,
    StepGraph,
    StepGraphs,
    kind_of,
    lay,
    pinned,
)
from shoestring.serve.fused import Rows, Tiles
from shoestring.serve.kv_cache import Span
from shoestring.serve.sampling import Sampling

CHAIN_ROWS = (2, 5, 9)  # of the first pass: what is new since the last proposal


def launch_chain(
    graphs: StepGraphs,
    spans: Sequence[Span],
    tokens: Sequence[int],
    samplings: Sequence[Sampling],
    num_drafts: int,
    skip: SkipSet | None,
) -> Flight:
    """num_drafts tokens behind each span, whose blocks hold all but the last of them."""
    num, each = chain_size(spans)
    kind, id = kind_of(samplings), "" if skip is None else skip.id
    graph: ChainGraph = graphs.graph(
        (num, each, kind, id, num_drafts),
        spans,
        lambda: ChainGraph(graphs, num, each, kind, skip, num_drafts),
    )
    graph.fill(spans, tokens, samplings)
    graph.fill_later(spans)
    graph.replay()
    return Flight(graph.chosen_NG.flatten(), [num_drafts] * len(spans), num_drafts)


def chain_size(spans: Sequence[Span]) -> tuple[int, int]:
    """Requests and rows each of the chain that holds these rows; few sizes, since a drafter's rows are cheap."""
    most = max(s.num for s in spans)
    return (
        next(n for n in REQUESTS_DRAFTED if n >= len(spans)),
        next(n for n in CHAIN_ROWS if n >= most),
    )


def most_new(num_requests: int) -> int:
    """Rows each that a chain's first pass can hold for so many requests; 0: there is no chain for them."""
    num = next((n for n in REQUESTS_DRAFTED if n >= num_requests), MAX_ROWS)
    return max((each for each in CHAIN_ROWS if num * each <= MAX_ROWS), default=0)


def chain_fits(spans: Sequence[Span]) -> bool:
    return max(s.num for s in spans) <= most_new(len(spans))


def prepare_chains(graphs: StepGraphs, num: int, kind: Kind, lengths: Sequence[int]) -> None:
    """Make the chains that so many requests may need, before they do."""
    for each in CHAIN_ROWS:
        for length in lengths:
            if num * each <= MAX_ROWS:
                key = (num, each, kind, "", length)
                graphs.find(key, num, partial(ChainGraph, graphs, num, each, kind, None, length))


class ChainGraph(StepGraph):
    def __init__(
        self,
        owner: StepGraphs,
        num_requests: int,
        rows_each: int,
        kind: Kind,
        skip: SkipSet | None,
        num_drafts: int,
    ) -> None:
        device, self.num_drafts, self._num_later = owner.fused.device, num_drafts, num_drafts - 1
        self.chosen_NG = torch.zeros(num_requests, num_drafts, dtype=torch.int64, device=device)
        self._chosen_GN = torch.zeros(num_drafts, num_requests, dtype=torch.int64, device=device)
        # Each request's last row; for every later pass and request its position, slot, where the number of its block
        # belongs in the tables, the block, and a tile: four numbers in 32 bits.
        self._later = torch.zeros(num_requests * (1 + 6 * self._num_later), dtype=torch.int64, device=device)
        passes = self._later[num_requests:].view(6, self._num_later, num_requests)
        passes[1], passes[2] = -1, owner.padding
        super().__init__(owner, num_requests, rows_each, kind, skip)

    def _program(self) -> None:
        super()._program()
        owner, num, later = self.owner, self.num_requests, self._num_later
        last_row_N, passes = self._later[:num], self._later[num:].view(6, later, num)
        position_LN, slot_LN, at_LN, block_LN = passes[:4]
        tiles_LN4 = passes[4:].reshape(-1).view(torch.int32).view(later, num, 4)
        owner.note_blocks(at_LN.reshape(-1), block_LN.reshape(-1).view(torch.int32)[::2])
        tables_NW = owner.tables(num)
        if self.kind != "greedy":
            seed_N = self.seeds_R.index_select(0, last_row_N)
            parameters_4N = self.parameters_4R.index_select(1, last_row_N)
        torch.index_select(owner.last_R, 0, last_row_N, out=self._chosen_GN[0])
        for i in range(later):
            tiles = Tiles(tiles_LN4[i], 1, self.num_splits)
            rows = Rows(position_LN[i], slot_LN[i], tables_NW, (tiles,))
            hidden_ND = owner.fused.hidden(self._chosen_GN[i], rows, owner.cache, self.skip)
            logits_NV = owner.spread(owner.fused.logits(hidden_ND))
            if self.kind == "greedy":
                best_token_(logits_NV, self._chosen_GN[i + 1])
            else:
                given = parameters_4N, seed_N, position_LN[i] + 1
                draw_tokens_(logits_NV, *given, self._chosen_GN[i + 1], cuts=self.kind == "cut")
        self.chosen_NG.copy_(self._chosen_GN.T)

    def fill_later(self, spans: Sequence[Span]) -> None:
        """Send what the passes after the first need; their blocks must be there."""
        num, later, size = self.num_requests, self._num_later, self.owner.cache.pool.block_size
        _, _, of_T, i_T, at_T, block_T = lay([Span(s.blocks, s.stop, later) for s in spans], size)
        host = pinned(len(self._later), self._later.device)
        last_row_N, passes = host.numpy()[:num], host.numpy()[num:].reshape(6, later, num)
        last_row_N[len(spans) :] = 0
        last_row_N[: len(spans)] = [n * self.rows_each + s.num - 1 for n, s in enumerate(spans)]
        # Of padding: position, slot, where its block belongs in the tables, its number.
        passes[:4] = np.array([0, -1, self.owner.padding, 0])[:, None, None]
        passes[0, i_T, of_T] = at_T
        passes[1, i_T, of_T] = block_T * size + at_T % size
        passes[2, i_T, of_T] = self.owner.place(of_T, at_T // size)
        passes[3, i_T, of_T] = block_T
        tiles_LN4 = passes[4:].reshape(-1).view(np.int32).reshape(later, num, 4)
        tiles_LN4[:] = 0
        tiles_LN4[i_T, of_T] = np.stack(
            [of_T, of_T, at_T, np.ones_like(at_T)], axis=1
        )  # table, row; start, rows
        self._later.copy_(host, non_blocking=True)
