"""A model in the layout of its next reader: `shoestring export`.

Each layout has a file of its own: save.py (dense and packed folders), compressed_tensors.py, fp8_folder.py,
gguf_write.py. Here is only the choice, and what to say about the result. docs/guides/export.md has the table
of which Format fits where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shoestring.errors import UserError
from shoestring.formats import IntAsym, formats_of, unpack
from shoestring.model.adapter_folder import merge_adapter_, read_adapter
from shoestring.model.compressed_tensors import save_compressed_tensors
from shoestring.model.export_names import AUTO, FP8, GGUF, READERS, check_options, pick_layout
from shoestring.model.folder import LoadedModel, load_model, read_spec, weight_files
from shoestring.model.fp8_folder import save_fp8
from shoestring.model.gguf_write import SENSITIVE, WrittenTensor, least_bits, save_gguf
from shoestring.model.save import save_model
from shoestring.model.spec import ModelSpec
from shoestring.paths import expand, find_model
from shoestring.state.files import check_room


@dataclass(frozen=True)
class Exported:
    path: Path
    layout: str
    source: Path  # the folder or file that was read, not its weights: one model at a time is in memory
    spec: ModelSpec
    note: str | None = None  # what the reader computes otherwise, or does not load
    tensors: Sequence[WrittenTensor] = ()  # of a GGUF file

    @property
    def reader(self) -> str:
        return READERS[self.layout]


def _note(layout: str, loaded: LoadedModel, tensors: Sequence[WrittenTensor]) -> str | None:
    spec = loaded.spec
    window = spec.sliding_window
    if layout == GGUF and spec.model_type in ("mistral", "mixtral", "phi3") and window:
        return f"llama.cpp ignores the sliding window of {window:,} tokens: it computes longer texts otherwise"
    ends = [end for end in (loaded.model.embed, loaded.model.head) if end is not None and end.packed]
    if ends and any(t.kind == "F32" and t.name in SENSITIVE for t in tensors):
        return (
            f"no smaller type holds the embedding ({ends[0].format.label}) bit for bit, so it is F32; --type Q8_0 "
            "or a smaller one rounds it to Q8_0"
        )
    experts = [f for name, f in formats_of(loaded.model).items() if ".experts." in name]
    if layout == "compressed-tensors" and not all(isinstance(f, IntAsym) and f.symmetric for f in experts):
        return "transformers 5 loads packed experts only where they are symmetric: quantize with format=int4:sym"
    return None


def export_model(
    source: str | Path,
    out: Path,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
    kind: str = AUTO,
    adapter: Path | None = None,
) -> Exported:
    """Write `source` to `out`. `dtype`: of weights that are not packed; `kind`: of the matrices of a GGUF file;
    `adapter`: to be merged, into packed layers by quantizing them again unless the layout is dense."""
    layout = pick_layout(out, layout)
    kind = check_options(layout, dtype is not None, kind)  # before gigabytes are read
    check_room(expand(out), _least_bytes(source, layout, dtype or torch.bfloat16, kind))
    loaded = load_as_written(source, layout)
    if adapter is not None:
        weights = read_adapter(adapter, loaded.model).weights
        merge_adapter_(loaded.model, weights, requantize=not weights.keys().isdisjoint(formats_of(loaded.model)))
    model, tokenizer, tensors = loaded.model, loaded.tokenizer, list[WrittenTensor]()
    if layout == GGUF:
        tensors = save_gguf(out, model, tokenizer, kind=kind)
    elif layout == "compressed-tensors":
        save_compressed_tensors(out, model, tokenizer, dtype=dtype)
    elif layout == FP8:
        save_fp8(out, model, tokenizer, dtype=dtype)
    else:
        save_model(out, model, tokenizer, dtype=dtype or torch.bfloat16)
    return Exported(out, layout, loaded.path, loaded.spec, _note(layout, loaded, tensors), tensors)


def _least_bytes(source: str | Path, layout: str, dtype: torch.dtype, kind: str) -> int:
    """What the result takes at least, by headers alone."""
    folder = find_model(source)
    if layout in ("packed", "compressed-tensors"):
        stored = sum(path.stat().st_size for path in weight_files(folder))
        is_packed = (folder / "shoestring.json").is_file()
        return stored if layout == "packed" and is_packed else stored // 2 if is_packed else 0
    bits = {"dense": 8.0 * dtype.itemsize, FP8: 8.0}.get(layout) or least_bits(kind)
    return int(read_spec(folder)[0].num_params() * bits / 8)


def load_as_written(source: str | Path, layout: str) -> LoadedModel:
    """The source with what the layout cannot hold unpacked."""
    loaded = load_model(source)
    if layout in ("compressed-tensors", FP8) and loaded.model.embed.packed:
        # Readers of these layouts take packed layers inside the blocks, and no packed embedding and head.
        for end in (loaded.model.embed, loaded.model.head):
            if end is not None and end.packed:
                end.unpack()
    if layout == "dense":
        unpack(loaded.model)
    elif layout == "packed" and not formats_of(loaded.model):
        raise UserError(
            f"{source} has no packed layer: quantize it first, for example `shoestring run shrink/ptq`, or use --as "
            "dense"
        )
    return loaded
