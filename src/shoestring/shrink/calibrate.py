"""Statistics of the inputs of every linear layer on a calibration text, one block at a time.

    for step in walk(model, windows(tokens, 16, 512)):
        step.statistics["attn.q"].hessian      # X^T X of the inputs of blocks.<step.index>.attn.q
        ...                                    # change the block's weights here

The embedding runs once. Then each block reads its inputs from one store of activations and writes its outputs back, so
that memory holds the activations of one block whatever the depth. A store above `memory_gb` is a memory-mapped file.
The caller may change the block just yielded. With inputs="quantized" the block then runs again, and the next one sees
the changed outputs. With inputs="full" the next one sees the outputs of the unchanged block: one pass instead of two.

Layers that read the same tensor (query, key and value; gate and up) share one Statistics.

With Calibration(onload_device=device) the model stays in host memory (host/block_offload.py). A block is on the device
from its statistics until the next step, and goes back with its changes. Close the walk if you leave it early.

Not supported: several processes, attention masks between documents.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoestring.errors import UserError, during
from shoestring.formats import FormatLinear
from shoestring.host.block_offload import BlockOffload, activation_store, on_device
from shoestring.model.blocks import BlocksModel, block_prefixes

Inputs = Literal["quantized", "full"]


@dataclass(frozen=True)
class Calibration(BlockOffload):
    inputs: Inputs = "quantized"
    batch: int = 4  # windows that run at once
    num_samples: int = 0  # input tokens to keep per layer, evenly spaced
    double: bool = False  # sum the Hessian in fp64
    # token: all tokens have the same weight in the Hessian, their inputs divided by their root mean square. In some
    # layers one token in a hundred has most of the squares, and the Hessian knows little of the others.
    weigh: Literal["square", "token"] = "square"


@dataclass(frozen=True)
class Statistics:
    """Sums over the tokens that a layer saw."""

    hessian: Tensor  # mean over tokens of x x^T, [in, in]
    magnitude: Tensor  # mean over tokens of |x|, [in]
    samples: Tensor  # [num_samples, in]
    num_tokens: int

    def scaled(self, factor: Tensor) -> Statistics:
        """The statistics of x * factor."""
        return Statistics(
            self.hessian * factor[:, None] * factor[None, :],
            self.magnitude * factor,
            self.samples * factor,
            self.num_tokens,
        )


@dataclass(frozen=True)
class BlockStep:
    index: int
    # By the layer's name inside the block; shared objects for shared inputs.
    statistics: dict[str, Statistics]


def windows(tokens: Tensor, num_windows: int, context: int) -> Tensor:
    """[num_windows, context] windows, evenly spaced over a text: the same text gives the same windows."""
    if num_windows < 1 or context < 1:
        raise UserError(f"{num_windows} calibration windows of {context} tokens is not possible: use 1 or more")
    if len(tokens) < num_windows * context:
        raise UserError(
            f"the calibration text has {len(tokens)} tokens, {num_windows} windows of {context} need "
            f"{num_windows * context}: give a longer text or use fewer or shorter windows"
        )
    gap = (len(tokens) - context) // max(1, num_windows - 1) if num_windows > 1 else 0
    return torch.stack([tokens[i * gap : i * gap + context] for i in range(num_windows)])


# -- collecting ----------------------------------------------------------------------------------------------
class Collector:
    """Hooks on linear layers that sum up their inputs."""

    def __init__(self, layers: Mapping[str, nn.Module], num_tokens: int, calibration: Calibration) -> None:
        self.layers = layers
        self.dtype = torch.float64 if calibration.double else torch.float32
        self.keep_every = max(1, num_tokens // calibration.num_samples) if calibration.num_samples else 0
        self.num_samples = calibration.num_samples
        self.alike = calibration.weigh == "token"
        self.sums: dict[str, _Sums] = {}
        self.source: dict[str, str] = {}  # layer -> the first layer that sees the same tensor
        self._seen: list[tuple[Tensor, str]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Collector:
        for name, layer in self.layers.items():
            self._handles.append(layer.register_forward_pre_hook(self._hook(name)))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def forget_inputs(self) -> None:
        """Call between two forward passes: drops the tensors of the last one."""
        self._seen = []

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            # _seen keeps the tensors alive, so that a new one cannot reuse the identity of an old one.
            first = next((n for t, n in self._seen if t is x), None)
            self.source.setdefault(name, first or name)
            if first is None:
                self._seen.append((x, name))
                self.sums.setdefault(name, _Sums(self.dtype, self.keep_every, self.alike)).add(
                    x.detach().flatten(0, -2)
                )

        return hook

    def statistics(self, prefix: str = "") -> dict[str, Statistics]:
        made = {name: sums.mean(self.num_samples, prefix + name) for name, sums in self.sums.items()}
        found = {name: made[self.source[name]] for name in self.source}
        unseen = [name for name in self.layers if name not in found]
        if unseen:
            warnings.warn(
                f"{len(unseen)} layers saw no calibration token and are treated as if all inputs were alike: "
                f"{', '.join(prefix + name for name in unseen[:3])}{' ...' if len(unseen) > 3 else ''}; "
                "a longer calibration text reaches more experts",
                stacklevel=2,
            )
        return found | {name: _unseen(self.layers[name], self.dtype) for name in unseen}


def _unseen(layer: nn.Module, dtype: torch.dtype) -> Statistics:
    """For an expert that the router chose for no token: every input channel counts the same, so that methods which
    weigh errors by the inputs round to nearest."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    width, device = weight.shape[1], weight.device
    eye = torch.eye(width, dtype=dtype, device=device)
    return Statistics(eye, torch.ones(width, dtype=dtype, device=device), eye.new_empty(0, width), 0)


@dataclass
class _Sums:
    dtype: torch.dtype
    keep_every: int
    alike: bool = False
    hessian: Tensor | None = None
    magnitude: Tensor | None = None
    samples: list[Tensor] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, x_RD: Tensor) -> None:
        if self.keep_every:
            self.samples.append(x_RD[-self.num_tokens % self.keep_every :: self.keep_every].clone())
        self.num_tokens += x_RD.shape[0]
        x = x_RD.to(self.dtype)
        magnitude = x.abs().sum(0)
        if self.alike:
            x = x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(x.dtype).tiny)
        if self.hessian is None or self.magnitude is None:
            self.hessian, self.magnitude = x.T @ x, magnitude
        else:
            self.hessian.addmm_(x.T, x)
            self.magnitude += magnitude

    def mean(self, num_samples: int, name: str) -> Statistics:
        assert self.hessian is not None and self.magnitude is not None
        if not self.hessian.isfinite().all():
            raise UserError(
                f"the inputs of {name} are not finite on the calibration text: the weights before it hold NaN "
                "or infinite values, or the activations overflow; check the model, or use dtype=fp32"
            )
        width = self.hessian.shape[0]
        kept = torch.cat(self.samples)[:num_samples] if self.samples else self.hessian.new_empty(0, width)
        return Statistics(self.hessian / self.num_tokens, self.magnitude / self.num_tokens, kept, self.num_tokens)


# -- walking -------------------------------------------------------------------------------------------------
def block_linears(block: nn.Module) -> dict[str, FormatLinear]:
    return {name: m for name, m in block.named_modules() if isinstance(m, FormatLinear)}


@dataclass(frozen=True)
class BlockPasses:
    """Runs blocks of a model over a store of activations [inputs, T, D], a batch of inputs at a time."""

    model: BlocksModel
    batches: list[slice]
    args: list[tuple[Any, ...]]  # what each block takes beside the activations
    device: torch.device

    @torch.no_grad()
    def run(self, index: int, store: Tensor) -> None:
        """Replace the block's inputs in the store by its outputs."""
        block = self.model.blocks[index]
        with during(f"block {index}"):
            for rows in self.batches:
                store[rows] = block(store[rows].to(self.device), *self.args[index]).to(store.device)

    @torch.no_grad()
    def collect(self, index: int, store: Tensor, calibration: Calibration, *, write: bool) -> dict[str, Statistics]:
        """The statistics of the block's layers; with `write` its outputs replace its inputs."""
        block, num_tokens = self.model.blocks[index], store.shape[0] * store.shape[1]
        with during(f"block {index}"), Collector(block_linears(block), num_tokens, calibration) as collector:
            for rows in self.batches:
                out = block(store[rows].to(self.device), *self.args[index])
                if write:
                    store[rows] = out.to(store.device)
                collector.forget_inputs()
            return collector.statistics(block_prefixes(self.model)[index])


def embed_all(
    model: BlocksModel, inputs: Tensor, calibration: Calibration, stack: ExitStack, num_stores: int = 1
) -> tuple[list[Tensor], BlockPasses]:
    """Stores that hold the first block's inputs, and the BlockPasses over them. The stores share memory_gb."""
    model.check_inputs(inputs)
    device = calibration.onload_device or model.device
    share = replace(calibration, memory_gb=calibration.memory_gb / num_stores)
    batches = [slice(i, i + calibration.batch) for i in range(0, len(inputs), calibration.batch)]
    stores: list[Tensor] = []
    with torch.no_grad():
        for rows in batches:
            x = model.embed_inputs(inputs[rows])
            if not stores:
                shape, dtype = (len(inputs), *x.shape[1:]), model.compute_dtype
                stores = [activation_store(shape, dtype, device, share, stack) for _ in range(num_stores)]
            for store in stores:
                store[rows] = x.to(store.device)
    return stores, BlockPasses(model, batches, model.block_args(stores[0].shape[1], device), device)


def walk(
    model: BlocksModel, inputs: Tensor, calibration: Calibration | None = None, *, start: int = 0
) -> Generator[BlockStep, None, None]:
    """Yield the statistics of one block after the other.

    inputs: token ids [windows, context], or whatever else the model reads. Blocks before `start` are yielded without
    statistics, for a caller that has their weights.
    """
    calibration = calibration or Calibration()
    full = calibration.inputs == "full"
    with ExitStack() as stack:
        (store,), passes = embed_all(model, inputs, calibration, stack)
        for index, block in enumerate(model.blocks):
            with on_device(block, calibration.onload_device, model.compute_dtype, keep=True):
                # Yields outside of no_grad, which would otherwise change the caller's grad mode.
                statistics: dict[str, Statistics] = {}
                if index >= start:
                    statistics = passes.collect(index, store, calibration, write=full)
                elif full:
                    passes.run(index, store)
                yield BlockStep(index, statistics)
                if not full and index + 1 < len(model.blocks):
                    passes.run(index, store)
