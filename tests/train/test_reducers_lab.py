"""Campaigns of compressed reducers: another number of replicas, and ranks that die."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.ranks]
HERE = Path(__file__).parent
LOST_S = 60  # every rank ends within this time after another one has died; on busy machines mostly the exit of Python


def test_residuals_go_from_four_replicas_to_two_to_three(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    for num, source, target in ((4, "", "four"), (2, "four", "two"), (3, "two", "three"), (4, "three", "back")):
        out = run_ranks(num, HERE / "ranks_replicas.py", str(tmp_path), source, target, str(num))
        assert "DONE" in out, (num, out)


@pytest.mark.parametrize("method", ["reducer=int8", "reducer=int8 overlap=true", "reducer=topk:0.01 selector=hyper"])
def test_every_rank_ends_with_a_line_when_one_of_four_is_killed(
    method: str, run_ranks: Callable[..., str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the same words again and again, and then others. " * 4000)
    settings = f"data={text} steps=6 save_every=0 eval_every=0 run={tmp_path / 'run'} mesh.replica=4 {method}"
    settings += " d_model=32 num_layers=2 num_heads=2 d_ff=64 vocab_size=300 context=32 batch=4 mesh.timeout_s=900"
    given = ["SIGKILL", "run", "train/dense", *settings.split()]
    with pytest.raises(AssertionError) as failed:
        run_ranks(4, HERE / "ranks_lost.py", str(tmp_path), *given, timeout=120 + LOST_S)
    said = str(failed.value)
    assert time.time() - (tmp_path / "killed").stat().st_mtime < LOST_S
    assert "were not done" not in said and "--- rank 1, exit -9:" in said, said
    assert said.count("error: lost another process of this job (Connection ") == 3, said
    assert "Traceback" not in said
