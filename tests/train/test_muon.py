"""Muon against torch.optim.Muon, against a singular value decomposition, and in runs that stop."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.mesh import open_mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import init_weights
from shoestring.runlog import RunLog, check_run_folder
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.optimizer import load_optimizer_state, optimizer_state
from shoestring.train.data import TokenData
from shoestring.train.muon import MATRIX_RATE, WIDTH, Muon, muon, orthogonalize
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, set_lr, warmup_stable_decay
from shoestring.train.reducers.build import ReducerConfig, check_optimizer
from shoestring.train.shards import TokenShards
from shoestring.train.step import Run
from shoestring.train.trainer import train
from tiny import CHAIN_VOCAB, QWEN2, chain, tiny_decoder

SHAPES = [(8, 24), (24, 8), (16, 16), (3, 40)]


def matrices(seed: int) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(*shape, generator=g)) for shape in SHAPES for _ in range(2)]


def test_weights_after_steps_equal_those_of_torch() -> None:
    ours, theirs = matrices(0), matrices(0)
    lr, options = 2e-3, {"momentum": 0.9, "weight_decay": 0.3}
    group = {"params": ours, "matrices": True, "lr_scale": 1.0, **options}
    pair = [Muon([group], lr=lr, dtype=torch.bfloat16), torch.optim.Muon(theirs, lr=lr, **options)]
    g = torch.Generator().manual_seed(1)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=g)
            b.grad = a.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).detach().abs().max()) < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_weights_on_a_gpu_equal_those_of_torch() -> None:
    """In bfloat16, whose batched products round in another order: the steps agree to a few of its ulps."""
    g = torch.Generator("cuda").manual_seed(0)
    shapes = [(768, 768), (2048, 768), (768, 2048)] * 3
    ours = [nn.Parameter(torch.randn(*shape, generator=g, device="cuda") * 0.02) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    first = [p.detach().clone() for p in ours]
    pair = [
        Muon([{"params": ours, "matrices": True, "lr_scale": 1.0, "momentum": 0.95, "weight_decay": 0.1}], lr=0.02),
        torch.optim.Muon(theirs, lr=0.02),
    ]
    for _ in range(2):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=g, device="cuda")
            b.grad = a.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for a, b, c in zip(ours, theirs, first, strict=True):
        assert float((a - b).detach().norm() / (b - c).detach().norm()) < 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(x)
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.3 and float(values.max()) < 1.3  # square ones have the smallest to begin with
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    cosine = (found * (u @ v)).sum((1, 2)) / found.norm(dim=(1, 2)) / math.sqrt(min(shape))
    assert float(cosine.min()) > 0.96


def test_groups_and_their_rates() -> None:
    model = tiny_decoder(tied=False, qk_norm=True)
    optimizer = muon(model, lr=1e-3, weight_decay=0.1)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = {g["matrices"]: {names[id(p)] for p in g["params"]} for g in optimizer.param_groups if g["weight_decay"]}
    assert groups[True] == {n for n in names.values() if n.startswith("blocks.") and "norm" not in n}
    assert groups[False] == {"embed.weight", "head.weight"}
    set_lr(optimizer, 3e-3)
    norms, embeddings, matrices = optimizer.param_groups
    assert norms["lr"] == 3e-3 and norms["weight_decay"] == 0
    assert embeddings["lr"] == pytest.approx(3e-3 * math.sqrt(WIDTH / model.spec.d_model))
    assert matrices["lr"] == pytest.approx(3e-3 * MATRIX_RATE)
    assert matrices["lr"] * matrices["weight_decay"] == pytest.approx(embeddings["lr"] * embeddings["weight_decay"])


def test_a_module_from_outside_needs_globs() -> None:
    outside = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with pytest.raises(UserError, match="cannot tell which matrices of a Sequential"):
        muon(outside, lr=1e-3)
    with pytest.raises(UserError, match="no trainable matrices that match layers"):
        muon(outside, lr=1e-3, matrices=["layers.*"])
    optimizer = muon(outside, lr=1e-3, matrices=["1.*"])
    assert optimizer.param_groups[-1]["params"] == [outside[1].weight]


def run_of(folder: Path | None) -> Run:
    model = Decoder(replace(QWEN2, qk_norm=True, tied=False, num_layers=2))
    init_weights(model, seed=0)
    return Run(model, muon(model, lr=1e-2), open_mesh(), RunLog(folder, quiet=True))


def test_killed_and_resumed_is_bit_for_bit_the_run_that_was_not(tmp_path: Path) -> None:
    """From a version in memory too: the state of both levels is the same tensors (state/run_state.py)."""
    data = TokenData(TokenShards(chain(4000, 1), None, "chain"), context=16, batch=4)

    def fit(run: Run, steps: int, checkpointer: Checkpointer | None = None) -> list[Tensor]:
        schedule = warmup_stable_decay(1e-2, warmup=2, steps=8)
        train(run, data, CrossEntropy(), steps=steps, schedule=schedule, checkpointer=checkpointer)
        return [p.detach() for p in run.model.parameters()]

    want = fit(run_of(None), 8)
    fit(run_of(tmp_path), 5, Checkpointer(tmp_path / "checkpoints", every=5))
    resumed = fit(run_of(tmp_path), 8, Checkpointer(tmp_path / "checkpoints", every=5))
    assert all(torch.equal(a, b) for a, b in zip(resumed, want, strict=True))


def test_another_optimizer_cannot_go_on(tmp_path: Path) -> None:
    settings = {"run": None, "resume": str(tmp_path), "optimizer": "adamw"}
    (tmp_path / "config.json").write_text('{"config": {}}')
    usual = {"optimizer": "adamw"}
    check_run_folder(settings, usual)  # a run from before there was a choice
    with pytest.raises(UserError, match="started with optimizer=adamw"):
        check_run_folder({**settings, "optimizer": "muon"}, usual)
    (tmp_path / "config.json").write_text('{"config": {"optimizer": "muon"}}')
    with pytest.raises(UserError, match="started with optimizer=muon"):
        check_run_folder(settings, usual)
    run = run_of(None)
    other = adamw(run.model, lr=1e-3)
    with pytest.raises(UserError, match="parameter groups"):
        load_optimizer_state(run.model, other, optimizer_state(run.model, run.optimizer))
    with pytest.raises(UserError, match="optimizer by itself"):
        check_optimizer("muon", ReducerConfig("demo"))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_race_to_a_loss(seed: int) -> None:
    """Equal steps, AdamW at the better of two rates."""
    lowest = {name: min(final_loss(make, lr, seed) for lr in rates) for name, (make, rates) in RACERS.items()}
    assert lowest["muon"] < lowest["adamw"] - 0.02, lowest


RACERS: dict[str, tuple[Any, tuple[float, ...]]] = {"adamw": (adamw, (1e-2, 3e-2)), "muon": (muon, (6e-3,))}


def final_loss(make: Any, lr: float, seed: int) -> float:
    model = Decoder(ModelSpec(CHAIN_VOCAB, 32, 2, 2, 2, 16, 64, 64))
    init_weights(model, seed)
    run = Run(model, make(model, lr=lr, weight_decay=0.0), open_mesh(), RunLog(None, quiet=True))
    data = TokenData(TokenShards(chain(20_000, 1), None, "chain"), context=32, batch=16, seed=seed)
    schedule = warmup_stable_decay(lr, warmup=5, steps=45, decay=0.5)
    train(run, data, CrossEntropy(), steps=45, schedule=schedule, log_every=10)
    return float(run.log.history[-1]["loss"])
