"""Hugging Face folders with weights in FP8 (E4M3), both ways.

    quant_method fp8                     X.weight F8_E4M3 [out, in], X.weight_scale_inv [ceil(out/128), ceil(in/128)]:
                                         DeepSeek's and Qwen's layout; transformers and vLLM read it
    compressed-tensors, float-quantized  X.weight F8_E4M3 [out, in], X.weight_scale [out, 1] (or one number for all)

Nothing is rounded in either direction. Readers of these layouts usually round activations to FP8 as well; here they
stay as they are, so logits differ by that rounding. Scales of activations (`input_scale`) are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import Fp8, formats_of
from shoestring.formats.convert import format_hosts
from shoestring.formats.fp8 import SCALE_DTYPES
from shoestring.formats.linear import FormatHost, full
from shoestring.model import hf_names
from shoestring.model.compressed_tensors import left_dense
from shoestring.model.save import Entry, gather, write_extras, write_folder
from shoestring.state.files import SHARD_BYTES, TensorInfo
from shoestring.state.tensor_files import TensorFiles

if TYPE_CHECKING:
    from shoestring.model.tokenizer import Tokenizer
    from shoestring.model.transformer import Decoder

METHOD, LAYOUT = "fp8", "float-quantized"
BLOCK = 128
_E4M3 = "F8_E4M3"
_ACTIVATIONS = ("input_scale", "k_scale", "v_scale", "output_scale")


def is_fp8(quantization: dict[str, Any]) -> bool:
    return quantization.get("quant_method") == METHOD or quantization.get("format") == LAYOUT


# -- reading -------------------------------------------------------------------------------------------------


class Fp8Files:
    """The tensors of such a folder under the names of packed parts: as TensorFiles, translated."""

    def __init__(self, folder: Path, quantization: dict[str, Any]) -> None:
        self.folder = folder
        self._files = TensorFiles(folder, "model")
        stored = set(self._files.names)
        size = quantization.get("weight_block_size")
        if size not in (None, [BLOCK, BLOCK]):
            raise UserError(
                f"{folder}: weight_block_size is {size}; blocks of [{BLOCK}, {BLOCK}] or rows can be read: give the "
                "folder of the unquantized model"
            )
        self.formats: dict[str, Fp8] = {}  # by Hugging Face's module names
        self.shapes: dict[str, tuple[int, int]] = {}
        self._scales: dict[str, str] = {}  # module -> name of the scale
        for name in sorted(stored):
            module, _, leaf = name.rpartition(".")
            if leaf == "weight" and self._files.dtype(name) == _E4M3:
                self._add(module, stored, by_block=size is not None)

    def _add(self, module: str, stored: set[str], *, by_block: bool) -> None:
        found = [n for n in (f"{module}.weight_scale_inv", f"{module}.weight_scale") if n in stored]
        if not found:
            raise UserError(f"{self.folder}: tensor {module + '.weight_scale_inv'!r} is missing; download it again")
        shape, scale = self._files.shape(f"{module}.weight"), self._files.shape(found[0])
        if len(shape) != 2:
            raise UserError(f"{self.folder}: {module + '.weight'!r} in FP8 has shape {list(shape)}, not two sizes")
        kind = "bfloat16" if self._files.dtype(found[0]) == "BF16" else "float32"
        format = Fp8(BLOCK if by_block else 0, kind)
        rows = (shape[0], shape[1])
        if scale != format.scale_shape(rows) and (by_block or scale not in ((), (1,), (shape[0],))):
            raise UserError(
                f"{self.folder}: {found[0]!r} has shape {list(scale)} for a weight of {list(shape)}; blocks of "
                f"[{BLOCK}, {BLOCK}], rows or one number can be read"
            )
        self.formats[module], self.shapes[module], self._scales[module] = format, rows, found[0]

    def _translated(self, name: str) -> tuple[str, str]:
        """(module, part) of a packed layer; ("", "") for other tensors."""
        module, _, leaf = name.rpartition(".")
        packed = module in self.formats and leaf in ("weight_codes", "weight_scale")
        return (module, leaf.removeprefix("weight_")) if packed else ("", "")

    @property
    def names(self) -> list[str]:
        hidden = {f"{m}.weight" for m in self.formats} | set(self._scales.values())
        made = [f"{m}.weight_{part}" for m in self.formats for part in ("codes", "scale")]
        kept = [n for n in self._files.names if n not in hidden and n.rpartition(".")[2] not in _ACTIVATIONS]
        return [*kept, *made]

    def shape(self, name: str) -> tuple[int, ...]:
        module, part = self._translated(name)
        if not module:
            return self._files.shape(name)
        return self.shapes[module] if part == "codes" else self.formats[module].scale_shape(self.shapes[module])

    def dtype(self, name: str) -> str:
        module, part = self._translated(name)
        if not module:
            return self._files.dtype(name)
        return "U8" if part == "codes" else self._files.dtype(self._scales[module])

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        module, part = self._translated(name)
        if not module:
            return self._files.read(name, index)
        if part == "codes":
            codes = self._files.read(f"{module}.weight", index).view(torch.uint8)
            if bool(((codes & 127) == 127).any()):
                raise UserError(f"{self.folder}: {module + '.weight'!r} holds NaN values")
            return codes
        scale = self._files.read(self._scales[module])
        scale = scale.reshape(-1, 1).expand(self.shape(name)) if scale.ndim < 2 else scale
        return scale[index] if index else scale


# -- writing -------------------------------------------------------------------------------------------------


def save_fp8(
    path: str | Path,
    model: Decoder,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a model whose layers are fp8:b128 (quant_method fp8) or fp8 (float-quantized), whole or not at all.

    `dtype`: of the other weights; bfloat16 unless given.
    """
    spec, hosts, wanted = model.spec, dict(format_hosts(model)), _writable(model)
    dtype = dtype or torch.bfloat16
    by_block = next(iter(wanted.values())).group == BLOCK
    entries: list[Entry] = []
    for name, t in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if module not in wanted or not leaf.startswith("weight"):
            stored = hf_names.source_of(spec, name).name
            entries.append(Entry(TensorInfo(stored, tuple(t.shape), dtype), gather(t, dtype)))
    for name, format in wanted.items():
        theirs, host = hf_names.hf_module(spec, name), hosts[name]
        leaf, parts = "weight_scale_inv" if by_block else "weight_scale", _parts(host, model.compute_dtype)
        codes = TensorInfo(f"{theirs}.weight", host.shape, torch.float8_e4m3fn)
        scale = TensorInfo(f"{theirs}.{leaf}", format.scale_shape(host.shape), SCALE_DTYPES[format.scale_dtype])
        entries.append(Entry(codes, lambda parts=parts: parts()["codes"].view(torch.float8_e4m3fn)))  # type: ignore[misc]
        entries.append(Entry(scale, lambda parts=parts: parts()["scale"]))  # type: ignore[misc]
    dense = left_dense(model, wanted)
    about = _by_block(dense) if by_block else _by_row([*dense, *(["lm_head"] if spec.tied else [])])
    return write_folder(
        path, entries, lambda folder: write_extras(folder, spec, tokenizer, dtype, about), limit=shard_bytes
    )


def _writable(model: Decoder) -> dict[str, Fp8]:
    formats = formats_of(model)
    others = {n: f for n, f in formats.items() if not isinstance(f, Fp8)}
    found = {n: f for n, f in formats.items() if isinstance(f, Fp8)}
    instead = "make one with `shoestring run shrink/rtn model=MODEL format=fp8:b128 embed=dense`"
    if others:
        name, format = next(iter(others.items()))
        raise UserError(f"an FP8 folder cannot hold {name} as {format.label}: all packed layers must be fp8; {instead}")
    if not found or len({f.group for f in found.values()}) > 1:
        what = "no FP8 layer" if not found else "layers of fp8 and of fp8:b128"
        raise UserError(f"the model has {what}, and an FP8 folder holds one kind; {instead}")
    if hf_names.is_fused(model.spec):
        raise UserError(f"a {model.spec.model_type} model stores several layers as one, which FP8 folders do not hold")
    return found


def _parts(host: FormatHost, dtype: torch.dtype) -> Callable[[], dict[str, Tensor]]:
    def get() -> dict[str, Tensor]:
        parts = host.parts() if host.packed else host.encode(dtype)
        return {n: full(t).cpu().contiguous() for n, t in parts.items()}

    return get


def _by_block(dense: list[str]) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": dense or None,
    }


def _by_row(dense: list[str]) -> dict[str, Any]:
    numbers: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**numbers, "strategy": "channel", "dynamic": False}
    inputs = {**numbers, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": LAYOUT,
        "quantization_status": "compressed",
        "ignore": dense,
        "config_groups": {"group_0": group},
    }
