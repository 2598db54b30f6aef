"""A model folder that was written, then damaged: one flipped bit is found, and NaN is named by tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from refusals import refused
from shoestring.cli.app import run_cli
from shoestring.formats import convert, pack, parse_format
from shoestring.model import load_model, save_model
from shoestring.model.verify import check_intact, read_checksums, verify
from tiny import tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("verify") / "m", tiny_llama(), tiny_tokenizer())


def copy(written: Path, place: Path) -> Path:
    return Path(shutil.copytree(written, place / "copy"))


def test_what_was_written_is_intact(written: Path) -> None:
    found = verify(written)
    assert not found.problems and not found.unknown and found.num_tensors == 20
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(found.checked)
    assert set(read_checksums(written)) == {p.name for p in written.iterdir()} - {"checksums.json"}
    check_intact(written)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_flipped_bit_is_found(written: Path, tmp_path: Path, name: str) -> None:
    folder = copy(written, tmp_path)
    data = bytearray((folder / name).read_bytes())
    data[-2 if name.endswith(".json") else -1] ^= 1 if name == "model.safetensors" else 2
    (folder / name).write_bytes(data)
    if name == "model.safetensors":
        load_model(folder)  # nothing else notices
    refused(f"{name} is not what was written", check_intact, folder)


def test_missing_and_cut_files(written: Path, tmp_path: Path) -> None:
    folder = copy(written, tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "generation_config.json").write_text("{}")
    said = " ".join(verify(folder).problems)
    assert "tokenizer.json is missing" in said and "generation_config.json has 2 bytes" in said
    refused("2 problems in all", check_intact, folder)


def test_values_that_are_no_numbers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[3, 4] = torch.nan
        model.norm.weight[0] = torch.inf
    folder = save_model(tmp_path / "m", model)
    (folder / "checksums.json").unlink()  # as a folder of somebody else's
    found = verify(folder)
    assert found.unknown == ("model.safetensors",) and len(found.problems) == 2
    assert "'model.layers.1.mlp.up_proj.weight' holds NaN or infinite values (1 of" in " ".join(found.problems)
    assert run_cli(["inspect", str(folder)]) == 0
    assert run_cli(["inspect", "--verify", str(folder)]) == 2
    assert "holds NaN or infinite values" in capsys.readouterr().err
    assert run_cli(["serve", "--verify", str(folder)]) == 2


def test_packed_folders_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama()
    convert(model, [("*.mlp.*", parse_format("int4:g16"))])
    pack(model)
    save_model(tmp_path / "run" / "model", model, tiny_tokenizer())
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"recipe": "x", "config": {}}))
    assert run_cli(["inspect", "--verify", str(tmp_path / "run")]) == 0
    assert "Verified" in capsys.readouterr().out
    weights = tmp_path / "run" / "model" / "packed.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 16
    weights.write_bytes(data)
    assert run_cli(["inspect", "--verify", str(tmp_path / "run")]) == 2


@pytest.mark.parametrize("entry", [{"../x": {}}, {"a": 3}, {"a": {"bytes": -1, "sha256": "x"}}, {"a": {"bytes": 1}}])
def test_forged_checksums(written: Path, tmp_path: Path, entry: dict[str, object]) -> None:
    folder = copy(written, tmp_path)
    (folder / "checksums.json").write_text(json.dumps({"files": entry}))
    refused(r"checksums\.json", verify, folder)
