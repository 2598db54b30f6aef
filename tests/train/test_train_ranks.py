"""The same loss on any mesh, with prompts masked so that micro-batches and ranks count unequal numbers of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks_golden import losses

from shoestring.state.checkpoint import latest_step

SCRIPT = Path(__file__).parent / "ranks_golden.py"
QWEN = {"qk_norm": True, "qkv_bias": True, "tied": False, "num_kv_heads": 2, "vocab_size": 95, "act": "geglu"}
GPT2 = {
    "norm": "layer", "act": "gelu_tanh", "positions": "learned", "qkv_bias": True, "out_bias": True, "mlp_bias": True,
}  # fmt: skip
# 64 rows a rank for 32 experts: some have none.
FEW_ROWS = {"experts": {"num": 32, "top_k": 1, "d_ff": 16}, "spec": {"num_layers": 1}}


def on_ranks(run_ranks: Callable[..., str], num_ranks: int, cases: list[dict[str, Any]]) -> list[list[float]]:
    out = run_ranks(num_ranks, SCRIPT, json.dumps(cases), timeout=420)
    line = next(line for line in out.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def check(cases: list[dict[str, Any]], got: list[list[float]]) -> None:
    for case, numbers in zip(cases, got, strict=True):
        same_on_one = {k: v for k, v in case.items() if k in ("spec", "teacher", "format", "experts", "muon")}
        want = losses(same_on_one)
        assert len(numbers) == len(want)
        worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(numbers, want, strict=True))
        # Sums in another order put a number on the other side of a tie now and then, which is a large step in FP8.
        assert worst < (1e-4 if "fp8" in case.get("format", "") else 1e-5), (
            f"{case}: off by {worst:.2e}\n{numbers}\n{want}"
        )


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_equal_one(run_ranks: Callable[..., str]) -> None:
    cases = [
        {"dp": 2},
        {"tp": 2},
        {"replica": 2},
        {"tp": 2, "spec": QWEN},  # 95 tokens over 2 ranks: the vocabulary stays whole
        {"tp": 2, "spec": QWEN | {"vocab_size": 96}},
        {"tp": 2, "spec": GPT2},
        {"tp": 2, "format": "int4:g8"},
        {"dp": 2, "format": "nf3:g8"},
        {"tp": 2, "teacher": True},
        {"dp": 2, "teacher": True, "recompute": True},
        *({mesh: 2, **FEW_ROWS} for mesh in ("dp", "replica", "tp")),
    ]
    check(cases, on_ranks(run_ranks, 2, cases))


@pytest.mark.ranks
def test_muon_and_fp8_on_two_ranks_equal_one(run_ranks: Callable[..., str]) -> None:
    uneven = {"d_ff": 47, "num_kv_heads": 2}  # FSDP2 cuts 47 rows at 24
    cases = [{"dp": 2, "muon": True, "spec": uneven}, {"tp": 2, "muon": True, "spec": QWEN}]
    cases += [{"dp": 2, "muon": True, "format": "fp8:train", "recompute": True}]
    check(cases, on_ranks(run_ranks, 2, cases))


@pytest.mark.ranks
@pytest.mark.slow
def test_four_ranks_equal_one(run_ranks: Callable[..., str]) -> None:
    cases = [
        {"dp": 4},
        {"dp": 2, "tp": 2},
        {"dp": 2, "tp": 2, "muon": True},
        {"dp": 2, "tp": 2, "recompute": True, "compile": "blocks"},
        {"replica": 2, "dp": 2},
    ]
    check(cases, on_ranks(run_ranks, 4, cases))


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_moves_between_meshes(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    """Six steps on dp=2 x tp=2, then six on one process, against twelve on one process."""
    from ranks_resume import losses as run_on_one

    script = Path(__file__).parent / "ranks_resume.py"
    run_ranks(4, script, str(tmp_path / "moved"), "6", "2", "2")
    moved = run_on_one(tmp_path / "moved", 12, 1, 1)
    stayed = run_on_one(tmp_path / "stayed", 12, 1, 1)
    assert len(moved) == len(stayed) == 12
    assert max(abs(a - b) for a, b in zip(moved, stayed, strict=True)) < 1e-5


@pytest.mark.ranks
def test_a_signal_to_one_rank_stops_all_long_before_a_line_of_metrics(
    run_ranks: Callable[..., str], tmp_path: Path
) -> None:
    out = run_ranks(2, Path(__file__).parent / "ranks_stop.py", str(tmp_path))
    # In step 5: voted on at step 8, read at step 12.
    assert "RESULT 12 1 stopped at step 12 of 60 and saved" in out
    assert latest_step(tmp_path / "checkpoints") == 12
