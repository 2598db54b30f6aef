"""Documents from every kind of source, and the errors that name the file and the place."""

from __future__ import annotations

import json
import os
import sysconfig
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusals import refused
from shoestring.train.corpus import Document, Reading, documents, list_files
from shoestring.train.corpus import _read_text as read_text

PARAGRAPH = "A paragraph of some words, and then some more of them. " * 10  # 550 characters


def texts(source: Path | str) -> list[str]:
    return [d.text for d in documents(str(source))]


def test_marked_text_is_cut_at_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\nstill one\n<|endoftext|>\ntwo<|endoftext|>\n\n<|endoftext|>three")
    assert texts(file) == ["one\n\nstill one", "two", "three"]


def test_unmarked_text_is_cut_at_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("\n\n".join([PARAGRAPH] * 10))
    found = texts(file)
    assert len(found) == 3
    assert all(len(t) >= 2048 for t in found[:-1])
    assert "\n\n".join(found) == file.read_text()
    file.write_text("short\n\nand short")  # too little to cut
    assert texts(file) == ["short\n\nand short"]


def test_text_without_blank_lines_is_cut_at_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("\n".join([PARAGRAPH] * 300))
    found = texts(file)
    assert len(found) > 3
    assert "\n".join(found) == file.read_text()
    file.write_text("x" * 100_000)
    assert "".join(texts(file)) == "x" * 100_000
    assert len(texts(file)) > 2


@given(st.lists(st.text(alphabet="ab€🙂 \n\r\t", max_size=3000), max_size=4), st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_cutting_loses_only_newlines_and_ignores_block_size(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], block: int
) -> None:
    file = tmp_path_factory.mktemp("cut") / "a.txt"
    file.write_bytes("\n\n".join(parts * 3).encode())
    whole = list(read_text(file))
    assert "".join(whole).replace("\n", "") == file.read_bytes().decode().replace("\n", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoestring.train.corpus._BLOCK", block * 64)
        assert list(read_text(file)) == whole


def test_jsonl_with_text_and_with_prompts(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"text": "plain", "id": 3}, {"prompt": "2+2=", "completion": "4"}]
    file.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    assert list(documents(str(file))) == [Document("plain"), Document("4", "2+2=")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"a\.jsonl:2 is not valid JSON"),
        ('{"content": "x"}', r"a\.jsonl:2 has the fields \['content'\]"),
        ('{"prompt": "x"}', r"a\.jsonl:2 has the fields"),
        ('{"text": 5}', r"a\.jsonl:2 has the fields"),
        ("[1]", r"a\.jsonl:2 has a list"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    refused(message, texts, tmp_path / "a.jsonl")


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": ["one", "two"], "n": [1, 2]}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["one", "two"]
    pq.write_table(pa.table({"prompt": ["q"], "completion": ["a"]}), tmp_path / "b.parquet")
    assert list(documents(str(tmp_path / "b.parquet"))) == [Document("a", "q")]
    pq.write_table(pa.table({"body": ["q"]}), tmp_path / "c.parquet")
    refused(r"columns \['body'\]", texts, tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "d.parquet")
    refused("row 2", texts, tmp_path / "d.parquet")
    (tmp_path / "e.parquet").write_bytes(b"PAR1 not really")
    refused("not a readable parquet", texts, tmp_path / "e.parquet")


def test_not_utf8_names_file_and_byte(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"caf\xe9 au lait")
    refused(r"a\.txt is not UTF-8 text: byte 3 ", texts, file)
    file.write_bytes("é".encode() * 600_000 + b"\xff")  # past the first block, which ends inside a character
    refused("byte 1200000 ", texts, file)
    file.write_bytes(b"ends inside a character \xe2\x82")
    refused("byte 24 ", texts, file)
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'{"text": "ok"}\n{"text": "\xff"}')
    refused("byte 25 ", texts, lines)


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "there"}')
    assert texts(tmp_path) == ["hello", "there"]


def test_folders_and_globs_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.py", "a/c.md", "a/.hidden.txt", ".git/x.py", "a/image.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a/c.md", "a/z.py", "b.txt"]
    assert texts(f"{tmp_path}/**/*.py") == ["a/z.py"]
    assert texts(f"{tmp_path}/*.txt") == ["b.txt"]
    assert [f.name for f in list_files(str(tmp_path))] == ["a/c.md", "a/z.py", "b.txt"]


def test_sources_that_are_not(tmp_path: Path) -> None:
    refused(r"data=pyton does not exist.*a folder.*Did you mean 'python'", texts, "pyton")
    refused(r"holds no \.txt", texts, tmp_path)
    refused("matches", texts, f"{tmp_path}/*.txt")
    (tmp_path / "a.csv").write_text("x")
    refused(r"'\.csv'; corpora are", texts, tmp_path / "a.csv")


def test_unreadable_file() -> None:
    root = os.geteuid() == 0  # who reads everything, and may be somebody else for a while
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others
        Path(folder).chmod(0o755)
        (Path(folder) / "a.txt").write_text("x")
        assert texts(folder) == ["x"]  # nothing is left to import, from folders that are closed to others
        (Path(folder) / "a.txt").chmod(0)
        if root:
            os.seteuid(65534)
        try:
            refused("cannot read", texts, folder)
        finally:
            if root:
                os.seteuid(0)


def test_limit_counts_bytes_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "é" * 50}) for _ in range(20)))
    reading = Reading()
    found = list(documents(str(tmp_path), max_bytes=450, reading=reading))
    assert len(found) == 4
    assert (reading.num_documents, reading.num_bytes, reading.reached_limit) == (4, 400, True)
    assert len(list(documents(str(tmp_path), max_bytes=1))) == 1  # never nothing


def test_python_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading()
    found = list(documents("python", max_bytes=1_000_000, reading=reading))
    assert reading.reached_limit
    assert 500_000 < reading.num_bytes <= 1_000_000
    assert sum("def " in d.text for d in found) > len(found) / 3
    names = [f.name for f in list_files("python")]
    assert "json/decoder.py" in names
    assert not any("__pycache__" in n for n in names)

    # A library of three files: one of them twice, one not UTF-8.
    for folder in ("lib", "site"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lib" / "a.py").write_text("x = 1\n")
    (tmp_path / "lib" / "b.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "site" / "vendored.py").write_text("x = 1\n")
    paths = {"stdlib": "lib", "purelib": "site", "platlib": "site"}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {k: str(tmp_path / v) for k, v in paths.items()})
    monkeypatch.setattr("site.getsitepackages", list)
    monkeypatch.setattr("sys.path", [])
    for _ in range(2):
        reading = Reading()
        assert [d.text for d in documents("python", reading=reading)] == ["x = 1\n"]
    assert (reading.num_duplicates, reading.num_unreadable) == (1, 1)


def test_a_small_parquet_file_that_unfolds_to_gigabytes_stops_at_the_limit(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = "many words " * 10_000
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 60_000, pyarrow.int32()), pyarrow.array([text]))
    path = tmp_path / "bomb.parquet"
    parquet.write_table(pyarrow.table({"text": repeated}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 10_000 and parquet.read_schema(path).field("text").type == pyarrow.string()
    reading = Reading()
    assert len(list(documents(str(path), max_bytes=1_000_000, reading=reading))) == 9
    assert reading.reached_limit and pyarrow.total_allocated_bytes() < 50e6


def test_parquet_columns_that_are_no_texts(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for values, kind in (([1, 2], "int64"), ([["a"], ["b"]], "list"), ([{"x": "a"}], "struct"), ([b"a"], "binary")):
        parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
        refused(f"the column text is {kind}", list, documents(str(tmp_path / "a.parquet")))
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "a.parquet")
    refused("row 2 has the fields", list, documents(str(tmp_path / "a.parquet")))


def test_endless_emptiness_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.train.corpus._MOST_EMPTY", 10)
    (tmp_path / "a.jsonl").write_text('{"text": " "}\n' * 11)
    refused("11 documents without text in a row", list, documents(str(tmp_path / "a.jsonl")))
