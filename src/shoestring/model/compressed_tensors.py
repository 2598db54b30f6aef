"""compressed-tensors folders, both ways: the layout that vLLM and transformers read packed integers from.

A linear layer `X` of a "pack-quantized" folder is

    X.weight_packed      int32 [out, in*b/32]          codes, a little-endian bit stream along the input dim
    X.weight_scale       float [out, groups]           one column: one scale per output row
    X.weight_zero_point  int32 [ceil(out*b/32), groups]  zero points, packed along the *output* dim; asymmetric only
    X.weight_shape       int64 [2]                     [out, in]

and config.json says bits and groups under `quantization_config`. Codes and zero points there are signed with
2**(b-1) added before packing, which makes them our unsigned ones, and the stream is that of kernels/lowbit/packing.py:
`weight_codes` is `weight_packed` seen as bytes. Nothing is rounded in either direction, so logits agree, except
that fp32 scales of others are held here in fp16.

The layout has no tables and no masks. Readers take 2 and 3 bits without zero points only (vLLM's wNa16 loader), and 3
bits as this dense stream; older releases of compressed-tensors put 10 codes into a word. What it cannot hold is
a UserError that says what to write instead. Left out on purpose: activation quantization, rotations
and columns reordered by GPTQ (`weight_g_idx`), which are refused when read.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import Format, FormatLinear, IntAsym, Parts, formats_of
from shoestring.formats.convert import format_linears
from shoestring.formats.groups import SCALE_DTYPES, group_width
from shoestring.formats.linear import full
from shoestring.kernels.lowbit.packing import CODES_PER_RUN, pack_bits, unpack_bits
from shoestring.model import hf_names
from shoestring.model.save import Entry, gather, write_extras, write_folder
from shoestring.model.transformer import Decoder, Router
from shoestring.state.files import SHARD_BYTES, TensorInfo
from shoestring.state.tensor_files import TensorFiles

if TYPE_CHECKING:
    from shoestring.model.spec import ModelSpec
    from shoestring.model.tokenizer import Tokenizer

METHOD, LAYOUT = "compressed-tensors", "pack-quantized"
ZERO_POINT_BITS = (4, 8)  # vLLM takes zero points for these, and 2 and 3 bits without
INSTEAD = "use --as packed (read by shoestring only) or --as dense (read by everything, larger)"

# -- writing -------------------------------------------------------------------------------------------------


def save_compressed_tensors(
    path: str | Path,
    model: Decoder,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write integer layers (packed, or training with an integer Format) as a compressed-tensors folder, whole
    or not at all.

    `dtype`: of the other weights, and what readers compute in by default; that of the scales unless given.
    """
    wanted = _as_stored(model, exportable(model.spec, formats_of(model)))
    dtype = check_dtype(dtype, {f.scale_dtype for f in wanted.values()})
    entries = _entries(model, wanted, dtype)
    about = describe(model, wanted)
    return write_folder(
        path, entries, lambda folder: write_extras(folder, model.spec, tokenizer, dtype, about), limit=shard_bytes
    )


def exportable(spec: ModelSpec, formats: dict[str, Format]) -> dict[str, IntAsym]:
    """The same formats, once each is known to fit the layout; UserError that names the first that does not."""
    if hf_names.is_fused(spec):
        raise UserError(
            f"compressed-tensors cannot hold a {spec.model_type} model: transformers computes several of its layers as "
            f"one or as Conv1D, and only separate Linear layers are packed there; {INSTEAD}"
        )
    if not formats:
        raise UserError(
            "the model has no quantized layer to write as compressed-tensors: quantize it first, for example "
            "`shoestring quantize MODEL int4:g64` (groups that divide the layers' widths), or use --as dense"
        )
    found: dict[str, IntAsym] = {}
    for name, format in formats.items():
        if not isinstance(format, IntAsym):
            raise UserError(
                f"compressed-tensors cannot hold {hf_names.hf_module(spec, name)} as {format.label}: it stores evenly "
                f"spaced integers only (no nf or fp tables, no 2:4 masks); {INSTEAD}, or quantize to int4 or int8"
            )
        _check_zero_points(spec, name, format)
        found[name] = format
    return found


def _check_zero_points(spec: ModelSpec, name: str, format: IntAsym) -> None:
    if format.bits not in ZERO_POINT_BITS and not format.symmetric:
        raise UserError(
            f"vLLM reads compressed-tensors layers of {format.bits} bits without zero points only, and "
            f"{hf_names.hf_module(spec, name)} is {format.label}; {INSTEAD}, or quantize to "
            f"int{format.bits}:sym, int4 or int8"
        )


def _as_stored(model: Decoder, formats: dict[str, IntAsym]) -> dict[str, IntAsym]:
    """Symmetric only where every zero point is in the middle: a learned grid may have moved them."""
    modules = dict(format_linears(model))
    found = {}
    for name, format in formats.items():
        symmetric = format.symmetric
        if symmetric:
            zero = stored_parts(modules[name], model.compute_dtype)()["zero"]
            symmetric = bool((zero == 2 ** (format.bits - 1)).all())
        found[name] = replace(format, symmetric=symmetric)
        _check_zero_points(model.spec, name, found[name])
    return found


def check_dtype(dtype: torch.dtype | None, scale_dtypes: set[str]) -> torch.dtype:
    """Readers cast scales to the folder's dtype, so it must hold them exactly."""
    have = {SCALE_DTYPES[d] for d in scale_dtypes}
    if dtype is None:
        return next(iter(have)) if len(have) == 1 else torch.float32
    if dtype != torch.float32 and have != {dtype}:
        names = " and ".join(sorted(scale_dtypes))
        raise UserError(
            f"the scales are {names}, which {str(dtype).removeprefix('torch.')} would round, and readers cast them to "
            "the folder's dtype: leave --dtype out, use fp32, or quantize with scales of that dtype "
            "(int4:g64:bfloat16)"
        )
    return dtype


def _entries(model: Decoder, wanted: dict[str, IntAsym], dtype: torch.dtype) -> list[Entry]:
    """By Hugging Face's names."""
    spec, modules = model.spec, dict(format_linears(model))
    entries: list[Entry] = []
    for name, t in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if module not in wanted or not leaf.startswith("weight"):
            entries.append(
                Entry(TensorInfo(hf_names.source_of(spec, name).name, tuple(t.shape), dtype), gather(t, dtype))
            )
    for name, format in wanted.items():
        entries += _layer_entries(hf_names.hf_module(spec, name), modules[name], format, model.compute_dtype)
    return entries


def _layer_entries(prefix: str, layer: FormatLinear, format: IntAsym, dtype: torch.dtype) -> list[Entry]:
    (rows, width), bits = layer.shape, format.bits
    groups, words = width // group_width(width, format.group), -(-rows * bits // 32)
    scale_dtype, parts = SCALE_DTYPES[format.scale_dtype], stored_parts(layer, dtype)
    found: list[tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]] = [
        ("packed", (rows, -(-width * bits // 32)), torch.int32, lambda: as_int32(parts()["codes"])),
        ("scale", (rows, groups), scale_dtype, lambda: parts()["scale"]),
        ("shape", (2,), torch.int64, lambda: torch.tensor(layer.shape)),
    ]
    if not format.symmetric:
        found.append(("zero_point", (words, groups), torch.int32, lambda: pack_zeros(parts()["zero"], bits)))
    return [Entry(TensorInfo(f"{prefix}.weight_{part}", shape, kind), get) for part, shape, kind, get in found]


def stored_parts(layer: FormatLinear, dtype: torch.dtype) -> Callable[[], Parts]:
    def get() -> Parts:
        parts = layer.parts() if layer.packed else layer.encode(dtype)
        return {n: full(t).cpu() for n, t in parts.items()}

    return get


def as_int32(codes: Tensor) -> Tensor:
    """Packed bytes [rows, n] as 32-bit words [rows, ceil(n/4)]."""
    codes = F.pad(codes, (0, -codes.shape[1] % 4))
    # Flat in between: a tensor of one row may have any stride there, which `view` minds.
    return codes.reshape(-1).view(torch.int32).reshape(codes.shape[0], -1)


def as_bytes(packed: Tensor) -> Tensor:
    """The inverse of `as_int32`."""
    return packed.reshape(-1).view(torch.uint8).reshape(packed.shape[0], -1)


def pack_zeros(zero: Tensor, bits: int) -> Tensor:
    """Zero points uint8 [out, groups] -> int32 [ceil(out*bits/32), groups]."""
    turned = zero.t().contiguous()
    turned = F.pad(turned, (0, -turned.shape[1] % 32))  # 32 codes are whole words at any width
    num_words = -(-zero.shape[0] * bits // 32)
    return as_int32(pack_bits(turned, bits))[:, :num_words].t().contiguous()


def unpack_zeros(packed: Tensor, bits: int, rows: int) -> Tensor:
    """The inverse of `pack_zeros`."""
    turned = as_bytes(packed.t())
    turned = F.pad(turned, (0, -(-rows // CODES_PER_RUN) * bits - turned.shape[1]))
    return unpack_bits(turned, bits)[:, :rows].t().contiguous()


def left_dense(model: Decoder, packed: Container[str]) -> list[str]:
    """Hugging Face's names of the layers that readers would take for packed ones: all others, and the routers of
    experts, which have no Format."""
    layers = [name for name, _ in format_linears(model) if name not in packed]
    routers = [name for name, module in model.named_modules() if isinstance(module, Router)]
    return [hf_names.hf_module(model.spec, name) for name in (*layers, *routers)]


def describe(model: Decoder, wanted: dict[str, IntAsym]) -> dict[str, Any]:
    """The quantization_config of config.json."""
    spec = model.spec
    schemes: dict[tuple[int, int, bool], list[str]] = {}
    for name, f in wanted.items():
        schemes.setdefault((f.bits, f.group, f.symmetric), []).append(hf_names.hf_module(spec, name))
    groups = {}
    for i, ((bits, group, symmetric), targets) in enumerate(schemes.items()):
        groups[f"group_{i}"] = {
            # One scheme for all: by kind of layer, which every reader can match; several: layer by layer.
            "targets": ["Linear"] if len(schemes) == 1 else targets,
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": symmetric,
                "strategy": "group" if group else "channel",
                "group_size": group or None,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
            "format": LAYOUT,
        }
    return {
        "quant_method": METHOD,
        "format": LAYOUT,
        "quantization_status": "compressed",
        "config_groups": groups,
        # A tied head is no layer of ours, but it is one of transformers'.
        "ignore": [*left_dense(model, wanted), *(["lm_head"] if spec.tied else [])],
        "kv_cache_scheme": None,
    }


# -- reading -------------------------------------------------------------------------------------------------


class CompressedFiles:
    """The tensors of a compressed-tensors folder under the names of packed parts: as TensorFiles, translated."""

    def __init__(self, folder: Path, quantization: dict[str, Any]) -> None:
        _check_readable(folder, quantization)
        self.folder = folder
        self._files = TensorFiles(folder, "model")
        stored = set(self._files.names)
        self.formats: dict[str, IntAsym] = {}  # by Hugging Face's module names
        self.shapes: dict[str, tuple[int, int]] = {}
        for name in sorted(stored):
            module, _, leaf = name.rpartition(".")
            if leaf == "weight_g_idx":
                raise UserError(
                    f"{folder}: the columns of {module!r} are reordered (weight_g_idx); quantize without act-order"
                )
            if leaf == "weight_packed":
                self.shapes[module] = self._shape_of(module, stored)
                self.formats[module] = self._format_of(module, stored)

    def _shape_of(self, module: str, stored: set[str]) -> tuple[int, int]:
        if missing := [n for n in ("weight_shape", "weight_scale") if f"{module}.{n}" not in stored]:
            raise UserError(f"{self.folder}: tensor {module + '.' + missing[0]!r} is missing; download it again")
        shape = self._files.read(f"{module}.weight_shape").flatten().tolist()
        if len(shape) != 2:
            raise UserError(
                f"{self.folder}: {module + '.weight_shape'!r} is {shape}, not the two sizes of a matrix; download it "
                "again"
            )
        return int(shape[0]), int(shape[1])

    def _format_of(self, module: str, stored: set[str]) -> IntAsym:
        (rows, width), packed = self.shapes[module], self._files.shape(f"{module}.weight_packed")
        scale, kind = (self._files.shape(f"{module}.weight_scale"), self._files.dtype(f"{module}.weight_scale"))
        bits = next((b for b in (2, 3, 4, 8) if packed == (rows, -(-width * b // 32))), None)
        if bits is None or len(scale) != 2 or scale[0] != rows or not scale[1] or width % scale[1]:
            raise UserError(
                f"{self.folder}: {module!r} has packed words {list(packed)} and scales {list(scale)} for a weight of "
                f"[{rows}, {width}]; 2, 3, 4 and 8 bits with a scale per group or row can be read"
            )
        return IntAsym(
            bits=bits,
            group=0 if scale[1] == 1 else width // scale[1],
            scale_dtype="bfloat16" if kind == "BF16" else "float16",
            symmetric=f"{module}.weight_zero_point" not in stored,
        )

    @property
    def names(self) -> list[str]:
        hidden = {f"{m}.weight_{part}" for m in self.formats for part in ("packed", "shape", "zero_point")}
        made = [f"{m}.weight_{part}" for m in self.formats for part in ("codes", "zero")]
        return [name for name in self._files.names if name not in hidden] + made

    def shape(self, name: str) -> tuple[int, ...]:
        module, _, leaf = name.rpartition(".")
        if module in self.formats and leaf == "weight_codes":
            rows, width = self.shapes[module]
            return rows, width * self.formats[module].bits // 8
        if module in self.formats and leaf == "weight_zero":
            return self._files.shape(f"{module}.weight_scale")
        return self._files.shape(name)

    def dtype(self, name: str) -> str:
        module, _, leaf = name.rpartition(".")
        if module in self.formats and leaf in ("weight_codes", "weight_zero"):
            return "U8"
        return self._files.dtype(name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        module, _, leaf = name.rpartition(".")
        if module not in self.formats or leaf not in ("weight_codes", "weight_zero"):
            return self._files.read(name, index)
        if leaf == "weight_codes":
            whole = as_bytes(self._files.read(f"{module}.weight_packed"))[:, : self.shape(name)[1]]
        else:
            whole = self._zeros(module)
        return whole[index] if index else whole

    def _zeros(self, module: str) -> Tensor:
        format, (rows, _) = self.formats[module], self.shapes[module]
        middle = 2 ** (format.bits - 1)
        if format.symmetric:
            return torch.full(self._files.shape(f"{module}.weight_scale"), middle, dtype=torch.uint8)
        zero, shape = (self._files.read(f"{module}.weight_zero_point"), self._files.shape(f"{module}.weight_scale"))
        if zero.dtype == torch.int8 and zero.shape == shape:  # of older releases: signed, not packed
            return (zero.to(torch.int16) + middle).to(torch.uint8)
        if zero.dtype != torch.int32 or zero.shape != (-(-rows * format.bits // 32), shape[1]):
            raise UserError(
                f"{self.folder}: the zero points of {module!r} are {zero.dtype} {list(zero.shape)}, which does not fit "
                f"its scales {list(shape)}; download it again"
            )
        return unpack_zeros(zero, format.bits, rows)


def _check_readable(folder: Path, quantization: dict[str, Any]) -> None:
    groups = quantization.get("config_groups")
    groups = groups if isinstance(groups, dict) and all(isinstance(g, dict) for g in groups.values()) else {}
    layouts = {str(g.get("format") or quantization.get("format")) for g in groups.values()}
    if layouts != {LAYOUT}:
        raise UserError(
            f"{folder} holds compressed-tensors weights as {', '.join(sorted(layouts)) or 'an unknown format'}; only "
            f"{LAYOUT} (weight-only integers) can be read: give the folder of the unquantized model"
        )
    if any(g.get("input_activations") for g in groups.values()):
        raise UserError(
            f"{folder} quantizes activations too, which would change the results here; give a weight-only folder "
            "(W4A16, W8A16) or the unquantized model"
        )
    if quantization.get("transform_config"):
        raise UserError(f"{folder} rotates its activations (transform_config), which cannot be read; give another")
