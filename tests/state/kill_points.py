"""Kills a process before each of its file operations in turn, and looks at what is left. Run by test_kills.py.

    kill_points.py FOLDER STRIDE

An audit hook counts what Python does to files below FOLDER (opening, renaming, making, removing) and the pieces that
tensors are written in. Children are killed (SIGKILL) at their operations 1, 1 + STRIDE, ...; the first that is not has
been through all of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shoestring.errors import UserError
from shoestring.model import load_model, save_model
from shoestring.model.export import export_model
from shoestring.state.checkpoint import latest
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.files import TensorWriter, sweep_leftovers
from shoestring.state.storage import SafeReader
from tiny import tiny_decoder

EVENTS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
base, stride = Path(sys.argv[1]), int(sys.argv[2])


def each_point(action: Callable[[], object], look: Callable[[], object]) -> int:
    """Runs the action in children that are killed ever later; `look` after each. The number of operations."""
    num = 0
    while True:
        child = os.fork()
        if child == 0:
            _kill_at(num + 1)
            action()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        look()
        if not os.WIFSIGNALED(status):
            assert status == 0, status
            return num
        assert os.WTERMSIG(status) == signal.SIGKILL
        num += stride


def _kill_at(point: int) -> None:
    seen = [0]

    def count(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS or (event == "open" and str(args[0]).startswith(str(base))):
            seen[0] += 1
            if seen[0] == point:
                os.kill(os.getpid(), signal.SIGKILL)

    write = TensorWriter._write

    def write_half(self: TensorWriter, data: Any) -> None:
        write(self, memoryview(data)[: len(data) // 2])
        self._file.flush()
        count("open", (base,))
        write(self, memoryview(data)[len(data) // 2 :])

    TensorWriter._write = write_half  # type: ignore[method-assign]
    sys.addaudithook(count)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def new_model(value: float) -> Any:
    model = tiny_decoder(num_layers=1).float()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


def value_of(folder: Path) -> float | None:
    """Of all weights of a model folder; None where there is no folder. Anything between is an error."""
    if not folder.exists():
        return None
    values = {v.item() for p in load_model(folder).model.parameters() for v in (p.min(), p.max())}
    assert len(values) == 1
    return values.pop()


def exports() -> int:
    source, out = base / "source", base / "exports" / "out"
    save_model(source, new_model(1.0))
    seen = set()

    def look() -> None:
        seen.add(value_of(out))
        shutil.rmtree(out, ignore_errors=True)

    num = each_point(lambda: export_model(source, out, "dense", torch.float32), look)
    # Each child removed what the one before it had left.
    assert seen == {None, 1.0} and names(out.parent) == [], (seen, names(out.parent))
    return num


def replacements() -> int:
    out = base / "replaced" / "out"
    save_model(out, new_model(1.0))
    seen = set()

    def look() -> None:
        if value_of(out) is None:  # killed between the two renames: put back by whoever writes there next
            sweep_leftovers(out.parent)
        seen.add(value_of(out))

    num = each_point(lambda: save_model(out, new_model(2.0)), look)
    assert seen == {1.0, 2.0} and names(out.parent) == ["out"], (seen, names(out.parent))
    return num


def checkpoints() -> int:
    folder = base / "checkpoints"
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def save(step: int) -> None:
        run = SimpleNamespace(trained_only=False, step=step, model=model, optimizer=optimizer, mesh=None, log=None)
        with torch.no_grad():
            model.weight.fill_(float(step))
        Checkpointer(folder, every=0, keep=1).save(run, {})

    save(1)
    seen = set()

    def look() -> None:
        newest = latest(folder)
        assert newest is not None
        reader = SafeReader(newest)
        reader.verify()
        assert reader.manifest.step is not None
        seen.add(reader.manifest.step)
        if reader.manifest.step == 2:  # as it was before the child
            shutil.rmtree(folder)
            save(1)

    num = each_point(lambda: save(2), look)
    assert seen == {1, 2}
    save(2)
    assert names(folder) == ["step-00000002"]
    return num


def refused() -> None:
    """What looks like a leftover and is not stays."""
    folder = base / "kept"
    host = os.uname().nodename
    for name, file in ((f".a.new-{host}-999999", "notes.txt"), (f".b.new-{host}-{os.getppid()}", "config.json"),
                       (".c.new-elsewhere-1", "config.json")):  # fmt: skip
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_text("{}")
    (folder / f".d.new-{host}-999999").symlink_to(base)
    old = folder / ".e.new-elsewhere-1"
    old.mkdir()
    os.utime(old, (0, 0))
    before = set(names(folder))
    sweep_leftovers(folder)
    assert before - set(names(folder)) == {old.name}


try:
    print("exports", exports(), "replacements", replacements(), "checkpoints", checkpoints())
    refused()
except UserError as error:  # a folder that cannot be loaded
    raise AssertionError(str(error)) from error
