"""shoestring finetune: what a run leaves, resuming, and settings that are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_samples import CHATML, tokenizer, trained_backend

from shoestring.config import apply_overrides
from shoestring.errors import Interrupted, UserError
from shoestring.formats import convert, pack, parse_format
from shoestring.formats.adapter import adapters_off, attach_adapters
from shoestring.formats.convert import format_hosts
from shoestring.model import load_model, save_model
from shoestring.model.adapter_folder import read_adapter
from shoestring.model.export import export_model
from shoestring.recipes.train import finetune
from shoestring.runlog import read_metrics
from shoestring.state.manifest import read_manifest
from tiny import LLAMA, tiny_llama

SPEC = dataclasses.replace(LLAMA, vocab_size=304, d_ff=64)
WORDS = ("two", "three", "four", "five", "nine", "brief")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense and a packed model, chats and pairs."""
    folder = tmp_path_factory.mktemp("finetune")
    using = tokenizer(trained_backend(), CHATML)
    model = tiny_llama(SPEC, std=0.1)
    save_model(folder / "dense", model, using)
    convert(model, [("*", parse_format("nf4:g16"))])
    pack(model)
    save_model(folder / "packed", model, using)
    chats = [
        {"messages": [{"role": "user", "content": f"{a} and {b}"}, {"role": "assistant", "content": b}]}
        for a in WORDS
        for b in WORDS
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    pairs = [{"prompt": f"{a} and", "chosen": f" {a}", "rejected": " nine nine"} for a in WORDS]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return folder


def run(place: Path, out: Path, *settings: str, model: str = "dense", data: str = "chats.jsonl") -> Path:
    usual = [
        "context=64",
        "batch=2",
        "eval_every=2",
        "save_every=2",
        "log_every=1",
        "held_out=0.3",
        "lr=1e-2",
        "warmup=0",
    ]
    given = {s.partition("=")[0] for s in settings}
    usual = [s for s in usual if s.partition("=")[0] not in given]
    named = [f"model={place / model}", f"data={place / data}", f"run={out}"]
    named = [s for s in named if s.partition("=")[0] not in given]
    if "resume" in given:
        named.pop()  # the run is named already
    return finetune.main(apply_overrides(finetune.Config, [*named, *usual, *settings]))


@pytest.mark.parametrize("kind", ["lora:r4", "dora:r4"])
@pytest.mark.parametrize("model", ["dense", "packed"])
def test_the_base_keeps_its_bytes_and_the_adapter_gives_the_same_logits(
    place: Path, tmp_path: Path, kind: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {}

    def keep(cfg: Any, run: Any, *rest: Any) -> None:
        kept["model"] = run.model
        deliver(cfg, run, *rest)

    deliver = finetune.deliver
    monkeypatch.setattr(finetune, "deliver", keep)
    folder = run(place, tmp_path / "run", f"adapter={kind}", model=model)
    loaded = load_model(place / model, packed=True).model
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        before, trained = loaded(tokens), kept["model"].eval()(tokens)
        with adapters_off(kept["model"]):
            assert torch.equal(kept["model"](tokens), before)
        attach_adapters(loaded, read_adapter(folder / "adapter", loaded).weights)
        assert torch.equal(loaded(tokens), trained)
    assert not torch.equal(trained, before)
    for name, t in load_model(place / model, packed=True).model.state_dict().items():
        assert torch.equal(kept["model"].state_dict()[name], t), name
    losses = [row["val_loss"] for row in read_metrics(folder / "metrics.jsonl") if "val_loss" in row]
    assert min(losses) < losses[0]
    saved = read_manifest(next((folder / "checkpoints").glob("step-*")))
    assert {n.split(".")[-1] for n in saved.tensors if n.startswith("model.")} <= {"A", "B", "magnitude"}


def test_a_resumed_run_is_bit_equal(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(place, tmp_path / "whole", "epochs=2", "patience=0", model="packed")
    real = finetune.HeldOutLoss.__call__

    def stops(self: Any, run: Any) -> dict[str, float]:
        if run.step == 4:
            raise KeyboardInterrupt
        return real(self, run)

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="resume="):
        patch.setattr(finetune.HeldOutLoss, "__call__", stops)
        run(place, tmp_path / "cut", "epochs=2", "patience=0", model="packed")
    resumed = run(place, tmp_path, "epochs=2", "patience=0", f"resume={tmp_path / 'cut'}", model="packed")
    a, b = ((folder / "adapter/adapter_model.safetensors").read_bytes() for folder in (whole, resumed))
    assert a == b


@pytest.mark.parametrize(
    ("settings", "merged"),
    [
        (("merge=dense",), "dense"),
        (("format=int4:g16", "merge=requantize"), "requantize"),
        (("adapter=none", "lr=1e-3"), None),
        (("objective=dpo", "data"), None),
    ],
)
def test_what_a_run_leaves(place: Path, tmp_path: Path, settings: tuple[str, ...], merged: str | None) -> None:
    dpo = "data" in settings
    given = [s for s in settings if s != "data"]
    folder = run(place, tmp_path / "run", *given, "steps=4", data="pairs.jsonl" if dpo else "chats.jsonl")
    last = read_metrics(folder / "metrics.jsonl")[-1] if merged else {}
    if merged is not None:
        (row,) = [r for r in read_metrics(folder / "metrics.jsonl") if f"loss_merged_{merged}" in r]
        (own,) = [r["loss_trained"] for r in read_metrics(folder / "metrics.jsonl") if "loss_trained" in r]
        exact = merged == "dense"
        assert row[f"loss_merged_{merged}"] == pytest.approx(own, abs=1e-5 if exact else 0.1), last
    model = folder / "model"
    assert model.is_dir() == (merged is not None or "adapter=none" in given)
    assert (folder / "adapter").is_dir() == ("adapter=none" not in given)
    if merged == "requantize":
        served = load_model(folder / "base", packed=True).model
        attach_adapters(served, read_adapter(folder / "adapter", served).weights)
        assert load_model(model).model.blocks[0].attn.q.packed  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", ["gguf", "compressed-tensors"])
def test_files_of_others_stay_packed(place: Path, tmp_path: Path, layout: str) -> None:
    out = tmp_path / ("model.gguf" if layout == "gguf" else "model")
    base = run(place, tmp_path / "packed", "format=int4:sym:g16", "steps=1") / "base"
    export_model(
        place / "dense" if layout == "gguf" else base, out, layout, None, "Q8_0" if layout == "gguf" else "auto"
    )
    before = {p: p.read_bytes() for p in ([out] if out.is_file() else sorted(out.iterdir()))}
    folder = run(place, tmp_path / "run", f"model={out}", "steps=2")
    assert all(p.read_bytes() == held for p, held in before.items())
    loaded = load_model(out, packed=True).model
    assert any(host.packed for _, host in format_hosts(loaded))
    assert read_adapter(folder / "adapter", loaded).rank == 16
    with pytest.raises(UserError, match=r"trained an adapter; give the model beside it, .*model.*--adapter"):
        load_model(folder)


def test_early_stopping_keeps_the_best_weights(place: Path, tmp_path: Path) -> None:
    folder = run(place, tmp_path / "run", "epochs=40", "lr=0.3", "patience=2")
    rows = read_metrics(folder / "metrics.jsonl")
    losses = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    assert max(losses) == best + 4 < 200
    (own,) = [row["loss_trained"] for row in rows if "loss_trained" in row]
    assert own == pytest.approx(losses[best], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "model", "says"),
    [
        (("merge=requantize",), "dense", "merge=requantize packs weights again, and .* is dense"),
        (("format=int4:g16",), "packed", "is packed; leave format out"),
        (("adapter=none", "merge=dense"), "dense", "belongs to an adapter"),
        (("adapter=none",), "packed", "packed weights, which cannot be trained"),
        (("target=*.query",), "dense", "matches no linear layer"),
        (("context=65",), "dense", "more than the 64 positions"),
        (("data=nothing.jsonl",), "dense", "does not exist"),
        (("adapter=qlora",), "dense", "give lora:r16"),
        (("objective=dpo",), "dense", "is no preference pair"),
        (("held_out=0.95",), "dense", "leaves too little"),
        (("adapter_from=nowhere",), "dense", "is no folder"),
        (("adapter_from=nowhere", "alpha=8"), "dense", "alpha= is for a new adapter"),
        (("target=,",), "dense", "target names no layer"),
        (("objective=dpo", "beta=-1"), "dense", "beta=-1 must be positive"),
    ],
)
def test_refused_settings(place: Path, tmp_path: Path, settings: tuple[str, ...], model: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        run(place, tmp_path / "run", *settings, model=model)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_an_adapter_is_refused_beside_other_weights(place: Path, tmp_path: Path) -> None:
    digest = finetune.SourceDigest(str(place / "dense"))
    other = finetune.SourceDigest(str(place / "packed"))
    digest.load_state_dict(digest.state_dict())
    with pytest.raises(UserError, match="not those that this adapter was trained beside"):
        digest.load_state_dict(other.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "axis"), [("lora:r4", "dp"), ("dora:r4", "tp")])
def test_two_ranks_equal_one(place: Path, tmp_path: Path, run_ranks: Callable[..., str], kind: str, axis: str) -> None:
    """FSDP2 and tensor parallel, of packed layers: after two steps the adapter is that of one process."""
    usual = ["context=64", "batch=4", "held_out=0.3", "lr=1e-2", "steps=2", "warmup=0", "eval_every=2", "save_every=2"]
    usual += [f"model={place / 'packed'}", f"data={place / 'chats.jsonl'}", f"adapter={kind}"]
    finetune.main(apply_overrides(finetune.Config, [*usual, f"run={tmp_path / 'one'}"]))
    case = [*usual, f"mesh.{axis}=2", f"run={tmp_path / 'two'}"]
    run_ranks(2, Path(__file__).with_name("ranks_finetune.py"), json.dumps([case]), timeout=400)
    meta = load_model(place / "packed", packed=True).model
    one, two = (read_adapter(tmp_path / name / "adapter", meta).weights for name in ("one", "two"))
    for name, weights in two.items():
        for got, want in zip(weights, one[name], strict=True):
            if isinstance(got, torch.Tensor):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=name)
