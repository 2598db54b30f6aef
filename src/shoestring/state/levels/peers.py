"""Peer replicas: the state of every rank is also in the memory of another host.

Each rank sends a committed version to a rank of the next host, chunk by chunk, over a gloo group and in a thread of its
own, so that neither training's collectives nor its order are touched. What arrives goes into an arena of the receiving
host (replica-....arena) under the same rules as a save: verified, then committed. The sender reads from its slot under
a shared lock. The rate is limited below what the link can do (half of what the first chunks measured, or `gbps`).

All ranks take part in every round in the same order; one that has nothing to send says so. A lost connection ends the
replication, not the training. Left out: XOR sets, which would need less memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.errors import UserError
from shoestring.host.arena import Arena, lock_file, room_for
from shoestring.host.checksums import damaged_chunks
from shoestring.state.levels.host_folder import ArenaCopy, arena_path, reading
from shoestring.state.levels.version import dump_index, parse_index

PIECE_BYTES = 4 << 20
PROBE_PIECES = 4  # sent at full speed, to see what the link can do
SHARE = 0.5  # of the measured bandwidth that replication takes at most


def holders(hosts: Sequence[str]) -> list[int]:
    """For every rank the rank that keeps its replica: the same place on the next host."""
    order = list(dict.fromkeys(hosts))
    ranks = {host: [r for r, one in enumerate(hosts) if one == host] for host in order}
    found = []
    for rank, host in enumerate(hosts):
        there = ranks[order[(order.index(host) + 1) % len(order)]]
        found.append(there[ranks[host].index(rank) % len(there)])
    return found


class RateLimit:
    """Waits so that no more than `rate` bytes a second pass, once it is known."""

    def __init__(self, gbps: float | None) -> None:
        self.rate = None if gbps is None else gbps * 1e9 / 8
        self._ready_at = 0.0

    def measured(self, num_bytes: int, seconds: float) -> None:
        if self.rate is None and seconds > 0:
            self.rate = SHARE * num_bytes / seconds

    def wait(self, num_bytes: int) -> None:
        if self.rate is None:
            return
        now = time.monotonic()
        self._ready_at = max(self._ready_at, now) + num_bytes / self.rate
        time.sleep(max(0.0, self._ready_at - now - num_bytes / self.rate))


class PeerReplicas:
    """One rank's side of the replication. `begin` starts a round, on every rank; `succeeded` is of the last one."""

    def __init__(
        self, folder: Path, rank: int, hosts: Sequence[str], gbps: float | None, timeout_s: float = 600.0
    ) -> None:
        self.folder, self.rank, self.world_size = folder, rank, len(hosts)
        self.holder = holders(hosts)[rank]
        self.sources = [r for r, h in enumerate(holders(hosts)) if h == rank]
        self.limit = RateLimit(gbps)
        self.error: str | None = None
        self.seconds = 0.0  # of the last round
        self.succeeded = False
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(2)

    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, committed: Callable[[], ArenaCopy | None]) -> None:
        """`committed` waits for this rank's commit and returns its copy, or None where it failed."""
        assert not self.busy()

        def work() -> None:
            began = time.monotonic()
            self.succeeded = False
            try:
                self.succeeded = self._round(committed())
            except Exception as error:  # a peer that is gone: training will notice by itself
                self.error = f"{type(error).__name__}: {error}"
            self.seconds = time.monotonic() - began

        # A daemon: a peer that never answers must not keep this process from ending.
        self._thread = threading.Thread(target=work, daemon=True, name="shoestring-peers")
        self._thread.start()

    def _round(self, mine: ArenaCopy | None) -> bool:
        with contextlib.ExitStack() as stack:
            arena = stack.enter_context(reading(mine)) if mine is not None else None
            index = b"" if arena is None or mine is None else json.dumps(dump_index(mine.copy)).encode()
            total = 0 if arena is None or mine is None else mine.copy.num_bytes
            headers = self._exchange_headers(index, total)
            receivers = [_Receiver(self.folder, r, self.world_size, headers[r], self._pool) for r in self.sources]
            for receiver in receivers:
                stack.callback(receiver.close)
            view = arena.slot_view(mine.slot) if arena is not None and mine is not None else None
            try:
                mine_bytes = torch.frombuffer(view, dtype=torch.uint8) if view is not None else None
                longest = max([total, *(r.total for r in receivers)])
                for number, at in enumerate(range(0, longest, PIECE_BYTES)):
                    self._piece(number, at, total, mine_bytes, receivers)
                del mine_bytes
            finally:
                if view is not None:
                    view.release()
            stored = [r.finish() for r in receivers]
        return bool(all(stored) and total)

    def _exchange_headers(self, index: bytes, total: int) -> dict[int, tuple[bytes, int]]:
        sizes = {r: torch.zeros(2, dtype=torch.int64) for r in self.sources}
        self._transfer([(torch.tensor([len(index), total]), self.holder)], [(t, r) for r, t in sizes.items()])
        texts = {r: torch.zeros(int(t[0]), dtype=torch.uint8) for r, t in sizes.items()}
        outgoing = [(torch.frombuffer(bytearray(index), dtype=torch.uint8), self.holder)] if index else []
        self._transfer(outgoing, [(t, r) for r, t in texts.items() if t.numel()])
        return {r: (texts[r].numpy().tobytes(), int(sizes[r][1])) for r in self.sources}

    def _piece(self, number: int, at: int, total: int, mine: Tensor | None, receivers: Sequence[_Receiver]) -> None:
        outgoing = [] if mine is None or at >= total else [(mine[at : min(at + PIECE_BYTES, total)], self.holder)]
        incoming = [(r.room(at), r.rank) for r in receivers if at < r.total]
        moved = sum(t.numel() for t, _ in (*outgoing, *incoming))
        if number >= PROBE_PIECES:
            self.limit.wait(moved)
        began = time.monotonic()
        self._transfer(outgoing, incoming)
        if number < PROBE_PIECES:
            self.limit.measured(moved, time.monotonic() - began)

    def _transfer(self, outgoing: Sequence[tuple[Tensor, int]], incoming: Sequence[tuple[Tensor, int]]) -> None:
        works = [dist.irecv(t, src=r, group=self._group) for t, r in incoming]
        works += [dist.isend(t, dst=r, group=self._group) for t, r in outgoing]
        for work in works:
            if work is not None:
                work.wait()


class _Receiver:
    """What one rank sends, into an arena of this host. Where there is no room, it is received and dropped."""

    def __init__(
        self, folder: Path, rank: int, world_size: int, header: tuple[bytes, int], pool: ThreadPoolExecutor
    ) -> None:
        self.rank, (text, self.total), self._pool = rank, header, pool
        self._arena: Arena | None = None
        self._slot = 0
        self._lock = contextlib.ExitStack()
        self._dropped = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        self._bytes: Tensor | None = None
        if not self.total:
            return
        self._index: dict[str, Any] = json.loads(text)
        self._copy = parse_index(self._index, self.total, f"the replica of rank {rank}")
        self._arena = self._open(arena_path(folder, rank, world_size, replica=True), len(text))
        if self._arena is None:
            return
        versions = self._arena.versions()
        self._sequence = 1 + max((v.sequence for v in versions), default=0)
        self._slot = 1 - versions[0].slot if versions else 0
        if not self._lock.enter_context(lock_file(self._arena.lock_path(self._slot), fcntl.LOCK_EX)):
            self._arena.close()
            self._arena = None
            return
        self._arena.erase(self._slot)
        self._view = self._arena.slot_view(self._slot)
        self._bytes = torch.frombuffer(self._view, dtype=torch.uint8)

    def _open(self, path: Path, index_bytes: int) -> Arena | None:
        if path.exists():
            with contextlib.suppress(UserError):
                arena = Arena.open(path)
                if arena.slot_bytes >= self.total and arena.index_bytes >= index_bytes:
                    return arena
                arena.close()
        if room_for(path.parent, 2 * self.total) is not None:
            return None
        arena = Arena.create(path, 4 * index_bytes + (1 << 20), self.total)
        try:
            for slot in (0, 1):
                arena.touch(slot, self._pool)
        except OSError:  # somebody else took the room
            arena.close()
            path.unlink(missing_ok=True)
            return None
        return arena

    def room(self, at: int) -> Tensor:
        size = min(PIECE_BYTES, self.total - at)
        return self._dropped[:size] if self._bytes is None else self._bytes[at : at + size]

    def finish(self) -> bool:
        """Verify what came and commit it."""
        if self._arena is None:
            return False
        view = self._arena.slot_view(self._slot)[: self.total]
        bad = damaged_chunks(view, self._copy.chunks, self._pool, self._copy.chunk_bytes, self._copy.algorithm)
        view.release()
        if not bad:
            self._arena.commit(self._slot, self._sequence, self._copy.step, self._index)
        return not bad

    def close(self) -> None:
        self._lock.close()
        self._bytes = None
        if self._arena is not None:
            with contextlib.suppress(BufferError):
                self._view.release()
            self._arena.close()
