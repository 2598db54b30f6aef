"""Finding recipes: by name (train/dense) or by path to the user's own file.

A recipe is a Python file with a docstring, a frozen dataclass `Config` and `main(config)`. The core's are the files of
this folder, named by their paths; methods and other packages add theirs by entry points (plugins.py). Listing them
parses the docstrings without importing.

A recipe whose Config has a key `resume` can be continued: `resume=RUN` takes the settings saved in
RUN/config.json, and the other key=value pairs of the command change them.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from shoestring import plugins
from shoestring.config import apply_overrides, from_json, to_json
from shoestring.errors import Interrupted, UserError, shortened, suggest
from shoestring.runlog import read_config

HERE = Path(__file__).parent
_CORE = "shoestring.recipes."
HELPERS = ("__init__", "find", "settings", "shrink_run", "encoders")  # files that are not recipes


def builtin_recipes() -> dict[str, Path]:
    """name -> file, sorted by name: those of the core, of its methods and of installed packages."""
    files = [p for p in HERE.rglob("*.py") if p.stem not in HELPERS]
    found = {name: file for name in plugins.names("recipes") if (file := plugins.source_file("recipes", name))}
    found |= {p.relative_to(HERE).with_suffix("").as_posix(): p for p in files}
    return dict(sorted(found.items()))


def first_line(path: Path) -> str:
    """The first line of a recipe's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return doc.splitlines()[0] if doc else ""


def load_recipe(name: str) -> ModuleType:
    """Import a recipe; UserError when there is none of that name or it lacks Config or main."""
    builtin = builtin_recipes()
    if name in builtin:
        place = _CORE + name.replace("/", ".")
        if not builtin[name].is_relative_to(HERE):
            place = plugins.module_name("recipes", name)
        return importlib.import_module(place)
    if not name.endswith(".py"):
        hint = suggest(name, list(builtin)) or f" Built in are {', '.join(builtin)}."
        raise UserError(f"no recipe {name!r}.{hint} Or give the path of your own .py file")
    path = Path(name)
    if not path.is_file():
        raise UserError(f"no such file: {name}; give a built-in recipe ({', '.join(builtin)}) or your own .py file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = name if error.lineno is None else f"{name}, line {error.lineno}"
        raise UserError(f"{where}: {error.msg}") from None
    except UserError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == spec.origin), 1)
        raise UserError(f"{name}, line {line}: {type(error).__name__}: {error}") from error
    missing = [part for part in ("Config", "main") if not hasattr(module, part)]
    if missing:
        raise UserError(
            f"{name} defines no {' and no '.join(missing)}; a recipe has a dataclass Config and main(config)"
        )
    if not dataclasses.is_dataclass(module.Config):
        raise UserError(f"Config of {name} is not a dataclass; write @dataclass(frozen=True) above it")
    return module


@contextmanager
def own_faults(recipe: ModuleType) -> Iterator[None]:
    """An error that a line of the user's own recipe raised is no bug of the package: it is told with its place, behind
    a traceback that begins there."""
    try:
        yield
    except (UserError, Interrupted, OSError):
        raise
    except Exception as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        files = [frame.f_code.co_filename for frame, _ in frames]
        own = [i for i, file in enumerate(files) if file == recipe.__file__]
        if not own or any(Path(file).is_relative_to(HERE.parent) for file in files[own[-1] :]):
            raise
        begin = error.__traceback__
        for _ in range(own[0]):
            begin = begin and begin.tb_next
        print("".join(traceback.format_exception(type(error), error, begin)), end="", file=sys.stderr)
        place = f"{Path(files[own[-1]]).name}, line {frames[own[-1]][1]}"
        raise UserError(f"{place}: {type(error).__name__}: {error}") from error


def resolve_config(recipe: ModuleType, overrides: list[str]) -> Any:
    """The Config of a command; with resume= it starts from the saved one."""
    config = apply_overrides(recipe.Config, overrides)
    resume = to_json(config).get("resume")  # not every recipe has this key
    if resume is None:
        return config
    return apply_overrides(recipe.Config, overrides, start=_saved_config(recipe, Path(resume)))


def _saved_config(recipe: ModuleType, folder: Path) -> Any:
    given = f"resume={shortened(str(folder), 200)}"
    try:
        saved = read_config(folder)
    except OSError as error:  # a name that is too long, no right to look
        raise UserError(f"{given} cannot be read: {error.strerror}; runs are in runs/") from None
    name, values = saved.get("recipe"), saved.get("config")
    if name is None or not isinstance(values, dict):
        raise UserError(f"{given} is not a run folder: it has no config.json of a run; runs are in runs/")
    if name != recipe_name(recipe):
        made = shortened(str(name), 80)
        raise UserError(f"resume={folder}: that run was made by {made}; use shoestring run {made} resume={folder}")
    return from_json(recipe.Config, values)


def recipe_name(recipe: ModuleType) -> str:
    """train/dense for a recipe with a name, the file name for the user's own."""
    module = recipe.__name__
    if module.startswith(_CORE):
        return module.removeprefix(_CORE).replace(".", "/")
    added = (name for name in plugins.names("recipes") if plugins.module_name("recipes", name) == module)
    return next(added, Path(recipe.__file__ or module).name)
