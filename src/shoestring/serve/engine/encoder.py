"""Encoders of the BERT family, for embeddings: loaded by model/encoder.py, dense or packed, computed by `transformers`.

`TextEncoder` is such a model, `EncoderEngine` what the engine thread asks of an engine: it embeds and never has a
text to write. Left out: dense layers behind the pooling.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.json_files import Fields, read_object
from shoestring.model.encoder import load_encoder_module
from shoestring.model.encoder_types import TEXT_TYPES, encoder_type
from shoestring.model.tokenizer import Tokenizer
from shoestring.serve.engine.embedding import Pooling, padded, pooled
from shoestring.serve.engine.request import Output, Request, Stats
from shoestring.state.files import POOLING

# Position ids of these begin behind the padding token's.
_SHIFTED = ("roberta", "xlm-roberta", "camembert", "mpnet")


def is_encoder(folder: Path) -> bool:
    """Whether a Hugging Face folder holds one of the encoders that are served."""
    return encoder_type(folder) in TEXT_TYPES


@dataclass(frozen=True)
class TextEncoder:
    model: torch.nn.Module
    tokenizer: Tokenizer
    vocab_size: int
    max_positions: int
    d_model: int


def load_encoder(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TextEncoder:
    return text_encoder(folder, load_encoder_module(folder, device, dtype))


def text_encoder(folder: Path, model: torch.nn.Module) -> TextEncoder:
    """With the tokenizer and the sizes that the folder has for the model."""
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json; save its fast tokenizer there")
    tokenizer = Tokenizer.from_file(folder)
    tokenizer.backend.no_truncation()  # a text that is too long is refused, not cut
    tokenizer.backend.no_padding()
    fields = Fields(read_object(folder / "config.json"), "config.json")
    positions = fields.whole("max_position_embeddings")
    if fields.text("model_type") in _SHIFTED:
        positions -= (fields.whole("pad_token_id", 1, least=0)) + 1
    vocab = fields.whole("vocab_size")
    return TextEncoder(model, tokenizer, vocab, positions, fields.whole("dim" if "dim" in fields else "hidden_size"))


class EncoderRunner:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def embedding_parts(self, texts: Sequence[Sequence[int]], pooling: Pooling, chunk: int) -> Iterator[Tensor | None]:
        """One part: an encoder reads a text as a whole."""
        lengths = [len(text) for text in texts]
        ids_NT = padded(texts)
        mask_NT = (torch.arange(ids_NT.shape[1])[None] < torch.tensor(lengths)[:, None]).long()
        found: Any = self.model(input_ids=ids_NT.to(self.device), attention_mask=mask_NT.to(self.device))
        yield pooled(found.last_hidden_state, lengths, pooling)

    def prompt_logprob_parts(self, tokens: Sequence[int], num_top: int, chunk: int) -> Iterator[Any]:
        raise _no_text()


class EncoderEngine:
    """The part of `Engine` that a server without texts needs."""

    drafter = None
    draft_controller = None
    busy = False
    version = None  # its weights stay as loaded

    def __init__(self, encoder: TextEncoder, *, max_context: int | None = None, chunk: int = 512) -> None:
        most = encoder.max_positions
        if max_context is not None and not 1 <= max_context <= most:
            raise UserError(f"max_context={max_context} does not fit this model, which has {most} positions")
        self.runner, self.chunk = EncoderRunner(encoder.model), chunk
        self.vocab_size, self.max_context, self.d_model = encoder.vocab_size, max_context or most, encoder.d_model
        self.eos_ids: set[int] = set()
        self.stats, self.clock = Stats(), time.monotonic
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()

    def add(self, *_: Any, **__: Any) -> Request:
        raise _no_text()

    def resume(self, request: Request) -> None:
        raise _no_text()

    def pause(self, request: Request) -> None:
        raise _no_text()

    def abort(self, request: Request) -> None:
        raise _no_text()

    def step(self) -> list[Output]:
        return []

    def warm_up(self) -> None:
        """Nothing is captured."""


def _no_text() -> UserError:
    return UserError("this model is an encoder: it computes embeddings (/v1/embeddings) and writes no text")


def folder_pooling(folder: Path) -> Pooling | None:
    """The pooling that a sentence-transformers folder asks for; None where it says nothing."""
    file = folder / POOLING / "config.json"
    if not file.is_file():
        return None
    asked = read_object(file)
    modes = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "pooling_mode_cls_token": "cls"}
    wanted = [mode for key, mode in modes.items() if asked.get(key) is True]
    num = sum(key.startswith("pooling_mode_") and value is True for key, value in asked.items())
    if len(wanted) != 1 or num != 1:
        raise UserError(f"{file} asks for another pooling than mean, last or cls; choose one with --pooling")
    return cast(Pooling, wanted[0])
