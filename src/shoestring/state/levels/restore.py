"""Restore: the newest version that is complete, every box from the nearest copy that survived.

Every host lists what it can read (arenas in memory, folders on disk); the lists of all hosts together say which
versions are complete. Each rank then fills its own boxes: from the memory of its host, from disk, or from a rank of
another host over the process group. state/reshard plans who reads what (reads.py) and who sends it (plan.py), so the
number of ranks and their mesh may have changed. Bytes are verified on the way; a damaged copy is dropped, its boxes
come from the next source that has them, and where none has, nothing is loaded.

Copies in memory are read and summed by several threads while what they have read goes to the device.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoestring.errors import UserError
from shoestring.host.checksums import RunningSum
from shoestring.host.page_locked import StagingBuffers
from shoestring.mesh import Mesh
from shoestring.state.agreement import agree, everyone
from shoestring.state.boxes import Box, local_box
from shoestring.state.checkpoint import shares_in, step_folders
from shoestring.state.checkpoint_files import HOST_MANIFEST
from shoestring.state.files import DTYPE_NAMES, DTYPES
from shoestring.state.levels.drain import NAMES_SUM
from shoestring.state.levels.host_folder import ArenaCopy, kind_of, list_copies, reading
from shoestring.state.levels.snapshot import local_tensor
from shoestring.state.levels.version import ITEM_BYTES, LIFE, HeldBox, HeldCopy, missing_of, sum_of_names
from shoestring.state.manifest import Manifest, StoredTensor
from shoestring.state.reshard.execute import GroupTransport, Shards, execute
from shoestring.state.reshard.layouts import BoxLayout
from shoestring.state.reshard.plan import make_plan
from shoestring.state.reshard.reads import Holder, plan_reads
from shoestring.state.reshard.tasks import MovedTensor
from shoestring.state.reshard.topology import Topology
from shoestring.state.storage import HostReader, SafeReader

NEAREST = ("memory", "disk")  # of the own host, in this order
THREADS = max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
STAGING_BYTES = 16 << 20  # read at a time
SPARE_BUFFERS = 4  # which are on their way to the device while every thread fills another


@dataclass(frozen=True, eq=False)
class Offer:
    """One readable copy of (a share of) a version. It travels between the ranks of a job."""

    source: str  # memory or disk
    host: str
    path: str
    copy: HeldCopy
    slot: int = 0
    sequence: int = 0

    @property
    def place(self) -> tuple[str, str, int, int]:
        return self.host, self.path, self.slot, self.sequence

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offer) and self.place == other.place

    def __hash__(self) -> int:
        return hash(self.place)

    @property
    def is_peer(self) -> bool:
        return self.source == "memory" and kind_of(Path(self.path)) == "replica"


# -- what there is -------------------------------------------------------------------------------------------


def offers_here(arenas: Path, checkpoints: Sequence[Path], host: str) -> tuple[list[Offer], list[str]]:
    """(what this host can read, what is wrong with the rest)."""
    copies, problems = list_copies(arenas)
    offers = [Offer("memory", host, str(c.path), c.copy, c.slot, c.sequence) for c in copies]
    for folder in checkpoints:
        more, unusable = disk_offers(folder, host)
        offers += more
        problems += unusable
    return offers, problems


def disk_offers(folder: Path, host: str) -> tuple[list[Offer], list[str]]:
    """The same of the checkpoints in a folder, and of shares of them."""
    offers: list[Offer] = []
    problems: list[str] = []
    for path in [*step_folders(folder), *(p for share in shares_in(folder) for p in step_folders(share))]:
        try:
            offers.append(Offer("disk", host, str(path), folder_copy(path)))
        except UserError as error:
            problems.append(str(error))
        except FileNotFoundError:  # the agent has just deleted it, because there are newer ones
            continue
    return offers, problems


def open_folder(path: Path) -> SafeReader:
    return HostReader(path) if (path / HOST_MANIFEST).is_file() else SafeReader(path)


def folder_copy(path: Path) -> HeldCopy:
    """A checkpoint folder as one copy of everything, or of one host's share."""
    manifest = open_folder(path).manifest
    boxes = tuple(
        HeldBox(name, DTYPE_NAMES[t.dtype], t.shape, box)
        for name, t in manifest.tensors.items()
        for box in ([Box.full(t.shape)] if 0 in t.shape else [b.box for b in t.boxes])
    )
    names = {name: (DTYPE_NAMES[t.dtype], t.shape) for name, t in manifest.tensors.items()}
    whole = str(manifest.values.get(NAMES_SUM) or sum_of_names(names))
    life = manifest.values.get(LIFE, "0")
    step = manifest.step if manifest.step is not None else int(path.name.removeprefix("step-"))
    return HeldCopy(step, str(life), 0, manifest.world_size, "", whole, boxes, manifest.values)


def gather_offers(mesh: Mesh, host: str, look: Callable[[], tuple[list[Offer], list[str]]]) -> list[Offer]:
    """The offers of all hosts, on every rank; the first rank of each host looks."""
    if mesh.world_size == 1:
        return look()[0]
    hosts = everyone(mesh, [host])
    return everyone(mesh, agree(mesh, lambda: look()[0] if hosts.index(host) == mesh.rank else []))


@dataclass(frozen=True)
class ChosenVersion:
    """The version to restore, who offers it, and what newer ones lack."""

    step: int
    life: str
    offers: tuple[Offer, ...]
    passed_over: tuple[str, ...]


def choose(offers: Iterable[Offer], *, before: int | None = None) -> ChosenVersion | None:
    """The newest complete version (with `before`: of an earlier step); None where there is none."""
    passed: list[str] = []
    for key, some, lacking in _versions(offers):
        if before is not None and key[0] >= before:
            continue
        if lacking is None:
            return ChosenVersion(*key, some, tuple(passed))
        passed.append(_passed_over(key[0], some, lacking))
    return None


def incomplete(offers: Iterable[Offer]) -> list[str]:
    """The versions that lack something, newest first, each with where it is and what it lacks."""
    return [_passed_over(key[0], some, lacking) for key, some, lacking in _versions(offers) if lacking is not None]


def _versions(offers: Iterable[Offer]) -> Iterator[tuple[tuple[int, str], tuple[Offer, ...], str | None]]:
    """(step and life, who offers it, what they lack together), newest first."""
    versions: dict[tuple[int, str], list[Offer]] = defaultdict(list)
    for offer in offers:
        versions[offer.copy.key].append(offer)
    for key in sorted(versions, reverse=True):
        yield key, tuple(versions[key]), missing_of(offer.copy for offer in versions[key])


def _passed_over(step: int, offers: Sequence[Offer], lacking: str) -> str:
    places = sorted({f"{offer.source} of {offer.host}" for offer in offers})
    return f"step {step} is not complete: {lacking} (found in {' and '.join(places)})"


def manifest_of(choice: ChosenVersion) -> Manifest:
    """The version as a manifest without parts, to be compared with the state of the run."""
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Any] = {}
    world_size = 1
    for offer in choice.offers:
        world_size = offer.copy.world_size
        values.update(offer.copy.values)
        for held in offer.copy.boxes:
            tensors.setdefault(held.name, StoredTensor(DTYPES[held.dtype], held.shape, ()))
    return Manifest(world_size, choice.step, {}, tensors, values)


# -- filling -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FillPiece:
    """`wanted` of a tensor is read from `held` and goes into `target`, which holds `inside` of the tensor."""

    held: HeldBox
    wanted: Box
    target: Tensor
    inside: Box

    @property
    def is_whole(self) -> bool:
        return self.wanted == self.held.box == self.inside and self.target.is_contiguous()

    def put(self, values: Tensor) -> None:
        self.target[self.wanted.slices(self.inside)].copy_(values)


def plan_pieces(
    targets: Sequence[tuple[str, Box, Tensor]], offers: Sequence[Offer], host: str
) -> tuple[dict[Offer, list[FillPiece]], list[tuple[str, Box]]]:
    """(pieces by offer, boxes that only other hosts have). A target is a tensor that holds a box of the one named.
    Memory before disk, own copies before replicas."""
    readable = sorted((o for o in offers if o.host == host), key=lambda o: (NEAREST.index(o.source), o.is_peer, o.path))
    holders: dict[str, list[Holder]] = defaultdict(list)
    found: dict[tuple[int, str, Box], HeldBox] = {}
    for number, offer in enumerate(readable):
        for held in offer.copy.boxes:
            holders[held.name].append((number, held.box))
            found[number, held.name, held.box] = held
    reads, missing = plan_reads([(name, inside) for name, inside, _ in targets], holders)
    into = {(name, inside): target for name, inside, target in targets}
    pieces: dict[Offer, list[FillPiece]] = defaultdict(list)
    for r in reads:
        held = found[r.copy, r.name, r.held]
        pieces[readable[r.copy]].append(FillPiece(held, r.box, into[r.name, r.wanted], r.wanted))
    return dict(pieces), missing


def fill_tensors(
    tensors: Mapping[str, Tensor], choice: ChosenVersion, mesh: Mesh, host: str
) -> tuple[dict[str, int], list[str]]:
    """Fill every tensor from the version. Returns ({source: bytes}, damaged copies)."""
    offers = list(choice.offers)
    targets = [(name, local_box(t), local_tensor(t)) for name, t in tensors.items()]
    damaged: list[str] = []
    while True:
        if (lacking := missing_of(o.copy for o in offers)) is not None:
            raise UserError(
                f"the version of step {choice.step} cannot be used: {'; '.join(damaged)}; of the other copies: "
                f"{lacking}; resume_from=previous goes on from the version before it"
            )
        pieces, missing = plan_pieces(targets, offers, host)
        used: dict[str, int] = defaultdict(int)
        broken: list[tuple[Offer, str]] = []
        for offer, some in pieces.items():
            problem = read_offer(offer, some)
            if problem is not None:
                broken.append((offer, problem))
            used[source_name(offer, host)] += sum(p.wanted.size * p.target.element_size() for p in some)
        broken = everyone(mesh, broken)
        if not broken and (mesh.world_size > 1 or missing):
            used, broken = _exchange(targets, missing, offers, mesh, host, used)
        if not broken:
            return dict(used), damaged
        bad = {offer for offer, _ in broken}
        damaged += sorted({problem for _, problem in broken})
        offers = [o for o in offers if o not in bad]


def source_name(offer: Offer, host: str) -> str:
    if offer.source == "memory" and (offer.is_peer or offer.host != host):
        return "peer memory"
    return offer.source


def read_offer(offer: Offer, pieces: Sequence[FillPiece]) -> str | None:
    """Fill the pieces; what is wrong with the copy, or None."""
    try:
        if offer.source == "disk":
            _read_folder(Path(offer.path), pieces)
            return None
        entry = ArenaCopy(Path(offer.path), offer.slot, offer.sequence, offer.copy)
        with reading(entry) as arena:
            if arena is None:
                return f"{offer.path} was overwritten meanwhile"
            view = arena.slot_view(offer.slot)
            try:
                bad = ChunkReader(offer.copy, partial(arena.read_into, offer.slot), view).fill(pieces)
            finally:
                view.release()
            return f"{offer.path} is damaged: {bad} of its chunks" if bad else None
    except UserError as error:
        return str(error)
    except FileNotFoundError as error:
        return f"{error.filename} was deleted meanwhile"


def _read_folder(path: Path, pieces: Sequence[FillPiece]) -> None:
    reader = open_folder(path)
    reader.verify({reader.stored(p.held.name, p.held.box).part for p in pieces})
    reader.fill((p.held.name, p.held.box, p.wanted, p.target[p.wanted.slices(p.inside)]) for p in pieces)


@dataclass(frozen=True)
class WholeTarget:
    """A target that takes all bytes [begin, end) of a slot; `flat` is its memory."""

    begin: int
    end: int
    flat: Tensor


class ChunkReader:
    """Fills the pieces of one slot in several threads, and verifies every chunk that it reads.

    Each thread takes a chunk, reads it in large pieces into staging buffers, sums them, and sends them to the targets
    on a stream of its own. Measured, this is faster than to map and page-lock the file, in small pages and in huge
    ones. Pieces are large because the threads share the interpreter's lock.
    """

    def __init__(
        self, copy: HeldCopy, read: Callable[[int, memoryview], None], view: memoryview, threads: int = THREADS
    ) -> None:
        """`read(at, buffer)` fills a buffer from byte `at` of the slot; `view` is the slot, mapped."""
        self.copy, self.read, self.view, self.threads = copy, read, view, threads

    def fill(self, pieces: Sequence[FillPiece]) -> int:
        """Returns the number of damaged chunks; with any, the targets are half filled."""
        size = self.copy.chunk_bytes
        whole: dict[int, list[WholeTarget]] = defaultdict(list)
        cut: list[FillPiece] = []
        for piece in pieces:
            begin, end = piece.held.offset, piece.held.offset + piece.held.num_bytes
            chunks = range(begin // size, (end - 1) // size + 1)
            for chunk in chunks:
                whole[chunk]
            if piece.is_whole:
                target = WholeTarget(begin, end, piece.target.reshape(-1).view(torch.uint8))
                for chunk in chunks:
                    whole[chunk].append(target)
            else:
                cut.append(piece)
        bad = self._fill_staged(whole, _gpu_of(pieces)) if whole else 0
        if not bad:
            for piece in cut:
                piece.put(self._stored(piece.held)[piece.wanted.slices(piece.held.box)])
        return bad

    def _span(self, chunk: int) -> tuple[int, int]:
        size = self.copy.chunk_bytes
        return chunk * size, min((chunk + 1) * size, self.copy.num_bytes)

    def _fill_staged(self, targets: Mapping[int, Sequence[WholeTarget]], device: torch.device | None) -> int:
        num_threads = min(self.threads, len(targets))
        num_bytes = min(STAGING_BYTES, self.copy.chunk_bytes, self.copy.num_bytes)
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for chunk in sorted(targets):
            todo.put(chunk)
        bad: list[int] = []

        def read_chunks() -> None:
            stream = torch.cuda.Stream(device) if device is not None else None
            try:
                with torch.cuda.stream(stream), torch.no_grad(), contextlib.suppress(queue.Empty):
                    while True:
                        chunk = todo.get_nowait()
                        if self._read_chunk(chunk, targets[chunk], buffers) != self.copy.chunks[chunk]:
                            bad.append(chunk)
            finally:
                if stream is not None:  # also after an error: copies may still read the buffers
                    stream.synchronize()

        if device is not None:  # whatever was to write the targets before has done so
            torch.cuda.current_stream(device).synchronize()
        buffers = StagingBuffers(num_threads + SPARE_BUFFERS, num_bytes, device)
        try:
            with ThreadPoolExecutor(num_threads) as pool:
                for future in [pool.submit(read_chunks) for _ in range(num_threads)]:
                    future.result()
        finally:
            buffers.close()
        return len(bad)

    def _read_chunk(self, chunk: int, targets: Sequence[WholeTarget], buffers: StagingBuffers) -> str:
        """Send a chunk to its targets; its checksum."""
        begin, end = self._span(chunk)
        total = RunningSum(self.copy.algorithm)
        for at in range(begin, end, buffers.num_bytes):
            stop = min(at + buffers.num_bytes, end)
            with buffers.take() as buffer:
                self.read(at, buffer.view[: stop - at])
                total.add(buffer.view[: stop - at])
                buffer.lock()
                for target in targets:
                    _send(buffer.bytes, at, stop, target)
        return total.digest()

    def _stored(self, held: HeldBox) -> Tensor:
        raw = torch.frombuffer(self.view, dtype=torch.uint8)[held.offset : held.offset + held.num_bytes]
        return raw.view(DTYPES[held.dtype]).reshape(held.box.shape)


def _send(source: Tensor, begin: int, end: int, target: WholeTarget) -> None:
    """Bytes [begin, end) of a slot, which are in `source`, into the target as far as it takes them."""
    a, b = max(begin, target.begin), min(end, target.end)
    if a < b:
        target.flat[a - target.begin : b - target.begin].copy_(source[a - begin : b - begin], non_blocking=True)


def _gpu_of(pieces: Sequence[FillPiece]) -> torch.device | None:
    return next((p.target.device for p in pieces if p.target.is_cuda), None)


# -- boxes of other hosts ------------------------------------------------------------------------------------


def _exchange(
    targets: Sequence[tuple[str, Box, Tensor]],
    missing: list[tuple[str, Box]],
    offers: Sequence[Offer],
    mesh: Mesh,
    host: str,
    used: dict[str, int],
) -> tuple[dict[str, int], list[tuple[Offer, str]]]:
    """Boxes that only another host can read: ranks there read them and send. Every rank makes the same plan."""
    if mesh.world_size == 1:
        if missing:
            raise UserError(f"{missing[0][0]} is only on another host: start a rank there, or give it its folder")
        return used, []
    facts: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(facts, (host, missing))
    if not any(wants for _, wants in facts):
        return used, []
    moved, sources = _moved(offers, facts)
    plan = make_plan(moved, Topology(hosts={rank: where for rank, (where, _) in enumerate(facts)}))
    dtypes = {held.name: DTYPES[held.dtype] for offer in offers for held in offer.copy.boxes if held.name in moved}
    boxes = [piece for t in plan.transfers if t.sender == mesh.rank for piece in plan.tensors_of(t.pieces)]
    sent = [(name, box, torch.empty(box.shape, dtype=dtypes[name])) for name, box in dict.fromkeys(boxes)]
    pieces, _ = plan_pieces(sent, offers, host)
    found = ((offer, read_offer(offer, some)) for offer, some in pieces.items())
    if broken := everyone(mesh, [(offer, problem) for offer, problem in found if problem is not None]):
        return used, broken
    group = dist.new_group(backend="gloo")
    try:
        src, dst = _shards(sent), _shards(targets)
        arrived_damaged = execute(plan, mesh.rank, src, dst, dtypes, GroupTransport(group))
    finally:
        dist.destroy_process_group(group)
    if everyone(mesh, arrived_damaged):
        raise UserError(
            "boxes from another host arrived damaged; check the network between the hosts, and resume again"
        )
    for t in plan.transfers:
        if mesh.rank in t.receivers:
            for name, box in plan.tensors_of(t.pieces):
                used[sources[name]] = used.get(sources[name], 0) + box.size * dtypes[name].itemsize
    return used, []


def _shards(tensors: Iterable[tuple[str, Box, Tensor]]) -> Shards:
    held: dict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
    for name, box, t in tensors:
        held[name].append((box, t))
    return Shards(held)


def _moved(offers: Sequence[Offer], facts: Sequence[tuple[str, Any]]) -> tuple[dict[str, MovedTensor], dict[str, str]]:
    """What has to travel between hosts, and what a report calls its source. Any rank of a host may read its copies;
    disks are read where the memory of all hosts together lacks something."""
    wanted: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    for rank, (_, wants) in enumerate(facts):
        for name, box in wants:
            wanted[name].append((rank, box))
    held: dict[str, dict[str, list[tuple[str, HeldBox]]]] = defaultdict(lambda: {source: [] for source in NEAREST})
    for offer in offers:
        for box in offer.copy.boxes:
            if box.name in wanted:
                held[box.name][offer.source].append((offer.host, box))
    moved, sources = {}, {}
    for name, receivers in wanted.items():
        memory, disk = (held[name][source] for source in NEAREST)
        lacking = plan_reads([(name, box) for _, box in receivers], {name: [(0, h.box) for _, h in memory]})[1]
        some = memory + disk if lacking else memory
        sources[name] = "disk of another host" if lacking else "peer memory"
        shape, itemsize = some[0][1].shape, ITEM_BYTES[some[0][1].dtype]
        senders = tuple((rank, h.box) for where, h in some for rank, (own, _) in enumerate(facts) if own == where)
        moved[name] = MovedTensor(shape, itemsize, BoxLayout(senders), BoxLayout(tuple(receivers)))
    return moved, sources
