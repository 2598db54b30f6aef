"""Measure, before training starts, which products of the 2:4 layers are faster on the sparse tensor cores.

A compiled model fixes its kernels when it is traced, so the shapes are measured before that, once for each GPU
(kernels/cusparselt_table.py), and the result is printed. Without a GPU or without cuSPARSELt all products are
dense.

Algorithms round differently. So all ranks take the choices of the first, and a run keeps them in its folder
(ProductChoices): resumed on another machine with the same kind of GPU, it stays equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoestring.mesh import Mesh
from shoestring.methods.sparse24 import gated_ffn
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.kernels import cusparselt_table
from shoestring.methods.sparse24.kernels.cusparselt_table import Measured
from shoestring.methods.sparse24.training import NoiseClock, sparse_layers
from shoestring.model.transformer import Decoder, Mlp
from shoestring.runlog import RunLog, write_atomically
from shoestring.train.data import TokenData
from shoestring.train.step import Hook, Run

Shape = tuple[int, int, int]  # m, k, n of a product
# Files with a run's choices, and where they come from if not from this GPU and torch.
RUN_FILES = {"cusparselt-*.json": "another GPU or torch", "cslt-*.json": "an earlier version of Shoestring"}


def tune_products(
    model: nn.Module,
    num_tokens: int,
    dtype: torch.dtype,
    say: Callable[[str], None] = print,
    *,
    mesh: Mesh | None = None,
    folder: Path | None = None,
) -> list[Measured]:
    """`num_tokens`: of one micro-batch on this rank; `folder`: of a resumed run, whose choices are used."""
    if not has_sparse_products():
        return []
    layers = multiplied(model)
    found: list[Measured] = []
    if mesh is None or mesh.is_main:
        if folder is not None:
            adopt_choices(folder, say)
        measured = [m for pruning, shape in layers for m in pruning.tune(num_tokens, shape, dtype)]
        found = list({m.key: m for m in measured}.values())
    if mesh is not None:
        found = mesh.broadcast_object(found)
        cusparselt_table.adopt(found)
    for line in (*map(product_line, found), *advice(found, drawn_shapes(layers, num_tokens))):
        say(line)
    return found


def has_sparse_products() -> bool:
    return torch.cuda.is_available() and torch.backends.cusparselt.is_available()


def tuned_noise_clock(model: Decoder, data: TokenData, mesh: Mesh, *, seed: int, resume: str | None) -> ProductChoices:
    """The NoiseClock of a run, after measuring its sparse products or adopting those of the run it resumes."""
    say = RunLog(None, main=mesh.is_main).say
    folder = None if resume is None else Path(resume)
    tokens = data.micro * data.context
    found = tune_products(model, tokens, model.compute_dtype, say, mesh=mesh, folder=folder)
    clock = NoiseClock(model, seed=seed, tokens_per_step=data.tokens_per_step, mesh=mesh)
    return ProductChoices(found, clock)


# -- messages ------------------------------------------------------------------------------------------------
def product_line(m: Measured) -> str:
    verdict = f"{m.gain:.2f}x, algorithms {m.algorithms}" if m.worth_it else "stays dense"
    return f"2:4 product {m.m}x{m.k} by {m.n}: {m.sparse_ms:.3f} ms, dense {m.dense_ms:.3f} ms: {verdict}"


def drawn_shapes(layers: list[tuple[Sparse24, tuple[int, int]]], num_tokens: int) -> list[Shape | None]:
    """The shape of the weight gradient of every layer with weight_grad=mvue; None where cuSPARSELt does not take it."""
    drawing = [(pruning, shape) for pruning, shape in layers if pruning.weight_grad == "mvue"]
    return [pruning.product_shapes(num_tokens, shape).get("weight_grad") for pruning, shape in drawing]


def advice(found: list[Measured], drawn: list[Shape | None]) -> list[str]:
    """A hint where mvue makes no product faster."""
    gaining = {(m.m, m.k, m.n) for m in found if m.worth_it}
    if not drawn or any(shape in gaining for shape in drawn):
        return []
    return [
        "2:4 weight gradients all stay dense, where mvue only adds noise and time: weight_grad=exact is better here"
    ]


# -- the file in the run folder ------------------------------------------------------------------------------
class ProductChoices(Hook):
    """Writes the choices of a run to its folder. The file name contains the GPU and the version of torch.

    It wraps `hook`, so that the number of hooks, which a checkpoint must match, is that of runs without it.
    """

    def __init__(self, found: list[Measured], hook: Hook) -> None:
        self.found, self.hook = found, hook

    def before_step(self, run: Run) -> None:
        if self.found and run.log.main and run.log.folder is not None:
            write_atomically(
                run.log.folder / cusparselt_table.table_file().name, cusparselt_table.table_text(self.found)
            )
        self.found = []
        self.hook.before_step(run)

    def after_step(self, run: Run) -> None:
        self.hook.after_step(run)

    def state_dict(self) -> dict[str, Any]:
        return self.hook.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hook.load_state_dict(state)


def adopt_choices(folder: Path, say: Callable[[str], None]) -> None:
    own = folder / cusparselt_table.table_file().name
    cusparselt_table.adopt(cusparselt_table.read_table(own))
    if own.is_file():
        return
    for pattern, whose in RUN_FILES.items():
        others = sorted(path.name for path in folder.glob(pattern))
        if others:
            say(
                f"{folder} has the algorithms of {whose} ({others[0]}): measured anew, so the run goes on with other "
                "roundings"
            )
            return


# -- which products there are --------------------------------------------------------------------------------
def multiplied(model: nn.Module) -> list[tuple[Sparse24, tuple[int, int]]]:
    """Pruning and weight shape of every product: those of each 2:4 layer, or gate and up as one where they are
    fused."""
    fused: dict[int, tuple[int, int]] = {}
    for mlp in model.modules():
        if not isinstance(mlp, Mlp) or not mlp.gated:
            continue
        if gated_ffn.fusable(mlp.gate, mlp.up, mlp.down, dense_phase=True):
            wide, narrow = gated_ffn.ffn_shapes(multiplied_shape(mlp.gate.weight))
            fused |= {id(mlp.gate): wide, id(mlp.up): wide, id(mlp.down): narrow}
    layers = sparse_layers(model, dense_phase=True)
    return [(x.pruning, fused.get(id(x.linear)) or multiplied_shape(x.linear.weight)) for x in layers]


def multiplied_shape(weight: Tensor) -> tuple[int, int]:
    """The shape that this rank multiplies with: FSDP2 gathers its shards, tensor parallelism does not."""
    shape = [int(n) for n in weight.shape]
    if isinstance(weight, DTensor):
        names = weight.device_mesh.mesh_dim_names or ()
        for axis, (name, placement) in enumerate(zip(names, weight.placements, strict=False)):
            if name == "tp" and placement.is_shard():
                shape[placement.dim] //= weight.device_mesh.size(axis)  # type: ignore[attr-defined]
    return shape[0], shape[1]
