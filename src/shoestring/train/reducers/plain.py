"""The default reducer: gradients are summed in full precision over the mesh axis `replica`.

FSDP2 already sums over `dp`; a reducer works on the outer axis only, which fully_shard never gets.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from shoestring.formats.linear import local
from shoestring.mesh import Mesh
from shoestring.train.step import Reducer


class SumReducer(Reducer):
    """Plain all-reduce; a no-op with one replica."""

    clips = False

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
