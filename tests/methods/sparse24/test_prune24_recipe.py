"""`shoestring run shrink/prune24` from a model folder to a 2:4 one, through the real command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from interrupted import dying
from shoestring.cli.app import run_cli
from shoestring.methods.sparse24 import stages
from shoestring.methods.sparse24.kernels.masks import is_24
from shoestring.methods.sparse24.prune import prune
from shoestring.model import load_model, save_model
from shoestring.runlog import read_jsonl
from shoestring.shrink.block_files import BlockFiles

TOKENS = torch.arange(24)[None]


@pytest.fixture
def cli(cli: Callable[..., str]) -> Callable[..., str]:
    return partial(cli, "run", "shrink/prune24", "device=cpu")


ONE_SHOT = ["model=model", "calib=calib.txt", "calib_windows=6", "calib_context=32", "max_tokens=512"]
SHORT = {
    "data": "corpus.jsonl", "steps": 12, "batch": 4, "context": 32, "warmup": 2, "lr": 1e-3, "log_every": 3,
    "eval_every": 6, "save_every": 5, "flip_every": 4, "refresh": 5,
}  # fmt: skip


def short(**changes: object) -> list[str]:
    return [f"{key}={value}" for key, value in {**SHORT, **changes}.items()]


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_model(folder).model(TOKENS)


def test_ast_with_slorb_end_to_end_and_resume(cli: Callable[..., str], here: Path) -> None:
    out = cli(*ONE_SHOT, *short(slorb=16, text="test.txt", run="boosted"))
    assert "21 layers are 2:4" in out and "epochs)" in out
    rows = read_jsonl(here / "boosted/evals.jsonl")
    assert [r["model"] for r in rows] == ["dense", "one-shot sparsegpt", "ast + slorb"]
    assert rows[2]["bits_per_weight"] == 19.0 and all(r["perplexity"] > 1 for r in rows)  # float32: 16 + 1, and 32 / 16
    told = json.loads((here / "boosted/packed/pruning.json").read_text())
    assert told["layers_24"] == 21 and told["kept_share"] == 0.5 and told["train_tokens"] == 12 * 4 * 32
    for name in ("flip_rate", "mask_change", "kept_magnitude", "masked_magnitude", "val_loss", "pull"):
        assert any(name in row for row in read_jsonl(here / "boosted/metrics.jsonl")), name
    page = (here / "boosted/report.html").read_text()
    assert "Flip rate" in page and "Kept and masked weights" in page and "Coverage" in page

    # Packed, the branch is apart; in the dense folder it is added in, and both are the same model.
    stored = load_file(here / "boosted/packed/packed.safetensors")
    name = "model.layers.1.mlp.up_proj"
    assert stored[f"{name}.weight_low"].abs().max() > 0
    assert not is_24(load_file(here / "boosted/model/model.safetensors")[f"{name}.weight"])
    assert torch.equal(logits(here / "boosted/model"), logits(here / "boosted/packed"))
    assert run_cli(["inspect", "boosted/packed"]) == 0

    # The checkpoint of step 5 goes on to the same model.
    first = (here / "boosted/packed/packed.safetensors").read_bytes()
    for newer in (here / "boosted/checkpoints").glob("step-*10"):
        newer.rename(here / "later")
    assert "was started with lr=0.001" in cli("resume=boosted", "lr=2e-3", fails=True)
    assert "was started with pull=None" in cli("resume=boosted", "pull=1e-4", fails=True)
    assert "steps=4 is less than the 5 that boosted has done" in cli("resume=boosted", "steps=4", fails=True)
    assert json.loads((here / "boosted/config.json").read_text())["config"]["steps"] == 12
    cli("resume=boosted")
    assert (here / "boosted/packed/packed.safetensors").read_bytes() == first


def test_zeros_in_dense_weights_and_packed_without_a_branch(
    cli: Callable[..., str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = cli(*ONE_SHOT, *short(train="cast", steps=6, method="wanda", run="cast", layers="*.mlp.*"))
    assert "9 layers are 2:4" in out
    weights = load_file(here / "cast/model/model.safetensors")
    pruned = [n for n in weights if ".mlp." in n]
    assert len(pruned) == 9 and all(is_24(weights[n]) for n in pruned)
    assert not any(is_24(weights[n]) for n in weights if "_proj.weight" in n and ".self_attn." in n)
    assert torch.equal(logits(here / "cast/model"), logits(here / "cast/packed"))
    assert run_cli(["inspect", "cast/model"]) == 0
    told = capsys.readouterr().out
    assert "Pruned to 2:4" in told and "2:4 layers" in told
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(here / "cast/model")
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, logits(here / "cast/model"), rtol=1e-4, atol=1e-4)


def test_16_bits_stay_16_bits(cli: Callable[..., str], here: Path) -> None:
    cli(*ONE_SHOT, "train=none", "method=magnitude", "dtype=bf16", "layers=*.mlp.*", "embed=int8:g0", "run=half")
    assert (
        load_model(here / "half/packed").model.embed.packed and not load_model(here / "half/model").model.embed.packed
    )
    kept = {n: load_file(here / "half" / n / "model.safetensors") for n in ("oneshot", "model")}
    assert all(w.dtype == torch.bfloat16 for w in kept["model"].values())
    assert all(torch.equal(w, kept["oneshot"][n]) for n, w in kept["model"].items())


def test_one_shot_alone_stops_and_goes_on_at_the_next_block(
    cli: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli(*ONE_SHOT, "train=none", "slorb=16", "run=whole")
    save = BlockFiles.save

    def stop(self: BlockFiles, index: int, *rest: Any) -> None:
        save(self, index, *rest)
        raise KeyboardInterrupt

    way_on = "continue with `shoestring run shrink/prune24 resume=cut`"
    with monkeypatch.context() as patch:
        patch.setattr(stages, "evaluate_row", dying(0, stages.evaluate_row))
        said = cli(*ONE_SHOT, "train=none", "slorb=16", "text=test.txt", "run=cut", fails=True)
    assert f"stopped; {way_on}" in said
    with monkeypatch.context() as patch:
        patch.setattr(BlockFiles, "save", stop)
        assert f"stopped after 1 of 3 blocks; {way_on}" in cli("resume=cut", fails=True)
    assert not (here / "cut/oneshot").exists()
    assert "would ignore warmup=3" in cli("resume=cut", "warmup=3", fails=True)
    # What an older version took and ignored does not keep its run from going on.
    saved = json.loads((here / "cut/config.json").read_text())
    saved["config"]["warmup"] = 3
    (here / "cut/config.json").write_text(json.dumps(saved))
    cli("resume=cut")
    for file in ("model/model.safetensors", "packed/packed.safetensors"):
        assert (here / "cut" / file).read_bytes() == (here / "whole" / file).read_bytes()
    assert not (here / "cut/blocks").exists()


def test_streamed_or_not_the_files_are_the_same(
    cli: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onloaded: list[Any] = []

    def spy(*args: Any, **options: Any) -> Any:
        onloaded.append(options["onload_device"])
        return prune(*args, **options)

    monkeypatch.setattr("shoestring.methods.sparse24.stages.prune", spy)
    monkeypatch.setattr("shoestring.host.block_offload.free_bytes", lambda device: 1000)
    for stream in ("auto", "false"):  # auto: what would fill the device
        cli(*ONE_SHOT, "train=none", "slorb=16", "text=test.txt", f"stream={stream}", f"run={stream}")
    assert onloaded == [torch.device("cpu"), None]
    for file in ("oneshot/model.safetensors", "model/model.safetensors", "packed/packed.safetensors"):
        assert (here / "auto" / file).read_bytes() == (here / "false" / file).read_bytes()
    rows = [read_jsonl(here / f"{stream}/evals.jsonl") for stream in ("auto", "false")]
    for streamed, plain in zip(*rows, strict=True):
        assert streamed["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-5)


def test_training_on_the_models_own_text(cli: Callable[..., str], here: Path) -> None:
    own = {"data": "self", "prompts": "prompts.jsonl", "self_tokens": 24, "self_texts": 12, "method": "magnitude"}
    branch = {"slorb": 8, "projection": "trained", "start": "dense"}
    cli(*ONE_SHOT, *short(steps=3, context=8, batch=2, run="own", **own, **branch))
    assert len(read_jsonl(here / "own/self.jsonl")) == 12
    assert "model.layers.0.mlp.up_proj.weight_proj" in load_file(here / "own/packed/packed.safetensors")


def test_a_layer_that_is_not_24_is_not_delivered(
    cli: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def forgetful(*args: Any) -> Any:
        model = original(*args)
        with torch.no_grad():
            model.blocks[1].mlp.up.weight_mask[0, :4] = torch.tensor([True, True, True, False])
        return model

    original = stages.load_pruned
    monkeypatch.setattr(stages, "load_pruned", forgetful)
    with torch.no_grad():
        for p in (loaded := load_model(here / "model").model).parameters():
            p.abs_()  # no zeros to begin with
        save_model(here / "positive", loaded, load_model(here / "model").tokenizer)
    monkeypatch.setattr(stages, "take_branches", keep_weights(here / "positive"))
    said = cli(*ONE_SHOT[1:], "model=positive", "train=none", "method=magnitude", "run=bad", fails=True)
    assert "blocks.1.mlp.up: 1 of 2048 groups of four have more than two weights" in said
    assert not (here / "bad/model").exists() and not (here / "bad/packed").exists()


def keep_weights(source: Path) -> Callable[..., dict[str, Any]]:
    """take_branches that puts the dense weights back, as a faulty stage would."""
    from shoestring.methods.sparse24.prune import take_branches

    def take(model: Any) -> dict[str, Any]:
        found = take_branches(model)
        model.load_state_dict(load_model(source).model.state_dict())
        return found

    return take


def test_bad_input_is_one_line_and_leaves_no_run(
    cli: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name for p in here.iterdir()}
    assert "model= is missing" in cli("calib=calib.txt", fails=True)
    assert "needs data=" in cli(*ONE_SHOT, fails=True)
    assert "needs prompts=" in cli(*ONE_SHOT, "data=self", fails=True)
    assert "give slorb=16" in cli(*ONE_SHOT, "train=none", "projection=trained", fails=True)
    idle = cli(*ONE_SHOT, "train=none", "steps=3", "data=self", "distill=false", fails=True)
    assert "train=none does not train and would ignore steps=3, data=self, distill=False: leave" in idle
    assert "flatters" in cli(*ONE_SHOT, "train=none", "text=calib.txt", fails=True)
    assert "anneal=2.0 is not a share" in cli(*ONE_SHOT, *short(anneal=2), fails=True)
    assert "data=nowhere does not exist" in cli(*ONE_SHOT, *short(data="nowhere"), fails=True)
    assert "nowhere.jsonl" in cli(*ONE_SHOT, *short(data="self", prompts="nowhere.jsonl"), fails=True)
    (here / "cache" / "few.jsonl").parent.mkdir(exist_ok=True)
    (here / "cache" / "few.jsonl").write_text(json.dumps({"prompt": "the quick"}) + "\n")
    few = short(data="self", prompts=here / "cache" / "few.jsonl", self_tokens=20, batch=1000)
    assert "1 prompts with up to 20 tokens written after each are a text of" in cli(*ONE_SHOT, *few, fails=True)
    assert "nowhere does not exist" in cli(*ONE_SHOT, "train=none", "text=nowhere", fails=True)
    assert "spill=nowhere is not a folder" in cli(*ONE_SHOT, "train=none", "spill=nowhere", fails=True)
    assert "damping=-1 is not possible" in cli(*ONE_SHOT, "train=none", "damping=-1", fails=True)
    assert "micro that divides" in cli(*ONE_SHOT, *short(batch=4, micro=3), fails=True)
    assert "temperature=0.0" in cli(*ONE_SHOT, *short(temperature=0), fails=True)
    assert "nothing to learn" in cli(*ONE_SHOT, *short(kl=0, ce=0), fails=True)
    assert "nothing to learn" in cli(*ONE_SHOT, *short(distill="false", ce=0), fails=True)
    assert "'zzz' matches no" in cli(*ONE_SHOT, "train=none", "layers=zzz", fails=True)
    assert "blocks of 7" in cli(*ONE_SHOT, "train=none", "slorb=7", fails=True)
    texts = {name: here / "cache" / name for name in ("empty.txt", "two.txt")}
    texts["empty.txt"].parent.mkdir(exist_ok=True)
    texts["empty.txt"].write_text("")
    texts["two.txt"].write_text("a b")
    for key, said in {
        "calib=nowhere.txt": "calib=nowhere.txt does not exist",
        f"calib={texts['two.txt']}": "give a longer text",
        f"text={texts['empty.txt']}": "empty.txt has less than two tokens",
    }.items():
        rest = [setting for setting in ONE_SHOT if setting.split("=")[0] != key.split("=")[0]]
        assert said in cli(*rest, key, "train=none", fails=True), key
    assert "Give more text" in cli(*ONE_SHOT, *short(data=texts["two.txt"]), fails=True)
    assert "context=128 is more than the 64 positions" in cli(*ONE_SHOT, *short(context=128), fails=True)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert "needs torch 2.12" in cli(*ONE_SHOT, *short(), "mesh.dp=2", fails=True)
    assert {p.name for p in here.iterdir()} - {"cache"} == before - {"cache"}
