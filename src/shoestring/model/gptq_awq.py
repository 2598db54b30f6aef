"""GPTQ and AWQ folders, read and written: the two older layouts of packed integers.

A linear layer `X` with b bits, `groups` groups of `in / groups` columns:

    GPTQ   X.qweight  int32 [in*b/32, out]      codes, a little-endian bit stream along the input dim
           X.qzeros   int32 [groups, out*b/32]  zero points, the same along the output dim, *minus one*
           X.scales   fp16  [groups, out]
           X.g_idx    int32 [in]                the group of each column
    AWQ    X.qweight  int32 [in, out/8]         4-bit codes of 8 outputs in a word, in the order 0 2 4 6 1 3 5 7
           X.qzeros   int32 [groups, out/8]     zero points, the same
           X.scales   fp16  [groups, out]

The weight is (code - zero) * scale in both, which is ours: nothing is rounded. A zero point of 0 has no place in GPTQ's
first version, which stores -1; such a model is written as version 2 (`checkpoint_format: gptq_v2`), which stores zero
points as they are. One pair of bits and group per folder, as the readers expect it; scales are float16.

Left out: columns in another order (act-order), AWQ's GEMV order, bits that differ between layers (`dynamic`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import Format, FormatLinear, IntAsym, Parts, formats_of
from shoestring.formats.convert import format_linears
from shoestring.formats.groups import group_width
from shoestring.kernels.lowbit.packing import CODES_PER_RUN, pack_bits, unpack_bits
from shoestring.model import hf_names
from shoestring.model.compressed_tensors import as_bytes, as_int32, left_dense, stored_parts
from shoestring.model.save import Entry, gather, write_extras, write_folder
from shoestring.state.files import SHARD_BYTES, TensorFiles, TensorInfo, write_json

if TYPE_CHECKING:
    from shoestring.model.spec import ModelSpec
    from shoestring.model.tokenizer import Tokenizer
    from shoestring.model.transformer import Decoder

GPTQ, AWQ = "gptq", "awq"
BITS = {GPTQ: (2, 3, 4, 8), AWQ: (4,)}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output i of a word is at bits 4 * place, place the position of i in here
UNQUANTIZED = "give the folder of the unquantized model"
INSTEAD = "use --as compressed-tensors, --as packed (read by shoestring only) or --as dense"

# -- writing -------------------------------------------------------------------------------------------------


def save_gptq_awq(
    path: str | Path,
    model: Decoder,
    tokenizer: Tokenizer | None = None,
    *,
    method: str,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the integer layers in the layout of `method`, whole or not at all; `dtype`: of all other weights."""
    layers, dtype = dict(format_linears(model)), dtype or torch.float16
    wanted = _wanted(model.spec, method, formats_of(model), layers)
    grid = next(iter(wanted.values()))
    parts = {name: stored_parts(layers[name], model.compute_dtype) for name in wanted}
    zeros = torch.cat([get()["zero"].unique() for get in parts.values()]).unique()
    version2 = method == GPTQ and bool((zeros == 0).any())
    # Readers of a symmetric folder do not look at the zero points; a learned grid may have moved them.
    symmetric = zeros.tolist() == [2 ** (grid.bits - 1)]
    entries = _dense_entries(model, wanted, dtype)
    for name in wanted:
        module = hf_names.hf_module(model.spec, name)
        entries += _layer_entries(module, layers[name], grid, parts[name], method, version2)
    about = _described(method, replace(grid, symmetric=symmetric), version2, left_dense(model, wanted))

    def write_rest(folder: Path) -> None:
        write_extras(folder, model.spec, tokenizer, dtype, about)
        if method == GPTQ:  # older readers look here
            write_json(folder / "quantize_config.json", about)

    return write_folder(path, entries, write_rest, limit=shard_bytes)


def _wanted(
    spec: ModelSpec, method: str, formats: dict[str, Format], layers: dict[str, FormatLinear]
) -> dict[str, IntAsym]:
    """The layers to pack, once all of them are known to fit; UserError that names the first that does not."""
    if hf_names.is_fused(spec):
        raise UserError(
            f"{method} folders hold separate Linear layers, and a {spec.model_type} model has none; "
            "use --as packed (read by shoestring only) or --as dense"
        )
    found: dict[str, IntAsym] = {}
    for name, format in formats.items():
        module = hf_names.hf_module(spec, name)
        if not isinstance(format, IntAsym) or format.bits not in BITS[method]:
            allowed = ", ".join(f"int{bits}" for bits in BITS[method])
            raise UserError(f"{method} folders hold {allowed}, and {module} is {format.label}; {INSTEAD}")
        rows, width = layers[name].shape
        if format.scale_dtype != "float16":
            raise UserError(f"{method} folders have float16 scales, and {module} is {format.label}; {INSTEAD}")
        if width * format.bits % 32 or rows * format.bits % 32:
            raise UserError(f"{method} folders pack whole words, and {module} is {rows} x {width}; {INSTEAD}")
        found[name] = format
    kinds = {(f.bits, f.group): f"{f.label} ({hf_names.hf_module(spec, n)})" for n, f in found.items()}
    if len(kinds) != 1:
        given = ", ".join(sorted(kinds.values())) or "none: quantize it first, for example with shrink/ptq"
        raise UserError(f"{method} folders have one kind of integers in all layers; the model has {given}; {INSTEAD}")
    left = [n for n in layers if n not in found and n.startswith("blocks.") and not n.endswith("router")]
    if method == GPTQ and left:
        raise UserError(
            f"gptq folders pack every layer of the blocks, and {hf_names.hf_module(spec, left[0])} is dense; {INSTEAD}"
        )
    return found


def _dense_entries(model: Decoder, wanted: dict[str, IntAsym], dtype: torch.dtype) -> list[Entry]:
    entries = []
    for name, t in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if module not in wanted or not leaf.startswith("weight"):
            stored = hf_names.source_of(model.spec, name).name
            entries.append(Entry(TensorInfo(stored, tuple(t.shape), dtype), gather(t, dtype)))
    return entries


def _layer_entries(
    module: str, layer: FormatLinear, format: IntAsym, parts: Callable[[], Parts], method: str, version2: bool
) -> list[Entry]:
    (rows, width), bits = layer.shape, format.bits
    group = group_width(width, format.group)
    groups = width // group
    found: list[tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]] = [
        ("scales", (groups, rows), torch.float16, lambda: parts()["scale"].t().contiguous())
    ]
    if method == AWQ:
        found += [
            ("qweight", (width, rows // 8), torch.int32, lambda: awq_words(unpack_bits(parts()["codes"], bits).t())),
            ("qzeros", (groups, rows // 8), torch.int32, lambda: awq_words(parts()["zero"].t())),
        ]
    else:
        less = 0 if version2 else 1
        found += [
            ("qweight", (width * bits // 32, rows), torch.int32, lambda: as_int32(parts()["codes"]).t().contiguous()),
            ("qzeros", (groups, rows * bits // 32), torch.int32, lambda: gptq_zeros(parts()["zero"] - less, bits)),
            ("g_idx", (width,), torch.int32, lambda: (torch.arange(width) // group).to(torch.int32)),
        ]
    return [Entry(TensorInfo(f"{module}.{leaf}", shape, kind), get) for leaf, shape, kind, get in found]


def gptq_zeros(zero: Tensor, bits: int) -> Tensor:
    """uint8 [out, groups] -> int32 [groups, out*bits/32]."""
    turned = zero.t().contiguous()
    padded = F.pad(turned, (0, -turned.shape[1] % 8))
    return as_int32(pack_bits(padded, bits))[:, : zero.shape[0] * bits // 32].contiguous()


def awq_words(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [n, out] -> int32 [n, out/8]."""
    ordered = codes.reshape(codes.shape[0], -1, 8)[..., list(AWQ_ORDER)].flatten(1)
    return as_int32(pack_bits(ordered.contiguous(), 4))


def _described(method: str, format: IntAsym, version2: bool, dense: list[str]) -> dict[str, Any]:
    """The quantization_config of config.json."""
    about: dict[str, Any] = {"quant_method": method, "bits": format.bits, "group_size": format.group or -1}
    if method == AWQ:
        return {**about, "version": "gemm", "zero_point": True, "modules_to_not_convert": dense or None}
    return {
        **about,
        "desc_act": False,
        "sym": format.symmetric,
        "lm_head": False,
        "checkpoint_format": "gptq_v2" if version2 else "gptq",
        "pack_dtype": "int32",
    }


# -- reading -------------------------------------------------------------------------------------------------


class GptqAwqFiles:
    """The tensors of such a folder under the names of packed parts: as TensorFiles, translated."""

    def __init__(self, folder: Path, quantization: dict[str, Any]) -> None:
        self.folder, self.method = folder, str(quantization.get("quant_method"))
        bits, group = quantization.get("bits"), quantization.get("group_size", -1)
        if bits not in BITS[self.method] or not isinstance(group, int):
            allowed = ", ".join(map(str, BITS[self.method]))
            raise UserError(
                f"{folder}: bits={bits!r} and group_size={group!r}; {allowed} bits with one group size can be read: "
                f"{UNQUANTIZED}"
            )
        if quantization.get("dynamic") or str(quantization.get("version", "gemm")).lower() != "gemm":
            what = "rules of its own for some layers (dynamic)" if quantization.get("dynamic") else "AWQ's other orders"
            raise UserError(f"{folder} has {what}, which cannot be read; {UNQUANTIZED}")
        # Zero points of the first version of GPTQ are stored less one.
        self._less = int(self.method == GPTQ and quantization.get("checkpoint_format") != "gptq_v2")
        self._files = TensorFiles(folder, "model")
        stored = set(self._files.names)
        self.formats: dict[str, IntAsym] = {}  # by Hugging Face's module names
        self.shapes: dict[str, tuple[int, int]] = {}
        for name in sorted(n for n in stored if n.endswith(".qweight")):
            module = name.removesuffix(".qweight")
            self._add(module, stored, bits, max(group, 0), quantization.get("sym") is True)

    def _add(self, module: str, stored: set[str], bits: int, group: int, symmetric: bool) -> None:
        if missing := [n for n in ("qzeros", "scales") if f"{module}.{n}" not in stored]:
            raise UserError(f"{self.folder}: tensor {module + '.' + missing[0]!r} is missing; download it again")
        words, zeros, scales = (self._files.shape(f"{module}.{n}") for n in ("qweight", "qzeros", "scales"))
        rows, width = 0, 0
        if fits := all(len(shape) == 2 and 0 not in shape for shape in (words, zeros, scales)):
            rows = scales[1]
            width = words[0] if self.method == AWQ else words[0] * 32 // bits
            packed = (width, rows // 8) if self.method == AWQ else (width * bits // 32, rows)
            fits = words == packed and zeros == (scales[0], rows * bits // 32)
            fits = fits and width % scales[0] == 0 and width // scales[0] == (group or width)
        kinds = [self._files.dtype(f"{module}.{n}") for n in ("qweight", "qzeros", "scales")]
        if not fits or kinds[:2] != ["I32", "I32"] or kinds[2] not in ("F16", "BF16", "F32"):
            raise UserError(
                f"{self.folder}: {module!r} has words {list(words)}, zero points {list(zeros)} and scales "
                f"{list(scales)}, which do not fit {bits} bits in groups of {group or 'a row'}; download it again"
            )
        if f"{module}.g_idx" in stored:
            order = self._files.read(f"{module}.g_idx")
            if order.shape != (width,) or not torch.equal(order.long(), torch.arange(width) // (group or width)):
                raise UserError(
                    f"{self.folder}: the columns of {module!r} are reordered (act-order), which cannot be read; "
                    f"{UNQUANTIZED}, or one that was quantized without desc_act"
                )
        scale_dtype = "bfloat16" if kinds[2] == "BF16" else "float16"
        self.formats[module] = IntAsym(bits=bits, group=group, scale_dtype=scale_dtype, symmetric=symmetric)
        self.shapes[module] = (rows, width)

    def _translated(self, name: str) -> tuple[str, str]:
        """(module, part) of a packed layer; ("", "") for other tensors."""
        module, _, leaf = name.rpartition(".")
        packed = module in self.formats and leaf in ("weight_codes", "weight_scale", "weight_zero")
        return (module, leaf.removeprefix("weight_")) if packed else ("", "")

    @property
    def names(self) -> list[str]:
        hidden = {f"{m}.{part}" for m in self.formats for part in ("qweight", "qzeros", "scales", "g_idx")}
        made = [f"{m}.weight_{part}" for m in self.formats for part in ("codes", "scale", "zero")]
        return [name for name in self._files.names if name not in hidden] + made

    def shape(self, name: str) -> tuple[int, ...]:
        module, part = self._translated(name)
        if not module:
            return self._files.shape(name)
        (rows, width), format = self.shapes[module], self.formats[module]
        return (rows, width * format.bits // 8 if part == "codes" else width // group_width(width, format.group))

    def dtype(self, name: str) -> str:
        module, part = self._translated(name)
        if not module:
            return self._files.dtype(name)
        return self._files.dtype(f"{module}.scales") if part == "scale" else "U8"

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        module, part = self._translated(name)
        if not module:
            return self._files.read(name, index)
        whole = {"codes": self._codes, "scale": self._scale, "zero": self._zero}[part](module)
        return whole[index] if index else whole

    def _codes(self, module: str) -> Tensor:
        words = self._files.read(f"{module}.qweight")
        if self.method == GPTQ:
            return as_bytes(words.t().contiguous())
        return pack_bits(awq_codes(words).t().contiguous(), 4)

    def _scale(self, module: str) -> Tensor:
        return self._files.read(f"{module}.scales").t().contiguous()

    def _zero(self, module: str) -> Tensor:
        words, bits = self._files.read(f"{module}.qzeros"), self.formats[module].bits
        if self.method == AWQ:
            return awq_codes(words).t().contiguous()
        turned = as_bytes(words)
        turned = F.pad(turned, (0, -(-self.shapes[module][0] // CODES_PER_RUN) * bits - turned.shape[1]))
        zero = unpack_bits(turned, bits)[:, : self.shapes[module][0]].t().contiguous()
        if self._less and bool((zero == 2**bits - 1).any()):  # readers make of it 0 or 2**bits
            raise UserError(
                f"{self.folder}: a zero point of {module!r} is stored as {2**bits - 1}, which readers of the first "
                "version of GPTQ understand differently; give a folder of gptq_v2"
            )
        return zero + self._less


def awq_codes(words: Tensor) -> Tensor:
    """The inverse of `awq_words`: int32 [n, out/8] -> uint8 [n, out]."""
    places = [AWQ_ORDER.index(i) for i in range(8)]
    return unpack_bits(as_bytes(words), 4).unflatten(1, (-1, 8))[..., places].flatten(1)
