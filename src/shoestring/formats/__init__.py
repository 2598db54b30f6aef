from shoestring.formats.base import Aux, Format, Parts
from shoestring.formats.convert import (
    ConvertReport,
    bits_per_weight,
    convert,
    formats_of,
    init_state,
    pack,
    packed_state,
    prepare_packed,
    unpack,
)
from shoestring.formats.dense import Dense
from shoestring.formats.float_asym import FloatAsym
from shoestring.formats.int_asym import IntAsym
from shoestring.formats.linear import FormatLinear
from shoestring.formats.registry import FORMATS, from_json, parse_format

__all__ = [
    "FORMATS",
    "Aux",
    "ConvertReport",
    "Dense",
    "FloatAsym",
    "Format",
    "FormatLinear",
    "IntAsym",
    "Parts",
    "bits_per_weight",
    "convert",
    "formats_of",
    "from_json",
    "init_state",
    "pack",
    "packed_state",
    "parse_format",
    "prepare_packed",
    "unpack",
]
