"""How a test says that something is refused: one line of UserError, before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoestring.errors import UserError


def refused(words: str, call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The error of call(*args, **options): one line in which the pattern `words` is found."""
    with pytest.raises(UserError, match=words) as caught:
        call(*args, **options)
    said = str(caught.value)
    assert "\n" not in said, said
    return said
