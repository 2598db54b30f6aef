"""What a run writes: metrics that survive kill and resume, TensorBoard events, a report, its own folder."""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.dom import minidom

import pytest

from shoestring.errors import Interrupted, UserError
from shoestring.report import Scatter, Table, Text, nice_ticks, place_labels, run_sections, size_scatter, write_report
from shoestring.runlog import (
    RunLog,
    append_jsonl,
    check_free,
    check_outputs,
    check_unfinished,
    new_run_folder,
    open_run_folder,
    read_config,
    read_evals,
    read_jsonl,
    read_metrics,
    resumable,
    write_atomically,
)


def test_metrics_are_one_json_object_per_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.log(1, loss=2.5, lr=1e-3)
    log.log(2, loss=float("nan"))
    log.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["step"], first["loss"], first["lr"]) == (1, 2.5, 1e-3)
    assert second["loss"] is None  # JSON has no NaN


def test_an_evaluation_that_is_made_again_is_one_row(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for perplexity in (3.0, 3.0, float("nan"), float("nan"), 2.5, 3.0):
        log.evaluated(model="tiny", perplexity=perplexity)
    assert [row["perplexity"] for row in log.evaluations()] == [3.0, None, 2.5]


def test_two_outputs_in_one_place_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"out": "a", "dense_out": "b", "run": "c", "resume": None}
    check_outputs(settings, "out", "dense_out")
    for key, other in (("dense_out", "out"), ("run", "out")):
        with pytest.raises(UserError, match=f"out and {key} are both"):
            check_outputs(settings | {key: str(tmp_path / settings[other])}, "out", "dense_out")  # type: ignore


def test_resuming_forgets_what_came_after_the_resumed_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(1, 6):
        log.log(step, loss=float(step))
    log.close()
    again = RunLog(tmp_path)
    again.truncate_after(3)
    again.log(4, loss=40.0)
    again.close()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["loss"]) for r in rows] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert rows == again.history


def tensorboard_losses(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_tensorboard_reads_the_same_scalars_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.summary.writer import event_file_writer

    # Names end with this counter: of two files made in one second, 10 would be read before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    log = RunLog(tmp_path)
    for step in range(1, 5):
        log.log(step, loss=float(step))
    log.close()
    again = RunLog(tmp_path)
    again.truncate_after(2)
    again.log(3, loss=30.0)
    again.close()
    assert tensorboard_losses(tmp_path) == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_forgets_what_a_run_that_goes_back_forgets(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = RunLog(tmp_path)
    for step in range(1, 5):
        log.log(step, loss=float(step))
    log.truncate_after(2)
    log.log(3, loss=30.0)
    log.close()
    assert tensorboard_losses(tmp_path) == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_half_written_last_line_is_dropped_but_a_broken_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_jsonl(path) == [{"step": 1}]
    path.write_text('{"step"\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 1 is not valid JSON"):
        read_jsonl(path)


@pytest.mark.parametrize(("before", "kept"), [('{"step": 2, "lo', []), ("\0\0\0", []), ('{"step": 2}', [{"step": 2}])])
def test_a_line_behind_half_a_line_is_not_lost(tmp_path: Path, before: str, kept: list[dict[str, int]]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + before)
    append_jsonl(path, {"step": 3})
    append_jsonl(path, {"step": 4})
    assert read_jsonl(path) == [{"step": 1}, *kept, {"step": 3}, {"step": 4}]


def test_processes_that_append_at_once_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text('{"from": "a killed pro')
    program = (
        "import sys; from pathlib import Path; from shoestring.runlog import append_jsonl\n"
        "for i in range(100): append_jsonl(Path(sys.argv[1]), {'from': sys.argv[2], 'i': i, 'pad': 'x' * 20_000})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in "abc"]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    rows = [(row["from"], row["i"]) for row in read_jsonl(path)]
    assert sorted(rows) == [(name, i) for name in "abc" for i in range(100)]


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 1})
    whole = path.read_bytes()
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, allowed[1]))  # as a full disk: a part can be written
    try:
        with pytest.raises(OSError, match=r"(No space left|File too large).*metrics\.jsonl"):
            append_jsonl(path, {"step": 2})
        with pytest.raises(OSError, match=r"(No space left|File too large).*config\.json"):
            write_atomically(tmp_path / "config.json", "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert path.read_bytes() == whole and [f.name for f in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_folders_that_cannot_be_a_run_or_are_a_damaged_one(tmp_path: Path) -> None:
    assert check_free(tmp_path / "a/b") == tmp_path / "a/b"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file; give another name"):
        check_free(tmp_path / "file/deeper/run")
    assert read_config(tmp_path) == {}
    for damage in ('{"recipe": ', "[1, 2]"):
        (tmp_path / "config.json").write_text(damage)
        with pytest.raises(UserError, match=r"config.json (is not valid JSON|must hold a JSON object)"):
            read_config(tmp_path)


def test_what_a_resumed_run_may_write_to(tmp_path: Path) -> None:
    run, own, other = tmp_path / "run", tmp_path / "own", tmp_path / "other"
    for folder in (run, own, other):
        folder.mkdir()
        (folder / "x").touch()
    settings = {"out": str(own), "steps": 3, "run": None, "resume": None}
    (run / "config.json").write_text(json.dumps({"config": settings}))
    with pytest.raises(UserError, match="own exists already"):
        check_outputs(settings, "out")
    again = {**settings, "resume": str(run)}
    check_outputs(again, "out")  # the run that is resumed has written it
    with pytest.raises(UserError, match="other exists already"):
        check_outputs({**again, "out": str(other)}, "out")
    assert open_run_folder("a/b", again, {"steps": 1}) == run
    with pytest.raises(UserError, match="was started with steps=3"):
        open_run_folder("a/b", {**again, "steps": 4}, {"steps": 1})


def test_a_resumed_run_stays_where_it_is(tmp_path: Path) -> None:
    old, run = tmp_path / "old", tmp_path / "run"
    run.mkdir()
    # Started as old, and moved since: that is what nobody gave.
    (run / "config.json").write_text(json.dumps({"config": {"run": str(old)}}))
    for given in (None, old, run):
        settings = {"run": given and str(given), "resume": str(run)}
        assert open_run_folder("a/b", settings) == run
    with pytest.raises(UserError, match=r"writes nothing to run=.*other; leave one of them out"):
        open_run_folder("a/b", {"run": str(tmp_path / "other"), "resume": str(run)})
    check_unfinished(None)
    check_unfinished(str(run))
    (run / "report.html").touch()
    with pytest.raises(UserError, match="that run is finished"):
        check_unfinished(str(run))


def test_ctrl_c_says_how_to_go_on() -> None:
    def said(stop: BaseException, *done: Callable[[], str]) -> str:
        with pytest.raises(Interrupted) as caught, resumable("a/b", Path("run"), *done):
            raise stop
        return str(caught.value)

    way_on = "; continue with `shoestring run a/b resume=run`"
    assert said(KeyboardInterrupt()) == "stopped" + way_on
    assert said(KeyboardInterrupt(), lambda: " after 2 of 3 blocks") == "stopped after 2 of 3 blocks" + way_on
    # A stage with a folder of its own names that one.
    assert said(Interrupted("stopped at step 3 of 9 and saved; continue with `x`")) == (
        "stopped at step 3 of 9 and saved" + way_on
    )


def test_other_ranks_write_and_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path / "run", main=False)
    log.log(1, loss=1.0)
    log.save_config({"config": {}})
    log.evaluated(perplexity=3.0)
    log.say("hello")
    with log.progress(3, "working") as bar:
        bar.advance(3)
    log.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_progress_without_a_terminal_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(None).progress(4, "training") as bar:
        for _ in range(4):
            bar.advance(1, loss=1.23456)
    assert capsys.readouterr().out == "training: 4/4 in 0s loss 1.235\n"


def test_a_bar_ends_full(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the total was an estimate: too large, too small, or nothing was to be counted."""
    for given, steps in ((10, 3), (2, 3)):
        with RunLog(None).progress(given, "searching") as bar:
            for _ in range(steps):
                bar.advance(1)
                assert bar.done <= bar.total
            bar.expect(bar.done)
        assert capsys.readouterr().out == "searching: 3/3 in 0s\n"
    with RunLog(None).progress(4, "training") as bar:
        bar.advance(3)
        bar.expect(2)  # never fewer than were counted
    assert capsys.readouterr().out == "training: 3/3 in 0s\n"
    with RunLog(None).progress(0, "nothing") as bar:
        bar.expect(bar.done)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with RunLog(None).progress(10, "searching") as bar:
        bar.advance(12)
        bar.advance(1)
        bar.expect(bar.done)
        task = bar.bar.tasks[0]  # type: ignore[attr-defined]
    assert task.finished and (task.completed, task.total) == (13, 13)


def test_a_bar_that_takes_longer_than_expected_goes_on_speaking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 20.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with RunLog(None).progress(2, "searching") as bar:
        for _ in range(4):
            bar.advance(1)
    said = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert said == ["1/2", "3/3", "4/4"]


def test_run_folders_never_collide(tmp_path: Path) -> None:
    folders = {new_run_folder("train/dense", tmp_path) for _ in range(5)}
    assert len(folders) == 5
    assert all(f.is_dir() and f.parent == tmp_path and f.name.startswith("train-dense-20") for f in folders)


def test_run_folders_that_cannot_be_made_are_the_users_matter(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match="run="):
        new_run_folder("train/dense", tmp_path / "runs")
    with pytest.raises(UserError, match="run="):
        RunLog("/proc/nowhere/run")


def test_report_is_wellformed_selfcontained_and_complete(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.save_config({"recipe": "train/dense", "config": {"data": "<a&b>", "mesh": {"dp": 2}}})
    for step in range(0, 300):
        log.log(step, loss=5.0 / (step + 1), val_loss=float("inf") if step == 7 else 1.0)
    log.evaluated(model="tiny", perplexity=12.5, text="docs", context=64)
    log.close()
    extra = [
        Scatter("Size", [("int4", 1.0, 9.0), ("nf3", 0.8, 11.0)], "MB", "perplexity"),
        Scatter("One point", [("a", 1.0, 2.0)], "x", "y"),
        Table("Nothing", ["a"], []),
        Text("Sample", "<script>alert(1)</script>", code=True),
    ]
    page = write_report(tmp_path, "A <run>", [*run_sections(tmp_path), *extra]).read_text()
    minidom.parseString(page.split("\n", 1)[1])  # the page without its doctype is well-formed XML, SVG included
    assert page.count("<svg") == 3
    for needle in ("val_loss", "12.5", "mesh.dp", "&lt;a&amp;b&gt;", "nf3", "prefers-color-scheme", "torch"):
        assert needle in page
    assert "<script" not in page and "Nothing" not in page
    assert page.count("://") == page.count("http://www.w3.org/2000/svg")  # nothing is fetched


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(1.3, 1.9) == [1.4, 1.6, 1.8]
    assert nice_ticks(-0.04, 0.11) == [0, 0.05, 0.1]


def test_rows_of_metrics_and_evaluations_are_typed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5, "val": null}\n')
    assert read_metrics(path) == [{"step": 1, "loss": 2.5, "val": None}]
    for bad in (
        '{"loss": 1}',
        '{"step": "1"}',
        '{"step": -1}',
        '{"step": 1, "loss": "x"}',
        '{"step": 1, "loss": [1]}',
        "3",
    ):
        path.write_text(bad + '\n{"step": 2}\n')
        with pytest.raises(UserError, match=r"metrics\.jsonl, (row|line) 1"):
            read_metrics(path)
    path.write_text('{"model": "m", "perplexity": 1e64}\n')  # of a model that has diverged
    assert read_evals(path)[0]["perplexity"] == 1e64
    for bad in ('{"perplexity": "x"}', '{"model": ["m"]}', '{"megabytes": -1}'):
        path.write_text(bad + "\n{}\n")
        with pytest.raises(UserError, match="row 1"):
            read_evals(path)
    (tmp_path / "config.json").write_text('{"recipe": "x", "config": 3}')
    with pytest.raises(UserError, match="config must be an object"):
        read_config(tmp_path)


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name, why in (("loop", "leads nowhere"), ("x" * 300, "cannot be a path"), ("a\0b", "cannot be a path")):
        with pytest.raises(UserError, match=why):
            check_free(tmp_path / name)


class Tracker:
    """A package with the calls of wandb and trackio, which writes down what it is told."""

    def __init__(self, name: str, *, fails: bool = False) -> None:
        self.__name__, self.fails = name, fails
        self.calls: list[tuple[str, object]] = []

    def init(self, **given: object) -> Tracker:
        self.calls.append(("init", given))
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.calls.append(("define", (name, step_metric)))

    def log(self, scalars: dict[str, float], step: int | None = None) -> None:
        if self.fails:
            raise OSError("no network\nat all")
        self.calls.append(("log", (scalars, step)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_same_scalars(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    monkeypatch.setenv("SHOESTRING_TRACK", name)
    log = RunLog(tmp_path / "run 1")
    log.save_config({"recipe": "r", "config": {"steps": 2}})
    log.log(1, loss=2.5, nothing=float("nan"))
    log.close()
    given = {"project": "shoestring", "name": "run 1", "resume": "allow", "config": {"steps": 2}}
    rows: list[tuple[str, object]] = [("init", given), ("log", ({"loss": 2.5}, 1)), ("finish", None)]
    if name == "wandb":
        given["id"] = "run-1"
        rows = [rows[0], ("define", ("*", "step")), ("log", ({"loss": 2.5, "step": 1}, None)), ("finish", None)]
    assert tracker.calls == rows


def test_a_tracker_that_fails_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", Tracker("trackio", fails=True))
    monkeypatch.setenv("SHOESTRING_TRACK", "trackio")
    log = RunLog(tmp_path)
    for step in (1, 2):
        log.log(step, loss=1.0)
    log.close()
    assert capsys.readouterr().out == "trackio failed (no network): scalars go to metrics.jsonl and tb/ only\n"
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name, needle in (("wandb", r"pip install 'shoestring\[wandb\]'"), ("mlflow", "wandb or trackio")):
        monkeypatch.setenv("SHOESTRING_TRACK", name)
        with pytest.raises(UserError, match=needle):
            RunLog(tmp_path)


def test_labels_of_a_scatter_do_not_cross() -> None:
    spots = [(300.0, 100.0), (303.0, 101.0), (306.0, 103.0), (700.0, 12.0), (90.0, 270.0), (304.0, 99.0)]
    names = ["int4:g64 gptq+clip", "nf3:g64", "int2:g64 blockwise", "dense at the edge", "low", "int3:g64 awq"]
    places = place_labels(spots, names, left=80)
    boxes = [(x, y - 12, x + 7.4 * len(name), y + 3) for (x, y), name in zip(places, names, strict=True)]
    boxes += [(x - 7, y - 7, x + 7, y + 7) for x, y in spots[3:5]]  # points that stand apart
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)
    assert all(b[0] >= 80 and b[2] <= 720 for b in boxes[: len(names)])


def test_numbers_of_a_column_are_written_alike() -> None:
    table = Table("t", ["a", "b", "c", "d", "e"], [[3959, 74.6, 1e-5, 3518.4, "x"], [12, 74.83, 12.0, 98.0, 3518.4]])
    assert table.cells == [["3,959", "74.60", "1e-05", "3,518.4", "x"], ["12", "74.83", "12", "98.0", "3,518"]]
    assert table.markdown().splitlines()[2] == "| 3,959 | 74.60 | 1e-05 | 3,518.4 | x |"


def test_a_report_has_the_commands_and_first_what_was_changed(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, config in ((first, {"steps": 7}), (second, {"model": str(first), "format": "int4", "context": 512})):
        log = RunLog(folder)
        log.save_config({"recipe": folder.name, "config": config, "changed": [k for k in config if k != "context"]})
        settings = json.loads((folder / "config.json").read_text())
        log.put_back_config({**settings, "command": f"shoestring run {folder.name}"})
    log.log(5, loss=2.5, lr=0.001)
    (second / "evals.jsonl").write_text('{"model": "after", "format": "int4", "perplexity": 12.5, "megabytes": 3.25}\n')
    rows = read_evals(second / "evals.jsonl")
    page = write_report(second, "x", [*run_sections(second), size_scatter("Size", rows)]).read_text()
    assert "shoestring run first\nshoestring run second" in page
    assert page.index("differ from the defaults") < page.index("<td>format</td>") < page.index("<details>")
    assert (
        "<td>context</td>" in page.partition("<details>")[2]
        and "<td>context</td>" not in page.partition("<details>")[0]
    )
    for row in ("step 5, loss 2.5, lr 0.001", "model after, format int4, perplexity 12.5, MB 3.25"):
        assert f"<title>{row}</title>" in page
