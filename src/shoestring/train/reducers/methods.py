"""The names of compressors on the command line, and which tensors they apply to.

Tensors of one dim (norms, biases) are always sent exactly: they are few bytes, and every layer depends on them.
Embeddings get at least int8: their gradients are nonzero in other rows on each replica and in each step. `demo` is an
optimizer and takes all tensors.
"""

from __future__ import annotations

import math

from torch import Tensor

from shoestring import plugins
from shoestring.errors import UserError, shown, suggest
from shoestring.train.reducers.compressor import Compressor
from shoestring.train.reducers.demo import DeMo
from shoestring.train.reducers.low_rank import PowerSGD
from shoestring.train.reducers.quantizers import BF16, INT4, INT8, PLAIN, QSGD, TERNGRAD, Quantizer
from shoestring.train.reducers.sparsifiers import ArcTopK, TopKSparsifier

FIXED: dict[str, Compressor] = {
    "plain": PLAIN, "bf16": BF16, "int8": INT8, "int4": INT4, "terngrad": TERNGRAD, "qsgd": QSGD,
}  # fmt: skip
NAMES = (*FIXED, "topk", "arc-topk", "powersgd", "demo")


def parse_compressor(text: str) -> Compressor:
    """topk:0.01 and the like; UserError says what is possible."""
    name, colon, value = text.partition(":")
    if name not in NAMES:
        return _added(text, name, value)
    if name in FIXED:
        if colon:
            raise UserError(f"reducer={shown(text)}: {name} takes no number; write reducer={name}")
        return FIXED[name]
    if name in ("topk", "arc-topk"):
        ratio = _number(text, value or "0.01", "a share of the values, such as 0.01")
        if not 0 < ratio <= 1:
            raise UserError(f"reducer={shown(text)}: the share of values must be above 0 and at most 1")
        return TopKSparsifier(ratio) if name == "topk" else ArcTopK(ratio)
    whole = _number(text, value or ("4" if name == "powersgd" else "32"), "a whole number")
    if not (whole.is_integer() and 1 <= whole <= 4096):
        raise UserError(f"reducer={shown(text)}: give a whole number from 1 to 4096")
    return PowerSGD(int(whole)) if name == "powersgd" else DeMo(int(whole))


def _added(text: str, name: str, value: str) -> Compressor:
    """That of an installed package; it reads what stands after the colon."""
    added = plugins.names("reducers")
    if name in added:
        compressor: Compressor = plugins.load("reducers", name)(value)
        return compressor
    known = [*NAMES, *added]
    raise UserError(f"reducer={shown(text)}: allowed are auto, {', '.join(known)}.{suggest(name, known)}")


def for_tensor(wanted: Compressor, tensor: Tensor, *, embedding: bool) -> Compressor:
    """The compressor of one tensor, by the rules above."""
    if isinstance(wanted, DeMo):
        return wanted
    if tensor.dim() < 2:
        return PLAIN
    return INT8 if embedding and not _at_least_int8(wanted) else wanted


def _at_least_int8(c: Compressor) -> bool:
    return isinstance(c, Quantizer) and c in (PLAIN, BF16, INT8)


def _number(text: str, value: str, wanted: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"reducer={shown(text)}: {shown(value)} is not {wanted}")
    return number
