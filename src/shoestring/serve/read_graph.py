"""Steps that read prompts, as one program: some requests read a piece of text, the others write on beside them.

Where requests come and go, such steps are a large part of all. Launched kernel by kernel one takes the host some ten
milliseconds, of which a small model computes three, and everybody who writes waits for it. So they are graphs, too,
keyed by

    (requests, rows of all, how tokens are chosen, skip set)

with the first two padded to few numbers. Rows lie span behind span. The token behind the last row of every span is
chosen on the device, and the next step can be launched before it is known: the first step after a prompt is no special
one. Of a text that is not read to its end that token is nobody's.

Numbers of its own: each span's last row, a tile for each that has a single row, and tiles for all others.

Shapes: N requests, T rows of all, P tiles of texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import torch

from shoestring.kernels.paged_attention import prefill_rows, splits_for
from shoestring.model.skip import SkipSet
from shoestring.serve.cuda_graphs import (
    CapturedStep,
    Flight,
    Kind,
    StepGraphs,
    at_least,
    fill_tiles,
    kind_of,
    lay,
    up_to,
)
from shoestring.serve.fused import Rows, Tiles
from shoestring.serve.kv_cache import Span
from shoestring.serve.sampling import Sampling

# Among those of steps that read nothing (REQUESTS): tables that hold these hold those.
READ_REQUESTS = (8, 64, 256)
# More rows keep the device busy for longer than the host takes to launch them.
READ_ROWS = (32, 64, 128, 256, 384, 512)


def read_fits(spans: Sequence[Span]) -> bool:
    return len(spans) <= READ_REQUESTS[-1] and sum(s.num for s in spans) <= READ_ROWS[-1]


def launch_read(
    graphs: StepGraphs,
    spans: Sequence[Span],
    tokens: Sequence[int],
    samplings: Sequence[Sampling],
    skip: SkipSet | None,
) -> Flight:
    """The tokens behind the first spans, as many as there are Samplings; the other texts are not read to their end."""
    num, rows = at_least(len(spans), READ_REQUESTS), at_least(sum(s.num for s in spans), READ_ROWS)
    kind = kind_of(samplings)
    graph: ReadGraph = graphs.graph(
        _key(num, rows, kind, skip), spans, partial(ReadGraph, graphs, num, rows, kind, skip)
    )
    graph.fill(spans, tokens, samplings)
    graph.replay()
    return Flight(graphs.last_R[:num], [1] * len(samplings), 1)


def prepare_reads(
    graphs: StepGraphs, max_requests: int, max_rows: int, kinds: Sequence[Kind], skip: SkipSet | None
) -> None:
    """Make what steps of so many requests and rows need, before they do."""
    sizes = product(reversed(up_to(max_requests, READ_REQUESTS)), up_to(max_rows, READ_ROWS), kinds)
    for num, rows, kind in sizes:  # the most requests first: tables grow once
        graphs.find(_key(num, rows, kind, skip), num, partial(ReadGraph, graphs, num, rows, kind, skip))


def _key(num: int, rows: int, kind: Kind, skip: SkipSet | None) -> tuple[object, ...]:
    return num, rows, kind, "" if skip is None else skip.id, "read"


class ReadGraph(CapturedStep):
    def __init__(
        self, owner: StepGraphs, num_requests: int, num_rows: int, kind: Kind, skip: SkipSet | None
    ) -> None:
        spec = owner.fused.spec
        self._num_splits = splits_for(num_requests, spec.num_kv_heads)
        self._rows_per_tile = prefill_rows(spec.num_heads, spec.num_kv_heads)
        # Whole tiles, and one of each text that is not whole.
        self._num_tiles = num_rows // self._rows_per_tile + num_requests
        own = num_requests + 2 * (num_requests + self._num_tiles)
        super().__init__(owner, num_requests, num_rows, num_requests, own, kind, skip)

    def _program(self) -> None:
        owner, num = self.owner, self.num_requests
        given_T, position_T, slot_T = self._place()
        last_row_N = self._numbers[self._own : self._own + num]
        tiles_L4 = self._numbers[self._own + num :].view(torch.int32).view(-1, 4)
        writing = Tiles(tiles_L4[:num], 1, self._num_splits)
        reading = Tiles(tiles_L4[num:], self._rows_per_tile, 1)
        rows = Rows(position_T, slot_T, owner.tables(num), (writing, reading), padded=True)
        hidden_TD = owner.fused.hidden(given_T, rows, owner.cache, self.skip)
        logits_NV = owner.spread(owner.fused.logits(hidden_TD.index_select(0, last_row_N)))
        self._choose(logits_NV, position_T.index_select(0, last_row_N), owner.last_R[:num])

    def fill(self, spans: Sequence[Span], tokens: Sequence[int], samplings: Sequence[Sampling]) -> None:
        """Send the numbers of the next replay."""
        self._send_samplings(list(samplings))
        num = self.num_requests
        laid = lay(spans, self.owner.cache.pool.block_size)
        host = self._host(laid, np.arange(len(laid.of_T)), tokens)
        own = host.numpy()[self._own :]
        first_N = laid.num_N.cumsum() - laid.num_N
        own[:num] = 0  # padding chooses for the first row
        own[: len(spans)] = first_N + laid.num_N - 1
        tiles_L4 = own[num:].view(np.int32).reshape(-1, 4)
        one = np.flatnonzero(laid.num_N == 1)
        fill_tiles(tiles_L4[:num], one, first_N[one], laid.start_N[one], laid.num_N[one])
        many = np.flatnonzero(laid.num_N > 1)
        fill_tiles(tiles_L4[num:], *cut(many, first_N, laid.start_N, laid.num_N, self._rows_per_tile))
        self._numbers.copy_(host, non_blocking=True)


def cut(
    which: np.ndarray, first_N: np.ndarray, start_N: np.ndarray, num_N: np.ndarray, each: int
) -> list[np.ndarray]:
    """The rows of these spans in tiles of up to `each`: table, first row, its position, rows. The last tiles of a text
    see the most keys: first in the queue, they are not what all wait for."""
    tiles_M = -(-num_N[which] // each)
    of_P = which.repeat(tiles_M)
    at_P = each * (np.arange(len(of_P)) - (tiles_M.cumsum() - tiles_M).repeat(tiles_M))
    columns = of_P, first_N[of_P] + at_P, start_N[of_P] + at_P, np.minimum(each, num_N[of_P] - at_P)
    return [column[::-1] for column in columns]
