"""The runner: one forward of the model over the rows of a step.

A `Batch` is what a step computes, as plain numbers: whose rows (spans of blocks), which tokens stand in them and
of which rows logits are wanted. The runner writes keys and values, chooses the attention and returns the
logits; it knows nothing of requests, scheduling or sampling. The engine's target and a draft model each have
one.

`skip` is the set of sublayers that this step leaves out, None for the whole model. A batch holds one set.

Shapes: T rows of the step, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoestring.model.skip import SkipSet, Watch
from shoestring.model.transformer import Decoder
from shoestring.serve.blocks import BlockPool
from shoestring.serve.kv_cache import KVCache, Span


@dataclass(frozen=True)
class Batch:
    """Rows of a step, request behind request."""

    spans: Sequence[Span]  # whose rows, in order
    tokens: Sequence[int] | Tensor  # [T], one per row; a tensor where they are on the device already
    rows: Sequence[int]  # the rows whose logits are wanted


class Runner:
    def __init__(self, model: Decoder, pool: BlockPool) -> None:
        self.model = model
        self.cache = KVCache(model.spec, pool)

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    @torch.no_grad()
    def forward(self, batch: Batch, skip: SkipSet | None = None, watch: Watch | None = None) -> Tensor:
        """Logits [R, V] of the batch's `rows`, in compute dtype. `watch` is shown the residual stream."""
        device = self.device
        tokens = batch.tokens
        if not isinstance(tokens, Tensor):
            tokens = torch.tensor(list(tokens), device=device)
        positions = [p for span in batch.spans for p in range(span.start, span.stop)]
        # Models that know nothing of skipping may stand here, too.
        options: dict[str, Any] = {} if skip is None else {"skip": skip}
        if watch is not None:
            options["watch"] = watch
        return self.model(
            tokens[None],
            torch.tensor([positions], device=device),
            attend=self.cache.plan(batch.spans, device),
            rows=torch.tensor(list(batch.rows), device=device, dtype=torch.int64),
            **options,
        )

    def seconds(self, num_rows: int, skip: SkipSet | None = None) -> float:
        """Seconds of a forward over this many rows of one request, the better of two; on a cache of its own."""
        size = self.cache.pool.block_size
        pool = BlockPool(-(-num_rows // size), size)
        apart = Runner(self.model, pool)
        batch = Batch([Span(range(pool.num_blocks), 0, num_rows)], [0] * num_rows, range(num_rows))
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            apart.forward(batch, skip).argmax(-1).tolist()  # waits for the device
            seconds.append(time.perf_counter() - began)
        return min(seconds)
