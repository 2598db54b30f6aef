"""Copies in memory become checkpoint folders on disk: what the agent does when a version is due, or the trainer died.

Where the copies of this host are the whole state, the result is an ordinary checkpoint folder, `step-00000100/` with
manifest.json. Where they are a share of it, it is `hosts/HOST/step-00000100/` with host.json; a version counts when the
shares of all hosts cover every tensor. Files are written beside the target, synced and renamed. Every chunk is verified
before it is written. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoestring.errors import UserError
from shoestring.host.arena import Arena
from shoestring.state.boxes import Box
from shoestring.state.checkpoint_files import (
    FORMAT,
    HOST_FORMAT,
    HOST_MANIFEST,
    MANIFEST,
    OLD,
    PartWriter,
    hidden,
    manifest_bytes,
    part_name,
    replace_folder,
    sync,
)
from shoestring.state.levels.host_folder import ArenaCopy, damage_of, reading
from shoestring.state.levels.version import ITEM_BYTES, LIFE, HeldBox, HeldCopy, missing_of

DRAINING = ".shoestring-drain-"  # not swept by the trainer, which may save at the same time
HOSTS = "hosts"
NAMES_SUM = "private@names_sum"  # of the whole state, in the share of a host


class DamagedCopyError(UserError):
    """The bytes of a copy in memory are not those that were saved: it can never be written."""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def target_of(entries: Sequence[ArenaCopy], checkpoints: Path, host: str) -> Path:
    """Where these copies go: an ordinary checkpoint where they are all of it."""
    name = step_name(entries[0].copy.step)
    whole = missing_of(e.copy for e in entries) is None
    return checkpoints / name if whole else checkpoints / HOSTS / host / name


def drain(entries: Sequence[ArenaCopy], target: Path, pool: ThreadPoolExecutor) -> int:
    """Write the copies of one version to `target`; the bytes written. UserError where a copy is gone or damaged."""
    whole = missing_of(e.copy for e in entries) is None
    temp = hidden(target, DRAINING)
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    try:
        with contextlib.ExitStack() as stack:
            parts: dict[str, tuple[int, str]] = {}
            tensors: dict[str, dict[str, Any]] = {}
            values: dict[str, Any] = {}
            for entry in entries:
                arena = stack.enter_context(reading(entry))
                if arena is None:
                    raise UserError(f"{entry.path} has another version by now")
                if (damage := damage_of(arena, entry, pool)) is not None:
                    raise DamagedCopyError(damage)
                values.update(entry.copy.values)
                _write_part(arena, entry, temp, parts, tensors)
            values |= {LIFE: entries[0].copy.life}
            if not whole:
                values |= {NAMES_SUM: entries[0].copy.names_sum}
        name, kind = (MANIFEST, FORMAT) if whole else (HOST_MANIFEST, HOST_FORMAT)
        copy = entries[0].copy
        (temp / name).write_bytes(manifest_bytes(copy.world_size, copy.step, parts, tensors, values, kind))
        sync(temp / name)
        replace_folder(temp, target, hidden(target, OLD))
        return sum(size for size, _ in parts.values())
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise


def _write_part(
    arena: Arena, entry: ArenaCopy, folder: Path, parts: dict[str, tuple[int, str]], tensors: dict[str, dict[str, Any]]
) -> None:
    part = part_name(entry.copy.rank)
    while part in parts:  # the replica of a rank that is here too
        part = part_name(int(part[5:-12]) + entry.copy.world_size)
    chosen: list[HeldBox] = []
    for held in entry.copy.boxes:
        known = tensors.setdefault(held.name, {"dtype": held.dtype, "shape": list(held.shape), "boxes": []})
        if not held.box.size:  # a tensor without elements is named, and has no box
            continue
        where = {"start": list(held.box.start), "stop": list(held.box.stop)}
        if any(b["start"] == where["start"] and b["stop"] == where["stop"] for b in known["boxes"]):
            continue  # another rank of this host holds the same
        key = f"{held.name}@{','.join(map(str, held.box.start))}"
        known["boxes"].append({**where, "part": part, "key": key})
        chosen.append(held)
    if not chosen:
        return
    # Larger elements first: then every tensor is aligned to its element size without padding.
    chosen.sort(key=lambda b: (-ITEM_BYTES[b.dtype], b.name))
    view = arena.slot_view(entry.slot)
    writer = None
    try:
        entries = [(f"{b.name}@{','.join(map(str, b.box.start))}", b.dtype, b.box.shape, b.num_bytes) for b in chosen]
        writer = PartWriter(folder / part, entries)
        for held in chosen:
            writer.add_bytes(view[held.offset : held.offset + held.num_bytes])
        writer.close()
        parts[part] = (writer.num_bytes, writer.sha256)
    finally:
        view.release()
        if writer is not None:
            writer.abandon()


# -- shares of hosts -----------------------------------------------------------------------------------------


def share_copy(manifest: dict[str, Any]) -> HeldCopy:
    """What the host manifest says that its folder holds."""
    boxes = tuple(
        HeldBox(name, tensor["dtype"], tuple(tensor["shape"]), box)
        for name, tensor in manifest["tensors"].items()
        for box in _boxes(tensor)
    )
    values = manifest["values"]
    return HeldCopy(manifest["step"], values[LIFE], 0, manifest["world_size"], "", values[NAMES_SUM], boxes)


def _boxes(tensor: dict[str, Any]) -> list[Box]:
    if 0 in tensor["shape"]:
        return [Box.full(tensor["shape"])]
    return [Box(tuple(box["start"]), tuple(box["stop"])) for box in tensor["boxes"]]


def newest_complete_share(checkpoints: Path) -> int | None:
    """The newest step of which the shares of all hosts, as far as they can be seen here, are everything.

    With many hosts manifests are many megabytes: those of steps before the newest complete one are not read."""
    found: dict[int, list[Path]] = defaultdict(list)
    for path in (checkpoints / HOSTS).glob("*/step-*"):
        if path.name[5:].isdigit():  # not one that was set aside
            found[int(path.name[5:])].append(path / HOST_MANIFEST)
    for step in sorted(found, reverse=True):
        shares: dict[str, list[HeldCopy]] = defaultdict(list)  # by life
        for path in found[step]:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                copy = share_copy(json.loads(path.read_bytes()))
                if copy.step == step:
                    shares[copy.life].append(copy)
        if any(missing_of(copies) is None for copies in shares.values()):
            return step
    return None
