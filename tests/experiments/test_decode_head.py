from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.results import record, recorded
from experiments import decode_head


def test_heads_are_compared_on_the_same_hidden_states() -> None:
    gen = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(300, 8, generator=gen), torch.randn(11, 8, generator=gen)
    target = torch.randint(0, 11, (300,), generator=gen)
    plain = torch.nn.functional.cross_entropy(hidden @ head.T, target).exp().item()
    assert decode_head.compare(hidden, target, head, head) == pytest.approx((plain, plain, 0.0, 1.0), abs=1e-4)
    other = head + 0.3 * torch.randn(11, 8, generator=gen)
    p, q = ((hidden @ w.T).log_softmax(-1) for w in (head, other))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean").item()
    same = (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    assert decode_head.compare(hidden, target, head, other)[2:] == pytest.approx((kl, same), rel=1e-4)


def test_the_table_shows_the_last_line_of_a_head_with_novels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_head, "recorded", lambda bench: recorded(bench, tmp_path))
    common: dict[str, Any] = {"bench": "decode_head", "metric": "perplexity", "unit": "", "folder": tmp_path}
    common |= {"case": "int8:g0", "baseline_value": 20.0}
    wiki = {"kl": 1e-3, "same_argmax": 0.5}
    record(**common, samples=[21.0], quality=wiki, config={"tokens": 2048})
    page = decode_head.table()
    assert "| int8:g0 | 20.000 | 21.000 | 1.0e-03 | 50.00% |  |  |  |  |" in page
    off = dict(zip(decode_head.NOVELS, (40.0, 44.0, 2e-3, 0.25), strict=True))
    record(**common, samples=[22.0], quality={**wiki, **off}, config={"tokens": 8192})
    page = decode_head.table()
    assert page.count("int8:g0") == 1 and "8,192 tokens of each text" in page
    assert "| 22.000 | 1.0e-03 | 50.00% | 40.000 | 44.000 | 2.0e-03 | 25.00% |" in page
