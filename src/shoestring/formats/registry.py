"""Formats by name: the short spelling of a command line, and the JSON of packed checkpoints.

    parse_format("int4")  parse_format("nf3:g128")  parse_format("nf3:s1:g32")  parse_format("dense")
    parse_format("int8:sym:g0")  parse_format("int4:min:g32")  parse_format("fp8")  parse_format("fp8:b128:bfloat16")

`parse_format(f.label) == f` and `from_json(f.to_json()) == f` for every Format. A Format of a method or of your own
package is found by its entry point in `shoestring.formats` (plugins.py), and reads its own spelling (`Format.parse`).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from shoestring import format_names, plugins
from shoestring.errors import UserError, shown, suggest
from shoestring.formats.base import Format
from shoestring.formats.dense import Dense
from shoestring.formats.float_asym import FloatAsym
from shoestring.formats.fp8 import Fp8
from shoestring.formats.fp8_training import Fp8Training
from shoestring.formats.int_asym import IntAsym
from shoestring.formats.int_offset import IntOffset

FORMATS: dict[str, type[Format]] = {f.name: f for f in (Dense, IntAsym, IntOffset, FloatAsym, Fp8, Fp8Training)}
SPELLINGS = format_names.CORE


def parse_format(text: str) -> Format:
    """`<kind>[:sym|:min][:g<group>][:s<scales>][:fixed|:learned]`: kind as in SPELLINGS, sym and min (IntOffset) for
    int only, g0 or per-channel for one group per row, scales for nf and fp only, fixed or learned for a grid that is
    kept as state. `fp8[:b128][:bfloat16]`: a scale per row, or per block of 128 x 128.
    `fp8:train`, `fp8:train-e4m3`: products in FP8 while training, by what gradients are rounded to.
    """
    added = re.split("[:+]", text.strip().lower())[0]
    if added not in SPELLINGS and added in plugins.names("formats"):
        return plugins.load("formats", added).parse(text.strip())
    settings = format_names.parse(text)
    return FORMATS[settings.pop("name")](**settings)


_JSON_KINDS = {dict: "an object", bool: "true or false", int: "a whole number", str: "a text"}


def from_json(data: dict[str, Any]) -> Format:
    """The Format that `to_json` described."""
    settings = dict(data)
    name = settings.pop("name", None)
    kind_of = format_class(name)
    known = [f.name for f in dataclasses.fields(kind_of)]
    for key in settings:
        if key not in known:
            raise UserError(f"Format {name!r} has no field {key!r}: it has {', '.join(known)}.{suggest(key, known)}")
    for field in dataclasses.fields(kind_of):
        value = settings.get(field.name, field.default)
        kind = dict if field.name in kind_of.nested else type(field.default)
        if value is dataclasses.MISSING or (kind in _JSON_KINDS and type(value) is not kind):
            given = "is missing" if value is dataclasses.MISSING else f"must be {_JSON_KINDS[kind]}, not {shown(value)}"
            raise UserError(f"Format {name!r}: {field.name} {given}; save the model again.")
    nested = {k: from_json(v) if isinstance(v, dict) else v for k, v in settings.items()}
    return kind_of(**nested)


def format_class(name: object) -> type[Format]:
    """By the name that packed models store."""
    if isinstance(name, str) and name in FORMATS:
        return FORMATS[name]
    groups = {added: group for group in ("formats", "stored_formats") for added in plugins.names(group)}
    if isinstance(name, str) and name in groups:
        found: type[Format] = plugins.load(groups[name], name)
        return found
    known = [*FORMATS, *groups]
    raise UserError(
        f"There is no format named {shown(name)}: this version knows {', '.join(known)}.{suggest(str(name), known)}"
    )
