"""The whole model is small, and its size is the same number everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoestring.cli.app import run_cli
from shoestring.cli.inspect import summarize
from shoestring.evals.model_row import size_of
from shoestring.formats import convert, pack, parse_format
from shoestring.model import Decoder, load_model, save_model
from shoestring.model.folder import weight_files
from shoestring.model.save import round_rest, saved_bytes
from shoestring.report import Table
from shoestring.shrink.whole_model import with_embedding
from shoestring.state.tensor_files import TensorFiles
from tiny import GPT2, QWEN2, random_model

UNTIED = replace(QWEN2, tied=False)


def bytes_of(path: Path) -> int:
    return sum(f.stat().st_size for f in weight_files(path))


def fact(tables: list[Table], key: str) -> float:
    return next(row[1] for table in tables for row in table.rows if row[0] == key)


@pytest.mark.parametrize("recipe", ["rtn", "ptq"])
def test_table_inspect_report_and_files_say_the_same(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = random_model(QWEN2)
    save_model("model", model, dtype=torch.bfloat16)
    argv = ["run", f"shrink/{recipe}", "model=model", "format=int4:g32", "run=run", "device=cpu"]
    assert run_cli([*argv, *(["method=rtn"] if recipe == "ptq" else [])]) == 0
    printed = capsys.readouterr().out
    before, after = [json.loads(line) for line in Path("run/evals.jsonl").read_text().splitlines()]
    for row, folder in ((before, "model"), (after, "run/model")):
        size = bytes_of(Path(folder))
        assert size == sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
        assert row["megabytes"] == round(size / 1e6, 3)
        assert size_of(load_model(folder)) == {k: row[k] for k in ("megabytes", "bits_per_weight")}
        tables = summarize(Path(folder))
        assert fact(tables, "MB") == size / 1e6
        everything = sum(f.stat().st_size for f in Path(folder).iterdir())
        assert fact(tables, "MB with tokenizer and settings") == everything / 1e6
        for page in (printed, Path("run/report.html").read_text()):
            assert f"{row['megabytes']:.4g}" in page
    files = TensorFiles(Path("run/model"), "packed")
    assert not any(files.dtype(name) in ("F32", "F64") for name in files.names)
    assert after["megabytes"] < 0.4 * before["megabytes"]


@pytest.mark.parametrize("spec", [UNTIED, GPT2], ids=["untied", "tied"])
def test_a_packed_model_comes_back_bit_for_bit(spec: object, tmp_path: Path) -> None:
    model = random_model(spec)  # type: ignore[arg-type]
    rules = with_embedding([("blocks.*", parse_format("int4:g32"))], "int8:g0", model)
    assert [glob for glob, _ in rules[1:]] == (["embed"] if model.head is None else ["embed", "head"])
    convert(model, rules)
    planned = saved_bytes(model)
    pack(model)
    assert model.embed.packed and abs(planned - saved_bytes(model)) < 500  # the order of the header
    round_rest(model)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        want = model(tokens)
    save_model(tmp_path / "packed", model)
    assert bytes_of(tmp_path / "packed") == saved_bytes(model)
    again = load_model(tmp_path / "packed").model
    with torch.no_grad():
        assert torch.equal(again(tokens), want)
        assert torch.equal(again(tokens, readout=lambda x, head: head.logits(x)), want)
    assert again.device.type == "cpu" and again.embed.packed


def test_weights_that_need_32_bits_keep_them(tmp_path: Path) -> None:
    """Saving rounds nothing by itself."""
    model = random_model(QWEN2)
    convert(model, [("*", parse_format("int4:g32"))])
    pack(model)
    save_model(tmp_path / "exact", model)
    assert torch.equal(load_model(tmp_path / "exact").model.norm.weight, model.norm.weight)
    assert TensorFiles(tmp_path / "exact", "packed").dtype("model.norm.weight") == "F32"


def test_a_rule_for_the_embedding_comes_first() -> None:
    model = random_model(UNTIED)
    rules = [("embed", parse_format("int4:g32")), ("*", parse_format("int3:g32"))]
    assert with_embedding(rules, "int8:g0", model)[2:] == [("head", parse_format("int8:g0"))]
    assert with_embedding(rules, "dense", model) == rules


def test_a_folder_packed_before_embeddings_had_formats_still_loads(tmp_path: Path) -> None:
    model = random_model(GPT2)
    convert(model, [("blocks.*", parse_format("int4:g32"))])
    pack(model)
    save_model(tmp_path / "old", model, dtype=torch.float32)
    assert "embed" not in json.dumps(json.loads((tmp_path / "old/shoestring.json").read_text())["modules"])
    again = load_model(tmp_path / "old").model
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens)) and not again.embed.packed


def test_any_folder_of_safetensors_is_inspected(tmp_path: Path, write_tensors: Callable[..., None]) -> None:
    write_tensors(tmp_path / "model.safetensors", {"encoder.layer.0.q.weight": torch.zeros(4, 8)})
    tables = summarize(tmp_path)
    assert fact(tables, "parameters") == 32
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 8}')
    tables = summarize(tmp_path)
    assert fact(tables, "model_type") == "bert" and fact(tables, "hidden_size") == 8
    assert tables[1].rows[0][3] == "f32"


@pytest.fixture
def write_tensors() -> Callable[..., None]:
    from safetensors.torch import save_file

    return lambda path, tensors: save_file(tensors, path)


def test_the_model_of_the_protocol_has_a_device() -> None:
    model = Decoder(QWEN2)
    convert(model, [("embed", parse_format("int8:g0"))])
    pack(model)
    assert model.device == torch.device("cpu") and model.embed.weight is None
