"""What `shoestring export` can write, by name: wrong ones are told before torch is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shoestring.errors import UserError, suggest

GGUF, FP8 = "gguf", "fp8"
READERS = {
    "dense": "transformers loads it with AutoModelForCausalLM",
    "compressed-tensors": "vLLM loads it, and transformers where the package compressed-tensors is installed",
    FP8: "vLLM and transformers load it; they usually round activations to FP8 as well",
    "packed": "shoestring loads it",
    GGUF: "llama.cpp and what is built on it load it",
}
AUTO = "auto"
# What a model can be written as, without llama.cpp; the order is that of their sizes.
KINDS = ("MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")
# ... and those that llama.cpp's quantizer makes, with its numbers for them.
LLAMA_TYPES = {
    **{"Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17},
    **{"Q6_K": 18, "IQ3_XS": 22, "IQ4_NL": 25, "IQ3_S": 26, "IQ3_M": 27, "IQ4_XS": 30},
}
NEEDS_LLAMA = "pip install llama-cpp-python (it compiles llama.cpp, which takes some minutes)"


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
    if layout in ("gptq", "awq"):
        raise UserError(
            f"--as {layout} is not written any more (such folders are still read): use --as compressed-tensors, which "
            "vLLM and transformers load"
        )
    if layout not in READERS:
        raise UserError(f"--as {layout!r} is not possible: use {', '.join(READERS)}.{suggest(layout, list(READERS))}")
    if (layout == GGUF) != (out.suffix == ".gguf"):
        raise UserError(f"--as {layout} and {out} do not fit: a GGUF file is called OUT.gguf, a folder is not")
    return layout


def check_kind(kind: str) -> str:
    """The name as llama.cpp spells it; UserError for one that cannot be written."""
    known = [AUTO, *KINDS, *LLAMA_TYPES]
    found = next((k for k in known if k.lower() == kind.lower()), None)
    if found is None:
        raise UserError(f"--type {kind!r} cannot be written: use {', '.join(known)}.{suggest(kind, known)}")
    if found in LLAMA_TYPES and importlib.util.find_spec("llama_cpp") is None:
        raise UserError(f"--type {found} is made by llama.cpp's own quantizer: {NEEDS_LLAMA}")
    return found


def check_options(layout: str, has_dtype: bool, kind: str) -> str:
    """The kind as llama.cpp spells it; UserError for options that do not belong to the layout."""
    if kind != AUTO and layout != GGUF:
        raise UserError(f"--type {kind} is for GGUF files; a folder takes --as and --dtype")
    if has_dtype and layout == GGUF:
        raise UserError("--dtype is for folders; a GGUF file takes --type, for example --type BF16")
    return check_kind(kind)
