"""Micro: the rows that one forward and backward pass sees."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORED = -100  # a target that is not counted


@dataclass(frozen=True)
class Micro:
    """tokens_BT -> targets_BT (IGNORED where not counted), both int64.

    index_BT is each target's place in the corpus: arrays computed once per token (a teacher's top-k, a
    reference loss) are joined by it. num_counted is known before the rows travel, so that nobody waits for a
    device to count.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    index_BT: Tensor
    num_counted: int = -1

    def __post_init__(self) -> None:
        if self.num_counted < 0:
            object.__setattr__(self, "num_counted", int((self.targets_BT != IGNORED).sum()))

    def to(self, device: torch.device) -> Micro:
        if device.type == "cpu":
            return self
        moved = {
            name: getattr(self, name).pin_memory().to(device, non_blocking=True)
            for name in ("tokens_BT", "targets_BT", "index_BT")
        }
        return replace(self, **moved)
