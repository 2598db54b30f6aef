"""Mesh: which process this is, and the named axes it shares with others.

Four axes, outermost first: `pp` (stages of a pipeline, each with some of the layers), `replica` (whole copies of the
sharded state, kept equal by the trainer's reducer; never given to fully_shard), `dp` (FSDP2 shards over it; 1 = not
applied) and `tp` (tensor parallel). A batch is split over replica x dp; stages and tensor-parallel ranks see the same
rows. One process touches no process
group at all, so the same code runs in a notebook. A process that ends or hangs does not hold the others for ever: every
group has the time-out `timeout_s`, and errors.py says what a lost process means to the user.

torch is imported inside functions: this module sits below everything and must be free to import.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shoestring.device import pick_device
from shoestring.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "replica", "dp", "tp")


@dataclass(frozen=True)
class MeshConfig:
    dp: int = field(
        default=1, metadata={"help": "processes that share each batch and shard the state (FSDP2)", "least": 1}
    )
    tp: int = field(default=1, metadata={"help": "processes that share each matrix (tensor parallel)", "least": 1})
    replica: int = field(default=1, metadata={"help": "whole copies of the sharded state", "least": 1})
    pp: int = field(default=1, metadata={"help": "stages of a pipeline, each with some of the layers", "least": 1})
    layers: str | None = field(
        default=None, metadata={"help": "layers of each stage (9,11,12); none: even by parameters, the head counted"}
    )
    timeout_s: float = field(
        default=1800.0, metadata={"help": "seconds that a process waits for another one before it gives up"}
    )

    @property
    def num_processes(self) -> int:
        return self.pp * self.replica * self.dp * self.tp

    def __str__(self) -> str:
        stages = f"pp={self.pp} x " if self.pp > 1 else ""
        return f"{stages}replica={self.replica} x dp={self.dp} x tp={self.tp}"


@dataclass(frozen=True)
class Mesh:
    rank: int
    world_size: int
    device: torch.device
    replica: int = 1
    dp: int = 1
    tp: int = 1
    device_mesh: DeviceMesh | None = None
    pp: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """This process's share of the batch, counted over replica x dp."""
        return self.rank // self.tp % self.dp_size

    @property
    def stage(self) -> int:
        return self.rank // (self.dp_size * self.tp)

    @property
    def place(self) -> str:
        """The names of private entries of a checkpoint have it."""
        return self._place(self.dp_rank)

    @property
    def place_in_replica(self) -> str:
        """The same in all replicas."""
        return self._place(self.dp_rank % self.dp)

    def _place(self, dp_rank: int) -> str:
        stage = f"pp{self.stage}-" if self.pp > 1 else ""
        return f"{stage}dp{dp_rank}-tp{self.tp_rank}"

    @property
    def dp_size(self) -> int:
        return self.replica * self.dp

    def axis(self, name: str) -> DeviceMesh | None:
        """The sub-mesh of one axis, or None where it has one member."""
        assert name in AXES
        if self.device_mesh is None or getattr(self, name) == 1:
            return None
        return self.device_mesh[name]

    def group(self, name: str) -> ProcessGroup | None:
        sub = self.axis(name)
        return None if sub is None else sub.get_group()

    def sum(self, t: Tensor) -> Tensor:
        """Sum over every share of the batch (replica x dp); the same tensor back on one process."""
        import torch.distributed as dist

        for name in ("replica", "dp"):
            group = self.group(name)
            if group is not None:
                dist.all_reduce(t, group=group)
        return t

    def sum_over_stages(self, t: Tensor) -> Tensor:
        """What each stage has a part of: the square of the gradients' norm, the loss that only the last one knows."""
        import torch.distributed as dist

        if (group := self.group("pp")) is not None:
            dist.all_reduce(t, group=group)
        return t

    def any(self, flag: bool) -> bool:
        """True on every process when it is true on one: how all ranks agree to stop."""
        if self.world_size == 1:
            return flag
        import torch
        import torch.distributed as dist

        t = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return bool(t.item())

    def begin_any(self, flag: bool) -> Callable[[], bool]:
        """`any` without a wait: all processes begin at the same point, and call the result at a later one."""
        if self.world_size == 1:
            return lambda: flag
        import torch
        import torch.distributed as dist

        t = torch.full((), float(flag), device=self.device)
        work = dist.all_reduce(t, op=dist.ReduceOp.MAX, async_op=True)
        if self.device.type != "cuda":

            def wait() -> bool:
                work.wait()
                return bool(t.item())

            return wait
        work.wait()  # only the stream does; reading `t` later would wait for all that is on the stream by then
        copy = torch.empty((), pin_memory=True)
        copy.copy_(t, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait_for_copy() -> bool:
            copied.synchronize()
            return bool(copy.item())

        return wait_for_copy

    def barrier(self) -> None:
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()

    def broadcast_object(self, obj: Any) -> Any:
        """Rank 0's object on every rank."""
        if self.world_size == 1:
            return obj
        import torch.distributed as dist

        box = [obj]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def close(self) -> None:
        if self.world_size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()


def open_mesh(cfg: MeshConfig | None = None, device: str = "auto", *, stages: bool = False) -> Mesh:
    """Read torchrun's environment, join the process group and build the named mesh. `stages`: whether the caller cuts
    its model into stages.

    Raises UserError when the axes do not multiply to the number of processes.
    """
    import torch

    cfg = cfg or MeshConfig()
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    sizes = (cfg.pp, cfg.replica, cfg.dp, cfg.tp)
    if min(sizes) < 1:
        raise UserError(f"the mesh {cfg} is not possible; give 1 or more for each")
    if cfg.pp > 1 and not stages:
        raise UserError(f"mesh.pp={cfg.pp} is for pre-training; use mesh.dp, mesh.tp or mesh.replica here")
    if not cfg.timeout_s > 0:
        raise UserError(f"mesh.timeout_s={cfg.timeout_s} is not possible; give more than 0 seconds")
    wanted = cfg.num_processes
    if wanted != world_size:
        raise UserError(
            f"the mesh {cfg} needs {wanted} processes but {world_size} "
            f"{'is' if world_size == 1 else 'are'} running; start it with `torchrun --nproc-per-node {wanted} "
            "-m shoestring run ...` or change mesh.dp / mesh.tp / mesh.replica / mesh.pp"
        )
    place = pick_device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    if world_size == 1:
        return Mesh(rank=0, world_size=1, device=place)

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    timeout = timedelta(seconds=cfg.timeout_s)
    if not dist.is_initialized():
        backend = "nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    skipped = 0 if cfg.pp > 1 else 1
    device_mesh = init_device_mesh(place.type, sizes[skipped:], mesh_dim_names=AXES[skipped:])
    for group in device_mesh.get_all_groups():  # made with torch's own time-out, not with that of the group above
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return Mesh(rank, world_size, place, cfg.replica, cfg.dp, cfg.tp, device_mesh, cfg.pp)
