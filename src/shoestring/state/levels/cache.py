"""CheckpointCache: the checkpoint levels in somebody else's training loop, in two lines.

    cache = CheckpointCache("runs/mine", model, optimizer, parts={"loader": loader})
    for step in range(cache.load(), steps):
        ...                             # forward, backward, optimizer.step()
        cache.step(step + 1)            # saves to memory, disk, ... when it is time

Models may be plain, FSDP2 or any DTensor layout; the number of ranks may change between runs. A part is anything with
`state_dict` and `load_state_dict` whose state is tensors and JSON values (state/manifest.py refuses the rest by name).
Call it on every rank, in the same order. Parameters must change in `optimizer.step()` only, or after `cache.wait()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoestring.mesh import Mesh
from shoestring.runlog import RunLog
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels.settings import CheckpointConfig, check_checkpoints
from shoestring.state.run_lock import hold_run


class CheckpointCache:
    """`folder` is this run's own; `last` is a step that is saved to disk in any case, and ends the run."""

    def __init__(
        self,
        folder: Path | str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        parts: Mapping[str, Any] | None = None,
        settings: CheckpointConfig | None = None,
        last: int | None = None,
        quiet: bool = False,
    ) -> None:
        settings = settings or CheckpointConfig(checkpoint="auto")
        check_checkpoints(settings)
        mesh = _mesh(next(model.parameters()).device)
        self.folder = Path(folder)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(hold_run(self.folder, mesh))
        self._saver = Checkpointer(self.folder / "checkpoints", settings, last=last)
        self._parts = dict(parts or {})
        log = RunLog(None, main=mesh.is_main, quiet=quiet)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "mesh": mesh, "log": log}
        self._run: Any = SimpleNamespace(step=0, trained_only=False, **state)

    def load(self) -> int:
        """Fill model, optimizer and parts from the nearest copy that survived; the steps it had done, 0 for none."""
        self._saver.resume(self._run, self._parts)
        return self._run.step

    def step(self, step: int) -> None:
        """After every optimizer step; `step` counts the finished ones."""
        self._run.step = step
        self._saver.after_step(self._run, self._parts)

    def save(self) -> Path:
        """The state of the last step to disk, now."""
        return self._saver.save(self._run, self._parts)

    def wait(self) -> None:
        """Before parameters change anywhere but in optimizer.step()."""
        self._saver.wait_copied()

    def close(self, *, finished: bool = False) -> None:
        """`finished`: the run has ended and its last state is on disk, so memory may be freed."""
        if finished:
            self.save()
            self._saver.finish(self._run)
        self._saver.let_go()
        self._stack.close()


def _mesh(device: torch.device) -> Mesh:
    """This process among all, every one a share of its own."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Mesh(0, 1, device)
    return Mesh(dist.get_rank(), dist.get_world_size(), device, dp=dist.get_world_size())
