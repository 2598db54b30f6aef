"""The second distribution: installed beside the core, and unknown to it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata


def test_it_is_installed_and_depends_on_the_core() -> None:
    import shoestring_extras

    assert metadata.version("shoestring-extras") == shoestring_extras.__version__
    assert metadata.requires("shoestring-extras") == ["shoestring"]


def test_the_core_does_not_import_it() -> None:
    code = "import shoestring.cli.app, shoestring.recipes.find, sys; print('shoestring_extras' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"
