"""Captures share one stream, and with it one workspace of the products."""

from __future__ import annotations

import pytest
import torch

from shoestring.kernels.runtime.capture_stream import capture_stream, on_capture_stream


class Stream:
    made = 0

    def __init__(self, device: int) -> None:
        Stream.made += 1
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)


def test_one_stream_for_all_and_order_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    current, inside = Stream(0), []

    class Entered:
        def __init__(self, stream: object) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            inside.append(self.stream)

        def __exit__(self, *exc: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # no GPU has this number
    monkeypatch.setattr(torch.cuda, "stream", Entered)
    Stream.made = 0
    for times in (1, 2, 3):
        with on_capture_stream():
            side = inside[-1]
            assert side.waited == [current] * times and current.waited == [side] * (times - 1)
    assert Stream.made == 1 and current.waited == [side] * 3 and side is capture_stream(-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_many_captures_hold_one_workspace() -> None:
    x = torch.randn(256, 256, device="cuda")
    with on_capture_stream():
        x @ x
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(40):
        with on_capture_stream():
            x @ x
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20
