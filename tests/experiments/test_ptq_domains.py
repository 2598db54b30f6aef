"""The tables of experiments/ptq_domains: rows of GPUs and of CPUs, which compute in other dtypes, do not mix."""

from __future__ import annotations

from typing import Any

import pytest

from experiments import ptq_domains
from experiments.ptq_domains import DOMAINS


def line(case: str, device: str, value: float, tokens: int) -> dict[str, Any]:
    format = "dense" if case == "dense" else "int4:g64"
    config = {"model": ptq_domains.SMOLLM2, "context": 512, "tokens": tokens * len(DOMAINS), "format": format}
    config |= {"method": case.partition("@")[0], "calibration": "wiki", "calibration_tokens": 16384}
    quality = {"perplexity": dict.fromkeys(DOMAINS, 10 + value), "divergence": dict.fromkeys(DOMAINS, value)}
    told = {"device": device, "versions": {}, "commit": "c", "date": "2026-01-01", "note": ""}
    return {"case": case, "value": value, "quality": quality, "config": config, **told}


def test_rows_of_a_cpu_have_their_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line("dense", "NVIDIA", 0.0, 16384), line("gptq@wiki", "NVIDIA", 0.5, 16384)]
    monkeypatch.setattr(ptq_domains, "newest", lambda bench: lines)
    assert ptq_domains.on_cpu() == "Not measured yet."
    before = ptq_domains.table()
    cpu = "x86_64 CPU, 2 cores"
    lines += [line("dense", cpu, 0.0, 1024), line("gptq@wiki", cpu, 9.0, 1024)]  # a trial, then on more tokens
    lines += [line(case, cpu, value, 4096) for case, value in (("dense", 0.0), ("gptq@wiki", 2.0))]
    lines.append(line("gptq,act_order@wiki", cpu, 1.0, 4096))
    assert ptq_domains.table() == before and "16,384 tokens of each kind" in before
    page = ptq_domains.on_cpu()
    assert "4,096 tokens of each kind" in page and page.count("| int4:g64 |") == 2
    assert page.index("gptq,act_order") < page.index("| gptq |")
    assert "+10.0%" in page and "+20.0%" in page
