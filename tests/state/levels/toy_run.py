"""A small run whose state at every step is known: what the tests of the checkpoint levels train."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from shoestring.mesh import Mesh
from shoestring.runlog import RunLog
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels import pace
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig

SETTINGS = CheckpointConfig(checkpoint="auto", keep_last=3, levels=LevelsConfig(mttf_hours=1e-9, budget=0.5))


class Counter:
    """A part of the run with a tensor and a value of its own."""

    def __init__(self) -> None:
        self.seen = torch.zeros(3, dtype=torch.int64)
        self.empty = torch.zeros(0, 3)
        self.note = {"text": "", "nan": float("nan")}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "empty": self.empty, "note": self.note}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.empty, self.note = state["seen"], state["empty"], state["note"]
        assert self.empty.shape == (0, 3)


def make_run(width: int = 33, log: RunLog | None = None) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 20), nn.BatchNorm1d(20), nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mesh = Mesh(0, 1, torch.device("cpu"))
    run = SimpleNamespace(
        trained_only=False, step=0, model=model, optimizer=optimizer, mesh=mesh, log=log or RunLog(None, quiet=True)
    )
    return run, {"counter": Counter()}


def step(run: Any, parts: dict[str, Any]) -> None:
    x = torch.randn(8, run.model[0].in_features, generator=torch.Generator().manual_seed(run.step))
    (run.model(x + torch.rand(())) ** 2).sum().backward()  # the global generator belongs to the state, too
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step += 1
    parts["counter"].seen += run.step
    parts["counter"].note["text"] = f"after {run.step}"


def fingerprint(run: Any, parts: dict[str, Any]) -> list[bytes]:
    """Every bit of the state."""
    state = [*run.model.state_dict().values()]
    state += [v for s in run.optimizer.state.values() for v in s.values()]
    state += [parts["counter"].seen, torch.get_rng_state()]
    text = f"{run.step} {parts['counter'].note['text']}".encode()
    return [text, *(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in state)]


def history(steps: int, width: int = 33) -> list[list[bytes]]:
    """The state after every step of an uninterrupted run; [0] is the start."""
    run, parts = make_run(width)
    torch.manual_seed(5)
    found = [fingerprint(run, parts)]
    for _ in range(steps):
        step(run, parts)
        found.append(fingerprint(run, parts))
    return found


def checkpointer(folder: Path, settings: CheckpointConfig = SETTINGS, **options: Any) -> Checkpointer:
    return Checkpointer(folder / "checkpoints", settings, **options)


def train(run: Any, parts: dict[str, Any], saver: Checkpointer, steps: int, every: int = 1) -> None:
    """To `steps`, with a save to memory every so many steps, each committed before the next."""
    while run.step < steps:
        step(run, parts)
        if run.step % every == 0 and saver.memory is not None:
            saver.measured.pace.next_step = run.step
        with patch.object(pace, "NUM_MEASURED", 0):  # every meeting saves, and does not only look at costs
            saver.after_step(run, parts)
        if saver.memory is not None:
            saver.memory.touch_now()
            saver.memory.wait()
