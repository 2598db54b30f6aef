"""The teacher's words on disk: exact rows, resumed builds, refused folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from refusals import refused
from shoestring.model import Decoder, ModelSpec
from shoestring.runlog import RunLog
from shoestring.train.data import TokenData
from shoestring.train.shards import TokenShards
from shoestring.train.step import IGNORED, Micro
from shoestring.train.teacher_cache import ScalarCache, TeacherCache, build_cache, build_scalar_cache, one_epoch

VOCAB = 97


def teacher(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(ModelSpec(VOCAB, 32, 2, 4, 2, 8, 64, 64))
    with torch.no_grad():
        model.embed.weight.mul_(8)  # confident enough for tails of many sizes
    return model


def token_data(num_tokens: int = 401, *, batch: int = 4, seed: int = 0) -> TokenData:
    gen = np.random.default_rng(1)
    mask = (gen.random(num_tokens) > 0.3).astype(np.uint8)
    shards = TokenShards(gen.integers(0, VOCAB, num_tokens).astype("<u2"), mask, "print")
    return TokenData(shards, context=20, batch=batch, seed=seed)


def build(folder: Path, data: TokenData, k: int = 8, **options: object) -> TeacherCache:
    return build_cache(folder, teacher(), one_epoch(data), num_targets=len(data.shards), k=k, **options)  # type: ignore[arg-type]


def test_rows_are_what_the_teacher_says(tmp_path: Path) -> None:
    data = token_data()
    cache = build(tmp_path / "cache", data)
    assert TeacherCache.open(tmp_path / "cache").num_filled == cache.num_filled
    # Another order and batch of the same windows finds the same rows.
    for micro in token_data(batch=5, seed=9).step(2):
        counted = micro.targets_BT != IGNORED
        found = cache.lookup(micro.index_BT, counted)
        logp = torch.log_softmax(teacher()(micro.tokens_BT).double(), -1)
        top = logp.topk(8, dim=-1)
        rest = logp.clone().scatter_(-1, top.indices, -torch.inf).logsumexp(-1)
        assert (found.ids_BTk[counted] == top.indices[counted]).all()
        close = {"rtol": 2e-3, "atol": 2e-3}
        torch.testing.assert_close(found.logp_BTk[counted].double(), top.values[counted], **close)
        torch.testing.assert_close(found.tail_logp_BT[counted].double(), rest[counted], **close)
        total = found.logp_BTk.exp().sum(-1) + found.tail_logp_BT.exp()
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-6)
        assert (found.tail_logp_BT[~counted] == 0).all() and (found.logp_BTk[~counted] < -1e4).all()


def test_confidence_is_the_mean_probability_of_the_counted_targets(tmp_path: Path) -> None:
    data = token_data()
    total = count = 0.0
    for micro in one_epoch(data):
        counted = micro.targets_BT != IGNORED
        p = torch.softmax(teacher()(micro.tokens_BT).detach().double(), -1)
        p = p.gather(-1, micro.targets_BT.clamp(min=0)[..., None])[..., 0]
        total, count = total + float(p[counted].sum()), count + int(counted.sum())
    cache = build(tmp_path / "cache", data, k=3)
    assert cache.num_filled == count
    assert cache.confidence == pytest.approx(total / count, rel=1e-3)


def test_a_killed_build_goes_on_and_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.train.teacher_cache.FLUSH_EVERY", 1)
    data = token_data()
    build(tmp_path / "whole", data)

    def dies() -> Iterator[Micro]:
        for number, micro in enumerate(one_epoch(data)):
            if number == 3:
                raise KeyboardInterrupt
            yield micro

    with pytest.raises(KeyboardInterrupt):
        build_cache(tmp_path / "cut", teacher(), dies(), num_targets=len(data.shards), k=8)
    refused("was not finished", TeacherCache.open, tmp_path / "cut")
    passes = 0
    model = teacher()

    def counting(*args: object) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_pre_hook(counting)
    build_cache(tmp_path / "cut", model, one_epoch(data), num_targets=len(data.shards), k=8)
    assert passes == 5 - 3  # 20 windows in batches of 4
    build_cache(tmp_path / "cut", model, one_epoch(data), num_targets=len(data.shards), k=8)
    assert passes == 2
    for name in ("ids", "logp", "tail", "target", "filled"):
        assert (tmp_path / f"cut/{name}.bin").read_bytes() == (tmp_path / f"whole/{name}.bin").read_bytes()


@pytest.mark.parametrize("steps", [2, None])
def test_the_bar_counts_what_the_steps_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int | None
) -> None:
    """Not the corpus: a run sees less of it, or ends an epoch with windows of the next."""
    data = token_data(batch=3)  # 20 windows of 20 tokens
    options = {"num_targets": len(data.shards), "k": 4, "progress": RunLog(None).progress}
    build_cache(tmp_path / "cache", teacher(), one_epoch(data, steps), **options)  # type: ignore[arg-type]
    counted = (steps or 7) * 3 * 20
    assert capsys.readouterr().out.startswith(f"teacher: {counted}/{counted} in ")


def test_more_steps_fill_more_rows(tmp_path: Path) -> None:
    data = token_data()
    options = {"num_targets": len(data.shards), "k": 4}
    few = build_cache(tmp_path / "cache", teacher(), one_epoch(data, steps=2), **options)  # type: ignore[arg-type]
    last = data.step(4)[0]
    refused("lacks targets", few.lookup, last.index_BT, last.targets_BT != IGNORED)
    more = build_cache(tmp_path / "cache", teacher(), one_epoch(data), **options)  # type: ignore[arg-type]
    assert more.num_filled > few.num_filled
    more.lookup(last.index_BT, last.targets_BT != IGNORED)


def test_resident_lookup_equals_the_mapped_one(tmp_path: Path) -> None:
    data = token_data()
    cache = build(tmp_path / "cache", data)
    micro = data.step(1)[0]
    for a, b in zip(cache.lookup(micro.index_BT), cache.to("cpu").lookup(micro.index_BT), strict=True):
        assert torch.equal(a, b)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    data = token_data()
    build(tmp_path / "cache", data, identity={"data": data.shards.fingerprint})
    refused("k=8, not 9", build, tmp_path / "cache", data, k=9, identity={"data": data.shards.fingerprint})
    refused("identity", build, tmp_path / "cache", data, identity={"data": "another"})
    refused("k=98", build, tmp_path / "b", data, k=98)
    refused("no teacher cache", TeacherCache.open, tmp_path / "nowhere")
    refused("kind 'top-k'", ScalarCache.open, tmp_path / "cache")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("keep")
    refused("not empty", build, tmp_path / "full", data)
    refused("outside the cache", TeacherCache.open(tmp_path / "cache").lookup, torch.tensor([[10_000]]))
    (tmp_path / "cache/ids.bin").write_bytes(b"")
    refused("cannot be read", TeacherCache.open, tmp_path / "cache")


def test_a_full_disk_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    refused("disk is full", build, tmp_path / "cache", token_data())
    assert not list((tmp_path / "cache").iterdir())


def test_all_masked_text_is_an_error(tmp_path: Path) -> None:
    shards = TokenShards(np.zeros(101, "<u2"), np.zeros(101, np.uint8), "print")
    refused("no counted target", build, tmp_path / "cache", TokenData(shards, context=20, batch=4))


def test_scalars_round_trip(tmp_path: Path) -> None:
    data = token_data()
    cache = build_scalar_cache(
        tmp_path / "losses", lambda m: m.index_BT * 0.5, one_epoch(data), num_targets=len(data.shards)
    )
    micro = data.step(2)[0]
    counted = micro.targets_BT != IGNORED
    found = ScalarCache.open(tmp_path / "losses").lookup(micro.index_BT)
    assert torch.equal(found[counted], micro.index_BT[counted] * 0.5)
    assert found[~counted].isnan().all()
    assert torch.equal(cache.to("cpu").lookup(micro.index_BT)[counted], found[counted])
    assert json.loads((tmp_path / "losses/manifest.json").read_text())["num_filled"] == cache.num_filled
