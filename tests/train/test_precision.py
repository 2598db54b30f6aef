"""precision=fp8: which layers, what is refused, gradients within bounds, and runs that stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import FormatLinear, convert
from shoestring.formats.fp8_training import GRADIENTS, Fp8Training
from shoestring.kernels.lowbit import fp8_products
from shoestring.mesh import Mesh, open_mesh
from shoestring.model import Decoder
from shoestring.model.parallel import ParallelConfig, init_weights, parallelize
from shoestring.runlog import RunLog
from shoestring.state.checkpointer import Checkpointer
from shoestring.train.data import TokenData
from shoestring.train.muon import muon
from shoestring.train.objectives import CrossEntropy
from shoestring.train.precision import PrecisionConfig, check_precision, describe_precision, fp8_rules
from shoestring.train.shards import TokenShards
from shoestring.train.step import Run
from shoestring.train.trainer import train
from tiny import QWEN2, chain

SPEC = replace(QWEN2, num_layers=3)


def converted(layers: str) -> set[str]:
    with torch.device("meta"):
        model = Decoder(SPEC)
        convert(model, fp8_rules(PrecisionConfig("fp8", layers), SPEC))
    named = [(n, m) for n, m in model.named_modules() if isinstance(m, FormatLinear)]
    assert describe_precision(model, torch.device("cuda"))
    return {name for name, m in named if isinstance(m.format, Fp8Training)}


def test_which_layers() -> None:
    inner = {f"blocks.1.{n}" for n in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")}
    assert converted("inner") == inner and len(converted("all")) == 21
    assert converted("*.mlp.down") == {f"blocks.{i}.mlp.down" for i in range(3)}
    assert fp8_rules(PrecisionConfig(), SPEC) == fp8_rules(PrecisionConfig("fp8", "none"), SPEC) == []
    with pytest.raises(UserError, match=r"fp8_layers=inner leaves .* 2: use fp8_layers=all"):
        fp8_rules(PrecisionConfig("fp8"), replace(SPEC, num_layers=2))


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, cpu = PrecisionConfig("fp8"), Mesh(0, 1, torch.device("cpu"))
    check_precision(cfg, SPEC, fp8_rules(cfg, SPEC), cpu)
    with pytest.raises(UserError, match="graph=true records a step"):
        check_precision(cfg, SPEC, fp8_rules(cfg, SPEC), cpu, graph=True)
    with pytest.raises(UserError, match=r"blocks.1.mlp.gate.* multiple of 16, not 40"):
        odd = replace(SPEC, d_ff=40)
        check_precision(cfg, odd, fp8_rules(cfg, odd), cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(fp8_products, "_has_fp8", lambda device: False)
    with pytest.raises(UserError, match=r"NVIDIA A100 \(compute capability 8.0\) has no FP8 .* 8.9; leave it out"):
        check_precision(cfg, SPEC, fp8_rules(cfg, SPEC), Mesh(0, 1, torch.device("cuda", 0)))
    with pytest.raises(UserError, match="use e5m2 or e4m3"):
        Fp8Training("e3m4")


@pytest.mark.parametrize("gradient", list(GRADIENTS))
def test_products_and_gradients_stay_within_the_bound(gradient: str) -> None:
    """Errors of two rounded operands, root mean square, for normal numbers: 0.026 each in E4M3, 0.053 in E5M2."""
    torch.manual_seed(0)
    layer = FormatLinear(128, 96, format=Fp8Training(gradient))
    x, dz = torch.randn(4, 64, 128, requires_grad=True), 1e-6 * torch.randn(4, 64, 96)
    y = layer(x)
    y.backward(dz)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    assert layer.weight.grad is not None and x.grad is not None
    flat, weight = x.detach().flatten(0, 1), layer.weight.detach()
    both = 0.065 if gradient == "e5m2" else 0.042
    for got, want, bound in (
        (y, F.linear(x, weight, layer.bias), 0.042),
        (x.grad, dz @ weight, both),
        (layer.weight.grad, dz.flatten(0, 1).T @ flat, both),
    ):
        assert 0.02 < float((got - want).norm() / want.norm()) < bound


def run_of(folder: Path | None, recompute: bool = False) -> Run:
    model = Decoder(SPEC)
    init_weights(model, seed=0)
    convert(model, fp8_rules(PrecisionConfig("fp8"), SPEC))
    parallelize(model, open_mesh(), ParallelConfig(recompute=recompute))
    return Run(model, muon(model, lr=1e-2), open_mesh(), RunLog(folder, quiet=True))


def test_resumed_and_recomputed_runs_are_bit_for_bit_the_run_that_was_not(tmp_path: Path) -> None:
    data = TokenData(TokenShards(chain(4000, 1), None, "chain"), context=16, batch=4)

    def fit(run: Run, steps: int, checkpointer: Checkpointer | None = None) -> list[Tensor]:
        train(run, data, CrossEntropy(), steps=steps, checkpointer=checkpointer)
        return [p.detach() for p in run.model.parameters()]

    want = fit(run_of(None), 6)
    fit(run_of(tmp_path), 4, Checkpointer(tmp_path / "checkpoints", every=4))
    resumed = fit(run_of(tmp_path), 6, Checkpointer(tmp_path / "checkpoints", every=4))
    again = fit(run_of(None, recompute=True), 6)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, resumed, again, strict=True))
