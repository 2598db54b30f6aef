"""The bounded JSON reader: what it refuses, and that it refuses in one line and at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoestring.errors import UserError
from shoestring.json_files import (
    MOST_DEPTH,
    Fields,
    json_lines,
    parse_json,
    read_bytes,
    read_json,
    read_object,
    read_text,
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not valid JSON"),
        ('{"a": 1', "is not valid JSON"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -Infinity}', "-Infinity is not a JSON number"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "9" * 41 + "}", "more than 40 digits"),
        ('{"a": ' + "9" * 5000 + "}", "is not valid JSON"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"\\udfff": 1}', "half of a surrogate pair"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested more than"),
        ("[" * 100_000, "nested more than"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested more than"),
    ],
)
def test_what_is_no_json(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as error:
        parse_json(text, "file.json")
    assert str(error.value).startswith("file.json") and len(str(error.value)) < 400
    str(error.value).encode()


def test_what_is_json() -> None:
    assert parse_json('{"a": [1.5, null, true, "\\ud83d\\ude00"]}', "x") == {"a": [1.5, None, True, "😀"]}
    assert parse_json(f'{{"model_max_length": {10**30}}}', "x") == {"model_max_length": 10**30}
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH, "x") is not None


def test_only_ordinary_files_of_a_bounded_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UserError, match="a pipe"):  # and does not wait for a writer
        read_bytes(tmp_path / "pipe.json")
    with pytest.raises(UserError, match=r"Is a directory; give a file$"):
        read_json(tmp_path)
    with pytest.raises(UserError, match=r"No such file or directory; check the path$"):
        read_json(tmp_path / "no.json")
    with pytest.raises(UserError, match="too long"):
        read_json(tmp_path / ("x" * 300))
    with pytest.raises(UserError, match="cannot be a path"):
        read_json(tmp_path / "a\0b")
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte that takes no room
    with pytest.raises(UserError, match="more than 16,777,216 bytes"):
        read_json(big)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="byte 3 does not decode"):
        read_text(tmp_path / "latin.txt")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(UserError, match="must hold a JSON object, not a list"):
        read_object(tmp_path / "list.json")


def test_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n\n  \n[1]")
    assert [(n, t.strip()) for n, t in json_lines(path)] == [(1, "{}"), (4, "[1]")]
    monkeypatch.setattr("shoestring.json_files.MOST_LINE", 10)
    path.write_text("{}\n" + "x" * 11)
    with pytest.raises(UserError, match=r"a.jsonl:2 has more than"):
        list(json_lines(path))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="a pipe"):
        list(json_lines(tmp_path / "pipe.jsonl"))


@pytest.mark.parametrize("bad", [True, 0, -1, 1.0, "1", None, [1], 2**60])
def test_whole_numbers(bad: object) -> None:
    with pytest.raises(UserError, match=r"^f\.json.*n"):
        Fields({"n": bad}, "f.json").whole("n")
    assert Fields({"n": 3}, "f.json").whole("n") == 3
    assert Fields({"n": None}, "f.json").whole("n", 7) == 7


@pytest.mark.parametrize("bad", [True, 0.0, -1e-5, 2.0, "1", float("nan"), float("inf")])
def test_numbers(bad: object) -> None:
    with pytest.raises(UserError, match=r"from 1e-12 to 0.1"):
        Fields({"eps": bad}, "f.json").number("eps", least=1e-12, most=0.1)
    assert Fields({"eps": 1e-5}, "f.json").number("eps", least=1e-12, most=0.1) == 1e-5


def test_other_kinds() -> None:
    fields = Fields({"a": "x", "b": {}, "c": [], "d": False}, "f.json")
    assert (fields.text("a"), fields.object("b"), fields.list("c"), fields.flag("d")) == ("x", {}, [], False)
    for take in (fields.text, fields.object, fields.list):
        with pytest.raises(UserError, match=r"f.json: d must be"):
            take("d")
    with pytest.raises(UserError, match=r"f.json: a must be true or false"):
        fields.flag("a")
