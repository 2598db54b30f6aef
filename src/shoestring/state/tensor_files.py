"""TensorFiles reads any box of any tensor of a model folder: files are mapped, and only what is read is copied.

Headers are read without torch, so that `inspect` is quick. Writing is in files.py.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoestring.errors import UserError, shortened
from shoestring.json_files import check_path, read_object

if TYPE_CHECKING:
    from torch import Tensor

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # endings of weights that are pickles
MOST_MAPPED = 1 << 26  # bytes that are read of a map


class TensorFiles:
    """The tensors of `<stem>.safetensors`, or of the shards that `<stem>.safetensors.index.json` lists."""

    def __init__(self, folder: Path, stem: str = "model") -> None:
        self.folder = folder
        self._file_of: dict[str, _Opened] = {}  # by the names of tensors
        self.paths: list[Path] = []
        single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if single.is_file():
            opened = _Opened(single)
            self.paths = [single]
            self._file_of = dict.fromkeys(opened.header.keys(), opened)
        elif index.is_file():
            self._open_shards(index)
        else:
            raise _no_weights(folder, stem)

    def _open_shards(self, index: Path) -> None:
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise UserError(f"{index} has no 'weight_map' of tensor names to file names; download it again")
        opened: dict[str, _Opened] = {}
        held: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if file not in opened:
                check_path(file)
                if Path(file).name != file:
                    raise UserError(f"{index} names the file {file!r}; only files beside it are read")
                if not (index.parent / file).is_file():
                    raise UserError(f"{index.parent / file} is missing, but {index.name} lists it; download it again")
                opened[file] = _Opened(index.parent / file)
                self.paths.append(index.parent / file)
                held[file] = set(opened[file].header.keys())
            if name not in held[file]:
                raise UserError(
                    f"{index.parent / file} has no tensor {name!r}, but {index.name} says so; download both"
                )
            self._file_of[name] = opened[file]

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].header.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """In safetensors' words: F32, BF16, U8, ..."""
        return str(self._file_of[name].header.get_slice(name).get_dtype())

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor, or the box of it that `index` cuts out (one slice a dimension)."""
        opened = self._file_of[name]
        tensor = opened.values.get_slice(name)[index] if index else opened.values.get_tensor(name)
        opened.note_read(tensor.nbytes)
        return tensor


class _Opened:
    """A file, its header at once and its values, for which torch is imported, when one is read."""

    def __init__(self, path: Path) -> None:
        self._path, self.header, self._num_read = path, open_tensors(path, header=True), 0

    @cached_property
    def values(self) -> Any:
        return open_tensors(self._path)

    def note_read(self, num_bytes: int) -> None:
        """Map the file anew once in a while: what a process has read of a map counts as its memory."""
        self._num_read += num_bytes
        if self._num_read >= MOST_MAPPED:
            del self.values
            self._num_read = 0


def open_tensors(path: Path, *, header: bool = False) -> Any:
    """A safetensors file, mapped; UserError where it is none. `header`: for names, shapes and dtypes, without torch."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy" if header else "pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        try:
            with path.open("rb") as f:
                start = f.read(20)
        except OSError as why:
            raise UserError(f"cannot read {path}: {why.strerror}") from error
        if start.startswith(b"version https://git-"):
            raise UserError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull`") from error
        raise UserError(
            f"{path} is truncated or corrupt ({shortened(str(error), 200)}); download or save it again"
        ) from error


def _no_weights(folder: Path, stem: str) -> UserError:
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLED)
    if pickled:
        return UserError(
            f"{folder} has only pickled weights ({pickled[0]}); pickle can run code and is never read: "
            "convert the folder to safetensors first (transformers: from_pretrained, then save_pretrained)"
        )
    gguf = sorted(p.name for p in folder.glob("*.gguf"))
    if gguf:
        return UserError(f"{folder} holds a GGUF file; give the file itself: {folder / gguf[0]}")
    if (folder / "adapter_config.json").is_file():
        return UserError(f"{folder} holds an adapter without its base model; merge them and give the merged folder")
    return UserError(
        f"{folder} has no weights: expected {stem}.safetensors, or shards with {stem}.safetensors.index.json"
    )
