"""A real model of 260k parameters for comparisons on a CPU: stories260K of llama2.c, and its tokenizer.

    model = load_stories(Path("stories260K.bin"))
    ids = StoryCodec(Path("tok512.bin")).encode("Once upon a time")

A Llama of width 64 with 5 layers and 512 tokens, trained on TinyStories. The file is llama2.c's version 0: seven int32
(width, hidden, layers, heads, key/value heads, vocabulary, positions), then fp32 tensors, layer-stacked, with rotary
pairs side by side. The tokenizer's file has a score and the bytes of each token; encoding merges, within a word, the
pair with the highest score until none is left.
"""

from __future__ import annotations

import itertools
import struct
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.model.gguf_names import from_interleaved
from shoestring.model.spec import ModelSpec
from shoestring.model.transformer import Decoder

BOS = 1


def load_stories(path: Path) -> Decoder:
    raw = path.read_bytes()
    if len(raw) < 28:
        raise UserError(f"{path} is too short for a llama2.c model")
    dim, hidden, layers, heads, kv_heads, vocab, positions = struct.unpack("<7i", raw[:28])
    flat = torch.from_numpy(np.frombuffer(raw, dtype="<f4", offset=28).copy())
    head = dim // heads
    kv = kv_heads * head
    at = 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        found = flat[at : at + count].view(shape)
        at += count
        return found

    state = {"embed.weight": take(abs(vocab), dim)}
    names = {
        "attn_norm.weight": take(layers, dim),
        "attn.q.weight": take(layers, dim, dim),
        "attn.k.weight": take(layers, kv, dim),
        "attn.v.weight": take(layers, kv, dim),
        "attn.o.weight": take(layers, dim, dim),
        "mlp_norm.weight": take(layers, dim),
        "mlp.gate.weight": take(layers, hidden, dim),
        "mlp.down.weight": take(layers, dim, hidden),
        "mlp.up.weight": take(layers, hidden, dim),
    }
    for name, stacked in names.items():
        for layer in range(layers):
            w = stacked[layer]
            if name in ("attn.q.weight", "attn.k.weight"):
                w = from_interleaved(w, heads if ".q." in name else kv_heads)
            state[f"blocks.{layer}.{name}"] = w
    state["norm.weight"] = take(dim)
    model = Decoder(ModelSpec(abs(vocab), dim, layers, heads, kv_heads, head, hidden, positions, bos_id=BOS))
    model.load_state_dict(state)
    return model.eval()


class StoryCodec:
    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        at = 4  # behind the length of the longest token
        self.pieces: list[bytes] = []
        self.scores: dict[bytes, tuple[float, int]] = {}  # (score, id)
        while at < len(raw):
            score, length = struct.unpack_from("<fi", raw, at)
            piece = raw[at + 8 : at + 8 + length]
            self.scores.setdefault(piece, (score, len(self.pieces)))
            self.pieces.append(piece)
            at += 8 + length
        self._word = lru_cache(maxsize=100_000)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        """Without BOS. Words carry their leading space, as the model's own tokens do."""
        words = (" " + text).replace("\n", "\n ").split(" ")
        ids: list[int] = []
        for word in words[1:]:
            ids.extend(self._word(" " + word))
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        pieces = [c.encode() for c in word]
        while len(pieces) > 1:
            pairs = enumerate(itertools.pairwise(pieces))
            scored = [(self.scores.get(a + b, (-1e10, 0))[0], -i) for i, (a, b) in pairs]
            best, place = max(scored)
            if best <= -1e10:
                break
            i = -place
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        ids: list[int] = []
        for piece in pieces:
            known = self.scores.get(piece)
            # A character without a token is spelled in bytes, which follow the three special tokens.
            ids.extend([known[1]] if known else [b + 3 for b in piece])
        return tuple(ids)
