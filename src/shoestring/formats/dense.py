"""Dense: the weight itself. The Format every linear layer starts with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.formats.base import Format, Parts


@dataclass(frozen=True)
class Dense(Format):
    name: ClassVar[str] = "dense"

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        return 8.0 * dtype.itemsize

    def encode(self, w: Tensor, state: Parts) -> Parts:
        return {"weight": w}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return parts["weight"].to(dtype)

    def empty_parts(self, shape: tuple[int, int], dtype: torch.dtype) -> Parts:
        return {"weight": torch.empty(shape, dtype=dtype)}

    def fake(self, w: Tensor, state: Parts) -> Tensor:
        return w

    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        return torch.zeros_like(w)

    def train_linear(self, x: Tensor, w: Tensor, state: Parts, bias: Tensor | None) -> Tensor:
        return F.linear(x, w, bias)
