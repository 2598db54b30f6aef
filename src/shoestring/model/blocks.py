"""The BlocksModel protocol: inputs become activations, blocks of one shape follow, a head reads the last outputs.

    x = model.embed_inputs(inputs)                      [N, T, D]
    args = model.block_args(x.shape[1], x.device)
    for block, extra in zip(model.blocks, args):
        x = block(x, *extra)
    logits = model.read_logits(model.final_hidden(x).flatten(0, 1))

Calibration, quantization, pruning, block-wise training and mixed bits work on any such model: a decoder, an encoder, a
vision transformer. `Decoder` is one; another model subclasses `BlocksModel`. Linear layers inside the blocks must be
FormatLinear (`formats.convert.to_format_linear` makes one of an nn.Linear). A model without predictions (an encoder)
leaves out the last line; methods that read predictions (perplexity, mixed bits) refuse it.

Not supported: arguments of blocks that differ between inputs of one batch (padding masks). Give inputs of equal length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.model.spec import ModelSpec


@dataclass(frozen=True)
class InputSource:
    """`source` (a norm or a linear) produces the inputs of the linears `readers` (names inside the block), so that a
    scale per channel can move from one to the others. Channel (g, r, d) of the readers is channel (g, d) of the source,
    r < repeat, d < span.
    """

    source: nn.Module
    readers: tuple[str, ...]
    repeat: int = 1
    span: int = 1
    offset: float = 0.0  # what the source adds to its stored weight before it multiplies (Gemma's norms: 1)

    def reduce(self, channel: Tensor) -> Tensor:
        """Readers' channels -> source channels, as means."""
        return channel.view(-1, self.repeat, self.span).mean(1).flatten()

    def expand(self, channel: Tensor) -> Tensor:
        """Source channels -> readers' channels."""
        return channel.view(-1, 1, self.span).expand(-1, self.repeat, -1).flatten()


class BlocksModel(nn.Module, ABC):
    """The protocol. `blocks` are modules that map [N, T, D] to [N, T, D]; `compute_dtype` is that of activations."""

    blocks: nn.ModuleList
    compute_dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Of the inputs of the first block."""
        return next(self.parameters()).device

    def check_inputs(self, inputs: Tensor) -> None:
        """Raise UserError for inputs that the model cannot read."""

    @abstractmethod
    def embed_inputs(self, inputs: Tensor) -> Tensor:
        """What the first block reads, [N, T, D] in compute_dtype on the model's device."""

    def block_args(self, length: int, device: torch.device) -> list[tuple[Any, ...]]:
        """The arguments of each block after x, for inputs of `length` rows: rotary tables, say."""
        return [()] * len(self.blocks)

    def tail_modules(self) -> Sequence[nn.Module]:
        """The modules behind `final_hidden` and `read_logits`."""
        raise self._no_predictions()

    def final_hidden(self, x: Tensor) -> Tensor:
        """What the output head reads, [N, T, D], from the last block's output."""
        raise self._no_predictions()

    def read_logits(self, hidden_RD: Tensor) -> Tensor:
        """Predictions [R, V] before the softmax."""
        raise self._no_predictions()

    def _no_predictions(self) -> UserError:
        return UserError(
            f"{type(self).__name__} has no output head, and this method reads predictions: use gptq, awq, clip or rtn, "
            "or define tail_modules, final_hidden and read_logits"
        )

    def input_sources(self, block: nn.Module) -> list[InputSource]:
        """For methods that scale channels (AWQ), which do nothing where the list is empty."""
        return []


def block_prefixes(model: BlocksModel) -> list[str]:
    """The prefix of each block's parameter names: "blocks.0.", "blocks.1.", ..."""
    names = {module: name for name, module in model.named_modules()}
    return [names[block] + "." for block in model.blocks]


def block_of(prefixes: Sequence[str], name: str) -> int | None:
    """The index of the block that a layer belongs to, or None."""
    return next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), None)


def check_tokens(tokens_NT: Tensor, spec: ModelSpec) -> None:
    """UserError for calibration tokens that a model of this spec cannot read."""
    if tokens_NT.ndim != 2 or tokens_NT.numel() == 0:
        raise UserError(f"calibration tokens have shape {list(tokens_NT.shape)}; give [windows, context]")
    if tokens_NT.shape[1] > spec.max_positions:
        raise UserError(
            f"calibration windows of {tokens_NT.shape[1]} tokens do not fit this model, which has "
            f"{spec.max_positions} positions"
        )
    low, high = int(tokens_NT.min()), int(tokens_NT.max())
    if low < 0 or high >= spec.vocab_size:
        raise UserError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {spec.vocab_size}; encode the "
            "calibration text with this model's own tokenizer"
        )
