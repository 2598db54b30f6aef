"""Pulls the weights of a published step into host memory: everything that this process serves, or nothing.

The publisher's layouts and the boxes that are wanted here make a plan (state/reshard): which of its ranks is asked for
which box. Its ranks are asked at the same time, each over its own connection.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor

from shoestring.errors import UserError
from shoestring.serve.engine.weight_update import Values, WantedWeight, WeightTarget
from shoestring.state.boxes import Box
from shoestring.state.files import DTYPE_NAMES
from shoestring.state.reshard.exchange import Catalogue, Gone, Offered, Publisher, WantedPiece
from shoestring.state.reshard.layouts import BoxLayout
from shoestring.state.reshard.plan import make_plan
from shoestring.state.reshard.tasks import MovedTensor
from shoestring.state.reshard.version import WeightsVersion

log = logging.getLogger("shoestring.serve")
HERE = 1 << 24  # this process's rank in plans: above any rank of a publisher


class WeightPull:
    """Connections to all ranks of a publisher, and what is asked of each. Not thread-safe."""

    def __init__(self, address: tuple[str, int], target: WeightTarget, timeout_s: float = 30.0) -> None:
        """UserError for a publisher whose model is another one."""
        self.target = target
        self._values: dict[str, dict[str, Tensor]] | None = None
        first = Publisher(address, timeout_s)
        self._ranks = [first]
        try:
            self.run = first.catalogue.run
            check_catalogue(first.catalogue, target.wanted)
            self._pieces = pieces_by_rank(first.catalogue, target.wanted)
            for endpoint in first.endpoints[1:]:
                self._ranks.append(Publisher(endpoint, timeout_s))
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
        if self._values is None:
            self._values = self.target.empty()
        values = self._values
        sizes, errors = [0] * len(self._ranks), []

        def pull_from(place: int) -> None:
            try:
                write = partial(self._write, values)
                sizes[place] = self._ranks[place].pull(step, digests[place], self._pieces[place], write)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=pull_from, args=(i,), daemon=True) for i in self._pieces]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        digest = hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()
        return values, WeightsVersion(self.run, step, digest), sum(sizes)

    def _write(self, values: Values, piece: WantedPiece, part: str, t: Tensor) -> None:
        into = self._region(values, piece, part)
        if into.shape != t.shape or into.dtype != t.dtype:
            raise UserError(
                f"the publisher sent {list(t.shape)} {t.dtype} for a part of {piece.name!r} that has "
                f"{list(into.shape)} {into.dtype} here"
            )
        into.copy_(t)

    def _region(self, values: Values, piece: WantedPiece, part: str) -> Tensor:
        """Where a part of a piece lies among the values."""
        want, held = self.target.wanted[piece.name], values[piece.name]
        if part not in held:
            raise UserError(f"the publisher sent {part!r} of {piece.name!r}, which is not wanted")
        rows = piece.box.slices(want.box)
        if want.format is None:
            return held[part][rows]
        return want.format.cut(dict(held), (want.box.shape[0], want.box.shape[1]), *rows)[part]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


class BackgroundPull:
    """For the other processes of a tensor-parallel server: pulls this process's share while it computes."""

    def __init__(self, address: tuple[str, int], target: WeightTarget) -> None:
        self.address, self.target = address, target
        self._worker = ThreadPoolExecutor(1, "shoestring-pull")
        self._step = -1
        self._pulled: Future[tuple[dict[str, dict[str, Tensor]], WeightsVersion, int]] | None = None

    def begin(self, step: int) -> None:
        self._step, self._pulled = step, self._worker.submit(self._pull, step)

    def _pull(self, step: int) -> tuple[dict[str, dict[str, Tensor]], WeightsVersion, int]:
        pull = WeightPull(self.address, self.target)
        try:
            return pull.pull(step)
        finally:
            pull.close()

    def take(self, step: int, seconds: float) -> tuple[dict[str, dict[str, Tensor]], WeightsVersion] | None:
        """What was pulled; None where it is not there in time or could not be had."""
        pulled, self._pulled = self._pulled, None
        if pulled is None or self._step != step:
            return None
        try:
            values, version, _ = pulled.result(seconds)
            self.target.check(values)
            return values, version
        except (OSError, UserError, TimeoutError) as error:
            log.warning("this process has no weights of step %d: %s", step, error)
            return None


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
