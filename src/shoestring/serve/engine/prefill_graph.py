"""Steps with prefills as one program: some requests compute a chunk of their prompt, the others decode beside them.

Where requests come and go, such steps are a large part of all. Launched kernel by kernel one takes the host some ten
milliseconds, of which a small model computes three, and every decoding request waits for it. So they are graphs, too,
keyed by

    (requests, rows of all, how tokens are chosen, skip set)         `PrefillShape`

with the first two padded to few numbers. The token after the last row of every span is chosen on the device, and the
next step can be launched before it is known. The token of a prompt that is not complete yet is ignored, as is all that
is chosen where a draft model reads prompts (serve/speculative/draft_model.py): it asks for no token.

Attention is launched for three kinds of spans: single rows, few rows (a new turn after a long prefix that is cached:
its keys are cut into ranges, otherwise one program would walk all of them), and the rest. The program adds to its
integers each span's last row and the tiles of these three.

Shapes: N requests, T rows of all, P tiles of texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from shoestring.kernels.attention.paged_attention import prefill_rows, splits_for
from shoestring.model.skip import SkipSet
from shoestring.serve.engine.block_pool import RowSpan
from shoestring.serve.engine.fused_decoder import AttentionTiles, RowPlacement
from shoestring.serve.engine.graphs import (
    CapturedStep,
    GraphCache,
    PendingTokens,
    SamplingKind,
    fill_tiles,
    locate_rows,
    padded_size,
    sampling_kind,
)
from shoestring.serve.engine.sampling import Sampling

# All are among REQUESTS, up to its last: the tables of such a step then hold those of the decode step after it, and no
# graph is dropped for larger tables between them.
PREFILL_REQUESTS = (8, 16, 32, 64, 128, 256)
# With more rows the device computes for longer than the host takes to launch the kernels.
PREFILL_ROWS = (32, 64, 128, 192, 256, 320, 384, 448, 512)
MAX_PREFILLS = 2  # such steps on the device at once
FEW_ROWS, FEW_TILES = 16, 8  # of spans with few rows; spans beyond FEW_TILES count among the rest


def holds_prefill(spans: Sequence[RowSpan]) -> bool:
    return len(spans) <= PREFILL_REQUESTS[-1] and sum(s.num for s in spans) <= PREFILL_ROWS[-1]


def launch_prefill(
    graphs: GraphCache,
    spans: Sequence[RowSpan],
    tokens: Sequence[int],
    samplings: Sequence[Sampling],
    skip: SkipSet | None,
) -> PendingTokens | None:
    """The tokens after the first spans, one per Sampling; the prompts of the other spans are not complete.
    None the first time: capturing a graph takes as long as several such steps launched kernel by kernel."""
    num, rows = padded_size(len(spans), PREFILL_REQUESTS), padded_size(sum(s.num for s in spans), PREFILL_ROWS)
    shape = PrefillShape(num, rows, sampling_kind(samplings), skip, any(s.adapter >= 0 for s in spans))
    if not graphs.seen_before(shape):
        return None
    graph: PrefillGraph = graphs.graph(shape, spans)
    graph.fill(spans, tokens, samplings)
    pending = PendingTokens(graph.launch(), graph.chosen, [1] * len(samplings), 1)
    # The host never waits for a chunk of a prompt and is faster than the device. Without this limit all chunks of a
    # long prompt would be queued, and a request that arrives or is aborted meanwhile would wait for all of them.
    graphs.prefills.append(pending)
    if len(graphs.prefills) > MAX_PREFILLS:
        graphs.prefills.pop(0).wait()
    return pending


class PrefillShape(NamedTuple):
    num_requests: int
    num_rows: int
    kind: SamplingKind
    skip: SkipSet | None = None
    adapted: bool = False

    def make(self, owner: GraphCache) -> PrefillGraph:
        return PrefillGraph(owner, *self)


class PrefillGraph(CapturedStep):
    def __init__(
        self,
        owner: GraphCache,
        num_requests: int,
        num_rows: int,
        kind: SamplingKind,
        skip: SkipSet | None,
        adapted: bool = False,
    ) -> None:
        spec = owner.fused.spec
        each = prefill_rows(spec.num_heads, spec.num_kv_heads)
        # (tiles, rows of each, ranges of keys). The rest: full tiles, and one partial tile per request.
        self._tile_kinds = (
            (num_requests, 1, splits_for(num_requests, spec.num_kv_heads)),
            (FEW_TILES, FEW_ROWS, splits_for(FEW_TILES, spec.num_kv_heads)),
            (num_rows // each + num_requests, each, 1),
        )
        num_own = num_requests + 2 * sum(num for num, _, _ in self._tile_kinds)
        chosen = owner.last_R[:num_requests]
        sizes = num_requests, num_rows, num_requests, num_own
        super().__init__(owner, *sizes, kind, skip, chosen, adapted=adapted)

    def _program(self) -> None:
        owner, num = self.owner, self.num_requests
        given_T, position_T, slot_T = self._rows()
        last_row_N = self._numbers[self._own_at : self._own_at + num]
        tiles_L4 = self._numbers[self._own_at + num :].view(torch.int32).view(-1, 4)
        parts = tiles_L4.split([count for count, _, _ in self._tile_kinds])
        tiles = tuple(
            AttentionTiles(part, each, cut) for part, (_, each, cut) in zip(parts, self._tile_kinds, strict=True)
        )
        # Rows of no tile become zeros: a Format may scale all rows by the largest value among them.
        rows = RowPlacement(position_T, slot_T, owner.tables(num), tiles, padded=True, adapters=self._adapters)
        hidden_TD = owner.fused.hidden(given_T, rows, owner.cache, self.skip)
        logits_NV = owner.map_logits(owner.fused.logits(hidden_TD.index_select(0, last_row_N)))
        self._choose(logits_NV, position_T.index_select(0, last_row_N), self.chosen)

    def fill(self, spans: Sequence[RowSpan], tokens: Sequence[int], samplings: Sequence[Sampling]) -> None:
        """Write the integers of the next launch."""
        self._send_samplings(list(samplings))
        self._send_slots([s.adapter for s in spans for _ in range(s.num)])
        located = locate_rows(spans, self.owner.cache.pool.block_size)
        own, num = self._write(located, np.arange(len(located.span_T)), tokens), self.num_requests
        first_N = located.num_N.cumsum() - located.num_N
        own[:num] = 0  # padding chooses after the first row
        own[: len(spans)] = first_N + located.num_N - 1
        tiles_L4, at = own[num:].view(np.int32).reshape(-1, 4), 0
        for which, (count, each, _) in zip(split_by_num_rows(located.num_N), self._tile_kinds, strict=True):
            fill_tiles(tiles_L4[at : at + count], *tiles_of(which, first_N, located.start_N, located.num_N, each))
            at += count


def split_by_num_rows(num_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The spans with a single row, with few rows, and the rest."""
    few = np.flatnonzero((num_N > 1) & (num_N <= FEW_ROWS))[:FEW_TILES]
    rest = np.setdiff1d(np.flatnonzero(num_N > 1), few)
    return np.flatnonzero(num_N == 1), few, rest


def tiles_of(
    which: np.ndarray, first_N: np.ndarray, start_N: np.ndarray, num_N: np.ndarray, each: int
) -> list[np.ndarray]:
    """The rows of these spans in tiles of up to `each`: table, first row, its position, rows. In reverse order: the
    last tiles of a text see the most keys and must not start last."""
    tiles_M = -(-num_N[which] // each)
    of_P = which.repeat(tiles_M)
    at_P = each * (np.arange(len(of_P)) - (tiles_M.cumsum() - tiles_M).repeat(tiles_M))
    columns = of_P, first_N[of_P] + at_P, start_N[of_P] + at_P, np.minimum(each, num_N[of_P] - at_P)
    return [column[::-1] for column in columns]
