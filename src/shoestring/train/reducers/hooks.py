"""Compressed gradients in someone else's loop: two lines for DDP and for FSDP2.

    ddp = DistributedDataParallel(model)
    kept = compress_ddp(ddp, "int8")

    fully_shard(model, mesh=mesh["dp"])                         # the inner axis alone
    kept = compress_fsdp(model, "topk:0.01", mesh["replica"].get_group())

`kept` has `state_dict` and `load_state_dict` for the residuals of this process, and counts bytes in
`kept.link.sent_bytes`. The sums are those of the trainer's reducer on the same gradients.

Both run during the backward pass, when the norm of the whole gradient is not known. Error feedback must not see a
gradient that is far too large, so each tensor is clipped to `clip_ratio` times its running norm (0: never).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoestring.errors import UserError
from shoestring.formats.linear import local
from shoestring.train.reducers.buckets import CLIP_RATIO, RunningClip
from shoestring.train.reducers.compressed import choose, trained_parameters
from shoestring.train.reducers.demo import DeMo
from shoestring.train.reducers.feedback import Compression
from shoestring.train.reducers.header import exchange_headers, fingerprint, first_bad
from shoestring.train.reducers.methods import parse_compressor
from shoestring.train.reducers.rounds import Link


class HookedCompression:
    """What both hooks share: residuals, running norms and the link of this process."""

    def __init__(
        self, model: nn.Module, method: str, group: dist.ProcessGroup, *, average: bool, clip_ratio: float, seed: int
    ) -> None:
        compressor = parse_compressor(method)
        if isinstance(compressor, DeMo):
            raise UserError("demo is an optimizer too and needs plain SGD; use it with the trainer, not with a hook")
        params = trained_parameters(model)
        self.names: dict[Tensor, str] = {p: n for n, p in params.items()}
        self.method, self.average = compressor, average
        self.link = Link(group)
        chosen = choose(compressor, model, params)
        self.compression = Compression(chosen, rank=self.link.rank, size=self.link.size, seed=seed)
        self.clip = RunningClip(list(params), clip_ratio)
        self.steps: dict[str, int] = {}

    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace the gradients by their sum or mean over the replicas, in place."""
        names = list(gradients)
        step = self.steps.get(names[0], 0)
        device = gradients[names[0]].device
        self.link.run(
            exchange_headers(
                what=fingerprint(self.method, names, [tuple(g.shape) for g in gradients.values()]),
                step=step,
                bad=first_bad(list(gradients.values())),
                weights=0,
                names=names,
                num_places=1,
                device=device,
            )
        )
        clipped = {name: self.clip(name, g) for name, g in gradients.items()}
        sums = self.link.run(self.compression.exchange(clipped, step))
        for name, total in sums.items():
            gradients[name].copy_(total / self.link.size if self.average else total)
            self.steps[name] = step + 1

    def state_dict(self) -> dict[str, Any]:
        """Of this process; a replica that is resumed needs its own."""
        return {
            "residuals": dict(self.compression.residuals),
            "memories": {n: dict(m) for n, m in self.compression.memories.items() if m},
            "norms": self.clip.norms.clone(),
            "steps": dict(self.steps),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.compression.residuals = {n: t.clone() for n, t in state["residuals"].items()}
        self.compression.memories |= {n: {k: t.clone() for k, t in m.items()} for n, m in state["memories"].items()}
        self.clip.norms.copy_(state["norms"])
        self.steps = dict(state["steps"])


def compress_ddp(
    ddp: DistributedDataParallel, method: str, *, average: bool = True, clip_ratio: float = CLIP_RATIO, seed: int = 0
) -> HookedCompression:
    """Register a communication hook on a DDP model. On a CPU, buckets are exchanged while the backward pass goes on."""
    group = ddp.process_group
    kept = HookedCompression(ddp.module, method, group, average=average, clip_ratio=clip_ratio, seed=seed)
    worker = ThreadPoolExecutor(max_workers=1)  # one: buckets must come in the same order on all ranks

    def exchange(bucket: dist.GradBucket, done: torch.futures.Future[Tensor]) -> None:
        try:
            kept.reduce(dict(zip((kept.names[p] for p in bucket.parameters()), bucket.gradients(), strict=True)))
            done.set_result(bucket.buffer())
        except Exception as error:
            done.set_exception(error)  # type: ignore[arg-type]

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        if bucket.buffer().device.type == "cpu":
            worker.submit(exchange, bucket, done)
        else:
            exchange(bucket, done)  # its kernels belong on the stream of this thread
        return done

    # DDP compares annotations with the types themselves; in this file they are strings.
    hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]})
    ddp.register_comm_hook(None, hook)
    return kept


def compress_fsdp(
    model: nn.Module,
    method: str,
    replicas: dist.ProcessGroup,
    *,
    average: bool = True,
    clip_ratio: float = CLIP_RATIO,
    seed: int = 0,
) -> HookedCompression:
    """Put the axis `replicas` around an FSDP2 model whose own mesh does not have it."""
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise UserError("this model has no fully_shard module; call fully_shard first, or use compress_ddp")
    if any(_is_hsdp(p) for p in model.parameters()):
        raise UserError(
            "fully_shard got a 2-D mesh (HSDP), which sums over its first axis in full precision before a hook can "
            "run, so nothing would be saved; give it the inner axis alone and the outer one to compress_fsdp"
        )
    kept = HookedCompression(model, method, replicas, average=average, clip_ratio=clip_ratio, seed=seed)
    for module in modules:
        module.set_all_reduce_hook(partial(_reduce_flat, kept, list(_own_parameters(module))))
    return kept


def _reduce_flat(kept: HookedCompression, params: list[nn.Parameter], flat: Tensor) -> None:
    """`flat` holds this rank's part of each gradient of one fully_shard module, padded as for the first rank."""
    gradients, start = {}, 0
    for param in params:
        part = local(param)
        gradients[kept.names[param]] = flat[start : start + part.numel()].view(part.shape)
        start += _slot(param)
    if start != flat.numel():
        raise UserError(
            f"FSDP2 reduces {flat.numel()} values where the parameters of its module have {start}: some got no "
            "gradient in this step; freeze them with requires_grad_(False)"
        )
    kept.reduce(gradients)


def _slot(param: nn.Parameter) -> int:
    """Values that FSDP2 sets aside for one rank's part: as many rows as the first rank has."""
    assert isinstance(param, DTensor)
    ways = param.device_mesh.size(0)
    own = local(param)
    rows = -(-_rows_before_cut(param) // ways)
    return rows * own.shape[1:].numel()


def _rows_before_cut(param: DTensor) -> int:
    """Rows of what FSDP2 cut: of the part that tensor parallelism left, where there is any."""
    rows = param.shape[0]
    for axis, placement in list(enumerate(param.placements))[1:]:
        if placement.is_shard(0):
            rows //= param.device_mesh.size(axis)
    return rows


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Those that fully_shard(module) manages, in its order: not those of modules inside that it was called on."""
    seen: set[int] = set()

    def visit(at: nn.Module) -> Iterator[nn.Parameter]:
        if id(at) in seen:
            return
        seen.add(id(at))
        for param in at.parameters(recurse=False):
            if id(param) not in seen and param.requires_grad:
                seen.add(id(param))
                yield param
        for child in at.children():
            if not isinstance(child, FSDPModule):
                yield from visit(child)

    return visit(module)


def _is_hsdp(param: nn.Parameter) -> bool:
    if not isinstance(param, DTensor) or param.device_mesh.ndim < 2:
        return False
    return param.placements[0].is_replicate() and any(p.is_shard() for p in param.placements[1:])
