"""benchmarks/memory counted on a CPU: what falls away with a model is what its Formats say that it holds."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress

import pytest
import torch

from benchmarks import memory
from refusals import refused
from shoestring.formats import parse_format
from shoestring.model import ModelSpec

SPEC = ModelSpec(
    vocab_size=512, d_model=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, d_ff=512,
    max_positions=64, tied=False,
)  # fmt: skip
WEIGHTS = 2 * (256 * 256 * 2 + 128 * 256 * 2 + 3 * 256 * 512)  # of the linear layers
HEAD = 512 * 256


def live_bytes() -> int:
    """Of every tensor that is alive on the host, each storage once."""
    gc.collect()
    found: dict[int, int] = {}
    for t in gc.get_objects():
        if type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu":
            with suppress(RuntimeError):  # a compiler's tensors, left by another test, have no storage
                found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(found.values())


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "allocated", live_bytes)


@pytest.mark.lab
def test_linear_layers_and_the_whole_model_are_told_apart() -> None:
    dense = memory.measure(SPEC, "bf16", "cpu")
    assert dense.keys() == {("whole_model", "bf16"), ("linear_weights", "bf16")}
    assert dense["linear_weights", "bf16"] == 2 * WEIGHTS
    more = dense["whole_model", "bf16"] - 2 * (WEIGHTS + 2 * HEAD)
    assert 0 < more < 0.05 * dense["whole_model", "bf16"]  # norms, and the turns of positions
    for label in ("int4:g128", "int2:g64"):
        held = memory.measure(SPEC, label, "cpu")
        bits = parse_format(label).bits_per_weight((256, 256))
        assert held["linear_weights", "bf16"] == held["linear_weights", "int8:g0"] == WEIGHTS * bits / 8
        other = held["whole_model", "bf16"] - held["linear_weights", "bf16"]
        assert other == dense["whole_model", "bf16"] - dense["linear_weights", "bf16"]
        saved = held["whole_model", "bf16"] - held["whole_model", "int8:g0"]
        assert saved == HEAD - 512 * 3  # a byte a weight, and of each row a scale and a zero point


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["memory"])
    refused("CUDA GPU", memory.main)
