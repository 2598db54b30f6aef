"""Whether the bytes of a model are those that were written: checksums, and values that are no numbers.

Folders that Shoestring writes hold `checksums.json` (sha256 of every file), checkpoints have them in their manifest.
Other folders and GGUF files have none; there only NaN and infinities can be found. All weights are read, in pieces, so
this takes as long as reading the files does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoestring.errors import UserError, shown
from shoestring.json_files import Fields, read_object
from shoestring.paths import expand, find_model
from shoestring.state.checkpoint_files import CHUNK, MANIFEST, is_part
from shoestring.state.files import CHECKSUMS, POOLING
from shoestring.state.manifest import read_manifest
from shoestring.state.tensor_files import TensorFiles, open_tensors

ALWAYS_FINITE = ("F4", "F6_E2M3", "F6_E3M2")  # every code is a number, and torch computes with none of them


@dataclass(frozen=True)
class Verified:
    """What was looked at, and what is wrong with it."""

    checked: tuple[str, ...]  # names of files whose checksum fits
    unknown: tuple[str, ...]  # ... without a checksum
    num_tensors: int  # looked through for NaN and infinities
    problems: tuple[str, ...]


def check_intact(path: str | Path) -> None:
    """UserError where `verify` finds a problem."""
    if problems := verify(path).problems:
        more = f" ({len(problems)} problems in all; `shoestring inspect --verify` lists them)" if problems[1:] else ""
        raise UserError(f"{problems[0]}{more}; do not use it, copy or download it again")


def verify(path: str | Path) -> Verified:
    """A model folder, a run folder (its model), a checkpoint folder, a .safetensors file or a .gguf file."""
    path = expand(path)
    if path.suffix == ".safetensors" and path.is_file():
        # Beside other files a manifest.json may be anybody's.
        known = _manifest_sums(path.parent) if is_part(path) else read_checksums(path.parent)
        stated = {name: of for name, of in known.items() if name == path.name}
        problems = [said for of in stated.values() if (said := _file_problem(path, *of))]
        fitting, unknown = (() if problems else tuple(stated)), (() if stated else (path.name,))
        return _found(fitting, unknown, list(_part_tensors(path)), problems)
    if path.suffix == ".gguf" and not path.is_dir():
        return _found((), (path.name,), list(_gguf_tensors(path)), [])
    if (path / MANIFEST).is_file():
        parts = _manifest_sums(path)
        return _checked(path, parts, [t for name in parts for t in _part_tensors(path / name)])
    folder = find_model(path)
    stem = "packed" if (folder / "shoestring.json").is_file() else "model"
    return _checked(folder, read_checksums(folder), list(_folder_tensors(folder, stem)))


def _manifest_sums(checkpoint: Path) -> dict[str, tuple[int, str]]:
    return {name: (part.bytes, part.sha256) for name, part in read_manifest(checkpoint).parts.items()}


def read_checksums(folder: Path) -> dict[str, tuple[int, str]]:
    """{file: (bytes, sha256)} of checksums.json; nothing where there is none."""
    path = folder / CHECKSUMS
    if not path.exists():
        return {}
    found = {}
    for name, entry in Fields(read_object(path), str(path)).object("files").items():
        if Path(name).name != name.removeprefix(f"{POOLING}/") or not isinstance(entry, dict):
            raise UserError(f"{path} lists {shown(name)}: {shown(entry)}; only files beside it have checksums")
        values = Fields(entry, f"{path}, {name}")
        found[name] = (values.whole("bytes", least=0), values.text("sha256"))
    return found


def _checked(folder: Path, known: dict[str, tuple[int, str]], tensors: list[tuple[str, str | None]]) -> Verified:
    problems = [said for name, stated in known.items() if (said := _file_problem(folder / name, *stated))]
    weights = {p.name for p in folder.glob("*.safetensors")}
    fitting = tuple(name for name in known if not any(str(folder / name) in said for said in problems))
    return _found(fitting, tuple(sorted(weights - set(known))), tensors, problems)


def _found(
    checked: tuple[str, ...], unknown: tuple[str, ...], tensors: list[tuple[str, str | None]], problems: list[str]
) -> Verified:
    values = [said for _, said in tensors if said is not None]
    return Verified(checked, unknown, len(tensors), (*problems, *values))


def _file_problem(path: Path, num_bytes: int, sha256: str) -> str | None:
    if not path.is_file():
        return f"{path} is missing, but {CHECKSUMS} lists it"
    if path.stat().st_size != num_bytes:
        return f"{path} has {path.stat().st_size} bytes instead of {num_bytes}"
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return None if digest.hexdigest() == sha256 else f"{path} is not what was written: its checksum does not fit"


# -- values ------------------------------------------------------------------------------------------


def _folder_tensors(folder: Path, stem: str) -> Iterator[tuple[str, str | None]]:
    files = TensorFiles(folder, stem)
    for name in files.names:
        finite = files.dtype(name) in ALWAYS_FINITE
        yield name, None if finite else _value_problem(f"{folder}: tensor {name!r}", files.read(name))


def _part_tensors(part: Path) -> Iterator[tuple[str, str | None]]:
    opened = open_tensors(part)
    for name in opened.keys():  # noqa: SIM118 (no dict)
        finite = opened.get_slice(name).get_dtype() in ALWAYS_FINITE
        yield name, None if finite else _value_problem(f"{part}: tensor {name!r}", opened.get_tensor(name))


def _gguf_tensors(path: Path) -> Iterator[tuple[str, str | None]]:
    from shoestring.model.gguf_file import open_gguf

    file = open_gguf(path)
    for tensor in file.tensors.values():
        yield tensor.name, _value_problem(f"{path}: tensor {tensor.name!r}", file.rows(tensor))


def _value_problem(what: str, tensor: Tensor) -> str | None:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return None
    piece = CHUNK // 4
    flat = tensor.reshape(-1)
    bad = sum(int((~flat[i : i + piece].float().isfinite()).sum()) for i in range(0, flat.numel(), piece))
    return f"{what} holds NaN or infinite values ({bad:,} of {flat.numel():,})" if bad else None
