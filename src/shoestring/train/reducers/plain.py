"""The default reducer: gradients are summed in full precision over the mesh axis `replica`.

FSDP2 already sums over `dp`; a reducer works on the outer axis only, which fully_shard never gets. Tensors are joined
into buckets, as DDP does: a message for each of them would cost more time than the bytes of most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoestring.formats.linear import local
from shoestring.mesh import Mesh
from shoestring.train.step import Reducer

BUCKET_BYTES = 25 << 20  # as DDP


class SumReducer(Reducer):
    """Plain all-reduce; a no-op with one replica."""

    clips = False

    def __init__(self, mesh: Mesh) -> None:
        self.group = mesh.group("replica")

    def __call__(self, model: nn.Module) -> None:
        if self.group is None:
            return
        sent: list[tuple[list[Tensor], Tensor, dist.Work]] = []
        for bucket in buckets([local(p.grad) for p in model.parameters() if p.grad is not None]):
            flat = bucket[0] if len(bucket) == 1 else torch.cat([g.flatten() for g in bucket])
            sent.append((bucket, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        for bucket, flat, work in sent:
            work.wait()
            if len(bucket) > 1:
                for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(total.view(gradient.shape))


def buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, up to BUCKET_BYTES each; a larger tensor alone, without a copy."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        bucket = by_dtype.setdefault(gradient.dtype, [])
        if bucket and sum(g.nbytes for g in bucket) + gradient.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = by_dtype[gradient.dtype] = []
        bucket.append(gradient)
    yield from (bucket for bucket in by_dtype.values() if bucket)
