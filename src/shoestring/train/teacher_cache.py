"""TeacherCache: a teacher's probabilities for each token of a corpus, computed once and kept on disk, so that the
teacher need not stay in memory.

    cache = build_cache(folder, teacher, one_epoch(data), num_targets=len(data.shards), k=64)
    cache.lookup(micro.index_BT)     # top-k log-probabilities and the mass of all other tokens, per target

One row per global target index (`Micro.index_BT`): ids and log-probabilities of the k likeliest tokens, the log of the
tail mass (everything else together) and the log-probability of the target. At k=64 that is 261 bytes per token; the
logits of a 50k vocabulary would be 200 kB. `ScalarCache` has one number per target (a reference model's losses, say).

A row depends on the window of its target, so the reader must cut windows the same way (`TokenData` with the same
context; order and batch do not matter).

A folder holds plain arrays and manifest.json, which is written last: a folder with a manifest is complete. Rows are
marked when they are on disk, so that a killed build continues, on any number of ranks; ranks write their own rows into
the same files, which need a common file system. No pickle.

16-bit log-probabilities round a probability by at most 0.1% at p > 0.02 and 0.4% at p > 1e-6; `lookup` normalises each
row again.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.errors import UserError, shown
from shoestring.json_files import Fields, read_object
from shoestring.mesh import Mesh
from shoestring.model.collectives import gather_last
from shoestring.model.transformer import Head
from shoestring.runlog import OpenProgressBar, RunLog, write_atomically
from shoestring.state.agreement import agree
from shoestring.train.data import TokenData
from shoestring.train.objectives import vocab_log_softmax, vocab_logsumexp, vocab_remove_, vocab_start, vocab_take
from shoestring.train.step import IGNORED, Micro

VERSION = 1
LOWEST = -65504.0  # of fp16; stands for log 0
FLUSH_EVERY = 16  # micro-batches between two times that rows are marked as written
CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}  # fp32 logits held at once

# Name of an array: (numpy dtype, numbers per row; 0 for a plain number).
Columns = dict[str, tuple[str, int]]


class TopK(NamedTuple):
    """The teacher's distribution at each target; exp of `logp` and `tail_logp` together sums to 1."""

    ids_BTk: Tensor  # int64, likeliest first
    logp_BTk: Tensor  # fp32
    tail_logp_BT: Tensor  # fp32: log of the probability of all tokens that are not in ids


@dataclass(frozen=True)
class Epoch:
    """This rank's micro-batches of the first steps."""

    data: TokenData
    num_steps: int

    def __iter__(self) -> Iterator[Micro]:
        for step in range(self.num_steps):
            yield from self.data.step(step)

    @property
    def num_targets(self) -> int:
        """Over all ranks."""
        return self.num_steps * self.data.tokens_per_step


def one_epoch(data: TokenData, steps: int | None = None) -> Epoch:
    """This rank's micro-batches that hold every window once; of the first `steps` training steps only, where
    given: a run that ends within an epoch never sees the rest."""
    num_steps = -(-data.num_windows // data.batch)
    return Epoch(data, num_steps if steps is None else min(steps, num_steps))


# -- building ------------------------------------------------------------------------------------------------


def build_cache(
    folder: Path | str,
    teacher: nn.Module,
    batches: Iterable[Micro],
    *,
    num_targets: int,
    k: int = 64,
    identity: dict[str, Any] | None = None,
    mesh: Mesh | None = None,
    progress: OpenProgressBar | None = None,
) -> TeacherCache:
    """Run the teacher over `batches` and keep its probabilities for their counted targets.

    Existing rows are not computed again. `identity` tells what the rows belong to (a fingerprint of the corpus, of the
    teacher): a folder with another one is refused. Under a mesh every rank gives its own batches, and all return the
    whole cache.
    """
    vocab = int(teacher.spec.vocab_size)  # type: ignore[union-attr, arg-type]
    if not 1 <= k <= vocab:
        raise UserError(f"k={k} is not possible: the teacher has {vocab} tokens, give 1 to {vocab}")
    device = next(teacher.parameters()).device
    columns: Columns = {
        "ids": ("<u2" if vocab <= 65536 else "<u4", k),
        "logp": ("<f2", k),
        "tail": ("<f2", 0),
        "target": ("<f2", 0),
    }

    def compute(micro: Micro) -> dict[str, Tensor]:
        return teacher_rows(teacher, micro.to(device), k)

    settings = {"kind": "top-k", "k": k, "vocab": vocab, "identity": identity or {}}
    _build(Path(folder), columns, settings, batches, compute, num_targets, mesh, progress)
    return TeacherCache.open(folder)


def build_scalar_cache(
    folder: Path | str,
    score: Callable[[Micro], Tensor],
    batches: Iterable[Micro],
    *,
    num_targets: int,
    identity: dict[str, Any] | None = None,
    mesh: Mesh | None = None,
) -> ScalarCache:
    """The same with one number per target: score(micro) gives [B, T], of which the counted ones are kept."""

    def compute(micro: Micro) -> dict[str, Tensor]:
        with torch.no_grad():
            value_BT = score(micro)
        assert value_BT.shape == micro.targets_BT.shape, (value_BT.shape, micro.targets_BT.shape)
        return {"value": value_BT.cpu().float()[micro.targets_BT.cpu() != IGNORED]}

    settings = {"kind": "scalar", "identity": identity or {}}
    _build(Path(folder), {"value": ("<f4", 0)}, settings, batches, compute, num_targets, mesh, None)
    return ScalarCache.open(folder)


@torch.no_grad()
def teacher_rows(teacher: nn.Module, micro: Micro, k: int) -> dict[str, Tensor]:
    """ids, logp [counted, k], tail and target [counted] of the counted targets, in the order of the micro."""
    counted = micro.targets_BT != IGNORED
    target_N = micro.targets_BT[counted]
    found: list[tuple[Tensor, ...]] = []

    def readout(hidden_BTD: Tensor, head: Head) -> Tensor:
        hidden_ND = hidden_BTD[counted]
        head = head.to(hidden_ND.dtype)
        rows = max(1, CHUNK_LOGITS.get(hidden_ND.device.type, 1 << 24) // head.weight_VD.shape[0])
        for h, t in zip(hidden_ND.split(rows), target_N.split(rows), strict=True):
            found.append(_top_rows(vocab_log_softmax(head.logits(h).float(), head), t, k, head))
        return hidden_BTD.new_zeros(())

    teacher(micro.tokens_BT, readout=readout)
    ids, logp, tail, target = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    return {"ids": ids, "logp": logp, "tail": tail, "target": target}


def _top_rows(logp_NV: Tensor, target_N: Tensor, k: int, head: Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of rows from log-probabilities, of which this rank may hold a range of the vocabulary."""
    top = logp_NV.topk(min(k, logp_NV.shape[1]), dim=-1)
    best, ids = top.values, top.indices + vocab_start(head)
    if head.group is not None:
        best, ids = gather_last(best, head.group), gather_last(ids, head.group)
        pick = best.topk(k, dim=-1)
        best, ids = pick.values, ids.gather(1, pick.indices)
    target_N1 = vocab_take(logp_NV, target_N[:, None], head)
    # Summed, not 1 minus the others, which would lose the digits of a small tail.
    tail_N1 = vocab_logsumexp(vocab_remove_(logp_NV, ids, head), head)
    return ids, best.clamp(min=LOWEST), tail_N1[:, 0].clamp(min=LOWEST), target_N1[:, 0].clamp(min=LOWEST)


def _build(
    folder: Path,
    columns: Columns,
    settings: dict[str, Any],
    batches: Iterable[Micro],
    compute: Callable[[Micro], dict[str, Tensor]],
    num_targets: int,
    mesh: Mesh | None,
    progress: OpenProgressBar | None,
) -> None:
    """Fill the rows of `batches`; compute(micro) gives each field for the micro's counted targets."""
    if num_targets < 1:
        raise UserError("the corpus has no targets to keep a teacher's words for; give more text")
    settings = {"version": VERSION, **settings, "num_targets": num_targets, "fields": columns}
    settings = json.loads(json.dumps(settings))  # tuples become lists, as they will when read back
    main = mesh is None or mesh.is_main
    agree(mesh, lambda: _reserve(folder, columns, settings, num_targets) if main else None)
    arrays = _map(folder, columns, num_targets, "r+")
    filled = _map(folder, {"filled": ("u1", 0)}, num_targets, "r+")["filled"]
    written: list[np.ndarray] = []

    def mark() -> None:
        for array in arrays.values():
            array.flush()
        for rows in written:
            filled[rows] = 1
        filled.flush()
        written.clear()

    open_bar = progress or RunLog(None, quiet=True).progress
    with open_bar(batches.num_targets if isinstance(batches, Epoch) else num_targets, "teacher") as bar:
        for micro in batches:
            rows = _rows(micro, num_targets)
            missing = len(rows) > 0 and not filled[rows].all()
            # A sharded teacher runs on all ranks or on none.
            if missing if mesh is None else mesh.any(missing):
                for name, values in compute(micro).items():
                    arrays[name][rows] = values.numpy().astype(arrays[name].dtype)
                written.append(rows)
                if len(written) >= FLUSH_EVERY:
                    mark()
            bar.advance(micro.index_BT.numel() * (1 if mesh is None else mesh.dp_size))
        mark()
    agree(mesh, lambda: None)  # every rank's rows are on disk
    agree(mesh, lambda: _finish(folder, settings, filled, arrays) if main else None)


def _rows(micro: Micro, num_targets: int) -> np.ndarray:
    counted = (micro.targets_BT != IGNORED).cpu()
    rows = micro.index_BT.cpu()[counted].numpy()
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < num_targets:
        raise UserError(
            f"target {int(rows.max())} lies outside a cache of num_targets={num_targets}; use the length of the corpus"
        )
    return rows


def _reserve(folder: Path, columns: Columns, settings: dict[str, Any], num_targets: int) -> None:
    """Allocate the files in full: a full disk under a mapped file would kill the process later."""
    known = _read_json(folder / "manifest.json") or _read_json(folder / "building.json")
    if known is not None:
        for key, value in settings.items():
            if known.get(key) != value:
                raise UserError(
                    f"{folder} holds a cache with {key}={known.get(key)}, not {value}: give another folder or delete it"
                )
        return
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no cache; give another folder or delete it")
    sizes = {name: np.dtype(kind).itemsize * max(1, width) for name, (kind, width) in columns.items()}
    sizes["filled"] = 1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, size in sizes.items():
            with (folder / f"{name}.bin").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size * num_targets)
        write_atomically(folder / "building.json", json.dumps(settings, indent=1) + "\n")
    except OSError as error:
        for name in sizes:
            (folder / f"{name}.bin").unlink(missing_ok=True)
        need = sum(sizes.values()) * num_targets / 1e9
        hint = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise UserError(
            f"cannot reserve {need:.2f} GB for the teacher's cache in {folder}: {hint}; make room, give another "
            "folder, or use a smaller k or fewer tokens"
        ) from error


def _finish(folder: Path, settings: dict[str, Any], filled: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
    num_filled = int(filled.sum())
    if num_filled == 0:
        raise UserError(
            "the batches hold no counted target: all of them are prompts or padding; give a longer context, or "
            "shorter prompts"
        )
    manifest = {**settings, "num_filled": num_filled}
    if "target" in arrays:
        manifest["confidence"] = _confidence(arrays["target"], filled)
    write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    (folder / "building.json").unlink(missing_ok=True)


def _confidence(target: np.ndarray, filled: np.ndarray) -> float:
    """Mean over the filled rows of the teacher's probability of the target."""
    total, block = 0.0, 1 << 20
    for at in range(0, len(target), block):
        rows = filled[at : at + block] != 0
        total += float(np.exp(target[at : at + block][rows].astype(np.float64)).sum())
    return total / int(filled.sum())


# -- reading -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cache:
    """Rows by target index: memory-mapped, or resident on a device."""

    kind: ClassVar[str]
    needed: ClassVar[tuple[str, ...]]  # the fields that lookups read
    folder: Path
    num_targets: int
    num_filled: int
    identity: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(repr=False)
    resident: dict[str, Tensor] | None = field(repr=False)

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        manifest = _read_manifest(Path(folder), cls.kind)
        given = Fields(manifest, f"{folder}/manifest.json")
        columns: Columns = {"filled": ("u1", 0)}
        for name, column in given.object("fields").items():
            match column:
                case [("u1" | "<u2" | "<u4" | "<f2" | "<f4") as kind, int(width)] if name.isidentifier() and width >= 0:
                    columns[name] = (kind, width)
                case _:
                    raise UserError(f"{given.where}: the field {shown(name)} is {shown(column)}; build the cache again")
        if absent := [name for name in cls.needed if name not in columns]:
            raise UserError(f"{given.where}: the field {absent[0]!r} is missing; build the cache again")
        held: dict[str, Any] = {
            "folder": Path(folder),
            "arrays": _map(Path(folder), columns, given.whole("num_targets"), "r"),
            "resident": None,
        }
        if missing := [f.name for f in fields(cls) if f.name not in held and f.name not in given]:
            raise UserError(f"{given.where} has no {missing[0]!r}; build the cache again")
        return cls(**held, **{f.name: manifest[f.name] for f in fields(cls) if f.name not in held})

    @property
    def num_bytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())

    def to(self, device: torch.device | str) -> Self:
        """A copy held on the device, whose lookups read no files."""
        return replace(self, resident={n: torch.from_numpy(_plain(a[:])).to(device) for n, a in self.arrays.items()})

    def take(self, index_BT: Tensor) -> dict[str, Tensor]:
        """Each field at the given targets, on their device; floats as fp32, the others as int64."""
        if self.resident is not None:
            flat = index_BT.flatten().to(next(iter(self.resident.values())).device)
            found = {name: t.index_select(0, flat) for name, t in self.resident.items()}
        else:
            rows = index_BT.flatten().cpu().numpy()
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_targets:
                raise UserError(
                    f"target {int(rows.max())} lies outside the cache in {self.folder} ({self.num_targets} "
                    "targets): it belongs to another corpus"
                )
            found = {name: torch.from_numpy(_plain(a[rows])) for name, a in self.arrays.items()}
        return {
            name: t.to(index_BT.device, torch.float32 if t.is_floating_point() else torch.int64).unflatten(
                0, index_BT.shape
            )
            for name, t in found.items()
        }


def _plain(a: np.ndarray) -> np.ndarray:
    """In a dtype that torch can index on every device."""
    wider = {"<u2": "<i4", "<u4": "<i8"}.get(a.dtype.str)
    return np.array(a) if wider is None else a.astype(wider)


@dataclass(frozen=True)
class TeacherCache(_Cache):
    kind = "top-k"
    needed = ("ids", "logp", "tail")
    k: int
    vocab: int
    confidence: float  # mean probability that the teacher gives the targets

    def lookup(self, index_BT: Tensor, counted_BT: Tensor | None = None) -> TopK:
        """The rows of these targets, on their device.

        A target that was never computed (a prompt, padding) gets all its mass in the tail; where
        `counted_BT` is true that is an error.
        """
        found = self.take(index_BT)
        there = found["filled"] != 0
        if counted_BT is not None:
            self._check(there | ~counted_BT)
        top = found["logp"].masked_fill(~there[..., None], LOWEST)
        tail = found["tail"].masked_fill(~there, 0.0)
        ids = torch.where(there[..., None], found["ids"], torch.arange(self.k, device=tail.device))
        total = torch.logsumexp(torch.cat([top, tail[..., None]], dim=-1), dim=-1)
        return TopK(ids, top - total[..., None], tail - total)

    def _check(self, fine_BT: Tensor) -> None:
        message = f"the cache in {self.folder} lacks targets that are trained on: build it with the same data"
        if fine_BT.is_cuda:
            torch._assert_async(fine_BT.all(), message)  # without waiting for the GPU
        elif not fine_BT.all():
            raise UserError(message)


@dataclass(frozen=True)
class ScalarCache(_Cache):
    kind = "scalar"
    needed = ("value",)

    def lookup(self, index_BT: Tensor) -> Tensor:
        """[B, T] fp32; NaN for a target that was never computed."""
        found = self.take(index_BT)
        return found["value"].masked_fill(found["filled"] == 0, math.nan)


def _read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    manifest = _read_json(folder / "manifest.json")
    if manifest is None:
        unfinished = (folder / "building.json").is_file()
        reason = "its build was not finished; build it again to go on" if unfinished else "there is none"
        raise UserError(f"{folder} holds no teacher cache: {reason}")
    if manifest.get("version") != VERSION or manifest.get("kind") != kind:
        raise UserError(
            f"{folder} holds a cache of kind {shown(manifest.get('kind'))}, version "
            f"{shown(manifest.get('version'))}; this is for "
            f"kind {kind!r}, version {VERSION}"
        )
    return manifest


def _map(folder: Path, columns: Columns, num_targets: int, mode: Any) -> dict[str, Any]:
    if bad := [name for name in columns if not (folder / f"{name}.bin").is_file()]:
        raise UserError(
            f"the cache in {folder} cannot be read: {bad[0]}.bin is not a file; delete it and build it again"
        )
    try:
        return {
            name: np.memmap(folder / f"{name}.bin", kind, mode, shape=(num_targets, width) if width else num_targets)
            for name, (kind, width) in columns.items()
        }
    except (OSError, ValueError) as error:
        raise UserError(f"the cache in {folder} cannot be read: {error}; delete it and build it again") from None


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_object(path, remedy="delete the cache and build it again") if path.exists() else None
