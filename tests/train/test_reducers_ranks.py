"""Compressed reducers on four real ranks (ranks_reducers.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.ranks
@pytest.mark.slow
def test_four_replicas(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    out = run_ranks(4, Path(__file__).parent / "ranks_reducers.py", str(tmp_path), timeout=420)
    assert "DONE" in out
