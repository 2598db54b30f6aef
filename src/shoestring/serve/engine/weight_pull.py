"""Pulls the weights of a published step into host memory: everything that this process serves, or nothing.

The publisher's layouts and the boxes that are wanted here make a plan (state/reshard): which of its ranks is asked for
which box. Its ranks are asked at the same time, each over its own connection.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import UserError, shown
from shoestring.serve.engine.weight_update import PreparedWeights, WantedWeight, WeightTarget
from shoestring.state.boxes import Box
from shoestring.state.files import DTYPE_NAMES
from shoestring.state.reshard.exchange import Catalogue, Gone, Offered, Publisher, WantedPiece, plain_host
from shoestring.state.reshard.layouts import BoxLayout
from shoestring.state.reshard.plan import make_plan
from shoestring.state.reshard.tasks import MovedTensor
from shoestring.state.reshard.version import WeightsVersion

log = logging.getLogger("shoestring.serve")
HERE = 1 << 24  # this process's rank in plans: above any rank of a publisher


class WeightPull:
    """Connections to all ranks of a publisher, and what is asked of each. Not thread-safe."""

    def __init__(
        self, address: tuple[str, int], target: WeightTarget, *, hosts: Collection[str] = (), timeout_s: float = 30.0
    ) -> None:
        """`hosts`: where ranks may listen besides the host of the address. UserError for a publisher whose model is
        another one."""
        self.target = target
        self._values: dict[str, dict[str, Tensor]] | None = None
        first = Publisher(address, timeout_s)
        self._ranks = [first]
        try:
            self.run = first.catalogue.run
            check_catalogue(first.catalogue, target.wanted)
            self._pieces = pieces_by_rank(first.catalogue, target.wanted)
            allowed = {first.host, *map(plain_host, hosts)}
            for host, port in first.endpoints[1:]:
                if plain_host(host) not in allowed:
                    raise UserError(
                        f"a rank of {self.run} is at {shown(host)}, another host than the one followed; allow it with "
                        "--follow-host"
                    )
                self._ranks.append(Publisher((host, port), timeout_s))
        except BaseException:
            self.close()
            raise

    def newest(self, other_than: Offered | None = None, seconds: float = 0.0) -> Offered | None:
        """What the publisher's first rank offers now; waits up to `seconds` for something else. None: nothing yet."""
        return self._ranks[0].newest(other_than, seconds)

    def pull(self, step: int) -> tuple[dict[str, dict[str, Tensor]], WeightsVersion, int]:
        """All values of that step, its full version, and the number of bytes; the next pull may write where these
        values are. `Gone` where a newer step replaced it."""
        digests: list[str] = []
        first = self._ranks[0].newest()
        for rank in self._ranks:
            found = rank.newest()
            if found is not None and first is not None and found.place < first.place:
                found = rank.newest(other_than=found, seconds=60.0)  # this rank is a moment behind
            if first is None or found is None or first.step != step or found.place != first.place:
                raise Gone(f"step {step} has been replaced")
            digests.append(found.digest)
        if self._values is None:  # the engine has taken over what was written there before
            self._values = self.target.empty()
        places = {rank: [self._place(piece) for piece in pieces] for rank, pieces in self._pieces.items()}
        sizes, errors = [0] * len(self._ranks), []

        def pull_from(rank: int) -> None:
            try:
                sizes[rank] = self._ranks[rank].pull(step, digests[rank], self._pieces[rank], places[rank])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=pull_from, args=(rank,), daemon=True) for rank in self._pieces]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self._join_whole_parts(places)
        digest = hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()
        return self._values, WeightsVersion(self.run, step, digest), sum(sizes)

    def _place(self, piece: WantedPiece) -> dict[str, Tensor]:
        """Where the parts of a piece are to be written: among the values, or what belongs to all pieces of a weight
        (tables) apart."""
        assert self._values is not None
        want, held = self.target.wanted[piece.name], self._values[piece.name]
        rows = piece.box.slices(want.box)
        if want.format is None:
            return {part: t[rows] for part, t in held.items()}
        cut = want.format.cut(dict(held), (want.box.shape[0], want.box.shape[1]), *rows)
        return {n: torch.empty_like(t) if n in want.format.whole_parts else t for n, t in cut.items()}

    def _join_whole_parts(self, places: Mapping[int, list[dict[str, Tensor]]]) -> None:
        assert self._values is not None
        seen: set[tuple[str, str]] = set()
        for rank, pieces in self._pieces.items():
            for piece, parts in zip(pieces, places[rank], strict=True):
                format = self.target.wanted[piece.name].format
                for part in () if format is None else format.whole_parts:
                    into = self._values[piece.name][part]
                    if (piece.name, part) in seen and not torch.equal(into, parts[part]):
                        raise UserError(f"the ranks of {self.run} sent different {part!r} of {piece.name!r}")
                    into.copy_(parts[part])
                    seen.add((piece.name, part))

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


class BackgroundPull:
    """For the other processes of a tensor-parallel server: pulls and prepares their share while they compute."""

    def __init__(self, address: tuple[str, int], target: WeightTarget, hosts: Collection[str] = ()) -> None:
        self.address, self.target, self.hosts = address, target, hosts
        self._worker = ThreadPoolExecutor(1, "shoestring-pull")
        self._pulled: Future[tuple[PreparedWeights, WeightsVersion]] | None = None

    def begin(self, step: int) -> None:
        self._pulled = self._worker.submit(self._pull, step)

    def _pull(self, step: int) -> tuple[PreparedWeights, WeightsVersion]:
        pull = WeightPull(self.address, self.target, hosts=self.hosts)
        try:
            values, version, _ = pull.pull(step)
            return self.target.prepare(values), version
        finally:
            pull.close()

    def take(self, step: int, digest: str, seconds: float) -> tuple[PreparedWeights, WeightsVersion] | None:
        """What was pulled; None where it is not there in time, could not be had, or is of other weights: a run that has
        gone back publishes a step again."""
        pulled, self._pulled = self._pulled, None
        if pulled is None:
            return None
        try:
            prepared, version = pulled.result(seconds)
        except (OSError, UserError, TimeoutError) as error:
            log.warning("this process has no weights of step %d: %s", step, error)
            return None
        return (prepared, version) if (version.step, version.digest) == (step, digest) else None


def check_catalogue(catalogue: Catalogue, wanted: Mapping[str, WantedWeight]) -> None:
    """UserError unless the publisher has this model's weights, all of them and no others."""
    for name, want in wanted.items():
        if name not in catalogue.tensors:
            raise UserError(
                f"the publisher's model has no {name!r}: it is another architecture than the one served here"
            )
        shape, dtype, _ = catalogue.tensors[name]
        if shape != want.shape:
            raise UserError(f"{name!r} has shape {list(shape)} at the publisher and {list(want.shape)} here")
        if not dtype.is_floating_point:
            raise UserError(f"{name!r} is {dtype} at the publisher and {want.dtype} here")
    # What a Format keeps beside a weight is named weight_*, and travels inside the packed parts.
    other = [n for n in catalogue.tensors if n not in wanted and not n.rpartition(".")[2].startswith("weight_")]
    if other:
        raise UserError(f"the publisher's model has {other[0]!r}, which the served model does not have")


def pieces_by_rank(catalogue: Catalogue, wanted: Mapping[str, WantedWeight]) -> dict[int, list[WantedPiece]]:
    """What to ask of each rank of the publisher."""
    here = {box: BoxLayout(((HERE, box),)) for box in {want.box for want in wanted.values()}}
    moved = {
        name: MovedTensor(want.shape, want.dtype.itemsize, catalogue.tensors[name][2], here[want.box])
        for name, want in wanted.items()
        if want.box.size
    }
    plan = make_plan(moved)
    found: dict[int, list[WantedPiece]] = {}
    for transfer in plan.transfers:
        for name, box in plan.tensors_of(transfer.pieces):
            want = wanted[name]
            _check_block(name, box, want)
            found.setdefault(transfer.sender, []).append(WantedPiece(name, box, form_of(want)))
    return found


def form_of(want: WantedWeight) -> dict[str, Any]:
    return {"dtype": DTYPE_NAMES[want.dtype], "format": None if want.format is None else want.format.to_json()}


def _check_block(name: str, box: Box, want: WantedWeight) -> None:
    if want.format is None:
        return
    block = want.format.block((want.shape[0], want.shape[1]))
    for dim in (0, 1):
        ends = (box.start[dim], box.stop[dim])
        if any(end % block[dim] and end != want.shape[dim] for end in ends):
            raise UserError(
                f"{name!r} is served as {want.format.label}, which can be cut along dim {dim} at multiples of "
                f"{block[dim]} only; the publisher's shards end at {ends[1]}"
            )
