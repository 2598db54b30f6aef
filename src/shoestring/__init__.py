"""Shoestring: train, shrink and serve language models on a shoestring.

Importing this package does not import torch; the public names below are loaded when first touched.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# name: where it is. __init__.pyi says the same to type checkers.
_PUBLIC = {
    "UserError": "shoestring.errors",
    "perplexity": "shoestring.evals.perplexity",
    "Dense": "shoestring.formats",
    "FloatAsym": "shoestring.formats",
    "Format": "shoestring.formats",
    "FormatLinear": "shoestring.formats",
    "IntAsym": "shoestring.formats",
    "IntOffset": "shoestring.formats",
    "convert": "shoestring.formats",
    "pack": "shoestring.formats",
    "parse_format": "shoestring.formats",
    "unpack": "shoestring.formats",
    "quantize_activations": "shoestring.formats.int8_activations",
    "Decoder": "shoestring.model",
    "LoadedModel": "shoestring.model",
    "ModelSpec": "shoestring.model",
    "Tokenizer": "shoestring.model",
    "load_model": "shoestring.model",
    "save_model": "shoestring.model",
    "Completion": "shoestring.serve",
    "DraftModel": "shoestring.serve",
    "Engine": "shoestring.serve",
    "NgramDrafter": "shoestring.serve",
    "Sampling": "shoestring.serve",
    "open_drafter": "shoestring.serve",
}

# Formats of methods, by their entry points.
_OF_METHODS = {"Sparse24": ("formats", "sparse24"), "Stacked": ("stored_formats", "stacked")}

__all__ = ["__version__", *_PUBLIC, *_OF_METHODS]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if name in _OF_METHODS:
        return import_module("shoestring.plugins").load(*_OF_METHODS[name])
    raise AttributeError(f"module 'shoestring' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
