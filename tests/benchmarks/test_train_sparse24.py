"""What can be said about the 2:4 training bench without a GPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch

from benchmarks import train_sparse24


class NoGraph:
    """Stands for a CUDA graph or stream: it knows addresses only and keeps nothing alive."""

    replayed = 0

    def replay(self) -> None:
        NoGraph.replayed += 1

    def wait_stream(self, other: Any) -> None: ...


def test_a_captured_layer_lives_as_long_as_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, NoGraph)
    monkeypatch.setattr("shoestring.kernels.runtime.capture_stream.capture_stream", lambda device: NoGraph())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda thing: contextlib.nullcontext())

    def capture() -> tuple[Any, Any]:
        layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
        loop = train_sparse24.graphed(lambda count: None, lambda: layer(x).sum().backward())
        return loop, weakref.ref(layer)

    loop, layer = capture()
    gc.collect()
    assert layer() is not None
    loop(3)
    assert NoGraph.replayed == 3 and loop.__name__ == "replays"
