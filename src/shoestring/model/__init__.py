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
