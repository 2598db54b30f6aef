"""One rank of a test, forked from a process that has imported what ranks import (conftest.run_ranks).

Importing torch with its distributed parts takes seconds of processor time, and the suite starts dozens of ranks.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

# multiprocessing's fork server imports these once. It is a process of its own, and starts no threads.
PRELOAD = [
    "rank_process",
    "pydantic",
    "torch._inductor.compile_fx",  # and _dynamo, which DTensor imports at its first operation
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "shoestring.cli.app",
    "shoestring.methods.distill.lowbit_best",
    "shoestring.methods.sparse24.recipes.prune24",
    "shoestring.recipes.train.dense",
    "shoestring.serve",
]


def run_script(script: str, args: list[str], env: dict[str, str], log: str) -> None:
    """As `python script args` with this environment, both outputs in the file `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
