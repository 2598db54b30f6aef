"""The container of a GGUF file: its metadata, where its tensors lie, and their values in fp32.

The header is parsed once, and nothing behind it is touched: the file is mapped, metadata values are decoded when they
are asked for, tensors when they are read, row by row if need be. The blocks are de-quantised by the `gguf` package.
Its own reader is not used: it makes an array of every number, text and length of the header, which takes seconds.

The file is a stranger's. Lengths are bounded before they are believed, no key or tensor comes twice, and tensors lie
one behind the other, aligned and inside the file.

Left out: what metadata and tensors mean (gguf_names.py, gguf.py), files of the other byte order, split files.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoestring.errors import UserError, out_of_memory, shown

if TYPE_CHECKING:
    from torch import Tensor

# What the `gguf` package decodes to numbers.
BLOCK_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
# The format's numbers of types: name, weights and bytes of a block. Here, because the package loads for half a second.
_BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}  # fmt: skip
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# The kinds of metadata, by the format's numbers: how a value is packed.
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_TEXT, _LIST = 8, 9
# How short and changed bytes surface. Not memory that runs out: the file is good then.
_DAMAGE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, struct.error)
# Above these a length is damaged; believing it would count for hours through the weights of a large file.
_MOST_VALUES = 1 << 24  # of all metadata; the largest vocabularies have a million
_MOST_TEXT = 1 << 24  # bytes
_MOST_ENTRIES = 1 << 17  # keys, tensors


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as it lies in the file; `shape` in torch's order, the dim of the blocks last."""

    name: str
    shape: tuple[int, ...]
    kind: str  # a GGMLQuantizationType, or its number where the package does not know it
    offset: int  # of its first byte in the file
    num_bytes: int


class GgufFile:
    """The parsed header of a file; the values of metadata and tensors on demand."""

    def __init__(self, path: Path) -> None:
        """Parse the header. Where the tensors lie is another question, for `check_places`."""
        self.path = path
        self._map = _mapped(path)
        self._num_values = 0
        with damage_said(path):
            self._parse()

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def get(self, key: str) -> Any:
        """One value of the metadata, None where there is none."""
        if key not in self._places:
            return None
        with damage_said(self.path):
            return self._value(*self._places[key])

    def metadata(self, *, lists: bool = True) -> dict[str, Any]:
        """All of it; without lists (a vocabulary is several) it is small."""
        return {k: self.get(k) for k, (kind, _) in self._places.items() if lists or kind != _LIST}

    def rows(self, tensor: GgufTensor, index: slice = slice(None)) -> Tensor:
        """The values of a tensor, or of a range along its first dim, in fp32."""
        import numpy as np
        import torch
        from gguf.quants import dequantize

        raw = self._bytes(tensor)
        if len(tensor.shape) > 1:
            raw = raw[index]
        try:
            with np.errstate(all="ignore"):  # NaN scales of a damaged block
                read = np.asarray(dequantize(raw, _type(tensor.kind)), dtype=np.float32)
            # F32 tensors are views of the read-only file, which may be deleted while the model lives.
            values = torch.from_numpy(read.copy() if tensor.kind == "F32" else read)
        except NotImplementedError as error:
            raise UserError(f"{self.path}: tensor {shown(tensor.name)} cannot be decoded ({error})") from None
        self._map.madvise(mmap.MADV_DONTNEED)  # pages of the file that were read would count as our memory
        return values[index] if len(tensor.shape) == 1 else values

    def blocks(self, tensor: GgufTensor, index: slice = slice(None)) -> Tensor:
        """The stored bytes of a tensor, or of a range along its first dim, [..., bytes of a row]; a copy."""
        import numpy as np
        import torch

        return torch.from_numpy(np.array(self._bytes(tensor)[index]))

    def _bytes(self, tensor: GgufTensor) -> Any:
        import numpy as np

        width = tensor.num_bytes * tensor.shape[-1] // math.prod(tensor.shape)
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return raw.reshape(*tensor.shape[:-1], width)

    def check_places(self) -> None:
        """Types are known; tensors lie one behind the other, aligned and inside the file."""
        for tensor in self.tensors.values():
            if tensor.kind not in BLOCK_TYPES:
                raise UserError(
                    f"{self.path}: tensor {shown(tensor.name)} is stored as {tensor.kind}, which cannot be read; "
                    f"supported: {', '.join(BLOCK_TYPES)}. Get the model in one of these"
                )
        end = self._data_start
        for tensor in sorted(self.tensors.values(), key=lambda t: t.offset):
            if tensor.offset != end:
                raise UserError(
                    f"{self.path} is damaged: tensor {shown(tensor.name)} begins at byte {tensor.offset}, the one "
                    f"before it ends at {end}; get it again"
                )
            end += _aligned(tensor.num_bytes, self._alignment)
            if tensor.offset + tensor.num_bytes > len(self._map):
                raise UserError(
                    f"{self.path} is truncated or damaged: it ends inside tensor {shown(tensor.name)}; get it again"
                )

    # --- the header -------------------------------------------------------------------------------

    def _parse(self) -> None:
        version, num_tensors, num_keys = self._unpack("<IQQ", 4)
        if version & 0xFFFF == 0:
            raise UserError(f"{self.path} is stored in the other byte order; get a little-endian GGUF file")
        if version not in VERSIONS:
            raise ValueError(f"version {version}")
        _check_most("the number of keys", num_keys, _MOST_ENTRIES)
        _check_most("the number of tensors", num_tensors, _MOST_ENTRIES)
        at = 24
        self._places: dict[str, tuple[int, int]] = {}  # key -> kind and place of its value
        for _ in range(num_keys):
            key, at = self._text(at)
            kind = self._unpack("<I", at)[0]
            if key in self._places:
                raise ValueError(f"the key {shown(key)} comes twice")
            self._places[key] = (kind, at + 4)
            at = self._behind(kind, at + 4)
        described: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, at = self._text(at)
            num_dims = self._unpack("<I", at)[0]
            if not 1 <= num_dims <= 4:
                raise ValueError(f"tensor {shown(name)} has {num_dims} dims")
            *dims, kind, offset = self._unpack(f"<{num_dims}QIQ", at + 4)
            at += 4 + 8 * num_dims + 12
            described.append((name, tuple(reversed(dims)), kind, offset))
        self._alignment = self.get("general.alignment") if "general.alignment" in self else DEFAULT_ALIGNMENT
        if type(self._alignment) is not int or not 1 <= self._alignment <= 1 << 20 or self._alignment % 8:
            raise ValueError(f"an alignment of {shown(self._alignment)}")
        self._data_start = _aligned(at, self._alignment)
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in described:
            if name in self.tensors:
                raise ValueError(f"tensor {shown(name)} comes twice")
            self.tensors[name] = self._described(name, shape, kind, offset)

    def _described(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
        if not 1 <= math.prod(shape) <= 1 << 50:
            raise ValueError(f"tensor {shown(name)} has {math.prod(shape):,} elements")
        if number not in _BLOCKS:
            return GgufTensor(name, shape, f"type {number}", self._data_start + offset, 0)
        kind, block, size = _BLOCKS[number]
        if shape[-1] % block:
            raise ValueError(f"rows of {shape[-1]} values in blocks of {block} in tensor {shown(name)}")
        return GgufTensor(name, shape, kind, self._data_start + offset, math.prod(shape) // block * size)

    def _behind(self, kind: int, at: int) -> int:
        """Where the value that begins at `at` ends."""
        if kind == _TEXT:
            return self._text_end(at)
        if kind != _LIST:
            self._unpack(_SCALARS[kind], at)
            return at + struct.calcsize(_SCALARS[kind])
        inner, count = self._unpack("<IQ", at)
        if inner == _LIST:
            raise ValueError("lists of lists")
        self._num_values += count
        _check_most("the length of a list", self._num_values, _MOST_VALUES)
        at += 12
        if inner != _TEXT:
            at += count * struct.calcsize(_SCALARS[inner])
            if at > len(self._map):
                raise ValueError(f"it ends at byte {len(self._map)}, inside a list")
            return at
        for _ in range(count):
            at = self._text_end(at)
        return at

    def _value(self, kind: int, at: int) -> Any:
        if kind == _TEXT:
            return self._text(at)[0]
        if kind != _LIST:
            return self._unpack(_SCALARS[kind], at)[0]
        inner, count = self._unpack("<IQ", at)
        at += 12
        if inner != _TEXT:
            return list(self._unpack(f"<{count}{_SCALARS[inner][1:]}", at))
        texts = []
        for _ in range(count):
            text, at = self._text(at)
            texts.append(text)
        return texts

    def _text(self, at: int) -> tuple[str, int]:
        end = self._text_end(at)
        return self._map[at + 8 : end].decode("utf-8"), end

    def _text_end(self, at: int) -> int:
        length = _LENGTH.unpack_from(self._map, at)[0]
        if length > _MOST_TEXT:
            raise ValueError(f"the length of a text is {length:,}")
        if at + 8 + length > len(self._map):
            raise ValueError(f"it ends at byte {len(self._map)}, inside a text that begins at {at}")
        return at + 8 + length

    def _unpack(self, layout: str, at: int) -> tuple[Any, ...]:
        return struct.unpack_from(layout, self._map, at)


_LENGTH = struct.Struct("<Q")


def open_gguf(path: str | Path) -> GgufFile:
    """The parsed header of a whole file: each of its tensors can be read."""
    file = GgufFile(Path(path))
    file.check_places()
    return file


@contextmanager
def damage_said(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except _DAMAGE as error:
        raise UserError(f"{path} is truncated or damaged ({type(error).__name__}: {error}); get it again") from error


def _mapped(path: Path) -> mmap.mmap:
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a folder, a pipe or a device; give a .gguf file")
    try:
        with path.open("rb") as file:
            if (magic := file.read(4)) != b"GGUF":
                raise UserError(f"{path} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if out_of_memory(error):  # for the map of the file
            raise
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _type(kind: str) -> Any:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType[kind]


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def _check_most(what: str, given: int, most: int) -> None:
    if given > most:
        raise ValueError(f"{what} is {given:,}")
