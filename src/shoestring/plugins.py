"""What packages add to Shoestring by name: entry points, our own methods' and anybody's alike.

    [project.entry-points."shoestring.formats"]
    ternary = "my_package.ternary:Ternary"

    group                     a name stands for
    shoestring.formats        a Format class; its `parse` reads the spelling (formats/base.py)
    shoestring.stored_formats the same for a name in packed models that is no spelling (formats/registry.py)
    shoestring.recipes        the module of a recipe: docstring, Config, main (recipes/find.py)
    shoestring.reducers       function of the text after the colon -> Compressor (train/reducers/methods.py)
    shoestring.selectors      function -> Compression that chooses layer by layer (train/reducers/feedback.py)
    shoestring.run_reports    function of a run's folder -> sections of its report (train/reducers/build.py)
    shoestring.skip_policies  function that opens a set or policy for --skip (serve/engine/skip_policy.py)
    shoestring.environment    function -> rows of `shoestring env` about kernels (cli/environment.py)

Nothing is imported before its name is asked for. The core's own names come first and cannot be replaced. A source tree
that runs without being installed, or was installed before a method came, reads its own pyproject.toml.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoestring.errors import UserError

DISTRIBUTION = "shoestring"
SOURCE_TREE = Path(__file__).resolve().parents[2]


def names(group: str) -> tuple[str, ...]:
    """All names that packages give in `shoestring.<group>`, sorted."""
    return tuple(sorted({point.name for point in _points(group)}))


def load(group: str, name: str) -> Any:
    """The object behind a name out of `names(group)`; UserError where its package fails."""
    point = _point(group, name)
    try:
        return point.load()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{name!r} of {_owner(point)} cannot be loaded ({point.value}): {type(error).__name__}: {error}. "
            "Mend or uninstall that package."
        ) from error


def module_name(group: str, name: str) -> str:
    return _point(group, name).module


def source_file(group: str, name: str) -> Path | None:
    """The file of the module behind a name, without running it (its parent packages are imported)."""
    try:
        spec = find_spec(module_name(group, name))
    except ImportError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _point(group: str, name: str) -> metadata.EntryPoint:
    found = [point for point in _points(group) if point.name == name]
    if len({point.value for point in found}) > 1:
        owners = " and ".join(_owner(point) for point in found)
        raise UserError(f"{name!r} in shoestring.{group} is given by {owners}; uninstall one of them.")
    return found[0]


def _owner(point: metadata.EntryPoint) -> str:
    dist = getattr(point, "dist", None)
    return f"the package {dist.name}" if dist is not None else "this source tree"


@cache
def _points(group: str) -> tuple[metadata.EntryPoint, ...]:
    own = _source_tree_points(f"shoestring.{group}")
    found = tuple(metadata.entry_points(group=f"shoestring.{group}"))
    if own is None:
        return found
    return (*own, *(point for point in found if point.dist is None or point.dist.name != DISTRIBUTION))


def _source_tree_points(group: str) -> tuple[metadata.EntryPoint, ...] | None:
    """Those of the pyproject.toml that this file lies beside; None for an installed wheel."""
    try:
        project = tomllib.loads((SOURCE_TREE / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None
    if project.get("name") != DISTRIBUTION:
        return None
    given: dict[str, str] = project.get("entry-points", {}).get(group, {})
    return tuple(metadata.EntryPoint(name, value, group) for name, value in given.items())
