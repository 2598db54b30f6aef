"""All layers of a decoder and its head for one row, in one kernel (row_step.cu): from the embedded token to logits.

A decoding step of one request reads every weight once and computes little. As one kernel per product the memory waits
at every boundary: for the last block of one kernel, the launch of the next and its first loads. Here every SM reads
its share of all weights through a ring in shared memory, ahead of the activations, which the SMs pass to each other
as tagged words. The reference, `row_step_ref`, is the same step by the references of its parts.

For weights in bf16 or fp16, or of 2, 3 or 4 bits with integer grids (kernels/lowbit/chunk_layout.py) and activations
in bf16; RMS norms, SwiGLU, causal attention with or without RoPE, head norms, biases and windows; equal shapes in all
layers. The head is part of the kernel where it is dense, else the residual stream is the result. `unusable` names
what is missing; the kernels of kernels/gemv, kernels/lowbit and kernels/attention are the other way. One launch at a
time may use a `RowStep`.

Shapes: D model width, F inner width, H query heads, G key/value heads, d head dim, V vocabulary, E = (H + 2G) d.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.hardware.device import H200, DeviceLimits, device_limits
from shoestring.hardware.plan_table import PlanTable
from shoestring.kernels.attention.decode_attention import decode_attention_ref_
from shoestring.kernels.gemv.row_linear import row_linear_ref
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, CHUNK_WIDTH, ChunkLayout, ceil_div
from shoestring.kernels.lowbit.lowbit_linear import chunks_usable
from shoestring.kernels.runtime.nvrtc import SOURCES, Kernel, compile_kernel, cuda_source, pointer

LAYER_WORDS = 16  # of 8 bytes, as in the source
KEYS_AHEAD = 8  # as in the source
STAMPS = ("asked", "input", "multiplied", "written")  # times of a block in each part of a layer
PARTS = ("q, k, v", "attention", "output", "gate, up", "down")


@dataclass(frozen=True)
class StepLayer:
    """One layer: weights [E, D], [D, H d], [2 F, D], [D, F], or their chunks, with their biases, norms, and its part of
    the KV cache."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    keys_NPGD: Tensor
    values_NPGD: Tensor
    cos_sin: Tensor | None
    window: int | None = None

    def pointers(self) -> list[int]:
        """As struct Layer of the source."""
        tensors = (
            self.qkv, self.o, self.up, self.down, self.qkv_bias, self.o_bias, self.up_bias, self.down_bias,
            self.attn_norm, self.mlp_norm, self.q_norm, self.k_norm, self.keys_NPGD, self.values_NPGD, self.cos_sin,
        )  # fmt: skip
        return [*(0 if t is None else t.data_ptr() for t in tensors), self.window or 0]


@dataclass(frozen=True)
class StepHead:
    """The norm before the head, and the head [V, D]: dense, or 8-bit codes with a scale (16 bits) and a zero for each
    row; None: the step ends with the residual stream."""

    norm: Tensor
    weight: Tensor | None
    scale: Tensor | None = None
    zero: Tensor | None = None


@dataclass(frozen=True)
class StepShape:
    d_model: int
    d_ff: int
    num_heads: int
    num_groups: int
    head_dim: int
    vocab: int  # 0: without the head
    page: int  # positions of a block of the KV cache
    num_layers: int
    dtype: torch.dtype
    norm_dtype: torch.dtype
    head_norm_dtype: torch.dtype | None
    layout: ChunkLayout | None = None  # None: dense weights
    head_scale: torch.dtype | None = None  # None: a dense head

    @classmethod
    def of(cls, layers: Sequence[StepLayer], head: StepHead, layout: ChunkLayout | None = None) -> StepShape:
        first, vocab = layers[0], 0 if head.weight is None else head.weight.shape[0]
        page, groups, dim = first.keys_NPGD.shape[1:]
        each = 1 if layout is None else CHUNK_ROWS
        return cls(
            first.attn_norm.numel(), first.up.shape[0] * each // 2, first.qkv.shape[0] * each // dim - 2 * groups,
            groups, dim, vocab, page, len(layers), first.keys_NPGD.dtype,
            first.attn_norm.dtype, None if first.q_norm is None else first.q_norm.dtype, layout,
            None if head.scale is None else head.scale.dtype,
        )  # fmt: skip

    @property
    def widths(self) -> tuple[int, int, int]:
        """Inputs of a layer's products."""
        return self.d_model, self.num_heads * self.head_dim, self.d_ff

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Outputs of a layer's products, those of gate and up counted once."""
        return (self.num_heads + 2 * self.num_groups) * self.head_dim, self.d_model, self.d_ff


@dataclass(frozen=True)
class RowStepPlan:
    warps: int = 8  # that multiply; 16 leave too few registers for each
    slice: int = 0  # inputs of a dense row that a warp takes, at most; 0: by the model's width
    splits: int = 16  # shares of the keys of a request and head, at most
    share_keys: int = 256  # keys that are worth a share
    short_keys: int = 512  # keys up to which a block takes one query head, not all that share a key head
    early_keys: int = 64  # keys that a block asks for before the layer begins, of more than short_keys; of fewer: all
    spin: int = 0  # nanoseconds between two looks at a word
    dependent: int = 1  # 1: started while the kernel before drains
    cooperative: int = 1  # 1: all blocks are placed at once
    watched: int = 4096  # inputs from which on one warp looks for them before all others do
    quads: int = 16  # times four inputs that a thread takes at once, at most
    ahead: int = 0  # 1: the next piece of packed weights is read into registers while one is multiplied
    fillers: int = 1  # warps that ask for weights, 1 or 2; one asks for a piece every 140 clocks
    run: int = 4  # chunks of a piece of packed weights, at most
    flight: int = 8192  # bytes of a warp's ring that are on their way at once; more delay what the SMs exchange

    def dense_slice(self, shape: StepShape) -> int:
        """A piece of a dense head behind packed layers is as long as theirs: asking for a shorter one takes as long."""
        if self.slice:
            return self.slice
        if shape.layout is not None and shape.layout.chunk_bytes * self.chunk_run(shape) < 4096:
            return 1024
        return 1024 if shape.d_model <= 1024 else 2048

    def coded_slice(self, shape: StepShape) -> int:
        """Inputs of a row of 8-bit codes for a warp: a piece as long as those of the layers, if they are packed."""
        if shape.layout is None:
            return 1024
        return next((n for n in (4096, 2048) if n <= shape.layout.chunk_bytes * self.chunk_run(shape)), 1024)

    def slices(self, shape: StepShape, width: int, head: bool = False) -> int:
        """Warps that share a row, or the 16 rows of a chunk."""
        if shape.layout is not None and not head:
            return self.chunk_slices(width, self.chunk_run(shape))
        num = 1
        while width > num * (self.coded_slice(shape) if head and shape.head_scale else self.dense_slice(shape)):
            num *= 2
        return num

    def chunk_slices(self, width: int, run: int) -> int:
        """Warps that share 16 rows of chunks in pieces of `run`: all get as many where a piece is longer than one."""
        pieces, num = ceil_div(width, CHUNK_WIDTH) // run, 1
        while 2 * num <= min(self.warps, pieces) and (run == 1 or pieces % (2 * num) == 0):
            num *= 2
        return num

    def chunk_run(self, shape: StepShape) -> int:
        """Chunks of a piece: as many as leave at least half of the warps to share 16 rows."""

        def usable(run: int) -> bool:
            even = all(ceil_div(width, CHUNK_WIDTH) % run == 0 for width in shape.widths)
            return even and all(2 * self.chunk_slices(width, run) >= self.warps for width in shape.widths)

        return next((run for run in (4, 2) if run <= self.run and usable(run)), 1)

    def slot_bytes(self, shape: StepShape) -> int:
        """Of the largest piece."""
        pieces = [2 * width // self.slices(shape, width) for width in shape.widths]
        if shape.layout is not None:
            pieces = [shape.layout.chunk_bytes * self.chunk_run(shape)]
        if shape.vocab:
            pieces.append(
                (1 if shape.head_scale else 2) * shape.d_model // self.slices(shape, shape.d_model, head=True)
            )
        return ceil_div(max(pieces), 512) * 512 if shape.layout is None else max(pieces)  # 16 bytes for each lane

    def fixed_bytes(self, shape: StepShape, blocks: int) -> int:
        """Shared memory besides the rings and their barriers: the layers, and x and sums of products, or what attention
        has in their place."""
        each = 2 if shape.layout is None else CHUNK_ROWS
        inner, attended, outer = (self.slices(shape, width) for width in shape.widths)
        qkv, width, d_ff = (each * (n // each // blocks + 1) for n in shape.outputs)
        sums = [qkv * inner, width * attended, 2 * d_ff * inner, width * outer]
        sums.append(2 * (shape.vocab // 2 // blocks + 1) * self.slices(shape, shape.d_model, head=True))
        widest = max(shape.widths)
        x_bytes = 2 * widest
        if shape.layout is not None:
            x_bytes = ceil_div(widest, CHUNK_WIDTH) * (2 * 144 + 8 * CHUNK_WIDTH // shape.layout.group)
        shared = shape.num_heads // shape.num_groups
        queries = 4 * (shared + 2) * shape.head_dim
        product = max(x_bytes, queries) + 4 * (2 * self.warps + max(sums))
        attention = queries + 4 * self.warps * shared * (shape.head_dim + 2)
        places = 4 * KEYS_AHEAD * 32 * self.warps
        return 8 * LAYER_WORDS * shape.num_layers + 32 + places + max(product, attention)

    def slots(self, shape: StepShape, limits: DeviceLimits) -> int:
        """Pieces in a warp's ring: as many as fit."""
        left = limits.shared_per_block - self.fixed_bytes(shape, limits.num_sms)
        return min(24, left // (self.warps * (self.slot_bytes(shape) + 16)))

    def shared_bytes(self, shape: StepShape, limits: DeviceLimits) -> int:
        rings = self.slots(shape, limits) * self.warps * (self.slot_bytes(shape) + 16)
        return rings + self.fixed_bytes(shape, limits.num_sms)


def unusable(shape: StepShape, plan: RowStepPlan, limits: DeviceLimits = H200) -> str | None:
    """Why the kernel cannot compute this shape; None where it can."""
    shared = shape.num_heads // shape.num_groups
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"weights of {shape.dtype}"
    if shape.head_dim not in (32, 64, 128, 256) or shared > 8:
        return f"{shared} heads of {shape.head_dim} dims to a key head"
    if any(t not in (shape.dtype, torch.float32) for t in (shape.norm_dtype, shape.head_norm_dtype or shape.dtype)):
        return f"norms in {shape.norm_dtype} and {shape.head_norm_dtype}"
    layout = shape.layout
    if layout is not None and layout.table:
        return "levels from a table"
    if layout is not None and shape.dtype == torch.float16:
        # Inputs of packed products are rounded after the weight of their norm and before they are divided by their
        # size: 20,000 times a weight of 4 is infinite in fp16.
        return "packed weights with activations in fp16"
    if layout is None and shape.head_scale:
        return "a head of 8-bit codes behind dense layers"
    each, parts = (2, plan.slices) if layout is None else (CHUNK_ROWS, lambda shape, width: 1)
    if any(n % each for n in shape.outputs) or any(w % (8 * parts(shape, w)) for w in shape.widths) or shape.vocab % 2:
        return "sizes that are not multiples of 8"
    if shape.d_model % ((16 if shape.head_scale else 8) * plan.slices(shape, shape.d_model, head=True)):
        return f"a head of {shape.d_model} inputs"
    if max(plan.slices(shape, w) for w in shape.widths) > plan.warps:
        return f"products of {max(shape.widths)} inputs"
    if shape.num_groups > limits.num_sms or shape.d_model // limits.num_sms + 16 > 64 * plan.warps:
        return f"{shape.num_groups} key heads, a width of {shape.d_model}"
    return None if plan.slots(shape, limits) >= 3 else "shared memory for fewer than three pieces of a warp"


# A model's sizes and format have a plan where `python -m benchmarks.decode_timeline --variants` found the step faster
# in one kernel than kernel by kernel, in one run: the plan of the fastest variant.
PLANS = PlanTable("row_step", RowStepPlan, shipped=SOURCES / "step" / "row_step_plans.json")


def plan_key(shape: StepShape) -> str:
    dtype = str(shape.dtype).removeprefix("torch.")
    weights = dtype if shape.layout is None else f"{dtype} x {shape.layout.label}"
    heads = f"{shape.num_heads}/{shape.num_groups}x{shape.head_dim}"
    return f"{weights} {shape.d_model}x{shape.d_ff} heads {heads} layers {shape.num_layers}"


def choose_plan(layers: Sequence[StepLayer], head: StepHead, layout: ChunkLayout | None) -> RowStepPlan | None:
    """The plan with which a step of these layers was measured to be faster than kernel by kernel; None: it was not, or
    `RowStep` does not compute it. SHOESTRING_ROW_STEP=0: never; SHOESTRING_ROW_STEP=1: wherever it runs."""
    asked = os.environ.get("SHOESTRING_ROW_STEP", "")
    if asked == "0" or not chunks_usable(head.norm):
        return None
    shape, limits = StepShape.of(layers, head, layout), device_limits(head.norm.device.index)
    plan = PLANS.find(plan_key(shape), limits.name) or (RowStepPlan() if asked == "1" else None)
    if plan is None or unusable(shape, plan, limits):
        return None

    def alike(layer: StepLayer) -> bool:
        weights, caches = (layer.qkv, layer.o, layer.up, layer.down), (layer.keys_NPGD, layer.values_NPGD)
        biases = layer.qkv_bias, layer.o_bias, layer.up_bias, layer.down_bias
        of_dtype = (*caches, *biases, *(weights if layout is None else ()))
        same = all(t is None or t.dtype == shape.dtype for t in of_dtype)
        placed = all(map(_placed, (*weights, *caches, layer.attn_norm, layer.mlp_norm)))
        return same and placed and StepShape.of([layer] * shape.num_layers, head, layout) == shape

    typed = head.weight is None or head.weight.dtype == (torch.uint8 if shape.head_scale else shape.dtype)
    ends = typed and head.norm.dtype == shape.norm_dtype and _placed(head.norm) and _placed(head.weight)
    return plan if ends and all(map(alike, layers)) else None


def _placed(t: Tensor | None) -> bool:
    return t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0)


def num_words(shape: StepShape, plan: RowStepPlan) -> int:
    """Words of 8 bytes that SMs exchange in a layer; those of two layers are kept."""
    qkv, width, inner = shape.outputs
    attended = shape.num_heads * shape.head_dim
    pairs = (qkv + attended + 2 * width + inner) // 2
    shares = shape.num_heads * plan.splits
    return pairs + shares * shape.head_dim + 2 * shares


def row_step_macros(shape: StepShape, plan: RowStepPlan, limits: DeviceLimits, stamps: bool) -> dict[str, int]:
    chunked: dict[str, int] = {}
    if shape.layout is not None:
        logs = [plan.slices(shape, width).bit_length() - 1 for width in shape.widths]
        chunked = {
            **shape.layout.macros(shape.dtype),
            "RUN": plan.chunk_run(shape),
            "PIECES_AHEAD": plan.ahead,
            **dict(zip(("LOG_MODEL", "LOG_ATTENDED", "LOG_INNER"), logs, strict=True)),
        }
    return {
        **chunked,
        "CHUNKED": int(shape.layout is not None),
        "HEAD": (2 if shape.head_scale else 1) if shape.vocab else 0,
        "HEAD_SCALE16": int(shape.head_scale == torch.bfloat16),
        "HALF": int(shape.dtype == torch.float16),
        "D_MODEL": shape.d_model,
        "D_FF": shape.d_ff,
        "HEADS": shape.num_heads,
        "GROUPS": shape.num_groups,
        "DIM": shape.head_dim,
        "VOCAB": shape.vocab or 2,
        "PAGE": shape.page,
        "BLOCKS": limits.num_sms,
        "WARPS": plan.warps,
        "SLOTS": plan.slots(shape, limits),
        "SLOT": plan.slot_bytes(shape),
        "FLIGHT": plan.flight,
        "SLICE": plan.dense_slice(shape),
        "CODED_SLICE": plan.coded_slice(shape),
        "SPLITS": min(plan.splits, limits.num_sms // shape.num_groups),
        "SHARE_KEYS": plan.share_keys,
        "NORM32": int(shape.norm_dtype == torch.float32),
        "HEAD_NORM": int(shape.head_norm_dtype is not None),
        "HEAD_NORM32": int(shape.head_norm_dtype == torch.float32),
        "SHORT_KEYS": plan.short_keys,
        "EARLY_KEYS": plan.early_keys,
        "SPIN": plan.spin,
        "WATCHED": plan.watched,
        "QUADS": plan.quads,
        "FILLERS": plan.fillers,
        "STAMPS": int(stamps),
    }


@functools.cache
def _kernel(device: int, shape: StepShape, plan: RowStepPlan, stamps: bool) -> Kernel:
    macros = row_step_macros(shape, plan, device_limits(device), stamps)
    return compile_kernel(cuda_source(*sources(shape)), "row_step", macros, device)


def sources(shape: StepShape) -> tuple[str, ...]:
    return ("step/row_step",) if shape.layout is None else ("lowbit/decode", "lowbit/digits", "step/row_step")


def row_step_ref(
    x_1D: Tensor,
    layers: Sequence[StepLayer],
    head: StepHead,
    tables_LW: Tensor,
    tiles_14: Tensor,
    eps: float,
    head_eps: float,
    last_eps: float,
) -> Tensor:
    """Logits [1, V] in fp32 (fp64 for fp64), or without a head the residual stream [1, D]; keys and values of the row
    are written into their block. Weights are dense here."""
    for layer in layers:
        qkv = row_linear_ref(x_1D, layer.qkv, layer.qkv_bias, norm_K=layer.attn_norm, eps=eps)
        attended = decode_attention_ref_(
            qkv, layer.keys_NPGD, layer.values_NPGD, tables_LW, tiles_14, layer.cos_sin, layer.q_norm, layer.k_norm,
            head_eps, window=layer.window,
        ).flatten(1)  # fmt: skip
        x_1D = row_linear_ref(attended, layer.o, layer.o_bias, residual_1N=x_1D)
        gated = row_linear_ref(x_1D, layer.up, layer.up_bias, norm_K=layer.mlp_norm, eps=eps, swiglu=True)
        x_1D = row_linear_ref(gated, layer.down, layer.down_bias, residual_1N=x_1D)
    if head.weight is None:
        return x_1D
    wide = torch.promote_types(x_1D.dtype, torch.float32)
    return row_linear_ref(
        x_1D, head.weight, norm_K=head.norm, eps=last_eps, out_dtype=wide, scale_N=head.scale, zero_N=head.zero
    )


class RowStep:
    """The step of one model with one KV cache: the addresses of both, and the words that its SMs exchange."""

    def __init__(
        self,
        layers: Sequence[StepLayer],
        head: StepHead,
        eps: float,
        head_eps: float,
        last_eps: float,
        layout: ChunkLayout | None = None,
        plan: RowStepPlan | None = None,
        stamps: bool = False,
    ) -> None:
        """`layers` are kept alive. `layout`: their weights are chunks. `stamps`: write times (see `times`)."""
        self.shape, self.plan = StepShape.of(layers, head, layout), plan or RowStepPlan()
        device = head.norm.device
        limits = device_limits(device.index)
        if reason := unusable(self.shape, self.plan, limits):
            raise ValueError(f"the one-kernel step does not compute {reason}")
        self._kernel = _kernel(device.index, self.shape, self.plan, stamps)
        self.layers, self.head = tuple(layers), head
        self._layers = torch.tensor([layer.pointers() for layer in layers], dtype=torch.int64, device=device)
        self._words = torch.zeros(2 * num_words(self.shape, self.plan), dtype=torch.int64, device=device)
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        self.numbers = eps, head_eps, last_eps, self.shape.head_dim**-0.5 * math.log2(math.e)
        num_stamps = (len(layers) * len(PARTS) + 1) * limits.num_sms * len(STAMPS) if stamps else 0
        self._stamps = torch.zeros(num_stamps, dtype=torch.int64, device=device)
        self._shared, self._blocks = self.plan.shared_bytes(self.shape, limits), limits.num_sms

    def __call__(self, x_1D: Tensor, tables_LW: Tensor, tiles_14: Tensor) -> Tensor:
        """As row_step_ref."""
        assert x_1D.shape == (1, self.shape.d_model) and x_1D.is_contiguous() and x_1D.dtype == self.shape.dtype
        assert tiles_14.shape == (1, 4) and tables_LW.dtype == tiles_14.dtype == torch.int32
        width, dtype = (self.shape.vocab, torch.float32) if self.shape.vocab else (self.shape.d_model, self.shape.dtype)
        result = torch.empty(1, width, dtype=dtype, device=x_1D.device)
        head = self.head
        pointers = (
            self._layers, head.weight, head.scale, head.zero, head.norm, x_1D, result, self._words, self._state,
            tables_LW, tiles_14, self._stamps,
        )  # fmt: skip
        self._kernel.launch(
            (self._blocks, 1, 1),
            32 * (self.plan.warps + 1 + self.plan.fillers),
            self._shared,
            (
                *map(pointer, pointers),
                *map(ctypes.c_float, self.numbers),
                ctypes.c_int(self.shape.num_layers),
                ctypes.c_int(tables_LW.stride(0)),
            ),
            dependent=bool(self.plan.dependent),
            cooperative=bool(self.plan.cooperative),
        )
        return result

    def times(self) -> Tensor:
        """Nanoseconds of the last step, [parts of all layers and the head, SMs, STAMPS]; 0 where an SM had no share."""
        return self._stamps.view(-1, self._blocks, len(STAMPS))
