"""Names and headers need no torch: what is wrong is told, and what is there is shown, before it would be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from shoestring import format_names
from shoestring.errors import UserError
from shoestring.formats import convert, pack, parse_format
from shoestring.formats.float_asym import TABLES
from shoestring.kernels.lowbit.packing import CODES_PER_RUN
from shoestring.model import save_model
from shoestring.model.gguf_file import _BLOCKS, BLOCK_TYPES
from shoestring.model.gguf_write import save_gguf
from tiny import LLAMA, random_model, tiny_tokenizer

RUN = """
import json, sys
from shoestring.cli.app import run_cli
for argv, code in json.loads(sys.argv[1]):
    assert run_cli(argv) == code, argv
    assert "torch" not in sys.modules, argv
"""


def without_torch(*commands: tuple[list[str], int]) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(commands)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("names")
    model = random_model(replace(LLAMA, d_model=64, d_ff=96, head_dim=16)).eval()
    save_model(place / "dense", model, tiny_tokenizer())
    save_gguf(place / "m.gguf", model, tiny_tokenizer())
    convert(model, [("embed", parse_format("int8:sym:g0")), ("*", parse_format("nf3:g32"))])
    pack(model)
    save_model(place / "packed", model, tiny_tokenizer())
    model = random_model(replace(LLAMA, d_model=64, d_ff=96, head_dim=16)).eval()
    convert(model, [("*", parse_format("fp8:b128"))])
    pack(model)
    save_model(place / "fp8", model, tiny_tokenizer())
    return place


def test_headers_are_read_without_torch(place: Path) -> None:
    paths = ["dense", "dense/model.safetensors", "packed", "packed/packed.safetensors", "fp8", "m.gguf"]
    shown, _ = without_torch(*[(["inspect", str(place / path)], 0) for path in paths])
    assert (
        "int8:sym:g0" in shown
        and "nf3:s2:g32" in shown
        and "fp8:b128" in shown
        and "f32" in shown
        and "GGUF m.gguf" in shown
    )


def test_wrong_names_are_told_without_torch(place: Path) -> None:
    model = str(place / "dense")
    wrong = {
        "There is no format 'int5'": ["quantize", model, "int5"],
        "Group 7 is not possible": ["run", "shrink/ptq", f"model={model}", "rules=*=int4:g7"],
        "is not glob=format": ["run", "shrink/ptq", f"model={model}", "rules=int4"],
        "calib=nowhere.txt does not exist": ["quantize", model, "int4", "calib=nowhere.txt"],
        "calib=other.txt does not exist": ["quantize", model, "int4", f"calib={place}/dense,other.txt"],
        "text.txt does not exist; give one text file": ["quantize", model, "int4", "text=text.txt"],
        "data=no.jsonl does not exist": ["run", "train/dense", "data=no.jsonl"],
        "prompts=no.jsonl does not exist": ["run", "shrink/drafter", f"model={model}", "prompts=no.jsonl"],
        "--as 'gptp' is not possible": ["export", model, "out", "--as", "gptp"],
        "--as gguf and out do not fit": ["export", model, "out", "--as", "gguf"],
        "--type 'Q4_9' cannot be written": ["export", model, "out.gguf", "--type", "Q4_9"],
        "--type Q8_0 is for GGUF files": ["export", model, "out", "--type", "Q8_0"],
        "no.txt does not exist": ["eval", model, "--text", "no.txt"],
        "device='cdua'": ["generate", model, "hello", "--device", "cdua"],
        "dtype='fp8'": ["chat", model, "--dtype", "fp8"],
        "no option 'sims'": ["quantize", model, "int4", "embed=int8:sims"],
    }
    _, told = without_torch(*[(argv, 2) for argv in wrong.values()])
    lines = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(lines) == len(wrong) and all(why in line for why, line in zip(wrong, lines, strict=True)), lines


@pytest.mark.parametrize(
    "text", ["dense", "fp8", "fp8:b128", "fp8:bfloat16", "int8:sym:g0", "int4:min:g32", "nf3:s1:bfloat16", "int3:fixed"]
)
def test_a_name_means_the_same_with_and_without_torch(text: str) -> None:
    format = parse_format(text)
    assert format_names.parse(text).items() <= format.to_json().items()
    assert format_names.label(format.to_json()) == format.label


def test_tables_of_numbers_are_those_of_their_owners() -> None:
    assert tuple(TABLES) == format_names.TABLES and format_names.CODES_PER_RUN == CODES_PER_RUN
    for number, (name, *sizes) in _BLOCKS.items():
        kind = GGMLQuantizationType(number)
        assert (kind.name, *GGML_QUANT_SIZES[kind]) == (name, *sizes)
    assert set(BLOCK_TYPES) <= {name for name, *_ in _BLOCKS.values()}


def test_methods_and_plugins_read_their_own_spelling() -> None:
    format_names.check_name("sparse24:tile+int4:g64")  # only its first word is known here
    with pytest.raises(UserError, match=r"There is no format 'sparse42'.*Did you mean 'sparse24'"):
        format_names.check_name("sparse42")
