"""Perplexity of a model that stays at home: the same numbers as evals/perplexity.py, block after block.

All windows are embedded; then one block at a time visits the device (visit.py) and every window goes through it; the
final norm and the output head come last, and the logits in slices. The activations of all windows wait in one store,
which is a file beyond the Calibration's memory_gb.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from shoestring.evals.perplexity import (
    Perplexity,
    Window,
    checked_tokens,
    equal_shapes,
    perplexity_of,
    predicted,
    windows,
)
from shoestring.evals.scoring import Progress, read_nll
from shoestring.formats import keep_decoded
from shoestring.model.transformer import Decoder
from shoestring.shrink.calibrate import Calibration, activation_store, compute_device, embed, rope_of
from shoestring.shrink.visit import visiting


@torch.no_grad()
def streamed_perplexity(
    model: Decoder,
    tokens: Tensor,
    calibration: Calibration,
    *,
    context: int = 1024,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch: int = 1,
    progress: Progress | None = None,
) -> Perplexity:
    """As `perplexity`; progress(counted so far, to count) counts a block as its share of all tokens."""
    stride = context if stride is None else stride
    tokens = checked_tokens(model, tokens, context, stride, max_tokens, batch)
    plan = windows(len(tokens), context, stride)
    groups = equal_shapes(plan, batch)
    total = sum(w.stop - w.counted_from for w in plan)
    device, dtype = compute_device(model, calibration), model.compute_dtype
    width = max(w.stop - w.start for w in plan) - 1  # a window's last token is only predicted, never read
    with ExitStack() as stack:
        shape = (len(plan), width, model.spec.d_model)
        store = activation_store(shape, dtype, device, calibration, stack)
        parts = _parts(store, groups)
        ropes = {t: rope_of(model, t, device) for t in {part.shape[1] for part in parts}}
        for part, group in zip(parts, groups, strict=True):
            part.copy_(embed(model, torch.stack([tokens[w.start : w.stop - 1] for w in group])))
        for index, block in enumerate(model.blocks):
            with visiting(block, calibration.visit, dtype):
                if device.type == "cpu":  # no kernels for packed weights: decoded once, not in every pass
                    keep_decoded(block, dtype=dtype)
                for part in parts:
                    part.copy_(block(part.contiguous().to(device), ropes[part.shape[1]], None))
            if progress is not None:
                progress(total * (index + 1) // len(model.blocks), total)
        for module in (model.norm, model.embed if model.head is None else model.head):
            stack.enter_context(visiting(module, calibration.visit, dtype))
        nll_sum = sum(
            _nll_sum(model, part.contiguous().to(device), tokens, group)
            for part, group in zip(parts, groups, strict=True)
        )
    return perplexity_of(nll_sum, total, context, stride)


def _parts(store_NTD: Tensor, groups: list[list[Window]]) -> list[Tensor]:
    """The views of the store that belong to each group of windows; the last window of a text can be shorter."""
    parts, at = [], 0
    for group in groups:
        parts.append(store_NTD[at : at + len(group), : group[0].stop - group[0].start - 1])
        at += len(group)
    return parts


def _nll_sum(model: Decoder, x_BTD: Tensor, tokens: Tensor, group: list[Window]) -> float:
    rows, targets = predicted(tokens, group, x_BTD.device)
    hidden_RD = model.norm(x_BTD).flatten(0, 1)[rows]
    return float(read_nll(hidden_RD, model.read_head(hidden_RD.dtype), targets)[0].double().sum())
