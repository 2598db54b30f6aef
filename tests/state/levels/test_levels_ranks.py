"""Copies in memory over two ranks, each a host: another mesh, one rank, the loss of a host, a damaged replica."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.ranks
@pytest.mark.slow
def test_two_hosts_save_and_one_is_lost(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    out = run_ranks(2, Path(__file__).with_name("ranks_levels.py"), str(tmp_path))
    assert out.splitlines()[-1] == "levels done"


@pytest.mark.ranks
@pytest.mark.lab
def test_memory_of_four_ranks_on_other_meshes_and_back(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    out = run_ranks(4, Path(__file__).with_name("ranks_levels_meshes.py"), str(tmp_path))
    assert out.splitlines()[-1] == "dp 2 x tp 2: step 24"
