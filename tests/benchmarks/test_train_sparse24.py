"""What can be said about the 2:4 training bench without a GPU."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import weakref
from typing import Any

import pytest
import torch

from benchmarks import results, train_sparse24
from shoestring.errors import UserError


class NoGraph:
    """Stands for a CUDA graph or stream: it knows addresses only and keeps nothing alive."""

    replayed = 0

    def replay(self) -> None:
        NoGraph.replayed += 1

    def wait_stream(self, other: Any) -> None: ...


def test_a_captured_layer_lives_as_long_as_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, NoGraph)
    monkeypatch.setattr("shoestring.kernels.runtime.capture_stream.capture_stream", lambda device: NoGraph())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda thing: contextlib.nullcontext())

    def capture() -> tuple[Any, Any]:
        layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
        loop = train_sparse24.graphed(lambda count: None, lambda: layer(x).sum().backward())
        return loop, weakref.ref(layer)

    loop, layer = capture()
    gc.collect()
    assert layer() is not None
    loop(3)
    assert NoGraph.replayed == 3 and loop.__name__ == "replays"


def test_every_row_of_the_table_is_a_command_of_its_own() -> None:
    asked = train_sparse24.commands(train_sparse24.AT_ONCE, 5)
    assert len(asked) == len(train_sparse24.AT_ONCE)
    assert [c for c in asked if "step" in c and "4096" in c] == asked[:1]  # the most wanted first
    for what, width, cases, _ in train_sparse24.AT_ONCE:
        assert what in (*train_sparse24.WHAT, "parts") and width in train_sparse24.WIDTHS
        assert set(cases) <= {*train_sparse24.FORMATS, "FP8"} - {"dense"}


def test_products_are_chosen_before_anything_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only those of the rows that were asked for."""
    happened: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train_sparse24.subprocess, "run", lambda asked, **_: happened.append(asked))
    monkeypatch.setattr(
        train_sparse24, "run_in_turns", lambda asked, *_, **__: happened.append(asked) or ["done"] * len(asked)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (144 * 2**30, 144 * 2**30))
    monkeypatch.setattr("sys.argv", ["bench", "--at-once", "60", "--widths", "768", "5120", "--what", "step", "block"])
    train_sparse24.main()
    first, rows = happened
    assert first[3:8] == ["--what", "tune", "--widths", "5120", "768"]
    assert {"FST", "S-STE", *train_sparse24.EXACT} <= set(first[8:])
    assert [(c[4], c[6]) for c in rows] == [("step", "5120"), ("block", "5120"), ("step", "768")]


def test_processes_run_together_as_far_as_memory_goes() -> None:
    rows = train_sparse24.AT_ONCE
    for gib in (1.0, 60.0, 125.0, 1000.0):
        groups = train_sparse24.rounds(rows, gib)
        assert [row for group in groups for row in group] == list(rows)
        assert all(len(group) == 1 or sum(map(train_sparse24.gib_of, group)) <= gib for group in groups)
    assert len(train_sparse24.rounds(rows, 1.0)) == len(rows) and len(train_sparse24.rounds(rows, 1000.0)) == 1


def test_every_round_gets_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def run(commands: Any, folder: Any, *, patience: float, seconds: float) -> list[str]:
        given.append(seconds)
        assert 0 < patience < seconds
        return ["done"] * len(commands)

    monkeypatch.setattr(train_sparse24.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(train_sparse24, "run_in_turns", run)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 2**30, 80 * 2**30))
    train_sparse24.at_once(train_sparse24.AT_ONCE, 500.0, 5)
    num = len(train_sparse24.rounds(train_sparse24.AT_ONCE, 72.0))
    assert len(given) == num > 2 and min(given) > 0.4 * 500 / num
    assert train_sparse24.share(10.0, [3.0]) == 10.0 and train_sparse24.share(10.0, [0.0]) > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--what tune ffn parts", "--what tune ffn parts: tune measures nothing; give it alone, or the others"),
        ("--at-once 60 --what parts --widths 768", "has no row of --what parts --widths 768; its rows are step 4096, "),
        ("--at-once 60 --what tune", "--at-once has no row of --what tune --widths 768 1280 2048 4096 5120; its rows"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    given: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sys.argv", ["bench", *given.split()])
    with pytest.raises(SystemExit) as stopped:
        train_sparse24.main()
    assert stopped.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (subprocess.CalledProcessError(3, "tune"), "failed with exit code 3.*--what tune --widths 4096 runs it alone"),
        (subprocess.TimeoutExpired("tune", 60), "after the 60 seconds of --at-once: give more seconds"),
    ],
)
def test_products_that_cannot_be_chosen_are_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(train_sparse24.subprocess, "run", fail)
    with pytest.raises(UserError, match=said) as raised:
        train_sparse24.at_once([row for row in train_sparse24.AT_ONCE if row[1] == 4096], 60.0, 5)
    assert "\n" not in str(raised.value)


def test_the_table_shows_ratios_by_width(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for width, ratio in ((768, 0.991), (4096, 1.25)):
        results.record(
            bench=train_sparse24.BENCH, case="FST", metric="ms", unit="ms", samples=[1.0], ratio=ratio,
            config={"what": "block", "d_model": width},
        )  # fmt: skip
    assert train_sparse24.table().splitlines()[:3] == [
        "| d_model | 768 | 4096 |", "| --- | --- | --- |", "| block: FST | 0.99 | 1.25 |",
    ]  # fmt: skip
