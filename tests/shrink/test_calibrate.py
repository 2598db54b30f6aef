"""Block-wise calibration sees what a whole forward pass sees, whatever it keeps in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.model import ModelSpec
from shoestring.shrink.calibrate import Calibration, Collector, block_linears, walk, windows
from tiny import GPT2, QWEN2, loud_model, tokens


def whole_forward(spec: ModelSpec, at: Tensor) -> dict[str, Tensor]:
    """Every linear layer's inputs of one ordinary forward pass."""
    model, seen = loud_model(spec), {}
    for index, block in enumerate(model.blocks):
        for name, layer in block_linears(block).items():
            key = f"blocks.{index}.{name}"
            layer.register_forward_pre_hook(lambda m, a, key=key: seen.__setitem__(key, a[0].flatten(0, 1)))
    with torch.no_grad():
        model(at)
    return seen


@pytest.mark.parametrize("spec", [QWEN2, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("inputs", ["quantized", "full"])
def test_statistics_are_those_of_a_whole_forward(spec: ModelSpec, inputs: str) -> None:
    seen = whole_forward(spec, tokens())
    calibration = Calibration(inputs=inputs, batch=4, num_samples=12, double=True)  # type: ignore[arg-type]
    num_layers = 0
    for step in walk(loud_model(spec), tokens(), calibration):
        for name, stats in step.statistics.items():
            x = seen[f"blocks.{step.index}.{name}"].double()
            torch.testing.assert_close(stats.hessian, x.T @ x / len(x), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(stats.magnitude, x.abs().mean(0), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(stats.samples.double(), x[:: len(x) // 12][:12], rtol=1e-4, atol=1e-5)
            assert stats.num_tokens == len(x)
            num_layers += 1
        same = step.statistics
        assert same["attn.q"] is same["attn.k"] is same["attn.v"] is not same["attn.o"]
    assert num_layers == len(seen)


def test_tokens_can_count_alike() -> None:
    seen, walked = whole_forward(QWEN2, tokens()), walk(loud_model(QWEN2), tokens(), Calibration(weigh="token"))
    for step in walked:
        for name, stats in step.statistics.items():
            x = seen[f"blocks.{step.index}.{name}"].double()
            alike = x / x.square().mean(-1, keepdim=True).sqrt()
            torch.testing.assert_close(stats.hessian.double(), alike.T @ alike / len(x), rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(stats.magnitude.double(), x.abs().mean(0), rtol=1e-3, atol=1e-4)


def test_a_store_on_disk_gives_the_same_and_leaves_nothing(tmp_path: Path) -> None:
    on_disk = Calibration(memory_gb=0, folder=str(tmp_path))
    for here, there in zip(walk(loud_model(), tokens()), walk(loud_model(), tokens(), on_disk), strict=True):
        assert list(tmp_path.iterdir())
        for name in here.statistics:
            assert torch.equal(here.statistics[name].hessian, there.statistics[name].hessian)
    assert not list(tmp_path.iterdir())
    refused(
        "cannot keep", next, iter(walk(loud_model(), tokens(), Calibration(memory_gb=0, folder=str(tmp_path / "none"))))
    )


def test_changes_reach_the_next_block_only_with_quantized_inputs() -> None:
    def second_block(inputs: str, change: bool) -> Tensor:
        model = loud_model()
        steps = walk(model, tokens(), Calibration(inputs=inputs))  # type: ignore[arg-type]
        next(steps)
        if change:
            with torch.no_grad():
                model.blocks[0].mlp.down.weight.zero_()  # type: ignore[union-attr]
        return next(steps).statistics["attn.q"].hessian

    assert torch.equal(second_block("full", True), second_block("full", False))
    assert torch.equal(second_block("quantized", False), second_block("full", False))
    assert not torch.allclose(second_block("quantized", True), second_block("quantized", False), rtol=1e-2)


@pytest.mark.parametrize("inputs", ["quantized", "full"])
def test_onloaded_blocks_see_the_same_and_are_offloaded_when_the_walk_is_closed(inputs: str) -> None:
    whole, model = loud_model().bfloat16().float(), loud_model().bfloat16()
    model.compute_dtype = torch.float32
    onload_device = Calibration(inputs=inputs, onload_device=torch.device("cpu"))  # type: ignore[arg-type]
    there = walk(model, tokens(), onload_device)
    for here in walk(whole, tokens(), Calibration(inputs=inputs)):  # type: ignore[arg-type]
        step = next(there)
        assert {p.dtype for p in model.blocks[here.index].parameters()} == {torch.float32}
        for name in here.statistics:
            assert torch.equal(here.statistics[name].hessian, step.statistics[name].hessian)
    there.close()  # before the last block was let go
    assert {p.dtype for p in model.blocks[-1].parameters()} == {torch.bfloat16}


def test_windows_are_spread_over_the_text_and_deterministic() -> None:
    text = torch.arange(1000)
    got = windows(text, 4, 100)
    assert got[:, 0].tolist() == [0, 300, 600, 900] and torch.equal(got, windows(text, 4, 100))
    assert torch.equal(windows(text, 1, 1000)[0], text)
    refused("longer text", windows, text, 11, 100)
    refused("not possible", windows, text, 0, 100)


def test_bad_calibration_is_named() -> None:
    model = loud_model()
    refused("vocabulary", next, iter(walk(model, torch.full((1, 8), 96))))
    refused("64 positions", next, iter(walk(model, tokens(1, 65))))
    with torch.no_grad():
        model.blocks[1].attn_norm.weight[3] = float("nan")  # type: ignore[union-attr]
    refused(r"inputs of blocks\.1\.attn\.q are not finite", list, walk(model, tokens()))


def test_hooks_are_gone_afterwards() -> None:
    model = loud_model()
    for _ in walk(model, tokens()):
        pass
    layers = [layer for block in model.blocks for layer in block_linears(block).values()]
    assert not any(layer._forward_pre_hooks for layer in layers)
    with pytest.raises(ZeroDivisionError), Collector(dict(enumerate(layers)), 1, Calibration()):  # type: ignore[arg-type]
        raise ZeroDivisionError
    assert not any(layer._forward_pre_hooks for layer in layers)
