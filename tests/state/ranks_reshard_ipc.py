"""Runs on both ranks of test_two_processes_share_gpu_memory: they share one GPU and move tensors through CUDA IPC."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.errors import UserError
from shoestring.state.reshard.execute import IpcTransport, Resharder
from shoestring.state.reshard.layouts import REPLICATE, MeshLayout, shard

SHAPES = {"even": (512, 768), "uneven": (33, 40), "vector": (1001,)}
ROWS, COLUMNS, EVERYWHERE = MeshLayout((2,), (shard(0),)), MeshLayout((2,), (shard(1),)), MeshLayout((2,), (REPLICATE,))


def whole(name: str) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name))).cuda()


def own(name: str, layout: MeshLayout) -> Tensor:
    (box,) = [b for b, ranks in layout.tiles(SHAPES[name]) if dist.get_rank() in ranks]
    return whole(name)[box.slices()].contiguous()


class Damaging(IpcTransport):
    def send(self, data_N: Tensor, to: int) -> None:
        data_N[len(data_N) // 2] ^= 64
        super().send(data_N, to)


if __name__ == "__main__":
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    bucket = 1 << 18
    mine = {n: own(n, ROWS) for n in SHAPES}
    src = {n: (SHAPES[n], ROWS) for n in SHAPES}
    target = {n: COLUMNS if len(s) > 1 else EVERYWHERE for n, s in SHAPES.items()}
    mover = Resharder(transport=IpcTransport(bucket=bucket), bucket=bucket)
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(2):
            moved = mover.reshard(mine, src=src, dst=target, dtype=dtype)
            for n, t in moved.items():
                assert t.is_cuda and torch.equal(t, own(n, target[n]).to(dtype)), n
    try:
        Resharder(transport=Damaging(bucket=bucket), bucket=bucket).reshard(mine, src=src, dst=target)
        raise AssertionError("damaged bytes were taken")
    except UserError as error:
        assert "damaged" in str(error), error
    dist.barrier()
    if dist.get_rank() == 0:
        print("equal", flush=True)
    dist.destroy_process_group()
