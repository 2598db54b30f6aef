"""How the core's Formats are written, without torch: `int4:g64` as settings, and settings as `int4:g64`.

A command checks the names that it is given before it imports torch, and `inspect` says what a folder holds without it.
formats/registry.py makes Formats of the settings. Left out: spellings of methods and of other packages, which their
own Formats read (`Format.parse`); of these only the first word is known here.
"""

from __future__ import annotations

import re
from typing import Any

from shoestring.errors import UserError, suggest
from shoestring.plugins import names

TABLES = ("nf2", "nf3", "nf4", "fp3", "fp4")
INTEGERS = ("int2", "int3", "int4", "int8")
CORE = ("dense", *INTEGERS, *TABLES, "fp8")
SCALES = ("float16", "bfloat16")
FP8_SCALES = ("float32", "bfloat16")
FP8_TRAINING = {"train": "e5m2", "train-e4m3": "e4m3"}  # by what gradients are rounded to
GRIDS = ("derived", "fixed", "learned")
CODES_PER_RUN = 8  # of one row lie together in kernels/lowbit/packing.py


def check_name(text: str) -> None:
    """UserError where no Format is written so, as far as that can be told without loading one."""
    if re.split("[:+]", text.strip().lower())[0] not in others():
        parse(text)


def check_rules(text: str) -> list[tuple[str, str]]:
    """'*.mlp.*=nf3;*.attn.*=int4' -> [(glob, name), ...], the names checked."""
    rules = []
    for item in text.split(";"):
        glob, equals, name = item.strip().rpartition("=")
        if not equals:
            raise UserError(
                f"rules={text!r}: {item.strip()!r} is not glob=format; write for example *.mlp.*=nf3;*=int4"
            )
        check_name(name)
        rules.append((glob.strip(), name))
    return rules


def others() -> tuple[str, ...]:
    """The first words of Formats outside this module."""
    return names("formats")


def parse(text: str) -> dict[str, Any]:
    """What `Format.to_json` gives, as far as the text says it; the rest are defaults."""
    first, plus, _ = text.strip().lower().partition("+")
    if plus and first.split(":")[0] in CORE:
        raise UserError(f"Format {text!r}: only {', '.join(others())} can stand before a +.")
    head, *options = text.strip().lower().split(":")
    if head not in CORE:
        known = [*CORE, *others()]
        raise UserError(f"There is no format {text!r}: use {', '.join(known)}.{suggest(head, known)}")
    settings: dict[str, Any] = {}
    for option in options:
        fields = _option(head, option)
        if fields is None:
            raise UserError(
                f"Format {text!r} has no option {option!r}: write for example int4:g64, nf3:s1:g32 or dense."
            )
        if "gradient" in fields.keys() | settings.keys() and len(options) > 1:
            raise UserError(f"Format {text!r}: fp8:train has no further options; leave out the others.")
        if fields.keys() & settings.keys():
            raise UserError(f"Format {text!r} says its {', '.join(fields)} twice; leave out all but one.")
        settings.update(fields)
    if head in ("dense", "fp8"):
        return {"name": head, **settings}
    if "group" in settings:
        check_group(settings["group"])
    if head in TABLES:
        return {"name": "float_asym", "table": head, **settings}
    if not settings.pop("offset", False):
        return {"name": "int_asym", "bits": int(head[3:]), **settings}
    if "symmetric" in settings:
        raise UserError(
            f"Format {text!r}: a grid from the smallest weight on is not symmetric; leave out 'sym' or 'min'."
        )
    return {"name": "int_offset", "bits": int(head[3:]), **settings}


def _option(head: str, option: str) -> dict[str, Any] | None:
    """The field that an option sets, or None."""
    letter, number = option[:1], option[1:]
    if head == "dense":
        return None
    if head == "fp8":
        if option in FP8_TRAINING:
            return {"name": "fp8_train", "gradient": FP8_TRAINING[option]}
        if option in FP8_SCALES:
            return {"scale_dtype": option}
        return {"group": int(number)} if letter == "b" and number.isdigit() else None
    if option in SCALES:
        return {"scale_dtype": option}
    if option in ("fixed", "learned"):
        return {"grid": option}
    if option == "per-channel":
        return {"group": 0}
    if option == "sym" and head in INTEGERS:
        return {"symmetric": True}
    if option == "min" and head in INTEGERS:
        return {"offset": True}
    if letter == "g" and number.isdigit():
        return {"group": int(number)}
    if letter == "s" and number.isdigit() and head in TABLES:
        return {"scales": int(number)}
    return None


def check_group(group: int) -> None:
    if group < 0 or group % CODES_PER_RUN:
        raise UserError(
            f"Group {group} is not possible: use a multiple of {CODES_PER_RUN} (32, 64, 128), "
            "or 0 for one group per row."
        )


def label(settings: dict[str, Any]) -> str | None:
    """The spelling of what `to_json` gave; None for what is no Format of the core with all of its fields."""
    match settings:
        case {"name": "dense"}:
            return "dense"
        case {"name": "fp8", "group": int(group), "scale_dtype": str(dtype)} if dtype in FP8_SCALES:
            ends = [*([f"b{group}"] if group else []), *([dtype] if dtype != FP8_SCALES[0] else [])]
            return ":".join(["fp8", *ends])
        case {"name": "int_asym", "bits": int(bits), "symmetric": bool(symmetric)}:
            head = f"int{bits}:sym" if symmetric else f"int{bits}"
        case {"name": "int_offset", "bits": int(bits)}:
            head = f"int{bits}:min"
        case {"name": "float_asym", "table": str(table), "scales": int(scales)}:
            head = f"{table}:s{scales}"
        case _:
            return None
    match settings:
        case {"group": int(group), "scale_dtype": str(dtype), "grid": str(grid)}:
            ends = [f"g{group}", *([dtype] if dtype != "float16" else []), *([grid] if grid != "derived" else [])]
            return ":".join([head, *ends])
    return None
