"""One process at a time writes to a run folder: a lock that says who holds it.

Two commands that resume one run would cut and append the same metrics.jsonl and delete each other's checkpoints. So the
first process of a run holds a lock on the file `.lock` in its folder; the other ranks of the run share the folder under
it. The system drops the lock when the process ends, however it ends. The file stays: removing it would let two
processes lock two files of one name.

Left out: readers (`eval`, `inspect`, `generate`), which need no lock. A file system without locks is a warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.runlog import make_run_folder

LOCK = ".lock"


@contextlib.contextmanager
def hold_run(folder: Path, mesh: Mesh | None = None) -> Iterator[None]:
    """Around everything that a run writes. A UserError on every rank where another run holds the folder."""
    held: list[TextIOWrapper] = []  # on the first rank only; a file does not travel
    if mesh is None or mesh.world_size == 1:
        held = _acquire(folder)
    else:
        from shoestring.state.agreement import on_main  # and with it torch

        on_main(mesh, lambda: held.extend(_acquire(folder)))
    try:
        yield
    finally:
        for file in held:
            file.close()


def check_not_held(folder: Path) -> None:
    """Refuse early, before the work that leads up to `hold_run`."""
    if is_held(folder):
        raise _refusal(folder)


def is_held(folder: Path) -> bool:
    """Whether some process holds the folder, this one included; False where no run has ever held it."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _acquire(folder: Path) -> list[TextIOWrapper]:
    make_run_folder(folder, exist_ok=True)
    file = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise _refusal(folder) from None
    except OSError as error:
        file.close()
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
            raise
        warnings.warn(f"{folder} has no locks ({error.strerror}): do not run two commands in it at once", stacklevel=2)
        return []
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    file.truncate(0)
    file.write(json.dumps({**about, "command": " ".join(sys.argv[1:])[:500]}) + "\n")
    file.flush()
    return [file]


def _refusal(folder: Path) -> UserError:
    try:
        by = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        who = f"process {by['pid']} on {by['host']} since {by['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has not written yet
        who = "another process"
    return UserError(f"{folder} is in use by {who}: wait for it or stop it, or give another folder")
