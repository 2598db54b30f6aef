"""--adapter of generate, eval and export: the adapter as it is, and merged."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from shoestring.cli.app import run_cli
from shoestring.formats import convert, pack, parse_format
from shoestring.formats.convert import formats_of
from shoestring.model import load_model, save_model
from tiny import chat_tokenizer, make_adapter, served_model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dense, packed, adapter, and a text."""
    place, tokenizer = tmp_path_factory.mktemp("adapters"), chat_tokenizer()
    model = served_model(tokenizer.vocab_size)
    make_adapter(place / "adapter", model)
    make_adapter(place / "other", served_model(tokenizer.vocab_size + 8), seed=1)
    save_model(place / "dense", model, tokenizer, dtype=torch.float32)
    convert(model, [("blocks.*", parse_format("int4:g16"))])
    pack(model)
    save_model(place / "packed", model, tokenizer)
    (place / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    return place


def told(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert run_cli([str(a) for a in argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("base", ["dense", "packed"])
def test_generate_eval_and_export_agree(
    base: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, adapter, ask = place / base, ("--adapter", place / "adapter"), ("The quick", "--max-tokens", 16)
    written = told(capsys, "generate", model, *ask, *adapter)
    assert written != told(capsys, "generate", model, *ask)
    told(capsys, "export", model, tmp_path / "merged", "--as", "dense", "--dtype", "fp32", *adapter)
    assert told(capsys, "generate", tmp_path / "merged", *ask) == written
    text = ("--text", place / "text.txt", "--context", 32)
    found = []
    for given in ((model, *adapter), (tmp_path / "merged",), (model,)):
        lines = told(capsys, "eval", *given, *text).splitlines()
        row = next(after for line, after in pairwise(lines) if set(line.strip()) == {"─"})
        found.append(row.split()[-3])  # before megabytes and bits
    assert found[0] == found[1] != found[2] and found[0].replace(",", "").replace(".", "").isdigit()


def test_packed_layers_are_quantized_again(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "export", place / "packed", tmp_path / "out", "--as", "packed", "--adapter", place / "adapter")
    before, after = (load_model(p).model for p in (place / "packed", tmp_path / "out"))
    assert formats_of(before) == formats_of(after)
    q, merged = (m.blocks[0].attn.q.effective_weight(torch.float32) for m in (before, after))
    assert not torch.equal(q, merged)


def test_a_certificate_is_of_the_model_as_it_is(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [place / "dense", tmp_path / "out", "--certify", "--adapter", place / "adapter"]
    assert run_cli(["export", *map(str, given)]) == 2
    assert "as it is" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb, more in (("generate", ["x"]), ("eval", ["--text", place / "text.txt"]), ("export", [tmp_path / "out"])):
        for adapter, message in ((place / "none", "is no folder"), (place, "has no adapter_config.json")):
            assert run_cli([verb, *map(str, [place / "dense", *more]), "--adapter", str(adapter)]) == 2
            assert message in capsys.readouterr().err
