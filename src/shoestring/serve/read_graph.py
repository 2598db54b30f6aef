"""Steps that read prompts, as one program: some requests read a piece of text, the others write on beside them.

Where requests come and go, such steps are a large part of all. Launched kernel by kernel one takes the host some ten
milliseconds, of which a small model computes three, and everybody who writes waits for it. So they are graphs, too,
keyed by

    (requests, rows of all, how tokens are chosen, skip set)

with the first two padded to few numbers. Rows lie span behind span. The token behind the last row of every span is
chosen on the device, and the next step can be launched before it is known: the first step after a prompt is no special
one. Of a text that is not read to its end that token is nobody's.

Attention is launched for three kinds of spans: single rows, few rows (a new turn behind a long prefix that is there
already: its keys are cut into ranges, or one program would walk all of them), and the rest. Numbers of its own: each
span's last row, and the tiles of these.

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

# All among REQUESTS, up to its last: the tables of such a step then hold those of the one that runs ahead behind it,
# and nothing has to be dropped for larger ones between them.
READ_REQUESTS = (8, 16, 32, 64, 128, 256)
# More rows keep the device busy for longer than the host takes to launch them.
READ_ROWS = (32, 64, 128, 192, 256, 320, 384, 448, 512)
MAX_READS = 2  # such steps under way at once
FEW_ROWS, FEW_TILES = 16, 8  # of spans with few rows; where there are more of them they are among the rest


def read_fits(spans: Sequence[Span]) -> bool:
    return len(spans) <= READ_REQUESTS[-1] and sum(s.num for s in spans) <= READ_ROWS[-1]


def launch_read(
    graphs: StepGraphs,
    spans: Sequence[Span],
    tokens: Sequence[int],
    samplings: Sequence[Sampling],
    skip: SkipSet | None,
) -> Flight | None:
    """The tokens behind the first spans, as many as there are Samplings; the other texts are not read to their end.
    None the first time: a graph takes as long to make as some such steps launched one by one."""
    num, rows = at_least(len(spans), READ_REQUESTS), at_least(sum(s.num for s in spans), READ_ROWS)
    kind = kind_of(samplings)
    key = _key(num, rows, kind, skip)
    if not graphs.met(key):
        return None
    graph: ReadGraph = graphs.graph(key, spans, partial(ReadGraph, graphs, num, rows, kind, skip))
    graph.fill(spans, tokens, samplings)
    graph.replay()
    flight = Flight(graphs.last_R[:num], [1] * len(samplings), 1)
    # Nobody waits for a piece of a prompt, and the host is faster than the device: without this all pieces of a long
    # prompt would be queued, and whoever comes meanwhile, or leaves, would wait for all of them.
    graphs.reads.append(flight)
    if len(graphs.reads) > MAX_READS:
        graphs.reads.pop(0).wait()
    return flight


def prepare_reads(
    graphs: StepGraphs, max_requests: int, max_rows: int, kinds: Sequence[Kind], skip: SkipSet | None
) -> None:
    """Make what steps of so many requests and rows need, before they do."""
    # The most first: tables grow once, and smaller steps find room in the memory of larger ones.
    sizes = reversed(up_to(max_requests, READ_REQUESTS)), reversed(up_to(max_rows, READ_ROWS))
    for num, rows, kind in product(*sizes, kinds):
        graphs.find(_key(num, rows, kind, skip), num, partial(ReadGraph, graphs, num, rows, kind, skip))


def _key(num: int, rows: int, kind: Kind, skip: SkipSet | None) -> tuple[object, ...]:
    return num, rows, kind, "" if skip is None else skip.id, "read"


class ReadGraph(CapturedStep):
    def __init__(
        self, owner: StepGraphs, num_requests: int, num_rows: int, kind: Kind, skip: SkipSet | None
    ) -> None:
        spec = owner.fused.spec
        each = prefill_rows(spec.num_heads, spec.num_kv_heads)
        # Tiles, rows of each, ranges of keys. Of the rest there are whole tiles and one of each text that is not whole.
        self._kinds = (
            (num_requests, 1, splits_for(num_requests, spec.num_kv_heads)),
            (FEW_TILES, FEW_ROWS, splits_for(FEW_TILES, spec.num_kv_heads)),
            (num_rows // each + num_requests, each, 1),
        )
        num_own = num_requests + 2 * sum(num for num, _, _ in self._kinds)
        super().__init__(owner, num_requests, num_rows, num_requests, num_own, kind, skip)

    def _program(self) -> None:
        owner, num = self.owner, self.num_requests
        given_T, position_T, slot_T = self._place()
        last_row_N = self._numbers[self._own_at : self._own_at + num]
        tiles_L4 = self._numbers[self._own_at + num :].view(torch.int32).view(-1, 4)
        parts = tiles_L4.split([count for count, _, _ in self._kinds])
        tiles = tuple(Tiles(part, each, cut) for part, (_, each, cut) in zip(parts, self._kinds, strict=True))
        # Zeros in rows that belong to no tile: a Format may round all rows by the largest value among them.
        rows = Rows(position_T, slot_T, owner.tables(num), tiles, padded=True)
        hidden_TD = owner.fused.hidden(given_T, rows, owner.cache, self.skip)
        logits_NV = owner.spread(owner.fused.logits(hidden_TD.index_select(0, last_row_N)))
        self._choose(logits_NV, position_T.index_select(0, last_row_N), owner.last_R[:num])

    def fill(self, spans: Sequence[Span], tokens: Sequence[int], samplings: Sequence[Sampling]) -> None:
        """Send the numbers of the next replay."""
        self._send_samplings(list(samplings))
        laid = lay(spans, self.owner.cache.pool.block_size)
        host = self._host(laid, np.arange(len(laid.of_T)), tokens)
        own, num = host.numpy()[self._own_at :], self.num_requests
        first_N = laid.num_N.cumsum() - laid.num_N
        own[:num] = 0  # padding chooses for the first row
        own[: len(spans)] = first_N + laid.num_N - 1
        tiles_L4, at = own[num:].view(np.int32).reshape(-1, 4), 0
        for which, (count, each, _) in zip(by_rows(laid.num_N), self._kinds, strict=True):
            fill_tiles(tiles_L4[at : at + count], *tiles_of(which, first_N, laid.start_N, laid.num_N, each))
            at += count
        self._numbers.copy_(host, non_blocking=True)


def by_rows(num_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which spans have a single row, few rows, and which are the rest."""
    few = np.flatnonzero((num_N > 1) & (num_N <= FEW_ROWS))[:FEW_TILES]
    rest = np.setdiff1d(np.flatnonzero(num_N > 1), few)
    return np.flatnonzero(num_N == 1), few, rest


def tiles_of(
    which: np.ndarray, first_N: np.ndarray, start_N: np.ndarray, num_N: np.ndarray, each: int
) -> list[np.ndarray]:
    """The rows of these spans in tiles of up to `each`: table, first row, its position, rows. The last tiles of a text
    see the most keys: first in the queue, they are not what all wait for."""
    tiles_M = -(-num_N[which] // each)
    of_P = which.repeat(tiles_M)
    at_P = each * (np.arange(len(of_P)) - (tiles_M.cumsum() - tiles_M).repeat(tiles_M))
    columns = of_P, first_N[of_P] + at_P, start_N[of_P] + at_P, np.minimum(each, num_N[of_P] - at_P)
    return [column[::-1] for column in columns]
