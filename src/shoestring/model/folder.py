"""Model folders: load one, fill a sharded model from one, or rewrite one in another layout. `save_model` (save.py) is
offered here too.

A finished model is a Hugging Face folder: config.json, safetensors, tokenizer files. `load_model` also takes
a run folder (its model/), a GGUF file, and the folders that vLLM users have (compressed_tensors.py).
`load_into` fills a model that is already built and maybe sharded, reading only this process's box of each tensor.

Left out on purpose: other layouts (export.py), checkpoints of a running training (state/), pickled weights (never
read), downloads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from shoestring.device import pick_device
from shoestring.errors import UserError, shown
from shoestring.formats import allocate_packed, use_kernels
from shoestring.formats.convert import format_hosts
from shoestring.formats.linear import local
from shoestring.json_files import Fields, read_object
from shoestring.model import hf_names
from shoestring.model.compressed_tensors import METHOD, CompressedFiles
from shoestring.model.fp8_folder import Fp8Files, is_fp8
from shoestring.model.gptq_awq import AWQ, GPTQ, GptqAwqFiles
from shoestring.model.hf import spec_of_folder, token_ids
from shoestring.model.save import PACKED_VERSION, save_model
from shoestring.model.spec import ModelSpec
from shoestring.model.transformer import Decoder
from shoestring.paths import find_model
from shoestring.state.boxes import Box, local_box
from shoestring.state.tensor_files import TensorFiles

if TYPE_CHECKING:
    from shoestring.model.tokenizer import Tokenizer

__all__ = ["LoadedModel", "load_into", "load_model", "read_spec", "save_model", "weight_files"]

ForeignFiles = CompressedFiles | Fp8Files | GptqAwqFiles
_FLOATS = ("F64", "F32", "F16", "BF16")
_PIECE = 1 << 24  # weights that are read at a time
_COMPARED_ROWS = 4096  # of two matrices, at a time


@dataclass(frozen=True)
class LoadedModel:
    model: Decoder
    tokenizer: Tokenizer | None
    spec: ModelSpec
    path: Path  # the folder or file that was read


def load_model(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, packed: bool = False
) -> LoadedModel:
    """A Decoder with weights and compute in `dtype`, from a Hugging Face folder, run folder or .gguf file.

    Packed modules keep their stored parts; `dtype` is what they are decoded to. `packed`: quantized matrices of a .gguf
    file become packed modules (gguf.py), instead of dense ones.
    """
    device = pick_device(str(device))
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"dtype={shown(dtype)} is not a dtype of torch; give for example torch.bfloat16")
    where, source = _open_source(path, packed)
    source.check_size()
    with torch.device("meta"):
        model = Decoder(source.spec)
    model.to(dtype)
    if source.formats:
        allocate_packed(model, source.formats, source.packed_dtype)
    _check_shapes(model, source)  # before memory is asked for: a config.json can ask for any amount
    # As to_empty does, but for torch's own reference of empty_like, whose import takes half a second.
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
    _fill(model, source)
    if source.formats and device.type == "cuda":
        use_kernels(model)
    model.compute_dtype = dtype
    tokenizer = source.tokenizer()
    if tokenizer is not None and tokenizer.vocab_size > source.spec.vocab_size:
        raise UserError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens but the embedding only "
            f"{source.spec.vocab_size} rows (vocab_size); use the tokenizer the model was trained with"
        )
    return LoadedModel(model.eval(), tokenizer, source.spec, where)


def weight_files(path: str | Path) -> list[Path]:
    """The files that the weights of a model lie in: the .gguf file, or the safetensors of its folder."""
    found = find_model(path)
    if found.is_file():
        return [found]
    return TensorFiles(found, "packed" if (found / "shoestring.json").is_file() else "model").paths


def load_into(model: Decoder, path: str | Path) -> None:
    """Fill a built, maybe sharded model from a folder or .gguf file; each process reads its boxes only."""
    where, source = _open_source(path)
    ours, theirs = dataclasses.asdict(model.spec), dataclasses.asdict(source.spec)
    free = {"bos_id", "eos_id", "extra_eos_ids", "model_type"}
    if model.spec.positions == "rope":
        free.add("max_positions")
    differ = [f"{k} (model {ours[k]!r}, file {theirs[k]!r})" for k in ours if k not in free and ours[k] != theirs[k]]
    if differ:
        raise UserError(f"{where} holds another model: {', '.join(differ)}; build the model with the spec of the file")
    packed = {name for name, m in format_hosts(model) if m.packed}
    if packed != set(source.formats):
        if source.formats and not packed:
            raise UserError(
                f"{where} holds packed weights, which cannot be trained; write dense ones first: shoestring export "
                f"{where} DIR"
            )
        raise UserError(f"{where} and the model are not packed in the same layers; use load_model")
    _fill(model, source)


def read_spec(path: str | Path) -> tuple[ModelSpec, Tokenizer | None]:
    """What a folder or .gguf file holds, without building it: for callers that build sharded and fill later."""
    _, source = _open_source(path)
    return source.spec, source.tokenizer()


def described(path: str | Path) -> Decoder | None:
    """The model of a folder without weights, on the meta device: for checks that should not wait until gigabytes are
    read. None for a .gguf file.
    """
    folder = find_model(path)
    if folder.is_file():
        return None
    with torch.device("meta"):
        return Decoder(spec_of_folder(folder))


class _WeightSource(Protocol):
    """Somewhere our tensors can be read from, by our names."""

    spec: ModelSpec
    formats: dict[str, dict[str, Any]]  # our module name -> Format as JSON, for packed modules
    packed_dtype: torch.dtype

    def tokenizer(self) -> Tokenizer | None: ...
    def check_size(self) -> None: ...
    def check_names(self, expected: set[str]) -> None: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, box: Box) -> Tensor: ...


class _FolderSource:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = read_object(folder / "config.json")
        self.spec = _with_generation_eos(spec_of_folder(folder), folder)
        self._files: TensorFiles | ForeignFiles
        if quantization := _foreign_packing(folder, config):
            self._files = foreign_files(folder, quantization)
            self.formats, self.packed_dtype = _our_formats(self._files, self.spec), torch.float32
            self._packed = True
        else:
            self.formats, self.packed_dtype = _read_packing(folder, self.spec)
            self._packed = (folder / "shoestring.json").is_file()
            self._files = TensorFiles(folder, "packed" if self._packed else "model")
        self._stored = hf_names.with_prefix(self.spec, self._files.names)
        if self.spec.tied and self._has_own_head():
            self.spec = dataclasses.replace(self.spec, tied=False)

    def _has_own_head(self) -> bool:
        """Whether a head is stored that is not the embedding, although config.json ties the two: then `transformers`
        takes the stored one. Most stored heads of tied models are copies."""
        head, embed = (self._stored.get(self._source(f"{name}.weight").name) for name in ("head", "embed"))
        if head is None or embed is None:
            return False
        shape = self._files.shape(embed)
        if len(shape) != 2:  # damaged, which is said where shapes are compared
            return False
        if self._files.shape(head) != shape or not {self._files.dtype(head), self._files.dtype(embed)} <= set(_FLOATS):
            return True
        stem = "packed" if (self.folder / "shoestring.json").is_file() else "model"
        states = [path.stat() for path in TensorFiles(self.folder, stem).paths]
        stamp = tuple((state.st_ino, state.st_size, state.st_mtime_ns) for state in states)
        return not _are_equal(self.folder.resolve(), stem, head, embed, stamp)

    def tokenizer(self) -> Tokenizer | None:
        from shoestring.model.tokenizer import Tokenizer

        known = ("tokenizer.json", "vocab.json", "vocab.bpe")
        return Tokenizer.from_file(self.folder) if any((self.folder / k).is_file() for k in known) else None

    def check_size(self) -> None:
        """Before the model is built: describing thousands of layers that are not there takes minutes."""
        if self.spec.num_layers > len(self._stored):
            raise UserError(
                f"{self.folder}: config.json asks for {self.spec.num_layers} layers, the weights are "
                f"{len(self._stored)} tensors; correct config.json or use the weights that belong to it"
            )

    def _source(self, name: str) -> hf_names.Source:
        return hf_names.source_of(self.spec, name, packed=self._packed)

    def check_names(self, expected: set[str]) -> None:
        missing = sorted(n for n in expected if self._source(n).name not in self._stored)
        if missing:
            remedy = "download the folder again or correct config.json"
            if missing == ["head.weight"]:
                remedy = "if the model ties it to the embedding, set tie_word_embeddings to true"
            raise UserError(
                f"{self.folder}: tensor {self._source(missing[0]).name!r} is missing "
                f"({len(missing)} in all) although config.json asks for it; {remedy}"
            )
        for name, stored in self._stored.items():
            if hf_names.is_constant(self.spec, name) or self._is_zero_bias(stored):
                continue
            if not set(hf_names.targets_of(self.spec, name, packed=self._packed)) & expected:
                raise UserError(
                    f"{self.folder}: tensor {stored!r} has no place in the model that config.json describes; "
                    "correct config.json (num_hidden_layers, biases, model_type?)"
                )

    def _is_zero_bias(self, stored: str) -> bool:
        """Whether it is a bias that does nothing: packers of older GPTQ folders gave every layer one, all zeros."""
        if not isinstance(self._files, GptqAwqFiles) or not stored.endswith(".bias"):
            return False
        return stored.removesuffix(".bias") in self._files.formats and not bool(self._files.read(stored).any())

    def shape(self, name: str) -> tuple[int, ...]:
        """Ours, not the stored one: transposed, and the rows that are ours."""
        source = self._source(name)
        shape = self._files.shape(self._stored[source.name])
        shape = shape[::-1] if source.transpose else shape
        if source.rows is None:
            return shape
        # A fused tensor of the wrong height shows as a wrong share of it.
        own = source.heads * (source.rows[1] - source.rows[0])
        return (shape[0] - (source.height - own), *shape[1:])

    def read(self, name: str, box: Box) -> Tensor:
        source = self._source(name)
        stored = self._stored[source.name]
        in_parts = name.rpartition(".")[2].startswith("weight_")
        if not in_parts and (dtype := self._files.dtype(stored)) not in _FLOATS:
            raise UserError(
                f"{self.folder}: tensor {stored!r} is stored as {dtype}; weights must be "
                f"{', '.join(_FLOATS)}: give the folder of the unquantized model"
            )
        if source.heads > 1:  # rows of every head: read whole, then cut
            whole = tuple(slice(0, n) for n in self._files.shape(stored))
            return source.take(self._files.read(stored, whole))[box.slices()]
        index = list(box.slices())
        if source.rows is not None:
            index[0] = slice(index[0].start + source.rows[0], index[0].stop + source.rows[0])
        if source.transpose:
            return self._files.read(stored, tuple(reversed(index))).t()
        return self._files.read(stored, tuple(index))


@lru_cache(maxsize=64)
def _are_equal(folder: Path, stem: str, first: str, second: str, stamp: tuple[tuple[int, ...], ...]) -> bool:
    """Whether two stored matrices of one shape are equal. A large vocabulary has gigabytes of them, and one command
    opens a folder several times: the answer holds as long as the files have this `stamp`."""
    files = TensorFiles(folder, stem)
    num_rows, width = files.shape(first)
    for start in range(0, num_rows, _COMPARED_ROWS):
        rows = (slice(start, min(start + _COMPARED_ROWS, num_rows)), slice(0, width))
        a, b = files.read(first, rows), files.read(second, rows)
        if not (a.dtype == b.dtype and _same_bytes(a, b)) and not torch.equal(a.float(), b.float()):
            return False
    return True


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """In words of 8 bytes: a seventh of the time that a comparison as fp32 takes."""
    x, y = (t.reshape(-1).view(torch.uint8) for t in (a, b))
    whole = x.numel() // 8 * 8
    return torch.equal(x[:whole].view(torch.int64), y[:whole].view(torch.int64)) and torch.equal(x[whole:], y[whole:])


def _open_source(path: str | Path, packed: bool = False) -> tuple[Path, _WeightSource]:
    found = find_model(path)
    if found.suffix != ".gguf" or not found.is_file():
        return found, _FolderSource(found)
    from shoestring.model.gguf import GgufSource

    return found, GgufSource(found, packed=packed)


def _with_generation_eos(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Chat models name their end-of-turn token only in generation_config.json."""
    file = folder / "generation_config.json"
    ids = token_ids(Fields(read_object(file), str(file)), "eos_token_id") if file.is_file() else ()
    new = [i for i in ids if i not in spec.eos_ids]
    if spec.eos_id is None and new:
        return dataclasses.replace(spec, eos_id=new[0], extra_eos_ids=tuple(new[1:]))
    return dataclasses.replace(spec, extra_eos_ids=(*spec.extra_eos_ids, *new))


def _foreign_packing(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of another library whose folders are read (spec_of_folder refuses the others)."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or (folder / "shoestring.json").is_file():
        return None
    if is_foreign(quantization):
        return quantization
    raise UserError(
        f"{folder / 'shoestring.json'} is missing, but config.json says the weights are packed; copy the whole folder"
    )


def is_foreign(quantization: dict[str, Any]) -> bool:
    """Whether `foreign_files` reads what config.json describes so."""
    return quantization.get("quant_method") in (METHOD, GPTQ, AWQ) or is_fp8(quantization)


def foreign_files(folder: Path, quantization: dict[str, Any]) -> ForeignFiles:
    """The tensors of a folder that another library has packed, under the names of our parts."""
    if is_fp8(quantization):
        return Fp8Files(folder, quantization)
    own = quantization.get("quant_method") in (GPTQ, AWQ)
    return GptqAwqFiles(folder, quantization) if own else CompressedFiles(folder, quantization)


def _our_formats(files: ForeignFiles, spec: ModelSpec) -> dict[str, dict[str, Any]]:
    formats = {}
    names = hf_names.with_prefix(spec, (f"{module}.weight_packed" for module in files.formats))
    for full_name, name in names.items():
        format = files.formats[name.rpartition(".")[0]]
        ours = hf_names.our_module(spec, full_name.rpartition(".")[0])
        if ours is None:
            raise UserError(f"{files.folder}: {name!r} is not a linear layer of a {spec.model_type} model")
        formats[ours] = format.to_json()
    return formats


def _read_packing(folder: Path, spec: ModelSpec) -> tuple[dict[str, dict[str, Any]], torch.dtype]:
    file = folder / "shoestring.json"
    if not file.is_file():
        return {}, torch.float32
    packing = read_object(file)
    if packing.get("version") != PACKED_VERSION:
        raise UserError(
            f"{file} has version {shown(packing.get('version'))}; this release reads {PACKED_VERSION}: update"
        )
    modules, dtype = packing.get("modules"), getattr(torch, str(packing.get("compute_dtype")), None)
    if not isinstance(modules, dict) or not isinstance(dtype, torch.dtype):
        raise UserError(
            f"{file} needs 'modules' (an object) and 'compute_dtype' (float32, bfloat16, ...); save it again"
        )
    formats = {}
    for name, entry in modules.items():
        ours = hf_names.our_module(spec, name)
        if ours is None or not isinstance(entry, dict) or not isinstance(entry.get("format"), dict):
            raise UserError(f"{file}: {name!r} is not a module of this model with a 'format'; save the folder again")
        formats[ours] = entry["format"]
    return formats, dtype


def _stored_state(model: Decoder) -> dict[str, Tensor]:
    """The tensors that are read from a file: all but what Formats derive from them."""
    format_state = {f"{name}.weight_{s}" for name, m in format_hosts(model) for s in m.state_names}
    return {n: t for n, t in model.state_dict(keep_vars=True).items() if n not in format_state}


def _check_shapes(model: Decoder, source: _WeightSource) -> None:
    state = _stored_state(model)
    source.check_names(set(state))
    for name, tensor in state.items():
        if source.shape(name) != tuple(tensor.shape):
            raise UserError(
                f"tensor {name!r}: the file has shape {list(source.shape(name))}, config.json says "
                f"{list(tensor.shape)}; correct config.json or use the weights that belong to it"
            )


def _fill(model: Decoder, source: _WeightSource) -> None:
    _check_shapes(model, source)
    for name, tensor in _stored_state(model).items():
        assert not tensor.is_meta, f"{name} is not materialised; filling it would do nothing"
        box = local_box(tensor)
        if box.size == 0:
            continue
        step = max(1, _PIECE * box.shape[0] // box.size) if box.shape else 1
        for start in range(box.start[0], box.stop[0], step) if box.shape else [0]:
            piece = box if not box.shape else box.from_row(start, min(start + step, box.stop[0]))
            data = source.read(name, piece)
            if data.dtype != tensor.dtype and not (data.is_floating_point() and tensor.is_floating_point()):
                raise UserError(
                    f"tensor {name!r} is stored as {data.dtype}, its format needs {tensor.dtype}; save it again"
                )
            with torch.no_grad():
                mine = local(tensor)
                (mine[start - box.start[0] :][: len(data)] if box.shape else mine).copy_(data)
    for _, linear in format_hosts(model):
        if linear.state_names:
            linear.init_state()
