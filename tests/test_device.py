"""Which device a name stands for."""

from __future__ import annotations

import pytest
import torch

from shoestring.device import pick_device
from shoestring.errors import UserError


def test_a_numbered_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched on the current GPU: one that is only named by tensors would not get them."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pick_device("cuda:1") == torch.device("cuda", 1) and chosen == [torch.device("cuda", 1)]
    assert pick_device("cuda").index is None and pick_device("cpu").type == "cpu" and len(chosen) == 1
    with pytest.raises(UserError, match="cuda:1"):
        pick_device("cuda:2")
