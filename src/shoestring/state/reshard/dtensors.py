"""Layouts of the tensors that a process holds, from their DTensor placements."""

from __future__ import annotations

from torch import Tensor

from shoestring.errors import UserError
from shoestring.state.reshard.layouts import REPLICATE, MeshLayout, Placement, shard


def layout_of(t: Tensor, name: str = "") -> MeshLayout | None:
    """None for a plain tensor: whole where it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(t, DTensor):
        return None
    mesh = t.device_mesh
    placements = tuple(_placement(p, name) for p in t.placements)
    return MeshLayout(tuple(mesh.mesh.shape), placements, tuple(int(r) for r in mesh.mesh.flatten().tolist()))


def _placement(p: object, name: str) -> Placement:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    # Before torch 2.13 a _StridedShard is a Shard as well.
    if isinstance(p, _StridedShard):
        return shard(p.dim, int(p.split_factor))
    if isinstance(p, Shard):
        return shard(p.dim)
    if isinstance(p, Replicate):
        return REPLICATE
    raise UserError(f"tensor {name!r} has the placement {p}, a pending sum; redistribute it first")
