"""FormatLinear: the one module that hosts every Format.

Two phases. Training: `weight` is the master Parameter (any float dtype); the forward casts it to the dtype of the
activations and hands it to `format.train_linear` with the Format's state (`weight_<name>` Parameters and buffers).
Packed: `weight` is gone, the parts are buffers named `weight_<part>`, and the forward is `format.linear`.

Formats see plain tensors only: on a sharded weight the module passes the local shard, and the parallel styles of
`model.parallel` put the collectives around the module.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring.formats.base import Format, Parts
from shoestring.formats.dense import Dense


def local(t: Tensor) -> Tensor:
    """The plain local tensor of a DTensor, or the tensor itself."""
    return t.to_local() if hasattr(t, "to_local") else t


class FormatLinear(nn.Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: Format | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.format: Format = format or Dense()
        self.packed = False
        self.part_names: tuple[str, ...] = ()
        self.state_names: tuple[str, ...] = ()
        # Set by the row-parallel style: the bias is added once, after the partial products are summed.
        self.defer_bias = False

    def format_state(self) -> Parts:
        return {n: local(getattr(self, f"weight_{n}")) for n in self.state_names}

    def parts(self) -> Parts:
        return {n: getattr(self, f"weight_{n}") for n in self.part_names}

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight the forward multiplies with, in `dtype`."""
        if self.packed:
            return self.format.decode(self.parts(), dtype)
        return self.format.fake(local(self.weight).to(dtype), self.format_state())

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None or self.defer_bias else local(self.bias).to(x.dtype)
        if self.packed:
            return self.format.linear(x, self.parts(), bias)
        return self.format.train_linear(x, local(self.weight).to(x.dtype), self.format_state(), bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format}, packed={self.packed}"
