"""Vocabularies as `tokenizers` backends: byte-level BPE, and SentencePiece's BPE.

What a backend needs beside tokens and merges is the way text is cut before merging. Hugging Face files
spell it out; GGUF files give it a name (`tokenizer.ggml.pre`), which is looked up here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shoestring.errors import UserError, shortened, shown
from shoestring.model.hf import MOST_TOKEN_ID

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# tokenizer.ggml.pre -> how text is cut before merging. "digits" is GPT-2's pattern with every digit cut off first.
GGUF_SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "olmo", "mpt", "phi-2"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
}
# Words that are tokens are taken whole, and a BOS is added.
_GGUF_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
_GGUF_LISTS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("tokens", "merges"), (str, "texts")),
    "scores": (float, "numbers"),
    "token_type": (int, "whole numbers"),
}
_GGUF_FLAGS = tuple(f"tokenizer.ggml.{key}" for key in ("add_bos_token", "add_eos_token", "add_space_prefix"))
MOST_LETTERS = 4096  # of a token; how it can be cut is tried at every letter
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type


def plain_post_processor() -> processors.PostProcessor:
    return processors.TemplateProcessing(single=["$A"], pair=["$A", "$B:1"], special_tokens=[])


def set_byte_level(backend: Tokenizer, split: str) -> None:
    """Pre-tokenizer, decoder and post-processor of a byte-level BPE that cuts text in the way `split` names."""
    if split in ("gpt2", "digits"):
        cut: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if split == "digits":
            cut = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), cut])
    else:
        pattern = {"llama3": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}[split]
        cut = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = cut
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = plain_post_processor()


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Errors of the tokenizers library as UserErrors: plain Exceptions, and panics of its Rust code.

    A panic arrives as a BaseException of a class that cannot be imported, so that `except Exception` misses it.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {shortened(str(error), 300)}") from error


def build_bpe(vocab: dict[str, int], merges: list[tuple[str, str]], where: str, **options: Any) -> Tokenizer:
    with library_errors(f"{where} is not a consistent BPE vocabulary"):
        return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


def check_vocabulary(fields: Mapping[str, Any]) -> None:
    """The types of a GGUF file's tokenizer metadata; UserError names the first key that is another."""
    for key, (kind, name) in _GGUF_LISTS.items():
        value = fields.get(f"tokenizer.ggml.{key}")
        if value is not None and not (isinstance(value, list) and all(type(v) is kind for v in value)):
            raise UserError(f"tokenizer.ggml.{key} of the GGUF file is not a list of {name}; it is damaged")
    long = [t for t in fields.get("tokenizer.ggml.tokens") or () if len(t) > MOST_LETTERS]
    if long or not all(math.isfinite(s) for s in fields.get("tokenizer.ggml.scores") or ()):
        raise UserError("the GGUF vocabulary has scores that are NaN, or tokens that are too long; it is damaged")
    for key, value in fields.items():
        known = key.startswith("tokenizer.") and value is not None
        if known and key.endswith("_token_id") and (type(value) is not int or not 0 <= value <= MOST_TOKEN_ID):
            raise UserError(f"{key} of the GGUF file is {shown(value)}, not a token id; it is damaged")
        if known and key in _GGUF_FLAGS and not isinstance(value, bool):
            raise UserError(f"{key} of the GGUF file is {shown(value)}, not true or false; it is damaged")
        if known and key == "tokenizer.chat_template" and not isinstance(value, str):
            raise UserError(f"{key} of the GGUF file is not a text; it is damaged")


def gguf_byte_level(fields: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    tokens = need(fields, "tokenizer.ggml.tokens")
    merges = need(fields, "tokenizer.ggml.merges")
    pre = fields.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in GGUF_SPLITS:
        raise UserError(
            f"the GGUF vocabulary cuts text in the way {shown(pre)} (tokenizer.ggml.pre), which is not known here; "
            f"known: {', '.join(GGUF_SPLITS)}. Use the model's Hugging Face folder instead"
        )
    split = GGUF_SPLITS[pre]
    # A merge may start with a space of its own, never end with one: cut at the first space behind the first character.
    pairs = [(m[: (i := m.find(" ", 1))], m[i + 1 :]) for m in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    whole_words = pre in _GGUF_WHOLE_WORDS
    backend = build_bpe(vocab, pairs, "the GGUF vocabulary", ignore_merges=whole_words)
    set_byte_level(backend, split)
    return backend, whole_words


def gguf_sentencepiece(fields: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece joins the neighbours whose joined piece has the best score; as BPE, merges ranked by that score."""
    tokens = need(fields, "tokenizer.ggml.tokens")
    scores = need(fields, "tokenizer.ggml.scores")
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not len(tokens) == len(scores) == len(types):
        raise UserError(
            f"the GGUF vocabulary has {len(tokens)} tokens, {len(scores)} scores, {len(types)} types; it is damaged"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == 1}
    ranked: list[tuple[float, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token in normal:
            cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
            ranked += [(-score, vocab[left], left, right) for left, right in cuts if left in normal and right in normal]
    ranked.sort(key=lambda row: row[:2])
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    if unknown >= len(tokens):
        raise UserError(f"tokenizer.ggml.unknown_token_id is {unknown}, the GGUF vocabulary has {len(tokens)} tokens")
    backend = build_bpe(
        vocab,
        [(left, right) for _, _, left, right in ranked],
        "the GGUF vocabulary",
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if prefix else [spaces])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    backend.post_processor = plain_post_processor()
    return backend


def added_tokens(tokens: list[str], types: list[int], wanted: tuple[int, ...], *, special: bool) -> list[AddedToken]:
    chosen = [token for token, kind in zip(tokens, types, strict=True) if kind in wanted]
    return [AddedToken(token, normalized=False, special=special) for token in chosen]


def need(fields: Mapping[str, Any], key: str) -> Any:
    if fields.get(key) is None:
        raise UserError(f"the GGUF file has no {key}: it carries no usable vocabulary; use a complete GGUF file")
    return fields[key]
