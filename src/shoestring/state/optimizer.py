"""Optimizer state by parameter name, so that it can be resharded like the model.

    {"state": {parameter name: {"exp_avg": tensor, "step": tensor, ...}},
     "param_groups": [{"params": [parameter names], "lr": 0.001, ...}]}

Why not torch's get/set_optimizer_state_dict: asking it for the state of an optimizer that has not stepped yet
takes a step (AdamW then counts from one), and setting casts every state tensor to the dtype of its parameter.
Here state is read as it is, and loaded in place into tensors that already exist.

Left out: FSDP1 (flat parameters) and optimizers over parameters that are not the model's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.state.agreement import everyone

# Wrappers put these into names; a checkpoint must not depend on whether a block was wrapped.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
# Keys of a group that are not taken from a checkpoint: which kernels step was chosen for this device, and `step` of the
# state was created where they read it.
_OF_THIS_DEVICE = ("params", "fused", "foreach", "capturable")


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Name of each parameter without wrapper prefixes; a tied parameter has the first of its names."""
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        names[parameter] = name
    return names


def _name(names: dict[Tensor, str], parameter: Tensor) -> str:
    if parameter not in names:
        raise UserError(
            f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not the model's; make "
            "the optimizer from model.parameters() after the model was converted and sharded"
        )
    return names[parameter]


def optimizer_state(model: nn.Module, optimizer: Optimizer, mesh: Mesh | None = None) -> dict[str, Any]:
    """Over several stages of a pipeline the groups are those of the whole model; every process calls it."""
    names = parameter_names(model)
    groups = [
        {k: [_name(names, p) for p in v] if k == "params" else v for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    if mesh is not None and mesh.pp > 1:
        groups = _joined(everyone(mesh, groups))
    return {"state": {_name(names, p): dict(s) for p, s in optimizer.state.items() if s}, "param_groups": groups}


def _joined(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of the same settings as one, each name once."""
    joined: dict[str, dict[str, Any]] = {}
    for group in groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        whole = joined.setdefault(repr(sorted(settings.items())), {**settings, "params": []})
        whole["params"] += [n for n in group["params"] if n not in whole["params"]]
    return list(joined.values())


def init_state(optimizer: Optimizer) -> None:
    """Create the state of an optimizer that has not stepped, by a step with zero gradients and zero rate."""
    parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    if all(optimizer.state.get(p) for p in parameters):
        return
    rates = [g.get("lr") for g in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate


def forget_absent(model: nn.Module, optimizer: Optimizer, saved: set[str]) -> None:
    """Drop the state of parameters that have none in the checkpoint (`saved`: names such as 'w.exp_avg')."""
    names = parameter_names(model)
    for parameter, state in list(optimizer.state.items()):
        name = _name(names, parameter)
        if state and not any(n == name or n.startswith(f"{name}.") for n in saved):
            del optimizer.state[parameter]


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """Take over what is not a tensor (learning rate, betas, counters); the groups must be the same."""
    names = parameter_names(model)
    # A stage of a pipeline has a part of each group, and of some groups none.
    mine, here = set(names.values()), [{_name(names, p) for p in g["params"]} for g in optimizer.param_groups]
    there = [(g, mine & set(g["params"])) for g in loaded["param_groups"]]
    for group, held in zip(optimizer.param_groups, here, strict=True):
        saved = next((g for g, params in there if params == held), None)
        if saved is None:
            raise UserError(
                f"the checkpoint has parameter groups of {[len(params) for _, params in there]} parameters, the "
                f"optimizer of {[len(params) for params in here]}, or others; build the optimizer as in the saved run"
            )
        group.update({k: v for k, v in saved.items() if k not in _OF_THIS_DEVICE})
    parameters = {name: p for p, name in names.items()}
    for name, state in loaded["state"].items():
        # Tensors were filled in place and are the same objects; numbers and lists come from the checkpoint.
        optimizer.state.setdefault(parameters[name], {}).update(state)
