"""Safetensors files and folders that appear whole or not at all.

TensorWriter writes one tensor at a time: the header follows from names, shapes and dtypes alone, so one tensor is in
memory, and a full disk is an ordinary OSError. AtomicFolder collects files in a hidden folder beside its target,
syncs them and renames. Checkpoints (storage.py) use the same writer and the same rename.

Left out on purpose: what the tensors mean (model/folder.py), pickled weights (never read).
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import UserError, room
from shoestring.state.checkpoint_files import Entry, PartWriter, part_header, replace_folder, sync

SHARD_BYTES = 5 * 10**9
MODEL_METADATA = {"format": "pt"}  # in the header of every weight file of a model folder
CHECKSUMS = "checksums.json"  # of a model folder: sha256 of every other file
POOLING = "1_Pooling"  # the one folder inside a model folder: sentence-transformers keeps a config.json there
FORGOTTEN_S = 24 * 3600.0  # a hidden folder of another machine that is this old belongs to no process any more
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>new|old)-(?P<host>.+)-(?P<pid>[0-9]+)")

# safetensors' names of the dtypes that both it and torch know.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
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


# -- writing -------------------------------------------------------------------------------------------------


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Of the tensor `name`, in safetensors' words; UserError where it has none."""
    if dtype not in DTYPE_NAMES:
        raise UserError(
            f"tensor {name!r} has dtype {dtype}, which safetensors cannot hold; convert it to one of "
            f"{', '.join(DTYPES)}"
        )
    return DTYPE_NAMES[dtype]


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def plan_shards(infos: Sequence[TensorInfo], stem: str, limit: int = SHARD_BYTES) -> dict[str, list[TensorInfo]]:
    """{file name: tensors}, in order, no file above `limit` unless one tensor is."""
    groups: list[list[TensorInfo]] = [[]]
    size = 0
    for info in infos:
        if groups[-1] and size + info.num_bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(info)
        size += info.num_bytes
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{i + 1:05}-of-{len(groups):05}.safetensors": g for i, g in enumerate(groups)}


def write_index(folder: Path, stem: str, shards: dict[str, list[TensorInfo]]) -> None:
    """model.safetensors.index.json, where there is more than one shard."""
    if len(shards) == 1:
        return
    total = sum(i.num_bytes for infos in shards.values() for i in infos)
    weight_map = {i.name: file for file, infos in shards.items() for i in infos}
    write_json(folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def model_bytes(shards: dict[str, list[TensorInfo]]) -> int:
    """The size of the files that AtomicFolder.tensors writes for these shards."""
    headers = (part_header([_entry(i) for i in infos], MODEL_METADATA) for infos in shards.values())
    return sum(map(len, headers)) + sum(i.num_bytes for infos in shards.values() for i in infos)


def _entry(info: TensorInfo) -> Entry:
    return info.name, DTYPE_NAMES[info.dtype], info.shape, info.num_bytes


class TensorWriter(PartWriter):
    """One safetensors file, written tensor by tensor in the order of `infos`.

    `metadata` goes into the header. With `checksum` the bytes are hashed on the way, so that the file is not read
    back for its sha256.
    """

    def __init__(
        self, path: Path, infos: Sequence[TensorInfo], *, metadata: dict[str, str] | None = None, checksum: bool = False
    ) -> None:
        self._waiting = list(reversed(infos))
        super().__init__(path, [_entry(i) for i in infos], metadata=metadata, checksum=checksum)

    def add(self, t: Tensor) -> None:
        info = self._waiting.pop()
        assert (tuple(t.shape), t.dtype) == (info.shape, info.dtype), (info, t.shape, t.dtype)
        if t.numel():  # row-major and little-endian, as every machine that torch runs on
            self._write(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        assert not self._waiting
        super().close()


# -- folders -------------------------------------------------------------------------------------------------


def hidden_name(target: Path, kind: str) -> Path:
    """Beside the target: "new" while it is written, "old" while it is replaced. Says which process it belongs to."""
    return target.parent / f".{target.name}.{kind}-{socket.gethostname()}-{os.getpid()}"


def sweep_leftovers(folder: Path) -> None:
    """Clean up in `folder` after processes that were killed while they wrote models there: half-written ones are
    deleted, one that was being replaced by a folder that never came is put back. What holds anything else stays."""
    for path in folder.iterdir():
        made = _HIDDEN.fullmatch(path.name)
        a_file = path.is_file() and made is not None and made["name"].endswith(".gguf") and made["kind"] == "new"
        if made is None or path.is_symlink() or not (path.is_dir() or a_file):
            continue
        with contextlib.suppress(OSError):  # of somebody else, or gone in the meantime
            target = folder / made["name"]
            if _is_in_use(path, made["host"], int(made["pid"])):
                continue
            if a_file:
                path.unlink()
                continue
            if made["kind"] == "old" and not target.exists():
                path.rename(target)
            elif not _foreign(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_in_use(path: Path, host: str, pid: int) -> bool:
    if host != socket.gethostname():  # of a file system that several machines share
        inside = path.iterdir() if path.is_dir() else ()
        newest = max((p.stat().st_mtime for p in (path, *inside)), default=0.0)
        return time.time() - newest < FORGOTTEN_S
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def check_room(target: Path, num_bytes: int) -> None:
    """UserError where the disk that `target` will lie on has less room than the result needs at least."""
    free = shutil.disk_usage(next(p for p in target.absolute().parents if p.is_dir())).free
    if num_bytes > free:
        raise UserError(
            f"cannot write {target}: it needs {num_bytes / 1e6:.1f} MB, the disk has {free / 1e6:.1f} MB left; free "
            "some space or choose another folder"
        )


class AtomicFolder:
    """A model folder, written beside `target` and renamed when it is complete.

    A target that exists is replaced only when it is a model folder. The first error is kept in `error` instead of
    raised: this rank may have to go on taking part in collectives.
    """

    def __init__(self, target: Path, num_bytes: int) -> None:
        """`num_bytes`: about how much will be written; too little room is noticed before the work."""
        self.target = target
        self.temp = hidden_name(target, "new")
        self.error: str | None = None
        self._checksums: dict[str, str] = {}  # of files that were hashed while they were written
        with self.guard():
            if target.parent.is_dir():
                sweep_leftovers(target.parent)
            _check_replaceable(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.temp, ignore_errors=True)
            self.temp.mkdir()  # first: a place that takes no file at all may call itself full
            check_room(target, num_bytes)

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
                writer = TensorWriter(self.temp / name, infos, metadata=MODEL_METADATA, checksum=True)

        def write(t: Tensor) -> None:
            if writer is not None and self.error is None:
                with self.guard():
                    writer.add(t)

        try:
            yield write
            if writer is not None and self.error is None:
                with self.guard():
                    writer.close()
                    self._checksums[name] = writer.sha256
        finally:
            if writer is not None:
                writer.abandon()

    def finish(self) -> None:
        """Put the new folder in the place of the old one."""
        files = {
            file.relative_to(self.temp).as_posix(): {
                "bytes": file.stat().st_size,
                "sha256": self._checksums.get(file.name) or hashlib.sha256(file.read_bytes()).hexdigest(),
            }
            for file in sorted(self.temp.rglob("*"))
            if file.is_file()
        }
        write_json(self.temp / CHECKSUMS, {"algorithm": "sha256", "files": files})
        for entry in self.temp.rglob("*"):
            sync(entry)
        replace_folder(self.temp, self.target, hidden_name(self.target, "old"))

    def clean(self) -> None:
        shutil.rmtree(self.temp, ignore_errors=True)


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target} exists and is a file; choose another folder to save the model in")
    if not any(target.iterdir()):
        return
    foreign = _foreign(target)
    if foreign or not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
        why = f"it holds {foreign[0]!r}" if foreign else "it has no config.json"
        raise UserError(f"{target} exists and is not only a model folder ({why}); choose another folder or empty it")


def _foreign(folder: Path) -> list[str]:
    """What in the folder is no part of a model folder, by name."""
    return [e.name for e in sorted(folder.iterdir()) if not _is_own(e)]


def _is_own(entry: Path) -> bool:
    if entry.is_dir():
        return entry.name == POOLING and all(e.name == "config.json" for e in entry.iterdir())
    return any(fnmatch.fnmatch(entry.name, p) for p in _MODEL_FILES)
