"""A pipeline of stages as the trainer's ForwardBackward: torch's runtime runs the order of a schedule (mesh.pp).

Each process holds one stage of the Decoder (model/stages.py), with pipeline=interleaved two. Micro-batches flow through
the stages, activations forward and gradients back, each as one tensor over a link. The last stage computes the
objective on its own part of the model: whatever calls model(tokens, readout=...) works. Afterwards every process knows
the loss, and a tied embedding has the same gradient on the first and the last stage.

Left out: objectives that read the model's embedding, or several forward passes of one model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoestring.errors import UserError
from shoestring.formats.linear import local
from shoestring.mesh import Mesh, MeshConfig
from shoestring.model.spec import ModelSpec
from shoestring.model.stages import Stages, plan_stages, view_of_stage
from shoestring.model.transformer import Decoder
from shoestring.train.pipeline_order import CHUNKS, choose, make_order, most_live
from shoestring.train.step import Micro, Objective, Run

if TYPE_CHECKING:
    from shoestring.train.torch_pipelining import Runtime

MEASURED_STEP = 2  # `auto` chooses after it: the first one compiles and opens connections


def check_pipeline(mesh: MeshConfig, schedule: str, *, whole_graph: str | None, rows: int, micro: int) -> None:
    """Before anything is read. `whole_graph`: a setting that sees the model as one graph; `rows` of a process, `micro`
    of them at a time."""
    if mesh.pp == 1:
        given = f"mesh.layers={mesh.layers}" if mesh.layers else f"pipeline={schedule}" if schedule != "auto" else None
        if given:
            raise UserError(f"{given} is for a pipeline, and mesh.pp is 1; give mesh.pp=N, or leave it out")
        return
    if whole_graph:
        raise UserError(
            f"{whole_graph} needs the whole model in one process, and mesh.pp={mesh.pp} cuts it; leave it out"
        )
    if rows // micro < mesh.pp:
        raise UserError(
            f"mesh.pp={mesh.pp} needs {mesh.pp} micro-batches a step at least, and {rows} rows a process in passes of "
            f"{micro} are {rows // micro}; give a smaller micro= or a larger batch="
        )
    if rows % micro:
        raise UserError(
            f"a pipeline needs micro-batches of one shape: {rows} rows a process are no multiple of {micro}"
        )
    if mesh.dp > 1 and schedule in ("interleaved", "zero-bubble"):
        raise UserError(f"pipeline={schedule} does not work with mesh.dp={mesh.dp} (FSDP2); choose eager1f1b or 1f1b")
    if schedule == "interleaved" and rows // micro % mesh.pp:
        raise UserError(
            f"pipeline=interleaved needs micro-batches in multiples of mesh.pp={mesh.pp}, and there are {rows // micro}"
        )


def stages_of(spec: ModelSpec, mesh: MeshConfig, schedule: str) -> Stages | None:
    if mesh.pp == 1:
        return None
    return plan_stages(spec, mesh.pp * (CHUNKS if schedule == "interleaved" else 1), mesh.layers)


@dataclass
class _Step:
    """What the stages' forward passes of the running step read."""

    objective: Objective
    total: Tensor | float
    loss: Tensor


class StagePipeline:
    """Built on every process, after the model was cut, sharded and filled."""

    def __init__(self, model: Decoder, mesh: Mesh, stages: Stages, schedule: str = "auto") -> None:
        group = mesh.group("pp")
        assert group is not None
        self.model, self.mesh, self.schedule, self.group = model, mesh, schedule, group
        self.num_stages, held = len(stages.layers), stages.held_by(mesh.stage, mesh.pp)
        self.parts = {i: model if len(held) == 1 else view_of_stage(model, stages, i) for i in held}
        for index, part in self.parts.items():  # FSDP2's hooks stay around it
            part.forward = partial(self._forward, index, part)  # type: ignore[method-assign]
        if isinstance(model, FSDPModule):
            model.set_reshard_after_forward(False)  # a stage is gathered once a step, not once a micro-batch
        self._chosen = "1f1b" if schedule == "auto" else schedule
        self._runtimes: dict[tuple[Any, ...], Runtime] = {}
        self._step: _Step | None = None
        self._num_steps, self._forward_s = 0, 0.0
        self._say: Callable[[str], None] = lambda text: None
        self._tied_group = tied_group(model, mesh)

    def begin(self, run: Run) -> None:
        self._say = run.log.say

    def __call__(self, model: nn.Module, objective: Objective, micros: list[Micro], total: Tensor | float) -> Tensor:
        self._step = step = _Step(objective, total, torch.zeros((), device=self.mesh.device))
        self._forward_s = 0.0
        self._runtime(micros).step([m.tokens_BT for m in micros], [{"micro": m} for m in micros])
        self._sum_tied()
        self._num_steps += 1
        if self.schedule == "auto" and self._num_steps == MEASURED_STEP:
            self._choose(micros)
        return self.mesh.sum_over_stages(step.loss)

    @torch.no_grad()
    def losses(self, model: nn.Module, objective: Objective, micros: list[Micro]) -> Tensor:
        """The summed loss without gradients, one micro-batch after the other."""
        self._step = step = _Step(objective, 1.0, torch.zeros((), device=self.mesh.device))
        sent = []
        for micro in micros:
            for index, part in self.parts.items():
                x = micro.tokens_BT
                if index > 0:
                    x = self._example(micro)
                    dist.recv(x, group=self.group, group_src=(index - 1) % self.mesh.pp)
                x = part(x, micro=micro)
                if index < self.num_stages - 1:
                    x = x.contiguous()
                    sent.append((dist.isend(x, group=self.group, group_dst=(index + 1) % self.mesh.pp), x))
        for work, _ in sent:
            assert work is not None
            work.wait()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a backward pass would have done it
        return self.mesh.sum_over_stages(step.loss)

    # -- one stage -------------------------------------------------------------------------------------------

    def _forward(self, index: int, part: Decoder, x: Tensor, *, micro: Micro) -> Tensor:
        """`x`: tokens on the first stage, else what the stage before has left."""
        began, step = time.perf_counter(), self._step
        assert step is not None
        rest = partial(Decoder.forward, part, carried=None if index == 0 else x)
        if index == self.num_stages - 1:
            out = step.objective(rest, micro)  # type: ignore[arg-type]
            step.loss += out.detach()
        else:
            out = rest(micro.tokens_BT)
        self._forward_s += time.perf_counter() - began
        return out

    def _loss(self, output: Tensor, target: Any) -> Tensor:
        assert self._step is not None
        return output / self._step.total

    def _example(self, micro: Micro) -> Tensor:
        """Of what travels between stages."""
        shape = (*micro.tokens_BT.shape, self.model.spec.d_model)
        return torch.empty(shape, dtype=self.model.compute_dtype, device=self.mesh.device)

    def _runtime(self, micros: list[Micro]) -> Runtime:
        from shoestring.train.torch_pipelining import Runtime  # private parts of torch, for those who have stages

        shape = tuple(micros[0].tokens_BT.shape)
        assert all(tuple(m.tokens_BT.shape) == shape for m in micros), "micro-batches of one shape"
        key = (shape, len(micros), self._chosen)
        if key not in self._runtimes:
            self._runtimes.clear()  # its buffers are large
            chunks = self.num_stages // self.mesh.pp
            self._runtimes[key] = Runtime(
                dict(self.parts),
                make_order(self._chosen, self.num_stages, len(micros), chunks=chunks),
                len(micros),
                self.group,
                self.mesh.device,
                first_input=micros[0].tokens_BT,
                carried=self._example(micros[0]),
                loss=self._loss,
            )
        return self._runtimes[key]

    def _sum_tied(self) -> None:
        """The first stage looks rows up in the embedding, the last one multiplies with it: one gradient for both."""
        if self._tied_group is not None:
            weight = self.model.embed.weight
            assert weight.grad is not None
            dist.all_reduce(local(weight.grad), group=self._tied_group)

    # -- pipeline=auto ---------------------------------------------------------------------------------------

    def _choose(self, micros: list[Micro]) -> None:
        """After a measured step: 1f1b or eager1f1b, the same on every process."""
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        measured = [self._hop(self._example(micros[0])), self._forward_s / len(micros)]
        times = torch.tensor(measured, device=self.mesh.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        hop, forward = times.tolist()
        fits = not self.mesh.any(not self._fits(len(micros)))
        self._chosen, why = choose(forward, hop, lambda live: fits, self.mesh.pp, len(micros))
        self._say(f"pipeline={self._chosen}: {why}")

    def _hop(self, x: Tensor) -> float:
        """Seconds of a tensor to the next stage: half of there and back, the best of three; the slower of both links
        of this stage."""
        slowest = 0.0
        for first in range(self.mesh.pp - 1):  # one link after the other
            if self.mesh.stage not in (first, first + 1):
                continue
            times = []
            for _ in range(3):
                began = time.perf_counter()
                if self.mesh.stage == first:
                    dist.send(x, group=self.group, group_dst=first + 1)
                    dist.recv(x, group=self.group, group_src=first + 1)
                else:
                    dist.recv(x, group=self.group, group_src=first)
                    dist.send(x, group=self.group, group_dst=first)
                if x.is_cuda:
                    torch.cuda.synchronize()
                times.append((time.perf_counter() - began) / 2)
            slowest = max(slowest, min(times))
        return slowest

    def _fits(self, num_micros: int) -> bool:
        """Whether eager1f1b's live micro-batches fit, by the peak of this step with 1f1b's."""
        if self.mesh.device.type != "cuda":
            return True
        live = [most_live(make_order(s, self.mesh.pp, num_micros)[self.mesh.stage]) for s in ("1f1b", "eager1f1b")]
        peak = torch.cuda.max_memory_allocated()
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - peak
        return (peak - torch.cuda.memory_allocated()) / live[0] * (live[1] - live[0]) < 0.9 * free


def tied_group(model: Decoder, mesh: Mesh) -> dist.ProcessGroup | None:
    """This process and the one that holds the other copy of the embedding; every process calls it."""
    if not model.spec.tied:
        return None
    per_stage, mine = mesh.dp_size * mesh.tp, None
    for place in range(per_stage):
        ranks = [place, (mesh.pp - 1) * per_stage + place]
        group = dist.new_group(ranks)
        if mesh.rank in ranks:
            mine = group
    return mine
