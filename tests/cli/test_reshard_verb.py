"""`shoestring reshard explain`: tables, the timeline page, the saved plan, and one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tiny
from shoestring.cli.reshard import reshard_app
from shoestring.errors import UserError
from shoestring.model import save_model
from shoestring.model.export import export_model
from shoestring.model.mesh_layouts import layout_on
from shoestring.state.checkpoint import save_checkpoint
from shoestring.state.reshard.layouts import REPLICATE, MeshLayout, shard


def explain(*args: str) -> str:
    result = CliRunner().invoke(reshard_app, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_two_meshes_as_tables_page_and_file(tmp_path: Path) -> None:
    topology = tmp_path / "topology.json"
    topology.write_text('{"ranks_per_host": 4, "nic_gbit_s": 8}')
    text = explain(
        "2x4:S(0),R", "3x4:S(0),R", "--tensor", "3072x1024x170", "--topology", str(topology),
        "--html", str(tmp_path), "--save", str(tmp_path / "plan.json"),
    )  # fmt: skip
    assert "535 ms" in text and "1.00x" in text
    page = (tmp_path / "report.html").read_text()
    assert page.count("<rect") == 8 and "host0 out" in page and "dashed: the bound" in page
    plan = json.loads((tmp_path / "plan.json").read_text())
    last = max(stop for *_, stop in plan["transfers"])
    assert last == pytest.approx(plan["bound"]) and plan["topology"]["ranks_per_host"] == 4


def test_a_checkpoint_and_a_mesh(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-00000001", {"model": {"blocks.0.attn.o.weight": torch.zeros(8, 64)}}, step=1)
    text = explain(str(tmp_path / "step-00000001"), "replica=2,tp=2")
    assert "1 tensors in 1 classes" in text


def test_a_gguf_file_is_a_model_like_any_other(tmp_path: Path) -> None:
    tokenizer = tiny.chat_tokenizer()
    save_model(tmp_path / "model", tiny.served_model(tokenizer.vocab_size), tokenizer)
    export_model(tmp_path / "model", tmp_path / "model.gguf")
    folder, file = (explain("dp=2", "tp=2", "--model", str(tmp_path / name)) for name in ("model", "model.gguf"))
    assert folder == file and " tensors in " in file


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("dp=0", "tp=2", "--tensor", "8"), "is not a mesh"),
        (("pp=2", "tp=2", "--tensor", "8"), "no mesh axis 'pp' here"),
        (("ddp=2", "tp=2", "--tensor", "8"), "Did you mean 'dp'"),
        (("dp=2,dp=2", "tp=2", "--tensor", "8"), "twice"),
        (("dp=99999", "tp=2", "--tensor", "8"), "at most"),
        (("2x4:S(0)", "2:R", "--tensor", "8"), "one placement for each"),
        (("2:S(3)", "2:R", "--tensor", "8"), "cuts dim 3"),
        (("2:Q", "2:R", "--tensor", "8"), "not a placement"),
        (("dp=2", "tp=2"), "give the tensors to move"),
        (("dp=2", "tp=2", "--tensor", "8", "--model", "m"), "both --model m and --tensor 8 are given; give one"),
        (("dp=2", "tp=2", "--tensor", "0x4"), "is not a shape"),
        (("dp=2", "tp=2", "--model", "/nowhere"), "does not exist"),
        (("dp=2", "tp=2", "--tensor", "8", "--topology", "/nowhere"), "cannot read"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError, match=line):
        explain(*args)


def test_layouts_by_name() -> None:
    sizes = {"replica": 2, "dp": 3, "tp": 2}
    row, column = (
        layout_on("blocks.1.mlp.up.weight", (8, 4), sizes),
        layout_on("blocks.1.mlp.down.weight", (4, 8), sizes),
    )
    assert row == MeshLayout((2, 3, 2), (REPLICATE, shard(0, 2), shard(0)))
    assert column == MeshLayout((2, 3, 2), (REPLICATE, shard(0), shard(1)))
    moment = layout_on("optimizer.state.blocks.1.attn.o.weight.exp_avg", (4, 8), sizes)
    assert moment == column
    assert layout_on("blocks.1.attn.o.bias", (4,), sizes).placements[2] == REPLICATE
    assert layout_on("embed.weight", (7, 4), sizes).placements[2] == REPLICATE  # 7 rows stay whole on both
    with pytest.raises(UserError, match="cannot share"):
        layout_on("blocks.0.attn.q.weight", (9, 4), sizes)
