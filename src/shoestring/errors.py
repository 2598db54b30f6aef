"""What a user is meant to read when something goes wrong.

`UserError` is a ValueError whose message says what was given, what is allowed and what to change. The command
line prints it as one line and exits with 2, and so do benches (`as_command`). Memory that runs out and another process
that is gone are no defects either: `memory_as_user_error` and `lost_peer_as_user_error` turn them into such lines.
Every other exception is a defect of Shoestring and keeps its traceback.
"""

import dataclasses
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

MAX_NAME = 100  # characters of a name that `suggest` looks at


class UserError(ValueError):
    """Something the user gave cannot work; the message says what to do about it."""


class Interrupted(UserError):
    """Training was asked to stop and did, after saving; the message says how to continue."""


def suggest(given: str, allowed: list[str]) -> str:
    """' Did you mean X?' for the closest allowed name, or '' when nothing is close."""
    import difflib

    # Cut first: the comparison takes quadratic time, and a name may come from a stranger.
    close = difflib.get_close_matches(given[:MAX_NAME], allowed, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """A value as errors show it: its `repr`, shortened where a file made it long."""
    return shortened(repr(value), 80)


def shortened(text: str, most: int) -> str:
    """A text that can be printed: at most about `most` characters, halves of surrogate pairs as escapes."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def as_command(main: Callable[[], None]) -> None:
    """Run a script's main; what the user is meant to read is one line on stderr, and the exit code is 2."""
    try:
        with memory_as_user_error():
            main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def is_users(error: OSError) -> bool:
    """A full disk, a missing permission, a name that is too long: not a defect of Shoestring."""
    return error.errno in (
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
    )


def room(error: OSError) -> str:
    """'free some space or ', to put before 'choose another place', where the disk is full; else nothing."""
    return "free some space or " if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""


# -- memory that runs out ----------------------------------------------------------------------------

# What allocators write when they raise no class of their own; in lower case.
GPU_WORDS = ("out of memory", "out_of_memory", "status_alloc_failed", "cudaerrormemoryallocation")
HOST_WORDS = ("can't allocate memory", "cannot allocate memory", "not enough memory")
# Settings of recipes that cost less memory when they are smaller; those that change no result come first.
SMALLER = (
    *("micro", "max_requests", "memory_gb", "batch", "train_batch", "block_batch", "context"),
    *("windows", "calib_windows", "calib_context", "damage_windows"),
)
PLACE, RUN = "in ", "run folder "  # what the notes below begin with


def during(what: str) -> AbstractContextManager[None]:
    """Errors inside get a note of where they happened, for tracebacks and for `memory_line`."""
    return _noting(PLACE + what)


def in_run(folder: Path) -> AbstractContextManager[None]:
    """Errors inside get a note of the run folder that `resume=` can go on with."""
    return _noting(f"{RUN}{folder}")


@contextmanager
def memory_as_user_error(config: object = None) -> Iterator[None]:
    """Memory that runs out inside is a UserError; `config`, of a recipe, has the settings to change."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        line = memory_line(error, config)
        if line is None:
            raise
        raise UserError(line) from error


def out_of_memory(error: BaseException) -> str | None:
    """Which memory ran out, "GPU" or "host", or None for every other error.

    Looks along the chain that a traceback would show: what fails in a compiled or captured step is raised again as
    something else. torch is known by name: this module does not import it.
    """
    for e in _chain(error):
        said = str(e).lower()
        if any(c.__name__ == "OutOfMemoryError" for c in type(e).__mro__):
            return "GPU"
        if isinstance(e, MemoryError):
            return "host"
        if isinstance(e, RuntimeError | OSError):
            if any(words in said for words in HOST_WORDS):
                return "host"
            if any(words in said for words in GPU_WORDS):
                return "GPU"
    return None


def memory_line(error: BaseException, config: object = None) -> str | None:
    """What ran out, where, and what to do; None where it was not memory."""
    which = out_of_memory(error)
    if which is None:
        return None
    asked = re.search(r"tried to allocate ([\d.]+ \w+)", " ".join(map(str, _chain(error))), re.IGNORECASE)
    size = f" ({asked[1]} more asked for)" if asked else ""
    return f"out of {which} memory{size}{_place(error)}: {_remedy(which, config)}{_way_on(error, config)}"


# -- other processes that are gone -------------------------------------------------------------------

# torch.distributed's own classes, and what gloo writes into a plain RuntimeError.
PEER_CLASSES = ("DistBackendError", "DistNetworkError", "DistStoreError")
PEER_WORDS = (
    *("gloo/transport", "connection closed by peer", "connection reset by peer", "caused pair closure"),
    *("nccl communicator was aborted", "store has been closed"),
)
PEER_REASON = re.compile(r"connection (closed|reset) by peer|timed out[^\n.;]*|broken pipe", re.IGNORECASE)


@contextmanager
def lost_peer_as_user_error(recipe: str | None = None, config: object = None) -> Iterator[None]:
    """A collective inside that fails because another process ended or hangs is a UserError, which says how to go on
    where the run of this recipe has a folder."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = lost_peer(error)
        if reason is None:
            raise
        raise UserError(
            f"lost another process of this job ({reason}): it ended, is stuck or cannot be reached, and its own output "
            f"says more; {_restart(error, recipe, config)}"
        ) from error


def lost_peer(error: BaseException) -> str | None:
    """In a few words, how the connection to another process failed; None for every other error."""
    for e in _chain(error):
        said = str(e)
        known = any(c.__name__ in PEER_CLASSES for c in type(e).__mro__)
        if known or (isinstance(e, RuntimeError) and any(words in said.lower() for words in PEER_WORDS)):
            found = PEER_REASON.search(said)
            return found[0] if found else " ".join(said.split())[:120]
    return None


def _restart(error: BaseException, recipe: str | None, config: object) -> str:
    folder = _folder_of_run(error, config)
    if recipe is None or folder is None:
        return "start all of them again"
    num, here = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = f"--nnodes {num // here} " if num > here else ""
    return f"continue with `torchrun {nodes}--nproc-per-node {here} -m shoestring run {recipe} resume={folder}`"


# -- how to go on ------------------------------------------------------------------------------------


def _remedy(which: str, config: object) -> str:
    settings = _settings(config)
    given = [f"{name} (now {settings[name]})" for name in SMALLER if settings.get(name)]
    if given:
        less = f"make one of these smaller: {', '.join(given)}"
    else:
        less = "ask for less at a time (a smaller batch, a shorter context, fewer requests)"
    ways = [less, "stop other programs that use it"]
    if settings.get("recompute") is False:
        ways.append("give recompute=true")
    if which == "GPU" and settings.get("stream", "true") != "true":
        ways.append("give stream=true")  # one block at a time on the GPU
    if which == "GPU" and (config is None or "device" in settings):
        ways.append("use --device cpu" if config is None else "give device=cpu")
    return ", or ".join(ways)


def _settings(config: Any) -> dict[str, Any]:
    return {} if config is None else {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _way_on(error: BaseException, config: object) -> str:
    if "resume" not in _settings(config):
        return ""
    if _named_folder(error, config) is None:
        return "; what a run has finished is kept: resume=FOLDER goes on, folders are in runs/"
    folder = _folder_of_run(error, config)
    if folder is None:
        return ""
    return f"; what is finished is kept, resume={folder} goes on with it and says which settings must stay"


def _folder_of_run(error: BaseException, config: object) -> str | None:
    """The folder that `resume=` can go on with; None where the run has not begun."""
    folder = _named_folder(error, config)
    return folder if folder is not None and (Path(folder) / "config.json").is_file() else None


def _named_folder(error: BaseException, config: object) -> str | None:
    settings = _settings(config)
    if "resume" not in settings:
        return None
    noted = [n.removeprefix(RUN) for n in _notes(error) if n.startswith(RUN)]
    return next((f for f in (*noted, settings["resume"], settings.get("run")) if f), None)


def _place(error: BaseException) -> str:
    """The notes of where it happened, or else the innermost function of ours."""
    noted = [n for n in _notes(error) if n.startswith(PLACE)]
    if noted:
        return " " + ", ".join(noted)
    home = Path(__file__).parent
    codes = [frame.f_code for e in _chain(error) for frame, _ in traceback.walk_tb(e.__traceback__)]
    ours = [c for c in codes if home in Path(c.co_filename).parents and c.co_filename != __file__]
    return f" in {Path(ours[-1].co_filename).relative_to(home)}, {ours[-1].co_name}" if ours else ""


def _notes(error: BaseException) -> list[str]:
    return [note for e in _chain(error) for note in getattr(e, "__notes__", ())]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that a traceback would show above it."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


@contextmanager
def _noting(note: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise
