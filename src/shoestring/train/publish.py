"""A training run that offers its weights to running servers: `publish=HOST:PORT publish_every=50`.

Every `every` steps each rank copies its shards to host memory and goes on training; threads answer the servers that
follow (state/reshard/exchange.py). What a server wants is made from the copy: a box, cast to its dtype, or encoded in
its Format on this side, so that a packed server receives packed bytes. A step that comes while the copy before it is
still being digested is left out: training does not wait.

Left out: buffers. What a Decoder keeps in buffers is no weight.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats import Format, FormatHost
from shoestring.formats.convert import format_hosts
from shoestring.formats.linear import local
from shoestring.formats.registry import from_json
from shoestring.formats.rounding import cast_weight
from shoestring.host.page_locked import HostBuffers
from shoestring.json_files import Fields
from shoestring.mesh import Mesh
from shoestring.state.agreement import everyone
from shoestring.state.boxes import Box
from shoestring.state.files import DTYPES
from shoestring.state.optimizer import parameter_names
from shoestring.state.reshard.dtensors import layout_of
from shoestring.state.reshard.exchange import Catalogue, SnapshotServer, check_key, parse_address
from shoestring.state.reshard.execute import castable
from shoestring.state.reshard.layouts import REPLICATE, MeshLayout
from shoestring.state.reshard.version import UnfitWeights
from shoestring.train.step import Hook, Run

log = logging.getLogger("shoestring.publish")
NUM_BUFFERS = 3
MOST_FORMS = 4  # of a tensor, that are kept encoded
LAST_S = 20.0  # that the end of a run waits for its followers


class PublishNothing(Hook):
    """For a run without an address."""

    @contextmanager
    def named(self, run: str) -> Iterator[None]:
        """While it trains: what followers call the run."""
        yield


def check_publish(address: str | None, insecure: bool) -> None:
    """Before anything is read."""
    if address is not None:
        check_key(parse_address(address), insecure, "publish_insecure=true")


def open_publish(model: nn.Module, mesh: Mesh, address: str | None, every: int, last: int) -> PublishNothing:
    return PublishNothing() if address is None else Publish(model, mesh, address, every, last)


class Publish(PublishNothing):
    """Built on every rank; the first one listens at the address, the others at ports of their own."""

    def __init__(self, model: nn.Module, mesh: Mesh, address: str, every: int, last: int = -1) -> None:
        """`last`: a step that is published in any case."""
        self.every, self.last, self.mesh = every, last, mesh
        self._tensors = {name: p for p, name in parameter_names(model).items()}
        self._layers = {f"{name}.weight": layer for name, layer in format_hosts(model)}
        per_stage = mesh.world_size // mesh.pp
        alike = MeshLayout(
            (per_stage,), (REPLICATE,), tuple(range(mesh.stage * per_stage, (mesh.stage + 1) * per_stage))
        )
        mine = [(n, (tuple(t.shape), t.dtype, layout_of(t, n) or alike)) for n, t in self._tensors.items()]
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype, MeshLayout]] = {}
        for name, found in everyone(mesh, mine) if mesh.pp > 1 else mine:
            tensors.setdefault(name, found)  # a tied embedding: the first stage answers for it
        catalogue = Catalogue("run", tensors)
        self._boxes = {
            n: [box for box, ranks in layout.tiles(shape) if mesh.rank in ranks]
            for n, (shape, _, layout) in catalogue.tensors.items()
        }
        if broken := next((n for n, boxes in self._boxes.items() if len(boxes) > 1), None):
            raise UserError(f"tensor {broken!r} holds interleaved rows on a rank; it cannot be published")
        host, port = parse_address(address)
        self.server = SnapshotServer((host, port) if mesh.is_main else (_own_address(host), 0), catalogue)
        self.server.endpoints = _all_endpoints(mesh, self.server.address)
        self._digesting: threading.Thread | None = None
        self._buffers: list[HostBuffers[str]] = []
        self._offered = -1  # the step that was published last
        self._turns = 0

    def before_step(self, run: Run) -> None:
        """Where the run has gone back, what it goes on from is published at once: a server must not keep the weights
        of a step that was discarded."""
        if run.step < self._offered:
            self._turns += 1
            self._offered = run.step
            self.publish(run, waits=True)

    def after_step(self, run: Run) -> None:
        if run.step % self.every == 0 or run.step == self.last:
            self.publish(run, waits=run.step == self.last)  # no other one follows that could be published instead

    def publish(self, run: Run, *, waits: bool = False) -> None:
        """Copy now, publish as soon as the copy has a digest. `waits` for room rather than leave this step out."""
        if waits:
            self._wait_for_room(LAST_S)
        busy = self._digesting is not None and self._digesting.is_alive()
        buffers = None if busy else self._free_buffers()
        if self.mesh.any(buffers is None):  # the same steps on every rank
            run.log.say(f"step {run.step} is not published: the step before it is still being read")
            return
        assert buffers is not None
        began = time.perf_counter()
        held = {n: (self._boxes[n][0], buffers.tensors[n]) for n in buffers.tensors}
        for name, (_, copy) in held.items():
            copy.copy_(local(self._tensors[name]).detach(), non_blocking=True)
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        layers = {n: layer for n, layer in self._layers.items() if n in held}
        shapes = {n: tuple(t.shape) for n, t in self._tensors.items()}
        snapshot = WeightsSnapshot(run.step, held, shapes, layers, self.mesh.device, self._turns)
        self._offered = run.step
        buffers.used_by = weakref.ref(snapshot)
        run.log.log(run.step, publish_s=time.perf_counter() - began)
        self._digesting = threading.Thread(target=self._finish, args=(snapshot,), name="publish-digest", daemon=True)
        self._digesting.start()

    def _free_buffers(self) -> HostBuffers[str] | None:
        """Memory that no snapshot uses any more: a set for the newest, one for the next, and one for a copy that a slow
        follower still reads."""
        free = next((b for b in self._buffers if b.free), None)
        if free is None and len(self._buffers) < NUM_BUFFERS:
            like = {n: local(t) for n, t in self._tensors.items() if self._boxes[n]}
            free = HostBuffers(like, self.mesh.device)
            self._buffers.append(free)
        return free

    def _wait_for_room(self, seconds: float) -> None:
        """Until the copy before is offered, and a slow follower has left one."""
        self.wait()
        until = time.monotonic() + seconds
        while self._free_buffers() is None and time.monotonic() < until:
            time.sleep(0.02)

    def _finish(self, snapshot: WeightsSnapshot) -> None:
        snapshot.make_digest()
        self.server.publish(snapshot)

    def wait(self) -> None:
        """Until the last copy is offered."""
        if self._digesting is not None:
            self._digesting.join()

    @contextmanager
    def named(self, run: str) -> Iterator[None]:
        self.server.catalogue = replace(self.server.catalogue, run=run)
        try:
            yield
            self.wait()
            self.server.wait_until_pulled(LAST_S)
        finally:
            self.server.close()


def _own_address(first: str) -> str:
    """The address of this machine on the way to the first rank's."""
    if first in ("127.0.0.1", "localhost", "::1"):
        return first
    with socket.socket(socket.AF_INET6 if ":" in first else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((first, 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError as error:
            raise UserError(f"publish: {first} cannot be reached from here: {error.strerror}") from None


def _all_endpoints(mesh: Mesh, own: tuple[str, int]) -> list[tuple[str, int]]:
    if mesh.world_size == 1:
        return [own]
    import torch.distributed as dist

    found: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(found, own)
    return [(str(host), int(port)) for host, port in found]


@dataclass
class WeightsSnapshot:
    """The shards of one rank at one step, in host memory."""

    step: int
    held: Mapping[str, tuple[Box, Tensor]]
    shapes: Mapping[str, tuple[int, ...]]
    layers: Mapping[str, FormatHost]
    device: torch.device
    turns: int = 0
    digest: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._encoded: dict[str, dict[str, dict[str, Tensor]]] = {}  # by name and form

    def make_digest(self) -> None:
        found = hashlib.blake2b(digest_size=16)
        for name in sorted(self.held):
            box, t = self.held[name]
            found.update(f"{name} {box.start} {box.stop} {t.dtype}".encode())
            found.update(t.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self.digest = found.hexdigest()

    def parts(self, name: str, box: Box, form: Mapping[str, Any]) -> dict[str, Tensor]:
        if name not in self.held:
            raise UserError(f"this rank has no tensor {name!r}")
        where, t = self.held[name]
        if len(where.start) != len(box.start) or not where.contains(box):
            raise UserError(f"this rank does not hold {box} of {name!r}")
        dtype = DTYPES.get(str(form.get("dtype")))
        if dtype is None or not castable(t.dtype, dtype):
            raise UserError(f"{name!r} is {t.dtype} and cannot become {form.get('dtype')!r}")
        layer = self.layers.get(name)
        if form.get("format") is None:
            if layer is not None and layer.state_names:
                raise UserError(f"{name!r} trains in {layer.format.label}; a server of dense weights cannot follow it")
            return {"": t[box.slices(where)].to(dtype)}
        format = from_json(Fields(form, "the request").object("format"))
        if len(where.shape) != 2 or not dtype.is_floating_point:
            raise UserError(f"{name!r} is no matrix that {format.label} holds")
        shape, cuts = (where.shape[0], where.shape[1]), box.slices(where)
        format.check(shape)
        if any(
            end % b and end != n
            for s, b, n in zip(cuts, format.block(shape), shape, strict=True)
            for end in (s.start, s.stop)
        ):
            raise UserError(f"{name!r} cannot be cut to {box} in {format.label}")
        parts = self._encode(name, format, dtype, layer)
        return {n: p.contiguous() for n, p in format.cut(parts, shape, *cuts).items()}

    @torch.no_grad()
    def _encode(self, name: str, format: Format, dtype: torch.dtype, layer: FormatHost | None) -> dict[str, Tensor]:
        """This rank's shard in a Format; once for all followers while they want few."""
        key = f"{format!r} {dtype}"
        with self._lock:
            forms = self._encoded.setdefault(name, {})
            if key not in forms:
                t, state = self.held[name][1], self._state(name, format, layer)
                w = cast_weight(t.to(self.device), dtype)
                if not bool(w.isfinite().all()):
                    raise UnfitWeights(f"{name!r} holds NaN or infinite values at step {self.step}")
                trained = layer.format if layer is not None and layer.state_names else format
                parts = trained.encode(w, {n: s.to(self.device) for n, s in state.items()})
                if len(forms) >= MOST_FORMS:
                    del forms[next(iter(forms))]
                forms[key] = {n: p.cpu() for n, p in parts.items()}
            return forms[key]

    def _state(self, name: str, format: Format, layer: FormatHost | None) -> dict[str, Tensor]:
        """What the Format keeps beside the weight: trained with it, or nothing for a dense weight that is rounded."""
        if layer is not None and layer.state_names:
            if layer.format.stored() != format:
                raise UserError(f"{name!r} trains in {layer.format.label} and the server has {format.label}")
            prefix = name.removesuffix("weight")
            return {n: self.held[f"{prefix}weight_{n}"][1] for n in layer.state_names}
        where, t = self.held[name]
        state = {n: aux.tensor for n, aux in format.state(t).items()}
        if state and where.shape != self.shapes[name]:
            raise UserError(f"{name!r}: {format.label} needs the whole weight to find its state, and ranks hold shards")
        return state
