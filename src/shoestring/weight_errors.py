"""How far the weights of a shrunk model are from those of the model it was made from, layer by layer.

The relative error of a layer is ||W' - W|| / ||W|| (Frobenius), W' what the layer multiplies with and W the
reference's weight: 0.1 means that a tenth of the weight's length is error. A method that folds scales into
norms (AWQ) or trains on moves weights without harm, so this is a check of rounding, not of quality; quality is
`shoestring eval`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoestring.errors import UserError
from shoestring.model.hf_names import hf_module
from shoestring.model.save import linears
from shoestring.report import Table


@dataclass(frozen=True)
class WeightError:
    name: str  # Hugging Face's
    format: str
    bits: float  # per weight, scales and zeros included
    error: float


def weight_errors(path: str | Path, reference: str | Path) -> list[WeightError]:
    """One line per linear layer of the model at `path`."""
    from shoestring.model import load_model

    source, model = load_model(reference).model, load_model(path).model
    theirs = dict(linears(source))
    found = []
    for name, layer in linears(model):
        other = theirs.get(name)
        if other is None and name == "head":  # a tied head was given a copy of its own
            want = source.embed.weight.detach()
        elif other is None:
            raise UserError(f"{reference} has no layer {name}: it is not the model that {path} was made from")
        else:
            want = other.effective_weight(torch.float32).detach()
        got = layer.effective_weight(torch.float32).detach()
        if got.shape != want.shape:
            raise UserError(
                f"{name} is {list(got.shape)} in {path} and {list(want.shape)} in {reference}: another model"
            )
        dtype = torch.bfloat16 if layer.weight is None else layer.weight.dtype
        bits = layer.format.bits_per_weight(layer.shape, dtype)
        size = float(want.norm())
        error = float((got - want).norm())
        name = hf_module(model.spec, name)
        found.append(WeightError(name, layer.format.label, bits, error / size if size else error))
    return found


def errors_table(errors: list[WeightError], path: str | Path, reference: str | Path) -> Table:
    rows: list[list[Any]] = [[e.name, e.format, round(e.bits, 4), e.error] for e in errors]
    return Table(
        f"{path} against {reference}", ["layer", "format", "bits per weight", "relative error"], rows
    )
