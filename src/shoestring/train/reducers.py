"""Reducers: how gradients become equal over the mesh axis `replica`.

FSDP2 already sums over `dp`; a reducer only sees the outer axis, which fully_shard never gets. The default
sums in full precision. Compressed reducers keep their error feedback in state_dict.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from shoestring.formats.linear import local
from shoestring.mesh import Mesh


class SumReducer:
    """Plain all-reduce; nothing at all where there is one replica."""

    def __init__(self, mesh: Mesh) -> None:
        self.group = mesh.group("replica")

    def __call__(self, model: nn.Module) -> None:
        if self.group is None:
            return
        pending = [
            dist.all_reduce(local(p.grad), group=self.group, async_op=True)
            for p in model.parameters()
            if p.grad is not None
        ]
        for work in pending:
            work.wait()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
