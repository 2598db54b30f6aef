"""The state of a training run as tensors and JSON values by name, and back.

State is a nested dict of tensors (DTensors included) and JSON values. It is flattened into names: every tensor gets the
dotted path to it; every branch without tensors is one JSON value.

Entries below a key `private` belong to one rank (random generators, residuals, cursors). Their name carries
the rank's place in the mesh; otherwise DCP would take them for copies of the same thing and keep one.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.state.agreement import agree
from shoestring.state.manifest import Manifest, decode_value, encode_value
from shoestring.state.optimizer import forget_absent, init_state, load_optimizer_state, optimizer_state, parameter_names

PRIVATE = "private"
_PRIVATE_NAME = re.compile(r"(^|\.)private@")


# -- nested state to names and back --------------------------------------------------------------------------


def coordinate(mesh: Mesh | None) -> str:
    """The rank's place in the mesh, as it appears in names of private entries."""
    return "dp0-tp0" if mesh is None else mesh.place


def flatten(state: dict[str, Any], where: str = "dp0-tp0") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, encoded JSON values by name). The first level is always split."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}

    def add(store: dict[str, Any], name: str, value: Any) -> None:
        if name in tensors or name in values:
            raise UserError(f"two entries of the state are called {name!r}; rename one of them")
        store[name] = value

    def visit(name: str, node: Any) -> None:
        if isinstance(node, Tensor):
            add(tensors, name, node)
        elif not _is_split(node):
            add(values, name, encode_value(name, node))
        else:
            for key, child in _children(node):
                visit(f"{name}.{_label(key, where)}", child)

    for key, child in state.items():
        visit(_label(key, where), child)
    return tensors, values


def unflatten(state: dict[str, Any], values: dict[str, Any], where: str = "dp0-tp0") -> list[str]:
    """Put decoded values into the state by name, in place; returns the names that `values` does not have."""
    absent: list[str] = []

    def visit(name: str, node: Any) -> Any:
        if isinstance(node, Tensor):
            return node
        if not _is_split(node):
            if name in values:
                return decode_value(values[name])
            absent.append(name)
            return node
        new = {key: visit(f"{name}.{_label(key, where)}", child) for key, child in _children(node)}
        if isinstance(node, dict):
            node.update(new)
            return node
        if isinstance(node, list):
            node[:] = new.values()
            return node
        return tuple(new.values())

    for key in state:
        state[key] = visit(_label(key, where), state[key])
    return absent


def regrouped(saved: Manifest, state: dict[str, Any], where: str = "dp0-tp0") -> Manifest:
    """The manifest with its values under the names that this state has for them.

    A branch without tensors is one value, and whether it has tensors may have changed since it was saved: reducer=auto
    may choose a method with residuals at one start, and one without at the next."""
    values = dict(saved.values)

    def split(name: str) -> None:
        """One value there, several here."""
        if isinstance(whole := decode_value(values[name]), dict):
            del values[name]
            values.update({f"{name}.{key}": encode_value(name, value) for key, value in whole.items()})

    def join(name: str, node: Any) -> None:
        """Several values there, one here. Where one is missing all stay, and the checkpoint does not fit."""
        taken: list[str] = []

        def gather(name: str, node: Any) -> Any:
            if name in values:
                taken.append(name)
                return decode_value(values[name])
            if isinstance(node, dict) and node:
                return {key: gather(f"{name}.{key}", child) for key, child in node.items()}
            if _PRIVATE_NAME.search(name):
                return node
            raise KeyError(name)

        with contextlib.suppress(KeyError):
            joined = gather(name, node)
            for part in taken:
                del values[part]
            if taken:  # else it is a private value that was not saved
                values[name] = encode_value(name, joined)

    def visit(name: str, node: Any) -> None:
        if isinstance(node, Tensor):
            return
        if not _is_split(node):
            if name not in values:
                join(name, node)
            return
        if name in values:
            split(name)
        for key, child in _children(node):
            visit(f"{name}.{_label(key, where)}", child)

    for key, child in state.items():
        visit(_label(key, where), child)
    return replace(saved, values=values)


def _label(key: Any, where: str) -> str:
    return f"{PRIVATE}@{where}" if key == PRIVATE else str(key)


def _children(node: Any) -> list[tuple[Any, Any]]:
    return list(node.items()) if isinstance(node, dict) else list(enumerate(node))


def _is_split(node: Any) -> bool:
    """Whether a branch has a tensor or a private entry below it, so that it cannot be one value."""
    if isinstance(node, Tensor):
        return True
    if isinstance(node, dict):
        return PRIVATE in node or any(_is_split(v) for v in node.values())
    return isinstance(node, (list, tuple)) and any(_is_split(v) for v in node)


def check_fits(
    what: str, saved: Manifest, tensors: dict[str, Tensor], values: dict[str, Any], elsewhere: Collection[str] = ()
) -> None:
    """`elsewhere`: names that other stages of a pipeline have."""
    mine, theirs = {*tensors, *values}, {*saved.tensors, *saved.values}
    missing = sorted(n for n in mine - theirs if not _PRIVATE_NAME.search(n))
    unexpected = sorted(n for n in theirs - mine - set(elsewhere) if not _PRIVATE_NAME.search(n))
    wrong = [
        f"{n} (a tensor on one side only)" for n in sorted(mine & theirs) if (n in tensors) != (n in saved.tensors)
    ]
    for name in sorted(tensors.keys() & saved.tensors.keys()):
        there, here = saved.tensors[name], tensors[name]
        if there.shape != tuple(here.shape) or there.dtype != here.dtype:
            wrong.append(f"{name} (saved {there.dtype} {list(there.shape)}, here {here.dtype} {list(here.shape)})")
    problems = [
        f"{len(names)} {what}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        for what, names in (
            ("missing in the checkpoint", missing),
            ("not expected here", unexpected),
            ("different", wrong),
        )
        if names
    ]
    if problems:
        raise UserError(
            f"the {what} does not fit this run: {'; '.join(problems)}; "
            "resume with the configuration that wrote it, or start a new run"
        )


# -- a training run ------------------------------------------------------------------------------------------


class Relaid(ABC):
    """A part of a run whose state depends on the number of processes, so that what is loaded is not what is saved."""

    @abstractmethod
    def state_to_load(self, saved: Collection[str]) -> dict[str, Any]:
        """The state to fill and to give to load_state_dict; `saved`: the names that the checkpoint has for this
        part."""


class RunLike(Protocol):
    step: int
    model: Any
    optimizer: Any
    mesh: Any
    log: Any
    trained_only: bool


def rng_state() -> dict[str, Tensor]:
    """The generators of torch in this process."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a run on the CPU must not open a context on the GPU
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def seed_rng(seed: int, mesh: Mesh | None) -> None:
    """All generators of `rng_state`, another start for each share of the batch."""
    torch.manual_seed((seed * 1_000_003 + (0 if mesh is None else mesh.dp_rank)) % 2**63)


def model_state(run: RunLike) -> dict[str, Any]:
    """The model's tensors by name; those that get gradients where the others are frozen for good."""
    if not run.trained_only:
        return get_model_state_dict(run.model)
    return {name: p.detach() for p, name in parameter_names(run.model).items() if p.requires_grad}


def run_state(run: RunLike, parts: dict[str, Any]) -> dict[str, Any]:
    """Everything that a checkpoint of the run holds; its tensors are the run's own, not copies."""
    return {
        "step": run.step,
        "model": model_state(run),
        "optimizer": optimizer_state(run.model, run.optimizer, run.mesh),
        "rng": {PRIVATE: rng_state()},
        "parts": {name: part.state_dict() for name, part in parts.items()},
    }


def state_to_fill(run: RunLike, parts: dict[str, Any], saved: Collection[str]) -> dict[str, Any]:
    """The run's state with a place for every optimizer tensor among the `saved` names, and no other."""
    prefix = "optimizer.state."
    names = {n.removeprefix(prefix) for n in saved if n.startswith(prefix)}
    if names:
        init_state(run.optimizer)
    forget_absent(run.model, run.optimizer, names)
    return agree(run.mesh, lambda: {**run_state(run, parts), "parts": _parts_to_load(parts, saved)})


def put_back(run: RunLike, parts: dict[str, Any], state: dict[str, Any]) -> None:
    """The filled state into the run and its parts."""
    if not run.trained_only:  # those were filled in place
        set_model_state_dict(run.model, state["model"])
    load_optimizer_state(run.model, run.optimizer, state["optimizer"])
    for name, part in parts.items():
        part.load_state_dict(state["parts"][name])
    set_rng_state(state["rng"][PRIVATE])
    run.step = state["step"]


def started_anew(absent: list[str]) -> str:
    """For the line about a resumed run: what the checkpoint did not have for this rank."""
    return f"; {len(absent)} entries private to other ranks start anew" if absent else ""


def _parts_to_load(parts: dict[str, Any], saved: Collection[str]) -> dict[str, Any]:
    state = {}
    for name, part in parts.items():
        prefix = f"parts.{name}."
        if isinstance(part, Relaid):
            state[name] = part.state_to_load([n.removeprefix(prefix) for n in saved if n.startswith(prefix)])
        else:
            state[name] = part.state_dict()
    return state
