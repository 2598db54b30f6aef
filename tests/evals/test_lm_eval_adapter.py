"""The adapter's numbers always; its behaviour inside lm-eval where lm-eval is installed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.errors import UserError
from shoestring.evals.lm_eval_adapter import Scorer, lm_eval_model, read_settings
from shoestring.model.spec import LongRope
from shoestring.serve import Sampling
from tiny import LLAMA, tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer(tiny_llama(), tiny_tokenizer())


def log_probs(scorer: Scorer, tokens: list[int]) -> torch.Tensor:
    """log p of tokens[1:] given all before them, one full forward."""
    with torch.no_grad():
        logits = scorer.model(torch.tensor([tokens]))[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_loglikelihood(scorer: Scorer) -> None:
    encode = scorer.tokenizer.encode
    pairs = [("the cat", " sat on"), ("the cat", " was"), ("the dog ", "sat"), ("", "the mat")]
    got = scorer.loglikelihood(pairs)
    whole = [encode("the cat sat on"), encode("the cat was"), encode("the dog sat"), [0, *encode("the mat")]]
    cut = [len(encode("the cat")), len(encode("the cat")), len(encode("the dog")), 1]
    assert scorer.prefix_id == 0
    for (value, _), tokens, at in zip(got, whole, cut, strict=True):
        assert value == pytest.approx(log_probs(scorer, tokens)[at - 1 :].sum().item(), abs=1e-4)
    assert scorer.loglikelihood([]) == []


def test_greedy_flag_agrees_with_generation(scorer: Scorer) -> None:
    encode = scorer.tokenizer.encode
    num_checked = 0
    for context in (
        "the cat",
        "the dog",
        "it was",
        "on the mat",
        "he said",
        "a dog",
        "was it",
        "a",
        "the mat",
        "log",
        "cat",
        "sat",
    ):
        written = scorer.engine.generate([context], Sampling(max_tokens=1))[0]
        assert scorer.loglikelihood([(context, " zebra"), (context, "")])[0][1] is False
        if encode(context + written.text) == encode(context) + written.token_ids:
            num_checked += 1
            assert scorer.loglikelihood([(context, "zebra"), (context, written.text)])[1][1] is True
    assert num_checked
    assert scorer.loglikelihood([("the cat", "")]) == [(0.0, True)]


@pytest.mark.parametrize("num", [1, 63, 64, 65, 150, 200])
def test_rolling_predicts_every_token_once_with_all_the_context_that_fits(scorer: Scorer, num: int) -> None:
    tokens = torch.randint(0, 300, (num,), generator=torch.Generator().manual_seed(1)).tolist()
    found = scorer.rolling(tokens)
    assert [t for _, target in found for t in target] == tokens
    for prompt, target in found:
        assert len(prompt) + len(target) - 1 <= scorer.context
    for prompt, target in found[1:]:
        assert len(prompt) + len(target) - 1 == scorer.context  # windows after the first are full
    assert found[0][0] == [0]


def test_rolling_likelihood(scorer: Scorer) -> None:
    text = "the cat sat on the mat"
    tokens = [0, *scorer.tokenizer.encode(text)]
    assert scorer.loglikelihood_rolling(text) == pytest.approx(log_probs(scorer, tokens).sum().item(), abs=1e-4)
    assert scorer.loglikelihood_rolling("") == 0


def test_generate_until(scorer: Scorer) -> None:
    free = scorer.generate_until([("the cat", {"until": [], "max_gen_toks": 12})])[0]
    stop = free[3:5]
    cut = scorer.generate_until([("the cat", {"until": [stop], "max_gen_toks": 12}), ("x" * 500, {"max_gen_toks": 3})])
    assert cut[0] == free[: free.index(stop)]


def test_prompts_are_cut_to_what_the_engine_reads(scorer: Scorer) -> None:
    """Of a model with longrope that is its original context, which is shorter than its positions."""
    half = LLAMA.head_dim // 2
    rope = LongRope((1.0,) * half, (3.0,) * half, original_positions=24, attention_factor=1.0)
    long = Scorer(tiny_llama(replace(LLAMA, rope_scaling=rope)), scorer.tokenizer)
    assert long.generate_until([("x" * 500, {"max_gen_toks": 3})]) == long.generate_until(
        [("x" * 400, {"max_gen_toks": 3})]
    )


def test_settings() -> None:
    assert read_settings({"until": "\n"}) == Sampling(stop=("\n",), max_tokens=256)
    assert read_settings({"do_sample": False, "temperature": 0.7}).temperature == 0
    assert read_settings({"do_sample": True, "temperature": 0.7}).temperature == 0.7
    assert read_settings({"top_p": 0, "top_k": -1}) == Sampling(top_p=0.0, max_tokens=256)
    nothing = dict.fromkeys(("until", "max_gen_toks", "temperature", "top_p", "top_k", "min_p", "seed"))
    assert read_settings(nothing) == Sampling(max_tokens=256)
    with pytest.raises(UserError, match="beams"):
        read_settings({"beams": 4})


def test_the_absence_of_lm_eval_is_said(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(UserError, match=r"shoestring\[eval\]"):
        lm_eval_model(scorer.model, scorer.tokenizer)


def test_inside_lm_eval(scorer: Scorer, tmp_path: Path) -> None:
    for part in ("datasets", "evaluate"):  # its client of servers is tested without these
        pytest.importorskip(part, reason="lm-eval is not installed (extra `eval`)")
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra `eval`)")
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for num in (1, 63, 64, 65, 150, 200):
        tokens = list(range(num))
        theirs = map(make_disjoint_window, get_rolling_token_windows(tokens, 0, scorer.context, 1))
        assert scorer.rolling(tokens) == list(theirs)

    choices = [" sat", " was a dog"]
    questions = [{"q": "the cat", "gold": 0}, {"q": "the dog", "gold": 1}, {"q": "it", "gold": 0}]
    (tmp_path / "questions.jsonl").write_text("\n".join(json.dumps(q) for q in questions))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/questions.jsonl}}, cache_dir: {tmp_path}/cache}}
test_split: test
doc_to_text: "{{{{q}}}}"
"""
    (tmp_path / "choice.yaml").write_text(
        "task: tiny_choice\noutput_type: multiple_choice\ntarget_delimiter: ''\ndoc_to_target: gold\n"
        f"doc_to_choice: {json.dumps(choices)}\nmetric_list: [{{metric: acc}}, {{metric: acc_norm}}]" + common
    )
    (tmp_path / "write.yaml").write_text(
        "task: tiny_write\noutput_type: generate_until\ndoc_to_target: gold\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 4, do_sample: false}\n"
        "metric_list: [{metric: exact_match}]" + common
    )
    lm: Any = lm_eval_model(scorer.model, scorer.tokenizer)
    results = lm_eval.simple_evaluate(
        model=lm,
        tasks=["tiny_choice", "tiny_write"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    expected = 0
    for q in questions:
        values = [v for v, _ in scorer.loglikelihood([(q["q"], c) for c in choices])]
        expected += values.index(max(values)) == q["gold"]
    assert results["results"]["tiny_choice"]["acc,none"] == pytest.approx(expected / 3)
    written = [s["resps"][0][0] for s in results["samples"]["tiny_write"]]
    engine_text = scorer.engine.generate([q["q"] for q in questions], Sampling(max_tokens=4, stop=(".",)))
    assert written == [c.text for c in engine_text]
