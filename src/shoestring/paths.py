"""Paths as users write them, and the one folder for what can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from shoestring.errors import UserError, shortened, suggest
from shoestring.hub import fetched, hub_id
from shoestring.json_files import check_path, read_object


def expand(path: str | Path) -> Path:
    """~ is the user's home; a ~ that is nobody's is an ordinary name, which the caller will not find.

    UserError where no file system can have such a path.
    """
    check_path(path)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def check_text(path: str | Path) -> None:
    """UserError where no text file is."""
    if not Path(path).is_file():
        what = "is not a file" if Path(path).exists() else "does not exist"
        raise UserError(f"{path} {what}; give one text file, or a folder or corpus as data (data=, --data)")


def drafter_names(text: str | None) -> list[str]:
    """The parts of a --drafter: `ngram` or draft models, joined by +. UserError where one does not exist."""
    names = [] if text is None else text.split("+")
    for name in names:
        if name != "ngram" and not expand(name).exists() and hub_id(name) is None:
            raise UserError(
                f"there is no drafter {name}: give ngram, the path of a draft model, or several joined by +."
                f"{suggest(name, ['ngram'])}"
            )
    return names


def find_model(path: str | Path) -> Path:
    """The model folder that a path means (a run's is in its model/), or the .gguf file; UserError where there is none.
    An id of the Hugging Face hub is downloaded (hub.py).

    Imports nothing heavy: commands ask before they load anything.
    """
    if not str(path):
        raise UserError("the path of a model is empty; give a Hugging Face folder, a run folder or a .gguf file")
    given, path = path, expand(path)
    if not path.exists():
        if (asked := hub_id(given)) is not None:
            return fetched(asked)
        kinds = "a .gguf file or a model folder on this machine" if path.suffix == ".gguf" else _KINDS
        raise UserError(f"{path} does not exist; give {kinds}")
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise UserError(f"{path} is a pipe or a device; give a .gguf file")
        return path
    if not path.is_dir():
        raise UserError(f"{path} is a file; give the folder that holds config.json and the weights, or a .gguf file")
    is_run = (path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file()
    if (path / "model" / "config.json").is_file() and (is_run or not (path / "config.json").is_file()):
        return path / "model"
    if (path / "adapter" / "adapter_config.json").is_file():
        base = read_object(path / "adapter" / "adapter_config.json").get("base_model_name_or_path")
        raise UserError(
            f"{path} is a run that trained an adapter; give the model beside it, {shortened(str(base), 200)}, with "
            f"--adapter {path / 'adapter'}"
        )
    if is_run:
        found = sorted(p.name for p in path.glob("checkpoints/step-*"))
        have = f"its checkpoints are {', '.join(found[-3:])}" if found else "it has no checkpoint either"
        recipe = read_object(path / "config.json").get("recipe") if (path / "config.json").is_file() else None
        raise UserError(
            f"{path} is a run without a finished model ({have}); finish it with "
            f"`shoestring run {shortened(str(recipe or 'RECIPE'), 80)} resume={path}`, which writes model/"
        )
    if not (path / "config.json").is_file():
        if (path / "manifest.json").is_file():
            raise UserError(f"{path} is a checkpoint, from which a run continues, not a model; give the run's folder")
        raise UserError(f"{path} has no config.json; give {_KINDS}")
    return path


_KINDS = "a Hugging Face folder, a run folder, a .gguf file or an id of the hub (org/name)"


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
