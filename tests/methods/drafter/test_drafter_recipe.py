"""`shoestring run shrink/drafter` through the real command line, on a small trained model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from refusals import refused
from shoestring.cli.app import run_cli
from shoestring.formats import convert, pack, parse_format
from shoestring.methods.drafter import training as stages
from shoestring.methods.drafter.acceptance import Counting
from shoestring.methods.drafter.model import DrafterShape, first_layers, frequent_tokens, fresh
from shoestring.model import Decoder, ModelSpec, load_model, save_model
from shoestring.model.spec import Experts
from shoestring.runlog import read_jsonl
from shoestring.serve import Engine, Sampling, open_drafter
from shoestring.serve.engine.request import Request
from shoestring.serve.speculative.draft_model import DraftModel
from shoestring.serve.speculative.drafter import Drafter
from shoestring.state.checkpointer import Checkpointer
from shoestring.train.data import TokenData
from shoestring.train.shards import TokenShards
from tiny import random_model

SMALL = [
    "model=target", "num_prompts=48", "prompt_tokens=8", "new_tokens=40", "layers=1", "batch=8",
    "context=48", "warmup=5", "lr=3e-3", "held_out=4", "eval_tokens=24", "save_every=20", "eval_every=20", "device=cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and a model that was trained on it: words that follow each other by rule."""
    folder = tmp_path_factory.mktemp("drafter")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 4))) for _ in range(40)]
    follows = {w: draw.choices(words, k=3) for w in words}
    lines = []
    for _ in range(300):
        text = [draw.choice(words)]
        while len(text) < 40:
            text.append(draw.choices(follows[text[-1]], weights=(8, 2, 1))[0])
        lines.append(json.dumps({"text": " ".join(text)}))
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    (folder / "texts").mkdir()
    for i, line in enumerate(lines):
        (folder / "texts" / f"{i:03d}.txt").write_text(json.loads(line)["text"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SHOESTRING_CACHE", str(folder / "cache"))
        argv = ["data=texts", "d_model=64", "num_layers=3", "num_heads=2", "num_kv_heads=2", "vocab_size=300"]
        argv += [
            "context=64",
            "steps=100",
            "batch=8",
            "lr=4e-3",
            "warmup=10",
            "schedule=cosine",
            "eval_every=0",
            "save_every=0",
        ]
        assert run_cli(["run", "train/dense", *argv, "run=target", "device=cpu"]) == 0
    return folder


ONE = ["run", "shrink/drafter", *SMALL, "steps=120", "vocab=200", "run=one"]


def test_a_distilled_drafter_beats_the_first_layers_it_began_as(cli: Callable[..., str], here: Path) -> None:
    out = cli(*ONE)
    assert "tokens make" in out and "times plain" in out
    told = json.loads((here / "one/acceptance.json").read_text())
    rows = {row["drafter"]: row for row in told["rows"]}
    assert set(rows) == {"drafter", "before training", "ngram"} and told["tokens_per_s_alone"] > 0
    for kind in ("greedy", "sampled"):
        trained, before = rows["drafter"][kind], rows["before training"][kind]
        assert trained["acceptance"] > before["acceptance"] + 0.1, (kind, trained, before)
        assert trained["accepted_length"] > before["accepted_length"] + 0.2
        assert trained["num_tokens"] == 4 * 24 and len(trained["at"]) == 4
        assert 1 <= trained["accepted_length"] <= 5 and all(0 <= a <= 1 for a in trained["at"])
    page = (here / "one/report.html").read_text()
    assert "Acceptance by place" in page and "before training" in page and "val_acceptance" not in page
    metrics = [m for m in read_jsonl(here / "one/metrics.jsonl") if "val_acceptance" in m]
    assert metrics[-1]["step"] == 120 and metrics[-1]["val_acceptance"] > metrics[0]["val_acceptance"]
    drafter = json.loads((here / "one/model/drafter.json").read_text())
    assert len(drafter["vocab_ids"]) == 200 and drafter["loss"] == "kl"
    places = zip(rows["drafter"]["greedy"]["at"], rows["drafter"]["sampled"]["at"], strict=True)
    assert drafter["acceptance"] == [min(place) for place in places]
    assert open_drafter("one", load_model("target").model).known_acceptance == tuple(drafter["acceptance"])
    assert not (here / "one/targets").exists()

    plain = cli("generate", "target", "ab", "--max-tokens", "30", "--device", "cpu")
    guessed = cli("generate", "target", "ab", "--max-tokens", "30", "--device", "cpu", "--drafter", "one", "--stats")
    assert guessed.startswith(plain.rstrip("\n")) and "tokens per step" in guessed


def test_greedy_text_is_the_targets_own(here: Path, cli: Callable[..., str]) -> None:
    """In fp64, where the number of rows in a pass does not decide a token."""
    if not (here / "one/report.html").exists():  # this test was asked for alone
        cli(*ONE)
    target = load_model("target", dtype=torch.float64)
    drafter = open_drafter("one", target.model, dtype=torch.float64)
    assert target.tokenizer is not None
    prompts = [target.tokenizer.encode(t) for t in ("ab cd", "j", "fgh ab i")]
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    plain = [c.token_ids for c in Engine(target.model).generate(prompts, sampling)]
    engine = Engine(target.model, drafter=drafter, num_drafts=4)
    assert [c.token_ids for c in engine.generate(prompts, sampling)] == plain
    assert engine.stats.num_accepted > 20


def unmeasured(settings: list[str], *others: str) -> list[str]:
    """For tests that do not look at how often drafts were accepted."""
    left = [*others, "held_out=2", "eval_tokens=6"]
    names = {s.split("=")[0] for s in left}
    return [*(s for s in settings if s.split("=")[0] not in names), *left]


def test_adaspec_stopped_at_every_stage_ends_the_same(
    cli: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = unmeasured(SMALL, "num_prompts=24", "new_tokens=30", "eval_every=0", "save_every=10")
    argv = ["run", "shrink/drafter", *small, "steps=20", "method=adaspec", "reference_steps=20", "loss=kl"]
    cli(*argv, "run=whole")
    save = Checkpointer.save
    scored = stages.build_cache

    def stop_in(place: str) -> None:
        def killed_save(self: Checkpointer, run: Any, parts: dict[str, Any]) -> Any:
            if place == "first save" and "reference" not in str(self.folder):
                raise KeyboardInterrupt
            path = save(self, run, parts)
            if run.step == 10 and ("reference" in str(self.folder)) == (place == "reference"):
                raise KeyboardInterrupt
            return path

        def killed_scores(*args: Any, **options: Any) -> Any:
            scored(*args, **options)
            raise KeyboardInterrupt

        if place == "scores":
            monkeypatch.setattr(stages, "build_cache", killed_scores)
        else:
            monkeypatch.setattr(Checkpointer, "save", killed_save)

    command = [*argv, "run=cut"]
    for place in ("scores", "reference", "first save", "drafter"):
        stop_in(place)
        assert "resume=cut" in cli(*command, fails=True)
        assert not (here / "cut/model").exists()
        monkeypatch.setattr(stages, "build_cache", scored)
        monkeypatch.setattr(Checkpointer, "save", save)
        command = ["run", "shrink/drafter", "resume=cut"]
    assert "was started with fraction=0.4" in cli(*command, "fraction=0.5", fails=True)
    cli(*command)
    for name in ("model/model.safetensors", "model/drafter.json", "text.jsonl"):
        assert (here / "cut" / name).read_bytes() == (here / "whole" / name).read_bytes()
    steps = [m["step"] for m in read_jsonl(here / "cut/metrics.jsonl") if "loss" in m]
    assert steps == [10, 20]
    before = (here / "cut/config.json").read_text()
    assert "resume=cut: nothing to go on with there, that run is finished" in cli(*command, fails=True)
    assert (here / "cut/config.json").read_text() == before


def test_on_policy_and_a_fresh_drafter(cli: Callable[..., str], here: Path) -> None:
    cli("run", "shrink/drafter", *unmeasured(SMALL), "steps=6", "on_policy=0.5", "micro=2", "d_model=32", "vocab=100",
        "loss=jsd", "text=corpus", "prompts=texts", "run=fresh")  # fmt: skip
    drafter = load_model("fresh")
    assert drafter.spec.d_model == 32 and drafter.spec.num_layers == 1
    assert not (here / "fresh/text.jsonl").exists()
    assert [m["step"] for m in read_jsonl(here / "fresh/metrics.jsonl") if "loss" in m] == [6]


def test_a_drafter_begins_with_a_model_that_was_trained_before(cli: Callable[..., str], here: Path) -> None:
    small = ["d_model=32", "num_layers=2", "num_heads=1", "num_kv_heads=1", "context=64", "batch=8"]
    train = ["run", "train/dense", *small, "lr=4e-3", "warmup=10", "eval_every=0", "save_every=0", "device=cpu"]
    cli(*train, "data=texts", "vocab_size=300", "steps=60", "run=sibling")
    command = ["run", "shrink/drafter", *SMALL, "steps=20", "prompts=texts", "start=sibling"]
    cli(*command, "run=grown")
    drafter, sibling = load_model("grown"), load_model("sibling")
    assert drafter.spec == sibling.spec
    assert json.loads(Path("grown/model/drafter.json").read_text())["start"] == "sibling"
    told = json.loads(Path("grown/acceptance.json").read_text())
    rows = {row["drafter"]: row["sampled"]["acceptance"] for row in told["rows"]}
    assert rows["drafter"] > rows["before training"]
    begun = DrafterShape(1, None, start="sibling").build(load_model("target").model).state_dict()
    assert all(torch.equal(begun[name], weight) for name, weight in sibling.model.state_dict().items())

    # With other weights a stopped run does not go on, and with other tokens none begins.
    shutil.rmtree("grown/model")
    Path("grown/report.html").unlink()
    Path("sibling/model").rename("kept")
    shutil.copytree("kept", "sibling/model")
    weights = next(Path("sibling/model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert "target and sibling are not those that this run began with" in cli(
        "run", "shrink/drafter", "resume=grown", fails=True
    )
    cli(*train, "data=python", "max_mb=0.2", "vocab_size=300", "steps=1", "run=stranger")
    assert "not the same ones" in cli(*command[:-1], "start=stranger", fails=True)
    assert "give one of them" in cli(*command, "d_model=32", fails=True)
    long = [word if not word.startswith("context") else "context=65" for word in command]
    assert "context=65 is more than the 64 positions of start=sibling" in cli(*long, fails=True)
    assert "start=nowhere: nowhere does not exist" in cli(*command[:-1], "start=nowhere", fails=True)


def test_prompts_from_a_list_are_held_out(here: Path) -> None:
    (here / "list.jsonl").write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(20)))
    train, apart = stages.listed_prompts(str(here / "list.jsonl"), 16, 4)
    assert len(train) == 16 and len(apart) == 4 and not set(train) & set(apart)
    refused("held_out", stages.listed_prompts, str(here / "list.jsonl"), 16, 15)


def test_bad_input_is_one_line_and_leaves_no_run(cli: Callable[..., str], here: Path) -> None:
    run = ["run", "shrink/drafter"]
    before = {p.name for p in here.iterdir()}
    assert "model= is missing" in cli(*run, fails=True)
    assert "take 1 to 2" in cli(*run, "model=target", "layers=3", fails=True)
    assert "64 positions; give context=64 or less" in cli(*run, "model=target", "context=65", fails=True)
    for vocab in (1, 301):
        said = cli(*run, "model=target", f"vocab={vocab}", "context=48", fails=True)
        assert f"vocab={vocab}: give 2 to 300" in said
    assert "micro that divides" in cli(*run, "model=target", "batch=4", "micro=3", "context=48", fails=True)
    assert "lk_hybrid" in cli(*run, "model=target", "loss=ls", fails=True)
    assert "num_prompts=0" in cli(*run, "model=target", "num_prompts=0", fails=True)
    assert "list of prompts" in cli(
        *run, "model=target", "prompts=corpus.jsonl", "text=corpus", "context=48", fails=True
    )
    assert "prompts=nope does not exist" in cli(*run, "model=target", "prompts=nope", "context=48", fails=True)
    for text in ("self", "corpus"):
        many = ["model=target", "context=48", "prompts=texts", "num_prompts=4", "batch=4000", f"text={text}"]
        said = cli(*run, *many, fails=True)
        assert ("192,001 are needed" if text == "self" else "one batch needs 4000") in said
    (here / "bare").symlink_to(here / "target/model")
    assert "give prompts=" in cli(*run, "model=bare", "context=48", fails=True)
    (here / "bare").unlink()
    assert {p.name for p in here.iterdir()} == before


def test_a_damaged_target_is_said_before_its_text_is_scored(here: Path, tmp_path: Path) -> None:
    target = load_model(here / "target").model
    data = TokenData(TokenShards(np.arange(200, dtype="<u2"), None, "print"), context=16, batch=2)
    with torch.no_grad():
        target.norm.weight[0] = float("nan")
    refused("log-probabilities are NaN", stages.score_text, tmp_path / "targets", target, data, k=4)
    assert not (tmp_path / "targets").exists()


# -- parts --------------------------------------------------------------------------------------------------


def test_first_layers_are_the_targets_weights(here: Path) -> None:
    target = load_model(here / "target").model
    drafter = first_layers(target, 2)
    ours, theirs = drafter.state_dict(), target.state_dict()
    assert len(drafter.blocks) == 2 and set(ours) < set(theirs)
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())
    assert ours["embed.weight"].data_ptr() != theirs["embed.weight"].data_ptr()
    for bad in (0, 3):
        refused("1 to 2", first_layers, target, bad)


LAYERED = ModelSpec(
    vocab_size=96, d_model=64, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=96, max_positions=64,
)  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        replace(LAYERED, model_type="smollm3", no_rope_layers=(1, 3, 7)),
        replace(LAYERED, model_type="qwen2", qkv_bias=True, sliding_window=4, full_layers=(0, 1, 5)),
        replace(
            LAYERED,
            model_type="qwen3_moe",
            qk_norm=True,
            experts=Experts(4, 2, 32, renormalize=False, dense_layers=(0, 6)),
        ),
    ],
    ids=lambda spec: spec.model_type,
)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_first_layers_of_a_model_whose_layers_differ(spec: ModelSpec, num_layers: int, tmp_path: Path) -> None:
    """The drafter can be saved: nothing is said of layers that it has not."""
    target = random_model(spec)
    drafter = first_layers(target, num_layers)
    loaded = load_model(save_model(tmp_path / "m", drafter)).model
    tokens = torch.arange(20)[None]
    x = target.embed_inputs(tokens)
    with torch.no_grad():
        for block, args in zip(target.blocks[:num_layers], target.block_args(20, x.device), strict=False):
            x = block(x, *args)
        want = target.read_logits(target.final_hidden(x))
        torch.testing.assert_close(drafter(tokens), want)
        torch.testing.assert_close(loaded(tokens), want)


def test_first_layers_of_a_packed_model() -> None:
    """With its embedding, which shrink/ptq packs unless it is told not to."""
    target = random_model(LAYERED)
    convert(target, [("*", parse_format("int4:g32")), ("embed", parse_format("int8:g0"))])
    pack(target)
    drafter = first_layers(target, 2)
    for name in ("embed", "blocks.1.mlp.down"):
        theirs = target.get_submodule(name).effective_weight(torch.float32)
        assert torch.equal(drafter.get_submodule(name).weight, theirs)


def test_a_fresh_drafter_has_the_targets_tokens(here: Path) -> None:
    target = load_model(here / "target").model
    drafter = fresh(target.spec, num_layers=1, d_model=64, head_dim=32)
    assert isinstance(drafter, Decoder) and drafter.spec.vocab_size == target.spec.vocab_size
    refused("multiple", fresh, target.spec, num_layers=1, d_model=65)


def test_frequent_tokens() -> None:
    text = np.array([5, 5, 5, 2, 2, 9, 1], dtype=np.uint16)
    assert frequent_tokens(text, 2, 10) == [2, 5]
    assert frequent_tokens(text, 3, 10, always=[7]) == [2, 5, 7]
    assert frequent_tokens(text, 6, 10) == [0, 1, 2, 3, 5, 9]  # equally rare: by id
    for bad in (0, 11):
        refused("vocab", frequent_tokens, text, bad, 10)


def test_counting_looks_only_at_guesses_behind_right_ones_and_at_every_pass() -> None:
    class Silent(Drafter):
        def propose(self, requests: Any, n: int) -> Any: ...

    counting = Counting(Silent())
    cold, warm = (Request([], 0, Sampling(temperature=t), 0) for t in (0.0, 1.0))
    for _ in range(6):  # twice the drafter has no guess, of which the engine does not tell it
        counting.propose([cold, warm], 3)
    for num_drafted, num_accepted in ((3, 0), (3, 1), (3, 3), (1, 1)):
        counting.observe(cold, num_drafted, num_accepted)
    tally, other = counting.tallies[0.0], counting.tallies[1.0]
    assert tally.tested == [4, 2, 1] and tally.kept == [3, 1, 1]
    assert (tally.num_rounds, tally.num_offered, other.num_rounds, other.num_offered) == (6, 4, 6, 0)


def test_a_trimmed_writer_says_only_its_tokens(here: Path) -> None:
    model = load_model(here / "target").model
    said = [3, 5, 8, 20, 40, 41]
    write = stages.engine_writer(said, model.spec.vocab_size)
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    text = write(model, prompts, 9, 0)
    assert text.shape == (2, 12) and text[:, :3].equal(prompts)
    assert set(text[:, 3:].flatten().tolist()) <= set(said)
    assert write(model, prompts, 9, 0).equal(text) and not write(model, prompts, 9, 100).equal(text)
    with torch.no_grad():
        model.blocks[0].mlp.down.weight.mul_(-3)  # a step of the training
    after, anew = (w(model, prompts, 9, 0) for w in (write, stages.engine_writer(said, model.spec.vocab_size)))
    assert not after.equal(text) and after.equal(anew)
    assert isinstance(DraftModel(model), DraftModel)


@pytest.mark.parametrize("said", [None, [3, 5, 8, 20, 40, 41]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.few(2)
def test_a_writer_follows_the_training_in_the_programs_of_a_gpu(
    here: Path, dtype: torch.dtype, said: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in fp32 that an optimizer writes; what the engine computes with are copies, in bf16 another dtype."""
    monkeypatch.setattr(stages, "Engine", partial(Engine, graphs=True))
    model = load_model(here / "target").model
    model.compute_dtype = dtype
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    write = stages.engine_writer(said, model.spec.vocab_size)
    prompts, gen = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.Generator().manual_seed(0)
    texts = []
    for step in range(3):
        texts.append(write(model, prompts, 9, step))
        assert texts[-1].equal(stages.engine_writer(said, model.spec.vocab_size)(model, prompts, 9, step))
        for parameter in model.parameters():  # all of them: embedding, norms and head, too
            parameter.grad = 0.1 * torch.randn(parameter.shape, generator=gen)
        optimizer.step()
    assert not write(model, prompts, 9, 0).equal(texts[0]), "the weights make a difference"
