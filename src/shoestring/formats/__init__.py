from shoestring.formats.base import Aux, Format, Parts
from shoestring.formats.convert import (
    ConvertReport,
    allocate_packed,
    bits_per_parameter,
    bypassed,
    convert,
    formats_of,
    init_state,
    keep_decoded,
    pack,
    packed_state,
    unpack,
    use_kernels,
)
from shoestring.formats.dense import Dense
from shoestring.formats.embedding import FormatEmbedding
from shoestring.formats.float_asym import FloatAsym
from shoestring.formats.fp8 import Fp8
from shoestring.formats.fp8_training import Fp8Training
from shoestring.formats.groups import GridFormat
from shoestring.formats.int_asym import IntAsym
from shoestring.formats.int_offset import IntOffset
from shoestring.formats.linear import FormatHost, FormatLinear
from shoestring.formats.registry import FORMATS, from_json, parse_format
from shoestring.formats.self_check import self_check

__all__ = [
    "FORMATS",
    "Aux",
    "ConvertReport",
    "Dense",
    "FloatAsym",
    "Format",
    "FormatEmbedding",
    "FormatHost",
    "FormatLinear",
    "Fp8",
    "Fp8Training",
    "GridFormat",
    "IntAsym",
    "IntOffset",
    "Parts",
    "allocate_packed",
    "bits_per_parameter",
    "bypassed",
    "convert",
    "formats_of",
    "from_json",
    "init_state",
    "keep_decoded",
    "pack",
    "packed_state",
    "parse_format",
    "self_check",
    "unpack",
    "use_kernels",
]
