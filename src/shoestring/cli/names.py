"""What a command names, checked before torch is imported: a wrong name is told in a fraction of a second.

Only what can be told from the name, and from whether a file is there. Where a name is used it is checked again, with
the model at hand.
"""

from __future__ import annotations

import glob
from collections.abc import Callable
from functools import partial

from shoestring.device import check_device
from shoestring.format_names import check_name, check_rules
from shoestring.paths import check_text, expand, find_model

# Words that recipes take where they also take a corpus.
_WORDS = ("own", "self", "corpus", "python")


def check_settings(overrides: list[str]) -> None:
    """UserError for the first setting of a recipe, key=value, that names what is not there."""
    for key, _, value in (item.partition("=") for item in overrides):
        if key in _CHECKS and value.lower() not in ("", "none"):
            _CHECKS[key](value)


def _check_calib(value: str) -> None:
    for one in [value] if expand(value).exists() else filter(None, map(str.strip, value.split(","))):
        _check_corpus("calib", one)


def _check_corpus(key: str, value: str) -> None:
    if value not in _WORDS and not expand(value).exists() and not glob.has_magic(value):
        from shoestring.train.corpus import list_files

        list_files(value, key)  # says what may stand there


def _check_text(value: str) -> None:
    if value not in _WORDS:  # of shrink/drafter
        check_text(value)


def _check_candidates(value: str) -> None:
    for one in filter(str.strip, value.split(",")):
        check_name(one)


_CHECKS: dict[str, Callable[[str], object]] = {
    "model": find_model,
    "format": check_name,
    "embed": check_name,
    "candidates": _check_candidates,
    "rules": check_rules,
    "text": _check_text,
    "calib": _check_calib,
    "data": partial(_check_corpus, "data"),
    "prompts": partial(_check_corpus, "prompts"),
    "device": check_device,
}
