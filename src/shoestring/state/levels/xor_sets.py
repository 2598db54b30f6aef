"""XOR sets: the state of a lost host is computed from what the other hosts of its set hold.

A set is k ranks on k hosts. The bytes of each rank's slot, padded with zeros to the longest of the set, are cut into
k - 1 segments, one for every other member. Member i keeps the XOR of the segments that the others have for it:

    parity_i = XOR over j != i of segment(j, for i)         so each host keeps 1/(k - 1) of a state, not a whole one

When member j is lost, its segment for i is parity_i XOR the segments that the remaining members have for i. The parity
also keeps the index of every member, so the result is verified chunk by chunk like any other copy and becomes a replica
on one of the hosts; from there restore.py goes on as usual. A set survives the loss of one host. A set of two is a
plain replica. The same bytes travel as for replicas; memory is what is saved. (SCR's XOR scheme.)
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.host.arena import Arena, SlotVersion
from shoestring.host.checksums import CHUNK_BYTES, checksums, damaged_chunks
from shoestring.mesh import Mesh
from shoestring.state.levels.host_folder import ArenaCopy, arena_files, arena_path, kind_of, read_versions
from shoestring.state.levels.peers import PIECE_BYTES, Key, PeerLink, PeerSlot, exchange_headers, slot_to_send
from shoestring.state.levels.restore import Offer, choose, everyone
from shoestring.state.levels.version import HeldCopy, parse_index

FORMAT, VERSION = "shoestring-parity", 1
MOST_MEMBERS = 64
_KEYS = {"format", "version", "step", "life", "position", "members", "world_size", "segment_bytes", "indexes"}
_KEYS |= {"algorithm", "chunk_bytes", "chunks"}


# -- arithmetic ----------------------------------------------------------------------------------------------------


def xor_sets(hosts: Sequence[str], size: int) -> list[tuple[int, ...]]:
    """The ranks in sets of `size` hosts: same place on each host. A last host alone joins the set before it."""
    order = list(dict.fromkeys(hosts))
    ranks = [[r for r, one in enumerate(hosts) if one == host] for host in order]
    if len({len(some) for some in ranks}) > 1:
        counts = ", ".join(f"{host}: {len(some)}" for host, some in zip(order, ranks, strict=True))
        raise UserError(
            f"levels.peer=xor needs as many processes on every host, and there are {counts}; use levels.peer=replica"
        )
    groups = [ranks[at : at + size] for at in range(0, len(ranks), size)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        last = groups.pop()
        groups[-1] += last
    return [members for group in groups for members in zip(*group, strict=True)]


def segment_number(member: int, holder: int) -> int:
    """Which segment of a member goes into the parity of a holder (positions in the set)."""
    return holder if holder < member else holder - 1


def segment_size(totals: Sequence[int]) -> int:
    """Bytes of a segment where the members have so many bytes."""
    return max(1, -(-max(totals) // (len(totals) - 1)))


def segment_span(member: int, holder: int, size: int, total: int) -> tuple[int, int]:
    """(begin, end) of that segment in the member's bytes; what is padding is left out."""
    begin = segment_number(member, holder) * size
    return min(begin, total), min(begin + size, total)


# -- a parity in an arena --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parity:
    """What a rank keeps of its set, in one slot of one arena. Without the indexes it travels between ranks."""

    host: str
    path: str
    slot: int
    sequence: int
    step: int
    life: str
    position: int  # of the holder in the set
    members: tuple[int, ...]  # ranks
    world_size: int
    segment_bytes: int

    @property
    def key(self) -> Key:
        return self.step, self.life


def parse_parity(index: Mapping[str, Any], most_bytes: int, where: str) -> list[HeldCopy]:
    """The checked indexes of the members; UserError for anything that a writer would not have written."""

    def bad(what: str) -> UserError:
        return UserError(f"{where} {what}; it is damaged or was made by something else, and is not used")

    if index.get("format") != FORMAT or set(index) != _KEYS or index["version"] != VERSION:
        raise bad("is not the index of a parity of this version")
    numbers = ("step", "position", "world_size", "segment_bytes", "chunk_bytes")
    if not all(type(index[key]) is int and 0 <= index[key] < 2**62 for key in numbers) or not index["chunk_bytes"]:
        raise bad("has a bad number")
    members = index["members"]
    if not isinstance(members, list) or not 2 <= len(members) <= MOST_MEMBERS or index["position"] >= len(members):
        raise bad("has a bad set")
    if not all(type(r) is int and 0 <= r < index["world_size"] for r in members) or len(set(members)) < len(members):
        raise bad("has a bad set")
    if index["segment_bytes"] > most_bytes:
        raise bad("is longer than its slot")
    chunks = index["chunks"]
    if not isinstance(chunks, list) or len(chunks) != -(-index["segment_bytes"] // index["chunk_bytes"]):
        raise bad("does not have one checksum per chunk")
    if not isinstance(index["indexes"], list) or len(index["indexes"]) != len(members):
        raise bad("does not have one index per member")
    if not all(isinstance(one, dict) for one in index["indexes"]):
        raise bad("has a bad index of a member")
    most = index["segment_bytes"] * (len(members) - 1)
    copies = [parse_index(one, most, f"{where}, member {n}") for n, one in enumerate(index["indexes"])]
    if [c.rank for c in copies] != members or any(c.key != (index["step"], index["life"]) for c in copies):
        raise bad("has indexes of other ranks or versions")
    return copies


def list_parities(folder: Path, host: str) -> tuple[list[Parity], list[str]]:
    """(parities in the memory of this host, what is wrong with files that cannot be used)."""

    def read(path: Path, slot_bytes: int, version: SlotVersion) -> Parity:
        index = version.index
        parse_parity(index, slot_bytes, f"{path}, slot {version.slot}")
        fields = {key: index[key] for key in ("step", "life", "position", "world_size", "segment_bytes")}
        return Parity(host, str(path), version.slot, version.sequence, **fields, members=tuple(index["members"]))

    return read_versions((p for p in arena_files(folder) if kind_of(p) == "parity"), read)


def parity_damage(parity: Parity, pool: ThreadPoolExecutor) -> str | None:
    """What is wrong with the bytes of a parity; None where they are those that were summed."""
    with _open(parity.path, parity.slot, parity.sequence) as arena:
        version = arena.version(parity.slot)
        assert version is not None
        view = arena.slot_view(parity.slot)[: parity.segment_bytes]
        index = version.index
        bad = damaged_chunks(view, index["chunks"], pool, index["chunk_bytes"], index["algorithm"])
        view.release()
    return f"{parity.path}: {len(bad)} damaged chunks of slot {parity.slot}" if bad else None


@contextlib.contextmanager
def _open(path: str, slot: int, sequence: int) -> Iterator[Arena]:
    """The arena, whose slot nobody overwrites inside; UserError where it is not there any more."""
    arena = Arena.open(Path(path))
    try:
        with arena.reading(slot) as held:
            version = arena.version(slot) if held else None
            if version is None or version.sequence != sequence:
                raise UserError(f"{path} was overwritten meanwhile")
            yield arena
    finally:
        arena.close()


# -- making them -----------------------------------------------------------------------------------------------------


class XorRound:
    """One rank's side of a round (peers.py): every member sends a segment to every other, and keeps their XOR."""

    def __init__(self, folder: Path, rank: int, hosts: Sequence[str], size: int) -> None:
        self.folder, self.rank, self.world_size = folder, rank, len(hosts)
        self.members = next(members for members in xor_sets(hosts, size) if rank in members)
        self.position = self.members.index(rank)
        self._pool = ThreadPoolExecutor(2)

    def __call__(self, link: PeerLink, mine: ArenaCopy | None, kept: Key | None) -> bool:
        others = [r for r in self.members if r != self.rank]
        with contextlib.ExitStack() as stack:
            index, total, data = stack.enter_context(slot_to_send(mine))
            headers = {self.rank: (index, total), **exchange_headers(link, index, total, others, others)}
            totals = [headers[r][1] for r in self.members]
            if not all(
                headers[r][0] for r in self.members
            ):  # the same on every member: a parity without one of them would be of no use
                return False
            assert data is not None
            size = segment_size(totals)
            texts = [headers[r][0] for r in self.members]
            path = arena_path(self.folder, self.rank, self.world_size, "parity")
            slot = PeerSlot(path, size, sum(map(len, texts)) + 4096 + 20 * (size // CHUNK_BYTES), kept, self._pool)
            stack.callback(slot.close)
            arrived = {r: torch.empty(min(PIECE_BYTES, size), dtype=torch.uint8) for r in others}
            for at in range(0, size, PIECE_BYTES):
                outgoing, incoming = [], []
                for n, r in enumerate(self.members):
                    if r == self.rank:
                        continue
                    begin, end = _piece(segment_span(self.position, n, size, total), at)
                    outgoing += [(data[begin:end], r)] if begin < end else []
                    begin, end = _piece(segment_span(n, self.position, size, totals[n]), at)
                    incoming += [(arrived[r][: end - begin], r)] if begin < end else []
                link.transfer(outgoing, incoming)
                if slot.bytes is not None:
                    slot.bytes[at : at + PIECE_BYTES].zero_()
                    for t, _ in incoming:
                        xor_into(slot.bytes[at : at + t.numel()], t)
            del data, outgoing
            return self._commit(slot, size, [json.loads(text) for text in texts])

    def _commit(self, slot: PeerSlot, size: int, indexes: list[dict[str, Any]]) -> bool:
        if slot.arena is None:
            return False
        view = slot.arena.slot_view(slot.slot)[:size]
        chunks = checksums(view, self._pool, CHUNK_BYTES, slot.arena.algorithm)
        view.release()
        index = {
            "format": FORMAT,
            "version": VERSION,
            "step": indexes[0]["step"],
            "life": indexes[0]["life"],
            "position": self.position,
            "members": list(self.members),
            "world_size": self.world_size,
            "segment_bytes": size,
            "algorithm": slot.arena.algorithm,
            "chunk_bytes": CHUNK_BYTES,
            "chunks": chunks,
            "indexes": indexes,
        }
        parse_parity(index, slot.arena.slot_bytes, "the parity of this set")
        slot.write(index["step"], index)
        return True


def _piece(span: tuple[int, int], at: int) -> tuple[int, int]:
    """The part of a span that begins `at` bytes after its begin, no longer than a piece."""
    return min(span[0] + at, span[1]), min(span[0] + at + PIECE_BYTES, span[1])


def xor_into(target: Tensor, other: Tensor) -> None:
    """target ^= other. numpy releases the interpreter's lock meanwhile."""
    np.bitwise_xor(target.numpy(), other.numpy(), out=target.numpy())


# -- computing what is lost --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class XorSource:
    """Bytes [begin, end) of a slot that belong into the XOR of a segment, from its begin on."""

    host: str
    path: str
    slot: int
    sequence: int
    begin: int
    end: int


@dataclass(frozen=True)
class Rebuild:
    """How the state of one lost rank comes back: for each segment of it, what is XORed, and who puts it together."""

    rank: int
    world_size: int
    segment_bytes: int
    position: int  # of the lost rank in its set
    segments: tuple[tuple[XorSource, ...], ...]
    maker: Parity  # the host of this parity does it; its index has that of the lost rank

    @property
    def sources(self) -> set[XorSource]:
        return {s for some in self.segments for s in some}


def plan_rebuilds(offers: Iterable[Offer], parities: Iterable[Parity]) -> list[Rebuild]:
    """What has to be computed for the newest version that is complete then; nothing where that is no newer than what
    there is already."""
    offers = list(offers)
    best = choose(offers)
    versions: dict[Key, list[Parity]] = defaultdict(list)
    for parity in parities:
        versions[parity.key].append(parity)
    for key in sorted(versions, reverse=True):
        if best is not None and key <= (best.step, best.life):
            return []
        held = {o.copy.rank: o for o in offers if o.source == "memory" and o.copy.key == key}
        lost = [r for r in range(versions[key][0].world_size) if r not in held]
        found = [_rebuild(r, held, versions[key]) for r in lost]
        if found and all(found):
            return [one for one in found if one is not None]
    return []


def _rebuild(lost: int, held: Mapping[int, Offer], parities: Sequence[Parity]) -> Rebuild | None:
    """None where the rank is in no set, or its set has lost more than this member."""
    members = next((p.members for p in parities if lost in p.members), ())
    kept = {p.position: p for p in parities if p.members == members}
    alive = [n for n, r in enumerate(members) if r != lost]
    if not alive or any(n not in kept or members[n] not in held for n in alive):
        return None
    j, size = members.index(lost), kept[alive[0]].segment_bytes
    segments: list[tuple[XorSource, ...]] = [()] * (len(members) - 1)
    for holder in alive:
        parity = kept[holder]
        some = [XorSource(parity.host, parity.path, parity.slot, parity.sequence, 0, size)]
        for n in (n for n in alive if n != holder):
            o = held[members[n]]
            span = segment_span(n, holder, size, o.copy.num_bytes)
            some.append(XorSource(o.host, o.path, o.slot, o.sequence, *span))
        segments[segment_number(j, holder)] = tuple(some)
    maker = kept[alive[(j + lost) % len(alive)]]  # the ranks of a lost host come back on different hosts
    return Rebuild(lost, maker.world_size, size, j, tuple(segments), maker)


class RebuildStep:
    """One host's side of a rebuild. `open`, then `move`, then `finish`; close it in any case."""

    def __init__(self, plan: Rebuild, host: str, first_rank: Mapping[str, int]) -> None:
        """`first_rank`: of every host the rank that reads and sends for it."""
        self.plan, self.host, self.first_rank = plan, host, first_rank
        self.makes = plan.maker.host == host
        self._stack = contextlib.ExitStack()
        self._bytes: dict[XorSource, Tensor] = {}
        self._target: PeerSlot | None = None
        self._index: dict[str, Any] = {}
        self._total = 0

    def open(self) -> None:
        """UserError where a source is gone, or there is no room for the result."""
        for source in self.plan.sources:
            if source.host == self.host:
                arena = self._stack.enter_context(_open(source.path, source.slot, source.sequence))
                whole = torch.frombuffer(arena.slot_view(source.slot), dtype=torch.uint8)
                self._bytes[source] = whole[source.begin : source.end]
        if not self.makes:
            return
        maker = self.plan.maker
        with _open(maker.path, maker.slot, maker.sequence) as arena:
            version = arena.version(maker.slot)
            assert version is not None
            copies = parse_parity(version.index, arena.slot_bytes, maker.path)
            self._index = version.index["indexes"][self.plan.position]
            self._total = copies[self.plan.position].num_bytes
        path = arena_path(Path(maker.path).parent, self.plan.rank, self.plan.world_size, "replica")
        pool = self._stack.enter_context(ThreadPoolExecutor(2))
        # One slot: the file is deleted when the peers have a newer version.
        self._target = PeerSlot(path, self._total, len(json.dumps(self._index)), None, pool, slots=1)
        self._stack.callback(self._target.close)
        if self._target.bytes is None:
            raise UserError(f"there is no room for {path} ({self._total:,} bytes)")

    def move(self, link: PeerLink) -> None:
        """Every host sends the XOR of what it holds of a piece; the maker adds them up."""
        size, maker = self.plan.segment_bytes, self.plan.maker.host
        for number, sources in enumerate(self.plan.segments):
            hosts = sorted({s.host for s in sources} - {maker})
            for at in range(0, size, PIECE_BYTES):
                length = min(PIECE_BYTES, size - at)
                mine = self._local(sources, at, length)
                if not self.makes:
                    if self.host in hosts:
                        link.transfer([(mine, self.first_rank[maker])], [])
                    continue
                arrived = [(torch.empty(length, dtype=torch.uint8), self.first_rank[host]) for host in hosts]
                link.transfer([], arrived)
                for t, _ in arrived:
                    xor_into(mine, t)
                begin, end = min(number * size + at, self._total), min(number * size + at + length, self._total)
                assert self._target is not None and self._target.bytes is not None
                self._target.bytes[begin:end] = mine[: end - begin]

    def _local(self, sources: Sequence[XorSource], at: int, length: int) -> Tensor:
        total = torch.zeros(length, dtype=torch.uint8)
        for source in sources:
            if source.host == self.host:
                part = self._bytes[source][at : at + length]
                xor_into(total[: part.numel()], part)
        return total

    def finish(self) -> None:
        """Verify and commit the result; UserError where some source was damaged."""
        if self._target is not None and not self._target.commit(self._index["step"], self._index):
            raise UserError(
                f"rank {self.plan.rank} of step {self._index['step']} cannot be computed: a copy is damaged"
            )

    def close(self) -> None:
        self._bytes.clear()
        self._stack.close()


def rebuild_lost(
    mesh: Mesh, host: str, hosts: Sequence[str], places: Sequence[Path], offers: Iterable[Offer], link: PeerLink | None
) -> tuple[list[int], list[str]]:
    """(ranks whose state was computed and is a replica on some host now, what went wrong). Every rank calls it."""
    first_rank = {one: hosts.index(one) for one in hosts}
    reads = first_rank[host] == mesh.rank
    here = [list_parities(place, host) for place in places] if reads else []
    plans = plan_rebuilds(offers, everyone(mesh, [p for some, _ in here for p in some]))
    done: list[int] = []
    problems = everyone(mesh, [line for _, lines in here for line in lines])
    for plan in plans:
        step = RebuildStep(plan, host, first_rank)
        try:
            problem = everyone(mesh, _problem(step.open) if reads else [])
            if not problem:
                if reads:
                    step.move(link if link is not None else _NoLink())
                problem = everyone(mesh, _problem(step.finish) if reads else [])
        finally:
            step.close()
        problems += problem
        done += [] if problem else [plan.rank]
    return done, problems


class _NoLink:
    """The link of a job of one rank, which has nobody to talk to."""

    def transfer(self, outgoing: Sequence[tuple[Tensor, int]], incoming: Sequence[tuple[Tensor, int]]) -> None:
        assert not outgoing and not incoming


def _problem(action: Callable[[], None]) -> list[str]:
    try:
        action()
    except (UserError, OSError) as error:
        return [str(error)]
    return []
