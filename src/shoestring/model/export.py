"""One model folder, rewritten in the layout that its next reader wants.

    dense               16- or 32-bit weights: transformers, vLLM, everything
    compressed-tensors  4- and 8-bit integers: vLLM, and transformers with the package compressed-tensors
    packed              every Format: this package only

docs/export.md has the table of which Format fits where. The source is never touched.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shoestring.errors import UserError, suggest
from shoestring.formats import formats_of, unpack
from shoestring.model.compressed_tensors import save_compressed_tensors
from shoestring.model.folder import load_model
from shoestring.model.save import save_model

READERS = {
    "dense": "transformers loads it with AutoModelForCausalLM",
    "compressed-tensors": "vLLM loads it, and transformers where the package compressed-tensors is installed",
    "packed": "shoestring loads it",
}


def export_model(source: str | Path, out: Path, layout: str, dtype: torch.dtype | None = None) -> str:
    """Write `source` to the folder `out`; returns who reads it. `dtype`: of weights that are not packed."""
    if layout not in READERS:
        raise UserError(
            f"--as {layout!r} is not possible: use {', '.join(READERS)}.{suggest(layout, list(READERS))}"
        )
    loaded = load_model(source)
    if layout == "compressed-tensors":
        save_compressed_tensors(out, loaded.model, loaded.tokenizer, dtype=dtype)
    elif layout == "packed":
        if not formats_of(loaded.model):
            raise UserError(
                f"{source} has no packed layer: quantize it first, for example `shoestring run shrink/ptq`, or use "
                "--as dense"
            )
        save_model(out, loaded.model, loaded.tokenizer, dtype=dtype or torch.bfloat16)
    else:
        unpack(loaded.model)
        save_model(out, loaded.model, loaded.tokenizer, dtype=dtype or torch.bfloat16)
    return READERS[layout]
