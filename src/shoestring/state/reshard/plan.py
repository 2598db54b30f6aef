"""The plan: every transfer between two layouts, in order, the same on every rank.

Each bundle of unit tasks becomes

    a copy       where a receiver holds the box already
    a transfer   inside a host, over its fast links, where a rank of that host holds it
    a transfer   between hosts: one sender, then a chain through the receiving hosts. A host's link is crossed once;
                 the rank that takes it in hands it on inside its host. Where every rank has an interface of its own
                 and several ranks of a host want the same bytes, these are cut into one stripe per rank, and the ranks
                 exchange stripes over the fast links (a local all-gather).

`operations(rank)` is what one rank has to do, in order. A plan is made once, is plain data (`to_json`, `digest`) and
is replayed as often as the layouts stay the same. No torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from shoestring.errors import UserError, shown
from shoestring.json_files import Fields
from shoestring.state.boxes import Box
from shoestring.state.reshard.layouts import BoxLayout, Layout, MeshLayout, Placement
from shoestring.state.reshard.schedule import Job, JobSchedule, greedy
from shoestring.state.reshard.tasks import Bundle, MovedTensor, Piece, TensorClass, bundles_of, classes_of, cut_bundle
from shoestring.state.reshard.topology import Topology

VERSION = 1
MOST_AXES = 16  # of a mesh
STRIPE_BYTES = 1 << 16  # smaller stripes are not worth a message
SPLIT_JOBS = 512  # at most, after bundles were split to balance the senders
SPLIT_GAIN = 0.98  # a split must shorten the makespan at least to this share

Kind = Literal["send", "chain", "gather", "local"]


@dataclass(frozen=True)
class Transfer:
    """`hops` (from, to), a rank's own arrival before what it hands on; all carry the same bytes."""

    kind: Kind
    hops: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    num_bytes: int
    start: float = 0.0
    stop: float = 0.0

    @property
    def sender(self) -> int:
        return self.hops[0][0]

    @property
    def receivers(self) -> tuple[int, ...]:
        return tuple(to for _, to in self.hops)


class Operation(NamedTuple):
    kind: Literal["copy", "send", "receive"]
    transfer: int  # its number in the plan; of a copy, its place among `copies`
    peer: int


@dataclass(frozen=True)
class ReshardPlan:
    classes: tuple[TensorClass, ...]
    copies: tuple[tuple[int, tuple[Piece, ...]], ...]  # (rank, what it keeps)
    transfers: tuple[Transfer, ...]
    topology: Topology = field(default_factory=Topology)
    bound: float = 0.0  # seconds that no plan for this topology beats
    optimal: bool = False  # proven: no order and choice of senders of these transfers is faster

    @property
    def makespan(self) -> float:
        return max((t.stop for t in self.transfers), default=0.0)

    @property
    def num_bytes(self) -> int:
        """Bytes that arrive somewhere, over any link."""
        return sum(t.num_bytes * len(t.hops) for t in self.transfers)

    @property
    def slow_bytes(self) -> int:
        """Bytes that cross between hosts."""
        host = self.topology.host
        return sum(t.num_bytes for t in self.transfers for a, b in t.hops if host(a) != host(b))

    def link_bytes(self) -> dict[tuple[str, str], int]:
        """Bytes per (interface that sends, interface that receives)."""
        links: dict[tuple[str, str], int] = {}
        for t in self.transfers:
            for a, b in t.hops:
                if self.topology.host(a) != self.topology.host(b):
                    key = self.topology.interface(a), self.topology.interface(b)
                    links[key] = links.get(key, 0) + t.num_bytes
        return dict(sorted(links.items()))

    @property
    def ranks(self) -> list[int]:
        found = {rank for rank, _ in self.copies}
        for t in self.transfers:
            found.update(rank for hop in t.hops for rank in hop)
        return sorted(found)

    def operations(self, rank: int) -> list[Operation]:
        """What `rank` does, in order: copies, then its part of each transfer."""
        out = [Operation("copy", i, rank) for i, (owner, _) in enumerate(self.copies) if owner == rank]
        for i, t in enumerate(self.transfers):
            for a, b in t.hops:
                if b == rank:
                    out.append(Operation("receive", i, a))
                elif a == rank:
                    out.append(Operation("send", i, b))
        return out

    def tensors_of(self, pieces: Sequence[Piece]) -> Iterator[tuple[str, Box]]:
        """(name, box) for everything in `pieces`, in the order in which it travels."""
        for index, box in pieces:
            for name in self.classes[index].names:
                yield name, box

    # -- files ------------------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        layouts: dict[Layout, int] = {}
        for kind in self.classes:
            for layout in (kind.info.src, kind.info.dst):
                layouts.setdefault(layout, len(layouts))
        return {
            "version": VERSION,
            "topology": self.topology.to_json(),
            "bound": self.bound,
            "optimal": self.optimal,
            "layouts": [layout_to_json(layout) for layout in layouts],
            "classes": [
                [list(k.info.shape), k.info.itemsize, layouts[k.info.src], layouts[k.info.dst], list(k.names)]
                for k in self.classes
            ],
            "copies": [[rank, _pieces_to_json(pieces)] for rank, pieces in self.copies],
            "transfers": [
                [t.kind, [list(h) for h in t.hops], _pieces_to_json(t.pieces), t.num_bytes, t.start, t.stop]
                for t in self.transfers
            ],
        }

    @property
    def digest(self) -> str:
        """Equal on every rank that made the same plan. Times are left out: they do not change what is moved."""
        data = self.to_json()
        moved = [data["layouts"], data["classes"], data["copies"], [t[:4] for t in data["transfers"]]]
        return hashlib.blake2b(json.dumps(moved).encode(), digest_size=16).hexdigest()


# -- making a plan ----------------------------------------------------------------------------------------------


def make_plan(tensors: Mapping[str, MovedTensor], topology: Topology | None = None, *, seed: int = 0) -> ReshardPlan:
    topology = topology or Topology()
    classes = tuple(classes_of(tensors))
    bundles = bundles_of(classes)
    copies, routes = routes_of(bundles, topology, classes)
    limit = wire_bound(bundles, topology)
    best = greedy([job for job, _ in routes], seed)
    parts = 2
    while best.makespan > limit / SPLIT_GAIN and len(routes) * parts <= SPLIT_JOBS and parts <= 8:
        cut = [piece for route in routes for piece in _split_route(route, parts, classes)]
        times = greedy([job for job, _ in cut], seed)
        if times.makespan < best.makespan * SPLIT_GAIN:
            return assemble(classes, copies, cut, times, topology, limit)
        parts *= 2
    return assemble(classes, copies, routes, best, topology, limit)


class PlanCache:
    """Plans by what they were made of; the latest few."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._plans: dict[object, ReshardPlan] = {}

    def plan(self, tensors: Mapping[str, MovedTensor], topology: Topology | None = None) -> ReshardPlan:
        key = frozenset(tensors.items()), repr(topology)
        if key not in self._plans:
            while len(self._plans) >= self._most:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = make_plan(tensors, topology)
        return self._plans[key]


@dataclass(frozen=True)
class Route:
    """A way to carry out a bundle; the sender is chosen by the schedule."""

    kind: Kind
    bundle: Bundle
    senders: tuple[int, ...]  # one rank per sending resource
    hops: tuple[tuple[int, int], ...]  # the first one starts at `senders`, and is stored as (-1, to)


Copies = list[tuple[int, tuple[Piece, ...]]]  # (rank, what it keeps)
Routed = tuple[Job, Route]


def routes_of(
    bundles: Sequence[Bundle], topology: Topology, classes: Sequence[TensorClass]
) -> tuple[Copies, list[Routed]]:
    """What ranks keep, and a way for everything else."""
    copies, local, remote = _split_by_distance(bundles, topology)
    routes = [inside(b, topology, turn) for turn, b in enumerate(local)]
    for turn, bundle in enumerate(remote):
        routes += _between(bundle, topology, turn, classes)
    return copies, routes


def _split_by_distance(bundles: Sequence[Bundle], topology: Topology) -> tuple[Copies, list[Bundle], list[Bundle]]:
    """What ranks keep, what travels inside a host, what travels between hosts."""
    kept: dict[int, list[Piece]] = {}
    local: list[Bundle] = []
    remote: list[Bundle] = []
    for b in bundles:
        own = set(b.senders) & set(b.receivers)
        for rank in sorted(own):
            kept.setdefault(rank, []).extend(b.pieces)
        others = tuple(r for r in b.receivers if r not in own)
        near: dict[str, list[int]] = {}
        for rank in b.senders:
            near.setdefault(topology.host(rank), []).append(rank)
        far = []
        inside: dict[str, list[int]] = {}
        for rank in others:
            host = topology.host(rank)
            inside.setdefault(host, []).append(rank) if host in near else far.append(rank)
        local += [Bundle(tuple(near[h]), tuple(ranks), b.pieces, b.num_bytes) for h, ranks in inside.items()]
        remote += [replace(b, receivers=tuple(far))] if far else []
    return [(rank, tuple(pieces)) for rank, pieces in sorted(kept.items())], local, remote


def inside(b: Bundle, topology: Topology, turn: int) -> Routed:
    """A chain over the fast links of one host."""
    ranks = b.receivers
    hops = ((-1, ranks[0]), *pairwise(ranks))
    senders = _turned(b.senders, turn)
    job = Job(
        tuple(_fast(s, out=True) for s in senders),
        (b.num_bytes / topology.fast_rate,) * len(senders),
        tuple(_fast(r, out=False) for r in ranks),
        tuple(_fast(r, out=True) for r in ranks[:-1]),
    )
    return job, Route("local", b, senders, hops)


def _between(b: Bundle, topology: Topology, turn: int, classes: Sequence[TensorClass]) -> list[Routed]:
    hosts: dict[str, list[int]] = {}
    for rank in b.receivers:
        hosts.setdefault(topology.host(rank), []).append(rank)
    num = min(len(ranks) for ranks in hosts.values()) if topology.nic == "rank" else 1
    num = max(1, min(num, b.num_bytes // STRIPE_BYTES))
    stripes = cut_bundle(b, num, classes) if num > 1 else [b]
    # One rank per sending interface; which one of a host's ranks changes from bundle to bundle.
    by_interface: dict[str, list[int]] = {}
    for rank in b.senders:
        by_interface.setdefault(topology.interface(rank), []).append(rank)
    senders = tuple(ranks[turn % len(ranks)] for ranks in by_interface.values())
    routes = []
    for number, stripe in enumerate(stripes):
        hops: list[tuple[int, int]] = []
        at, entries = -1, []
        for ranks in hosts.values():
            ring = _turned(ranks, turn + number)
            hops.append((at, ring[0]))
            at = ring[0]
            entries.append(at)
        for ranks in hosts.values():
            ring = _turned(ranks, turn + number)
            hops += pairwise(ring)
        kind: Kind = "gather" if len(stripes) > 1 else "send" if len(hops) == 1 else "chain"
        routes.append(
            (job_between(senders, entries, stripe.num_bytes, topology), Route(kind, stripe, senders, tuple(hops)))
        )
    return routes


def job_between(senders: Sequence[int], entries: Sequence[int], num_bytes: int, topology: Topology) -> Job:
    slowest = min(topology.rate(e) for e in entries)
    costs = []
    for s in senders:
        rate = min(topology.rate(s), slowest)
        fill = (len(entries) - 1) * min(topology.chunk_bytes, num_bytes) / rate
        costs.append(num_bytes / rate + fill + topology.hop_s * len(entries))
    return Job(
        tuple(_nic(topology, s, out=True) for s in senders),
        tuple(costs),
        tuple(_nic(topology, e, out=False) for e in entries),
        tuple(_nic(topology, e, out=True) for e in entries[:-1]),
    )


def _split_route(route: Routed, num: int, classes: Sequence[TensorClass]) -> list[Routed]:
    """Jobs that several senders could share, in parts."""
    job, way = route
    if len(way.senders) == 1 or way.bundle.num_bytes < num * STRIPE_BYTES:
        return [route]
    parts = cut_bundle(way.bundle, num, classes)
    share = [p.num_bytes / way.bundle.num_bytes for p in parts]
    return [
        (replace(job, costs=tuple(c * s for c in job.costs)), replace(way, bundle=p))
        for p, s in zip(parts, share, strict=True)
    ]


def assemble(
    classes: tuple[TensorClass, ...],
    copies: Copies,
    routes: Sequence[Routed],
    times: JobSchedule,
    topology: Topology,
    limit: float,
) -> ReshardPlan:
    place = {i: n for n, i in enumerate(times.order)}
    transfers = []
    for i in sorted(place, key=lambda i: (times.start[i], place[i])):
        way = routes[i][1]
        hops = tuple((way.senders[times.sender[i]] if a == -1 else a, b) for a, b in way.hops)
        transfers.append(
            Transfer(way.kind, hops, way.bundle.pieces, way.bundle.num_bytes, times.start[i], times.stop[i])
        )
    optimal = times.makespan <= limit * (1 + 1e-9)
    return ReshardPlan(classes, tuple(copies), tuple(transfers), topology, limit, optimal)


def _turned(ranks: Sequence[int], turn: int) -> tuple[int, ...]:
    at = turn % len(ranks)
    return (*ranks[at:], *ranks[:at])


def _fast(rank: int, *, out: bool) -> str:
    return f"{rank} {'>' if out else '<'}"


def _nic(topology: Topology, rank: int, *, out: bool) -> str:
    return f"{topology.interface(rank)} {'>>' if out else '<<'}"


# -- bounds -----------------------------------------------------------------------------------------------------


def wire_bound(bundles: Sequence[Bundle], topology: Topology) -> float:
    """Seconds that no plan beats: each host takes in, once, the bytes that no rank of it holds, through the interfaces
    of the ranks that want them; and they leave their holders at least once."""
    into: dict[str, dict[frozenset[str], float]] = {}
    out: dict[frozenset[str], float] = {}
    rates: dict[str, float] = {}
    total = 0.0
    for b in bundles:
        near = {topology.host(r) for r in b.senders}
        hosts: dict[str, set[str]] = {}
        for rank in b.receivers:
            rates[topology.interface(rank)] = topology.rate(rank)
            if topology.host(rank) not in near:
                hosts.setdefault(topology.host(rank), set()).add(topology.interface(rank))
        for rank in b.senders:
            rates[topology.interface(rank)] = topology.rate(rank)
        for host, doors in hosts.items():
            sums = into.setdefault(host, {})
            sums[frozenset(doors)] = sums.get(frozenset(doors), 0.0) + b.num_bytes
        if hosts:
            key = frozenset(topology.interface(r) for r in b.senders)
            out[key] = out.get(key, 0.0) + b.num_bytes
            total += b.num_bytes * len(hosts)
    limits = [total / math.fsum(rates.values())] if rates else [0.0]
    for sums in (*into.values(), out):
        sets = list(sums) if len(sums) <= 256 else []
        if sums:
            sets.append(frozenset().union(*sums))
        for outer in sets:
            work = sum(size for inner, size in sums.items() if inner <= outer)
            limits.append(work / math.fsum(rates[name] for name in outer))
    return max(limits)


# -- JSON -------------------------------------------------------------------------------------------------------


def layout_to_json(layout: Layout) -> dict[str, Any]:
    if isinstance(layout, MeshLayout):
        return {
            "mesh": list(layout.sizes),
            "placements": [str(p) for p in layout.placements],
            "ranks": list(layout.ranks),
        }
    return {"boxes": [[rank, list(b.start), list(b.stop)] for rank, b in layout.boxes]}


def layout_from_json(data: Any, where: str, most_ranks: int = 1 << 20) -> Layout:
    if not isinstance(data, dict):
        raise UserError(f"{where}: a layout must be an object, not {shown(data)}")
    fields = Fields(data, where)
    if "boxes" in fields:
        boxes = [_row(row, 3, where) for row in fields.list("boxes")]
        return BoxLayout(tuple((_whole(rank, where), _box(start, stop, where)) for rank, start, stop in boxes))
    placements = tuple(Placement.parse(p if isinstance(p, str) else shown(p)) for p in fields.list("placements"))
    sizes, ranks = _wholes(fields.list("mesh"), where), _wholes(fields.list("ranks", []), where)
    if len(sizes) > MOST_AXES or math.prod(sizes) > most_ranks or max(ranks, default=0) >= most_ranks:
        raise UserError(f"{where}: a mesh of {shown(list(sizes))} has more axes or ranks than the {most_ranks:,} known")
    if any(p.split_factor > most_ranks for p in placements):
        raise UserError(f"{where}: {shown(fields.list('placements'))} cuts into more pieces than there are ranks")
    return MeshLayout(sizes, placements, ranks)


def _pieces_to_json(pieces: Sequence[Piece]) -> list[list[Any]]:
    return [[p.number, list(p.box.start), list(p.box.stop)] for p in pieces]


def _row(entry: Any, num: int, where: str) -> list[Any]:
    if not isinstance(entry, list) or len(entry) != num:
        raise UserError(f"{where}: expected a list of {num} values, not {shown(entry)}")
    return entry


def _whole(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise UserError(f"{where}: expected a whole number from 0, not {shown(value)}")
    return value


def _wholes(values: Any, where: str) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise UserError(f"{where}: expected a list of whole numbers, not {shown(values)}")
    return tuple(_whole(v, where) for v in values)


def _box(start: Any, stop: Any, where: str) -> Box:
    first, last = _wholes(start, where), _wholes(stop, where)
    if len(first) != len(last) or any(b < a for a, b in zip(first, last, strict=True)):
        raise UserError(f"{where}: {shown(start)} to {shown(stop)} is not a box")
    return Box(first, last)
