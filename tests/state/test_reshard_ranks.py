"""Reshards between meshes of four gloo processes: byte-equal, in place, all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoestring.state.reshard.execute import weighted_sum

SCRIPT = Path(__file__).with_name("ranks_reshard.py")


@pytest.mark.ranks
def test_reshard_on_four_ranks(run_ranks: Callable[..., str]) -> None:
    out = run_ranks(4, SCRIPT)
    done = [line for line in out.splitlines() if line.endswith(" done")]
    phases = ("between_meshes", "interleaved", "model_in_place", "without_rows", "chain")
    assert done == [f"{phase} done" for phase in phases]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_two_processes_share_gpu_memory(run_ranks: Callable[..., str]) -> None:
    assert "equal" in run_ranks(2, SCRIPT.with_name("ranks_reshard_ipc.py"), timeout=120, fresh=True)


@pytest.mark.parametrize("num", [1, 4096, 10_000])
def test_the_checksum_of_a_gpu_shows_every_single_change(num: int) -> None:
    words = torch.randint(-(2**31), 2**31, (num,), dtype=torch.int32)
    number = weighted_sum(words)
    assert number == int((words.long() * (2 * torch.arange(num) + 1)).sum())
    for at in {0, num // 2, num - 1}:
        changed = words.clone()
        changed[at] ^= -(2**31)
        assert weighted_sum(changed) != number
