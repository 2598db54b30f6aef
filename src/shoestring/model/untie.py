"""A head of its own for a model that uses its embedding as the head.

On a small model the head is a quarter of all weights, and a tied one cannot be packed: the embedding needs it
whole. `untie_head` gives the model a second, packed copy.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shoestring.errors import UserError
from shoestring.formats import Format, FormatLinear
from shoestring.model.transformer import Decoder


@torch.no_grad()
def untie_head(model: Decoder, format: Format) -> None:
    """Make the head a packed layer in `format`, in place; the embedding stays as it is."""
    if model.head is None:
        weight = model.embed.weight
        if hasattr(weight, "placements"):
            raise UserError("the head of a sharded model cannot be untied: untie it before sharding")
        head = FormatLinear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = torch.nn.Parameter(weight.detach().clone())
        model.head, model.spec = head, replace(model.spec, tied=False)
    if model.head.packed:
        raise UserError(f"the head is packed as {model.head.format.label} already")
    model.head.set_format(format)
    model.head.pack(model.compute_dtype)
