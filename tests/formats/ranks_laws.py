"""Runs on 2 gloo ranks (see test_ranks.py): laws 5 and 6 on a weight that is really sharded.

ranks_laws.py [all]: every Format cut along both dims in both dtypes; without `all` in one of them by turns.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_convert import Masked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shoestring.errors import UserError
from shoestring.formats import Format, allocate_packed, convert, formats_of, pack, packed_state, parse_format, unpack
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import shard_

ROWS, WIDTH = 25, 192  # 25 rows: the two shards along dim 0 differ in size


def reference(format: Format, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    rows = ROWS // format.block((ROWS, WIDTH))[0] * format.block((ROWS, WIDTH))[0]
    model = nn.Sequential(nn.Linear(WIDTH, rows, bias=False))
    with torch.no_grad():
        model[0].weight[3] = 0
        model[0].weight[4] = model[0].weight[4].abs()
    return model


def check(format: Format, dim: int, dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    whole, cut = reference(format, dtype), reference(format, dtype)
    cut[0].weight = nn.Parameter(distribute_tensor(cut[0].weight.detach(), mesh, [Shard(dim)]))
    for model in (whole, cut):
        convert(model, [("*", format)])

    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    x_local = x.chunk(2, dim=1)[rank] if dim == 1 else x
    y, y_local = whole(x), cut(x_local)
    if dim == 1:
        total = y_local.detach().clone()
        dist.all_reduce(total)
        assert torch.allclose(total, y, atol=1e-5 if dtype == torch.float32 else 0.05)
    else:
        assert torch.allclose(y_local, y.chunk(2, dim=1)[rank], atol=1e-6)
    used, used_local = whole[0].effective_weight(dtype), cut[0].effective_weight(dtype)
    assert torch.equal(used.chunk(2, dim=dim)[rank], used_local)

    y_local.float().square().sum().backward()
    grad = cut[0].weight.grad
    assert isinstance(grad, DTensor) and grad.placements == (Shard(dim),) and grad.to_local().abs().sum() > 0
    y.float().square().sum().backward()
    for name, trained in cut[0].trained_state().items():
        # Along dim 1 the loss of a rank's partial product is another one; that it is cut the same way holds.
        whole_grad, cut_grad = whole[0].trained_state()[name].grad, trained.grad
        assert isinstance(cut_grad, DTensor) and cut_grad.placements == (Shard(dim),), name
        if dim == 0:
            expected = whole_grad.chunk(2, dim=0)[rank]
            assert torch.allclose(cut_grad.to_local(), expected, rtol=1e-4, atol=1e-4), name

    early = packed_state(cut, dtype=dtype)
    pack(whole, dtype=dtype)
    pack(cut, dtype=dtype)
    for name, part in whole[0].state_dict().items():
        held = getattr(cut[0], name)
        gathered = held.full_tensor() if isinstance(held, DTensor) else held
        assert gathered.dtype == part.dtype and torch.equal(gathered, part), name
        before = early[f"0.{name}"]
        assert torch.equal(before.full_tensor() if isinstance(before, DTensor) else before, part), name
    assert torch.equal(cut[0].effective_weight(dtype), used_local)  # law 6 on this rank's shard
    assert torch.equal(cut(x_local), y_local)
    unpack(cut, dtype=dtype)
    assert torch.equal(cut[0].weight.full_tensor(), used)


def check_fsdp(format: Format) -> None:
    """Trained a step under FSDP2, what packed_state writes is what the last forward multiplied with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    convert(model, [("*", format)])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    optimizer.step()
    expected = model(x)
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in packed_state(model).items()}
    try:
        pack(model)
    except UserError as error:
        assert "packed_state" in str(error)
    else:
        raise AssertionError("pack under fully_shard must refuse")
    for i in (0, 1):
        parts = {n: state[f"{i}.weight_{n}"] for n in format.empty_parts((64, 64), torch.float32)}
        x = F.linear(x, format.decode(parts, torch.float32), state[f"{i}.bias"])
    assert torch.equal(x, expected)


def check_fsdp_bf16() -> None:
    """Mixed precision must not round a learned grid: what is packed is what bf16 training multiplied with."""
    torch.manual_seed(0)
    spec = ModelSpec(32, 64, 1, 2, 2, 32, 64, max_positions=16, tied=False)
    model = Decoder(spec)
    model.compute_dtype = torch.bfloat16
    convert(model, [("*", parse_format("int3:g32:learned")), ("head", parse_format("nf3:s2:g32:learned"))])
    shard_(model, init_device_mesh("cpu", (2,)), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(16).view(2, 8)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens).float().square().mean().backward()
        optimizer.step()
    expected = model(tokens)
    state = {
        n: t.full_tensor() if isinstance(t, DTensor) else t
        for n, t in packed_state(model, dtype=torch.bfloat16).items()
    }
    packed = Decoder(spec)
    packed.compute_dtype = torch.bfloat16
    allocate_packed(packed, {n: f.to_json() for n, f in formats_of(model).items()}, torch.bfloat16)
    packed.load_state_dict(state)
    assert torch.equal(packed(tokens), expected)


def main() -> None:
    dist.init_process_group("gloo")
    sparse = (
        *("sparse24:tile:held:mvue", "sparse24:soft:mvue", "sparse24:tile:held+int4:g16"),
        "sparse24:held+slorb16",
    )
    learned = ("int3:g32:learned", "nf3:s2:g32:learned")
    dtypes = (torch.float32, torch.bfloat16)
    for n, label in enumerate(("int4:g32", "int3:g96", "nf3:s2:g32", "fp4:s1:g32", *learned, *sparse)):
        for dim in (0, 1):
            for dtype in dtypes if "all" in sys.argv else dtypes[(n + dim) % 2 :][:1]:
                check(parse_format(label), dim, dtype)
    check(Masked(), 0, torch.float32)  # row state is sharded with the weight
    try:
        check(parse_format("int4:g64"), 1, torch.float32)
    except UserError as error:
        assert "multiples of 64" in str(error)
    else:
        raise AssertionError("a cut through a group must be refused")
    check_fsdp(parse_format("nf3:s2:g32"))
    check_fsdp(parse_format("int3:g32:learned"))
    check_fsdp_bf16()
    check_fsdp(parse_format("sparse24:tile:held:mvue"))
    dist.destroy_process_group()
    print("laws hold on 2 ranks")


if __name__ == "__main__":
    main()
