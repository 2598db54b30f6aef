"""Copies of every rank's state in the memory of other hosts: rounds of a thread, whole replicas, the rate limit.

When a version is committed, the ranks exchange it in a round, chunk by chunk, over a gloo group and in a thread of its
own, so that neither training's collectives nor its order are touched. The whole state of a rank goes to a rank of the
next host. What arrives goes into an arena of the receiving host under the same rules as a save: verified, then
committed. The sender reads from its slot under a shared lock. The rate is limited below what the link can do (half of
what the first pieces measured, or `gbps`).

All ranks take part in every round in the same order; one that has nothing to send says so. A lost connection ends the
rounds, not the training.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

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
LEAST_PIECE = 1 << 20  # bytes; less (headers) passes at once, and says nothing about the bandwidth
NUM_SLOTS = 2  # of the arena of a replica
SHARE = 0.5  # of the measured bandwidth that replication takes at most
Key = tuple[int, str]  # step and life of a version


def holders(hosts: Sequence[str]) -> list[int]:
    """For every rank the rank that keeps its replica: the same place on the next host."""
    order = list(dict.fromkeys(hosts))
    ranks = {host: [r for r, one in enumerate(hosts) if one == host] for host in order}
    found = []
    for rank, host in enumerate(hosts):
        there = ranks[order[(order.index(host) + 1) % len(order)]]
        found.append(there[ranks[host].index(rank) % len(there)])
    return found


# -- links -----------------------------------------------------------------------------------------------------


class PeerLink(Protocol):
    """Moves tensors of bytes between ranks; every rank names what it sends and what it expects."""

    def transfer(self, outgoing: Sequence[tuple[Tensor, int]], incoming: Sequence[tuple[Tensor, int]]) -> None: ...


class GroupLink:
    """Over a process group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def transfer(self, outgoing: Sequence[tuple[Tensor, int]], incoming: Sequence[tuple[Tensor, int]]) -> None:
        works = [dist.irecv(t, src=r, group=self._group) for t, r in incoming]
        works += [dist.isend(t, dst=r, group=self._group) for t, r in outgoing]
        for work in works:
            if work is not None:
                work.wait()


class RateLimit:
    """Waits so that no more than `rate` bytes a second pass, once it is known."""

    def __init__(self, gbps: float | None) -> None:
        self.rate = None if gbps is None else gbps * 1e9 / 8
        self._probes = PROBE_PIECES if gbps is None else 0  # that may still tell the rate
        self._ready_at = 0.0

    def measured(self, num_bytes: int, seconds: float) -> None:
        """The fastest of the first pieces counts: others may have waited for a peer that made room for its slot."""
        if self._probes and seconds > 0:
            self._probes -= 1
            self.rate = max(self.rate or 0.0, SHARE * num_bytes / seconds)

    def wait(self, num_bytes: int) -> None:
        if self.rate is None:
            return
        now = time.monotonic()
        self._ready_at = max(self._ready_at, now) + num_bytes / self.rate
        time.sleep(max(0.0, self._ready_at - now - num_bytes / self.rate))


class LimitedLink:
    """A link whose pieces of a round, after the first few, pass no faster than the limit."""

    def __init__(self, link: PeerLink, limit: RateLimit) -> None:
        self.link, self.limit = link, limit
        self._pieces = 0

    def transfer(self, outgoing: Sequence[tuple[Tensor, int]], incoming: Sequence[tuple[Tensor, int]]) -> None:
        moved = sum(t.nbytes for t, _ in (*outgoing, *incoming))
        if moved < LEAST_PIECE:
            self.link.transfer(outgoing, incoming)
            return
        if self._pieces >= PROBE_PIECES:
            self.limit.wait(moved)
        began = time.monotonic()
        self.link.transfer(outgoing, incoming)
        if self._pieces < PROBE_PIECES:
            self.limit.measured(moved, time.monotonic() - began)
        self._pieces += 1


def exchange_headers(
    link: PeerLink, index: bytes, total: int, to: Sequence[int], sources: Sequence[int]
) -> dict[int, tuple[bytes, int]]:
    """(index, bytes of the state) of every source; empty and 0 where it has nothing to send."""
    sizes = {r: torch.zeros(2, dtype=torch.int64) for r in sources}
    mine = torch.tensor([len(index), total])
    link.transfer([(mine, r) for r in to], [(t, r) for r, t in sizes.items()])
    texts = {r: torch.zeros(int(t[0]), dtype=torch.uint8) for r, t in sizes.items()}
    outgoing = [(torch.frombuffer(bytearray(index), dtype=torch.uint8), r) for r in to] if index else []
    link.transfer(outgoing, [(t, r) for r, t in texts.items() if t.numel()])
    return {r: (texts[r].numpy().tobytes(), int(sizes[r][1])) for r in sources}


@contextlib.contextmanager
def slot_to_send(mine: ArenaCopy | None) -> Iterator[tuple[bytes, int, Tensor | None]]:
    """(index, number of bytes, bytes) of this rank's committed copy, kept from being overwritten; nothing for None."""
    if mine is None:
        yield b"", 0, None
        return
    with reading(mine) as arena:
        if arena is None:
            yield b"", 0, None
            return
        view = arena.slot_view(mine.slot)
        try:
            index = json.dumps(dump_index(mine.copy)).encode()
            yield index, mine.copy.num_bytes, torch.frombuffer(view, dtype=torch.uint8)
        finally:
            with contextlib.suppress(BufferError):  # a tensor still looks at it: released when that is gone
                view.release()


# -- where it goes -----------------------------------------------------------------------------------------------


class PeerSlot:
    """A slot for what peers send, in an arena of this host. Without room for it `bytes` is None."""

    def __init__(
        self, path: Path, num_bytes: int, index_bytes: int, kept: Key | None, pool: ThreadPoolExecutor
    ) -> None:
        """`kept` is the version that all peers have: it is not overwritten. None: the newest is not."""
        self.num_bytes, self._pool = num_bytes, pool
        self._lock = contextlib.ExitStack()
        self.bytes: Tensor | None = None
        self.arena = self._open(path, index_bytes)
        if self.arena is None:
            return
        versions = self.arena.versions()
        self._sequence = 1 + max((v.sequence for v in versions), default=0)
        newest = versions[0].slot if versions else 1
        keep = next((v.slot for v in versions if (v.step, v.index.get("life")) == kept), newest)
        self.slot = 1 - keep
        locked = self._lock.enter_context(lock_file(self.arena.lock_path(self.slot), fcntl.LOCK_EX))
        if not locked or not self._has_pages(self.arena):
            self.arena.close()
            self.arena = None
            return
        self.arena.erase(self.slot)
        self._view = self.arena.slot_view(self.slot)
        self.bytes = torch.frombuffer(self._view, dtype=torch.uint8)[:num_bytes]

    def _open(self, path: Path, index_bytes: int) -> Arena | None:
        if path.exists():
            with contextlib.suppress(UserError):
                arena = Arena.open(path)
                if arena.slot_bytes >= self.num_bytes and arena.index_bytes >= index_bytes:
                    return arena
                arena.close()
        if room_for(path.parent, NUM_SLOTS * self.num_bytes) is not None:
            return None
        arena = Arena.create(path, 4 * index_bytes + (1 << 20), self.num_bytes)
        try:
            for slot in range(NUM_SLOTS):
                arena.touch(slot, self._pool)
        except OSError:  # somebody else took the room
            arena.close()
            path.unlink(missing_ok=True)
            return None
        return arena

    def _has_pages(self, arena: Arena) -> bool:
        """A slot that never got its pages gets them now; False where there is no room for them."""
        if arena.has_pages(self.slot):
            return True
        if room_for(arena.path.parent, self.num_bytes) is not None:
            return False
        try:
            arena.touch(self.slot, self._pool)
        except OSError:
            return False
        return True

    def commit(self, step: int, index: dict[str, Any]) -> bool:
        """Verify what came, by the chunks that the index names, and commit it."""
        if self.arena is None:
            return False
        view = self.arena.slot_view(self.slot)[: self.num_bytes]
        bad = damaged_chunks(view, index["chunks"], self._pool, index["chunk_bytes"], index["algorithm"])
        view.release()
        if not bad:
            self.arena.commit(self.slot, self._sequence, step, index)
        return not bad

    def close(self) -> None:
        self._lock.close()
        self.bytes = None
        if self.arena is not None:
            with contextlib.suppress(BufferError):
                self._view.release()
            self.arena.close()


# -- rounds ------------------------------------------------------------------------------------------------------


class Replicas:
    """One rank's side of a round: its whole state goes to a rank of the next host."""

    def __init__(self, folder: Path, rank: int, hosts: Sequence[str]) -> None:
        self.folder, self.world_size = folder, len(hosts)
        self.holder = holders(hosts)[rank]
        self.sources = [r for r, h in enumerate(holders(hosts)) if h == rank]
        self._pool = ThreadPoolExecutor(2)

    def __call__(self, link: PeerLink, mine: ArenaCopy | None, kept: Key | None) -> bool:
        """True where everything that came is stored."""
        with contextlib.ExitStack() as stack:
            index, total, data = stack.enter_context(slot_to_send(mine))
            headers = exchange_headers(link, index, total, [self.holder], self.sources)
            slots = {r: self._slot(r, *header, kept) for r, header in headers.items() if header[1]}
            for slot in slots.values():
                stack.callback(slot.close)
            dropped = torch.empty(PIECE_BYTES, dtype=torch.uint8)
            for at in range(0, max([total, *(s.num_bytes for s in slots.values())]), PIECE_BYTES):
                outgoing = [(data[at : min(at + PIECE_BYTES, total)], self.holder)] if data is not None else []
                incoming = []
                for r, slot in slots.items():
                    stop = min(at + PIECE_BYTES, slot.num_bytes)
                    if at < stop:
                        incoming.append((dropped[: stop - at] if slot.bytes is None else slot.bytes[at:stop], r))
                link.transfer([(t, r) for t, r in outgoing if t.numel()], incoming)
            indexes: Mapping[int, dict[str, Any]] = {r: json.loads(headers[r][0]) for r in slots}
            stored = [slot.commit(indexes[r]["step"], indexes[r]) for r, slot in slots.items()]
            del data
        return bool(total) and len(stored) == len(self.sources) and all(stored)

    def _slot(self, rank: int, text: bytes, total: int, kept: Key | None) -> PeerSlot:
        parse_index(json.loads(text), total, f"the replica of rank {rank}")
        path = arena_path(self.folder, rank, self.world_size, "replica")
        return PeerSlot(path, total, len(text), kept, self._pool)


class PeerRounds:
    """Rounds in the background. `begin` starts one, on every rank; `succeeded` is of the last one."""

    def __init__(self, round_: Replicas, gbps: float | None, timeout_s: float = 600.0) -> None:
        self._round, self._limit = round_, RateLimit(gbps)
        self.error: str | None = None
        self.seconds = 0.0  # of the last round
        self.succeeded = False
        self._link = GroupLink(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
        self._thread: threading.Thread | None = None

    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until the round that runs is over."""
        if self._thread is not None:
            self._thread.join()

    def begin(self, committed: Callable[[], ArenaCopy | None], kept: Key | None = None) -> None:
        """`committed` waits for this rank's commit and returns its copy, or None where it failed; `kept` is the
        version that the last round that succeeded on every rank has brought."""
        assert not self.busy()

        def work() -> None:
            began = time.monotonic()
            self.succeeded = False
            try:
                self.succeeded = self._round(LimitedLink(self._link, self._limit), committed(), kept)
            except Exception as error:  # a peer that is gone: training will notice by itself
                self.error = f"{type(error).__name__}: {error}"
            self.seconds = time.monotonic() - began

        # A daemon: a peer that never answers must not keep this process from ending.
        self._thread = threading.Thread(target=work, daemon=True, name="shoestring-peers")
        self._thread.start()
