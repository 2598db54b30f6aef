"""The memory level of one rank: copies of the training state in the slots of its arena.

`save` starts a copy and returns; on a GPU the copies run on a stream of their own, straight into pinned slots, while
the next forward and backward pass computes. Parameters and optimizer state must not change until they are copied:
the compute stream waits for the copies before the optimizer's next step (`wait_copied`), not earlier. What may change
before that (buffers, residuals) is copied first, and the compute stream waits for this part at once. A background
thread then sums the chunks, writes the index and commits.

On a CPU the copy is a plain one and `save` returns after it. Left out: which rank saves what
(division.py), and when (measured.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.host.arena import Arena
from shoestring.host.checksums import CHUNK_BYTES, checksums
from shoestring.state.levels.host_folder import ArenaCopy, arena_files
from shoestring.state.levels.version import HeldBox, HeldCopy, dump_index, parse_index

ALIGN = 256  # bytes between which boxes begin
REGION_BYTES = 1 << 30  # pinned at a time: the driver holds up launches of kernels while it pins


def local_tensor(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t.detach()


def lay_out(boxes: Sequence[HeldBox]) -> tuple[HeldBox, ...]:
    """The boxes one behind the other in a slot."""
    placed, at = [], 0
    for held in boxes:
        placed.append(replace(held, offset=at))
        at += -(-held.num_bytes // ALIGN) * ALIGN
    return tuple(placed)


def forget_newer(place: Path, step: int) -> None:
    """Erase the versions in memory of a future that the run did not resume from; several processes may do it at
    once."""
    for path in arena_files(place):
        with contextlib.suppress(UserError):  # one that nobody can open holds no version
            arena = Arena.open(path)
            for version in arena.versions():
                if version.step > step:
                    arena.erase(version.slot)
            arena.close()


@dataclass
class _Pending:
    slot: int
    step: int
    done: Future[float]  # seconds from the call of save to the commit


class MemoryLevel:
    """The arena of one rank, and the saves into it. Close it before the process ends."""

    def __init__(
        self, path: Path, device: torch.device, *, threads: int = 4, num_slots: int = 2, least_slots: int = 2
    ) -> None:
        """`num_slots` for a new arena; an existing one is used where it has at least `least_slots`."""
        self.path, self.device, self.num_slots, self.least_slots = path, device, num_slots, least_slots
        self.kept_slot: int | None = None  # holds the newest version that the peers have, too
        self.arena: Arena | None = None
        self.safe_slot: int | None = None  # holds the newest version that every rank has committed
        self.sequence = 0
        self._sequences: dict[int, int] = {}  # of what was last written to each slot
        self.skipped = 0
        self.stall_s = 0.0  # of the last save: host time, and what the compute stream waited for copies
        self._pending: _Pending | None = None
        self._settled: _Pending | None = None  # the one before, where every rank has it
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shoestring-memory")
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="shoestring-commit")
        self._touched: list[Future[None]] = []
        self._registered: list[int] = []
        self._slots: list[Tensor] = []
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: Any = None  # event: everything is copied
        self._waits: list[tuple[Any, Any]] = []

    # -- the arena -------------------------------------------------------------------------------------------

    def open_existing(self) -> bool:
        """Use the arena of an earlier life of this rank; False where there is none that fits."""
        if not self.path.exists():
            return False
        try:
            self.arena = Arena.open(self.path)
        except UserError:
            return False
        self._sequences = {v.slot: v.sequence for v in self.arena.versions()}
        self.sequence = max(self._sequences.values(), default=0)
        return True

    def fit(self, num_bytes: int, index_bytes: int) -> bool:
        """Make room for a state of this size. False where the arena is there already and large enough."""
        there = self.arena
        if (
            there is not None
            and there.num_slots >= self.least_slots
            and there.slot_bytes >= num_bytes
            and there.index_bytes >= index_bytes
        ):
            self.num_slots = there.num_slots  # a new file would be without the versions of this one
            if not self._touched:
                self._start_touching()
            return False
        self.wait()
        if self.arena is not None:
            self._release()
        self.safe_slot = self.kept_slot = None
        self._sequences.clear()
        self.arena = Arena.create(self.path, 4 * index_bytes + (1 << 20), num_bytes, self.num_slots)
        self._start_touching()
        return True

    def _start_touching(self) -> None:
        """Pages and pins, in the background: the first touch runs at 4 GB/s, and the first save does not pay for it."""
        assert self.arena is not None
        arena = self.arena
        whole = torch.frombuffer(arena.map, dtype=torch.uint8)
        self._slots = [whole[arena.slot_begin(i) :][: arena.slot_bytes] for i in range(self.num_slots)]

        def touch(slot: int) -> None:
            arena.touch(slot, self._pool)
            if self.device.type == "cuda":
                self._pin(self._slots[slot])

        # One after the other, the slot that is written first being the first.
        first = self._free_slots()[0]
        for slot in sorted(range(self.num_slots), key=lambda s: s != first):
            self._touched.append(self._commits.submit(touch, slot))

    def _pin(self, slot: Tensor) -> None:
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            for at in range(0, slot.numel(), REGION_BYTES):
                pointer = slot.data_ptr() + at
                error = cudart.cudaHostRegister(pointer, min(REGION_BYTES, slot.numel() - at), 0)
                if int(error) != 0:
                    warnings.warn(f"memory copies are not pinned (CUDA error {int(error)}): saves stall", stacklevel=2)
                    return
                self._registered.append(pointer)

    def touched(self) -> bool:
        """Whether the first save can begin."""
        return bool(self._touched) and all(f.done() and f.exception() is None for f in self._touched)

    def no_room(self) -> str | None:
        """Why the arena has no pages: tmpfs, which looked large enough, was filled by somebody else meanwhile."""
        errors = (f.exception() for f in self._touched if f.done())
        return next((f"{self.path.parent}: {error}" for error in errors if error is not None), None)

    def wait_touched(self) -> None:
        """Until the pages are there, or could not be had."""
        wait(self._touched)

    def touch_now(self) -> None:
        """Wait for the pages; raises what went wrong."""
        for future in self._touched:
            future.result()

    @property
    def has_pending(self) -> bool:
        return self._pending is not None

    @property
    def newest_step(self) -> int | None:
        """The step of the last save, under way or settled; None where it failed."""
        newest = self._pending or self._settled
        return None if newest is None else newest.step

    def watch_commit(self) -> tuple[int, Callable[[], ArenaCopy | None]]:
        """(slot of the last save, a function for another thread that waits for its commit and says what it is)."""
        pending, arena = self._pending or self._settled, self.arena
        assert pending is not None and arena is not None

        def committed_copy() -> ArenaCopy | None:
            wait([pending.done])
            version = None if pending.done.exception() is not None else arena.version(pending.slot)
            if version is None or version.step != pending.step:
                return None
            held = parse_index(version.index, arena.slot_bytes, str(self.path))
            return ArenaCopy(self.path, pending.slot, version.sequence, held)

        return pending.slot, committed_copy

    # -- saving ----------------------------------------------------------------------------------------------

    def _free_slots(self) -> list[int]:
        """The slots that may be written next: neither the safe one nor the one that the peers have, oldest first."""
        free = (s for s in range(self.num_slots) if s not in (self.safe_slot, self.kept_slot))
        return sorted(free, key=lambda s: self._sequences.get(s, -1))

    def _lock_free_slot(self) -> tuple[int, int] | None:
        """(slot, descriptor that holds it) of the oldest free slot that nobody reads."""
        assert self.arena is not None
        for slot in self._free_slots():
            if (lock := _try_lock(self.arena.lock_path(slot))) is not None:
                return slot, lock
        return None

    def committed(self) -> bool:
        """Whether the last save is committed here: True where none is under way and none failed."""
        return self._pending is None or (self._pending.done.done() and self._pending.done.exception() is None)

    def failure(self) -> BaseException | None:
        return None if self._pending is None or not self._pending.done.done() else self._pending.done.exception()

    def commit_s(self) -> float:
        """Seconds from the call of the last save to its commit; 0 where it is not committed."""
        return self._pending.done.result() if self._pending is not None and self.committed() else 0.0

    def settle(self, everywhere: bool) -> None:
        """Take note of the finished save: with `everywhere` its slot is the safe one now."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._settled = pending if everywhere else None
            self.safe_slot = pending.slot if everywhere else self.safe_slot

    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done.done()

    def writable(self) -> bool:
        """Whether a save could begin now: nothing under way, pages there, a slot that nobody reads."""
        if self.busy() or not self.touched():
            return False
        locked = self._lock_free_slot()
        if locked is not None:
            os.close(locked[1])
        return locked is not None

    def save(self, copy: HeldCopy, tensors: Mapping[str, Tensor], early: Callable[[str], bool]) -> None:
        """Copy the boxes of `copy` from the tensors of their names. `early(name)`: may change before the optimizer's
        next step. Call only when `writable` on every rank and the last save is settled."""
        began = time.perf_counter()
        assert self.arena is not None and self._pending is None
        locked = self._lock_free_slot()
        if locked is None:  # a reader came since: this rank has no copy of the version
            self.skipped += 1
            failed: Future[float] = Future()
            failed.set_exception(RuntimeError("the slot is being read"))
            self._pending = _Pending(self._free_slots()[0], copy.step, failed)
            return
        slot, lock = locked
        self.arena.erase(slot)
        ordered = sorted(copy.boxes, key=lambda b: not early(b.name))
        num_early = sum(early(b.name) for b in ordered)
        self._copy(slot, ordered, num_early, tensors)
        self.sequence += 1
        self._sequences[slot] = self.sequence
        commit = self._commits.submit(self._commit, slot, self.sequence, copy, lock, began, self._copied)
        self._pending = _Pending(slot, copy.step, commit)
        self.stall_s = time.perf_counter() - began + self._waited()

    def _copy(self, slot: int, boxes: Sequence[HeldBox], num_early: int, tensors: Mapping[str, Tensor]) -> None:
        target = self._slots[slot]
        if self._stream is None:
            for held in boxes:
                _copy_bytes(local_tensor(tensors[held.name]), target, held, non_blocking=False)
            return
        compute = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            for held in boxes[:num_early]:
                _copy_bytes(local_tensor(tensors[held.name]), target, held, non_blocking=True)
            early = self._stream.record_event()
            for held in boxes[num_early:]:
                _copy_bytes(local_tensor(tensors[held.name]), target, held, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)
        if num_early:
            compute.wait_event(early)

    def wait_copied(self) -> None:
        """Before anything changes parameters or optimizer state: later work on the compute stream waits for copies."""
        if self._copied is None:
            return
        compute = torch.cuda.current_stream(self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(compute)
        compute.wait_event(self._copied)
        end.record(compute)
        self._waits.append((begin, end))
        self._copied = None

    def _waited(self) -> float:
        """Seconds that the compute stream has waited for the copies of earlier saves."""
        done = [(a, b) for a, b in self._waits if b.query()]
        self._waits = [pair for pair in self._waits if pair not in done]
        return sum(a.elapsed_time(b) for a, b in done) / 1e3

    def _commit(self, slot: int, sequence: int, copy: HeldCopy, lock: int, began: float, copied: Any) -> float:
        assert self.arena is not None
        try:
            if copied is not None:
                copied.synchronize()
            view = self.arena.slot_view(slot)[: copy.num_bytes]
            chunks = checksums(view, self._pool, CHUNK_BYTES, self.arena.algorithm)
            view.release()
            summed = replace(copy, chunks=tuple(chunks), chunk_bytes=CHUNK_BYTES, algorithm=self.arena.algorithm)
            self.arena.commit(slot, sequence, copy.step, dump_index(summed))
        finally:
            os.close(lock)
        return time.perf_counter() - began

    def wait(self) -> None:
        """Until the save under way is committed (or has failed). The time is part of its stall."""
        if self._pending is not None:
            began = time.perf_counter()
            wait([self._pending.done])
            self.stall_s += time.perf_counter() - began

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.wait()
        for future in self._touched:
            future.cancel()
        self._commits.shutdown()
        self._pool.shutdown()
        if self.arena is not None:
            self._release()

    def _release(self) -> None:
        assert self.arena is not None
        for future in self._touched:
            with contextlib.suppress(Exception):
                future.result()
        if self._stream is not None:
            self._stream.synchronize()
        for pointer in self._registered:
            torch.cuda.cudart().cudaHostUnregister(pointer)
        self._registered.clear()
        self._touched.clear()
        self._slots.clear()
        self.arena.close()
        self.arena = None


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the file exclusively, or None."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _copy_bytes(source: Tensor, slot: Tensor, held: HeldBox, *, non_blocking: bool) -> None:
    """The bytes of a local tensor into its place in the slot, in pieces that do not cross regions pinned apart."""
    assert source.numel() == held.box.size, (held, source.shape)
    if source.device.type == "cpu" and source.numel() == 1:  # counters of an optimizer: thousands of them
        ctypes.memmove(slot.data_ptr() + held.offset, source.data_ptr(), held.num_bytes)
        return
    flat = source.contiguous().reshape(-1).view(torch.uint8)
    at, end = held.offset, held.offset + held.num_bytes
    while at < end:
        stop = min(end, (at // REGION_BYTES + 1) * REGION_BYTES)
        slot[at:stop].copy_(flat[at - held.offset : stop - held.offset], non_blocking=non_blocking)
        at = stop


def hold_alive(path: Path) -> int:
    """A lock that says this trainer lives; the system drops it when the process ends."""
    fd = _try_lock(path)
    deadline = time.monotonic() + 10
    while fd is None and time.monotonic() < deadline:  # the agent looks now and then
        time.sleep(0.01)
        fd = _try_lock(path)
    if fd is None:
        from shoestring.errors import UserError

        raise UserError(f"{path} is held by another trainer of this run: stop it first")
    return fd


def is_held(path: Path, fd: int) -> bool:
    """Whether the file is still the one that `hold_alive` locked: an agent that ends deletes its folder, and may not
    have seen the trainer that has just come."""
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(fd))
    return False
