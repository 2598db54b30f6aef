"""lm-eval's own client of a completions server (`local-completions`) against ours, with its real code: likelihoods,
rolling likelihoods and written texts are those of the adapter, which computes them without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import running

from shoestring.evals.lm_eval_adapter import Scorer
from shoestring.model.folder import save_model
from shoestring.serve import Sampling
from tiny import chat_tokenizer, served_model

for name in ("lm_eval", "aiohttp", "tenacity", "requests", "tqdm"):
    pytest.importorskip(name, reason="lm-eval's client is not installed (extra `dev`)")

PAIRS = [
    ("The quick brown", " fox"),
    ("The quick brown", " dog jumps"),
    ("def main(argv):", "\n    return 0"),
    ("Ein Bär, zwei ", "Bären"),
    ("", "naïve café"),
]
UNTIL = {"until": ["qu", "\n"], "max_gen_toks": 12, "do_sample": False}


@pytest.fixture(scope="module")
def service() -> Iterator[Any]:
    with running(max_requests=4, max_queue=64, api_keys=("let me in",)) as started:
        yield started


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    tokenizer = chat_tokenizer()
    return Scorer(served_model(tokenizer.vocab_size), tokenizer)


def ask(service: Any, **options: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    url = f"{service.url}/v1/completions"
    return LocalCompletionsAPI(base_url=url, model="tiny", max_length=4096, max_retries=1, **options)


def instances(kind: str, asked: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i) for i, args in enumerate(asked)]


@pytest.mark.parametrize("tokenizer", ["of a folder", "of the server"])
def test_likelihoods_and_texts_are_the_models(
    service: Any, scorer: Scorer, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "let me in")
    options: dict[str, Any] = {"batch_size": 2, "auth_token": "let me in"}  # found out by asking the server
    if tokenizer == "of a folder":
        save_model(tmp_path / "model", scorer.model, scorer.tokenizer)
        path = str(tmp_path / "model")
        options = {"tokenizer": path, "tokenizer_backend": "huggingface", "num_concurrent": 3}
    lm = ask(service, **options)
    assert lm.tokenizer_backend == ("huggingface" if tokenizer == "of a folder" else "remote")
    assert lm.tok_encode("zwei Bären") == scorer.tokenizer.encode("zwei Bären")

    found = lm.loglikelihood(instances("loglikelihood", PAIRS))
    expected = scorer.loglikelihood(PAIRS)
    assert [p for p, _ in found] == pytest.approx([p for p, _ in expected], abs=1e-3)
    assert [g for _, g in found] == [g for _, g in expected]

    text = "The quick brown fox jumps over the lazy dog. Ein Bär"
    (rolling,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]))
    assert rolling == pytest.approx(scorer.loglikelihood_rolling(text), abs=1e-3)

    wanted = [("The quick", UNTIL), ("return", UNTIL), ("Ein Bär", {**UNTIL, "until": ["\n"]})]
    written = lm.generate_until(instances("generate_until", wanted))
    assert written == scorer.generate_until(wanted)
    assert any(len(t) > 4 for t in written)


def test_greedy_continuations_are_seen_as_such(service: Any, scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accuracy of cloze tasks (LAMBADA) rests on this flag: true for what the model itself would write."""
    monkeypatch.setenv("OPENAI_API_KEY", "let me in")
    lm = ask(service, auth_token="let me in")
    tokens = scorer.tokenizer.encode("The quick brown")
    own = scorer.engine.generate([tokens], Sampling(max_tokens=3, ignore_eos=True))[0].token_ids
    other = [*own[:-1], (own[-1] + 1) % 256]
    asked = [("", tokens, own), ("", tokens, other)]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(asked)] == [True, False]
