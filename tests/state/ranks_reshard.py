"""Runs on every rank of test_reshard_ranks.py: reshards between meshes of four processes, and errors."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoestring.errors import UserError
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.model import Decoder
from shoestring.model.mesh_layouts import layout_on
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.state.reshard.dtensors import layout_of
from shoestring.state.reshard.execute import GroupTransport, IpcTransport, Resharder
from shoestring.state.reshard.layouts import REPLICATE, MeshLayout, shard
from shoestring.state.reshard.topology import Topology
from tiny import LLAMA

SHAPES = {"even": (8, 6), "uneven": (7, 5), "short": (3, 4), "vector": (5,), "scalar": ()}


def whole(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=generator)


def expected(layout: MeshLayout, name: str) -> Tensor | None:
    """This rank's shard, cut here from the whole tensor."""
    boxes = [b for b, ranks in layout.tiles(SHAPES[name]) if dist.get_rank() in ranks]
    pieces = [whole(name)[b.slices()] for b in boxes]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else None


def refused(work, words: str) -> None:  # type: ignore[no-untyped-def]
    try:
        work()
    except UserError as error:
        assert words in str(error) or "another rank" in str(error), str(error)
        return
    raise AssertionError(f"nothing said {words!r}")


def between_meshes(rank: int) -> None:
    """Uneven FSDP shards of all ranks to pairs, and from ranks 0 and 1 to 2 and 3 only."""
    everyone = DeviceMesh("cpu", [0, 1, 2, 3])
    tensors = {n: distribute_tensor(whole(n), everyone, [Shard(0) if s else Replicate()]) for n, s in SHAPES.items()}
    columns = MeshLayout((2, 2), (REPLICATE, shard(1)))
    rows = MeshLayout((2, 2), (REPLICATE, shard(0)), (3, 1, 2, 0))
    target = {n: REPLICATED if not s else columns if len(s) > 1 else rows for n, s in SHAPES.items()}
    for bucket in (1 << 20, 40):  # 40 bytes: single rows, cut again
        mover = Resharder(topology=Topology(ranks_per_host=1), bucket=bucket)
        for _ in range(2):
            moved = mover.reshard(tensors, dst=target)
            for n in SHAPES:
                assert torch.equal(moved[n], expected(target[n], n)), n
        assert len(mover._plans._plans) == 1  # made once, replayed
    half = mover.reshard(tensors, dst=target, dtype=torch.bfloat16)
    assert torch.equal(half["even"], expected(columns, "even").bfloat16())
    refused(lambda: mover.reshard(tensors, dst=target, dtype=torch.int32), "cannot become")

    lower, upper = MeshLayout((2,), (shard(0),), (0, 1)), MeshLayout((2,), (REPLICATE,), (2, 3))
    mine = {n: t for n in ("even", "uneven") if (t := expected(lower, n)) is not None}
    src = {n: (SHAPES[n], lower) for n in mine}
    moved = mover.reshard(mine, src=src, dst=upper)
    assert sorted(moved) == (["even", "uneven"] if rank >= 2 else [])
    assert all(torch.equal(t, whole(n)) for n, t in moved.items())


REPLICATED = MeshLayout((4,), (REPLICATE,))


def interleaved(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    strided = MeshLayout((4,), (shard(0, 2),))
    local = expected(strided, "even")
    assert local is not None
    t = DTensor.from_local(
        local, mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=(8, 6), stride=(6, 1)
    )
    assert layout_of(t) == strided
    mover = Resharder()
    assert torch.equal(mover.reshard({"even": t}, dst=REPLICATED)["even"], whole("even"))
    back = mover.reshard({"even": whole("even")}, dst=strided)["even"]
    assert torch.equal(back, local)


def decoder(rank: int, **sizes: int) -> Decoder:
    mesh = open_mesh(MeshConfig(**sizes), device="cpu")
    with torch.device("meta"):
        model = Decoder(LLAMA)
    parallelize(model, mesh, ParallelConfig())
    materialize(model, "cpu")
    for name, p in model.named_parameters():
        made, by_name = layout_of(p), layout_on(name, tuple(p.shape), sizes).tiles(tuple(p.shape))
        assert made is not None
        own = [(box, tuple(r for r in ranks if r in made.ranks)) for box, ranks in by_name]
        assert made.tiles(tuple(p.shape)) == own, name  # without FSDP2 every replica has a mesh of its own
    return model


def model_in_place(rank: int) -> None:
    """An FSDP2 x TP trainer's weights into a live model on another mesh; nothing changes when a bucket is damaged."""
    trainer, server = decoder(rank, dp=2, tp=2), decoder(rank, replica=2, tp=2)
    init_weights(trainer, 3)
    init_weights(server, 4)
    before = {n: p.to_local().clone() for n, p in server.named_parameters()}
    addresses = {n: p.to_local().data_ptr() for n, p in server.named_parameters()}

    class Damaging(GroupTransport):
        def send(self, data_N: Tensor, to: int) -> None:
            if rank == 1:
                data_N = data_N.clone()
                data_N[len(data_N) // 2] ^= 64
            super().send(data_N, to)

    topology = Topology(ranks_per_host=2)
    source = dict(trainer.named_parameters())
    damaging = Resharder(topology=topology, transport=Damaging())
    refused(lambda: damaging.reshard_into(source, dict(server.named_parameters())), "damaged")
    assert all(torch.equal(p.to_local(), before[n]) for n, p in server.named_parameters())

    mover = Resharder(topology=topology)
    mover.reshard_into(source, dict(server.named_parameters()))
    for name, p in server.named_parameters():
        assert torch.equal(p.full_tensor(), source[name].full_tensor()), name
        assert p.to_local().data_ptr() == addresses[name]
    some = {n: p for n, p in server.named_parameters() if n != "norm.weight"}
    refused(lambda: mover.reshard_into(source, some), "does not take")
    refused(lambda: mover.reshard_into({n: source[n] for n in some}, dict(server.named_parameters())), "does not have")
    other = {"norm.weight": torch.zeros(7)}
    refused(lambda: mover.reshard_into({"norm.weight": source["norm.weight"]}, other), "has shape")
    short = {"even": torch.zeros(1 if rank == 2 else 2, 6)}  # one rank is wrong: all are told
    rows = {"even": ((8, 6), MeshLayout((4,), (shard(0),)))}
    refused(lambda: mover.reshard(short, src=rows, dst=REPLICATED), "should hold a shard of [2, 6], not [1, 6]")
    odd = {"even": torch.zeros(2, 6, dtype=torch.int64 if rank == 1 else torch.float32)}
    refused(lambda: mover.reshard(odd, src=rows, dst=REPLICATED, dtype=torch.float32), "cannot become")
    mine = {f"only.{rank}": torch.zeros(2)}
    refused(lambda: mover.reshard(mine, dst=REPLICATED), "only some have it")
    five = MeshLayout((5,), (shard(0),))
    refused(lambda: mover.reshard({"vector": whole("vector")}, dst=five), "name rank 4 (1 such), which is not among")


def without_rows(rank: int) -> None:
    """A rank that gets no row of a tensor, and a tensor that has none, are there with their shapes."""
    rows = MeshLayout((4,), (shard(0),))
    tensors = {"short": whole("short"), "empty": torch.zeros(0, 4), "even": whole("even")}
    with patch.object(MeshLayout, "local_shape", autospec=True, side_effect=MeshLayout.local_shape) as looked_at:
        moved = Resharder().reshard(tensors, dst=rows)
    assert moved["short"].shape == (rank < 3, 4) and moved["empty"].shape == (0, 4) and moved["even"].shape == (2, 6)
    # With hundreds of ranks the shape of a shard takes milliseconds: only of those that were not moved.
    assert [call.args[1] for call in looked_at.call_args_list] == [(3, 4), (0, 4)][rank < 3 :]


def chain(rank: int) -> None:
    """One rank to three, each on a host of its own: it leaves the first one once."""
    only = MeshLayout((1,), (REPLICATE,), (0,))
    others = MeshLayout((3,), (REPLICATE,), (1, 2, 3))
    big = torch.arange(600_000, dtype=torch.float64).reshape(1000, 600)

    class Counting(GroupTransport):
        num_sent = 0

        def send(self, data_N: Tensor, to: int) -> None:
            self.num_sent += len(data_N)
            super().send(data_N, to)

    given = {"big": big} if rank == 0 else {}
    for duplex in (True, False):  # in two threads, and in one as with NCCL
        counting = Counting()
        counting.duplex = duplex
        mover = Resharder(topology=Topology(ranks_per_host=1), transport=counting)
        moved = mover.reshard(given, src={"big": (tuple(big.shape), only)}, dst=others)
        assert rank == 0 or torch.equal(moved["big"], big)
        assert counting.num_sent == (0 if rank == 3 else big.nbytes + 8 * 5)  # 5 buckets
    refused(lambda: IpcTransport(dist.new_group([rank], backend="fake")), "needs a gloo group")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for phase in (between_meshes, interleaved, model_in_place, without_rows, chain):
        phase(rank)
        dist.barrier()
        if rank == 0:
            print(f"{phase.__name__} done", flush=True)
    dist.destroy_process_group()
