"""The parts of a model that no method chooses grids for: embedding, output head, norms, biases.

On a small model the embedding is a third of all bytes. It is rounded to nearest, by default to 8 bits with one grid per
row, which costs next to nothing; a tied head is the embedding itself. The grid is symmetric: GGUF's Q8_0 holds it bit
for bit. What no Format holds is kept in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoestring.formats import Dense, parse_format
from shoestring.formats.convert import Rule, check_fits, format_host, spells_out
from shoestring.model import Decoder

EMBED = "int8:sym:g0"
EMBED_HELP = (
    "format of the embedding and the output head: int8:sym:g0 (one grid per row), int4:g64, ...; dense keeps 16 bits"
)


def with_embedding(rules: Sequence[Rule], embed: str, model: Decoder) -> list[Rule]:
    """The rules, and `embed` for the embedding and an output head of its own, where no rule spells these out."""
    format = parse_format(embed)
    ends = ["embed"] if model.head is None else ["embed", "head"]
    wanted = [name for name in ends if not any(spells_out(glob, name) for glob, _ in rules)]
    return [*rules, *((name, format) for name in wanted if not isinstance(format, Dense))]


def check_embedding(model: Decoder, rules: Sequence[Rule], embed: str) -> None:
    """UserError where embedding and head cannot hold `embed`: before a training, not after it."""
    for name, format in with_embedding(rules, embed, model)[len(rules) :]:
        check_fits(name, format_host(model, name), format)


@torch.no_grad()
def give_embedding(model: Decoder, rules: Sequence[Rule], embed: str) -> None:
    """Give a trained, maybe sharded model the Formats of `with_embedding` that its rules lack, before it is packed."""
    for name, format in with_embedding(rules, embed, model)[len(rules) :]:
        format_host(model, name).set_format(format)
