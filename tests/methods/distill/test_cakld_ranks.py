"""CAKLD and the teacher cache on two processes equal those on one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks_cakld import numbers


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.lab)])
def test_two_ranks_equal_one(run_ranks: Callable[..., str], tmp_path: Path, dp: int, tp: int) -> None:
    script = Path(__file__).parent / "ranks_cakld.py"
    out = run_ranks(2, script, str(tmp_path / "two"), str(dp), str(tp))
    got = json.loads(next(x for x in out.splitlines() if x.startswith("RESULT ")).removeprefix("RESULT "))
    want = numbers(tmp_path / "one", 1, 1)
    assert got[2] == want[2] and len(got) == len(want) == 3 + 2 * 6
    assert got == pytest.approx(want, rel=2e-4)
    assert all(loss > 0.05 for loss in want[3::2])
