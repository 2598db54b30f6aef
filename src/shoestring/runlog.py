"""RunLog: everything a run writes, to the console and to its folder.

A run folder is
    config.json     the resolved config, the command and the versions
    .lock           who writes here (state/run_lock.py)
    metrics.jsonl   one JSON object per logged step: step, time, scalars
    tb/             the same scalars as TensorBoard events (when tensorboard is installed)
    checkpoints/    step-00000100/ ...
    model/          the finished Hugging Face folder
    evals.jsonl     one JSON object per evaluation
    report.html     plots and tables of the above
A resumed run continues metrics.jsonl: what was logged after the resumed step is cut off first, so that the
file reads as if the run had never stopped. Ranks other than the first write and print nothing.

SHOESTRING_TRACK=wandb or trackio sends the same scalars there as well; those packages keep their own settings (project,
sign-in, offline mode) in their own variables. metrics.jsonl stays the record: a tracker that fails does not end a run.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import io
import itertools
import json
import math
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from shoestring.errors import Interrupted, UserError, room, shown
from shoestring.json_files import Fields, check_path, is_unicode, json_lines, kind_of, parse_json, read_object

CHECKOUT = Path(__file__).resolve().parents[2]  # the repository; not one in an installed wheel
PLAIN_PROGRESS_SECONDS = 10.0
TRACKERS = ("wandb", "trackio")  # packages with init, log and finish
# Settings of one command, not of the run: config.json has them like this.
AS_SAVED: dict[str, Any] = {"resume": None, "resume_from": "newest"}


class RunLog:
    def __init__(self, folder: Path | str | None = None, *, main: bool = True, quiet: bool = False) -> None:
        self.folder = None if folder is None else Path(folder)
        self.main = main
        self.quiet = quiet
        self.history: list[dict[str, Any]] = []
        self._tensorboard: Any = None
        self._purge_step: int | None = None
        self._tracked: Any = None  # the tracker's run; False: none
        tracker = import_tracker(os.environ.get("SHOESTRING_TRACK", "")) if self.folder is not None and main else None
        self._tracker = tracker
        if self.folder is not None and main:
            make_run_folder(self.folder, exist_ok=True)
            metrics = self.folder / "metrics.jsonl"
            try:
                metrics.touch()  # also without metrics: it is what marks a run folder
            except OSError as error:
                raise UserError(
                    f"cannot write {metrics}: {error.strerror}; {room(error)}give another run folder"
                ) from None
            self.history = read_metrics(metrics)

    # -- metrics -----------------------------------------------------------------------------------
    def log(self, step: int, **scalars: float) -> None:
        """Record scalars of one step."""
        if not self.main:
            return
        row = {"step": int(step), "time": round(time.time(), 3), **{k: float(v) for k, v in scalars.items()}}
        self.history.append(row)
        if self.folder is None:
            return
        append_jsonl(self.folder / "metrics.jsonl", row)
        writer = self._open_tensorboard()
        for name, value in row.items():
            if writer and name not in ("step", "time"):
                writer.add_scalar(name, value, row["step"], walltime=row["time"])
        if self._tracker is not None:
            self._track(row)

    def truncate_after(self, step: int) -> None:
        """Forget everything logged after `step`: the run goes on from there."""
        self.history = [row for row in self.history if row["step"] <= step]
        self._purge_step = step + 1
        self._close_tensorboard()  # the next file says from where on it replaces this one
        if not self.main or self.folder is None:
            return
        path = self.folder / "metrics.jsonl"
        if path.is_dir():
            raise UserError(f"{path} is a folder, not the log of a run: move it away and resume again")
        write_atomically(path, "".join(_line(row) for row in self.history))

    def save_config(self, config: dict[str, Any]) -> None:
        """config.json: the resolved config with the command and versions that ran it."""
        if self.main and self.folder is not None:
            full = {
                **config,
                "command": _command(),
                **({"commit": commit} if (commit := commit_here()) != "unknown" else {}),
                "versions": versions(),
                "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
            self.put_back_config(full)

    def put_back_config(self, full: dict[str, Any]) -> None:
        """config.json as read_config gave it."""
        if self.main and self.folder is not None:
            write_atomically(self.folder / "config.json", json.dumps(full, indent=2) + "\n")

    def evaluated(self, **row: Any) -> None:
        """Keep one evaluation in evals.jsonl."""
        if self.main and self.folder is not None:
            keep_evaluation(self.folder, row)

    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of evals.jsonl so far."""
        return [] if self.folder is None else read_evals(self.folder / "evals.jsonl")

    def close(self) -> None:
        self._close_tensorboard()
        if self._tracked and self._tracker is not None:
            self._tracker.finish()
        self._tracked = None

    def _track(self, row: dict[str, Any]) -> None:
        """One row to the tracker, whose run has the name of the folder; a resumed run goes on in it."""
        assert self._tracker is not None and self.folder is not None
        scalars = {k: v for k, v in row.items() if k not in ("step", "time") and math.isfinite(v)}
        try:
            if self._tracked is None:
                settings = read_config(self.folder)
                named: dict[str, Any] = {"name": self.folder.name, "resume": "allow"}
                if self._tracker.__name__ == "wandb":  # it knows runs by id
                    named["id"] = "".join(c if c.isalnum() or c in "-_" else "-" for c in self.folder.name)[-64:]
                project = os.environ.get(f"{self._tracker.__name__.upper()}_PROJECT", "shoestring")
                self._tracked = self._tracker.init(project=project, config=settings.get("config", {}), **named)
                if self._tracker.__name__ == "wandb":  # its own steps cannot go back, as ours do when a run is resumed
                    self._tracked.define_metric("*", step_metric="step")
            if self._tracked is not False:
                if self._tracker.__name__ == "wandb":
                    self._tracked.log({**scalars, "step": row["step"]})
                else:
                    self._tracked.log(scalars, step=row["step"])
        except Exception as error:  # whatever the network or the package does
            self._tracked = False
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            self.say(f"{self._tracker.__name__} failed ({reason}): scalars go to metrics.jsonl and tb/ only")

    def _open_tensorboard(self) -> Any:
        if self._tensorboard is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self._tensorboard = False
                self.say("tensorboard is not installed: scalars go to metrics.jsonl only")
            else:
                assert self.folder is not None
                _await_a_later_name(self.folder / "tb")
                self._tensorboard = SummaryWriter(f"{self.folder}/tb", purge_step=self._purge_step)
        return self._tensorboard

    def _close_tensorboard(self) -> None:
        if self._tensorboard:
            self._tensorboard.close()
            self._tensorboard = None

    # -- console -----------------------------------------------------------------------------------
    def say(self, text: str) -> None:
        """One line on the console."""
        if self.main and not self.quiet:
            _tell(text)

    @contextmanager
    def progress(self, total: int, description: str) -> Iterator[ProgressBar]:
        """A bar on a terminal, a plain line every ten seconds elsewhere, nothing on the other ranks and where there is
        nothing to count (total=0)."""
        if not self.main or self.quiet or total == 0:
            yield ProgressBar(total, description)
        elif sys.stdout.isatty():
            yield from _rich_progress(total, description)
        else:
            bar = _PlainProgress(total, description)
            yield bar
            bar.finish()


def _await_a_later_name(folder: Path) -> None:
    """TensorBoard reads the files of a folder in the order of their names, which begin with the second they were made
    in: within one second the order is that of process and counter, as text, and an older file may replace a newer."""
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.02)


def _tell(text: str) -> None:
    """One line on the console. Where nobody reads it any more (| head), a run ends as by Ctrl-C: it saves, and says how
    to go on."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        give_up(sys.stdout)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background of a script
            raise KeyboardInterrupt from None
        signal.raise_signal(signal.SIGINT)


def give_up(stream: TextIO) -> None:
    """What is written to a stream that nobody reads, or that has no room, is dropped from now on: Python would complain
    about it again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def import_tracker(name: str) -> Any:
    """The package that SHOESTRING_TRACK names; None: no tracker."""
    if not name:
        return None
    if name not in TRACKERS:
        raise UserError(f"SHOESTRING_TRACK={shown(name)} is unknown; give {' or '.join(TRACKERS)}, or unset it")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"SHOESTRING_TRACK={name} cannot be imported ({error}); pip install 'shoestring[{name}]'"
        ) from None


class ProgressBar:
    """Counts, and shows nothing. `total` may be an estimate: it grows where more is counted, and `expect` corrects it,
    at the end with what was counted."""

    def __init__(self, total: int, description: str) -> None:
        self.total, self.description = total, description
        self.done = 0
        self.fields: dict[str, Any] = {}

    def advance(self, n: int = 1, **fields: Any) -> None:
        self.done += n
        self.total = max(self.total, self.done)
        self.fields.update(fields)

    def expect(self, total: int) -> None:
        """Another total than the bar was opened with."""
        self.total = max(total, self.done)

    def text(self) -> str:
        return " ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in self.fields.items())


# Opens a bar for (total, description).
OpenProgressBar = Callable[[int, str], AbstractContextManager[ProgressBar]]


class _PlainProgress(ProgressBar):
    def __init__(self, total: int, description: str) -> None:
        super().__init__(total, description)
        self.started = self.said = time.monotonic()
        self.given, self.last_said = total, ""

    def advance(self, n: int = 1, **fields: Any) -> None:
        super().advance(n, **fields)
        if time.monotonic() - self.said >= PLAIN_PROGRESS_SECONDS and self.done != self.given:  # `finish` says that
            self._say()

    def finish(self) -> None:
        if self.done and self._counted() != self.last_said:
            self._say()

    def _counted(self) -> str:
        return f"{self.done}/{self.total} {self.text()}"

    def _say(self) -> None:
        self.said, self.last_said = time.monotonic(), self._counted()
        seconds = self.said - self.started
        _tell(f"{self.description}: {self.done}/{self.total} in {seconds:.0f}s {self.text()}".rstrip())


class _RichProgress(ProgressBar):
    def __init__(self, total: int, description: str, bar: Any, task: Any) -> None:
        super().__init__(total, description)
        self.bar, self.task = bar, task

    def advance(self, n: int = 1, **fields: Any) -> None:
        super().advance(n, **fields)
        self.bar.update(self.task, advance=n, total=self.total, text=self.text())

    def expect(self, total: int) -> None:
        super().expect(total)
        self.bar.update(self.task, total=self.total)


def _rich_progress(total: int, description: str) -> Iterator[ProgressBar]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with RichProgress(*columns) as bar:
        task = bar.add_task(description, total=total, text="")
        yield _RichProgress(total, description, bar, task)


# -- files -------------------------------------------------------------------------------------


def new_run_folder(name: str, base: Path | str = "runs") -> Path:
    """Create runs/<name>-YYYYmmdd-HHMMSS; a second run in the same second gets -2."""
    stem = f"{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    count = 1
    while True:
        folder = Path(base) / (stem if count == 1 else f"{stem}-{count}")
        try:
            make_run_folder(folder)
            return folder
        except FileExistsError:
            count += 1


def make_run_folder(folder: Path, exist_ok: bool = False) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as error:
        raise UserError(
            f"cannot make the run folder {folder}: {error.strerror}; give another place with run="
        ) from None


def check_free(folder: Path) -> Path:
    """The folder, when it is absent or empty; nothing of the user's is ever overwritten."""
    check_path(folder)
    if not is_unicode(str(folder)):  # TensorBoard and safetensors cannot write there
        raise UserError(f"{shown(str(folder))} is not UTF-8; give another name")
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"{folder} is a link that leads nowhere; give another name or remove it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        again = f", or continue that run with resume={folder}" if (folder / "checkpoints").is_dir() else ""
        raise UserError(f"{folder} exists already and is not an empty folder; give another name or remove it{again}")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir():
        raise UserError(f"{folder} cannot be made: {above} is a file; give another name")
    return folder


def check_outputs(settings: dict[str, Any], *keys: str) -> None:
    """Refuse folders of the user's as places to write to; what a resumed run has put there itself is its own."""
    places = {k: Path(settings[k]).absolute() for k in (*keys, "run") if settings.get(k) is not None}
    for one, other in itertools.combinations(places, 2):
        if places[one] == places[other]:
            raise UserError(
                f"{one} and {other} are both {settings[one]}: one would overwrite the other; give two places"
            )
    saved = {} if settings.get("resume") is None else read_config(Path(settings["resume"])).get("config", {})
    for key in keys:
        if settings[key] is not None and settings[key] != saved.get(key):
            check_free(Path(settings[key]))


def open_run_folder(recipe: str, settings: dict[str, Any], deciding: Mapping[str, Any] | None = None) -> Path:
    """A folder for the run of these settings, or with `resume` the one it goes on in."""
    check_run_folder(settings, deciding)
    given = settings.get("resume") or settings["run"]
    return new_run_folder(recipe) if given is None else Path(given)


def check_run_folder(settings: dict[str, Any], deciding: Mapping[str, Any] | None = None) -> None:
    """Whether there can be a run of these settings, before anything is read, made or overwritten for it.

    What a stopped run has done fits only the `deciding` settings that it was started with. One that it does not name is
    younger than the run, which did what the default given here does.
    """
    run = settings["run"]
    if settings.get("resume") is None:
        if run is not None:
            check_free(Path(run))
        return
    folder = Path(settings["resume"])
    saved = read_config(folder).get("config", {})
    # A setting that was not given is the saved one, also where the folder has been moved since.
    if run not in (None, saved.get("run")) and Path(run).absolute() != folder.absolute():
        raise UserError(
            f"resume={folder} goes on in that folder and writes nothing to run={run}; leave one of them out"
        )
    for key, default in (deciding or {}).items():
        if (was := saved.get(key, default)) != settings[key]:
            raise UserError(
                f"resume={folder} was started with {key}={was}, what it has done so far does not fit "
                f"{key}={settings[key]}; leave {key} out or start a new run"
            )


def check_resume_from(settings: dict[str, Any]) -> None:
    """Which checkpoint to go on from says nothing where there is none."""
    if settings["resume"] is None and settings["resume_from"] != AS_SAVED["resume_from"]:
        raise UserError(f"resume_from={settings['resume_from']} is for resume=FOLDER; give both, or leave it out")


def check_unfinished(resume: str | None) -> None:
    """For recipes that have nothing to add to a finished run; its report is the last thing that it wrote."""
    if resume is not None and (Path(resume) / "report.html").exists():
        raise UserError(f"resume={resume}: nothing to go on with there, that run is finished; start a new one")


@contextmanager
def resumable(recipe: str, folder: Path, done: Callable[[], str] = str) -> Iterator[None]:
    """Ctrl-C inside is one line that says how to go on; `done()` says how far it came where training does not."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        said = str(stop).split(";")[0] or f"stopped{done()}"
        raise Interrupted(f"{said}; continue with `shoestring run {recipe} resume={folder}`") from None


def read_config(folder: Path) -> dict[str, Any]:
    """What save_config wrote; nothing where there is no config.json."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    found = read_object(path, remedy="a run or model folder has JSON there")
    Fields(found, str(path)).object("config", {})
    return found


def run_of(path: Path) -> Path | None:
    """The run folder that a path is, or whose model/ (or another folder in it) it is."""
    return next((p for p in (path, path.parent) if read_config(p).get("recipe") is not None), None)


def lineage(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The runs that made a model, oldest first, with what save_config wrote: each names the model it began with."""
    found: list[tuple[Path, dict[str, Any]]] = []
    at = run_of(path)
    while at is not None and at.resolve() not in [folder.resolve() for folder, _ in found]:
        config = read_config(at)
        found.append((at, config))
        settings = config.get("config", {})
        source = settings.get("model") or settings.get("init_from")
        at = run_of(Path(source)) if isinstance(source, str) and Path(source).is_dir() else None
    return found[::-1]


def read_jsonl(path: Path, *, strict: bool = True) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; a last line that a killed process left half-written is dropped. Without `strict`
    other broken lines are, too: for files that only inform."""
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    bad: UserError | None = None
    for number, line in json_lines(path):
        if bad is not None and strict:
            raise bad
        try:
            row = parse_json(line, f"{path}, line {number}", "repair or delete it")
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number} is {kind_of(row)}, not an object; repair or delete it")
            rows.append(row)
        except UserError as error:
            bad = error  # said only where a line follows
    return rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl: a step, and numbers (null where one was not finite)."""
    rows = read_jsonl(path)
    for number, row in enumerate(rows, 1):
        Fields(row, f"{path}, row {number}").whole("step", least=0)
        if bad := [k for k, v in row.items() if isinstance(v, bool | str | list | dict)]:
            raise UserError(f"{path}, row {number}: {shown(bad[0])} is not a number; repair or delete the row")
    return rows


def read_evals(path: Path) -> list[dict[str, Any]]:
    """The rows of evals.jsonl: texts and numbers."""
    rows = read_jsonl(path)
    for number, row in enumerate(rows, 1):
        if bad := [k for k, v in row.items() if isinstance(v, list | dict)]:
            raise UserError(
                f"{path}, row {number}: {shown(bad[0])} is not a text or a number; repair or delete the row"
            )
        for key in ("perplexity", "megabytes"):
            Fields(row, f"{path}, row {number}").number(key, 1.0, least=0.0, most=sys.float_info.max)
    return rows


def keep_evaluation(folder: Path, row: dict[str, Any]) -> None:
    """Append one evaluation to the evals.jsonl of a run, unless the same one with the same result is there."""
    path = folder / "evals.jsonl"
    known = [{k: v for k, v in other.items() if k != "time"} for other in read_evals(path)]
    if json.loads(_line(row)) not in known:
        append_jsonl(path, {"time": round(time.time(), 3), **row})


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Append one line, whole or not at all: on a full disk, beside other processes that append, and behind half a line
    that a killed one has left."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        with os.fdopen(number, "rb", buffering=0) as file:
            _append(file, _line(row).encode())
    except OSError as error:
        error.filename = str(path)  # Python names no file where one could be opened and not be written
        raise


def _append(file: io.FileIO, line: bytes) -> None:
    number = file.fileno()
    if not stat.S_ISREG(os.fstat(number).st_mode):  # /dev/null, a pipe
        os.write(number, line)
        return
    with suppress(OSError):  # some network file systems have no locks
        fcntl.flock(number, fcntl.LOCK_EX)
    end = file.seek(0, os.SEEK_END)
    if end and os.pread(number, 1, end - 1) != b"\n":
        file.seek(0)
        last = file.read().rpartition(b"\n")[2]
        if _is_object(last):  # written by an editor
            line = b"\n" + line
        else:
            end -= len(last)
            os.ftruncate(number, end)
    try:
        if os.write(number, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(number, end)
        raise


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old or the new one, never half of either."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def versions() -> dict[str, str]:
    """The versions a result depends on."""
    import platform
    from importlib import metadata

    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("shoestring", "torch", "triton", "tokenizers", "safetensors", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit_here() -> str:
    """The checkout's commit, or `$SHOESTRING_COMMIT` (a copy without git); an installed wheel has none."""
    import subprocess

    given = os.environ.get("SHOESTRING_COMMIT")
    if given:
        return given
    if not (CHECKOUT / ".git").exists():  # else git would answer for any repository around the environment
        return "unknown"
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=CHECKOUT)
    except OSError:  # no git here
        return "unknown"
    return asked.stdout.strip() or "unknown"


def _line(row: dict[str, Any]) -> str:
    # JSON has no NaN; null keeps the line readable for every other tool.
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite) + "\n"


def _command() -> str:
    import shlex

    return shlex.join(["shoestring", *sys.argv[1:]])
