"""Drafters before training: three ways to begin, and a vocabulary that may be trimmed.

`dense_copy(model)`         a small model that was trained before, such as a sibling of the target's family
`first_layers(target, n)`   the target's embedding, first n blocks, last norm and head: it knows the tokens, but its
                            head was made for hidden states of the last layer
`fresh(spec, ...)`          a small decoder of its own width with random weights and the target's tokenizer
`frequent_tokens(...)`      the most frequent tokens of a text, for a smaller head: with a large vocabulary the head is
                            most of a drafter's work

A drafter folder is an ordinary model folder with the full vocabulary, so that every tool can read it, plus
drafter.json: {"version", "vocab_ids": null or sorted ids, "acceptance": by place of a draft, once it is measured, ...}.
`serve.open_drafter` cuts the head on loading, and the draft-length controller begins with that acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoestring.errors import UserError
from shoestring.formats import FormatHost
from shoestring.json_files import read_object
from shoestring.model import Decoder, LoadedModel, ModelSpec, Tokenizer, load_model, save_model
from shoestring.model.parallel import init_weights
from shoestring.runlog import write_atomically
from shoestring.serve.speculative.draft_model import DRAFTER_FILE, check_vocabulary

VERSION = 1


def first_layers(target: Decoder, num_layers: int) -> Decoder:
    """A drafter with fp32 masters, made of the target's first blocks; packed weights are decoded."""
    if not 1 <= num_layers < target.spec.num_layers:
        raise UserError(
            f"layers={num_layers}: a drafter takes 1 to {target.spec.num_layers - 1} of the target's "
            f"{target.spec.num_layers} layers"
        )
    return dense_copy(target, _cut(target.spec, num_layers))


@torch.no_grad()
def dense_copy(model: Decoder, spec: ModelSpec | None = None) -> Decoder:
    """A copy with fp32 masters, of all blocks or of the first ones that `spec` has; packed weights are decoded."""
    copied = Decoder(spec or model.spec)
    theirs, state = dict(model.named_modules()), model.state_dict()
    for name, param in copied.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = theirs[owner]
        if leaf == "weight" and isinstance(module, FormatHost):
            param.copy_(module.effective_weight(torch.float32))
        else:
            param.copy_(state[name])
    return copied


def _cut(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The spec of the first layers: what it says of single layers, it says of these only."""

    def kept(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i for i in layers if i < num_layers)

    experts = spec.experts
    if experts is not None:
        experts = replace(experts, dense_layers=kept(experts.dense_layers))
    return replace(
        spec,
        num_layers=num_layers,
        no_rope_layers=kept(spec.no_rope_layers),
        full_layers=kept(spec.full_layers),
        experts=experts,
    )


def fresh(target: ModelSpec, *, num_layers: int, d_model: int, head_dim: int = 64, seed: int = 0) -> Decoder:
    """A Llama-shaped drafter of its own width, with the target's tokens and context."""
    if num_layers < 1 or d_model < 1 or d_model % head_dim:
        raise UserError(
            f"layers={num_layers}, d_model={d_model}: give at least one layer and a width that is a multiple of "
            f"the head width {head_dim}"
        )
    spec = ModelSpec(
        vocab_size=target.vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=d_model // head_dim,
        num_kv_heads=d_model // head_dim,
        head_dim=head_dim,
        d_ff=64 * -(-d_model * 8 // 3 // 64),
        max_positions=target.max_positions,
        bos_id=target.bos_id,
        eos_id=target.eos_id,
        extra_eos_ids=target.extra_eos_ids,
    )
    drafter = Decoder(spec)
    init_weights(drafter, seed)
    return drafter


@dataclass(frozen=True)
class DrafterShape:
    """The settings of an untrained drafter."""

    layers: int
    d_model: int | None  # None: the target's first layers
    seed: int = 0
    start: str | None = None  # a model to begin with, instead of these

    def check(self, target: LoadedModel, context: int) -> None:
        """UserError for a drafter that `build` cannot make, or that cannot be trained on rows of `context` tokens,
        before hours of text are generated for it."""
        if self.start is not None:
            self._check_start(target, context)
        elif self.d_model is None and not 1 <= self.layers < target.spec.num_layers:
            raise UserError(
                f"layers={self.layers}: the model has {target.spec.num_layers}; take 1 to {target.spec.num_layers - 1} "
                "of them, or give d_model= for a drafter of its own width"
            )
        elif self.d_model is not None and (self.layers < 1 or self.d_model < 1 or self.d_model % 32):
            raise UserError(
                f"layers={self.layers}, d_model={self.d_model}: give at least one layer and a width that is a multiple "
                "of 32"
            )

    def _check_start(self, target: LoadedModel, context: int) -> None:
        if self.d_model is not None:
            raise UserError(
                f"start={self.start} and d_model={self.d_model}: give one of them, a model to begin with or the width "
                "of a fresh one"
            )
        try:
            loaded = load_model(str(self.start))
        except UserError as error:
            raise UserError(f"start={self.start}: {error}") from None
        check_vocabulary(f"start={self.start}", loaded.spec.vocab_size, target.model)
        ours, theirs = (t and t.backend.get_vocab() for t in (loaded.tokenizer, target.tokenizer))
        if ours and theirs and ours != theirs:
            raise UserError(
                f"start={self.start} has as many tokens as the model, but not the same ones: a drafter must use the "
                "model's tokenizer"
            )
        if context > loaded.spec.max_positions:
            raise UserError(
                f"context={context} is more than the {loaded.spec.max_positions} positions of start={self.start}; give "
                f"context={loaded.spec.max_positions} or less"
            )

    def build(self, target: Decoder) -> Decoder:
        """The untrained drafter with fp32 masters, in the target's compute dtype."""
        if self.start is not None:
            drafter = dense_copy(load_model(self.start).model)
        elif self.d_model is None:
            drafter = first_layers(target, self.layers)
        else:
            head_dim = 64 if self.d_model % 64 == 0 else 32
            drafter = fresh(
                target.spec, num_layers=self.layers, d_model=self.d_model, head_dim=head_dim, seed=self.seed
            )
        drafter.to(target.device)
        drafter.compute_dtype = target.compute_dtype
        return drafter


def frequent_tokens(tokens: np.ndarray, num: int, vocab_size: int, always: Iterable[int] = ()) -> list[int]:
    """The `num` most frequent ids of a text, sorted; `always` (the end of a text, say) are included."""
    always = sorted(set(always))
    if not len(always) < num <= vocab_size:
        raise UserError(
            f"vocab={num} tokens for the drafter: give more than {len(always)}, at most {vocab_size}; none keeps all"
        )
    counts = np.bincount(np.asarray(tokens), minlength=vocab_size).astype(np.int64)
    counts[always] = np.iinfo(np.int64).max
    # Stable: equally frequent tokens are taken by id, on every machine.
    return sorted(int(i) for i in np.argsort(-counts, kind="stable")[:num])


def coverage(tokens: np.ndarray, vocab_ids: Iterable[int]) -> float:
    """The share of a text's tokens that are among these."""
    return float(np.isin(np.asarray(tokens), np.array(sorted(vocab_ids))).mean()) if len(tokens) else 1.0


def save_drafter(
    folder: Path, drafter: Decoder, tokenizer: Tokenizer | None, vocab_ids: list[int] | None, **notes: Any
) -> Path:
    """A model folder and drafter.json, which is written last: a folder that has one is complete."""
    save_model(folder, drafter, tokenizer)
    content = {"version": VERSION, "vocab_ids": vocab_ids, **notes}
    write_atomically(folder / DRAFTER_FILE, json.dumps(content, indent=1) + "\n")
    return folder


def note_acceptance(folder: Path, acceptance: Sequence[float]) -> None:
    """Write into drafter.json what was measured on held-out prompts."""
    path = folder / DRAFTER_FILE
    content = {**read_object(path, remedy="write the drafter again"), "acceptance": list(acceptance)}
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def is_drafter(folder: Path) -> bool:
    return (folder / DRAFTER_FILE).is_file()
