"""AtomicFolder: a folder that appears whole or not at all.

Everything is written into a hidden folder beside the target, synced, and renamed. A target that exists is
replaced only when it is a model folder, and only once the new one is complete; anything else is left alone.
The first error is kept in `error` instead of raised: the writer may have to go on serving collectives.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from shoestring.errors import UserError, room
from shoestring.model.tensor_files import TensorInfo, TensorWriter

# What a model folder is made of. A file outside this list is the user's own, and stops a replacement.
_MODEL_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "merges.txt",
    "vocab.*",
    "README*",
    "LICENSE*",
    "NOTICE*",
    ".gitattributes",
)


class AtomicFolder:
    def __init__(self, target: Path, num_bytes: int) -> None:
        """`num_bytes`: about how much will be written; too little room is noticed before the work."""
        self.target = target
        self.temp = target.parent / f".{target.name}.new-{os.getpid()}"
        self.error: str | None = None
        with self.guard():
            _check_replaceable(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.temp, ignore_errors=True)
            self.temp.mkdir()  # first: a place that takes no file at all may call itself full
            free = shutil.disk_usage(target.parent).free
            if num_bytes > free:
                raise UserError(
                    f"cannot write {target}: it needs {num_bytes / 1e6:.1f} MB, the disk has "
                    f"{free / 1e6:.1f} MB left; free some space or choose another folder"
                )

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Keeps the first error of the block; later blocks run, and should look at `error` first."""
        try:
            yield
        except UserError as error:
            self.error = self.error or str(error)
        except OSError as error:
            reason = error.strerror or str(error)
            self.error = self.error or (
                f"cannot write {self.target}: {reason}; nothing was changed; {room(error)}choose another folder"
            )

    @contextlib.contextmanager
    def tensors(self, name: str, infos: Sequence[TensorInfo]) -> Iterator[Callable[[Tensor], None]]:
        """A function that appends the next tensor of file `name`; it does nothing after an error."""
        writer: TensorWriter | None = None
        if self.error is None:
            with self.guard():
                writer = TensorWriter(self.temp / name, infos)

        def write(t: Tensor) -> None:
            if writer is not None and self.error is None:
                with self.guard():
                    writer.add(t)

        try:
            yield write
            if writer is not None and self.error is None:
                with self.guard():
                    writer.close()
        finally:
            if writer is not None:
                writer.abandon()

    def finish(self) -> None:
        """Put the new folder in the place of the old one."""
        for file in self.temp.iterdir():
            _sync(file)
        _sync(self.temp)
        old = self.target.parent / f".{self.target.name}.old-{os.getpid()}"
        had_old = self.target.exists()
        if had_old:
            self.target.rename(old)
        try:
            self.temp.rename(self.target)
        except OSError:
            if had_old:
                old.rename(self.target)
            raise
        _sync(self.target.parent)
        if had_old:
            shutil.rmtree(old, ignore_errors=True)

    def clean(self) -> None:
        shutil.rmtree(self.temp, ignore_errors=True)


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target} exists and is a file; choose another folder to save the model in")
    entries = sorted(target.iterdir())
    if not entries:
        return
    foreign = [
        e.name for e in entries if e.is_dir() or not any(fnmatch.fnmatch(e.name, p) for p in _MODEL_FILES)
    ]
    if foreign or not (target / "config.json").is_file():
        why = f"it holds {foreign[0]!r}" if foreign else "it has no config.json"
        raise UserError(
            f"{target} exists and is not only a model folder ({why}); choose another folder or empty it"
        )


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
