"""Tiny models, tokenizers and corpora of the tests: one place, so that equal shapes and seeds are equal models.

A test that states a number about a shape (bytes of a step, names of a checkpoint) has that shape in its own file.

    tiny_decoder    fp64 and wide weights: for comparisons token by token
    tiny_llama      fp32, as a Hugging Face Llama; `served_model` is the one behind the HTTP tests
    loud_model      fp32 with biases, uneven norms and loud channels, as shrink methods meet them in trained models
    random_model    any spec, every parameter random: for what is written in one way and read in another
    taught          a model that has learned a Markov chain
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.formats.adapter import LoraWeights
from shoestring.mesh import open_mesh
from shoestring.model import Decoder, ModelSpec, Tokenizer, hf_names
from shoestring.model.adapter_folder import linear_shapes, write_adapter
from shoestring.model.parallel import init_weights
from shoestring.runlog import RunLog
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, warmup_cosine
from shoestring.train.shards import Corpus, TokenShards, tokenize_corpus
from shoestring.train.step import Run
from shoestring.train.trainer import train

DECODER = ModelSpec(
    vocab_size=29, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=24, max_positions=64
)  # fmt: skip
LLAMA = ModelSpec(
    vocab_size=300, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, max_positions=64
)  # fmt: skip
QWEN2 = ModelSpec(
    vocab_size=96, d_model=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128, max_positions=64,
    model_type="qwen2", qkv_bias=True,
)  # fmt: skip
GPT2 = ModelSpec(
    vocab_size=96, d_model=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16, d_ff=128, max_positions=64,
    model_type="gpt2", norm="layer", act="gelu_tanh", positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip

# -- models ------------------------------------------------------------------------------------------


def tiny_decoder(seed: int = 0, **changes: object) -> Decoder:
    """fp64, so that the order of additions does not decide a token; wide weights, so that texts vary."""
    torch.manual_seed(seed)
    model = Decoder(replace(DECODER, **changes)).double()
    model.compute_dtype = torch.float64
    _randomize_matrices(model, 0.6)
    return model.eval()


def near_copy(model: Decoder, noise: float) -> Decoder:
    """A drafter that mostly agrees: the same weights with some noise."""
    copy = Decoder(model.spec).double()
    copy.compute_dtype = torch.float64
    copy.load_state_dict(model.state_dict())
    gen = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for param in copy.parameters():
            param.add_(noise * torch.randn(param.shape, generator=gen, dtype=param.dtype))
    return copy.eval()


def tiny_llama(spec: ModelSpec = LLAMA, seed: int = 0, *, std: float = 0.25) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(spec)
    _randomize_matrices(model, std)
    return model.eval()


def served_model(vocab_size: int, max_positions: int = 4096) -> Decoder:
    return tiny_llama(replace(LLAMA, vocab_size=vocab_size, max_positions=max_positions), std=0.4)


@torch.no_grad()
def _randomize_matrices(model: Decoder, std: float) -> None:
    for param in model.parameters():
        if param.ndim > 1:
            param.normal_(0, std)


def loud_model(spec: ModelSpec = QWEN2) -> Decoder:
    """Random, with norms and biases that are not trivial and a few loud channels, as trained models have."""
    gen = torch.Generator().manual_seed(0)
    model = Decoder(spec)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=gen) * 0.15)
            if "norm" in name and name.endswith("weight"):
                p.abs_().add_(0.5)
                p[::13] *= 8
    return model.eval()


def random_model(spec: ModelSpec, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(spec)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
    return model


def make_adapter(folder: Path, model: Decoder, seed: int = 0) -> Path:
    """A LoRA of rank 4 on all layers of the blocks, strong enough to change texts."""
    gen, weights = torch.Generator().manual_seed(seed), {}
    for name, (out, width) in linear_shapes(model).items():
        if name.startswith("blocks."):
            a, b = (torch.randn(shape, generator=gen) for shape in ((4, width), (out, 4)))
            weights[name] = LoraWeights(a, b, 0.3)
    return write_adapter(folder, model, weights)


def logits(model: torch.nn.Module) -> Tensor:
    """Of a model of ours or of transformers."""
    ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(ids)
    return out if isinstance(out, Tensor) else out.logits


# -- tokenizers --------------------------------------------------------------------------------------

CAT_TEXT = "the cat sat on the mat and the dog sat on the log. was it a cat? it was a dog, he said. "
CHAT_TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def main(argv):\n    return 0\n" * 3,
    "Ein Bär, zwei Bären; naïve café, 日本語, 🙂🙃. " * 3,
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL_CHAT_TEMPLATE = CHAT_TEMPLATE + "{% if tools %}{# <tool_call> #}{% endif %}"  # taken for one that has tools


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.train([CAT_TEXT * 20], vocab_size=300)


def chat_tokenizer(chat: bool = True) -> Tokenizer:
    tokenizer = Tokenizer.train(CHAT_TEXTS, 300)
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    """A small SentencePiece-like vocabulary: <unk>, <s>, </s>, 256 bytes, then pieces with scores."""
    pieces = ["▁t", "he", "▁the", "in", "▁a", "er", "re", "ere", "▁there", "▁", "t", "h", "e", "i", "n", "a", "r"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


class ByteTokenizer:
    """Every byte is a token; 0 ends a text."""

    eos_ids: set[int] = {0}  # noqa: RUF012
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def stream(self, *, shown: frozenset[int] = frozenset(), after: Sequence[int] = ()) -> ByteStream:
        return ByteStream()


class ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, id: int) -> str:
        return self._decoder.decode(bytes([id]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


# -- inputs and texts --------------------------------------------------------------------------------


def tokens(num_windows: int = 6, context: int = 32) -> Tensor:
    """Windows for QWEN2 and GPT2."""
    return torch.randint(0, 96, (num_windows, context), generator=torch.Generator().manual_seed(1))


def output_error(w: Tensor, other: Tensor, hessian: Tensor) -> float:
    """Mean square of (other - w) x over calibration inputs with mean x x^T = hessian, relative to that of w x."""
    d, w, h = (other - w).float(), w.float(), hessian.float()
    return float(((d @ h) * d).sum() / ((w @ h) * w).sum())


def correlated(width: int = 128, num_tokens: int = 2048) -> Tensor:
    """Inputs of a linear layer whose channels depend on each other and differ in size."""
    gen = torch.Generator().manual_seed(2)
    mix = torch.randn(width // 4, width, generator=gen)
    x = torch.randn(num_tokens, width // 4, generator=gen) @ mix
    loud = torch.exp(torch.randn(width, generator=gen))
    return (x + 0.3 * torch.randn(num_tokens, width, generator=gen)) * loud


def random_weight(rows: int = 48, width: int = 128, skew: bool = False) -> Tensor:
    gen = torch.Generator().manual_seed(3)
    w = torch.randn(rows, width, generator=gen) * 0.05
    return torch.where(w > 0, w * 0.35, w) if skew else w


def small_corpus(place: Path) -> Corpus:
    """A prepared corpus of a few Python sources with its tokenizer in it, as it is carried to another machine."""
    (place / "text").mkdir()
    for number in range(120):
        lines = "\n".join(f"def f{i}(a, b):\n    return a * {i} + b - {number}" for i in range(12))
        (place / "text" / f"{number}.py").write_text(lines)
    made = tokenize_corpus(str(place / "text"), place / "cache", vocab_size=300, val_fraction=0.3)
    made.tokenizer.save(made.folder)
    return made


# -- a model that has learned something --------------------------------------------------------------

CHAIN_VOCAB = 24


def chain(num: int, seed: int) -> np.ndarray:
    """Every pair of tokens has two successors, at 80 and 20 percent: a perplexity of 1.65 is the least possible."""
    table = np.random.default_rng(0).integers(0, CHAIN_VOCAB, (CHAIN_VOCAB, CHAIN_VOCAB, 2))
    second = (np.random.default_rng(seed).random(num) < 0.2).astype(int)
    ids = np.zeros(num, dtype="<u2")
    for i in range(2, num):
        ids[i] = table[ids[i - 2], ids[i - 1], second[i]]
    return ids


def taught(steps: int, *, width: int = 32, lr: float = 1e-2, seed: int = 0) -> tuple[Decoder, TokenShards]:
    """A model after so many steps on the chain, and its text."""
    text = TokenShards(chain(60_000, 1), None, "chain")
    model = Decoder(ModelSpec(CHAIN_VOCAB, width, 2, 2, 2, width // 2, 2 * width, 64))
    init_weights(model, seed)
    run = Run(model, adamw(model, lr=lr, weight_decay=0.0), open_mesh(), RunLog(None, quiet=True))
    data = TokenData(text, context=32, batch=32, seed=seed)
    train(run, data, CrossEntropy(), steps=steps, schedule=warmup_cosine(lr, warmup=20, steps=steps))
    return model, text


# -- names of tensors --------------------------------------------------------------------------------


def to_hf_names(spec: ModelSpec, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A whole state dict in Hugging Face's names and shapes, by the functions that `save_model` uses."""
    packed = _is_packed(state)
    plan = hf_names.merge_plan(spec, state, packed=packed)
    return {hf: hf_names.merge(spec, ours, [state[n] for n in ours], packed=packed) for hf, ours in plan.items()}


def from_hf_names(spec: ModelSpec, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse, by the functions that `load_model` uses. Constants are dropped."""
    packed = _is_packed(state)
    ours: dict[str, Tensor] = {}
    for name, stored in hf_names.with_prefix(spec, state).items():
        if hf_names.is_constant(spec, name):
            continue
        targets = hf_names.targets_of(spec, name, packed=packed)
        assert targets, f"{stored} does not belong to the model"
        for target in targets:
            ours[target] = hf_names.source_of(spec, target, packed=packed).take(state[stored])
    return ours


def _is_packed(state: dict[str, Tensor]) -> bool:
    """Parts without the weight they were made from."""
    split = [name.rpartition(".") for name in state]
    return any(leaf.startswith("weight_") and f"{module}.weight" not in state for module, _, leaf in split)
