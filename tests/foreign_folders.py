"""GPTQ and AWQ folders, written from the definition of the two layouts bit by bit: what the reader is tested with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shoestring.formats import IntAsym
from shoestring.formats.convert import format_linears
from shoestring.formats.groups import group_width
from shoestring.formats.linear import FormatLinear
from shoestring.kernels.lowbit.packing import unpack_bits
from shoestring.model import Decoder, hf_names
from shoestring.model.save import write_extras

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # AutoAWQ: output i of a word is nibble PLACES[i]


def stream(codes: Tensor, bits: int) -> Tensor:
    """The codes of every row one after the other, lowest bit first, as int32 words."""
    every_bit = (codes.long()[..., None] >> torch.arange(bits) & 1).flatten(1)
    words = (every_bit.unflatten(1, (-1, 32)) << torch.arange(32)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def awq_words(codes: Tensor) -> Tensor:
    nibbles = torch.empty_like(codes).unflatten(1, (-1, 8))
    nibbles[..., list(PLACES)] = codes.unflatten(1, (-1, 8))
    return stream(nibbles.flatten(1), 4)


def layer_tensors(layer: FormatLinear, method: str, *, version2: bool) -> dict[str, Tensor]:
    """A packed integer layer in the layout of `method`, by the last word of the names."""
    assert isinstance(layer.format, IntAsym) and layer.packed
    parts, bits, width = layer.parts(), layer.format.bits, layer.in_features
    group, codes = group_width(width, layer.format.group), unpack_bits(parts["codes"], bits)
    if method == "awq":
        found = {"qweight": awq_words(codes.t()), "qzeros": awq_words(parts["zero"].t())}
    else:
        found = {
            "qweight": stream(codes, bits).t(),
            "qzeros": stream(parts["zero"].t().long() - int(not version2), bits),
            "g_idx": (torch.arange(width) // group).to(torch.int32),
        }
    return {"scales": parts["scale"].t(), **found}


def save_gptq_awq(folder: Path, model: Decoder, method: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The packed layers of `model` as a folder of AutoGPTQ or AutoAWQ; returns its tensors and quantization_config."""
    layers = {name: layer for name, layer in format_linears(model) if layer.packed}
    (grid,) = {layer.format for layer in layers.values()}
    # The first version stores zero points less one and has no place for a zero point of 0.
    version2 = method == "gptq" and any(bool((layer.parts()["zero"] == 0).any()) for layer in layers.values())
    tensors = {}
    for name, t in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if module not in layers or not leaf.startswith("weight"):
            tensors[hf_names.source_of(model.spec, name).name] = t
    for name, layer in layers.items():
        module = hf_names.hf_module(model.spec, name)
        stored = layer_tensors(layer, method, version2=version2)
        tensors |= {f"{module}.{leaf}": t.contiguous() for leaf, t in stored.items()}
    about: dict[str, Any] = {"quant_method": method, "bits": grid.bits, "group_size": grid.group or -1}
    if method == "awq":
        about |= {"version": "gemm", "zero_point": True}
    else:
        about |= {"desc_act": False, "sym": grid.symmetric, "checkpoint_format": "gptq_v2" if version2 else "gptq"}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    write_extras(folder, model.spec, None, torch.float32, about)
    return tensors, about
