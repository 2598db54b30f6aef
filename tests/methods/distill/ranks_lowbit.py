"""Runs on 2 gloo ranks (see test_bitdistiller_ranks.py): a recipe in the current folder, with the given settings.

ranks_lowbit.py RECIPE STOP LEFT SETTINGS...

STOP: passes on a rank after which Ctrl-C comes, 0: none. Every rank leaves its shares of the trained grids in
LEFT-RANK.safetensors and the folders it has written in LEFT-RANK.txt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from interrupted import dying
from shoestring.cli.app import run_cli
from shoestring.formats.convert import format_linears
from shoestring.formats.linear import local
from shoestring.methods.distill import stages as lowbit_stages
from shoestring.methods.distill.cakld import Cakld
from shoestring.state.files import AtomicFolder

finish_run, finish_folder = lowbit_stages.finish, AtomicFolder.finish
WRITTEN: list[str] = []


def leave_shares(cfg: Any, run: Any, model: Any, *rest: Any) -> None:
    shares = {
        f"{name}:{part}": local(p).detach().contiguous()
        for name, layer in format_linears(model)
        for part, p in layer.trained_state().items()
    }
    save_file(shares, f"{LEFT}-{os.environ['RANK']}.safetensors")
    finish_run(cfg, run, model, *rest)


def note_folder(self: AtomicFolder) -> None:
    WRITTEN.append(self.target.name)
    finish_folder(self)


if __name__ == "__main__":
    RECIPE, STOP, LEFT, *SETTINGS = sys.argv[1:]
    lowbit_stages.finish = leave_shares
    AtomicFolder.finish = note_folder  # type: ignore[method-assign]
    if int(STOP):
        Cakld.__call__ = dying(int(STOP), Cakld.__call__)  # type: ignore[method-assign]
    code = run_cli(["run", RECIPE, *SETTINGS])
    Path(f"{LEFT}-{os.environ['RANK']}.txt").write_text(" ".join(WRITTEN))
    assert (code != 0) == bool(int(STOP)), code
