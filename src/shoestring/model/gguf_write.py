"""GGUF out: a model with its vocabulary and chat template as one file of llama.cpp.

Matrices are written in the kind that is asked for, or with "auto" in the smallest kind that holds each of them exactly
(gguf_blocks.py). Embeddings and heads are Q8_0 where the rest has fewer bits, but for codes that fit: rounding them
costs most. Norms, biases and routers stay F32, as llama.cpp wants them. The error of every rounded weight is measured
on the way. The file is written beside its place and renamed when it is complete.

The `gguf` package has no quantizer for K types. llama.cpp's own makes them, from a file of ours in full precision,
where llama-cpp-python is installed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.errors import UserError, room
from shoestring.formats.convert import format_hosts
from shoestring.formats.linear import FormatHost
from shoestring.model.export_names import AUTO, KINDS, LLAMA_TYPES, check_kind
from shoestring.model.gguf_blocks import FLOAT_KINDS, Blocks, bits_of, encode_blocks, encode_grid, exact_kinds, fits
from shoestring.model.gguf_names import Place, gguf_names, joined, place_of, stored_shape
from shoestring.model.gguf_spec import metadata_of
from shoestring.model.gguf_vocabulary import vocabulary_metadata
from shoestring.state.files import hidden_name, sweep_leftovers, sync

if TYPE_CHECKING:
    from shoestring.model.tokenizer import Tokenizer
    from shoestring.model.transformer import Decoder

# llama.cpp's numbers for what most of a file is stored as (general.file_type).
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32, "MXFP4": 38}
_ALWAYS_F32 = ("position_embd.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight")
_Member = tuple[Tensor, FormatHost | None]  # a tensor of ours in fp32, and the packed layer that it is of
SENSITIVE = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class WrittenTensor:
    name: str
    kind: str
    num_bytes: int
    num_weights: int
    error: float  # sum of squared differences
    norm: float
    exact: bool

    @property
    def relative_error(self) -> float:
        return math.sqrt(self.error / self.norm) if self.norm else 0.0


def least_bits(kind: str) -> float:
    """Of a weight on the disk while a file of this kind is written; llama.cpp's types are made from an F32 file."""
    if kind in LLAMA_TYPES:
        return 32.0 + int(kind.lstrip("IQ")[0])
    return min(map(bits_of, KINDS)) if kind == AUTO else bits_of(kind)


def save_gguf(
    path: Path, model: Decoder, tokenizer: Tokenizer | None, *, kind: str = AUTO, name: str = ""
) -> list[WrittenTensor]:
    """Write the file, whole or not at all; returns what each tensor became."""
    if tokenizer is None:
        raise UserError("a GGUF file carries its vocabulary, and this model has no tokenizer; add one to its folder")
    kind = check_kind(kind)
    if kind in LLAMA_TYPES:
        return _save_by_llama_cpp(path, model, tokenizer, kind, name)
    source = _Source(model)
    said, rope = metadata_of(model.spec, source.stored_shapes)
    vocabulary = vocabulary_metadata(tokenizer, model.spec.vocab_size)
    encoded = [source.encoded(stored, kind) for stored in source.plan]
    written = [about for about, _ in encoded]
    metadata = {"general.name": name or path.stem, "general.file_type": _FILE_TYPES[_most_common(written)]}
    metadata |= {f"{source.names.architecture}.{key}": value for key, value in said.items()} | vocabulary
    tensors = {about.name: (about.kind, data) for about, data in encoded}
    tensors |= {stored: ("F32", t.float().view(torch.uint8)) for stored, t in rope.items()}
    with _replacing(path) as temp:
        _write(temp, source.names.architecture, metadata, tensors)
    return written


class _Source:
    """The tensors of a model, by their names in the file."""

    def __init__(self, model: Decoder) -> None:
        self.spec, self.names = model.spec, gguf_names(model.spec)
        self._layers, self._state = dict(format_hosts(model)), model.state_dict()
        names = _weight_names(self._state)
        if self.spec.tied and self.names.has_output:
            names.append("head.weight")
        self.plan: dict[str, dict[str, Place]] = {}  # name in the file -> our tensors in it
        for name in names:
            place = place_of(self.spec, name)
            self.plan.setdefault(place.name, {})[name] = place

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for stored, places in self.plan.items():
            name, place = next(iter(places.items()))
            found[stored] = stored_shape(self.spec, place, self._shape(name))
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        name = self._tied(name)
        return tuple(self._state[name].shape) if name in self._state else self._layers[name.rpartition(".")[0]].shape

    def _tied(self, name: str) -> str:
        return "embed.weight" if name == "head.weight" and self.spec.tied else name

    def _values(self, name: str) -> _Member:
        name = self._tied(name)
        layer = self._layers.get(name.rpartition(".")[0])
        if layer is not None and name.endswith(".weight"):
            return layer.effective_weight(torch.float32).detach().cpu(), layer if layer.packed else None
        return self._state[name].detach().float().cpu(), None

    def encoded(self, stored: str, kind: str) -> tuple[WrittenTensor, Tensor]:
        """One tensor of the file as bytes."""
        places = list(self.plan[stored].values())
        members = [self._values(name) for name in self.plan[stored]]
        if members[0][0].ndim == 1 or stored.endswith(_ALWAYS_F32):
            whole = joined(places, [weight for weight, _ in members])
            blocks = [encode_blocks(whole.reshape(-1, whole.shape[-1]), "F32")]
            data = blocks[0].data.reshape(*whole.shape[:-1], -1)
        else:
            blocks = _choose(members, stored, kind)
            data = joined(places, [b.data for b in blocks])
        about = WrittenTensor(
            stored,
            blocks[0].kind,
            data.numel(),
            sum(weight.numel() for weight, _ in members),
            sum(b.error for b in blocks),
            sum(b.norm for b in blocks),
            all(b.exact for b in blocks),
        )
        return about, data.contiguous()


def _weight_names(state: Mapping[str, Tensor]) -> list[str]:
    """Our tensors, the parts of a packed weight as one."""
    names = []
    for name in state:
        module, _, leaf = name.rpartition(".")
        names.append(f"{module}.weight" if leaf.startswith("weight") else name)
    return list(dict.fromkeys(names))


# -- kinds -------------------------------------------------------------------------------------------


def _choose(members: list[_Member], stored: str, kind: str) -> list[Blocks]:
    """Our matrices inside one stored tensor, all in one kind."""
    first = members[0][0]
    if kind == AUTO:
        candidates = list(KINDS[1:]) if members[0][1] is not None else list(exact_kinds(first))
        for candidate in (k for k in candidates if fits(first, k)):
            blocks = [_as(weight, layer, candidate) for weight, layer in members]
            if all(b.exact for b in blocks):
                return blocks
        raise AssertionError("F32 holds every weight")
    if stored in SENSITIVE and kind not in FLOAT_KINDS and any(_codes(*m, kind) is None for m in members):
        kind = "Q8_0"
    if not fits(first, kind):
        kind = "F16"
    return [_as(weight, layer, kind) for weight, layer in members]


def _as(weight: Tensor, layer: FormatHost | None, kind: str) -> Blocks:
    return _codes(weight, layer, kind) or encode_blocks(weight, kind)


def _codes(weight: Tensor, layer: FormatHost | None, kind: str) -> Blocks | None:
    """The codes of a packed layer as they are; None where they do not fit."""
    return None if layer is None else encode_grid(layer.format, layer.parts(), weight, kind)


# -- the file ----------------------------------------------------------------------------------------


def _write(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, Tensor]]
) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_quantization_version(2)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, (kind, data) in tensors.items():
        number = GGMLQuantizationType[kind]
        writer.add_tensor_info(name, tuple(data.shape), np.dtype(np.uint8), data.numel(), raw_dtype=number)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, data in tensors.values():
            writer.write_tensor_data(data.numpy())
        writer.flush()
    finally:
        if writer.fout is not None:
            writer.close()


def _most_common(written: list[WrittenTensor]) -> str:
    sizes: dict[str, int] = {}
    for tensor in written:
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.num_weights
    return max(sizes, key=lambda kind: sizes[kind])


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place when the block is through."""
    temp = hidden_name(path, "new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep_leftovers(path.parent)
        yield temp
        sync(temp)
        temp.replace(path)
        sync(path.parent)
    except OSError as error:
        reason, hint = error.strerror or str(error), room(error)
        if error.errno is None:  # numpy wrote only a part of an array, and does not say why
            reason, hint = f"{reason}, perhaps because the disk is full", "free some space or "
        raise UserError(f"cannot write {path}: {reason}; nothing was changed; {hint}choose another place") from error
    finally:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)


# -- llama.cpp's quantizer ---------------------------------------------------------------------------


def _save_by_llama_cpp(path: Path, model: Decoder, tokenizer: Tokenizer, kind: str, name: str) -> list[WrittenTensor]:
    """A file of ours in full precision, then llama.cpp's quantizer; the error is measured on what it wrote."""
    import llama_cpp

    whole = path.with_name(path.stem + ".full-precision.gguf")
    with _replacing(path) as temp:
        try:
            save_gguf(whole, model, tokenizer, kind="F32", name=name or path.stem)
            options = llama_cpp.llama_model_quantize_default_params()
            options.ftype = LLAMA_TYPES[kind]
            with _quiet(llama_cpp) as log:
                failed = llama_cpp.llama_model_quantize(str(whole).encode(), str(temp).encode(), options)
            if failed:
                raise UserError(f"llama.cpp could not quantize {path.name} to {kind}: {''.join(log[-3:]).strip()}")
            return _compared(whole, temp)
        finally:
            whole.unlink(missing_ok=True)


@contextlib.contextmanager
def _quiet(llama_cpp: Any) -> Iterator[list[str]]:
    """What llama.cpp logs, which is a line per tensor, as a list instead of on the terminal."""
    log: list[str] = []
    keep = llama_cpp.llama_log_callback(lambda level, text, data: log.append(text.decode(errors="replace")))
    llama_cpp.llama_log_set(keep, None)
    try:
        yield log
    finally:
        llama_cpp.llama_log_set(llama_cpp._logger.llama_log_callback, None)


def _compared(whole: Path, rounded: Path) -> list[WrittenTensor]:
    from shoestring.model.gguf_file import open_gguf

    before, after = open_gguf(whole), open_gguf(rounded)
    found = []
    for name, tensor in after.tensors.items():
        want, got = before.rows(before.tensors[name]), after.rows(tensor)
        error = float((got - want).double().square().sum())
        norm = float(want.double().square().sum())
        found.append(
            WrittenTensor(name, tensor.kind, tensor.num_bytes, want.numel(), error, norm, torch.equal(got, want))
        )
    return found
