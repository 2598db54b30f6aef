"""The short spelling of 2:4 formats, behind `parse_format`.

sparse24[:tile|:soft][:held][:mvue][:fp8]      stands alone, or before a `+` and the kind of the kept values
sparse24+int4:g64                              Stacked
sparse24+int4:g64+slorb16[:trained]            a branch beside either
"""

from __future__ import annotations

from typing import Any

from shoestring.errors import UserError, suggest
from shoestring.formats.base import Format
from shoestring.formats.registry import parse_format
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.slorb import Slorb
from shoestring.methods.sparse24.stacked import Stacked

OPTIONS: dict[str, dict[str, Any]] = {
    "tile": {"select": "tile"},
    "soft": {"select": "soft"},
    "held": {"hold_mask": True},
    "mvue": {"weight_grad": "mvue"},
    "fp8": {"precision": "fp8"},
}


def parse(text: str) -> Format:
    pruned, plus, branch = text.strip().lower().rpartition("+slorb")
    if plus:
        return _parse_branch(text, parse(pruned), branch)
    pruning, plus, values = text.strip().partition("+")
    first = _parse_pruning(pruning)
    return Stacked(first, parse_format(values)) if plus else first


def _parse_pruning(text: str) -> Sparse24:
    settings: dict[str, Any] = {}
    for option in text.strip().lower().split(":")[1:]:
        if option not in OPTIONS:
            names = list(OPTIONS)
            raise UserError(
                f"Format {text!r} has no option {option!r}: sparse24 has {', '.join(names)}.{suggest(option, names)}"
            )
        fields = OPTIONS[option]
        if fields.keys() & settings.keys():
            raise UserError(f"Format {text!r} says its {', '.join(fields)} twice; leave out all but one.")
        settings.update(fields)
    return Sparse24(**settings)


def _parse_branch(text: str, first: Format, branch: str) -> Format:
    number, _, option = branch.partition(":")
    if not number.isdigit() or option not in ("", "trained") or not isinstance(first, Sparse24 | Stacked):
        raise UserError(f"Format {text!r}: write for example sparse24+slorb16 or sparse24+slorb16:trained.")
    return Slorb(first, int(number), option or "sum")
