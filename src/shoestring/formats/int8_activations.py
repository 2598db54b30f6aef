"""Packed integer layers on a CPU that round their inputs to 8 bits: faster, and not the same function.

    pack(model)  # or load a packed model
    names = quantize_activations(model)

By default a CPU multiplies with decoded weights in fp32. The returned layers multiply the codes with 8-bit
activations instead, by torch's operator where it has Arm kernels (kernels/lowbit/w4a8.py) and by our own C++ elsewhere
(kernels/lowbit/tiled_linear.py). Without a C++ compiler they stay as they are. It is opt-in because logits change a
little: benchmarks/cpu_decode.py has the perplexity beside the speed. Saving, unpacking and moving the
model work as before; on another device or in another dtype the layer computes as any packed layer.

Left out on purpose: table formats (nf, fp), 2:4, groups that are no multiple of 32: such layers stay as they are.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.base import Parts
from shoestring.formats.convert import format_hosts, format_linears
from shoestring.formats.int_asym import IntAsym
from shoestring.formats.int_offset import IntOffset
from shoestring.formats.linear import FormatHost, FormatLinear, is_sharded
from shoestring.formats.linear import compute_dtype as multiplied_in
from shoestring.kernels.lowbit.packing import pack_bits, unpack_bits
from shoestring.kernels.lowbit.tiled_linear import (
    TiledWeight,
    decode_tiles,
    held_bits,
    tile_weight,
    tiled_linear,
    untile,
    usable,
)
from shoestring.kernels.lowbit.w4a8 import Operands, has_arm_kernels, pack_operands, unusable, usable_group, w4a8
from shoestring.kernels.runtime.cpp import find_compiler


class Int8Host(FormatHost):
    """A packed host that, on a CPU in fp32, rounds what it multiplies with to 8 bits.

    Where our own C++ multiplies, the weight is held in tiles and in no other form (`use_kernels`): rows of an embedding
    are looked up in them, and decode steps read them, too (serve/engine/cpu_decode.py). Torch's operands are a copy.
    """

    int8: Operands | None

    @property
    def tiled(self) -> bool:
        return "tiles" in self.kernel_part_names

    def tiles(self) -> TiledWeight:
        format = format_of(self)
        held = self.operands() if self.tiled else _tile(self.parts(), format)
        return TiledWeight(held_bits(format.bits), self.shape[0], *held.values())

    def operands8(self) -> Operands:
        """Torch's. Made at the first use, and again after the weight was loaded or moved."""
        if self.int8 is None:
            format, parts = format_of(self), self.parts()
            codes = unpack_bits(parts["codes"], format.bits)
            self.int8 = pack_operands(codes, parts["scale"], parts["zero"], format.bits)
        return self.int8

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = multiplied_in(x)
        if not self.packed or dtype != torch.float32 or x.device.type != "cpu":
            if not self.tiled:
                return super().multiply(x, bias)
            # No kernel of the Format reads tiles.
            return F.linear(x.to(dtype), self.effective_weight(dtype), None if bias is None else bias.to(dtype))
        x_TK = x.reshape(-1, x.shape[-1])
        y = tiled_linear(x_TK, self.tiles()) if self.tiled else w4a8(x_TK, self.operands8())
        y = y.view(*x.shape[:-1], self.shape[0])  # -1 is ambiguous where there are no rows
        return y if bias is None else y + bias

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        return decode_tiles(self.tiles()).to(dtype) if self.tiled else super().effective_weight(dtype)

    def decode_rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        return decode_tiles(self.tiles(), index).to(dtype) if self.tiled else super().decode_rows(index, dtype)

    def keep_decoded(self, dtype: torch.dtype) -> None:
        """Nothing: the codes themselves are multiplied with."""

    def use_kernels(self) -> bool:
        return FormatHost.use_kernels(self) if self._takes_tiles() else super().use_kernels()

    def in_kernel_order(self, parts: Parts) -> Parts:
        return _tile(parts, format_of(self)) if self._takes_tiles() else super().in_kernel_order(parts)

    def in_stored_order(self, operands: Parts) -> Parts:
        if not self.tiled:
            return super().in_stored_order(operands)
        format, (codes, scale, shift) = format_of(self), untile(self.tiles())
        scale_dtype = getattr(torch, format.scale_dtype)
        parts = {"codes": pack_bits(codes, format.bits), "scale": scale.to(scale_dtype).contiguous()}
        if isinstance(format, IntOffset):
            return {**parts, "offset": shift.to(scale_dtype).contiguous()}
        return {**parts, "zero": shift.contiguous()}

    def _takes_tiles(self) -> bool:
        # Torch has no kernel for offsets.
        own = not has_arm_kernels() or isinstance(self.format, IntOffset)
        return self.device.type == "cpu" and own

    def unpack(self, dtype: torch.dtype = torch.float32) -> None:
        self.int8 = None
        super().unpack(dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.int8 = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.int8 = None
        super()._load_from_state_dict(*args, **kwargs)


@functools.cache
def _rounding(kind: type[FormatHost]) -> type[FormatHost]:
    """The class of such a host that rounds its inputs: linear layers, embeddings (of which some are heads), and what
    others make of them."""
    return type(f"Int8{kind.__name__}", (Int8Host, kind), {})


def format_of(host: FormatHost) -> IntAsym | IntOffset:
    assert isinstance(host.format, IntAsym | IntOffset) and host.packed
    return host.format


def _tile(parts: Parts, format: IntAsym | IntOffset) -> Parts:
    shift = parts["offset"] if isinstance(format, IntOffset) else parts["zero"]
    made = tile_weight(parts["codes"], parts["scale"], shift, format.bits)
    return {"tiles": made.codes, "tile_scale": made.scale, "tile_shift": made.shift}


def refusal() -> str | None:
    """Why this machine cannot round activations to 8 bits, or None. Compiles nothing."""
    if find_compiler() is None:
        return "there is no C++ compiler; install g++, or set CXX"
    return unusable() if has_arm_kernels() else None


def has_int8_kernel(host: FormatHost) -> bool:
    format = host.format
    return (
        host.packed
        and isinstance(format, IntAsym | IntOffset)
        and usable_group(format.group, host.shape[1])
        and not is_sharded(next(iter(host.buffers())))
    )


def gains_on(model: nn.Module, compute_dtype: torch.dtype) -> bool:
    """Whether integer layers of this model would be much faster here with 8-bit activations, which it does not have."""
    if any(isinstance(m, Int8Host) for m in model.modules()):
        return False
    on_cpu = all(p.device.type == "cpu" for p in model.parameters()) and compute_dtype == torch.float32
    return on_cpu and refusal() is None


def would_gain(model: nn.Module, compute_dtype: torch.dtype) -> bool:
    """Whether `quantize_activations` would make this model much faster here."""
    waiting = any(has_int8_kernel(m) and not isinstance(m, Int8Host) for _, m in format_linears(model))
    return waiting and gains_on(model, compute_dtype)


def quantize_activations(model: nn.Module, *, compute_dtype: torch.dtype = torch.float32) -> list[str]:
    """Let the packed integer layers, and an embedding that is the head, round their inputs to 8 bits, in place; their
    names. An embedding that is no head is looked up in its stored parts. Where the machine cannot do it, a warning says
    so and nothing changes.

    UserError where no layer can do it. `compute_dtype`: that of the activations.
    """
    devices = {t.device.type for t in (*model.parameters(), *model.buffers())}
    if devices - {"cpu"} or compute_dtype != torch.float32:
        raise UserError(
            f"8-bit activations are for models on a CPU in float32, not on {', '.join(sorted(devices))} in "
            f"{str(compute_dtype).removeprefix('torch.')}; leave them out, or choose cpu and fp32"
        )
    reason = refusal() or (None if usable() else "the C++ compiler failed")
    if reason is not None:
        warnings.warn(f"8-bit activations are left out and fp32 is used: {reason}", stacklevel=2)
        return []
    found = [(name, host) for name, host in format_hosts(model) if has_int8_kernel(host)]
    if not any(isinstance(host, FormatLinear) for _, host in found):
        raise UserError(
            "8-bit activations need packed integer layers (int2 to int8) with a group that is a multiple of 32, or 0, "
            "and there are none: make them with `shoestring quantize MODEL int4:g64`, or give a quantized .gguf file"
        )
    for _, host in found:
        if not isinstance(host, Int8Host):
            host.__class__ = _rounding(type(host))  # type: ignore[arg-type]  # classes are hashable
        assert isinstance(host, Int8Host)
        host.int8, host.decoded = None, None
        host.use_kernels()
    return [name for name, _ in found]
