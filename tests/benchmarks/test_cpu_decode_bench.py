"""The CPU decode bench: its perplexity is that of the evaluation, its table says what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import cpu_decode
from benchmarks.results import newest, record
from shoestring.evals import result_line
from shoestring.evals.perplexity import perplexity
from shoestring.model import Decoder, ModelSpec


def test_perplexity_of_logits_is_perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_decode, "CONTEXT", 16)
    torch.manual_seed(0)
    model = Decoder(ModelSpec(96, 64, 2, 4, 2, 16, 128, 64))
    tokens = torch.randint(96, (48,))
    wanted = perplexity(model, tokens, context=16).value
    assert cpu_decode.perplexity(model, tokens) == pytest.approx(wanted, rel=1e-5)
    assert cpu_decode.perplexity_by_token(model, tokens) == pytest.approx(wanted, rel=1e-5)


def test_the_table_has_measured_rows_and_clocks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_decode, "newest", lambda bench: newest(bench, tmp_path))
    monkeypatch.setattr(result_line, "device_name", lambda: cpu_decode.ARM)
    assert cpu_decode.table() == "Not measured yet."
    config = {"threads": 1, "clock": "processor", "prompt": 64, "new": 48}
    common = {"bench": "cpu_decode", "unit": "tokens/s", "folder": tmp_path, "config": config, "ratio": 0.25}
    record(case="fp32", metric="tokens_per_s", samples=[10.0, 12.5, 14.0], note="Busy.", **common)  # type: ignore[arg-type]
    record(bench="cpu_decode", case="fp32", metric="perplexity", unit="", samples=[26.964], folder=tmp_path)
    text = cpu_decode.table()
    row = next(line for line in text.splitlines() if line.startswith("| fp32"))
    assert row == "| fp32 | 26.96 |  | 12.5 (10.0-14.0) | 0.25x |"
    assert "1 thread, processor clock" in text and "wall" not in text and "Busy." in text
    assert "llama.cpp Q4_1 |" not in text and "Time of a token" not in text
    config = {**config, "threads": 2, "clock": "wall"}
    common = {**common, "config": config, "ratio": 2.0, "metric": "tokens_per_s", "samples": [25.0]}
    stepped = "int4:g64" + cpu_decode.WHOLE
    record(case=stepped, **common)  # type: ignore[arg-type]
    for metric, value in (("perplexity", 34.5), ("perplexity_by_token", 34.4)):
        record(bench="cpu_decode", case=stepped, metric=metric, unit="", samples=[value], folder=tmp_path)
    text = cpu_decode.table()
    assert f"| {stepped} | 34.50 | 34.40 |  |  | 25.0 (25.0-25.0) | 2.00x |" in text
    assert "in units of llama.cpp's best: 0.50 (int4:g64, 2 threads)." in text
    assert text.count("**") == 2 and "prompt" not in text
    monkeypatch.setattr(result_line, "device_name", lambda: "another machine")
    record(case=stepped, **common)  # type: ignore[arg-type]
    record(case=stepped, **{**common, "metric": cpu_decode.PROMPT, "samples": [1234.0]})  # type: ignore[arg-type]
    record(bench="cpu_decode", case=stepped, metric="perplexity", unit="", samples=[34.3], folder=tmp_path)
    first, other = cpu_decode.table().split("**another machine**")
    assert first.rstrip() == text and "| prompt tokens/s, 2 threads |" in other
    assert f"| {stepped} | 34.30 |  | 25.0 (25.0-25.0) | 2.00x | 1,234 |" in other


def test_the_script_for_the_other_interpreter_is_python() -> None:
    compile(cpu_decode.LLAMA_SCRIPT, "llama", "exec")


def test_the_table_of_several_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_decode, "newest", lambda bench: newest(bench, tmp_path))
    assert cpu_decode.streams_table() == "Not measured yet."
    for threads, streams, value in ((1, 1, 60.0), (1, 16, 1200.0), (2, 2, 90.0)):
        config = {"threads": threads, "streams": streams}
        common = {"metric": cpu_decode.TOGETHER, "unit": "tokens/s", "samples": [value], "config": config}
        record(bench="cpu_decode", case="llama.cpp Q4_0", folder=tmp_path, **common)  # type: ignore[arg-type]
    text = cpu_decode.streams_table()
    assert "| 1 | llama.cpp Q4_0 | 60 |  |  |  | 1,200 |" in text and "| 2 | llama.cpp Q4_0 |  | 90 |  |  |  |" in text
    assert "fp32" not in text and cpu_decode.table() == "Not measured yet."


def test_steps_of_several_requests_are_timed_together() -> None:
    torch.manual_seed(0)
    model = Decoder(ModelSpec(96, 64, 2, 4, 2, 16, 128, 64))
    seconds = cpu_decode.time_steps(model, [3, 4, 5], new=6, threads=torch.get_num_threads(), streams=3)
    assert len(seconds["prompt"]) == 1 and len(seconds["wall"]) == len(seconds["processor"]) == 5
