"""CAKLD against its definition in fp64: values, gradients, masks, gamma, and the cached form's limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.mesh import open_mesh
from shoestring.methods.distill.cakld import CachedCakld, Cakld, teacher_confidence
from shoestring.model import Decoder, ModelSpec
from shoestring.runlog import RunLog
from shoestring.train.data import TokenData
from shoestring.train.optim import adamw
from shoestring.train.shards import TokenShards
from shoestring.train.step import IGNORED, Micro, Run
from shoestring.train.teacher_cache import TeacherCache, build_cache, one_epoch
from shoestring.train.trainer import train

VOCAB = 61


def tiny(seed: int, *, vocab: int = VOCAB, tied: bool = True) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(ModelSpec(vocab, 32, 2, 4, 2, 8, 64, 64, tied=tied))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:  # loud blocks: a tied head would otherwise repeat the input, whoever is asked
                p.normal_(0, 0.25 if "embed" in name or "head" in name else 1.0)
    return model


def token_data(*, batch: int = 4) -> TokenData:
    gen = np.random.default_rng(3)
    tokens = gen.integers(0, VOCAB, 241).astype("<u2")
    mask = np.ones(241, np.uint8)
    mask[5:19] = mask[100:150] = 0
    return TokenData(TokenShards(tokens, mask, "print"), context=20, batch=batch)


def definition(teacher: Decoder, student: Decoder, micro: Micro, gamma: float) -> Tensor:
    """The paper's formula, token by token over the full vocabulary, in fp64."""
    with torch.no_grad():
        p = torch.log_softmax(teacher(micro.tokens_BT).double(), -1)
    q = torch.log_softmax(student(micro.tokens_BT).double(), -1)
    reverse = (q.exp() * (q - p)).sum(-1)
    forward = (p.exp() * (p - q)).sum(-1)
    return (gamma * reverse + (1 - gamma) * forward)[micro.targets_BT != IGNORED].sum()


def compare(got: Tensor, want: Tensor, a: Decoder, b: Decoder, tolerance: float) -> None:
    got.backward()
    want.backward()
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=1e-5)
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert x.grad is not None and y.grad is not None
        scale = float(y.grad.abs().max())
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=tolerance * max(scale, 1e-3), msg=name)


@pytest.mark.parametrize("gamma", [0.0, 0.35, 1.0])
@pytest.mark.parametrize(("tied", "chunk"), [(True, 7), (False, 0)])
def test_live_cakld_is_the_definition(gamma: float, tied: bool, chunk: int) -> None:
    teacher, student, plain = tiny(0, tied=tied), tiny(1, tied=tied), tiny(1, tied=tied)
    micro = token_data().step(0)[0]
    assert 0 < micro.num_counted < micro.targets_BT.numel()
    assert definition(teacher, student, micro, gamma).item() > 0.5 * micro.num_counted
    got = Cakld(teacher, gamma, chunk=chunk)(student, micro)
    compare(got, definition(teacher, plain, micro, gamma), student, plain, 2e-4)
    assert all(p.grad is None for p in teacher.parameters())


def full_cache(folder: Path, k: int, teacher: Decoder) -> TeacherCache:
    data = token_data()
    return build_cache(folder, teacher, one_epoch(data), num_targets=len(data.shards), k=k)


@pytest.mark.parametrize("gamma", [0.0, 0.35, 1.0])
def test_cached_cakld_with_the_whole_vocabulary_is_the_definition(tmp_path: Path, gamma: float) -> None:
    teacher, student, plain = tiny(0), tiny(1), tiny(1)
    micro = token_data().step(1)[0]
    objective = CachedCakld(full_cache(tmp_path / "c", VOCAB, teacher), gamma, chunk=11)
    # The 16 bits of the cache are what is left between them.
    compare(objective(student, micro), definition(teacher, plain, micro, gamma), student, plain, 5e-3)


def test_cached_cakld_rises_to_the_full_one_with_k(tmp_path: Path) -> None:
    teacher, student = tiny(0), tiny(1)
    micro = token_data().step(0)[0]
    full = float(definition(teacher, student, micro, 0.4).detach())
    losses = []
    for k in (1, 4, 16, 40, 60):
        objective = CachedCakld(full_cache(tmp_path / str(k), k, teacher), 0.4)
        losses.append(objective(student, micro).item())
    # Merging outcomes never raises a divergence.
    assert all(a <= b * 1.001 for a, b in zip(losses, [*losses[1:], full], strict=True))
    assert losses[0] < 0.9 * full and losses[-1] == pytest.approx(full, rel=2e-3)


@pytest.mark.parametrize("k", [1, 5, 30])
def test_cached_gradient_is_that_of_the_coarse_divergence(tmp_path: Path, k: int) -> None:
    teacher, student, plain = tiny(0), tiny(1), tiny(1)
    micro = token_data().step(0)[0]
    cache = full_cache(tmp_path / "c", k, teacher)
    got = CachedCakld(cache, 0.4, chunk=13)(student, micro)
    top = cache.lookup(micro.index_BT)
    q = torch.log_softmax(plain(micro.tokens_BT).double(), -1)
    at_top = q.gather(-1, top.ids_BTk)
    rest = q.scatter(-1, top.ids_BTk, -torch.inf).logsumexp(-1, keepdim=True)
    logq = torch.cat([at_top, rest], -1)
    logp = torch.cat([top.logp_BTk, top.tail_logp_BT[..., None]], -1).double()
    loss = 0.4 * logq.exp() * (logq - logp) + 0.6 * logp.exp() * (logp - logq)
    want = loss.sum(-1)[micro.targets_BT != IGNORED].sum()
    compare(got, want, student, plain, 3e-4)


def test_gamma_is_the_mean_probability_of_the_counted_tokens(tmp_path: Path) -> None:
    teacher, data = tiny(0), token_data()
    found = []
    for micro in one_epoch(data):
        with torch.no_grad():
            p = torch.softmax(teacher(micro.tokens_BT).double(), -1)
        at = p.gather(-1, micro.targets_BT.clamp(min=0)[..., None])[..., 0]
        found.append(at[micro.targets_BT != IGNORED])
    want = float(torch.cat(found).mean())
    assert teacher_confidence(teacher, one_epoch(data)) == pytest.approx(want, rel=1e-5)
    cache = full_cache(tmp_path / "c", 2, teacher)
    assert cache.confidence == pytest.approx(want, rel=1e-3)
    assert CachedCakld(cache).gamma == cache.confidence


def test_a_masked_step_moves_nothing(tmp_path: Path) -> None:
    teacher, student = tiny(0), tiny(1)
    micro = token_data().step(0)[0]
    masked = Micro(micro.tokens_BT, torch.full_like(micro.targets_BT, IGNORED), micro.index_BT)
    for objective in (Cakld(teacher, 0.5), CachedCakld(full_cache(tmp_path / "c", 4, teacher), 0.5)):
        loss = objective(student, masked)
        loss.backward()
        assert loss.item() == 0 and all(p.grad is None or not p.grad.any() for p in student.parameters())


def test_training_with_the_cache_moves_the_student_to_the_teacher(tmp_path: Path) -> None:
    teacher, student, data = tiny(0), tiny(1), token_data()
    objective = CachedCakld(full_cache(tmp_path / "c", 16, teacher))
    micro = data.step(0)[0]
    before = float(definition(teacher, student, micro, 0.5).detach())
    run = Run(student, adamw(student, lr=2e-2, weight_decay=0), open_mesh(), RunLog(None, quiet=True))
    train(run, data, objective, steps=25)
    assert float(definition(teacher, student, micro, 0.5).detach()) < 0.7 * before
    assert objective.state_dict() == {"gamma": objective.gamma}


def test_bad_settings(tmp_path: Path) -> None:
    teacher = tiny(0)
    refused(r"gamma=1\.5", Cakld, teacher, 1.5)
    micro = token_data().step(0)[0]
    refused("vocabulary", Cakld(teacher, 0.5), tiny(1, vocab=VOCAB + 3), micro)
    refused("vocabulary", CachedCakld(full_cache(tmp_path / "c", 4, teacher)), tiny(1, vocab=VOCAB + 3), micro)
    refused("no counted token", teacher_confidence, teacher, [])
