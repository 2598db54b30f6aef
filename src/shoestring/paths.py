"""Paths as users write them, and the one folder for what can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from shoestring.errors import UserError


def expand(path: str | Path) -> Path:
    """~ is the user's home; a ~ that is nobody's is an ordinary name, which the caller will not find."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def cache_folder() -> Path:
    """$SHOESTRING_CACHE, else $XDG_CACHE_HOME/shoestring, else ~/.cache/shoestring."""
    if given := os.environ.get("SHOESTRING_CACHE"):
        return expand(given)
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "shoestring"
    try:
        return Path.home() / ".cache" / "shoestring"
    except RuntimeError:  # a container's user without a name
        raise UserError("there is no home folder to cache in; set SHOESTRING_CACHE to a folder with room") from None
