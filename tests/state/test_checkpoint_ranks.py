"""Save on four ranks (dp 2 x tp 2, uneven), resume on one, two and three; one failing rank stops all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ranks_checkpoint.py")


@pytest.mark.ranks
@pytest.mark.slow
def test_save_on_four_ranks_resume_on_others_and_fail_together(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    out = run_ranks(4, SCRIPT, str(tmp_path))
    done = [line for line in out.splitlines() if line.endswith(" done")]
    expected = ["save on 4", "load on 3", "load on 2", "load on 1", "fail on 2"]
    assert done == [f"{phase} done" for phase in expected]
