"""GPTQ and AWQ folders, read: the two older layouts of packed integers. They are not written any more: their programs
are archived, and what reads them reads compressed-tensors.

A linear layer `X` with b bits, `groups` groups of `in / groups` columns:

    GPTQ   X.qweight  int32 [in*b/32, out]      codes, a little-endian bit stream along the input dim
           X.qzeros   int32 [groups, out*b/32]  zero points, the same along the output dim, *minus one*
           X.scales   fp16  [groups, out]
           X.g_idx    int32 [in]                the group of each column
    AWQ    X.qweight  int32 [in, out/8]         4-bit codes of 8 outputs in a word, in the order 0 2 4 6 1 3 5 7
           X.qzeros   int32 [groups, out/8]     zero points, the same
           X.scales   fp16  [groups, out]

The weight is (code - zero) * scale in both, which is ours: nothing is rounded. GPTQ's version 2
(`checkpoint_format: gptq_v2`) stores zero points as they are.

Left out: columns in another order (act-order), AWQ's GEMV order, bits that differ between layers (`dynamic`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import IntAsym
from shoestring.formats.groups import group_width
from shoestring.kernels.lowbit.packing import CODES_PER_RUN, pack_bits, unpack_bits
from shoestring.model.compressed_tensors import as_bytes
from shoestring.state.tensor_files import TensorFiles

GPTQ, AWQ = "gptq", "awq"
BITS = {GPTQ: (2, 3, 4, 8), AWQ: (4,)}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output i of a word is at bits 4 * place, place the position of i in here
UNQUANTIZED = "give the folder of the unquantized model"


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
    """The 4-bit codes of int32 words: [n, out/8] -> uint8 [n, out]."""
    places = [AWQ_ORDER.index(i) for i in range(8)]
    return unpack_bits(as_bytes(words), 4).unflatten(1, (-1, 8))[..., places].flatten(1)
