from shoestring.formats.base import Aux, Format, Parts
from shoestring.formats.dense import Dense
from shoestring.formats.linear import FormatLinear

__all__ = ["Aux", "Dense", "Format", "FormatLinear", "Parts"]
