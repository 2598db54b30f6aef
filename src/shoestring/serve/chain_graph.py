"""Several drafts as one program: a draft model's passes follow each other on the device.

The first pass reads what is new since the last proposal, a few rows per request, and chooses a token for each; the
others read one row per request, the token of the pass before. Positions, slots and tiles of those follow from the
first ones, so the host sends numbers once, launches once (on a GPU the whole chain is one CUDA graph) and waits
once. Passes launched one by one would cost a small drafter more time on the host than on the GPU.

Shapes: N requests, Q rows each in the first pass, R = N Q, G drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoestring.kernels.step_ends import best_token_
from shoestring.model.skip import SkipSet
from shoestring.serve.cuda_graphs import Flight, Kind, StepGraph, StepGraphs, kind_of, to_pinned
from shoestring.serve.fused import Rows, Tiles
from shoestring.serve.kv_cache import Span
from shoestring.serve.sampling import Sampling, sample_at


def launch_chain(
    graphs: StepGraphs,
    spans: Sequence[Span],
    tokens: Sequence[int],
    samplings: Sequence[Sampling],
    num_drafts: int,
    skip: SkipSet | None,
) -> Flight:
    """num_drafts (two or more) tokens behind each span, whose blocks hold all but the last of them."""
    num, each = graphs.padded(spans)
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
        device, more = owner.fused.device, num_requests * (num_drafts - 1)
        self.num_drafts = num_drafts
        self.chosen_NG = torch.zeros(num_requests, num_drafts, dtype=torch.int64, device=device)
        # Per request: its last row, the position after it, whether it is one. Then where the blocks of the later
        # rows belong in the tables, and the blocks.
        self._later = torch.zeros(3 * num_requests + 2 * more, dtype=torch.int64, device=device)
        self._later[3 * num_requests : 3 * num_requests + more] = owner.padding
        super().__init__(owner, num_requests, rows_each, kind, skip)

    def _program(self) -> None:
        super()._program()
        owner, num = self.owner, self.num_requests
        last_row_N, start_N, there_N = self._later[: 3 * num].view(3, num)
        at, block = self._later[3 * num :].view(2, -1)
        owner.note_blocks(at, block)
        tables_NW = owner.tables(num)
        seed_N = self.seeds_R.index_select(0, last_row_N)
        parameters_4N = self.parameters_4R.index_select(1, last_row_N)
        tokens_N = owner.last_R.index_select(0, last_row_N)
        self.chosen_NG[:, 0] = tokens_N
        row_N, size = torch.arange(num, device=tokens_N.device), owner.cache.pool.block_size
        for i in range(1, self.num_drafts):
            position_N = start_N + (i - 1)
            page_N = tables_NW.gather(1, (position_N // size)[:, None])[:, 0].long()
            slot_N = torch.where(there_N > 0, page_N * size + position_N % size, -1)
            tiles_N4 = torch.stack([row_N, row_N, position_N, there_N], dim=1).to(torch.int32)
            rows = Rows(position_N, slot_N, tables_NW, (Tiles(tiles_N4, 1, self.num_splits),))
            hidden_ND = owner.fused.hidden(tokens_N, rows, owner.cache, self.skip)
            logits_NV = owner.spread(owner.fused.logits(hidden_ND))
            if self.kind == "greedy":
                tokens_N = torch.empty_like(tokens_N)
                best_token_(logits_NV, tokens_N)
            else:
                cuts = self.kind == "cut"
                tokens_N = sample_at(logits_NV, parameters_4N, seed_N, position_N + 1, cuts=cuts)
            self.chosen_NG[:, i] = tokens_N

    def fill_later(self, spans: Sequence[Span]) -> None:
        """Send what the passes after the first need; their blocks must be there."""
        num, more, size = self.num_requests, self.num_drafts - 1, self.owner.cache.pool.block_size
        last_row, start, there = [0] * num, [0] * num, [0] * num
        at, block = [self.owner.padding] * (num * more), [0] * (num * more)
        for n, span in enumerate(spans):
            last_row[n], start[n], there[n] = n * self.rows_each + span.num - 1, span.stop, 1
            for i in range(more):
                page = (span.stop + i) // size
                at[n * more + i] = self.owner.place(n, page)
                block[n * more + i] = span.blocks[page]
        values = [*last_row, *start, *there, *at, *block]
        self._later.copy_(to_pinned(values, torch.int64, self._later.device), non_blocking=True)
