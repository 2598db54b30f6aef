"""The public names for type checkers; at run time __init__.py loads each when it is first used."""

from shoestring.errors import UserError
from shoestring.evals.perplexity import perplexity
from shoestring.formats import (
    Dense,
    FloatAsym,
    Format,
    FormatLinear,
    IntAsym,
    IntOffset,
    convert,
    pack,
    parse_format,
    unpack,
)
from shoestring.formats.int8_activations import quantize_activations
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.stacked import Stacked
from shoestring.model import Decoder, LoadedModel, ModelSpec, Tokenizer, load_model, save_model
from shoestring.serve import Completion, DraftModel, Engine, NgramDrafter, Sampling, open_drafter

__version__: str

__all__ = [
    "Completion",
    "Decoder",
    "Dense",
    "DraftModel",
    "Engine",
    "FloatAsym",
    "Format",
    "FormatLinear",
    "IntAsym",
    "IntOffset",
    "LoadedModel",
    "ModelSpec",
    "NgramDrafter",
    "Sampling",
    "Sparse24",
    "Stacked",
    "Tokenizer",
    "UserError",
    "__version__",
    "convert",
    "load_model",
    "open_drafter",
    "pack",
    "parse_format",
    "perplexity",
    "quantize_activations",
    "save_model",
    "unpack",
]
