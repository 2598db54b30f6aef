"""Run on two ranks by test_recipes.py: what the first does when the second is stopped, then when it is killed.

    ranks_lost.py FOLDER COMMAND...

How each collective ended goes to FOLDER/seen.json. Then the command runs; the second rank kills itself in step 4.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shoestring.cli.app import run_cli
from shoestring.errors import UserError, lost_peer_as_user_error
from shoestring.mesh import MeshConfig, open_mesh

folder, first = Path(sys.argv[1]), os.environ["RANK"] == "0"
mesh = open_mesh(MeshConfig(dp=2, timeout_s=1), "cpu")
mesh.sum(torch.ones(1))  # connected
mesh.barrier()
if first:
    seen = []
    for wait in (lambda: mesh.sum(torch.ones(1)), mesh.barrier):  # the group of an axis, and that of all
        began = time.monotonic()
        try:
            with lost_peer_as_user_error():
                wait()
        except UserError as error:
            seen.append([str(error), time.monotonic() - began])
    (folder / "seen.json").write_text(json.dumps(seen))
else:
    subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
dist.destroy_process_group()

os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # another meeting in the same store
if not first:
    from shoestring.train import trainer

    add, count = trainer._Meter.add, [0]

    def killed(self: trainer._Meter, *args: object) -> None:
        count[0] += 1
        if count[0] == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, *args)  # type: ignore[arg-type]

    trainer._Meter.add = killed  # type: ignore[method-assign, assignment]
sys.exit(run_cli(sys.argv[2:]))
