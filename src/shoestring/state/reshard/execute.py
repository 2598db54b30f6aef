"""Carries a plan out between the ranks of a job.

Every transfer is cut into buckets of at most 256 MiB (chains: smaller ones, so that a rank hands on the first while the
next arrive). A bucket is packed from boxes of many tensors, cast to the dtype of the destination on the way, and ends
with a checksum. A rank sends and receives at the same time, each in the plan's order: the lowest transfer that is not
done never waits for a higher one, so no two ranks wait for each other.

Nothing is written in place while bytes arrive. When every rank has everything and every checksum holds, all ranks
commit; otherwise every rank raises and the destination keeps its old values.
"""

from __future__ import annotations

import hashlib
import json
import queue
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.errors import UserError, shown
from shoestring.state.boxes import Box
from shoestring.state.files import DTYPE_NAMES, DTYPES
from shoestring.state.reshard.dtensors import layout_of
from shoestring.state.reshard.layouts import REPLICATE, BoxLayout, Layout, MeshLayout
from shoestring.state.reshard.plan import Operation, PlanCache, ReshardPlan, Transfer, layout_from_json, layout_to_json
from shoestring.state.reshard.tasks import MovedTensor, cut_box
from shoestring.state.reshard.topology import Topology

BUCKET_BYTES = 256 << 20
CHAIN_BYTES = 1 << 20  # the smallest bucket of a chain
CHAIN_BUCKETS = 16  # of a transfer that is handed on, at least
CHECKSUM_BYTES = 8
_FULL, _READ = 1, 2  # tags of the messages about an outbox


class Transport(Protocol):
    """Blocking messages of raw bytes between ranks; those of one pair of ranks arrive in order."""

    device: torch.device  # where buckets are packed
    duplex: bool  # whether `send` and `receive` may run in two threads

    def send(self, data_N: Tensor, to: int) -> None: ...
    def receive(self, data_N: Tensor, source: int) -> None: ...


class GroupTransport:
    """The process group of a job: gloo through host memory, NCCL from GPU to GPU."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        nccl = "nccl" in dist.get_backend(group)
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self.duplex = not nccl

    def send(self, data_N: Tensor, to: int) -> None:
        dist.send(data_N, to, group=self.group)

    def receive(self, data_N: Tensor, source: int) -> None:
        dist.recv(data_N, source, group=self.group)


class IpcTransport:
    """GPU memory to GPU memory between processes of one host (CUDA IPC), which may share a GPU. Each rank has an outbox
    that the others map. `group` must be gloo: it tells a receiver that the outbox is full, and the sender that it is
    read."""

    duplex = True

    def __init__(self, group: dist.ProcessGroup | None = None, bucket: int = BUCKET_BYTES) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        if dist.get_backend(group) != "gloo":
            raise UserError(f"CUDA IPC needs a gloo group for its messages, not {dist.get_backend(group)}")
        self.group = group
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._outbox_N = torch.empty(bucket + CHECKSUM_BYTES, dtype=torch.uint8, device=self.device)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        told: list[Any] = [None] * len(ranks)
        dist.all_gather_object(told, (socket.gethostname(), reduce_tensor(self._outbox_N)), group=group)
        if len(hosts := sorted({host for host, _ in told})) > 1:
            raise UserError(f"CUDA IPC works on one host; the ranks run on {', '.join(hosts)}")
        self._outboxes = {
            r: make(*args) for r, (_, (make, args)) in zip(ranks, told, strict=True) if r != dist.get_rank()
        }

    def send(self, data_N: Tensor, to: int) -> None:
        self._outbox_N[: len(data_N)].copy_(data_N)
        torch.cuda.current_stream(self.device).synchronize()
        dist.send(torch.tensor([len(data_N)]), to, group=self.group, tag=_FULL)
        dist.recv(torch.empty(1, dtype=torch.int64), to, group=self.group, tag=_READ)

    def receive(self, data_N: Tensor, source: int) -> None:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source, group=self.group, tag=_FULL)
        assert int(size) == len(data_N), (int(size), len(data_N))
        data_N.copy_(self._outboxes[source][: len(data_N)])
        torch.cuda.current_stream(self.device).synchronize()
        dist.send(size, source, group=self.group, tag=_READ)


@dataclass
class Shards:
    """The boxes of every tensor that a rank holds, each a plain tensor."""

    held: dict[str, list[tuple[Box, Tensor]]]

    def pieces(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """The parts of `box` that are here, as views."""
        for where, t in self.held.get(name, ()):
            common = where.intersect(box)
            if common is not None:
                yield common, t[common.slices(where)]


# -- buckets ----------------------------------------------------------------------------------------------------


def bucket_bytes(t: Transfer, most: int = BUCKET_BYTES) -> int:
    """The size of the buckets of a transfer: what is handed on goes in smaller ones."""
    if len(t.hops) == 1:
        return most
    return min(most, max(CHAIN_BYTES, t.num_bytes // CHAIN_BUCKETS))


def buckets_of(plan: ReshardPlan, t: Transfer, most: int = BUCKET_BYTES) -> Iterator[list[tuple[str, Box, int]]]:
    """What each bucket of a transfer holds: (name, box, bytes), the same on every rank."""
    limit = bucket_bytes(t, most)
    filled: list[tuple[str, Box, int]] = []
    room = limit
    for index, whole in t.pieces:
        kind = plan.classes[index]
        itemsize = kind.info.itemsize
        for name in kind.names:
            for box in _cut(whole, itemsize, limit):
                size = box.size * itemsize
                if filled and size > room:
                    yield filled
                    filled, room = [], limit
                filled.append((name, box, size))
                room -= size
    if filled:
        yield filled


def _cut(box: Box, itemsize: int, limit: int) -> list[Box]:
    """Boxes of at most `limit` bytes (or one element)."""
    num = -(-box.size * itemsize // limit)
    if num <= 1 or box.size == 1:
        return [box]
    return [small for part in cut_box(box, num) for small in _cut(part, itemsize, limit)]


def pack(
    bucket: Sequence[tuple[str, Box, int]], src: Shards, dtypes: Mapping[str, torch.dtype], device: torch.device
) -> Tensor:
    """The bytes of a bucket, with the checksum behind them."""
    size = sum(num for _, _, num in bucket)
    out_N = torch.empty(size + CHECKSUM_BYTES, dtype=torch.uint8, device=device)
    at = 0
    for name, box, num in bucket:
        target = torch.empty(box.shape, dtype=dtypes[name], device=device)
        found = 0
        for common, view in src.pieces(name, box):
            target[common.slices(box)].copy_(view)
            found += common.size
        assert found == box.size, f"{name}: {box} is not held here"
        out_N[at : at + num].copy_(target.reshape(-1).view(torch.uint8))
        at += num
    out_N[size:] = _checksum(out_N[:size])
    return out_N


def unpack(
    data_N: Tensor, bucket: Sequence[tuple[str, Box, int]], dst: Shards, dtypes: Mapping[str, torch.dtype]
) -> bool:
    """Write a bucket into `dst`; False where its checksum does not hold."""
    size = sum(num for _, _, num in bucket)
    if not torch.equal(_checksum(data_N[:size]), data_N[size:]):
        return False
    at = 0
    for name, box, num in bucket:
        # A copy of its own: a dtype needs its alignment.
        values = data_N[at : at + num].clone().view(dtypes[name]).reshape(box.shape)
        at += num
        for common, view in dst.pieces(name, box):
            view.copy_(values[common.slices(box)])
    return True


def _checksum(data_N: Tensor) -> Tensor:
    """CRC-32 on the host. On a GPU, a sum of words weighted by odd numbers: an error in one word always shows."""
    if data_N.device.type == "cpu":
        number = zlib.crc32(data_N.numpy().data)
    else:
        number = weighted_sum(torch.nn.functional.pad(data_N, (0, -len(data_N) % 4)).view(torch.int32))
    return torch.tensor([number & 0xFFFFFFFFFFFFFFFF], dtype=torch.uint64).view(torch.uint8).to(data_N.device)


def weighted_sum(words_N: Tensor) -> int:
    """The sum of words[i] * (2 i + 1), by sums of rows and of columns: no copy of the words in 64 bits is made."""
    width = 4096
    whole = words_N[: len(words_N) // width * width].view(-1, width)
    rest = words_N[whole.numel() :].long()
    row_R, column_W, rest_N = (torch.arange(n, device=words_N.device) for n in (len(whole), width, len(rest)))
    total = (whole.sum(0, dtype=torch.int64) * (2 * column_W + 1)).sum()
    total += (whole.sum(1, dtype=torch.int64) * (2 * width * row_R)).sum()
    return int(total + (rest * (2 * (whole.numel() + rest_N) + 1)).sum())


# -- execution --------------------------------------------------------------------------------------------------


def execute(
    plan: ReshardPlan,
    rank: int,
    src: Shards,
    dst: Shards,
    dtypes: Mapping[str, torch.dtype],
    transport: Transport,
    bucket: int = BUCKET_BYTES,
) -> list[int]:
    """Do this rank's part of the plan. The numbers of the transfers that arrived damaged; what else goes wrong with a
    peer is raised as the transport's own error."""
    operations = plan.operations(rank)
    for op in operations:
        if op.kind == "copy":
            for target, view in _pairs(plan.tensors_of(plan.copies[op.transfer][1]), src, dst):
                target.copy_(view)
    arrived: dict[int, queue.SimpleQueue[Tensor | None]] = {
        op.transfer: queue.SimpleQueue() for op in operations if op.kind == "receive"
    }
    receives = [op for op in operations if op.kind == "receive"]
    sends: dict[int, list[int]] = {}
    for op in operations:
        if op.kind == "send":
            sends.setdefault(op.transfer, []).append(op.peer)
    damaged: list[int] = []

    def send_one(number: int, data_N: Tensor) -> None:
        for peer in sends[number]:
            transport.send(data_N, peer)

    def send_all() -> None:
        for number in sends:
            t = plan.transfers[number]
            if t.sender == rank:
                for held in buckets_of(plan, t, bucket):
                    send_one(number, pack(held, src, dtypes, transport.device))
            else:
                while (data_N := arrived[number].get()) is not None:
                    send_one(number, data_N)

    def receive_one(op: Operation) -> None:
        t, whole = plan.transfers[op.transfer], True
        for held in buckets_of(plan, t, bucket):
            size = sum(num for _, _, num in held) + CHECKSUM_BYTES
            data_N = torch.empty(size, dtype=torch.uint8, device=transport.device)
            transport.receive(data_N, op.peer)
            if op.transfer in sends:
                if transport.duplex:
                    arrived[op.transfer].put(data_N)
                else:
                    send_one(op.transfer, data_N)
            whole = unpack(data_N, held, dst, dtypes) and whole
        arrived[op.transfer].put(None)
        if not whole:
            damaged.append(op.transfer)

    if transport.duplex:
        _in_two_lanes(send_all, [lambda op=op: receive_one(op) for op in receives], arrived)
        return damaged
    for op in operations:
        if op.kind == "receive":
            receive_one(op)
        elif op.kind == "send" and plan.transfers[op.transfer].sender == rank and op.peer == sends[op.transfer][0]:
            for held in buckets_of(plan, plan.transfers[op.transfer], bucket):
                send_one(op.transfer, pack(held, src, dtypes, transport.device))
    return damaged


def pairs_between(
    plan: ReshardPlan, src: Mapping[int, Shards], dst: Mapping[int, Shards]
) -> list[tuple[Tensor, Tensor]]:
    """The whole plan as copies (where to, where from), for a process that holds the shards of all ranks."""
    pairs = [pair for rank, pieces in plan.copies for pair in _pairs(plan.tensors_of(pieces), src[rank], dst[rank])]
    for t in plan.transfers:
        for receiver in t.receivers:
            pairs += _pairs(plan.tensors_of(t.pieces), src[t.sender], dst[receiver])
    return pairs


def _pairs(pieces: Iterable[tuple[str, Box]], src: Shards, dst: Shards) -> Iterator[tuple[Tensor, Tensor]]:
    """(where to, where from) of everything in `pieces`."""
    for name, box in pieces:
        for common, view in src.pieces(name, box):
            for part, target in dst.pieces(name, common):
                yield target, view[part.slices(common)]


def _in_two_lanes(
    send_all: Any, receives: Sequence[Any], arrived: Mapping[int, queue.SimpleQueue[Tensor | None]]
) -> None:
    failed: list[BaseException] = []

    def lane() -> None:
        try:
            send_all()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=lane, name="reshard-send", daemon=True)
    thread.start()
    try:
        for receive in receives:
            receive()
    finally:
        for waiting in arrived.values():  # a lane that waits for what will not come ends
            waiting.put(None)
        thread.join()
    if failed:
        raise failed[0]


# -- the whole of it --------------------------------------------------------------------------------------------

Source = tuple[tuple[int, ...], Layout]  # the whole shape of a tensor, and where its shards lie
Made = TypeVar("Made")
_Own = dict[str, tuple[tuple[int, ...], str, Layout | None]]  # of one rank; no layout: a plain tensor, whole here
_Description = dict[str, tuple[tuple[int, ...], str, Layout]]  # name -> shape, dtype, layout


class Resharder:
    """Moves tensors between layouts over the ranks of a process group; keeps the plans it has made."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        topology: Topology | None = None,
        transport: Transport | None = None,
        bucket: int = BUCKET_BYTES,
    ) -> None:
        self.group, self.topology = group, topology
        self.transport = transport or GroupTransport(group)
        # Agreements go over the group, whatever carries the tensors.
        self._told_on = self.transport.device if "nccl" in dist.get_backend(group) else torch.device("cpu")
        self.bucket = bucket
        self._plans = PlanCache()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the group."""
        return tuple(dist.get_process_group_ranks(self.group or dist.group.WORLD))

    @torch.no_grad()
    def reshard(
        self,
        tensors: Mapping[str, Tensor],
        *,
        dst: Layout | Mapping[str, Layout],
        src: Mapping[str, Source] | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """This rank's boxes in the layouts `dst`, as new plain tensors; nothing for a rank that `dst` does not name.

        `tensors` are DTensors (plain ones count as whole on every rank) or, with `src`, this rank's shards. A rank
        outside the source mesh gives an empty dict. All ranks of the group call this with the same layouts. `dtype`:
        cast on the way."""
        mine = self._together(lambda: self._describe(tensors, src, dtype))
        described = self._share(mine, "source")
        wanted = {name: _pick(dst, name) for name in described}
        target = {name: (shape, dtype_name, wanted[name]) for name, (shape, dtype_name, _) in described.items()}
        device = next((_local(t).device for t in tensors.values()), self.transport.device)
        boxes = _own_boxes(target, dist.get_rank())
        staged = _empty_shards(boxes, target, device)
        self._move(tensors, described, target, staged)
        made = {
            name: held[0][1] if len(held) == 1 else torch.cat([t for _, t in held], _stacked_dim(boxes[name], name))
            for name, held in staged.held.items()
        }
        others = {name: one for name, one in target.items() if name not in made}  # looking at all would take seconds
        return {**_without_elements(others, dist.get_rank(), device), **made}

    @torch.no_grad()
    def reshard_into(self, tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        """Fill live tensors (a module's `state_dict()` or `named_parameters()`) in place. A rank without sources, or
        without destinations, gives an empty dict. On an error every destination keeps its values."""
        mine = self._together(lambda: (self._describe(tensors, None, None), self._describe(into, None, None)))
        described, target = self._share(mine[0], "source"), self._share(mine[1], "destination")
        _check_same(described, target)
        device = next((_local(t).device for t in into.values()), self.transport.device)
        boxes = _own_boxes(target, dist.get_rank())
        staged = _empty_shards(boxes, target, device)
        views = self._together(lambda: {name: _split(_local(into[name]), boxes[name], name) for name in boxes})
        self._move(tensors, described, target, staged)
        for name, held in staged.held.items():
            for (_, view), (_, values) in zip(views[name], held, strict=True):
                view.copy_(values)

    def plan(self, described: _Description, target: _Description) -> ReshardPlan:
        moved = {
            name: MovedTensor(shape, DTYPES[dtype].itemsize, described[name][2], layout)
            for name, (shape, dtype, layout) in target.items()
        }
        return self._plans.plan(moved, self.topology)

    def _move(
        self, tensors: Mapping[str, Tensor], described: _Description, target: _Description, staged: Shards
    ) -> None:
        rank = dist.get_rank()
        plan = self.plan(described, target)
        self._agree([] if self._same(plan.digest) else ["the ranks have made different plans"])
        self._check_ranks(plan)
        own = _own_boxes(described, rank).items()
        held = self._together(lambda: Shards({n: _split(_local(tensors[n]), boxes, n) for n, boxes in own}))
        dtypes = {name: DTYPES[dtype] for name, (_, dtype, _) in target.items()}
        damaged = execute(plan, rank, held, staged, dtypes, self.transport, self.bucket)
        self._agree([f"transfer {n} arrived damaged at rank {rank}" for n in damaged])

    def _check_ranks(self, plan: ReshardPlan) -> None:
        """A rank that nobody runs would be waited for."""
        named = {rank for t in plan.transfers for hop in t.hops for rank in hop} | {rank for rank, _ in plan.copies}
        if outside := sorted(named - set(self.ranks)):
            raise UserError(
                f"the layouts name rank {outside[0]} ({len(outside)} such), which is not among the {len(self.ranks)} "
                f"ranks of this group ({shown(list(self.ranks))}); give layouts over these"
            )

    # -- agreement ----------------------------------------------------------------------------------------------
    def _describe(
        self, tensors: Mapping[str, Tensor], given: Mapping[str, Source] | None, dtype: torch.dtype | None
    ) -> _Own:
        found: _Own = {}
        for name, t in tensors.items():
            if given is not None and name not in given:
                raise UserError(
                    f"`src` does not say where tensor {name!r} lies; it names {', '.join(sorted(given)[:5])}"
                )
            shape, layout = (tuple(t.shape), layout_of(t, name)) if given is None else given[name]
            kind = dtype or t.dtype
            if not castable(t.dtype, kind):
                raise UserError(f"tensor {name!r} is {t.dtype} and cannot become {kind}; cast it before")
            if kind not in DTYPE_NAMES:
                raise UserError(f"tensor {name!r} is {kind}, which cannot be sent")
            found[name] = shape, DTYPE_NAMES[kind], layout
        return found

    def _share(self, mine: _Own, what: str) -> _Description:
        """What all ranks together hold, on every rank. Ranks that say the same are one mesh; meshes that differ only in
        their ranks (replicas that are kept apart) become one with an axis more."""
        text = json.dumps({n: [s, d, layout and layout_to_json(layout)] for n, (s, d, layout) in mine.items()})
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") if mine else -1
        numbers = [torch.zeros(1, dtype=torch.int64, device=self._told_on) for _ in self.ranks]
        dist.all_gather(numbers, torch.full_like(numbers[0], number), group=self.group)
        sayings: dict[int, list[int]] = {}
        for place, said in enumerate(numbers):
            if int(said) >= 0:
                sayings.setdefault(int(said), []).append(place)
        if not sayings:
            raise UserError(f"no rank has a {what} tensor")
        parts = []
        for places in sayings.values():
            box = [text]
            dist.broadcast_object_list(box, group_src=places[0], group=self.group)
            whole_on = MeshLayout((len(places),), (REPLICATE,), tuple(self.ranks[p] for p in places))
            parts.append(
                {
                    name: (tuple(shape), dtype, whole_on if layout is None else layout_from_json(layout, what))
                    for name, (shape, dtype, layout) in json.loads(box[0]).items()
                }
            )
        return _merged(parts, what)

    def _same(self, text: str) -> bool:
        number = torch.tensor([int(text[:15], 16)], device=self._told_on)
        low, high = number.clone(), number.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.group)
        return bool(low == high)

    def _together(self, work: Callable[[], Made]) -> Made:
        """What each rank makes or checks by itself. A UserError of one is raised on all, so that none waits."""
        try:
            made = work()
        except UserError as error:
            self._agree([str(error)])
            raise
        self._agree([])
        return made

    def _agree(self, complaints: list[str]) -> None:
        """Raise on every rank where one rank has a complaint."""
        flag = torch.tensor([float(bool(complaints))], device=self._told_on)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        if complaints:
            raise UserError("; ".join(complaints) + "; nothing was changed")
        if bool(flag):
            raise UserError("another rank could not take part in the reshard; nothing was changed")


def _merged(parts: Sequence[_Description], what: str) -> _Description:
    first = parts[0]
    if len(parts) == 1:
        return first
    merged: _Description = {}
    for name in dict.fromkeys(n for part in parts for n in part):
        said = [part.get(name) for part in parts]
        if any(one is None or one[:2] != first[name][:2] for one in said if name in first) or name not in first:
            raise UserError(f"ranks describe the {what} tensor {name!r} differently, or only some have it")
        merged[name] = (*first[name][:2], _merged_layout([one[2] for one in said if one is not None], first[name][0]))
    return merged


def _merged_layout(layouts: Sequence[Layout], shape: tuple[int, ...]) -> Layout:
    if len(set(layouts)) == 1:
        return layouts[0]
    meshes = [layout for layout in layouts if isinstance(layout, MeshLayout)]
    ranks = tuple(rank for mesh in meshes for rank in mesh.ranks)
    alike = len({(m.sizes, m.placements) for m in meshes}) == 1 and len(meshes) == len(layouts)
    if alike and len(set(ranks)) == len(ranks):
        return MeshLayout((len(meshes), *meshes[0].sizes), (REPLICATE, *meshes[0].placements), ranks)
    return BoxLayout(tuple((rank, box) for lay in layouts for box, held in lay.tiles(shape) for rank in held))


def castable(have: torch.dtype, want: torch.dtype) -> bool:
    return have == want or (have.is_floating_point and want.is_floating_point)


def _pick(layouts: Layout | Mapping[str, Layout], name: str) -> Layout:
    if not isinstance(layouts, Mapping):
        return layouts
    if name not in layouts:
        raise UserError(
            f"there is no layout for tensor {name!r}; the layouts name {', '.join(sorted(layouts)[:5])}, ..."
        )
    return layouts[name]


def _local(t: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return t.to_local() if isinstance(t, DTensor) else t


def _check_same(described: _Description, target: _Description) -> None:
    """UserError unless both sides name the same tensors with the same shapes, and the dtypes can be cast."""
    if missing := sorted(target.keys() - described.keys()):
        raise UserError(f"the destination needs {missing[0]!r} ({len(missing)} such), which the source does not have")
    if extra := sorted(described.keys() - target.keys()):
        raise UserError(f"the source has {extra[0]!r} ({len(extra)} such), which the destination does not take")
    for name, (shape, dtype, _) in target.items():
        have, kind = described[name][:2]
        if have != shape:
            raise UserError(
                f"tensor {name!r} has shape {list(have)} at the source and {list(shape)} at the destination"
            )
        if not castable(DTYPES[kind], DTYPES[dtype]):
            raise UserError(f"tensor {name!r} is {kind} and cannot become {dtype}; cast it before")


def _own_boxes(target: _Description, rank: int) -> dict[str, list[Box]]:
    """The boxes of `rank`, for the tensors of which it has any."""
    tiles: dict[tuple[tuple[int, ...], Layout], list[Box]] = {}
    for shape, _, layout in target.values():
        if (shape, layout) not in tiles:
            tiles[shape, layout] = [box for box, ranks in layout.tiles(shape) if rank in ranks]
    return {name: boxes for name, (shape, _, layout) in target.items() if (boxes := tiles[shape, layout])}


def _empty_shards(boxes: Mapping[str, list[Box]], target: _Description, device: torch.device) -> Shards:
    return Shards(
        {
            name: [(b, torch.empty(b.shape, dtype=DTYPES[target[name][1]], device=device)) for b in held]
            for name, held in boxes.items()
        }
    )


def _without_elements(target: _Description, rank: int, device: torch.device) -> dict[str, Tensor]:
    """What `rank` holds of a tensor without elements, or of one with fewer rows than ranks."""
    return {
        name: torch.empty(shard_shape, dtype=DTYPES[dtype], device=device)
        for name, (shape, dtype, layout) in target.items()
        if isinstance(layout, MeshLayout) and rank in layout.ranks
        if 0 in (shard_shape := layout.local_shape(shape, rank))
    }


def _stacked_dim(boxes: Sequence[Box], name: str) -> int:
    """The dim along which a local tensor holds several boxes one after the other."""
    dims = [d for d in range(len(boxes[0].start)) if len({b.start[d] for b in boxes}) > 1]
    if len(dims) != 1:
        raise UserError(f"tensor {name!r} is cut into {len(boxes)} boxes on one rank that do not stack along one dim")
    return dims[0]


def _split(local: Tensor, boxes: Sequence[Box], name: str) -> list[tuple[Box, Tensor]]:
    """A local tensor as the boxes that it holds, as views."""
    if len(boxes) == 1:
        parts: Sequence[Tensor] = [local]
    else:
        dim = _stacked_dim(boxes, name)
        parts = local.split([b.shape[dim] for b in boxes], dim)
    for box, part in zip(boxes, parts, strict=True):
        if tuple(part.shape) != box.shape:
            raise UserError(
                f"tensor {name!r}: this rank should hold a shard of {list(box.shape)}, not {list(part.shape)}"
            )
    return list(zip(boxes, parts, strict=True))
