"""Which rank of a host writes which boxes of the state: every box that several of them hold is written by one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoestring.mesh import Mesh
from shoestring.state.agreement import agree, everyone
from shoestring.state.boxes import Box, local_box
from shoestring.state.files import dtype_name
from shoestring.state.levels.members import Members
from shoestring.state.levels.snapshot import lay_out
from shoestring.state.levels.version import HeldBox, HeldCopy, dump_index, sum_of_names


@dataclass(frozen=True)
class Share:
    """Which boxes this rank writes, of which state."""

    boxes: tuple[HeldBox, ...]
    names_sum: str
    signature: int


class Division:
    """The share of this rank, of the tensors that the run had when they were divided last."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.share: Share | None = None
        self._boxes: dict[str, tuple[Any, Box]] = {}

    def divide(self, mesh: Mesh, tensors: Mapping[str, Tensor]) -> None:
        """All ranks together."""

        def describe() -> dict[str, tuple[str, tuple[int, ...], Box]]:
            return {n: (dtype_name(n, t.dtype), tuple(t.shape), self._box_of(n, t)) for n, t in tensors.items()}

        mine: dict[str, tuple[str, tuple[int, ...], Box]] = agree(mesh, describe)
        layouts = everyone(mesh, [mine])
        names = {n: (dtype, shape) for some in layouts for n, (dtype, shape, _) in some.items()}
        chosen = share_out(layouts, self.members.hosts)[mesh.rank]
        boxes = [HeldBox(n, *mine[n][:2], mine[n][2]) for n in mine if n in chosen]
        self.share = Share(lay_out(boxes), sum_of_names(names), _signature(tensors))

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are the tensors that were divided."""
        return self.share is not None and _signature(tensors) == self.share.signature

    def copy_of(self, step: int, values: Mapping[str, Any], levels: tuple[str, ...]) -> HeldCopy:
        assert self.share is not None
        return HeldCopy(
            step=step,
            life=self.members.life,
            rank=self.members.rank,
            world_size=self.members.world_size,
            host=self.members.host,
            names_sum=self.share.names_sum,
            boxes=self.share.boxes,
            values=values,
            levels=levels,
        )

    def sizes(self, values: Mapping[str, Any]) -> tuple[int, int]:
        """Bytes of a slot and of its index."""
        copy = self.copy_of(0, values, ())
        num_bytes = max(copy.num_bytes, 1)
        return num_bytes, len(json.dumps(dump_index(copy))) + 20 * (num_bytes // (1 << 26) + 1) + 4096

    def _box_of(self, name: str, t: Tensor) -> Box:
        """The local box; computing that of a DTensor takes a tenth of a millisecond, so it is remembered."""
        key = (t.shape, getattr(t, "placements", None))
        if name not in self._boxes or self._boxes[name][0] != key:
            self._boxes[name] = (key, local_box(t))
        return self._boxes[name][1]


def _signature(tensors: Mapping[str, Tensor]) -> int:
    return hash(tuple((n, t.dtype, tuple(t.shape)) for n, t in tensors.items()))


def share_out(
    layouts: Sequence[Mapping[str, tuple[str, tuple[int, ...], Box]]], hosts: Sequence[str]
) -> list[set[str]]:
    """For each rank the names it writes: a box that several ranks of a host hold goes to the least loaded of them."""
    chosen: list[set[str]] = [set() for _ in layouts]
    load = [0] * len(layouts)
    holders: dict[tuple[str, str, Box], list[int]] = {}
    for rank, layout in enumerate(layouts):
        for name, (_, shape, box) in layout.items():
            if box.size or 0 in shape:  # a tensor without elements belongs to the state, an empty share of one does not
                holders.setdefault((hosts[rank], name, box), []).append(rank)
    for (_, name, box), ranks in sorted(holders.items(), key=lambda item: (-item[0][2].size, item[0][:2])):
        taker = min(ranks, key=lambda r: (load[r], r))
        chosen[taker].add(name)
        load[taker] += box.size
    return chosen
