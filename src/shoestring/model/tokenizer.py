"""Text to token ids and back, chats to text.

`Tokenizer` wraps one `tokenizers.Tokenizer` together with what a model needs beside it: the BOS and EOS
ids, the set of ids that end a turn, and the chat template. It is read from a Hugging Face folder, from
GPT-2's two files, from the vocabulary inside a GGUF file, or trained; whichever way it came, `save` writes
files that `transformers` loads with the same ids and the same rendered chats.

Whether a BOS or an EOS is added is part of the post-processor, so that tokenizer.json alone says it: as in
`transformers` 5, add_bos_token and add_eos_token of tokenizer_config.json count only where there is no tokenizer.json.

Left out: SentencePiece `.model` files, unigram GGUF vocabularies (T5), and training anything but byte-level BPE.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from shoestring.errors import UserError, shown
from shoestring.json_files import MOST_TEXT, Fields, parse_json, read_object, read_text
from shoestring.model.chat import marks_generation, render, render_spans
from shoestring.model.hf import MOST_TOKEN_ID, token_ids
from shoestring.model.vocabulary import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    added_tokens,
    build_bpe,
    check_vocabulary,
    gguf_byte_level,
    gguf_sentencepiece,
    library_errors,
    need,
    plain_post_processor,
    set_byte_level,
)

END_OF_TEXT = "<|endoftext|>"
# Tokens that end a document or a turn in the chat formats in use; counted only where they are special tokens.
END_MARKS = (
    END_OF_TEXT,
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)

MOST_TEMPLATE = 1 << 20  # bytes of a chat template; the longest in use have 20,000
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Encodes and decodes; knows BOS, EOS, the ids that end a turn, and the chat template."""

    def __init__(
        self,
        backend: Backend,
        *,
        special: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        tool_use_template: str | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        split_special: bool = False,
        more_eos: Iterable[int] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`special` maps bos_token, eos_token, unk_token, pad_token to token texts; `config` is kept for `save`.

        `add_bos` and `add_eos` None leave the backend's post-processor as it is. `split_special`: special tokens that
        are written in a text are text.
        """
        self.backend = backend
        backend.encode_special_tokens = self.split_special = split_special
        self.special = {k: v for k, v in (special or {}).items() if backend.token_to_id(v) is not None}
        self.chat_template, self.tool_use_template = chat_template, tool_use_template
        self.config = dict(config or {})
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        marks = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(marks.values())
        self.eos_ids: set[int] = {marks[mark] for mark in END_MARKS if mark in marks} | set(more_eos)
        if self.eos_id is not None:
            self.eos_ids.add(self.eos_id)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if add_bos is not None or add_eos is not None:
            now = (self.adds_bos, self.adds_eos)
            wanted = (now[0] if add_bos is None else add_bos, now[1] if add_eos is None else add_eos)
            if wanted != now:
                self._set_ends(*wanted)

    # --- where a tokenizer comes from -------------------------------------------------------------

    @staticmethod
    def from_file(path: str | Path) -> Tokenizer:
        """From a Hugging Face folder, a folder with GPT-2's vocabulary and merges, or a tokenizer.json."""
        path = Path(path)
        if not path.exists():
            raise UserError(f"no tokenizer at {path}: the path does not exist; give a folder or a tokenizer.json")
        folder = path if path.is_dir() else path.parent
        config = _optional_object(folder / "tokenizer_config.json")
        given = Fields(config, "tokenizer_config.json")
        file = folder / "tokenizer.json" if path.is_dir() else path
        ends: dict[str, bool | None] = {}
        if file.is_file():
            backend = _read_backend(file)
        else:
            backend = _read_gpt2_files(folder, config)
            ends = {"add_bos": given.flag("add_bos_token", None), "add_eos": given.flag("add_eos_token", None)}
            if backend.token_to_id(END_OF_TEXT) is not None:
                backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
                usual = ("eos_token",) if _is_qwen2(config) else ("bos_token", "eos_token")
                config = {**dict.fromkeys(usual, END_OF_TEXT), **config}
        _add_configured_tokens(backend, config)
        names = {**_optional_object(folder / "special_tokens_map.json"), **config}
        special = {k: text for k in _SPECIAL_NAMES if (text := _token_text(names.get(k)))}
        _make_special(backend, [special[k] for k in ("bos_token", "eos_token", "unk_token") if k in special])
        return Tokenizer(
            backend,
            special=special,
            chat_template=_read_chat_template(folder, config),
            tool_use_template=_read_tool_use_template(folder, config),
            **ends,
            split_special=bool(given.flag("split_special_tokens", False)),
            more_eos=_generation_eos(folder),
            config=config,
        )

    @staticmethod
    def train(texts: Iterable[str], vocab_size: int, *, progress: bool = False) -> Tokenizer:
        """Byte-level BPE with the special token <|endoftext|>; the same texts always give the same tokenizer.

        Every digit is a token of its own, as in SmolLM: arithmetic does not depend on how a number was cut.
        """
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        if vocab_size < len(alphabet) + 1:
            raise UserError(
                f"vocab_size={vocab_size} is too small for byte-level BPE: 256 bytes and "
                f"{END_OF_TEXT} need at least 257"
            )
        seen = False

        def watched() -> Iterator[str]:
            nonlocal seen
            for text in texts:
                seen = seen or bool(text)
                yield text

        backend = Backend(models.BPE())
        set_byte_level(backend, "digits")
        backend.train_from_iterator(
            watched(),
            trainers.BpeTrainer(  # type: ignore[call-arg]
                vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=progress
            ),
        )
        if not seen:
            raise UserError("there is no text to train a tokenizer on; check the data source")
        return Tokenizer(backend, special={"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT})

    @staticmethod
    def from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
        """From GGUF metadata (key -> value): byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""
        check_vocabulary(fields)
        kind = need(fields, "tokenizer.ggml.model")
        if kind == "gpt2":
            backend, add_bos = gguf_byte_level(fields)
        elif kind == "llama":
            backend, add_bos = gguf_sentencepiece(fields), True
        else:
            raise UserError(
                f"the GGUF vocabulary is of kind {shown(kind)} (tokenizer.ggml.model); "
                "'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE) can be read"
            )
        tokens = fields["tokenizer.ggml.tokens"]
        types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        if len(types) != len(tokens):
            raise UserError(f"the GGUF vocabulary has {len(tokens)} tokens but {len(types)} token types; it is damaged")
        backend.add_special_tokens(added_tokens(tokens, types, (UNKNOWN, CONTROL), special=True))
        backend.add_tokens(added_tokens(tokens, types, (USER_DEFINED,), special=False))

        special = {}
        for name, key in zip(_SPECIAL_NAMES, ("bos", "eos", "unknown", "padding"), strict=True):
            token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
            if token_id is not None and token_id < len(tokens):
                special[name] = tokens[token_id]
        turn_ends = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
        return Tokenizer(
            backend,
            special=special,
            chat_template=fields.get("tokenizer.chat_template"),
            add_bos=bool(fields.get("tokenizer.ggml.add_bos_token", add_bos)) and "bos_token" in special,
            add_eos=bool(fields.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in special,
            more_eos=[i for i in turn_ends if i is not None],
        )

    # --- encoding and decoding --------------------------------------------------------------------

    @property
    def beginning(self) -> list[int]:
        """What stands in place of an empty prompt: BOS, else EOS, which ends the text before; empty without both."""
        begin = self.eos_id if self.bos_id is None else self.bos_id
        return [] if begin is None else [begin]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids. `special` lets the post-processor add what the model expects around a text (BOS, EOS).

        Special tokens written out in the text ("<|im_end|>") become those tokens, as in `transformers` (but for models
        with `split_special_tokens`).
        """
        # As a batch of one: while it encodes a batch the library lets other threads run, and a long text takes seconds.
        return self.encode_batch([text], special=special)[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Like `encode` for each, on all cores."""
        with library_errors("the tokenizer cannot encode this text"):
            return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=special)]

    def encode_with_places(
        self, texts: Sequence[str], *, special: bool = True
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Like `encode_batch`, and for every token the characters [start, end) of its text that it stands for."""
        with library_errors("the tokenizer cannot encode this text"):
            found = self.backend.encode_batch(list(texts), add_special_tokens=special)
            return [(e.ids, e.offsets) for e in found]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        with library_errors("the tokenizer cannot decode these ids"):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def stream(
        self, *, skip_special: bool = True, shown: frozenset[int] = frozenset(), after: Sequence[int] = ()
    ) -> TokenStream | ByteStream:
        """A decoder that takes one id at a time; special tokens among `shown` are not skipped. `after`: the ids that
        the text continues, a prompt's. Without them it begins a text, and many decoders strip its first space."""
        skipped = self.special_ids - shown if skip_special else frozenset()
        if isinstance(self.backend.decoder, decoders.ByteLevel):
            return ByteStream(self.token_bytes, skipped)
        return TokenStream(self, skipped, after)

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        """id -> the bytes that it stands for; b"" for ids that no token has (padding of the vocabulary)."""
        backend, from_letter = self.backend, letter_bytes()
        byte_level = "ByteLevel" in str(type(backend.decoder)) or "ByteLevel" in str(backend.decoder)

        @lru_cache(maxsize=1 << 16)
        def read(token: int) -> bytes:
            name = backend.id_to_token(token)
            if name is None:
                return b""
            if byte_level:
                if all(letter in from_letter for letter in name):
                    return bytes(from_letter[letter] for letter in name)
                return name.encode()  # an added token, which is spelt as it is
            if token in self.special_ids:
                return name.encode()
            if _is_byte_token(name):
                return bytes([int(name[3:5], 16)])
            return name.replace("\u2581", " ").encode()

        return read

    # --- chat -------------------------------------------------------------------------------------

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text the model was tuned on for these messages ({"role", "content"}) and tools (JSON schemas, as OpenAI
        and `transformers` have them)."""
        template = self.tool_template if tools else self.chat_template
        if template is None:
            raise UserError("this model has no chat template; use a chat model, or give it a plain prompt")
        return render(
            template, list(messages), add_generation_prompt=add_generation_prompt, special=self.special, tools=tools
        )

    def render_spans(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """The chat as text and the characters [start, end) that the assistant writes; None where the template does not
        mark them."""
        template = self.tool_template if tools else self.chat_template
        if template is None or not marks_generation(template):
            return None
        return render_spans(template, messages, special=self.special, tools=tools)

    @property
    def end_texts(self) -> tuple[str, ...]:
        """How the tokens are written that end a turn."""
        return tuple(text for i in sorted(self.eos_ids) if (text := self.backend.id_to_token(i)))

    @property
    def tool_template(self) -> str | None:
        """The template for chats with tools: some models have one of its own."""
        return self.tool_use_template or self.chat_template

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of the rendered chat; no BOS is added beside the one that the template writes itself."""
        return self.encode(self.render_chat(messages, add_generation_prompt), special=False)

    # --- storage ----------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json (with chat template) and special_tokens_map.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.backend.to_str(), encoding="utf-8")
        # The generic class reads tokenizer.json as it is; the classes of single models rebuild parts of it.
        # What the post-processor says must not be said twice, hence no add_bos_token and no add_eos_token.
        dropped = ("auto_map", "add_bos_token", "add_eos_token", "added_tokens_decoder", "tokenizer_file")
        config = {k: v for k, v in self.config.items() if k not in dropped}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", **self.special}
        config.setdefault("clean_up_tokenization_spaces", False)
        config.pop("chat_template", None)
        if self.chat_template is not None and self.tool_use_template is not None:
            named = {"default": self.chat_template, "tool_use": self.tool_use_template}
            config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        elif self.chat_template is not None:
            config["chat_template"] = self.chat_template
        _write_json(folder / "tokenizer_config.json", config)
        _write_json(folder / "special_tokens_map.json", self.special)

    def spelling(self) -> Spelling | None:
        """None where a token may stand for more text than it is spelt with.

        That is so where a normalizer shortens the text, where cut-off text vanishes, and where a special token takes
        the spaces around it along. Byte-level BPE without these spells out every byte that it has a letter for.
        """
        stored = json.loads(self.backend.to_str())
        model, cut = stored["model"], stored["pre_tokenizer"] or {}
        cuts = cut.get("pretokenizers", [cut])
        spelt = (
            stored["normalizer"] is None
            and stored["truncation"] is None
            and model["type"] == "BPE"
            and not model["continuing_subword_prefix"]
            and not model["end_of_word_suffix"]
            and "ByteLevel" in {c.get("type") for c in cuts} <= {"ByteLevel", "Digits", "Split"}
            and all(c.get("behavior") != "Removed" for c in cuts)
            and not any(token["lstrip"] or token["rstrip"] for token in stored["added_tokens"])
        )
        if not spelt:
            return None
        added = [len(token["content"].encode()) for token in stored["added_tokens"]]
        longest = max([1, *map(len, model["vocab"]), *added])  # a letter of the vocabulary is a byte
        vanishing = sorted(byte for letter, byte in letter_bytes().items() if letter not in model["vocab"])
        return Spelling(longest, bytes(vanishing))

    @property
    def fingerprint(self) -> str:
        """Changes whenever the ids of some text could change."""
        text = self.backend.to_str() + "split_special_tokens" * self.split_special
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def adds_bos(self) -> bool:
        return self.bos_id is not None and self.encode("")[:1] == [self.bos_id]

    @property
    def adds_eos(self) -> bool:
        # Behind a letter: where BOS and EOS are the same token, an empty text does not tell them apart.
        return self.eos_id is not None and self.encode("a")[-1:] == [self.eos_id]

    def _special_id(self, name: str) -> int | None:
        return self.backend.token_to_id(self.special[name]) if name in self.special else None

    def _set_ends(self, add_bos: bool, add_eos: bool) -> None:
        bos = [self.special["bos_token"]] if add_bos and self.bos_id is not None else []
        eos = [self.special["eos_token"]] if add_eos and self.eos_id is not None else []
        if not bos and not eos:
            self.backend.post_processor = plain_post_processor()
            return
        ids = {text: self.backend.token_to_id(text) for text in bos + eos}
        self.backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos], pair=[*bos, "$A", *eos, *bos, "$B:1", *eos], special_tokens=list(ids.items())
        )


@dataclass(frozen=True)
class Spelling:
    """How much text a token of a byte-level vocabulary can stand for."""

    longest: int  # bytes of the longest token
    vanishing: bytes  # those without a letter in the vocabulary, which leaves them out or calls a row of them unknown

    def fewest_tokens(self, text: str) -> int:
        """A bound by bytes alone, without encoding: `encode` never gives fewer."""
        return -(-len(text.encode().translate(None, self.vanishing)) // self.longest)


def letter_bytes() -> dict[str, int]:
    """Letters of a byte-level vocabulary: printable ones are bytes of their own number, the others follow in order."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = sorted(set(range(256)) - {ord(letter) for letter in letters})
    return {letter: ord(letter) if ord(letter) < 256 else others[ord(letter) - 256] for letter in letters}


class ByteStream:
    """`TokenStream` for a byte-level vocabulary, at an eighth of its cost: a token's bytes depend on no other token."""

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._bytes, self._skipped = token_bytes, skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = self._held + self._decode(self._bytes(token_id))
        if text.endswith("\ufffd"):  # the end of a text is not given out with broken characters
            self._held = text
            return ""
        self._held = ""
        return text

    def finish(self) -> str:
        text, self._held = self._held + self._decode(b"", True), ""
        return text


class TokenStream:
    """Ids in, text out: never half a character, and in total exactly `decode` of all ids, behind those of `after`.

    Text is held back while more ids could still change it: behind a replacement character (the bytes of a character
    that may be unfinished) and inside a run of SentencePiece byte tokens (which are decoded as one run).
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], after: Sequence[int] = ()) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        # Not a byte token: bytes that follow would be decoded with it, and a part of a character spoils the whole run.
        shown = (i for i in reversed(after) if i not in skipped and not self._is_byte(i))
        # The ids that were given out last, then those not given out.
        self._window: list[int] = [*itertools.islice(shown, 1)]
        self._num_given = len(self._window)
        self._given = tokenizer.decode(self._window, False)  # the text of the first _num_given ids of the window

    def step(self, token_id: int) -> str:
        """The text that became certain with this id; often empty, sometimes several characters."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window, False)
        if text.endswith("\ufffd") or self._is_byte(token_id) or len(text) <= len(self._given):
            return ""
        fresh = text[len(self._given) :]
        # Keep the ids just given out: decoding depends on what stands before (leading spaces are stripped).
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        self._given = self._tokenizer.decode(self._window, False)
        return fresh

    def finish(self) -> str:
        """What was held back, with replacement characters for bytes that never became a character."""
        text = self._tokenizer.decode(self._window, False)[len(self._given) :]
        self._window, self._num_given, self._given = [], 0, ""
        return text

    def _is_byte(self, token_id: int) -> bool:
        return _is_byte_token(self._tokenizer.backend.id_to_token(token_id) or "")


def _is_byte_token(name: str) -> bool:
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


# --- files ----------------------------------------------------------------------------------------


# A prefix of continued words that is not empty, or a letter that is escaped, which could hide its key.
_SUBWORD_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"(?!")|\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])')


def _read_backend(file: Path) -> Backend:
    text = read_text(file)
    if _SUBWORD_PREFIX.search(text):
        _check_prefixed_merges(parse_json(text, str(file)), file)
    with library_errors(f"{file} is not a tokenizer.json of the tokenizers library"):
        backend = Backend.from_str(text)
    # As in `transformers`: how long a text may be is the caller's choice. A padding to 10**12 would end the process.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_prefixed_merges(values: Any, file: Path) -> None:
    """UserError where the second half of a BPE merge does not begin with `continuing_subword_prefix`.

    The library cuts as many bytes off each of them without looking, and a cut inside a character ends the process."""
    model = values.get("model") if isinstance(values, dict) else None
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        halves = merge.split(" ") if isinstance(merge, str) else merge
        second = halves[-1] if isinstance(halves, list) and halves else ""
        if not (isinstance(second, str) and second.startswith(prefix)):
            raise UserError(
                f"{file}: the merge {shown(merge)} does not fit continuing_subword_prefix={shown(prefix)}: its second "
                "half must begin with it; download the tokenizer again"
            )


def _read_gpt2_files(folder: Path, config: Mapping[str, Any]) -> Backend:
    for vocab_name, merges_name in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (folder / vocab_name).is_file() and (folder / merges_name).is_file():
            break
    else:
        sentencepiece = (
            " (a SentencePiece tokenizer.model alone cannot be read)" * (folder / "tokenizer.model").is_file()
        )
        raise UserError(
            f"no tokenizer in {folder}{sentencepiece}: expected tokenizer.json, vocab.json with merges.txt, "
            "or encoder.json with vocab.bpe"
        )
    vocab = read_object(folder / vocab_name, MOST_TEXT)
    if bad := next((k for k, v in vocab.items() if type(v) is not int or not 0 <= v <= MOST_TOKEN_ID), None):
        raise UserError(f"{folder / vocab_name} gives {shown(bad)} the id {shown(vocab[bad])}; ids are whole numbers")
    merges = []
    lines = read_text(folder / merges_name).splitlines()
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise UserError(f"{folder / merges_name}:{number} is not a merge: expected two pieces and one space")
        merges.append((pair[0], pair[1]))
    backend = build_bpe(vocab, merges, f"{vocab_name} with {merges_name} in {folder}")
    set_byte_level(backend, "qwen2" if _is_qwen2(config) else "gpt2")
    return backend


def _is_qwen2(config: Mapping[str, Any]) -> bool:
    return str(config.get("tokenizer_class", "")).startswith("Qwen2")


def _add_configured_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json declares; those of tokenizer.json are there already."""
    known = set(backend.get_added_tokens_decoder())
    declared = Fields(config, "tokenizer_config.json").object("added_tokens_decoder", {})
    for key, entry in declared.items():
        if not re.fullmatch("[0-9]{1,9}", key) or not isinstance(entry, dict) or not _token_text(entry):
            raise UserError(
                f"tokenizer_config.json: added_tokens_decoder has {shown(key)}: {shown(entry)}; expected a token id "
                "and an object with its 'content'"
            )
    for key, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        if int(key) in known:
            continue
        flags = {k: bool(entry.get(k, False)) for k in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        token = AddedToken(entry["content"], **flags)
        (backend.add_special_tokens if flags["special"] else backend.add_tokens)([token])
        if backend.token_to_id(entry["content"]) != int(key):
            raise UserError(
                f"tokenizer_config.json gives {shown(entry['content'])} the id {key}, but the vocabulary gives it "
                f"{backend.token_to_id(entry['content'])}; the two files do not belong together"
            )


def _make_special(backend: Backend, texts: Sequence[str]) -> None:
    """Special, as in `transformers`, even where tokenizer.json has them as ordinary tokens: chat templates write them
    out, and decoding leaves them out. Not the padding token, for which some models name a common word."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in texts:
        old = added.get(text, AddedToken(text, normalized=False))
        if backend.token_to_id(text) is not None and not (text in added and old.special):
            flags = {k: getattr(old, k) for k in ("lstrip", "rstrip", "single_word", "normalized")}
            backend.add_special_tokens([AddedToken(text, special=True, **flags)])


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_text(file, MOST_TEMPLATE)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = _named_templates(template)
        template = named.get("default") or next(iter(named.values()), None)
    return Fields({"chat_template": template}, "tokenizer_config.json").text("chat_template", None)


def _read_tool_use_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "additional_chat_templates" / "tool_use.jinja"
    if file.exists():
        return read_text(file, MOST_TEMPLATE)
    template = config.get("chat_template")
    found = _named_templates(template).get("tool_use") if isinstance(template, list) else None
    return Fields({"chat_template": found}, "tokenizer_config.json").text("chat_template", None)


def _named_templates(given: list[Any]) -> dict[str, Any]:
    if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in given):
        raise UserError("tokenizer_config.json: chat_template must be a text, or a list of objects with a 'name'")
    return {entry["name"]: entry.get("template") for entry in given}


def _generation_eos(folder: Path) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    return token_ids(Fields(_optional_object(file), str(file)), "eos_token_id")


def _token_text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _optional_object(file: Path) -> dict[str, Any]:
    return read_object(file) if file.exists() else {}


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
