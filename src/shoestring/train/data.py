"""TokenData: which rows a training step sees, as a pure function of the step.

The tokens of a split are cut into windows of context + 1 tokens at stride `context`, so that every token is a target
once. Each epoch visits all windows in an order drawn from (seed, epoch). Row r of step s is number s * batch + r in
that endless list, so there is no position to save: resuming at a step, on any number of ranks, gives the rows that an
uninterrupted run would have seen. The rows of a step are cut over the data-parallel ranks, then into micro-batches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shoestring.errors import UserError
from shoestring.host.block_offload import free_bytes
from shoestring.train.shards import TokenShards
from shoestring.train.step import IGNORED, Micro

__all__ = ["Micro", "TokenData", "check_pass", "rows_per_pass"]


def rows_per_pass(batch: int, micro: int | None, dp_size: int = 1) -> int:
    """Rows of one pass on one rank; UserError where the batch does not divide."""
    if batch < 1 or (micro is not None and micro < 1):
        raise UserError(f"batch={batch} and micro={micro} must be positive")
    rows, rest = divmod(batch, dp_size)
    if rest:
        raise UserError(
            f"batch={batch} rows cannot be split evenly over {dp_size} data-parallel ranks; "
            f"use a multiple of {dp_size}, for example {-(-batch // dp_size) * dp_size}"
        )
    if micro is not None and rows % micro:
        raise UserError(
            f"{rows} rows per rank (batch={batch} over {dp_size} ranks) cannot be split evenly into micro-batches of "
            f"micro={micro}; use a micro that divides {rows}"
        )
    return rows if micro is None else micro


def check_pass(rows: int, context: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
    """UserError for so many rows in one pass that there is no room for `width` numbers of each token: d_model of every
    block that is trained, whose input is kept for the backward pass in any case. Where host memory runs out, the system
    would kill the process without a word."""
    each, free = context * width * dtype.itemsize, free_bytes(device)
    if rows * each > free:
        where = "the GPU" if device.type == "cuda" else "this machine"
        raise UserError(
            f"{rows:,} rows of context={context} in one pass need {rows * each / 1e9:,.1f} GB at the very least, and "
            f"{where} has {free / 1e9:,.1f} GB of memory free, enough for {free // each:,} rows: make micro, batch or "
            "context smaller"
        )


class TokenData:
    def __init__(
        self,
        shards: TokenShards,
        *,
        context: int,
        batch: int,
        micro: int | None = None,
        seed: int = 0,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        """`batch` rows per step over all ranks, `micro` rows per pass on one rank (None: all of its rows)."""
        if context < 1:
            raise UserError(f"context={context} must be positive")
        micro = rows_per_pass(batch, micro, dp_size)
        assert 0 <= dp_rank < dp_size
        self.shards, self.context, self.batch, self.micro, self.seed = shards, context, batch, micro, seed
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.num_windows = max(0, len(shards) - 1) // context
        if self.num_windows < batch:
            name = {"val": "validation", "train": "training"}.get(shards.name, shards.name)
            raise UserError(
                f"the {name} split has {len(shards):,} tokens, which is {self.num_windows} windows of "
                f"context={context}; one batch needs {batch}. Give more text, or a smaller batch or context"
            )
        # Two epochs: a step may begin in one and end in the next.
        self._order = lru_cache(maxsize=2)(self._draw_order)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    @property
    def steps_per_epoch(self) -> float:
        return self.num_windows / self.batch

    def step(self, step: int) -> list[Micro]:
        """This rank's micro-batches of a step."""
        assert step >= 0
        rows = self.batch // self.dp_size
        first = step * self.batch + self.dp_rank * rows
        windows = [self._window(number) for number in range(first, first + rows)]
        return [self._cut(windows[i : i + self.micro]) for i in range(0, rows, self.micro)]

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the step that decides its rows."""
        return {
            "fingerprint": self.shards.fingerprint,
            "num_tokens": len(self.shards),
            "context": self.context,
            "batch": self.batch,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError for a state under which the steps so far saw other rows."""
        what = {"fingerprint": "the corpus or its tokenizer", "num_tokens": "the size of the corpus"}
        for key, ours in self.state_dict().items():
            saved = state.get(key)
            if saved != ours:
                raise UserError(
                    f"cannot resume to the exact token: {what.get(key, key)} changed since the checkpoint "
                    f"({key} was {saved}, is {ours}); resume with the same data, context, batch and seed"
                )

    def _draw_order(self, epoch: int) -> np.ndarray:
        # numpy guarantees the same raw numbers in every version, but not the same `permutation`.
        key = np.array([self.seed % 2**64, epoch], dtype=np.uint64)  # a list from 2**63 on would become floats
        raw = np.random.Philox(key=key).random_raw(self.num_windows)
        return np.argsort(raw, kind="stable")

    def _window(self, number: int) -> int:
        epoch, place = divmod(number, self.num_windows)
        return int(self._order(epoch)[place])

    def _cut(self, windows: list[int]) -> Micro:
        starts = np.array(windows, dtype=np.int64)[:, None] * self.context
        at = starts + np.arange(self.context + 1)
        rows = self.shards.tokens[at].astype(np.int64)
        targets, index = rows[:, 1:].copy(), at[:, 1:]
        if self.shards.mask is not None:
            targets[self.shards.mask[index] == 0] = IGNORED
        return Micro(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(targets), torch.from_numpy(index.copy()))
