"""Shoestring: train, shrink and serve language models on a shoestring.

Importing this package does not import torch; the public names below are loaded when first touched.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "convert": "shoestring.formats",
    "pack": "shoestring.formats",
    "unpack": "shoestring.formats",
    "Dense": "shoestring.formats",
    "IntAsym": "shoestring.formats",
    "FloatAsym": "shoestring.formats",
    "FormatLinear": "shoestring.formats",
    "parse_format": "shoestring.formats",
    "Decoder": "shoestring.model",
    "ModelSpec": "shoestring.model",
    "load_model": "shoestring.model",
    "save_model": "shoestring.model",
    "Engine": "shoestring.serve",
    "UserError": "shoestring.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'shoestring' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
