"""The public names, each loaded when it is first used: `inspect` reads headers with modules of this folder that need no
torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoestring.model.folder import LoadedModel, load_into, load_model, read_spec, save_model
    from shoestring.model.spec import ModelSpec, RopeScaling
    from shoestring.model.tokenizer import Tokenizer
    from shoestring.model.transformer import Decoder, Head

__all__ = [
    "Decoder",
    "Head",
    "LoadedModel",
    "ModelSpec",
    "RopeScaling",
    "Tokenizer",
    "load_into",
    "load_model",
    "read_spec",
    "save_model",
]
_ELSEWHERE = {"ModelSpec": "spec", "RopeScaling": "spec", "Tokenizer": "tokenizer"}
_ELSEWHERE |= {"Decoder": "transformer", "Head": "transformer"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"shoestring.model.{_ELSEWHERE.get(name, 'folder')}"), name)
    raise AttributeError(f"module 'shoestring.model' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
