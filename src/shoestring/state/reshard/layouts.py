"""Layouts: which rank holds which boxes of a tensor.

`MeshLayout` says it the way DTensor does: one placement per mesh axis. `BoxLayout` lists boxes, as a checkpoint's
manifest does. Both answer `tiles(shape)`: the distinct boxes with the ranks that hold them.

Semantics are torch's. `shard(dim)` cuts into chunks of ceil(n / size), so the last ones may be short or empty.
`shard(dim, f)` is torch's `_StridedShard`. Where the axes after it cut the same dim into exactly f pieces
(FSDP2 over tensor parallelism), those cuts come first and every rank holds one box. Otherwise the rank holds the i-th
chunk of each of f pieces: several boxes.

Pure Python on integers; no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from shoestring.errors import UserError, shown
from shoestring.state.boxes import Box

Tile = tuple[Box, tuple[int, ...]]  # a box, and the ranks that hold it, ascending
Interval = tuple[int, int]

_PLACEMENT = re.compile(r"^(?:R|S\((\d{1,9})\)|_S\((\d{1,9}), ?(\d{1,9})\))$")


@dataclass(frozen=True)
class Placement:
    """What one mesh axis does to a tensor: replicate it (dim None) or cut `dim`."""

    dim: int | None = None
    split_factor: int = 1

    def __str__(self) -> str:
        if self.dim is None:
            return "R"
        return f"S({self.dim})" if self.split_factor == 1 else f"_S({self.dim}, {self.split_factor})"

    @staticmethod
    def parse(text: str) -> Placement:
        """From torch's own short form: R, S(0), _S(0, 2)."""
        found = _PLACEMENT.match(text.strip())
        if found is None:
            raise UserError(f"{shown(text)} is not a placement; give R (replicate), S(DIM) or _S(DIM, SPLIT_FACTOR)")
        dim, strided, factor = found.groups()
        if strided is not None:
            return Placement(int(strided), max(1, int(factor)))
        return Placement(None if dim is None else int(dim))


REPLICATE = Placement()


def shard(dim: int, split_factor: int = 1) -> Placement:
    return Placement(dim, split_factor)


@dataclass(frozen=True)
class MeshLayout:
    """`sizes` of the mesh axes, outermost first, with one placement each; `ranks` in row-major order."""

    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num = math.prod(self.sizes)
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(num)))
        if len(self.sizes) != len(self.placements):
            raise UserError(
                f"a mesh of {len(self.sizes)} axes {self.sizes} needs one placement for each, got "
                f"{len(self.placements)}: {', '.join(map(str, self.placements))}"
            )
        if min(self.sizes, default=1) < 1 or len(self.ranks) != num or len(set(self.ranks)) != num:
            raise UserError(f"a mesh of sizes {self.sizes} needs {num} distinct ranks, got {list(self.ranks)[:16]}")

    @cached_property
    def _hash(self) -> int:
        return hash((self.sizes, self.placements, self.ranks))

    def __hash__(self) -> int:  # plans group thousands of tensors by layout
        return self._hash

    def tiles(self, shape: Sequence[int]) -> list[Tile]:
        for p in self.placements:
            if p.dim is not None and p.dim >= len(shape):
                raise UserError(f"placement {p} cuts dim {p.dim} of a tensor of shape {list(shape)}; dims start at 0")
        held: dict[Box, list[int]] = {}
        per_dim = [self._cuts(dim, int(shape[dim])) for dim in range(len(shape))]
        for rank, coordinate in zip(self.ranks, product(*map(range, self.sizes)), strict=True):
            for ranges in product(*(cut[tuple(coordinate[a] for a in axes)] for axes, cut in per_dim)):
                box = Box(tuple(r[0] for r in ranges), tuple(r[1] for r in ranges))
                held.setdefault(box, []).append(rank)
        return [(box, tuple(sorted(held[box]))) for box in sorted(held)]

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Of what `rank` holds, where that is one piece or no element at all."""
        coordinate = list(product(*map(range, self.sizes)))[self.ranks.index(rank)]
        per_dim = (self._cuts(dim, int(length)) for dim, length in enumerate(shape))
        return tuple(_length(cut[tuple(coordinate[a] for a in axes)]) for axes, cut in per_dim)

    def _cuts(self, dim: int, length: int) -> tuple[list[int], dict[tuple[int, ...], list[Interval]]]:
        """The axes that cut `dim`, and for each coordinate on them the ranges it holds."""
        axes = [a for a, p in enumerate(self.placements) if p.dim == dim]
        cut: dict[tuple[int, ...], list[Interval]] = {}
        order = self._order(axes)
        for coordinate in product(*(range(self.sizes[a]) for a in axes)):
            where = dict(zip(axes, coordinate, strict=True))
            held = [(0, length)]
            for axis, factor in order:
                pieces = _chunks(held, factor) if factor > 1 else [held]
                held = _merged(r for piece in pieces for r in _chunk(piece, self.sizes[axis], where[axis]))
            cut[coordinate] = [r for r in held if r[0] < r[1]]
        return axes, cut

    def _order(self, axes: list[int]) -> list[tuple[int, int]]:
        """(axis, split factor) in the order in which the cuts are made."""
        order: list[tuple[int, int]] = []
        for index in reversed(range(len(axes))):
            axis = axes[index]
            factor = self.placements[axis].split_factor
            inner = math.prod(self.sizes[a] for a in axes[index + 1 :])
            if factor > 1 and factor == inner:
                order.append((axis, 1))  # cut after the axes to its right
            else:
                order.insert(0, (axis, factor))
        return order


@dataclass(frozen=True)
class BoxLayout:
    """Boxes as they are: a checkpoint's parts, or whatever no mesh describes."""

    boxes: tuple[tuple[int, Box], ...]  # (rank, box)

    def tiles(self, shape: Sequence[int]) -> list[Tile]:
        whole = Box.full(shape)
        held: dict[Box, set[int]] = {}
        for rank, box in self.boxes:
            if len(box.start) != len(whole.start) or not whole.contains(box):
                raise UserError(
                    f"rank {rank} holds {list(box.start)}-{list(box.stop)} of a tensor of shape {list(shape)}; "
                    "it lies outside"
                )
            if box.size:
                held.setdefault(box, set()).add(rank)
        return [(box, tuple(sorted(ranks))) for box, ranks in sorted(disjoint(held).items())]


Layout = MeshLayout | BoxLayout


def disjoint(held: dict[Box, set[int]]) -> dict[Box, set[int]]:
    """The same holdings as boxes of which no two overlap: where they did, the common part has both sets of ranks."""
    cells: list[tuple[Box, set[int]]] = []
    for box, ranks in sorted(held.items()):
        rest = [box]
        split: list[tuple[Box, set[int]]] = []
        for cell, holders in cells:
            common = [c for piece in rest if (c := piece.intersect(cell)) is not None]
            if not common:
                split.append((cell, holders))
                continue
            rest = [r for piece in rest for r in piece.subtract(cell)]
            outside = [cell]
            for c in common:
                split.append((c, holders | ranks))
                outside = [r for piece in outside for r in piece.subtract(c)]
            split += [(r, holders) for r in outside]
        cells = split + [(r, set(ranks)) for r in rest]
    return dict(cells)


# -- ranges -----------------------------------------------------------------------------------------------------


def _length(ranges: Iterable[Interval]) -> int:
    return sum(stop - start for start, stop in ranges)


def _chunk(ranges: list[Interval], num: int, index: int) -> list[Interval]:
    """The index-th of `num` chunks of ranges laid end to end, cut as torch.chunk cuts."""
    size = -(-_length(ranges) // num)
    return _window(ranges, index * size, (index + 1) * size)


def _chunks(ranges: list[Interval], num: int) -> list[list[Interval]]:
    return [_chunk(ranges, num, index) for index in range(num)]


def _window(ranges: list[Interval], first: int, last: int) -> list[Interval]:
    out, at = [], 0
    for start, stop in ranges:
        lo, hi = max(first - at, 0), min(last - at, stop - start)
        if lo < hi:
            out.append((start + lo, start + hi))
        at += stop - start
    return out


def _merged(ranges: Iterable[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for start, stop in ranges:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out
