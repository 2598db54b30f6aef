"""Safetensors files of a model folder: read any box of any tensor, write tensor by tensor.

Reading maps the files and copies only what is asked for. Writing streams: a shard's header is known from
names, shapes and dtypes alone, so one tensor at a time is in memory, and a full disk is an ordinary OSError.

Left out on purpose: what the tensors mean (folder.py), pickled weights (never read).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shoestring.errors import UserError

SHARD_BYTES = 5 * 10**9
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFiles:
    """The tensors of `<stem>.safetensors`, or of the shards that `<stem>.safetensors.index.json` lists."""

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self.folder = folder
        self._file_of: dict[str, Any] = {}  # tensor name -> opened file
        single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if single.is_file():
            opened = _open(single)
            self._file_of = dict.fromkeys(opened.keys(), opened)
        elif index.is_file():
            self._open_shards(index)
        else:
            raise _no_weights(folder, stem)

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise UserError(f"{index} has no 'weight_map' of tensor names to file names; download it again")
        opened: dict[str, Any] = {}
        held: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if file not in opened:
                if Path(file).name != file:
                    raise UserError(f"{index} names the file {file!r}; only files beside it are read")
                if not (index.parent / file).is_file():
                    raise UserError(
                        f"{index.parent / file} is missing, but {index.name} lists it; download it again"
                    )
                opened[file] = _open(index.parent / file)
                held[file] = set(opened[file].keys())
            if name not in held[file]:
                raise UserError(
                    f"{index.parent / file} has no tensor {name!r}, but {index.name} says so; download both"
                )
            self._file_of[name] = opened[file]

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """In safetensors' words: F32, BF16, U8, ..."""
        return str(self._file_of[name].get_slice(name).get_dtype())

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor, or the box of it that `index` cuts out (one slice a dimension)."""
        file = self._file_of[name]
        if not index:
            return file.get_tensor(name)
        return file.get_slice(name)[index]


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except PermissionError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (SafetensorError, OSError, ValueError) as error:
        with path.open("rb") as f:
            if f.read(20).startswith(b"version https://git-"):
                raise UserError(
                    f"{path} is a Git LFS pointer, not the weights; run `git lfs pull`"
                ) from error
        raise UserError(f"{path} is truncated or corrupt ({error}); download or save it again") from error


def _no_weights(folder: Path, stem: str) -> UserError:
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickled:
        return UserError(
            f"{folder} has only pickled weights ({pickled[0]}); pickle can run code and is never read: "
            "convert the folder to safetensors first (transformers: from_pretrained, then save_pretrained)"
        )
    gguf = sorted(p.name for p in folder.glob("*.gguf"))
    if gguf:
        return UserError(f"{folder} holds a GGUF file; give the file itself: {folder / gguf[0]}")
    if (folder / "adapter_config.json").is_file():
        return UserError(
            f"{folder} holds an adapter without its base model; merge them and give the merged folder"
        )
    return UserError(
        f"{folder} has no weights: expected {stem}.safetensors, or shards with {stem}.safetensors.index.json"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or a UserError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); download or save it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


# -- writing -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def plan_shards(
    infos: Sequence[TensorInfo], stem: str, limit: int = SHARD_BYTES
) -> dict[str, list[TensorInfo]]:
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
    write_json(
        folder / f"{stem}.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


class TensorWriter:
    """One safetensors file, written tensor by tensor in the order of `infos`."""

    def __init__(self, path: Path, infos: Sequence[TensorInfo]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for info in infos:
            end = offset + info.num_bytes
            header[info.name] = {
                "dtype": _DTYPES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data starts aligned
        self._waiting = list(reversed(infos))
        self._file: BinaryIO = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def add(self, t: Tensor) -> None:
        info = self._waiting.pop()
        assert (tuple(t.shape), t.dtype) == (info.shape, info.dtype), (info, t.shape, t.dtype)
        if t.numel():
            self._file.write(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """On disk, not only in the page cache: what is renamed next must not be empty after a power cut."""
        assert not self._waiting
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, and the disk may be full
            self._file.close()
