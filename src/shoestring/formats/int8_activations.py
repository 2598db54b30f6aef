"""Packed integer layers on a CPU that round their inputs to 8 bits: faster, and not the same function.

    pack(model)  # or load a packed model
    names = quantize_activations(model)

By default a CPU multiplies with decoded weights in fp32. The returned layers multiply 4-bit codes with 8-bit
activations instead: torch's operator where it has Arm kernels (kernels/lowbit/w4a8.py), else our own C++
(kernels/lowbit/tiled_linear.py), and torch's portable loop where there is no compiler either. It is opt-in because
logits change a little: benchmarks/cpu_decode.py has the perplexity beside the speed. Saving, unpacking and moving the
model work as before; on another device or in another dtype the layer computes as any packed layer.

Left out on purpose: table formats (nf, fp), 2:4, groups that are no multiple of 32: such layers stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.convert import format_linears
from shoestring.formats.int_asym import IntAsym
from shoestring.formats.linear import FormatLinear, is_sharded
from shoestring.kernels.lowbit.packing import unpack_bits
from shoestring.kernels.lowbit.tiled_linear import TiledWeight, tile_weight, tiled_linear, usable
from shoestring.kernels.lowbit.w4a8 import Operands, has_arm_kernels, pack_operands, unusable, usable_group, w4a8
from shoestring.kernels.runtime.cpp import find_compiler


class Int8Linear(FormatLinear):
    """A packed FormatLinear whose forward, on a CPU in fp32, rounds its input to 8 bits."""

    int8: Operands | TiledWeight | None

    def operands8(self) -> Operands | TiledWeight:
        """Made at the first use, and again after the weight was loaded or moved."""
        if self.int8 is None:
            self.int8 = operands_of(self)
        return self.int8

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed or x.dtype != torch.float32 or x.device.type != "cpu":
            return super().forward(x)
        y = multiply(x.reshape(-1, self.in_features), self.operands8()).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None or self.defer_bias else y + self.bias

    def keep_decoded(self, dtype: torch.dtype) -> None:
        """Nothing: the codes themselves are multiplied with."""

    def _apply(self, fn: Any, recurse: bool = True) -> Int8Linear:
        self.int8 = None
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.int8 = None
        super()._load_from_state_dict(*args, **kwargs)


def operands_of(*layers: FormatLinear) -> Operands | TiledWeight:
    """The layers, which share input and Format, side by side as one weight, for `multiply`. Compiles at the first call
    where our own C++ multiplies."""
    format, parts = _parts_of(layers)
    if has_own_kernel() and usable(format.group or layers[0].in_features):
        return tiles_of(*layers, bias=False)
    codes, scale, zero = (torch.cat([p[n] for p in parts]) for n in ("codes", "scale", "zero"))
    return pack_operands(unpack_bits(codes, format.bits), scale, zero, format.bits)


def multiply(x_TK: Tensor, operands: Operands | TiledWeight) -> Tensor:
    """fp32 [T, in] -> [T, out]."""
    return tiled_linear(x_TK, operands) if isinstance(operands, TiledWeight) else w4a8(x_TK, operands)


def has_own_kernel() -> bool:
    """Whether our own C++ multiplies here: torch has no Arm kernels, and there is a compiler."""
    return not has_arm_kernels() and find_compiler() is not None


def refusal() -> str | None:
    """Why this machine cannot round activations to 8 bits, or None."""
    return None if has_own_kernel() else unusable()


def tiles_of(*layers: FormatLinear, interleaved: bool = False, bias: bool = True) -> TiledWeight:
    """The same in tiles; `interleaved`: a tile of each in turn. With the layers' biases, where they have any."""
    format, parts = _parts_of(layers)
    codes, scale, zero = ([p[n] for p in parts] for n in ("codes", "scale", "zero"))
    biases = [x.bias for x in layers] if bias and layers[0].bias is not None else None
    codes = [unpack_bits(c, format.bits) for c in codes]
    return tile_weight(codes, scale, zero, format.bits, biases, interleaved=interleaved)


def _parts_of(layers: Sequence[FormatLinear]) -> tuple[IntAsym, list[dict[str, Tensor]]]:
    format = layers[0].format
    assert isinstance(format, IntAsym) and all(x.format == format and x.packed for x in layers)
    return format, [x.parts() for x in layers]


def has_int8_kernel(layer: FormatLinear) -> bool:
    format = layer.format
    return (
        layer.packed
        and isinstance(format, IntAsym)
        and usable_group(format.group, layer.in_features)
        and not is_sharded(next(iter(layer.buffers())))
    )


def would_gain(model: nn.Module, compute_dtype: torch.dtype) -> bool:
    """Whether `quantize_activations` would make this model much faster here."""
    layers = [layer for _, layer in format_linears(model)]
    on_cpu = all(p.device.type == "cpu" for p in model.parameters()) and compute_dtype == torch.float32
    waiting = any(has_int8_kernel(layer) and not isinstance(layer, Int8Linear) for layer in layers)
    return on_cpu and waiting and (has_own_kernel() or (has_arm_kernels() and unusable() is None))


def quantize_activations(model: nn.Module, *, compute_dtype: torch.dtype = torch.float32) -> list[str]:
    """Let the packed integer layers round their inputs to 8 bits, in place; their names.

    UserError where the machine, or none of the layers, can do it. `compute_dtype`: that of the activations.
    """
    devices = {t.device.type for t in (*model.parameters(), *model.buffers())}
    if devices - {"cpu"} or compute_dtype != torch.float32:
        raise UserError(
            f"8-bit activations are for models on a CPU in float32, not on {', '.join(sorted(devices))} in "
            f"{str(compute_dtype).removeprefix('torch.')}; leave them out, or choose cpu and fp32"
        )
    if reason := refusal():
        raise UserError(f"8-bit activations are not possible here: {reason}; leave them out")
    names = []
    for name, layer in format_linears(model):
        if has_int8_kernel(layer):
            layer.__class__ = Int8Linear
            assert isinstance(layer, Int8Linear)
            layer.int8, layer.decoded = None, None
            names.append(name)
    if not names:
        raise UserError(
            "8-bit activations need packed integer layers (int2 to int8) with a group that is a multiple of 32, or 0, "
            "and there are none: quantize the model first, for example with `shoestring run shrink/ptq`"
        )
    if not (has_arm_kernels() or has_own_kernel()):
        warnings.warn(
            "8-bit activations: there is no C++ compiler, and torch has only a slow loop for this processor; a prompt "
            "takes many times as long as without them: install g++, or leave them out",
            stacklevel=2,
        )
    return names
