"""Every table in the pages is what results/ says, and a results line has the one schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.results import newest, record
from benchmarks.tables import MARKED, REPO, pages, rewrite
from shoestring.evals import result_line

KEYS = {
    "bench", "case", "metric", "unit", "value", "p20", "p80", "baseline", "baseline_value", "ratio", "quality",
    "config", "device", "versions", "commit", "date", "note",
}  # fmt: skip


@pytest.mark.parametrize("page", [p for p in pages() if MARKED.search(p.read_text())], ids=lambda p: p.stem)
def test_tables_are_generated_from_results(page: Path) -> None:
    text = page.read_text()
    assert rewrite(text) == text, f"{page} is stale: run python -m benchmarks.tables"


def test_a_number_typed_by_hand_is_found() -> None:
    text = (REPO / "README.md").read_text()
    table = MARKED.search(text)
    assert table is not None
    digit = next(c for c in table[0] if c.isdigit())
    assert rewrite(text.replace(table[0], table[0].replace(digit, "7" if digit != "7" else "8"))) == text


@pytest.mark.parametrize("path", sorted((REPO / "results").glob("*.jsonl")), ids=lambda p: p.stem)
def test_results_follow_the_schema(path: Path) -> None:
    for text in path.read_text().splitlines():
        line = json.loads(text)
        assert set(line) == KEYS
        assert line["bench"] == path.stem
        assert line["p20"] <= line["value"] <= line["p80"]
        assert line["commit"] and line["device"] and line["versions"]


def test_the_newest_line_counts(tmp_path: Path) -> None:
    for value in (1.0, 3.0, 2.0):
        record(bench="b", case="c", metric="m", unit="u", samples=[value], config={"n": 1}, folder=tmp_path)
    record(bench="b", case="c", metric="m", unit="u", samples=[1, 9, 5], config={"n": 2}, folder=tmp_path)
    lines = newest("b", tmp_path)
    assert [n["value"] for n in lines] == [2.0, 5.0]
    assert (lines[1]["p20"], lines[1]["p80"]) == (1.0, 9.0)


def test_machines_do_not_displace_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, device, n in ((1.0, "A", 1), (2.0, "B", 1), (3.0, "A", 2), (4.0, "A", 1)):
        monkeypatch.setattr(result_line, "device_name", lambda device=device: device)
        record(bench="b", case="c", metric="m", unit="u", samples=[value], config={"n": n}, folder=tmp_path)
    # Those of equal settings together, the newest of them last.
    lines = [(n["config"]["n"], n["device"], n["value"]) for n in newest("b", tmp_path)]
    assert lines == [(1, "B", 2.0), (1, "A", 4.0), (2, "A", 3.0)]
