"""Reshards between meshes of four gloo processes: byte-equal, in place, all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ranks_reshard.py")


@pytest.mark.ranks
def test_reshard_on_four_ranks(run_ranks: Callable[..., str]) -> None:
    out = run_ranks(4, SCRIPT)
    done = [line for line in out.splitlines() if line.endswith(" done")]
    assert done == [f"{phase} done" for phase in ("between_meshes", "interleaved", "model_in_place", "chain")]
