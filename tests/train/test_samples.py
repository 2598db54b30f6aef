"""Examples of fine-tuning: what is learned of a row, packing, and rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.errors import UserError
from shoestring.model import Tokenizer
from shoestring.train.examples import Example, example_of, read_examples
from shoestring.train.objectives import CrossEntropy
from shoestring.train.samples import Encoding, SampleData, Samples, encode_examples, pack_rows
from shoestring.train.step import IGNORED, Micro
from tiny import LLAMA, tiny_llama

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = (  # what the assistant thought before is left out once another turn follows
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content.split('|')[-1] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "two plus three"},
    {"role": "assistant", "content": "think|five"},
    {"role": "user", "content": "and four"},
    {"role": "assistant", "content": "nine"},
]


def trained_backend() -> Any:
    trained = Tokenizer.train(["two plus three is five and four is nine, be brief user assistant system " * 3], 300)
    trained.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return trained.backend


@pytest.fixture(scope="module")
def backend() -> Any:
    return trained_backend()


def tokenizer(backend: Any, template: str | None = CHATML) -> Tokenizer:
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return Tokenizer(backend, special=special, chat_template=template)


def learned_text(row: Any, using: Tokenizer, **options: Any) -> list[str]:
    """What is learned of each sample, in one text."""
    pairs = "chosen" in row
    samples, _ = encode_examples([example_of(row, "here")], using, context=256, pairs=pairs, **options)
    cuts = zip(samples.starts[:-1], samples.starts[1:], strict=True)
    return [using.decode(samples.tokens[a:b][samples.learned[a:b]].tolist(), skip_special=False) for a, b in cuts]


@pytest.mark.parametrize(
    ("template", "train_on", "expected"),
    [
        (CHATML, "assistant", "think|five<|im_end|>nine<|im_end|>"),
        (CHATML, "last", "nine<|im_end|>"),
        (MARKED, "assistant", "think|five<|im_end|>\nnine<|im_end|>\n"),  # as the template marks it
        (MARKED, "last", "nine<|im_end|>\n"),
        (FORGETS, "last", "nine<|im_end|>"),
    ],
)
def test_the_assistants_words_are_learned(backend: Any, template: str, train_on: Any, expected: str) -> None:
    using = tokenizer(backend, template)
    assert learned_text({"messages": CHAT}, using, train_on=train_on) == [expected]
    sharegpt = [
        {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]} for m in CHAT
    ]
    assert learned_text({"conversations": sharegpt}, using, train_on=train_on) == [expected]
    whole = learned_text({"messages": CHAT}, using, train_on="all")[0]
    assert whole == using.render_chat(CHAT, False)


def test_labels_equal_trls_where_the_template_marks_them(backend: Any) -> None:
    golden = json.loads(Path(__file__).with_name("trl_sft.json").read_text())
    samples, _ = encode_examples([example_of({"messages": CHAT}, "here")], tokenizer(backend, MARKED), context=256)
    assert samples.tokens.tolist() == golden["ids"]
    assert np.where(samples.learned, samples.tokens, IGNORED).tolist() == golden["labels"]


def test_other_kinds_of_rows(backend: Any) -> None:
    using, bare = tokenizer(backend), tokenizer(backend, None)
    assert learned_text({"prompt": "two plus", "completion": " three"}, using) == [" three<|im_end|>"]
    assert learned_text({"prompt": CHAT[:4], "completion": CHAT[4:]}, using) == ["nine<|im_end|>"]
    assert learned_text({"text": "two plus three"}, using) == ["two plus three<|im_end|>"]
    asked = {"instruction": "two plus three", "input": "be brief", "output": "five"}
    assert learned_text(asked, using) == ["five<|im_end|>"] == learned_text(asked, bare)
    pair = {"prompt": "two plus three", "chosen": " five", "rejected": " nine"}
    assert learned_text(pair, using) == [" five<|im_end|>", " nine<|im_end|>"]
    without = {"chosen": CHAT[:3], "rejected": [*CHAT[:2], {"role": "assistant", "content": "nine"}]}
    assert learned_text(without, using) == ["think|five<|im_end|>", "nine<|im_end|>"]


def test_files_of_every_kind_hold_the_same(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": CHAT[:3]}, {"messages": CHAT}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [
        [(e.prompt, e.answers) for e in read_examples(str(tmp_path / f"a.{end}"))]
        for end in ("jsonl", "json", "parquet")
    ]
    assert found[0] == found[1] == found[2] and len(found[0]) == 2


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": CHAT[:2]}, "no assistant turn"),
        ({"messages": [*CHAT[:2], {"role": "assistant", "content": " "}]}, "turn 3, the assistant's, is empty"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "turn 1 has the role 'narrator'"),
        ({"messages": "hello"}, "a chat is a list"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "turn 1 has the role"),
        ({"messages": CHAT, "tools": [1]}, "give a list of JSON schemas"),
        ({"prompt": "a", "completion": CHAT}, "must both be texts"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal"),
        ({"question": "a"}, "expected messages"),
        (["a"], "expected an object"),
    ],
)
def test_refused_rows(row: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        example_of(row, "data.jsonl:3")
    assert str(refused.value).startswith("data.jsonl:3") and "\n" not in str(refused.value)


def test_refused_data(backend: Any) -> None:
    using, chat = tokenizer(backend), example_of({"messages": CHAT}, "data.jsonl:3")
    text = example_of({"prompt": "two plus three is", "completion": " five"}, "data.jsonl:4")

    def refused(examples: list[Example], says: str, with_: Tokenizer = using, **options: Any) -> None:
        with pytest.raises(UserError, match=says):
            encode_examples(examples, with_, **{"context": 256, **options})

    refused([chat], "turn 3 cannot be told.*train_on=last", tokenizer(backend, FORGETS))
    refused([chat], "no chat template", tokenizer(backend, None))
    refused([chat], "data.jsonl:3 has .* tokens, more than context=16", context=16)
    refused([chat], "is no preference pair", pairs=True)
    refused([], "no sample to learn from")
    refused([chat], "no sample to learn from: 1 were dropped", context=16, too_long="drop")
    encoding = Encoding()
    samples, _ = encode_examples([chat, text], using, context=16, too_long="drop", encoding=encoding)
    assert (samples.num_units, encoding.num_dropped) == (1, 1)
    encode_examples([text], using, context=5, too_long="cut", train_on="all", encoding=encoding)
    assert encoding.num_cut == 1


def drawn_samples(lengths: list[int], per_unit: int = 1) -> Samples:
    """Samples of so many tokens, of which the first third is not learned."""
    draw = np.random.default_rng(0)
    starts = np.cumsum([0, *lengths])
    tokens = draw.integers(0, LLAMA.vocab_size, starts[-1]).astype(np.int32)
    learned = np.concatenate([np.arange(n) >= max(1, n // 3) for n in lengths])
    return Samples(tokens, learned, starts, per_unit)


@given(st.lists(st.integers(1, 32), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_packing_keeps_every_sample_once_and_wastes_little(lengths: list[int]) -> None:
    rows = pack_rows(np.array(lengths), np.arange(len(lengths)), 32)
    assert sorted(unit for row in rows for unit in row) == list(range(len(lengths)))
    sums = [sum(lengths[unit] for unit in row) for row in rows]
    assert max(sums) <= 32
    assert len(rows) <= 1 + sum(lengths) // 16  # no two rows would fit into one
    assert len(rows) == 1 or sorted(sums)[0] + sorted(sums)[1] > 32


@pytest.mark.parametrize("pack", [True, False])
def test_steps_are_a_function_of_the_seed_and_every_epoch_has_every_sample(pack: bool) -> None:
    samples = drawn_samples([5, 17, 9, 3, 12, 25, 7, 7, 30, 4, 6])
    options: dict[str, Any] = {"context": 32, "pack": pack, "seed": 3}
    whole = SampleData(samples, batch=2, **options)
    steps = whole.num_steps(2)
    seen = [micro for step in range(steps) for micro in whole.step(step)]
    again = SampleData(samples, batch=2, **options)
    later = [micro for step in reversed(range(steps)) for micro in again.step(step)][::-1]
    assert all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in zip(seen, later, strict=True))
    shares = [SampleData(samples, batch=2, dp_rank=rank, dp_size=2, **options) for rank in range(2)]
    for step in range(steps):
        (one,), parts = whole.step(step), [share.step(step)[0] for share in shares]
        assert one.num_counted == sum(part.num_counted for part in parts)
    rows = whole.num_rows(2)
    units = [unit for number in range(rows) for unit in whole.row(number)]
    assert sorted(units) == sorted([*range(11), *range(11)])
    assert 8 in whole.row(0) + whole.row(1)  # the longest is in the first step
    once = sum(micro.num_counted for micro in whole.once())
    assert once == int(samples.learned.sum())


def test_a_packed_batch_has_the_gradients_of_its_samples_alone() -> None:
    samples, model = drawn_samples([5, 17, 9, 3, 12, 20]), tiny_llama()
    data = SampleData(samples, context=32, batch=2)
    for micro in data.once():
        CrossEntropy()(model, micro).backward()
    packed = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for a, b in zip(samples.starts[:-1], samples.starts[1:], strict=True):
        ids = torch.from_numpy(samples.tokens[a:b].astype(np.int64))[None]
        counted = torch.from_numpy(samples.learned[a + 1 : b])[None]
        targets = ids[:, 1:].masked_fill(~counted, IGNORED)
        CrossEntropy()(model, Micro(ids[:, :-1], targets, targets)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert (packed[name] - p.grad).norm() < 1e-5 * p.grad.norm(), name
