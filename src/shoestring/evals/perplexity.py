"""Perplexity of a token sequence, with its context and stride stated.

    perplexity = exp( -1/N * sum over counted tokens of log p(token | the tokens before it in its window) )

Windows of `context` tokens start every `stride` tokens. The first window counts every token but the very first; each
later one counts only its last `stride` tokens, which no earlier window has counted. So with stride < context every
counted token has at least context - stride tokens before it. With stride = context the windows do not overlap, and the
first token of each is not counted. Words, documents and BOS tokens have no special meaning.
"""

from __future__ import annotations

import itertools
import math
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.evals.scoring import NanLikelihood, Progress, read_nll
from shoestring.formats import keep_decoded
from shoestring.host.block_offload import BlockOffload, activation_store, on_device
from shoestring.model.spec import ModelSpec
from shoestring.model.transformer import Decoder, Head

CONTEXT = 1024


@dataclass(frozen=True)
class Perplexity:
    value: float
    nll: float  # mean negative log-likelihood per counted token, in nats
    num_tokens: int  # tokens counted
    context: int
    stride: int


@dataclass(frozen=True)
class Window:
    """Tokens [start, stop), of which [counted_from, stop) are counted."""

    start: int
    stop: int
    counted_from: int

    @property
    def num_counted(self) -> int:
        return self.stop - self.counted_from


def windows(num_tokens: int, context: int, stride: int) -> list[Window]:
    """The windows that count every token at most once, in order."""
    found: list[Window] = []
    start = counted = 0
    while counted < num_tokens:
        stop = min(start + context, num_tokens)
        first = max(counted, start + 1)  # nothing predicts the first token of a window
        if first < stop:
            found.append(Window(start, stop, first))
        counted = stop
        start += stride
    return found


# no_grad, not inference_mode: a sharded model caches tensors made here and trains with them later.
@torch.no_grad()
def perplexity(
    model: Decoder,
    tokens: Tensor,
    *,
    context: int = CONTEXT,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch: int = 1,
    progress: Progress | None = None,
    offload: BlockOffload | None = None,
) -> Perplexity:
    """Perplexity of the first `max_tokens` of a 1-D tensor of token ids. progress(counted so far, to count).

    `offload`: the same number with one block at a time on its device (host/block_offload.py). All windows then pass
    through one block after the other, and progress counts a block as its share of all tokens.
    """
    stride = context if stride is None else stride
    tokens = checked_tokens(model, tokens, context, stride, max_tokens, batch)
    plan = windows(len(tokens), context, stride)
    groups, total = equal_shapes(plan, batch), sum(w.num_counted for w in plan)
    if offload is not None:
        nll_sum = _streamed_nll_sum(model, tokens, groups, offload, total, progress)
    else:
        nll_sum, done = 0.0, 0
        for group in groups:
            nll_sum += _nll_sum(model, tokens, group)
            done += sum(w.num_counted for w in group)
            if progress is not None:
                progress(done, total)
    nll = nll_sum / total
    if math.isnan(nll):
        raise NanLikelihood
    return Perplexity(math.exp(nll) if nll < 700 else math.inf, nll, total, context, stride)


def _nll_sum(model: Decoder, tokens: Tensor, group: list[Window]) -> float:
    device = model.device
    rows, targets = predicted(tokens, group, device)

    def readout(hidden_RD: Tensor, head: Head) -> Tensor:
        return read_nll(hidden_RD, head, targets)[0].double().sum()

    return float(model(inputs_of(tokens, group).to(device), rows=rows, readout=readout))


def _streamed_nll_sum(
    model: Decoder,
    tokens: Tensor,
    groups: list[list[Window]],
    offload: BlockOffload,
    total: int,
    progress: Progress | None,
) -> float:
    device, dtype = offload.onload_device or model.device, model.compute_dtype
    inputs = [inputs_of(tokens, group) for group in groups]
    with ExitStack() as stack:
        shape = (sum(map(len, inputs)), max(x.shape[1] for x in inputs), model.spec.d_model)
        store = activation_store(shape, dtype, device, offload, stack)
        starts = itertools.accumulate(map(len, inputs), initial=0)
        parts = [store[at : at + len(x), : x.shape[1]] for at, x in zip(starts, inputs, strict=False)]
        args = {t: model.block_args(t, device) for t in {part.shape[1] for part in parts}}
        for part, x in zip(parts, inputs, strict=True):
            part.copy_(model.embed_inputs(x))
        for index, block in enumerate(model.blocks):
            with on_device(block, offload.onload_device, dtype):
                if device.type == "cpu":  # no kernels for packed weights: decode once, not in every pass
                    keep_decoded(block, dtype=dtype)
                for part in parts:
                    part.copy_(block(part.contiguous().to(device), *args[part.shape[1]][index]))
            if progress is not None:
                progress(total * (index + 1) // len(model.blocks), total)
        for module in model.tail_modules():
            stack.enter_context(on_device(module, offload.onload_device, dtype))
        nll_sum = 0.0
        for part, group in zip(parts, groups, strict=True):
            rows, targets = predicted(tokens, group, device)
            hidden_RD = model.final_hidden(part.contiguous().to(device)).flatten(0, 1)[rows]
            nll_sum += float(read_nll(hidden_RD, model.read_head(hidden_RD.dtype), targets)[0].double().sum())
    return nll_sum


def inputs_of(tokens: Tensor, group: list[Window]) -> Tensor:
    """[windows, length - 1]: the last token of a window is only predicted, never read."""
    return torch.stack([tokens[w.start : w.stop - 1] for w in group])


def predicted(tokens: Tensor, group: list[Window], device: torch.device) -> tuple[Tensor, Tensor]:
    """For a batch of windows of equal length: the flat rows whose predictions count, and their targets."""
    width = group[0].stop - group[0].start - 1
    rows = [b * width + at - 1 - w.start for b, w in enumerate(group) for at in range(w.counted_from, w.stop)]
    targets = torch.cat([tokens[w.counted_from : w.stop] for w in group])
    return torch.tensor(rows, device=device), targets.to(device)


def equal_shapes(plan: list[Window], batch: int) -> list[list[Window]]:
    """Runs of at most `batch` windows of the same length: only the last window of a text can be shorter."""
    groups: list[list[Window]] = []
    for w in plan:
        last = groups[-1] if groups else []
        if last and len(last) < batch and last[0].stop - last[0].start == w.stop - w.start:
            last.append(w)
        else:
            groups.append([w])
    return groups


def usual_context(spec: ModelSpec, asked: int | None) -> int:
    """`asked`, if it fits; by default CONTEXT, or all positions of a model that has fewer."""
    if asked is None:
        return min(CONTEXT, spec.max_positions)
    check_context(spec, asked)
    return asked


def check_context(spec: ModelSpec, context: int) -> None:
    if not 2 <= context <= spec.max_positions:
        raise UserError(
            f"context={context} does not fit this model, which has {spec.max_positions} positions; "
            f"give 2 to {spec.max_positions}"
        )


def checked_tokens(
    model: Decoder, tokens: Tensor, context: int, stride: int, max_tokens: int | None, batch: int
) -> Tensor:
    spec = model.spec
    check_context(spec, context)
    if not 1 <= stride <= context:
        raise UserError(f"stride={stride} is not allowed; give 1 to context={context}, or tokens would be skipped")
    if batch < 1:
        raise UserError(f"batch={batch} is not allowed; give 1 or more")
    if max_tokens is not None and max_tokens < 2:
        raise UserError(f"max_tokens={max_tokens} is not allowed; perplexity needs at least 2 tokens")
    tokens = torch.as_tensor(tokens)
    if tokens.ndim != 1:
        raise UserError(f"tokens have shape {list(tokens.shape)}; give one flat sequence of token ids")
    tokens = tokens[:max_tokens].to("cpu", torch.int64)
    if len(tokens) < 2:
        raise UserError(f"the text has {len(tokens)} tokens; perplexity needs at least 2, give a longer text")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= spec.vocab_size:
        raise UserError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {spec.vocab_size}; "
            "encode the text with this model's own tokenizer"
        )
    return tokens
