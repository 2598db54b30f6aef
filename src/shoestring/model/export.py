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

from shoestring.errors import UserError, suggest
from shoestring.formats import IntAsym, formats_of, unpack
from shoestring.model.compressed_tensors import save_compressed_tensors
from shoestring.model.folder import LoadedModel, load_model, read_spec, weight_files
from shoestring.model.fp8_folder import METHOD as FP8
from shoestring.model.fp8_folder import save_fp8
from shoestring.model.gguf_blocks import KINDS, bits_of
from shoestring.model.gguf_write import AUTO, SENSITIVE, WrittenTensor, check_kind, save_gguf
from shoestring.model.gptq_awq import AWQ, GPTQ
from shoestring.model.save import save_model
from shoestring.model.spec import ModelSpec
from shoestring.paths import expand, find_model
from shoestring.state.files import check_room

GGUF = "gguf"
READERS = {
    "dense": "transformers loads it with AutoModelForCausalLM",
    "compressed-tensors": "vLLM loads it, and transformers where the package compressed-tensors is installed",
    FP8: "vLLM and transformers load it; they usually round activations to FP8 as well",
    "packed": "shoestring loads it",
    GGUF: "llama.cpp and what is built on it load it",
}


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


def pick_layout(out: Path, layout: str | None) -> str:
    """What was asked for; a name that ends in .gguf asks for GGUF."""
    if layout is None:
        return GGUF if out.suffix == ".gguf" else "dense"
    if layout == "speculators":
        raise UserError(
            "--as speculators is for heads that read the target's hidden states (such as EAGLE); a drafter made by "
            "shrink/drafter is a model of its own: write it --as dense and give vLLM the folder as the model of "
            "speculative_config"
        )
    if layout in (GPTQ, AWQ):
        raise UserError(
            f"--as {layout} is not written any more (such folders are still read): use --as compressed-tensors, which "
            "vLLM and transformers load"
        )
    if layout not in READERS:
        raise UserError(f"--as {layout!r} is not possible: use {', '.join(READERS)}.{suggest(layout, list(READERS))}")
    if (layout == GGUF) != (out.suffix == ".gguf"):
        raise UserError(f"--as {layout} and {out} do not fit: a GGUF file is called OUT.gguf, a folder is not")
    return layout


def export_model(
    source: str | Path, out: Path, layout: str | None = None, dtype: torch.dtype | None = None, kind: str = AUTO
) -> Exported:
    """Write `source` to `out`. `dtype`: of weights that are not packed; `kind`: of the matrices of a GGUF file."""
    layout = pick_layout(out, layout)
    if kind != AUTO and layout != GGUF:
        raise UserError(f"--type {kind} is for GGUF files; a folder takes --as and --dtype")
    if dtype is not None and layout == GGUF:
        raise UserError("--dtype is for folders; a GGUF file takes --type, for example --type BF16")
    kind = check_kind(kind)  # before gigabytes are read
    check_room(expand(out), _least_bytes(source, layout, dtype or torch.bfloat16, kind))
    loaded = load_as_written(source, layout)
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
    """What the result takes at least, by headers alone; 0 where only the weights decide."""
    folder = find_model(source)
    if layout == "dense":
        return read_spec(folder)[0].num_params() * dtype.itemsize
    if layout == "packed" and (folder / "shoestring.json").is_file():
        return sum(path.stat().st_size for path in weight_files(folder))
    if layout == GGUF and kind in KINDS:
        return int(read_spec(folder)[0].num_params() * bits_of(kind) / 8)
    return 0


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
