"""From a model to a set in a file and back into generate and serve, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoestring.cli.app import run_cli
from shoestring.methods.skipping import sets
from shoestring.methods.skipping.policies import AdaSkip, open_policy
from shoestring.model import Decoder, ModelSpec, Tokenizer, load_model, save_model
from shoestring.model.parallel import init_weights
from shoestring.model.skip import SkipSet
from shoestring.serve import Engine, Sampling

TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs.\n" * 60


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skipping")
    tokenizer = Tokenizer.train([TEXT], 300)
    model = Decoder(ModelSpec(tokenizer.vocab_size, 64, 4, 4, 2, 16, 128, 128, eos_id=tokenizer.eos_id))
    init_weights(model, 0)
    save_model(folder / "model", model, tokenizer)
    (folder / "calib.txt").write_text(TEXT)
    (folder / "test.txt").write_text(TEXT[::-1])
    return folder


@pytest.fixture(autouse=True)
def in_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    monkeypatch.setenv("SHOESTRING_CACHE", str(here / "cache"))
    monkeypatch.setattr(sets, "MAX_BYTES", 150_000)


def cli(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert run_cli(list(argv)) == code
    out = capsys.readouterr()
    return out.out, out.err


def find(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    small = ["calib=calib.txt", "calib_context=64", "rows=64", "device=cpu"]  # context: all 128 positions
    return cli(capsys, "run", "shrink/skip_set", "model=model", *small, *options)[0]


def test_the_recipe_writes_a_set_that_generate_uses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = find(capsys, "run=one", "speedup=1.2", "text=test.txt")
    told = json.loads((here / "one/skip.json").read_text())
    skip = SkipSet.read(here / "one/skip.json")
    assert 1 <= len(skip) < 8 and told["notes"]["context"] == 128 and told["notes"]["speedup"] >= 1.2
    assert told["notes"]["kl"] > 0 and "--skip one/skip.json" in said
    assert [json.loads(line)["model"] for line in (here / "one/evals.jsonl").open()] == ["before", "after"]
    assert len((here / "one/metrics.jsonl").read_text().splitlines()) == len(skip)
    loaded = load_model(here / "model")
    want = Engine(loaded.model, loaded.tokenizer, skip=skip).generate(["the quick"], Sampling(max_tokens=8))
    options = ["generate", "model", "the quick", "--max-tokens", "8", "--stats", "--device", "cpu"]
    out, _ = cli(capsys, *options, "--skip", "one/skip.json")
    assert out.startswith(f"the quick{want[0].text}\n[")
    assert f"{len(skip.attn)} attention and {len(skip.mlp)} FFN sublayers skipped" in out
    assert "not the whole model's" in out
    plain, _ = cli(capsys, *options)
    guessed, _ = cli(capsys, *options, "--skip", "lossless:one/skip.json")
    assert plain.split("\n[")[0] == guessed.split("\n[")[0] and "sublayers skipped" not in guessed


def test_adaskip_and_the_baselines(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method in ("adaskip", "early_exit", "unified"):
        find(capsys, f"run={method}", f"method={method}", "speedup=1.34", f"out={method}.json")
        assert len(SkipSet.read(here / f"{method}.json")) == 2
    spec = load_model(here / "model").spec
    ada = open_policy(str(here / "adaskip.json"), spec)
    assert isinstance(ada, AdaSkip) and ada.num_watched == 20 and 0 < ada.beta < 1
    two = cli(capsys, "generate", "model", "the", "--skip", "early_exit.json+unified.json", "--stats")[0]
    assert two.count("sublayers skipped") == 2


def test_sets_by_name_are_found_once_and_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["generate", "model", "the quick", "--max-tokens", "8", "--stats", "--device", "cpu"]
    plain, _ = cli(capsys, *options)
    none, _ = cli(capsys, *options, "--skip", "none")
    assert plain.split("\n[")[0] == none.split("\n[")[0]
    for name in ("adaskip", "lossless"):
        out, err = cli(capsys, *options, "--skip", name)
        assert ("sublayers skipped: adaskip" in out) == (name == "adaskip") and "looking for a set" in err
        again, err = cli(capsys, *options, "--skip", name)
        assert again.split("\n[")[0] == out.split("\n[")[0] and not err
    assert out.split("\n[")[0] == plain.split("\n[")[0]


def test_bad_input_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = cli(capsys, "generate", "model", "the", "--skip", "adskip", code=2)
    assert err.count("\n") == 1 and "adaskip" in err
    _, err = cli(capsys, "generate", "model", "the", "--skip", "calib.txt", code=2)
    assert err.count("\n") == 1 and "not valid JSON" in err
    _, err = cli(capsys, "run", "shrink/skip_set", "model=model", "speedup=0.5", code=2)
    assert err.count("\n") == 1 and "speedup=0.5" in err
    _, err = cli(capsys, "run", "shrink/skip_set", "model=model", "calib=calib.txt", "context=999", code=2)
    assert err.count("\n") == 1
