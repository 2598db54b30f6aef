"""A whole decoding step in one kernel: the CUDA source on the CPU, with blocks that run at random, and on a GPU,
against the reference in fp64."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import emulated
import pytest
import torch
from layers import rms
from torch import Tensor

from shoestring.formats import FormatLinear, parse_format
from shoestring.formats.kernel_layout import lay_out
from shoestring.hardware.device import H200, DeviceLimits
from shoestring.hardware.plan_table import read_plans
from shoestring.kernels.attention.rope_store import cos_sin_at
from shoestring.kernels.lowbit.chunk_layout import ChunkLayout
from shoestring.kernels.step.row_step import (
    PLANS,
    RowStep,
    RowStepPlan,
    StepHead,
    StepLayer,
    StepShape,
    num_words,
    plan_key,
    row_step_macros,
    row_step_ref,
    sources,
    unusable,
)

EPS = 1e-5, 1e-6, 1e-5
Part = TypeVar("Part", StepLayer, StepHead)


@dataclasses.dataclass(frozen=True)
class Case:
    d_model: int = 64
    d_ff: int = 192
    heads: int = 4
    groups: int = 2
    dim: int = 32
    vocab: int = 70
    num_layers: int = 3
    norm: torch.dtype = torch.bfloat16
    head_norm: torch.dtype | None = None
    bias: bool = False
    turned: bool = True
    window: int | None = None
    positions: tuple[int, ...] = (0, 1, 37)
    format: str | None = None
    coded_head: bool = False


def made(
    case: Case, dtype: torch.dtype, device: str
) -> tuple[list[StepLayer], list[StepLayer], StepHead, Tensor, ChunkLayout | None]:
    """Dense layers, the layers that the kernel reads, the head, the table, and the layout of chunks. What the
    kernel reads lies in one tensor, and so do keys and values, which the emulation checks."""
    g = torch.Generator(device).manual_seed(1)
    attended, wide = case.heads * case.dim, (case.heads + 2 * case.groups) * case.dim
    shapes = [(wide, case.d_model), (case.d_model, attended), (2 * case.d_ff, case.d_model), (case.d_model, case.d_ff)]
    shapes = shapes * case.num_layers + [(case.vocab, case.d_model)] * (case.vocab > 0)
    weights = [(torch.randn(s, generator=g, device=device) * s[1] ** -0.5).to(device, dtype) for s in shapes]
    read, layout = list(weights), None
    if case.format:
        format = parse_format(case.format)
        layout = format.layout(case.d_model)
        for n in range(4 * case.num_layers):
            layer = FormatLinear(shapes[n][1], shapes[n][0], bias=False, format=format).to(device)
            with torch.no_grad():
                layer.weight.copy_(weights[n])
            layer.pack(dtype)
            read[n] = lay_out(layer.operands(), layout)
            assert format.layout(shapes[n][1]) == layout
            weights[n] = layer.effective_weight(dtype)
    grid: tuple[Tensor | None, Tensor | None] = (None, None)
    if case.coded_head:
        read[-1] = torch.randint(256, shapes[-1], generator=g, dtype=torch.uint8, device=device)
        scale = (torch.rand(case.vocab, generator=g, device=device) * 1e-3).to(dtype)
        grid = scale, torch.randint(100, 150, (case.vocab,), generator=g, dtype=torch.uint8, device=device)
    flat = torch.cat([t.contiguous().view(torch.uint8).flatten() for t in read])
    starts = [0, *itertools.accumulate(t.nbytes for t in read)]
    read = [flat[i : i + t.nbytes].view(t.dtype).view(t.shape) for i, t in zip(starts, read, strict=False)]
    num_blocks = max(case.positions) // 16 + 1
    cache = torch.randn(case.num_layers, 2, num_blocks, 16, case.groups, case.dim, generator=g, device=device).to(dtype)
    turns = cos_sin_at(
        torch.arange(num_blocks * 16, device=device), torch.rand(case.dim // 2, generator=g, device=device)
    )

    def norm(width: int, kind: torch.dtype | None) -> Tensor | None:
        return None if kind is None else (torch.rand(width, generator=g, device=device) + 0.5).to(kind)

    def bias(width: int) -> Tensor | None:
        return torch.randn(width, generator=g, device=device).to(dtype) if case.bias else None

    dense, mine = [], []
    for n in range(case.num_layers):
        qkv, o, up, down = weights[4 * n : 4 * n + 4]
        layer = StepLayer(
            norm(case.d_model, case.norm), qkv, bias(wide), norm(case.dim, case.head_norm),
            norm(case.dim, case.head_norm), o, bias(case.d_model), norm(case.d_model, case.norm), up,
            bias(2 * case.d_ff), down, bias(case.d_model), *cache[n],
            turns if case.turned and n != 1 else None, case.window if n else None,
        )  # fmt: skip
        dense.append(layer)
        qkv, o, up, down = read[4 * n : 4 * n + 4]
        mine.append(dataclasses.replace(layer, qkv=qkv, o=o, up=up, down=down))
    table = torch.randperm(num_blocks, generator=g, device=device).to(torch.int32)[None]
    return dense, mine, StepHead(norm(case.d_model, case.norm), read[-1] if case.vocab else None, *grid), table, layout


def doubled(of: Part) -> Part:
    """Its tensors in fp64."""
    values = {f.name: getattr(of, f.name) for f in dataclasses.fields(of)}
    return type(of)(**{k: v.double() if isinstance(v, Tensor) else v for k, v in values.items()})


class OnCpu:
    """As RowStep, compiled for the CPU."""

    def __init__(
        self, folder: Path, layers: list[StepLayer], head: StepHead, layout: ChunkLayout | None, plan: RowStepPlan
    ) -> None:
        self.layers, self.head, self.plan = layers, head, plan
        self.shape, self.limits = StepShape.of(layers, head, layout), DeviceLimits("emulated", 5, 60 * 1024, 0, 0)
        assert unusable(self.shape, plan, self.limits) is None
        macros = row_step_macros(self.shape, plan, self.limits, stamps=False)
        self.library = emulated.library(folder, "row_step_on_cpu.h", *sources(self.shape), macros=macros)
        self.table = torch.tensor([layer.pointers() for layer in layers])
        self.words = torch.zeros(2 * num_words(self.shape, plan), dtype=torch.int64)
        self.state = torch.zeros(2, dtype=torch.int32)

    def __call__(self, x: Tensor, tables: Tensor, tiles: Tensor) -> Tensor:
        result = torch.full((1, self.shape.vocab), torch.nan) if self.shape.vocab else torch.full_like(x, torch.nan)
        head = self.head
        ends = (head.weight, head.scale, head.zero, head.norm)
        tensors = (self.table, *ends, x, result, self.words, self.state, tables, tiles)
        held = (self.layers[0].qkv.untyped_storage(), self.layers[0].keys_NPGD.untyped_storage())
        self.library.run(
            *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in tensors), None,
            *(arg for s in held for arg in (ctypes.c_void_p(s.data_ptr()), ctypes.c_long(s.nbytes()))),
            *map(ctypes.c_float, (*EPS, self.shape.head_dim**-0.5 * math.log2(math.e))),
            len(self.layers), tables.stride(0), self.plan.shared_bytes(self.shape, self.limits),
        )  # fmt: skip
        return result


def normed(case: Case, dtype: torch.dtype) -> Case:
    """With norms in the compute dtype where they are not in fp32."""
    kinds = {torch.bfloat16: dtype}
    return dataclasses.replace(
        case, norm=kinds.get(case.norm, case.norm), head_norm=kinds.get(case.head_norm, case.head_norm)
    )


def compile_ahead(case: Case, plan: RowStepPlan, dtype: torch.dtype) -> None:
    _, mine, head, _, layout = made(normed(case, dtype), dtype, "cuda")
    RowStep(mine, head, *EPS, layout=layout, plan=plan)


def check(case: Case, plan: RowStepPlan, dtype: torch.dtype, device: str = "cpu", folder: Path | None = None) -> None:
    """Steps at several positions, and one of padding: logits, and what is written to the cache."""
    case = normed(case, dtype)
    dense, mine, head, table, layout = made(case, dtype, device)
    step = OnCpu(folder, mine, head, layout, plan) if folder else RowStep(mine, head, *EPS, layout=layout, plan=plan)
    worse = 3.0 if case.format else 1.5  # packed: x is rounded after its norm as well
    for position in case.positions:
        x = torch.randn(1, case.d_model, device=device).to(dtype)
        tile = torch.tensor([[0, 0, position, 1]], dtype=torch.int32, device=device)
        exact = [doubled(t) for t in dense]
        want = row_step_ref(x.double(), exact, doubled(head), table, tile, *EPS)
        plain = [
            dataclasses.replace(t, keys_NPGD=t.keys_NPGD.clone(), values_NPGD=t.values_NPGD.clone()) for t in dense
        ]
        ref = row_step_ref(x, plain, head, table, tile, *EPS)
        padding = torch.zeros_like(tile)
        if position == case.positions[0]:
            before = [t.keys_NPGD.clone() for t in mine]
            step(x, table, padding)
            assert all(torch.equal(a, b.keys_NPGD) for a, b in zip(before, mine, strict=True))
        got = step(x, table, tile)
        assert rms(got, want) <= worse * rms(ref, want), (position, rms(got, want), rms(ref, want))
        for a, b, c in zip(mine, plain, exact, strict=True):
            for name in ("keys_NPGD", "values_NPGD"):
                ours, theirs, true = (getattr(t, name) for t in (a, b, c))
                assert rms(ours, true) <= worse * rms(theirs, true) + 1e-9


CASES = [
    (
        Case(num_layers=2, positions=(37,)),
        RowStepPlan(warps=4, slice=64, splits=2, share_keys=16, short_keys=16, watched=100, flight=300, fillers=2),
    ),
    (
        Case(96, 64, 6, 2, 64, 34, 2, torch.float32, torch.bfloat16, True, True, 20, (40,)),
        RowStepPlan(warps=4, slice=96, splits=2, share_keys=8, watched=1 << 20),
    ),
    (
        Case(160, 192, 4, 4, 32, 70, 2, positions=(37,), format="int4:g32", coded_head=True),
        RowStepPlan(warps=4, splits=2, share_keys=16, short_keys=16, watched=100, flight=1, ahead=1),
    ),
    (
        Case(512, 1024, 8, 2, 64, 34, 1, torch.float32, bias=True, positions=(20,), format="int2:g64"),
        RowStepPlan(warps=2, slice=512, splits=1, quads=3, ahead=1),
    ),
    (
        Case(128, 64, 2, 1, 64, 0, 1, positions=(20,), format="int3:g64"),
        RowStepPlan(warps=2, splits=5, share_keys=4, short_keys=0),
    ),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    "case",
    [*CASES[:3], *(pytest.param(c, marks=pytest.mark.slow) for c in CASES[3:])],
    ids=["plain", "norms, biases, windows", "int4, a key head each", "int2", "int3"],
)
@pytest.mark.few(2)
def test_the_source_on_the_cpu(case: tuple[Case, RowStepPlan], tmp_path: Path) -> None:
    check(*case, torch.bfloat16, folder=tmp_path)


# Whole widths, and a context for which the keys of a head are shared out.
LARGE = [
    Case(576, 1536, 9, 3, 64, 49152, 30, positions=(0, 5, 129, 1000, 4000)),
    *(
        Case(4096, 14336, 32, 8, 128, 1000, 1, positions=(0, 700, 9000), format=label, coded_head=bool(label))
        for label in (None, "int4:g128", "int2:g64")
    ),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_the_kernel_on_the_gpu(large: bool, dtype: torch.dtype) -> None:
    small = [(case, RowStepPlan(share_keys=16, short_keys=keys)) for case, _ in CASES for keys in (0, 16, 512)]
    runs = [(case, RowStepPlan()) for case in LARGE] if large else small
    runs = [(case, plan) for case, plan in runs if dtype == torch.bfloat16 or case.format is None]
    with ThreadPoolExecutor() as pool:  # a kernel takes some seconds
        list(pool.map(lambda of: compile_ahead(*of, dtype), runs))
    for case, plan in runs:
        check(case, plan, dtype, "cuda")


def test_shapes_that_the_kernel_takes() -> None:
    shape = StepShape(4096, 14336, 32, 8, 128, 128256, 16, 32, torch.bfloat16, torch.bfloat16, None)
    plan = RowStepPlan()
    assert unusable(shape, plan) is None
    assert plan.shared_bytes(shape, H200) <= H200.shared_per_block
    changes = {
        "dtype": torch.float32, "head_dim": 80, "d_ff": 32768, "vocab": 999, "d_model": 4100,
        "head_scale": torch.bfloat16,
    }  # fmt: skip
    for change in ({name: value} for name, value in changes.items()):
        assert unusable(dataclasses.replace(shape, **change), plan)
    packed = dataclasses.replace(shape, layout=ChunkLayout(4, 128, False, 1, False))
    assert unusable(packed, plan) is None
    half = {"dtype": torch.float16, "norm_dtype": torch.float16}
    assert unusable(dataclasses.replace(shape, **half), plan) is None
    assert "fp16" in str(unusable(dataclasses.replace(packed, **half), plan))


def test_shipped_plans_fit_the_models_that_they_are_for() -> None:
    bf16, sizes = torch.bfloat16, [(576, 1536, 9, 3, 64, 49152, 30), (2048, 8192, 32, 8, 64, 128256, 16)]
    sizes.append((4096, 14336, 32, 8, 128, 128256, 32))
    layouts = [None, ChunkLayout(4, 128, False, 1, False), ChunkLayout(2, 64, False, 1, False)]
    shapes = {}
    for (*widths, layers), layout in itertools.product(sizes, layouts):
        head = torch.float16 if layout and widths[0] == 4096 else None
        shape = StepShape(*widths, 16, layers, bf16, bf16, None, layout, head)
        shapes[plan_key(shape)] = shape
    assert PLANS.shipped is not None
    plans = read_plans(PLANS.shipped, RowStepPlan)
    assert len(plans) >= 6
    for key, plan in plans.items():
        assert unusable(shapes[key], plan) is None, key
        assert plan.slots(shapes[key], H200) * plan.slot_bytes(shapes[key]) >= plan.flight, key
