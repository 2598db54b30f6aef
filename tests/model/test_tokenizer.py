"""Tokenizers: every source, round trips, streaming, chats, and agreement with transformers."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusals import refused
from shoestring.errors import UserError
from shoestring.model.gguf import read_metadata
from shoestring.model.gguf_vocabulary import vocabulary_metadata
from shoestring.model.tokenizer import END_OF_TEXT, Tokenizer
from shoestring.serve.http.http_process import tokenizer_from, tokenizer_json
from tiny import sentencepiece_fields

TEXTS = [
    "def main(argv: list[str]) -> int:\n    return 0\n",
    "The year 1984 cost 12,345 euros (€) and 3.14159 dollars; naïve 東京 🙂🙂.\n\n\tIt's what they've said.",
    "for i in range(10):\n        print(i, 'x' * i)  # a comment\r\n",
] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Yes?"}]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train(TEXTS, 340)


def byte_level_fields(pre: str, **changes: Any) -> dict[str, Any]:
    """The GGUF metadata of a trained byte-level BPE whose merges do not see digits or words cut by `pre`."""
    state = json.loads(Tokenizer.train(TEXTS, 340).backend.to_str())
    vocab = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.token_type": [3] + [1] * (len(vocab) - 1), "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0, **changes,
    }  # fmt: skip


# --- training -------------------------------------------------------------------------------------


def test_training_is_deterministic_across_processes(trained: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "texts.json"
    file.write_text(json.dumps(TEXTS))
    code = (
        "import json,sys; from shoestring.model.tokenizer import Tokenizer;"
        "print(Tokenizer.train(json.load(open(sys.argv[1])), 340).fingerprint)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert out.stdout.strip() == trained.fingerprint
    assert trained.fingerprint != Tokenizer.train(TEXTS[:1], 340).fingerprint


def test_trained_tokenizer_properties(trained: Tokenizer) -> None:
    assert trained.vocab_size == 340
    assert trained.bos_id == trained.eos_id == trained.backend.token_to_id(END_OF_TEXT)
    assert trained.eos_ids == {trained.eos_id}
    assert not trained.adds_bos
    # every digit by itself: no token of the vocabulary holds two
    assert not [t for t in trained.backend.get_vocab() if sum(c.isdigit() for c in t) > 1]
    assert len(trained.encode("def main(argv")) < len("def main(argv")


def test_training_rejects_too_small_and_empty() -> None:
    refused("at least 257", Tokenizer.train, TEXTS, 256)
    for nothing in ([], ["", ""]):
        refused("no text", Tokenizer.train, nothing, 300)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_round_trip_any_text(text: str) -> None:
    tokenizer = _shared()
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.encode_batch([text, text]) == [tokenizer.encode(text)] * 2


_CACHE: dict[str, Tokenizer] = {}


def _shared(kind: str = "bpe") -> Tokenizer:
    if kind not in _CACHE:
        spm = kind == "sentencepiece"
        _CACHE[kind] = Tokenizer.from_gguf(sentencepiece_fields()) if spm else Tokenizer.train(TEXTS, 340)
    return _CACHE[kind]


# --- streaming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_stream_equals_decode_for_any_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = _shared(kind)
    some = st.sampled_from(["🙂", "€", "the", " there", "\n", "é", "�"]).map(tokenizer.encode)
    junk = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6)
    ids = [i for part in data.draw(st.lists(st.one_of(some, junk), max_size=8)) for i in part]
    for skip_special in (True, False):
        stream = tokenizer.stream(skip_special=skip_special)
        pieces = [stream.step(i) for i in ids]
        assert not any(p.endswith("�") for p in pieces)
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids, skip_special)


def test_stream_gives_whole_characters_at_once(trained: Tokenizer) -> None:
    ids = [trained.backend.token_to_id(byte) for byte in "ðŁļĢ"]  # the four bytes of a rocket
    stream = trained.stream()
    assert [stream.step(i) for i in ids] == ["", "", "", "🚀"]
    stream = trained.stream()
    assert [stream.step(i) for i in ids[:2]] == ["", ""]
    assert stream.finish() == "�"


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_stream_behind_a_prompt_gives_what_the_whole_text_adds(data: st.DataObject) -> None:
    """A decoder of SentencePiece pieces strips the first space of what it takes for the beginning of a text."""
    tokenizer = _shared("sentencepiece")
    prompt = tokenizer.encode(data.draw(st.sampled_from(["the", "in a\n", "the é", "a ", "\n\n", "🙂"])))
    pieces = st.sampled_from(["▁the", "▁", "er", "</s>", "<0x0A>", "<unk>"]).map(tokenizer.backend.token_to_id)
    ids = data.draw(st.lists(pieces, max_size=8))
    stream = tokenizer.stream(after=prompt)
    text = "".join([*map(stream.step, ids), stream.finish()])
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids])


def test_a_stream_behind_special_tokens_alone_begins_a_text() -> None:
    tokenizer = _shared("sentencepiece")
    stream, the = tokenizer.stream(after=[1, 1]), tokenizer.backend.token_to_id("▁the")
    assert [stream.step(the), stream.step(the)] == ["the", " the"]


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [None, "llama", "gpt2", "qwen2"])
def test_saved_files_load_in_transformers(trained: Tokenizer, tmp_path: Path, model_type: str | None) -> None:
    from transformers import AutoTokenizer

    if model_type == "qwen2":  # transformers insists on Qwen's way of cutting text for this model type
        trained = Tokenizer.from_gguf(byte_level_fields("qwen2"))
    tokenizer = Tokenizer(trained.backend, special=trained.special, chat_template=CHATML + "{{ eos_token }}")
    tokenizer.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_file(tmp_path)
    for text in [*TEXTS, "a  b\n\n c 2024", END_OF_TEXT + "x"]:
        assert theirs(text)["input_ids"] == ours.encode(text) == trained.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text), skip_special=False)
    rendered = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert rendered == ours.render_chat(CHAT) == tokenizer.render_chat(CHAT)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert ours.fingerprint == trained.fingerprint


@pytest.mark.parametrize("model_type", [None, "llama"])
def test_bos_survives_saving(tmp_path: Path, model_type: str | None) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_gguf(sentencepiece_fields())
    assert tokenizer.adds_bos
    assert tokenizer.encode("the") == [1, *tokenizer.encode("the", special=False)]
    tokenizer.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    again, theirs = Tokenizer.from_file(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("there in the", "é🙂 the", " the  a"):
        assert tokenizer.encode(text) == again.encode(text) == theirs(text)["input_ids"]


def test_config_decides_extra_tokens(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    config = {
        "bos_token": {"content": END_OF_TEXT},
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {"340": {"content": "<|im_end|>", "special": True}},
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 340]}))
    tokenizer = Tokenizer.from_file(tmp_path)
    assert tokenizer.encode("x<|im_end|>") == [*trained.encode("x"), 340]
    assert tokenizer.eos_id == 340
    assert tokenizer.eos_ids == {7, 340, trained.bos_id}
    assert tokenizer.render_chat(CHAT) == "yes"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_file(tmp_path).render_chat(CHAT) == "from the file"
    config["added_tokens_decoder"] = {"999": {"content": "<|im_end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    refused("do not belong together", Tokenizer.from_file, tmp_path)


ENDS = [
    {"add_bos_token": bos, "add_eos_token": eos, "split_special_tokens": split}
    for bos in (None, True, False)
    for eos in (None, True)
    for split in (None, True)
]


@pytest.mark.parametrize("flags", ENDS, ids=str)
@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer", "post-processor with BOS", "with BOS and EOS"])
@pytest.mark.few(12)
def test_ends_and_split_special_tokens_as_in_transformers(
    trained: Tokenizer, tmp_path: Path, kind: str, flags: dict[str, bool | None]
) -> None:
    """The two flags of the ends count for GPT-2's files and not beside a tokenizer.json; the third always counts."""
    AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
    config = {name: flag for name, flag in flags.items() if flag is not None}
    if kind.endswith("Tokenizer"):
        write_gpt2_files(trained, tmp_path)
        config["tokenizer_class"] = kind
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    else:
        backend = type(trained.backend).from_str(trained.backend.to_str())
        Tokenizer(backend, special=trained.special, add_bos=True, add_eos="EOS" in kind).save(tmp_path)
        config |= json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.from_file(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    sent = tokenizer_from(json.loads(json.dumps(tokenizer_json(ours))))  # to the process that parses requests
    ours.save(tmp_path / "again")
    again = Tokenizer.from_file(tmp_path / "again")
    saved = AutoTokenizer.from_pretrained(tmp_path / "again")
    for text in (f"the {END_OF_TEXT} there", "the"):
        want = theirs(text)["input_ids"]
        assert ours.encode(text) == sent.encode(text) == again.encode(text) == saved(text)["input_ids"] == want
    assert (ours.fingerprint == trained.fingerprint) <= (not flags["split_special_tokens"])


@pytest.mark.parametrize("add_eos", [False, True])
def test_gguf_says_whether_an_eos_is_added(add_eos: bool) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_fields(**{"tokenizer.ggml.add_eos_token": add_eos}))
    assert tokenizer.encode("the") == [1, *tokenizer.encode("the", special=False), *[2] * add_eos]
    again = Tokenizer.from_gguf(vocabulary_metadata(tokenizer, tokenizer.vocab_size))
    assert again.adds_eos == add_eos and again.encode("the") == tokenizer.encode("the")


@pytest.mark.parametrize("added", [False, True])
def test_end_tokens_that_the_file_has_as_ordinary_ones(trained: Tokenizer, tmp_path: Path, added: bool) -> None:
    """A chat template writes the end token out, and it has to become that token; decoding leaves it out."""
    AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
    state = json.loads(trained.backend.to_str())
    end = max(state["model"]["vocab"].values()) + 1
    state["model"]["vocab"]["<end>"] = end
    if added:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        state["added_tokens"].append({"id": end, "content": "<end>", **flags, "lstrip": True})
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.from_file(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the <end>the", "<end>", "naïve<end> "):
        ids = ours.encode(text)
        assert end in ids and ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        stream = ours.stream()
        assert "".join([*map(stream.step, ids), stream.finish()]) == ours.decode(ids)


def write_gpt2_files(tokenizer: Tokenizer, folder: Path) -> str:
    """Returns the merges."""
    state = json.loads(tokenizer.backend.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(state["vocab"]))
    merges = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in state["merges"])
    (folder / "merges.txt").write_text(merges)
    return merges


def test_gpt2_files_equal_tokenizer_json(trained: Tokenizer, tmp_path: Path) -> None:
    merges = write_gpt2_files(trained, tmp_path)
    tokenizer = Tokenizer.from_file(tmp_path)
    assert tokenizer.eos_id == 0
    text = "def main the naïve 東京" + END_OF_TEXT
    assert tokenizer.encode(text) == _shared().encode(text)
    (tmp_path / "merges.txt").write_text(merges + "\nonlyone\n")
    refused(r"merges\.txt:\d+ is not a merge", Tokenizer.from_file, tmp_path)


@pytest.mark.assets
def test_gpt2_vocabulary_like_transformers(assets: Path, tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    source = assets / "tokenizers" / "gpt2"
    tokenizer = Tokenizer.from_file(source)
    assert tokenizer.vocab_size == 50257
    assert tokenizer.eos_id == 50256
    for theirs, ours in (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")):
        (tmp_path / theirs).write_bytes((source / ours).read_bytes())
    theirs = GPT2Tokenizer.from_pretrained(tmp_path)
    lines = (assets / "text" / "wikitext-2" / "test.txt").read_text().splitlines()[:300]
    assert tokenizer.encode_batch(lines) == theirs(lines)["input_ids"]


def test_bad_files(tmp_path: Path) -> None:
    refused("does not exist", Tokenizer.from_file, tmp_path / "no")
    refused(r"expected tokenizer\.json", Tokenizer.from_file, tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    refused("SentencePiece", Tokenizer.from_file, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(r"not a tokenizer\.json", Tokenizer.from_file, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    refused("not valid JSON", Tokenizer.from_file, tmp_path)


# --- chats ----------------------------------------------------------------------------------------


def chat_tokenizer(template: str | None) -> Tokenizer:
    return Tokenizer(_shared().backend, special=_shared().special, chat_template=template)


def test_templates_have_what_hugging_face_offers() -> None:
    template = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ eos_token }}"
    )
    assert chat_tokenizer(template).render_chat(CHAT) == '{"role": "user", "content": "Hi <b>"}4' + END_OF_TEXT


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "broken, line 1: Expected an expression"),
        ("{% break %}", "broken, 'break' outside loop"),  # Jinja lets it through, Python does not
        ("{{ " + "(" * 9999 + " }}", "nested too deeply"),
        ("\n", "broken, it is empty"),
        ("{{ messages[9].content.x }}", "does not accept"),
        ("{{ messages.append(1) }}", "does not accept"),  # the sandbox is immutable
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "does not accept"),
        (None, "no chat template"),
    ],
)
def test_template_errors_are_the_users(template: str | None, message: str) -> None:
    refused(message, chat_tokenizer(template).render_chat, CHAT)


def test_messages_need_a_role() -> None:
    refused("message 0", chat_tokenizer(CHATML).render_chat, [{"content": "x"}])


def test_encoded_chat_has_one_bos() -> None:
    tokenizer = Tokenizer.from_gguf(
        sentencepiece_fields(**{"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"})
    )
    assert tokenizer.encode_chat(CHAT).count(1) == 1


# --- GGUF vocabularies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 123", ["it", "'s", " 123"]),
        ("default", "it's 123", ["it", "'s", " 123"]),
        ("smollm", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
        ("llama-bpe", "IT'S 12345\n\nx", ["IT", "'S", " ", "123", "45", "\n\n", "x"]),
        ("qwen2", "IT'S 123", ["IT", "'S", " ", "1", "2", "3"]),
    ],
)
def test_gguf_pre_tokenizers(pre: str, text: str, words: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_fields(pre))
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in cut] == words
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text
    assert tokenizer.adds_bos == (pre == "llama-bpe")  # that family expects a BOS unless the file says otherwise


def test_gguf_metadata_decides_bos_and_token_types() -> None:
    fields = byte_level_fields("llama-bpe", **{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.eot_token_id": 9})
    tokenizer = Tokenizer.from_gguf(fields)
    assert not tokenizer.adds_bos
    assert tokenizer.eos_ids == {0, 9}
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "<tool>"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 4]
    tokenizer = Tokenizer.from_gguf(fields)
    assert tokenizer.encode("x<tool>")[-1] == 340
    assert tokenizer.decode([340]) == "<tool>"  # user-defined, not special: decoding keeps it


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'.*known: .*smollm"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'.*can be read"),
        ({"tokenizer.ggml.tokens": None}, r"has no tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "not a consistent BPE"),
        ({"tokenizer.ggml.token_type": [1]}, "damaged"),
    ],
)
def test_bad_gguf_vocabularies(changes: dict[str, Any], message: str) -> None:
    refused(message, Tokenizer.from_gguf, byte_level_fields("smollm", **changes))


def reference_sentencepiece(tokens: list[str], scores: list[float], text: str) -> list[int]:
    """SentencePiece's BPE as written down: join the best-scoring neighbours, leftmost first, while any."""
    ids = {token: i for i, token in enumerate(tokens)}
    pieces = list(("▁" + text).replace(" ", "▁"))
    while True:
        joined = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not joined:
            break
        at = -max(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    out: list[int] = []
    for piece in pieces:
        out += [ids[piece]] if piece in ids else [ids[f"<0x{b:02X}>"] for b in piece.encode()]
    return out


def test_sentencepiece_like_the_algorithm() -> None:
    fields = sentencepiece_fields()
    tokenizer = Tokenizer.from_gguf(fields)
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(
            rng.choice(["the", "re", "er", " ", "in", "a", "t", "é", "🙂"]) for _ in range(rng.randint(1, 12))
        )
        expected = reference_sentencepiece(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"], text)
        assert tokenizer.encode(text, special=False) == expected, text
        assert tokenizer.decode(expected) == text


@pytest.mark.assets
def test_sentencepiece_real_vocabulary(assets: Path) -> None:
    raw = (assets / "models" / "stories260k" / "tok512.bin").read_bytes()
    tokens, scores, at = [], [], 4
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        tokens.append(raw[at + 8 : at + 8 + length].decode(errors="replace").replace(" ", "▁"))
        scores.append(score)
        at += 8 + length
    tokens[:3] = ["<unk>", "<s>", "</s>"]
    tokens[3:259] = [f"<0x{b:02X}>" for b in range(256)]
    fields = sentencepiece_fields(
        **{
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        }
    )
    tokenizer = Tokenizer.from_gguf(fields)
    stories = (assets / "text" / "tinystories_2M.txt").read_text()[:200_000].split("\n")
    lines = [line for line in stories if line and END_OF_TEXT not in line][:300]
    assert len(lines) > 200
    for line in lines:
        assert tokenizer.encode(line, special=False) == reference_sentencepiece(tokens, scores, line), line


def reference_lines(assets: Path) -> list[str]:
    """Some 1,000 lines: encyclopedia, the beginnings of speeches, Python source."""
    wiki = (assets / "text" / "wikitext-2" / "test.txt").read_text().splitlines()[:700]
    speeches = [line[:2000] for line in (assets / "text" / "sotu.txt").read_text().splitlines()[:100]]
    code = Path(json.decoder.__file__).read_text().splitlines()[:300]
    return [*wiki, *speeches, *code]


@pytest.mark.assets
@pytest.mark.slow
def test_smollm2_vocabulary_like_transformers(assets: Path, smollm2_file: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_gguf(read_metadata(smollm2_file))
    theirs = AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)
    lines = [*reference_lines(assets), "1234567890 x12y 3.14", "<|im_start|>user\nHi<|im_end|>"]
    assert len(lines) >= 1000
    for line, expected in zip(lines, theirs(lines)["input_ids"], strict=True):
        assert tokenizer.encode(line) == expected, line
    rendered = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(CHAT) == rendered
    assert "You are a helpful AI assistant named SmolLM" in rendered
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.eos_ids == {0, 2}


FORGED = {
    "a charsmap that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a charsmap that ends early": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}},
    "a token that is nowhere": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "zz", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "more stripped than there is": {"decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}},
}


@pytest.mark.parametrize("changes", FORGED.values(), ids=FORGED)
def test_panics_of_the_library_are_errors(tmp_path: Path, changes: dict[str, Any]) -> None:
    stored = json.loads(Tokenizer.train(["the cat sat"], 260).backend.to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**stored, **changes}))
    with pytest.raises(UserError, match=r"not a tokenizer.json|cannot encode|cannot decode") as error:
        tokenizer = Tokenizer.from_file(tmp_path)
        tokenizer.decode(tokenizer.encode("aaa the cat"))
    assert type(error.value.__cause__).__name__ == "PanicException"


@pytest.mark.parametrize("key", ["continuing_subword_prefix", "continuing\\u005fsubword_prefix"])
def test_merges_without_the_prefix_of_their_file_are_refused(tmp_path: Path, key: str) -> None:
    text = Tokenizer.train(["é è ê é è ê"], 260).backend.to_str()  # cut after its first byte, é ends the process
    assert '"continuing_subword_prefix":null' in text
    (tmp_path / "tokenizer.json").write_text(text.replace('"continuing_subword_prefix":null', f'"{key}":"0"'))
    refused("does not fit continuing_subword_prefix='0'", Tokenizer.from_file, tmp_path)


def test_padding_and_truncation_of_the_file_are_the_callers_choice(tmp_path: Path) -> None:
    stored = json.loads(Tokenizer.train(["the cat sat"], 260).backend.to_str())
    padding = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    stored["padding"] = {"strategy": {"Fixed": 10**12}, **padding}  # would end the process
    stored["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = Tokenizer.from_file(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
