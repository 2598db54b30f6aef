"""Compressed reducers on four real ranks (ranks_reducers.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.lab)])
def test_four_replicas(which: str, run_ranks: Callable[..., str], tmp_path: Path) -> None:
    out = run_ranks(4, Path(__file__).parent / "ranks_reducers.py", str(tmp_path), which, timeout=420)
    assert "DONE" in out
