"""Boxes: half-open ranges per dimension, in which the pieces of every tensor are counted.

`check_cover` says whether boxes tile a tensor exactly. Who reads or sends which box is planned in reshard/.

Everything but `local_box` is pure Python on integers. Left out: strided ranges; a piece that is not one box is several
boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoestring.errors import UserError

if TYPE_CHECKING:  # the agent of the checkpoint levels plans with boxes and has no torch
    from torch import Tensor


@dataclass(frozen=True, order=True)
class Box:
    """The elements with start[d] <= index[d] < stop[d] in every dimension d."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(a < 0 or b < a for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"not a box: start {self.start}, stop {self.stop}")

    @staticmethod
    def full(shape: Sequence[int]) -> Box:
        return Box((0,) * len(shape), tuple(int(n) for n in shape))

    @staticmethod
    def at(offset: Sequence[int], shape: Sequence[int]) -> Box:
        return Box(tuple(int(o) for o in offset), tuple(int(o) + int(n) for o, n in zip(offset, shape, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements; a box without dimensions (a 0-dim tensor) has one."""
        return math.prod(self.shape)

    def from_row(self, start: int, stop: int) -> Box:
        """The part between two indices of the first dimension."""
        return Box((start, *self.start[1:]), (stop, *self.stop[1:]))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when no element is common."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def contains(self, other: Box) -> bool:
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def slices(self, relative_to: Box | None = None) -> tuple[slice, ...]:
        """Index of this box inside a tensor that holds `relative_to` (default: the whole tensor)."""
        base = relative_to.start if relative_to is not None else (0,) * len(self.start)
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, base, strict=True))

    def subtract(self, other: Box) -> list[Box]:
        """This box without `other`, as at most two boxes per dimension that do not overlap."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.size else []
        pieces: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for dim in range(len(start)):
            if start[dim] < common.start[dim]:
                pieces.append(Box(tuple(start), (*stop[:dim], common.start[dim], *stop[dim + 1 :])))
            if common.stop[dim] < stop[dim]:
                pieces.append(Box((*start[:dim], common.stop[dim], *start[dim + 1 :]), tuple(stop)))
            start[dim], stop[dim] = common.start[dim], common.stop[dim]
        return pieces


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> list[Box]:
    """The part of a tensor of `shape` that no box covers, as boxes that do not overlap."""
    whole = Box.full(shape)
    gaps = [whole] if whole.size else []
    for box in boxes:
        gaps = [rest for gap in gaps for rest in gap.subtract(box)]
    return gaps


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. Sweeps along dimension 0: near linear for a row split."""
    active: list[Box] = []
    for box in sorted(b for b in boxes if b.size):
        active = [a for a in active if not a.stop or a.stop[0] > box.start[0]]
        for other in active:
            if box.intersect(other) is not None:
                return other, box
        active.append(box)
    return None


def check_inside(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """UserError unless the boxes lie inside the tensor and do not overlap."""
    whole = Box.full(shape)
    for box in boxes:
        if len(box.start) != len(whole.start) or not whole.contains(box):
            raise UserError(
                f"tensor {name!r} of shape {list(shape)}: box {list(box.start)}-{list(box.stop)} lies outside"
            )
    if (pair := overlapping(boxes)) is not None:
        a, b = pair
        raise UserError(
            f"tensor {name!r} of shape {list(shape)}: boxes {list(a.start)}-{list(a.stop)} and "
            f"{list(b.start)}-{list(b.stop)} overlap"
        )


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """UserError unless the boxes lie inside the tensor, do not overlap, and leave no element out."""
    check_inside(name, shape, boxes)
    whole = Box.full(shape)
    # Boxes inside the tensor without overlap cover it exactly when their sizes add up.
    if sum(b.size for b in boxes) != whole.size:
        gap = uncovered(shape, boxes)[0]
        raise UserError(f"tensor {name!r} of shape {list(shape)}: nothing covers {list(gap.start)}-{list(gap.stop)}")


def local_box(t: Tensor) -> Box:
    """The box that this process holds: everything of a plain tensor, its shard of a DTensor."""
    if not hasattr(t, "device_mesh"):
        return Box.full(t.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _refuse_interleaved(t)
    shape, offset = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)  # type: ignore[attr-defined]
    if len(offset) != len(t.shape):  # this process is outside the mesh of the tensor
        return Box((0,) * len(t.shape), (0,) * len(t.shape))
    return Box.at(offset, shape)


def _refuse_interleaved(t: Tensor) -> None:
    """FSDP2 over TP marks its axis as strided; a shard is one box because TP cuts the same dim too."""
    placements, mesh = t.placements, t.device_mesh  # type: ignore[attr-defined]
    for axis, p in enumerate(placements):
        factor = getattr(p, "split_factor", 1)
        inner = [
            mesh.size(j)
            for j in range(axis + 1, len(placements))
            if getattr(placements[j], "dim", None) == getattr(p, "dim", -1)
        ]
        if factor > 1 and math.prod(inner) != factor:
            raise UserError(f"a tensor with placements {placements} holds interleaved rows; redistribute it first")
