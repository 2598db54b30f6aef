"""One process at a time writes to a run folder, and the one that is refused reads who does."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.recipes.shrink_run import run_once
from shoestring.state.run_lock import LOCK, check_not_held, hold_run, is_held

HOLD = """
import signal, sys
from pathlib import Path
from shoestring.state.run_lock import hold_run
with hold_run(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


def test_a_held_folder_is_refused_until_its_holder_ends_however_it_ends(tmp_path: Path) -> None:
    check_not_held(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        who = re.escape(f"{tmp_path} is in use by process {other.pid} on {socket.gethostname()} since 20")
        for refused in (lambda: check_not_held(tmp_path), lambda: hold_run(tmp_path).__enter__()):
            with pytest.raises(UserError, match=who):
                refused()
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    with hold_run(tmp_path):
        assert is_held(tmp_path) and f'"pid": {os.getpid()}' in (tmp_path / LOCK).read_text()
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"), hold_run(tmp_path):
            pass
    assert not is_held(tmp_path)
    with pytest.raises(KeyError), hold_run(tmp_path):
        raise KeyError
    check_not_held(tmp_path)


def test_ranks_that_wait_for_the_first_notice_its_end(tmp_path: Path) -> None:
    """It marks in the folder what it has done; a first process that was killed never would."""
    with hold_run(tmp_path):
        pass  # it was there, and ended
    with pytest.raises(UserError, match="the first process ended before pruned was finished"):
        run_once(Mesh(1, 2, None, dp=2), tmp_path, "pruned", lambda: None)  # type: ignore[arg-type]
