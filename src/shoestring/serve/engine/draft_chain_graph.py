"""Several drafts as one program: the passes of a draft model follow each other on the device.

The first pass reads what is new since the last proposal, a few rows per request, and chooses a token for each request;
every other pass reads one row per request, the token of the pass before. Positions, slots and tiles of all passes are
known beforehand, so the host sends integers once, launches once (on a GPU the chain is one CUDA graph) and waits once.
Launched one by one, the passes of a small drafter would cost more time on the host than on the GPU.

Shapes: N requests, Q rows each in the first pass, R = N Q, G drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from shoestring.kernels.gemv.embed_argmax import argmax_token_
from shoestring.kernels.sampling.sample_tokens import sample_tokens_
from shoestring.model.skip import SkipSet
from shoestring.serve.engine.block_pool import RowSpan
from shoestring.serve.engine.fused_decoder import AttentionTiles, RowPlacement
from shoestring.serve.engine.graphs import (
    MAX_ROWS,
    REQUESTS_DRAFTED,
    DecodeGraph,
    GraphCache,
    GraphShape,
    PendingTokens,
    SamplingKind,
    padded_size,
    pinned,
    sampling_kind,
)
from shoestring.serve.engine.sampling import Sampling

CHAIN_ROWS = (2, 5, 9)  # of the first pass: what is new since the last proposal


def launch_chain(
    graphs: GraphCache,
    spans: Sequence[RowSpan],
    tokens: Sequence[int],
    samplings: Sequence[Sampling],
    num_drafts: int,
    skip: SkipSet | None,
) -> PendingTokens:
    """num_drafts tokens after each span, whose blocks hold all but the last of them."""
    num, each = chain_size(spans)
    long = num == 1 and spans[0].stop + num_drafts - 1 > graphs.fused.short_context
    shape = ChainShape(num, each, sampling_kind(samplings), skip, num_drafts, long)
    # With the rows of later passes, which note their blocks in the tables: they are not sent again for them.
    graph: DraftChainGraph = graphs.graph(shape, [RowSpan(s.blocks, s.start, s.num + num_drafts - 1) for s in spans])
    graph.fill(spans, tokens, samplings)
    graph.fill_later(spans)
    return PendingTokens(graph.launch(), graph.chosen, [num_drafts] * len(spans), num_drafts)


def chain_size(spans: Sequence[RowSpan]) -> tuple[int, int]:
    """Requests and rows each of the chain that holds these rows; few sizes, since a drafter's rows are cheap."""
    return padded_size(len(spans), REQUESTS_DRAFTED), padded_size(max(s.num for s in spans), CHAIN_ROWS)


@functools.cache
def max_chain_rows(num_requests: int) -> int:
    """Rows each that the first pass holds for so many requests; 0: no chain holds them."""
    num = next((n for n in REQUESTS_DRAFTED if n >= num_requests), MAX_ROWS)
    return max((each for each in CHAIN_ROWS if num * each <= MAX_ROWS), default=0)


def holds_chain(spans: Sequence[RowSpan]) -> bool:
    return max(s.num for s in spans) <= max_chain_rows(len(spans))


class ChainShape(NamedTuple):
    num_requests: int
    rows_each: int  # of the first pass
    kind: SamplingKind
    skip: SkipSet | None
    num_drafts: int
    long: bool = False  # the last pass has a context beyond FusedDecoder.short_context
    name: str = "chain"  # no DecodeShape is equal
    adapted: bool = False  # drafts are the base model's

    def make(self, owner: GraphCache) -> DraftChainGraph:
        return DraftChainGraph(owner, *self[:6])


class DraftChainGraph(DecodeGraph):
    nonfinite = 0  # of a drafter whose weights are broken: a token like any other, which the target rejects

    def __init__(
        self,
        owner: GraphCache,
        num_requests: int,
        rows_each: int,
        kind: SamplingKind,
        skip: SkipSet | None,
        num_drafts: int,
        long: bool = False,
    ) -> None:
        device, self.num_drafts, self._num_later = owner.fused.device, num_drafts, num_drafts - 1
        self.chosen_NG = torch.zeros(num_requests, num_drafts, dtype=torch.int64, device=device)
        self._chosen_GN = torch.zeros(num_drafts, num_requests, dtype=torch.int64, device=device)
        # Each request's last row; for every later pass and request: position, slot, table entry of its block, block,
        # and a tile (four numbers of 32 bits).
        self._later = torch.zeros(num_requests * (1 + 6 * self._num_later), dtype=torch.int64, device=device)
        passes = self._later[num_requests:].view(6, self._num_later, num_requests)
        passes[1], passes[2] = -1, owner.padding
        super().__init__(owner, num_requests, rows_each, kind, skip, long, chosen=self.chosen_NG.view(-1))

    def companions(self, grouped: bool) -> Iterator[GraphShape]:
        return iter(())

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
            tiles = AttentionTiles(tiles_LN4[i], 1, self.num_splits)
            rows = RowPlacement(position_LN[i], slot_LN[i], tables_NW, (tiles,))
            hidden_ND = owner.fused.hidden(self._chosen_GN[i], rows, owner.cache, self.skip, None, self.long)
            logits_NV = owner.map_logits(owner.fused.logits(hidden_ND))
            if self.kind == "greedy":
                argmax_token_(logits_NV, self._chosen_GN[i + 1], self.arrived_R, self.nonfinite)
            else:
                given = parameters_4N, seed_N, position_LN[i] + 1
                cuts = self.kind == "cut"
                sample_tokens_(logits_NV, *given, self._chosen_GN[i + 1], cuts=cuts, nonfinite=self.nonfinite)
        self.chosen_NG.copy_(self._chosen_GN.T)

    def fill_later(self, spans: Sequence[RowSpan]) -> None:
        """Send the integers of the passes after the first; their blocks must exist."""
        num, later, size, given = self.num_requests, self._num_later, self.owner.cache.pool.block_size, len(spans)
        host = pinned(self._later.numel(), self._later.device)
        numbers = host.numpy()
        last_row_N, passes = numbers[:num], numbers[num:].reshape(6, later, num)
        last_row_N[given:] = 0
        last_row_N[:given] = [n * self.rows_each + s.num - 1 for n, s in enumerate(spans)]
        # Padding: position, slot, table entry, block.
        passes[:4] = np.array([0, -1, self.owner.padding, 0])[:, None, None]
        n_N, stop_N = np.arange(given), np.array([s.stop for s in spans])
        position_LN = stop_N + np.arange(later)[:, None]
        block_LN = np.array([[s.blocks[(s.stop + i) // size] for s in spans] for i in range(later)], dtype=np.int64)
        block_LN = block_LN.reshape(later, given)  # where there are no later passes, too
        passes[0, :, :given] = position_LN
        passes[1, :, :given] = block_LN * size + position_LN % size
        passes[2, :, :given] = self.owner.place(n_N, position_LN // size)
        passes[3, :, :given] = block_LN
        tiles_LN4 = passes[4:].reshape(-1).view(np.int32).reshape(later, num, 4)
        tiles_LN4[:, given:] = 0
        # Table, row, start, rows.
        tiles_LN4[:, :given, :2] = n_N[:, None]
        tiles_LN4[:, :given, 2] = position_LN
        tiles_LN4[:, :given, 3] = 1
        self._later.copy_(host, non_blocking=True)
