"""Arena files: two slots and two records, of which one is always whole; damaged and foreign files are refused."""

from __future__ import annotations

import fcntl
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoestring.errors import UserError
from shoestring.host import arena as arena_module
from shoestring.host.arena import PAGE, Arena, IndexTooLargeError, is_locked, lock_file, own_folder, room_for
from shoestring.host.checksums import RunningSum, checksum, checksums, damaged_chunks
from shoestring.mesh import Mesh
from shoestring.state.boxes import Box
from shoestring.state.files import DTYPE_NAMES
from shoestring.state.levels import restore
from shoestring.state.levels.drain import drain, target_of
from shoestring.state.levels.host_folder import arena_path, list_copies
from shoestring.state.levels.restore import choose, fill_tensors, offers_here
from shoestring.state.levels.version import (
    ITEM_BYTES,
    HeldBox,
    HeldCopy,
    dump_index,
    missing_of,
    parse_index,
    sum_of_names,
)


def test_a_version_outlives_the_arena_object(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a.arena", 1000, 5000)
    with ThreadPoolExecutor(2) as pool:
        arena.touch(0, pool)
        arena.touch(1, pool)
    assert arena.versions() == []
    arena.slot_view(1)[:4] = b"abcd"
    arena.commit(1, 7, 100, {"x": 1})
    arena.commit(0, 8, 101, {"x": 2})
    arena.close()
    again = Arena.open(tmp_path / "a.arena")
    assert [(v.slot, v.sequence, v.step, v.index) for v in again.versions()] == [
        (0, 8, 101, {"x": 2}),
        (1, 7, 100, {"x": 1}),
    ]
    assert bytes(again.slot_view(1)[:4]) == b"abcd"
    again.erase(0)
    assert [v.step for v in again.versions()] == [100]
    with pytest.raises(IndexTooLargeError):
        again.commit(0, 9, 102, {"x": "y" * (again.index_bytes + 1)})
    assert [v.step for v in again.versions()] == [100]
    again.close()


def test_a_record_with_any_byte_changed_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    arena = Arena.create(path, 300, 100)
    arena.commit(0, 1, 5, {"n": 5})
    arena.commit(1, 2, 6, {"n": 6})
    arena.close()
    whole = path.read_bytes()[: 4 * PAGE]
    begins = {"record": PAGE, "index": 3 * PAGE}
    for name, size in (("record", 64), ("index", 7)):
        for at in range(size):
            with path.open("r+b") as file:
                file.write(whole)
                file.seek(begins[name] + at)
                file.write(bytes([whole[begins[name] + at] ^ 0x10]))
            opened = Arena.open(path)
            assert [v.step for v in opened.versions()] == [6], (name, at)
            opened.close()


def test_foreign_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    Arena.create(path, 100, 100).close()
    good = path.read_bytes()
    draw = random.Random(0)
    for case in range(40):
        data = bytearray(good[: draw.choice([0, 7, 30, 50, 4096, len(good)])])
        if len(data) > 40:
            data[draw.randrange(40)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"a\.arena"):
            Arena.open(path)
        assert case >= 0
    path.unlink()
    (tmp_path / "other").write_bytes(good)
    path.symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="cannot open"):
        Arena.open(path)


def test_readers_and_writers_exclude_each_other(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path / "a.arena", 100, 100)
    with arena.reading(0) as one, arena.reading(0) as two:
        assert one and two
        with lock_file(arena.lock_path(0), fcntl.LOCK_EX) as writer:
            assert not writer
    with lock_file(arena.lock_path(0), fcntl.LOCK_EX) as writer, arena.reading(0) as reader:
        assert writer and not reader
        assert is_locked(arena.lock_path(0)) and not is_locked(arena.lock_path(1))
    arena.close()


def test_folders_and_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_folder(tmp_path / "mine")
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(UserError, match="another user or is not a folder"):
        own_folder(tmp_path / "link")
    assert room_for(tmp_path, 1) is None
    assert "the copies of the state need" in (room_for(tmp_path, 1 << 60) or "")
    monkeypatch.setattr(arena_module, "available_memory", lambda: 10)
    assert "of memory free" in (room_for(tmp_path, 100) or "")


def test_checksums_name_the_damaged_chunk() -> None:
    data = bytearray(random.Random(0).randbytes(1000))
    with ThreadPoolExecutor(2) as pool:
        for algorithm in ("xxh3", "crc32"):
            sums = checksums(memoryview(bytes(data)), pool, 300, algorithm)
            assert len(sums) == 4 and sums[0] == checksum(bytes(data[:300]), algorithm)
            running = RunningSum(algorithm)
            for at in range(0, 300, 70):
                running.add(memoryview(data)[at : min(at + 70, 300)])
            assert running.digest() == sums[0]
            bad = bytearray(data)
            bad[650] ^= 1
            assert damaged_chunks(memoryview(bytes(bad)), sums, pool, 300, algorithm) == [(600, 900)]
            assert len(damaged_chunks(memoryview(bytes(data)), sums[:2], pool, 300, algorithm)) == 4
    with pytest.raises(UserError, match="unknown checksum"):
        checksum(b"", "md5")


def copy_of(rank: int = 0, boxes: tuple[HeldBox, ...] = (), **changes: object) -> HeldCopy:
    names = {"a": ("F32", (4, 2)), "b": ("U8", (3,))}
    fields = {"step": 5, "life": "0a", "rank": rank, "world_size": 2, "host": "h", "names_sum": sum_of_names(names)}
    return HeldCopy(**{**fields, "boxes": boxes, **changes})  # type: ignore[arg-type]


A0 = HeldBox("a", "F32", (4, 2), Box((0, 0), (2, 2)), 0)
A1 = HeldBox("a", "F32", (4, 2), Box((2, 0), (4, 2)), 0)
B = HeldBox("b", "U8", (3,), Box((0,), (3,)), 256)


def test_copies_are_complete_together() -> None:
    assert missing_of([copy_of(0, (A0, B)), copy_of(1, (A1,))]) is None
    assert "a from" in (missing_of([copy_of(0, (A0, B))]) or "")
    assert "some rank" in (missing_of([copy_of(0, (A0,)), copy_of(1, (A1,))]) or "")  # nobody has b
    assert missing_of([]) == "there is none"
    assert "different states" in (missing_of([copy_of(0, (A0, B)), copy_of(1, (A1,), names_sum="other")]) or "")


def test_shares_of_two_hosts_on_disk_are_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host writes what it holds; together they are complete, one alone is not."""
    w, n = torch.arange(8.0).reshape(4, 2), torch.tensor([7, 8, 9], dtype=torch.uint8)
    checkpoints = tmp_path / "checkpoints"
    with ThreadPoolExecutor(1) as pool:
        for rank, (host, boxes) in enumerate({"x": (A0, B), "y": (A1,)}.items()):
            copy = copy_of(rank, boxes, host=host, values={"step": 5})
            arena = Arena.create(arena_path(own_folder(tmp_path / host), rank, 2), 2000, 1000)
            rows = w[2 * rank : 2 * rank + 2].contiguous()
            arena.slot_view(0)[:16] = rows.numpy().tobytes()
            arena.slot_view(0)[256:259] = n.numpy().tobytes()
            data = arena.slot_view(0)[: copy.num_bytes]
            sums = tuple(checksums(data, pool, copy.chunk_bytes, arena.algorithm))
            data.release()
            arena.commit(0, 1, 5, dump_index(replace(copy, chunks=sums, algorithm=arena.algorithm)))
            arena.close()
            entries = list_copies(tmp_path / host)[0]
            target = target_of(entries, checkpoints, host)
            assert target == checkpoints / "hosts" / host / "step-00000005"
            drain(entries, target, pool)
            choice = choose(offers_here(tmp_path / "no", [checkpoints], "x")[0])
            assert (choice is None) == (rank == 0)
    assert choice is not None
    filled = {"a": torch.zeros(4, 2), "b": torch.zeros(3, dtype=torch.uint8)}
    used, damaged = fill_tensors(filled, choice, Mesh(0, 1, torch.device("cpu")), "x")
    assert torch.equal(filled["a"], w) and torch.equal(filled["b"], n) and used == {"disk": 35} and not damaged
    # A folder that the agent deletes while it is looked at is no copy, and no error either.
    with monkeypatch.context() as patch:
        patch.setattr(restore, "open_folder", lambda path: (path / "gone").read_bytes())
        assert offers_here(tmp_path / "no", [checkpoints], "x") == ([], [])
    shutil.rmtree(checkpoints / "hosts" / "y")
    with pytest.raises(UserError, match=r"step 5 cannot be used: no checkpoint at .*no such folder"):
        fill_tensors(filled, choice, Mesh(0, 1, torch.device("cpu")), "x")


def test_an_index_is_checked_field_by_field() -> None:
    good = dump_index(copy_of(0, (A0, B), chunks=("00" * 8,), values={"v": 1}))
    assert parse_index(good, 1000, "here") == copy_of(0, (A0, B), chunks=("00" * 8,), values={"v": 1})
    box = good["boxes"][0]
    bad_boxes = [
        ["a", "F33", [4, 2], [0, 0], [2, 2], 0],
        ["a", ["F32"], [4, 2], [0, 0], [2, 2], 0],
        ["a", "F32", [4, 2], [0, 0], [5, 2], 0],
        ["a", "F32", [4, 2], [0, 0], [0, 2], 0],
        ["a", "F32", [4], [0, 0], [2, 2], 0],
        ["a", "F32", [4, 2], [0, 0], [2, 2], -1],
        ["a", "F32", [4, 2], [0, 0], [2, 2], 10**6],
        ["a", "F32", [2**61, 2**61], [0, 0], [2**61, 2**61], 0],
        ["a", "F32"],
        None,
    ]
    changes = [{"boxes": [b]} for b in bad_boxes] + [
        {"boxes": [box, ["z", *box[1:]]]},  # two in one place
        {"step": -1},
        {"life": "../x"},
        {"rank": True},
        {"chunks": []},
        {"chunk_bytes": 0},
        {"levels": "disk"},
        {"values": []},
        {"extra": 1},
    ]
    for change in changes:
        with pytest.raises(UserError, match="here"):
            parse_index({**good, **change}, 1000, "here")


def test_element_sizes_are_those_of_torch() -> None:
    assert {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()} == ITEM_BYTES
