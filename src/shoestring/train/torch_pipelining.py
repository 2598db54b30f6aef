"""All that this package uses of torch's private pipeline runtime, so that a new torch is checked in one place.

Why private: none of torch's public schedules sends eagerly, and its lowering of an order posts receives too late for a
slow link. Here an order of pipeline_order.py becomes torch's list of actions, with every receive posted EARLY
computations before the one that needs it. Orders with several stages on a rank are lowered by torch, because there two
stages share a link and both ends must agree on the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from shoestring.train.pipeline_order import Order, StagePass

EARLY = 2  # on 200 Mbit/s with a hop of a whole forward pass 6.5 s a step instead of 7.9 (4 stages, 16 micro-batches)

_KINDS = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}
_SENDS = {"F": _ComputationType.SEND_F, "B": _ComputationType.SEND_B, "I": _ComputationType.SEND_B}
_RECEIVES = {"F": _ComputationType.RECV_F, "B": _ComputationType.RECV_B, "I": _ComputationType.RECV_B}


def actions_of(tasks: Sequence[StagePass], num_stages: int) -> list[_Action | None]:
    """Of a rank with one stage."""
    stage = tasks[0].stage
    wanted: dict[int, list[_Action]] = {}  # receives, by the computation that they stand before
    for place, task in enumerate(tasks):
        receives = (task.kind == "F" and stage > 0) or (task.kind in "BI" and stage < num_stages - 1)
        if receives:
            action = _Action(stage, _RECEIVES[task.kind], task.micro)
            wanted.setdefault(max(0, place - EARLY), []).append(action)
    actions: list[_Action | None] = [_Action(stage, _ComputationType.UNSHARD)]
    for place, task in enumerate(tasks):
        actions += wanted.get(place, [])
        actions.append(_Action(stage, _KINDS[task.kind], task.micro))
        sends = (task.kind == "F" and stage < num_stages - 1) or (task.kind in "BI" and stage > 0)
        if sends:
            actions.append(_Action(stage, _SENDS[task.kind], task.micro))
    reduce = _Action(stage, _ComputationType.REDUCE_GRAD)
    return [*actions, reduce, _Action(stage, _ComputationType.RESHARD)]


class Runtime:
    """Runs one order over and over: `modules` are this rank's stages by their index."""

    def __init__(
        self,
        modules: dict[int, nn.Module],
        order: Order,
        num_micros: int,
        group: ProcessGroup,
        device: torch.device,
        *,
        first_input: Tensor,
        carried: Tensor,
        loss: Callable[[Tensor, Any], Tensor],
    ) -> None:
        """`first_input` and `carried`: examples of what the first stage reads, and of what travels between stages.
        `loss(output of the last stage, _)`: what the backward pass starts from."""
        num_stages = max(task.stage for tasks in order for task in tasks) + 1
        travels = carried.detach().requires_grad_()
        self.stages = [
            PipelineStage(
                module,
                index,
                num_stages,
                device,
                input_args=first_input if index == 0 else travels,
                # The last stage's summed loss.
                output_args=travels if index < num_stages - 1 else torch.zeros((), requires_grad=True),
                group=group,
            )
            for index, module in modules.items()
        ]
        self._runtime = _PipelineScheduleRuntime(self.stages, num_micros, loss_fn=loss, scale_grads=False)
        one_each = len(order) == num_stages
        if one_each:
            lowered = {rank: actions_of(tasks, num_stages) for rank, tasks in enumerate(order)}
            self._runtime._prepare_schedule_with_comms(lowered, format="compute_comms")
        else:
            plain: dict[int, list[_Action | None]] = {
                rank: [_Action(task.stage, _KINDS[task.kind], task.micro) for task in tasks]
                for rank, tasks in enumerate(order)
            }
            self._runtime._prepare_schedule_with_comms(plain, format="compute_only")

    def step(self, inputs: Sequence[Tensor], keywords: Sequence[dict[str, Any]]) -> None:
        """All micro-batches once, forward and backward. `inputs` are read by the first stage only."""
        for stage in self.stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        first = self.stages[0].is_first
        self._runtime._step_microbatches(
            [(x,) if first else () for x in inputs],
            list(keywords),
            list(keywords),  # targets, which the loss does not read
            None,
            return_outputs=False,
        )
