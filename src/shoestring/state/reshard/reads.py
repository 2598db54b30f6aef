"""Which stored copy every box is read from: checkpoint folders, arenas in memory, parts of a manifest.

A rank wants boxes; copies hold boxes, listed nearest first. What the nearest one lacks comes from the next. Tensors
that are wanted and stored alike are cut once. Pure Python on integers; no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shoestring.state.boxes import Box

Holder = tuple[int, Box]  # the number of a copy, and a box that it holds


class Read(NamedTuple):
    """`box` of a tensor from the box `held` of copy number `copy`, for the box `wanted`."""

    name: str
    copy: int
    held: Box
    wanted: Box
    box: Box


def plan_reads(
    wanted: Iterable[tuple[str, Box]], held: Mapping[str, Sequence[Holder]]
) -> tuple[list[Read], list[tuple[str, Box]]]:
    """(every element of what is wanted, once, from the first copy that has it; what no copy has)."""
    cuts: dict[tuple[Box, tuple[Holder, ...]], tuple[list[tuple[Holder, Box]], list[Box]]] = {}
    reads: list[Read] = []
    missing: list[tuple[str, Box]] = []
    for name, box in wanted:
        key = box, tuple(held.get(name, ()))
        if key not in cuts:
            cuts[key] = _cut(*key)
        found, gaps = cuts[key]
        reads += [Read(name, copy, where, box, common) for (copy, where), common in found]
        missing += [(name, gap) for gap in gaps]
    return reads, missing


def _cut(box: Box, holders: Sequence[Holder]) -> tuple[list[tuple[Holder, Box]], list[Box]]:
    found: list[tuple[Holder, Box]] = []
    gaps = [box] if box.size else []
    for holder in holders:
        if not gaps:
            break
        found += [(holder, common) for gap in gaps if (common := gap.intersect(holder[1])) is not None]
        gaps = [rest for gap in gaps for rest in gap.subtract(holder[1])]
    return found, gaps
