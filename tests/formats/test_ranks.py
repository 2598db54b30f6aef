"""Laws 5 and 6 on two real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.ranks
@pytest.mark.parametrize("which", ["by turns", pytest.param("all", marks=pytest.mark.lab)])
def test_laws_5_and_6_on_two_ranks(which: str, run_ranks: Callable[..., str]) -> None:
    assert "laws hold on 2 ranks" in run_ranks(2, Path(__file__).with_name("ranks_laws.py"), which)
