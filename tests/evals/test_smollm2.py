"""Reference values on a real model: SmolLM2-135M-Instruct (GGUF, de-quantised to fp32)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoestring.evals import perplexity, run_task
from shoestring.model.folder import LoadedModel, load_model


@pytest.fixture(scope="module")
def smollm2(smollm2_file: Path) -> LoadedModel:
    return load_model(smollm2_file)


@pytest.mark.assets
@pytest.mark.slow
def test_reference_values(smollm2: LoadedModel, assets: Path) -> None:
    """Perplexity and accuracies of a model that everybody has; longer texts take minutes on a small CPU."""
    text = (assets / "text/wikitext-2/test.txt").read_text(encoding="utf-8")
    tokens = torch.tensor(smollm2.tokenizer.encode(text[:10_000]))
    found = perplexity(smollm2.model, tokens, context=256, max_tokens=2 * 256)
    assert found.num_tokens == 2 * 255
    assert found.value == pytest.approx(22.460, rel=1e-3)
    cloze = run_task(smollm2.model, smollm2.tokenizer, assets / "eval/lambada_openai.jsonl", limit=4)
    choice = run_task(smollm2.model, smollm2.tokenizer, assets / "eval/arc_easy.jsonl", limit=6)
    assert (cloze.correct, choice.correct) == (2, 3)
