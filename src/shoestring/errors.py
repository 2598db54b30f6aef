"""The one exception a user is meant to read.

`UserError` is a ValueError whose message says what was given, what is allowed and what to change. The command
line prints it as one line and exits with 2, and so do benches (`as_command`); every other exception is a defect of
ours and keeps its traceback.
"""

import sys
from collections.abc import Callable


class UserError(ValueError):
    """Something the user gave cannot work; the message says what to do about it."""


class Interrupted(UserError):
    """Training was asked to stop and did, after saving; the message says how to continue."""


def suggest(given: str, allowed: list[str]) -> str:
    """' Did you mean X?' for the closest allowed name, or '' when nothing is close."""
    import difflib

    close = difflib.get_close_matches(given, allowed, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def as_command(main: Callable[[], None]) -> None:
    """Run a script's main; what the user is meant to read is one line on stderr, and the exit code is 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
