"""Unit tasks: which part of a tensor must reach whom, and who could send it.

For each tile of the destination and each tile of the source that overlap, the common box is one unit task: any holder
of the source tile may send it, and every holder of the destination tile must get it. Tensors of one shape, item size
and pair of layouts are one class and are intersected once. Tasks with the same senders and receivers then become one
bundle: the schedule sees tens of bundles where a model has thousands of unit tasks.

Pure Python on integers; no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from shoestring.errors import UserError
from shoestring.state.boxes import Box
from shoestring.state.reshard.layouts import Layout, Tile


class MovedTensor(NamedTuple):
    """A tensor to be moved: its whole shape, bytes per element on the wire, and where it is and shall be."""

    shape: tuple[int, ...]
    itemsize: int
    src: Layout
    dst: Layout


@dataclass(frozen=True)
class TensorClass:
    """Tensors that differ in their names only."""

    info: MovedTensor
    names: tuple[str, ...]


class UnitTask(NamedTuple):
    box: Box
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


class Piece(NamedTuple):
    """A box of every tensor of a class."""

    number: int  # of the class
    box: Box


@dataclass(frozen=True)
class Bundle:
    """Everything that any of `senders` can send and all of `receivers` must get."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    pieces: tuple[Piece, ...]
    num_bytes: int


def classes_of(tensors: Mapping[str, MovedTensor]) -> list[TensorClass]:
    found: dict[MovedTensor, list[str]] = {}
    for name, info in tensors.items():
        found.setdefault(info, []).append(name)
    return [TensorClass(info, tuple(sorted(names))) for info, names in found.items()]


def unit_tasks(shape: Sequence[int], src: Layout, dst: Layout, name: str = "") -> list[UnitTask]:
    """In the order of the destination's tiles. UserError where nobody holds an element that is wanted."""
    sources, tasks = _ByStart(src.tiles(shape)), []
    for box, receivers in dst.tiles(shape):
        found = 0
        for held, senders in sources.near(box):
            common = box.intersect(held)
            if common is not None:
                tasks.append(UnitTask(common, senders, receivers))
                found += common.size
        if found != box.size:
            raise UserError(
                f"tensor {name!r} of shape {list(shape)}: the source holds {found} of the {box.size} elements that "
                f"rank {receivers[0]} needs; the source layout must cover the destination"
            )
    return tasks


class _ByStart:
    """Tiles, sorted along the dim that is cut most, so that those near a box are found by bisection."""

    def __init__(self, tiles: list[Tile]) -> None:
        num_dims = len(tiles[0][0].start) if tiles else 0
        starts = [len({box.start[d] for box, _ in tiles}) for d in range(num_dims)]
        self._dim = starts.index(max(starts)) if starts else None
        if self._dim is not None:
            dim = self._dim
            tiles = sorted(tiles, key=lambda tile: (tile[0].start[dim], tile[0]))
            self._starts = [box.start[dim] for box, _ in tiles]
            self._longest = max(box.stop[dim] - box.start[dim] for box, _ in tiles)
        self._tiles = tiles

    def near(self, box: Box) -> list[Tile]:
        if self._dim is None:
            return self._tiles
        first = bisect_left(self._starts, box.start[self._dim] - self._longest)
        return self._tiles[first : bisect_left(self._starts, box.stop[self._dim])]


def bundles_of(classes: Sequence[TensorClass]) -> list[Bundle]:
    """In the order in which their first task appears."""
    pieces: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Piece]] = {}
    sizes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for index, kind in enumerate(classes):
        info = kind.info
        each = info.itemsize * len(kind.names)
        for task in unit_tasks(info.shape, info.src, info.dst, kind.names[0]):
            key = task.senders, task.receivers
            pieces.setdefault(key, []).append(Piece(index, task.box))
            sizes[key] = sizes.get(key, 0) + task.box.size * each
    return [Bundle(*key, tuple(held), sizes[key]) for key, held in pieces.items()]


def cut_bundle(bundle: Bundle, num: int, classes: Sequence[TensorClass]) -> list[Bundle]:
    """The bundle as up to `num` bundles of about equal size, for the same ranks."""
    shares: list[list[Piece]] = [[] for _ in range(num)]
    for turn, piece in enumerate(bundle.pieces):
        for part, box in enumerate(cut_box(piece.box, num)):
            shares[(part + turn) % num].append(Piece(piece.number, box))  # short pieces in turn
    return [
        Bundle(bundle.senders, bundle.receivers, tuple(share), bytes_of(share, classes)) for share in shares if share
    ]


def cut_box(box: Box, num: int) -> list[Box]:
    """The box as at most `num` boxes, cut along its outermost dim that is long enough, or its longest."""
    shape = box.shape
    dim = next((d for d, n in enumerate(shape) if n >= num), None)
    if dim is None:
        if not shape:
            return [box]
        dim = max(range(len(shape)), key=lambda d: shape[d])
    edges = sorted({box.start[dim] + shape[dim] * part // num for part in range(num + 1)})
    return [
        Box((*box.start[:dim], lo, *box.start[dim + 1 :]), (*box.stop[:dim], hi, *box.stop[dim + 1 :]))
        for lo, hi in pairwise(edges)
    ]


def bytes_of(pieces: Iterable[Piece], classes: Sequence[TensorClass]) -> int:
    return sum(p.box.size * classes[p.number].info.itemsize * len(classes[p.number].names) for p in pieces)
