"""Who takes part in a run's checkpoints: the ranks, the hosts they run on, the life of the run they are in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoestring.mesh import Mesh
from shoestring.state.agreement import everyone
from shoestring.state.levels.host_folder import host_name


class Members:
    """One rank alone until it has joined the others."""

    def __init__(self) -> None:
        self.host = host_name()
        self.hosts = [self.host]  # of every rank
        self.rank = 0
        self.life = ""  # one for every start of the trainer
        self._group: Any = None

    def join(self, mesh: Mesh | None) -> None:
        if mesh is not None:
            self.rank, self.hosts = mesh.rank, everyone(mesh, [self.host])

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def num_here(self) -> int:
        """Ranks on this host."""
        return self.hosts.count(self.host)

    @property
    def ranks_here(self) -> list[int]:
        return [rank for rank, host in enumerate(self.hosts) if host == self.host]

    @property
    def on_several_hosts(self) -> bool:
        return len(set(self.hosts)) > 1

    @property
    def is_first_of_host(self) -> bool:
        return self.hosts.index(self.host) == self.rank

    def gather(self, item: Any) -> list[Any]:
        """Of every rank, on every rank."""
        if self.world_size == 1:
            return [item]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, item)
        return found

    def agree(self, flags: Sequence[bool], numbers: Sequence[float]) -> list[float]:
        """Flags that hold on every rank, then the largest of each number. Not over the group of training."""
        if self.world_size == 1:
            return [*(float(f) for f in flags), *numbers]
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        row = torch.tensor([*(-float(f) for f in flags), *numbers], dtype=torch.float64)
        dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self._group)
        values = row.tolist()
        return [*(-v for v in values[: len(flags)]), *values[len(flags) :]]

    def any(self, flag: bool) -> bool:
        return not self.agree([not flag], [])[0]
