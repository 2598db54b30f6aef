"""SafeWriter and SafeReader: storage for `torch.distributed.checkpoint` (DCP) that never runs code.

A checkpoint is a folder: one safetensors part per rank, and manifest.json that says which box of which tensor
lies in which part, with a checksum per part, and holds everything that is not a tensor as JSON. It is written
into a hidden folder beside the target; the manifest comes last, every file and folder is flushed to disk,
then one rename makes it visible. So a folder with its final name is complete, whatever was killed when.

DCP's own storage keeps its metadata and every non-tensor as pickles, which run code when they are read. Here nothing is
unpickled: a non-tensor must be JSON (tuples and non-finite floats are tagged), everything else is refused.

Left out: compression, object stores, and parts that several ranks share. docs/reference/checkpoint.md has the exact
layout; manifest.py parses and checks it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shoestring.errors import UserError
from shoestring.state.boxes import Box, check_cover
from shoestring.state.checkpoint_files import (
    CHUNK,
    FORMAT,
    HOST_FORMAT,
    HOST_MANIFEST,
    MANIFEST,
    NEW,
    OLD,
    hidden,
    part_name,
    replace_folder,
    sync,
)
from shoestring.state.files import DTYPE_NAMES, DTYPES, TensorInfo, TensorWriter, dtype_name
from shoestring.state.manifest import (
    Manifest,
    PartInfo,
    StoredBox,
    StoredTensor,
    decode_value,
    dump_manifest,
    encode_value,
    read_manifest,
)


def io_error(path: Path, error: OSError, needed: int = 0) -> UserError:
    """What the user can act on when the disk refuses."""
    try:
        probe = next(p for p in (path, *path.parents) if p.exists())
        free = f"{shutil.disk_usage(probe).free / 2**20:.1f} MiB free there"
    except (OSError, StopIteration):
        free = "free space unknown"
    wanted = f", {needed / 2**20:.1f} MiB were to be written by this process" if needed else ""
    return UserError(
        f"cannot write the checkpoint {path}: {error.strerror or error} ({free}{wanted}); "
        "free some space or choose another folder; earlier checkpoints are untouched"
    )


class GoneError(UserError):
    """The folder being written is not there; usually the consequence of an error on another rank."""


def write_part(path: Path, items: Sequence[tuple[TensorInfo, Callable[[], Any]]]) -> PartInfo:
    """A safetensors file of tensors that are made one at a time."""
    # Larger elements first: then every tensor is aligned to its element size without padding.
    items = sorted(items, key=lambda item: (-item[0].dtype.itemsize, item[0].name))
    writer = TensorWriter(path, [info for info, _ in items], checksum=True)
    try:
        for _, resolve in items:
            writer.add(resolve())
        writer.close()
    finally:
        writer.abandon()
    return PartInfo(bytes=writer.num_bytes, sha256=writer.sha256)


def _item_box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box.at(item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)


@dataclasses.dataclass(frozen=True)
class _Written:
    """What a rank tells the coordinator about one item: a stored box, a JSON value, or its part file."""

    box: StoredBox | None = None
    value: Any = None
    part: tuple[str, PartInfo] | None = None


class SafeWriter(StorageWriter):
    """`torch.distributed.checkpoint.save(state, storage_writer=SafeWriter(path))`.

    `path` must not exist unless `overwrite`, and must be on a file system that all ranks see.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int | None = None, overwrite: bool = False) -> None:
        super().__init__()
        self.step = step
        self.overwrite = overwrite
        self.num_ranks = 1
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id).absolute()
            self.temp = hidden(self.path, NEW)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives") is False:
            raise UserError("SafeWriter needs use_collectives=True: one manifest describes the parts of all ranks")
        if not is_coordinator:
            return
        if self.path.exists() and not self.overwrite:
            raise UserError(f"{self.path} exists already; choose another folder, delete it, or pass overwrite=True")
        try:
            shutil.rmtree(self.temp, ignore_errors=True)
            self.temp.mkdir(parents=True)
        except OSError as e:
            raise io_error(self.path, e) from e

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.tensor_data is not None:
                dtype_name(item.index.fqn, item.tensor_data.properties.dtype)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.num_ranks = len(plans)
        return [dataclasses.replace(p, storage_data=part_name(i)) for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        needed = 0
        try:
            results = [_value_result(i, planner) for i in plan.items if i.type == WriteItemType.BYTE_IO]
            # A rank with no element of a tensor (more ranks than rows) has nothing to store for it.
            boxes = [(i, b) for i in plan.items if i.tensor_data is not None and (b := _item_box(i)).size]
            items = []
            for item, box in boxes:
                assert item.tensor_data is not None
                key = f"{item.index.fqn}@{','.join(map(str, box.start))}"
                dtype = item.tensor_data.properties.dtype
                needed += box.size * dtype.itemsize
                items.append((TensorInfo(key, box.shape, dtype), partial(planner.resolve_data, item)))
                stored = StoredBox(box=box, part=plan.storage_data, key=key)
                results.append(WriteResult(item.index, 0, _Written(box=stored)))
            if items:
                info = write_part(self.temp / plan.storage_data, items)
                part = _Written(part=(plan.storage_data, info))
                results.append(WriteResult(MetadataIndex(plan.storage_data), 0, part))
        except BaseException as e:
            self._give_up(e, needed)
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [(r.index.fqn, r.storage_data) for rank in results for r in rank]
        boxes: dict[str, list[StoredBox]] = {}
        for name, w in written:
            if w.box is not None:
                boxes.setdefault(name, []).append(w.box)
        tensors = {}
        values = {name: w.value for name, w in written if w.box is None and w.part is None}
        for name, md in metadata.state_dict_metadata.items():
            if isinstance(md, TensorStorageMetadata):
                stored = tuple(sorted(boxes.get(name, []), key=lambda b: b.box))
                tensors[name] = StoredTensor(md.properties.dtype, tuple(md.size), stored)
        parts = dict(w.part for _, w in written if w.part is not None)
        try:
            for name, t in tensors.items():
                check_cover(name, t.shape, [b.box for b in t.boxes])
            for part, info in parts.items():
                file = self.temp / part
                if not file.is_file() or file.stat().st_size != info.bytes:
                    raise UserError(
                        f"{file} is not where the coordinator can see it; all ranks must write to one shared "
                        f"file system: choose a folder that is mounted on every machine"
                    )
            manifest = Manifest(world_size=self.num_ranks, step=self.step, parts=parts, tensors=tensors, values=values)
            (self.temp / MANIFEST).write_bytes(dump_manifest(manifest))
            sync(self.temp / MANIFEST)
            # A crash between its two renames leaves the old folder, which `sweep` puts back.
            replace_folder(self.temp, self.path, hidden(self.path, OLD))
        except BaseException as e:
            self._give_up(e)
            raise

    def _give_up(self, error: BaseException, needed: int = 0) -> None:
        """Remove what was written (DCP makes every rank raise when one does); explain a disk error."""
        if isinstance(error, FileNotFoundError) and not self.temp.exists():
            raise GoneError(
                f"{self.temp} vanished or is not visible to this rank: another rank could not write, or "
                "the folder is not on a file system that all ranks share"
            ) from error
        explained = io_error(self.path, error, needed) if isinstance(error, OSError) else None
        shutil.rmtree(self.temp, ignore_errors=True)
        if explained is not None:
            raise explained from error


def _value_result(item: WriteItem, planner: SavePlanner) -> WriteResult:
    """A non-tensor as JSON. The planner would hand over a pickle, so the object itself is looked up."""
    name = item.index.fqn
    if not hasattr(planner, "lookup_object"):
        raise UserError(
            f"{name!r} is not a tensor and {type(planner).__name__} can only pickle it; use the default one"
        )
    value = encode_value(name, planner.lookup_object(item.index))
    return WriteResult(item.index, 0, _Written(value=value))


class SafeReader(StorageReader):
    """`torch.distributed.checkpoint.load(state, storage_reader=SafeReader(path))`.

    The constructor reads and checks the manifest and the sizes of the parts; loading checks the checksum of
    every part that any rank reads, each part once, shared out over the ranks. All failures are UserErrors;
    after one the tensors given to `load` may be half filled.
    """

    listed_in, kind = MANIFEST, FORMAT

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id).absolute()
            self.manifest = read_manifest(self.path, self.listed_in, self.kind)
            self._boxes = {(n, b.box.start): b for n, t in self.manifest.tensors.items() for b in t.boxes}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / MANIFEST).is_file()

    def read_metadata(self, *args: Any) -> Metadata:
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in self.manifest.values}
        for name, t in self.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(b.box.start), torch.Size(b.box.shape)) for b in t.boxes]
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=t.dtype), torch.Size(t.shape), chunks)
        return Metadata(entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def _box(self, index: MetadataIndex) -> StoredBox:
        return self._boxes[index.fqn, tuple(index.offset or ())]

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Share out the parts that are needed at all, so that each is hashed by one rank."""
        needed = {self._box(i.storage_index).part for p in plans for i in p.items if i.type == LoadItemType.TENSOR}
        shares = split_parts({n: self.manifest.parts[n].bytes for n in needed}, len(plans))
        return [dataclasses.replace(p, storage_data=share) for p, share in zip(plans, shares, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.verify(plan.storage_data or ())
        tensors: list[tuple[Any, Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                # DCP's planner takes a pickle here: this one is made in memory, from the JSON value.
                buffer = io.BytesIO()
                torch.save(decode_value(self.manifest.values[item.storage_index.fqn]), buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
            else:
                tensors.append((item, planner.resolve_tensor(item).detach()))
        self.fill(
            (item.storage_index.fqn, held, Box.at(_sum(held.start, item.storage_offsets), item.lengths), target)
            for item, target in tensors
            for held in [self._box(item.storage_index).box]
        )
        for item, target in tensors:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def stored(self, name: str, box: Box) -> StoredBox:
        return self._boxes[name, box.start]

    @torch.no_grad()
    def fill(self, pieces: Iterable[tuple[str, Box, Box, Tensor]]) -> None:
        """Read `box` of a tensor from the stored box `held` into a target of its shape: (name, held, box, target)."""
        by_part: dict[str, list[tuple[StoredBox, Box, Tensor]]] = {}
        for name, held, box, target in pieces:
            stored = self.stored(name, held)
            by_part.setdefault(stored.part, []).append((stored, box, target))
        for part, found in by_part.items():
            with self.open_part(part) as f:
                for stored, box, target in found:
                    inside = box.slices(stored.box)
                    values = f.get_slice(stored.key)[inside] if inside else f.get_tensor(stored.key)
                    if tuple(values.shape) != tuple(target.shape):
                        raise UserError(f"{self.path / part} does not hold what {MANIFEST} says; it was changed")
                    target.copy_(values)

    def open_part(self, part: str) -> Any:
        try:
            return safe_open(self.path / part, framework="pt")
        except (SafetensorError, OSError) as e:
            raise UserError(f"{self.path / part} is not a safetensors file ({e}); {ADVICE}") from e

    def verify(self, parts: Iterable[str] | None = None) -> None:
        """Check bytes, names, shapes and dtypes of the parts (default: all) against the manifest."""
        for part in sorted(self.manifest.parts if parts is None else parts):
            file, info = self.path / part, self.manifest.parts[part]
            digest = hashlib.sha256()
            try:
                with file.open("rb", buffering=0) as f:
                    while chunk := f.read(CHUNK):
                        digest.update(chunk)
            except OSError as e:
                raise UserError(f"cannot read {file} ({e.strerror or e}); {ADVICE}") from e
            if digest.hexdigest() != info.sha256:
                raise UserError(f"{file} is damaged: its checksum is not the one in {MANIFEST}; {ADVICE}")
            self._verify_header(part)

    def _verify_header(self, part: str) -> None:
        expected = {
            b.key: (t.dtype, b.box.shape) for t in self.manifest.tensors.values() for b in t.boxes if b.part == part
        }
        with self.open_part(part) as f:
            if set(f.keys()) != set(expected):
                odd = sorted(set(f.keys()) ^ set(expected))[:3]
                raise UserError(f"{self.path / part} does not hold the tensors of {MANIFEST}: {odd}; {ADVICE}")
            for key, (dtype, shape) in expected.items():
                held = f.get_slice(key)
                if DTYPES.get(held.get_dtype()) != dtype or tuple(held.get_shape()) != shape:
                    raise UserError(
                        f"{self.path / part}: {key!r} is {held.get_dtype()} {held.get_shape()}, {MANIFEST} "
                        f"says {DTYPE_NAMES[dtype]} {list(shape)}; {ADVICE}"
                    )


class HostReader(SafeReader):
    """One host's share of a checkpoint; levels/restore.py puts the shares of all hosts together."""

    listed_in, kind = HOST_MANIFEST, HOST_FORMAT


def _sum(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


ADVICE = "delete this checkpoint and use an earlier one"


def split_parts(sizes: dict[str, int], num_ranks: int) -> list[tuple[str, ...]]:
    """Share files out so that the ranks hash about as many bytes: largest first, to the least loaded."""
    shares: list[list[str]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += sizes[name]
    return [tuple(s) for s in shares]
