"""Plan tables: what is measured here comes before what is shipped, and a damaged entry is left out, with a reason."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoestring.hardware.device import H200, device_limits
from shoestring.hardware.plan_table import PlanTable, add_plans, parse_plans, plan_fields, read_plans

GPU = "NVIDIA H200"


@dataclass(frozen=True)
class Plan:
    warps: int
    depth: int = 3
    label: str = ""
    ms: float = 0.0
    algorithms: tuple[int, int] = (0, 0)
    sizes: tuple[int, ...] = ()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanTable[Plan]:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    shipped = tmp_path / "plans.json"
    shipped.write_text('{"a": {"warps": 4}, "b": {"warps": 8, "depth": 5}}')
    return PlanTable("product", Plan, shipped=shipped)


def test_own_measurements_come_before_shipped_ones(table: PlanTable[Plan]) -> None:
    assert table.find("a", GPU) == Plan(4) and table.find("c", GPU) is None
    table.remember({"a": Plan(2), "c": Plan(1, sizes=(1, 2), algorithms=(3, 4), ms=0.5)}, GPU)
    again = PlanTable("product", Plan, shipped=table.shipped)  # as another process reads it
    for known in (table, again):
        assert known.find("a", GPU) == Plan(2)
        assert known.find("b", GPU) == Plan(8, 5)
        assert known.find("c", GPU) == Plan(1, sizes=(1, 2), algorithms=(3, 4), ms=0.5)
        assert known.find("a", "another GPU") == Plan(4)
    assert table.own_file(GPU).name == "product-NVIDIA_H200.json"
    assert [f.name for f in table.own_file(GPU).parent.iterdir()] == ["product-NVIDIA_H200.json"]


def test_processes_that_measure_at_once_lose_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"

    def measure(name: str) -> None:
        for i in range(50):
            add_plans(path, {f"{name} {i}": Plan(i)}, Plan)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=measure, args=(name,)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert read_plans(path, Plan) == {f"{name} {i}": Plan(i) for name in "abc" for i in range(50)}
    assert [f.name for f in tmp_path.iterdir()] == ["plans.json"]


def test_a_version_has_a_file_of_its_own(table: PlanTable[Plan]) -> None:
    newer = PlanTable("product", Plan, version="torch2.13")
    newer.remember({"a": Plan(7)}, "A/B C")
    assert newer.own_file("A/B C").name == "product-A_B_C-torch2.13.json"
    assert table.find("a", "A/B C") == Plan(4)


def test_adopted_plans_are_kept_in_no_file(table: PlanTable[Plan]) -> None:
    table.adopt({"a": Plan(9)}, GPU)
    assert table.find("a", GPU) == Plan(9) and table.find("a", "other") == Plan(4)
    assert not table.own_file(GPU).exists()
    table.forget()
    assert table.find("a", GPU) == Plan(4)


def test_choices_are_made_again_when_the_table_changes(table: PlanTable[Plan]) -> None:
    asked = []

    @table.cached
    def choose(key: str) -> Plan | None:
        asked.append(key)
        return table.find(key, GPU)

    assert choose("a") == choose("a") == Plan(4) and asked == ["a"]
    table.adopt({"a": Plan(9)}, GPU)
    assert choose("a") == Plan(9)
    table.remember({"a": Plan(10)}, GPU)
    assert choose("a") == Plan(10)
    add_plans(table.own_file(GPU), {"a": Plan(11)}, Plan)
    assert choose("a") == Plan(10)  # the file changed behind the table
    table.forget()
    assert choose("a") == Plan(11)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"warps": 4, "digits": 1}, "unknown field 'digits'"), ({"depth": 3}, "warps"),
        ({"warps": "4"}, "warps = '4'"), ({"warps": True}, "warps = True"), ({"warps": 4.5}, "warps = 4.5"),
        ({"warps": 4, "algorithms": [1]}, "algorithms = (1,)"), ({"warps": 4, "algorithms": [1, "2"]}, "algorithms"),
        ({"warps": 4, "sizes": 3}, "sizes = 3"), ({"warps": 4, "sizes": ["3"]}, "sizes"), ([4], "[4]"),
    ],
)  # fmt: skip
def test_a_damaged_entry_is_left_out_with_its_reason(fields: object, reason: str) -> None:
    found, reasons = parse_plans(json.dumps({"bad": fields, "good": {"warps": 1, "ms": 2}}), Plan)
    assert found == {"good": Plan(1, ms=2)}
    assert len(reasons) == 1 and reasons[0].startswith("'bad': ") and reason in reasons[0]


@pytest.mark.parametrize("text", ["", "[1]", '{"a": {"warps": 4}'])
def test_a_damaged_file_is_ignored_and_said_so(table: PlanTable[Plan], text: str) -> None:
    file = table.own_file(GPU)
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match="product-NVIDIA_H200.json: measured plans are ignored"):
        assert table.find("a", GPU) == Plan(4)
    with pytest.warns(UserWarning, match="ignored"):
        table.remember({"a": Plan(5)}, GPU)
    assert read_plans(file, Plan) == {"a": Plan(5)}


def test_a_folder_that_cannot_be_written_is_no_error(
    table: PlanTable[Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="Not a directory"):
        table.remember({"a": Plan(5)}, GPU)
    assert table.find("a", GPU) == Plan(5)
    with pytest.raises(OSError, match="file"):
        add_plans(tmp_path / "file" / "plans.json", {"a": Plan(5)}, Plan)


def test_fields_at_their_defaults_are_not_written() -> None:
    assert plan_fields(Plan(4, depth=3, label="x")) == {"warps": 4, "label": "x"}


def test_plans_are_made_for_an_h200_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_limits() == H200


def test_a_pipe_in_the_place_of_a_plan_file_is_no_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plans.json")
    with pytest.warns(UserWarning, match="a pipe"):
        assert read_plans(tmp_path / "plans.json", Plan) == {}
