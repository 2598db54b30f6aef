"""The compressed reducer: sums gradients over the mesh axis `replica` with few bytes.

    check (header.py) -> clip -> error feedback and exchange (feedback.py) -> the sums replace the gradients

The clip is here because error feedback must see clipped gradients: a residual keeps what a clip in between would have
cut away. The norm over the other axes of a replica is clipped to clip / sqrt(replicas), so that the sum of independent
gradients has the norm that the user asked for.

A checkpoint holds one residual per replica, laid out over dp and tp as its parameter is. On another number of replicas
the sum of the residuals is shared out equally, so that nothing is lost. Nor is it where reducer=auto takes a method
without error feedback at the next start: what is left of the one before is added to the next gradient, once.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoestring import plugins
from shoestring.errors import UserError
from shoestring.formats.linear import local
from shoestring.mesh import Mesh
from shoestring.model.stages import copies
from shoestring.state.optimizer import parameter_names
from shoestring.state.run_state import Relaid
from shoestring.train.gradients import clip_gradients
from shoestring.train.reducers.buckets import CLIP_RATIO, Buckets, RunningClip
from shoestring.train.reducers.compressor import Compressor
from shoestring.train.reducers.demo import DeMo
from shoestring.train.reducers.feedback import Compression
from shoestring.train.reducers.header import exchange_headers, fingerprint, first_bad, first_difference, tensor_hash
from shoestring.train.reducers.methods import for_tensor
from shoestring.train.reducers.quantizers import PLAIN
from shoestring.train.reducers.rounds import Link
from shoestring.train.step import Reducer, Run

COMPARE_EVERY = 100  # steps between comparisons of the replicas' weights
_REPLICA = re.compile(r"residual\.private@replica(\d+)\.")


class CompressedReducer(Reducer, Relaid):
    """For a model that is built and cut already; parameters that need no gradient are left out."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        compressor: Compressor,
        *,
        clip: float = 0.0,
        seed: int = 0,
        compare_every: int = COMPARE_EVERY,
        selector: str = "uniform",
        budget: float | None = None,
        folder: Path | None = None,
        overlap: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`budget` and `folder` are for a selector: bytes per step, and where its plans are logged."""
        if mesh.replica == 1:
            raise UserError(f"reducer={compressor.name} sums gradients over replicas, and this mesh has one")
        self.mesh, self.compressor, self.compare_every = mesh, compressor, compare_every
        # Others may be clipped by the norm of the sum, as usual; and so may what overlaps, which is bounded before.
        self.clips = compressor.feedback and not overlap
        self.clip = clip / math.sqrt(mesh.replica) if self.clips else 0.0
        self.link = Link(mesh.group("replica"))
        self.everyone = Link(dist.group.WORLD)
        self.steps = self._sent_before = 0
        self.params = trained_parameters(model)
        chosen = choose(compressor, model, self.params)
        where: dict[str, Any] = {"rank": self.link.rank, "size": self.link.size, "seed": seed}
        self.compression = Compression(chosen, **where)
        if selector != "uniform":
            shapes = {name: local(p).shape for name, p in self.params.items()}
            about = {
                "wanted": compressor,
                "shapes": shapes,
                "budget": budget,
                "folder": folder if mesh.is_main else None,
            }
            self.compression = plugins.load("selectors", selector)(chosen, **about, **where)
        self.selector_name = selector
        self.residuals = {n: _residual(self.params[n]) for n, c in chosen.items() if c.feedback}
        self.compression.residuals = {name: local(r) for name, r in self.residuals.items()}
        self.leftovers: dict[str, Tensor] = {}  # residuals of tensors that have no error feedback any more
        for name, c in chosen.items():
            c.begin(local(self.params[name]), self.compression.at(name, 0))
        self.running = RunningClip(list(self.params), CLIP_RATIO if compressor.feedback else 0.0)
        self.buckets = Buckets(self.params, self._send) if overlap else None
        self._meter, self._say = _Meter(), say
        say(self.summary())

    def begin(self, run: Run) -> None:
        if not isinstance(self.compressor, DeMo):
            return
        plain = isinstance(run.optimizer, torch.optim.SGD) and not any(
            g["momentum"] for g in run.optimizer.param_groups
        )
        if not plain:
            raise UserError(
                f"reducer=demo is an optimizer too and gives signs to plain SGD, not to "
                f"{type(run.optimizer).__name__}: build it with train.reducers.demo.sgd, or choose another reducer"
            )

    # -- a step ------------------------------------------------------------------------------------

    def __call__(self, model: nn.Module) -> None:
        began = time.perf_counter()
        before = self.link.sent_bytes if self.buckets is None else self._sent_before
        if self.buckets is not None:
            self.buckets.finish()
        else:
            params = {n: p for n, p in self.params.items() if p.grad is not None}
            self._check(params, self._compares())
            if self.clip > 0:
                clip_gradients(params.values(), self.clip, mesh=self.mesh, copies=copies(model))
            self._exchange({name: local(p.grad) for name, p in params.items() if p.grad is not None})
        self.steps += 1
        self._meter.add(self.link.sent_bytes - before, time.perf_counter() - began)

    def expect(self, num_micros: int) -> None:
        if self.buckets is not None:
            self._sent_before = self.link.sent_bytes
            self.buckets.expect(num_micros)

    def _send(self, bucket: int, names: list[str]) -> None:
        """One bucket, while the backward pass goes on."""
        params = {n: self.params[n] for n in names}
        self._check(params, bucket == 0 and self._compares())
        with torch.no_grad():
            for name, p in params.items():
                if p.grad is not None:
                    p.grad.copy_(self.running(name, p.grad))
            self._exchange({name: p.grad for name, p in params.items() if p.grad is not None})

    def _exchange(self, gradients: Mapping[str, Tensor]) -> None:
        for name in self.leftovers.keys() & gradients.keys():
            gradients[name].add_(local(self.leftovers.pop(name)))
        totals = self.link.run(self.compression.exchange(gradients, self.steps))
        if totals:
            torch._foreach_copy_([gradients[name] for name in totals], list(totals.values()))

    def observe(self, loss: Tensor) -> None:
        if self.compression.wants_loss:
            self.compression.loss = float(loss)

    def _compares(self) -> bool:
        return self.compare_every > 0 and self.steps % self.compare_every == 0

    def _check(self, params: Mapping[str, nn.Parameter], compares: bool) -> None:
        names = list(params)
        hashes = None
        if compares:
            hashes = torch.stack([tensor_hash(local(p)) for p in self.params.values()])
        shapes = [tuple(p.shape) for p in params.values()]
        equal = self.everyone.run(
            exchange_headers(
                what=fingerprint(self.compressor, self.selector_name, names, shapes),
                step=self.steps,
                bad=first_bad([local(p.grad) for p in params.values() if p.grad is not None]),
                weights=0 if hashes is None else int(hashes.sum()),
                names=names,
                num_places=self.mesh.dp * self.mesh.tp,
                device=self.mesh.device,
            )
        )
        if equal:
            return
        assert hashes is not None
        found = self.link.run(first_difference(hashes, list(self.params)))
        raise UserError(
            f"step {self.steps + 1}: replicas no longer have the same weights"
            f"{f': {found}' if found else ''}; go on from the last checkpoint, with the same kind of machine and the "
            "same versions for all replicas"
        )

    # -- what the user sees ------------------------------------------------------------------------

    def summary(self) -> str:
        """Bytes per step, and what bounds the compression."""
        shapes = {name: local(p).shape for name, p in self.params.items()}
        sent, plain = self.compression.sent_bytes(shapes), self.plain_bytes()
        kept = {n: s for n, s in shapes.items() if self.compression.compressors[n] != self.compressor}
        least = self.compression.sent_bytes(kept)
        line = (
            f"gradients over {self.link.size} replicas by {self.compressor.name}: each sends {sent / 1e6:.3g} MB a "
            f"step instead of {plain / 1e6:.3g} MB ({plain / max(sent, 1):.1f}x less)"
        )
        if not least:
            return line
        return (
            f"{line}; {least / 1e6:.3g} MB of it are embeddings and tensors of one dim, which stay near exact, so at "
            f"most {plain / least:.0f}x is possible"
        )

    def plain_bytes(self) -> int:
        return sum(PLAIN.sent_bytes(local(p).shape, self.link.size) for p in self.params.values())

    def scalars(self) -> dict[str, float]:
        """Since the last call; the norm is that of this rank's part of the residuals."""
        sent, share = self._meter.read()
        squares = [r.square().sum() for r in self.compression.residuals.values()]
        norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
        return {
            **self.compression.scalars(max(self.steps, 1)),
            "sent_mb": sent / 1e6,
            "compression": self.plain_bytes() / max(sent, 1.0),
            "reduce_share": share,
            "residual_norm": norm,
        }

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._state({self.link.rank: self._kept()}, {self.link.rank: self.running.norms})

    def _kept(self) -> dict[str, Tensor]:
        return {**self.residuals, **self.leftovers}

    def state_to_load(self, saved: Collection[str]) -> dict[str, Any]:
        found = [(match, name[match.end() :]) for name in saved if (match := _REPLICA.match(name))]
        replicas = {int(match[1]) for match, _ in found}
        names = dict.fromkeys(name for _, name in found if name in self.params and name not in self.residuals)
        self.leftovers = {name: _residual(self.params[name]) for name in names}
        if replicas in (set(), set(range(self.link.size))):
            return self.state_dict()
        empty = {i: {n: torch.zeros_like(r) for n, r in self._kept().items()} for i in sorted(replicas)}
        return self._state(empty, {i: torch.zeros_like(self.running.norms) for i in sorted(replicas)})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Tensors of state_dict() were filled in place; those of another number of replicas are added up."""
        self.steps = state["steps"]
        norms = list(state.get("norms", {}).values())
        if norms and norms[0] is not self.running.norms:  # of another number of replicas
            self.running.norms.copy_(torch.stack(norms).mean(0))
        for decided in state.get("selector", {}).values():
            self.compression.load_decisions(decided)
        if self.leftovers:
            self._say(
                f"{self.compressor.name} has no error feedback for {len(self.leftovers)} tensors that had it: what is "
                "left of them is added to their next gradients"
            )
        kept = state.get("residual", {})
        if not kept or self._is_live(kept):
            return
        for name, residual in self._kept().items():
            total = local(residual).zero_()
            for part in kept.values():
                total += local(part[name])
            total /= self.link.size

    def _is_live(self, kept: dict[str, dict[str, Tensor]]) -> bool:
        mine = self._kept()
        return all(t is mine[n] for part in kept.values() for n, t in part.items())

    def _state(self, by_replica: Mapping[int, Mapping[str, Tensor]], norms: Mapping[int, Tensor]) -> dict[str, Any]:
        """Empty parts are left out: a run that is resumed with another method need not have them."""
        place = f"private@{self.mesh.place_in_replica}"
        memory = {n: dict(m) for n, m in self.compression.memories.items() if m}
        residual = {_replica_key(i): dict(tensors) for i, tensors in by_replica.items() if tensors}
        selector = self.compression.decisions()
        state: dict[str, Any] = {"steps": self.steps}
        state |= {"residual": residual} if residual else {}
        if self.buckets is not None and residual:
            state["norms"] = {_replica_key(i): t for i, t in norms.items()}
        state |= {"memory": {place: memory}} if memory else {}
        state |= {"selector": {f"{place}-selector": selector}} if selector else {}
        return state


class _Meter:
    """Bytes and seconds of steps since the last read."""

    def __init__(self) -> None:
        self.steps, self.bytes, self.seconds, self.began = 0, 0, 0.0, time.perf_counter()

    def add(self, sent: int, seconds: float) -> None:
        self.steps, self.bytes, self.seconds = self.steps + 1, self.bytes + sent, self.seconds + seconds

    def read(self) -> tuple[float, float]:
        """(bytes per step, share of the time)."""
        passed = max(time.perf_counter() - self.began, 1e-9)
        result = self.bytes / max(self.steps, 1), min(1.0, self.seconds / passed)
        self.__init__()  # type: ignore[misc]
        return result


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that get gradients, by the names that checkpoints use."""
    return {name: cast(nn.Parameter, p) for p, name in parameter_names(model).items() if p.requires_grad}


def choose(compressor: Compressor, model: nn.Module, params: Mapping[str, nn.Parameter]) -> dict[str, Compressor]:
    """The compressor of each parameter (methods.py). Where dp has more ranks than a matrix has rows, some hold none of
    it: there is nothing to compress."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        name: for_tensor(compressor, p, embedding=id(p) in embeddings) if local(p).numel() else PLAIN
        for name, p in params.items()
    }


def _replica_key(replica: int) -> str:
    return f"private@replica{replica}"


def _residual(param: nn.Parameter) -> Tensor:
    """Zeros laid out as the parameter is."""
    return torch.zeros_like(param.detach(), dtype=torch.float32, memory_format=torch.contiguous_format)
