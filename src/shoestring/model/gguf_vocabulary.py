"""A tokenizer as GGUF metadata: tokens, merges or scores, special tokens, the chat template.

Two kinds of vocabulary exist in llama.cpp for decoders. Byte-level BPE ("gpt2") needs merges and the name of the way
text is cut, which is found by comparing the tokenizer's own rules with those that the names stand for. SentencePiece
BPE ("llama") needs scores: a piece that is merged earlier has a higher one. What was written is read back and has to
give the same ids for texts that are hard to cut; a tokenizer that llama.cpp would cut otherwise is refused.

Left out: unigram and WordPiece vocabularies, which llama.cpp reads for encoders only.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

from shoestring.errors import UserError, shown
from shoestring.model.tokenizer import END_MARKS, Tokenizer
from shoestring.model.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, set_byte_level

# How llama.cpp calls the ways to cut text, and whether words that are tokens are taken whole.
_PRE_NAMES = {
    ("gpt2", False): "gpt-2",
    ("digits", False): "smollm",
    ("llama3", True): "llama-bpe",
    ("llama3", False): "dbrx",
    ("qwen2", False): "qwen2",
}
_LEFT_OUT = -1e4  # score of a piece that nothing merges to
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
INSTEAD = "write a Hugging Face folder instead (--as dense)"
HARD_TO_CUT = (
    "Hello world, it's 3.14159 or 2026-11-17!",
    "  two  spaces,\ttabs\t\tand\n\n\nlines \n",
    "def f(x):\n    return x**2 + 0x1F  # comment\r\n",
    "I'M WE'LL don't DON'T naïve café Ünïcödé ß ﬁ",
    "日本語のテキスト と 中文字符 и русский عربى 😀👩‍👩‍👧 e\u0301",
    "<|endoftext|> </s> <s> [INST] <unk> {{x}} \\n",
    "",
)


def vocabulary_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The `tokenizer.*` keys of a file with `vocab_size` embedding rows; UserError for what llama.cpp cannot read."""
    stored = json.loads(tokenizer.backend.to_str())
    model = stored["model"]
    tokens = _tokens(tokenizer, vocab_size)
    if model["type"] != "BPE":
        raise UserError(f"the tokenizer is of kind {model['type']}, which llama.cpp reads for encoders only; {INSTEAD}")
    if model.get("byte_fallback"):
        found = _sentencepiece(stored, tokens)
    else:
        found = _byte_level(stored)
    added = {int(t["id"]): t for t in stored["added_tokens"]}
    types = [_type_of(i, token, added, vocabulary=model["vocab"]) for i, token in enumerate(tokens)]
    found |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": tokenizer.adds_bos,
        "tokenizer.ggml.add_eos_token": tokenizer.adds_eos,
    }
    unknown = model.get("unk_token")
    special = {"unk_token": unknown, **tokenizer.special} if unknown else tokenizer.special
    for name, key in _IDS.items():
        if (token := special.get(name)) is not None:
            found[f"tokenizer.ggml.{key}_token_id"] = tokenizer.backend.token_to_id(token)
    for key, end in zip(("eot", "eom"), _turn_ends(tokenizer), strict=False):
        found[f"tokenizer.ggml.{key}_token_id"] = end
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    _check_read_back(tokenizer, found)
    return found


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """One token per row of the embedding; rows without one are named as llama.cpp's converter names them."""
    by_id = {i: token for token, i in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    return [by_id.get(i, f"[PAD{i}]") for i in range(vocab_size)]


def _type_of(i: int, token: str, added: dict[int, dict[str, Any]], vocabulary: dict[str, int]) -> int:
    if i in added:
        if token == "<unk>":
            return UNKNOWN
        return CONTROL if added[i]["special"] else USER_DEFINED
    if token not in vocabulary:
        return UNUSED
    return BYTE if _BYTE.fullmatch(token) else NORMAL


def _turn_ends(tokenizer: Tokenizer) -> list[int]:
    """Ids that end a turn, besides EOS, in the order of END_MARKS."""
    known = [tokenizer.backend.token_to_id(mark) for mark in END_MARKS]
    first = [i for i in known if i in tokenizer.eos_ids]
    return [i for i in dict.fromkeys([*first, *sorted(tokenizer.eos_ids)]) if i != tokenizer.eos_id]


# --- byte-level BPE -------------------------------------------------------------------------------


def _byte_level(stored: dict[str, Any]) -> dict[str, Any]:
    model = stored["model"]
    split = _split_of(stored)
    pre = _PRE_NAMES.get((split, bool(model.get("ignore_merges")))) if split else None
    if pre is None:
        raise UserError(
            f"the tokenizer cuts text in a way that has no name in llama.cpp here ({shown(stored['pre_tokenizer'])}); "
            f"known: the ways of GPT-2, SmolLM, Llama 3 and Qwen2; {INSTEAD}"
        )
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}


def _split_of(stored: dict[str, Any]) -> str | None:
    """Which known way of cutting text these rules are. llama.cpp does not normalize, so NFC is passed over."""
    if (stored["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return None
    for split, _ in _PRE_NAMES:
        known = Backend(models.BPE())
        set_byte_level(known, split)
        if _steps(json.loads(known.to_str())["pre_tokenizer"]) == _steps(stored["pre_tokenizer"]):
            return split
    return None


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The rules one by one, without what does not change the cuts."""
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for part in pre_tokenizer["pretokenizers"] for step in _steps(part)]
    return [{k: v for k, v in pre_tokenizer.items() if k != "trim_offsets"}]


# --- SentencePiece BPE ----------------------------------------------------------------------------


def _sentencepiece(stored: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    prefix = _adds_prefix(stored)
    if prefix is None:
        raise UserError(f"the SentencePiece vocabulary handles spaces in a way that llama.cpp does not; {INSTEAD}")
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(stored["model"]["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [-float(ranks[t]) if t in ranks else _LEFT_OUT - len(ranks) for t in tokens],
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def _adds_prefix(stored: dict[str, Any]) -> bool | None:
    """Whether a text begins with a space of its own; None for other rules than SentencePiece's usual ones."""
    normalizer, cut = stored["normalizer"], stored["pre_tokenizer"]
    if normalizer is None and cut is not None and cut["type"] == "Metaspace" and not cut.get("split", True):
        return {"always": True, "first": True, "never": False}.get(cut.get("prepend_scheme"))
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    kinds = [step["type"] for step in steps]
    spaces = [step for step in steps if step["type"] == "Replace"]
    if not spaces or spaces[-1]["pattern"] != {"String": " "} or spaces[-1]["content"] != "▁":
        return None
    # Once spaces are replaced, cutting at them does nothing (Gemma's files do).
    if cut is not None and not (cut["type"] == "Split" and cut["pattern"] == {"String": " "}):
        return None
    return {("Prepend", "Replace"): True, ("Replace",): False}.get(tuple(kinds))


# --- proof ----------------------------------------------------------------------------------------


def _check_read_back(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    read = Tokenizer.from_gguf(metadata)
    for text in HARD_TO_CUT:
        ours, theirs = tokenizer.encode(text), read.encode(text)
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(theirs))
            raise UserError(
                f"the vocabulary as GGUF cuts {shown(text)} otherwise (token {at + 1} of {len(ours)}); {INSTEAD}"
            )
