"""Run on two ranks by test_recipes.py: a training command in whose fourth step the second rank is killed or stopped.

ranks_lost.py FOLDER SIGKILL|SIGSTOP COMMAND...
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from shoestring.cli.app import run_cli
from shoestring.train import trainer

folder, number = Path(sys.argv[1]), signal.Signals[sys.argv[2]]
(folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
while len(list(folder.glob("pid-*"))) < 2:  # processes that start far apart would not meet within a short time-out
    time.sleep(0.01)

if os.environ["RANK"] == "1":
    add, count = trainer._Meter.add, [0]

    def hit(self: trainer._Meter, *args: object) -> None:
        count[0] += 1
        if count[0] == 4:
            (folder / "killed").touch()
            os.kill(os.getpid(), number)
        add(self, *args)  # type: ignore[arg-type]

    trainer._Meter.add = hit  # type: ignore[method-assign, assignment]
code = run_cli(sys.argv[3:])
with contextlib.suppress(ProcessLookupError):
    os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)  # one that is stopped would stay for ever
sys.exit(code)
