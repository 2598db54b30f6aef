"""What the ranks of a job agree on: an action that all do or none, one rank's result for all, the items of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shoestring.errors import UserError
from shoestring.mesh import Mesh


def agree(mesh: Mesh | None, action: Callable[[], Any]) -> Any:
    """Run the action on every rank; when it fails on one, raise on all, so that none waits for it."""
    if is_alone(mesh):
        return action()
    error: Exception | None = None
    result = None
    try:
        result = action()
    except Exception as e:
        error = e
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            kind, _, text = message.partition(": ")
            raise UserError(text) if kind == "UserError" else RuntimeError(f"rank {rank}: {message}")
    return result


def on_main(mesh: Mesh | None, action: Callable[..., Any], *args: Any) -> Any:
    """Run on rank 0 only and hand its result to all; an error is raised on all."""
    if mesh is None:
        return action(*args)
    return mesh.broadcast_object(agree(mesh, lambda: action(*args) if mesh.is_main else None))


def is_alone(mesh: Mesh | None) -> bool:
    return mesh is None or mesh.world_size == 1


def everyone(mesh: Mesh, some: list[Any]) -> list[Any]:
    """The items of all ranks, on every rank."""
    if mesh.world_size == 1:
        return some
    found: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(found, some)
    return [item for items in found for item in items]
