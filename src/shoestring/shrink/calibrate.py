"""What every linear layer sees on a calibration text, one block at a time.

    for step in walk(model, windows(tokens, 16, 512)):
        step.statistics["attn.q"].hessian      # X^T X of the inputs of blocks.<step.index>.attn.q
        ...                                    # change the block's weights here

The embedding runs once; then block after block reads its inputs from one store of activations and writes its
outputs back into it, so that memory holds one block's activations whatever the depth. A store above
`memory_gb` is a memory-mapped file. Between two blocks the caller may change the block just yielded: with
inputs="quantized" the block then runs again and the next one sees the changed outputs (errors propagate and
can be compensated), with inputs="full" it sees those of the unchanged block, which takes one pass instead of
two.

Layers that see the very same tensor (query, key and value; gate and up) share one Statistics.

With Calibration(visit=device) the model stays at home (visit.py): a block is on the device from its statistics until
the next block's turn, changes included, and then goes back. Close the walk if you leave it early.

Left out on purpose: several processes, attention masks between documents, and anything about methods.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoestring.errors import UserError, during
from shoestring.formats import FormatLinear
from shoestring.model.attention import rope_frequencies, rope_tables
from shoestring.model.transformer import Decoder
from shoestring.shrink.visit import visiting

Inputs = Literal["quantized", "full"]


@dataclass(frozen=True)
class Calibration:
    inputs: Inputs = "quantized"
    batch: int = 4  # windows that run at once
    memory_gb: float = 4.0  # activations beyond this go to a file
    folder: str | None = None  # for that file; None: the system's temporary folder
    num_samples: int = 0  # input tokens to keep per layer, evenly spaced
    double: bool = False  # sum the Hessian in fp64
    # Where one block at a time computes while the model stays at home; None: where the model lies.
    visit: torch.device | None = None


def check_spill(folder: str | None) -> None:
    """For recipes, before there is a run: a Calibration meets a missing folder after minutes."""
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"spill={folder} is no folder; give one that is there, with room for activations")


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
        raise UserError(
            f"{num_windows} calibration windows of {context} tokens is not possible: use 1 or more"
        )
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

    def __init__(self, layers: dict[str, nn.Module], num_tokens: int, calibration: Calibration) -> None:
        self.layers = layers
        self.dtype = torch.float64 if calibration.double else torch.float32
        self.keep_every = max(1, num_tokens // calibration.num_samples) if calibration.num_samples else 0
        self.num_samples = calibration.num_samples
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
        """Call between two forward passes: tensors of the last one are no longer compared with."""
        self._seen = []

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            # Held while they are compared, so that a new tensor cannot have the identity of an old one.
            first = next((n for t, n in self._seen if t is x), None)
            self.source.setdefault(name, first or name)
            if first is None:
                self._seen.append((x, name))
                self.sums.setdefault(name, _Sums(self.dtype, self.keep_every)).add(x.detach().flatten(0, -2))

        return hook

    def statistics(self, prefix: str = "") -> dict[str, Statistics]:
        made = {name: sums.mean(self.num_samples, prefix + name) for name, sums in self.sums.items()}
        return {name: made[self.source[name]] for name in self.source}


@dataclass
class _Sums:
    dtype: torch.dtype
    keep_every: int
    hessian: Tensor | None = None
    magnitude: Tensor | None = None
    samples: list[Tensor] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, x_RD: Tensor) -> None:
        if self.keep_every:
            self.samples.append(x_RD[-self.num_tokens % self.keep_every :: self.keep_every].clone())
        self.num_tokens += x_RD.shape[0]
        x = x_RD.to(self.dtype)
        if self.hessian is None or self.magnitude is None:
            self.hessian, self.magnitude = x.T @ x, x.abs().sum(0)
        else:
            self.hessian.addmm_(x.T, x)
            self.magnitude += x.abs().sum(0)

    def mean(self, num_samples: int, name: str) -> Statistics:
        assert self.hessian is not None and self.magnitude is not None
        if not self.hessian.isfinite().all():
            raise UserError(
                f"the inputs of {name} are not finite on the calibration text: the weights before it hold NaN "
                "or infinite values, or the activations overflow; check the model, or use dtype=fp32"
            )
        width = self.hessian.shape[0]
        kept = torch.cat(self.samples)[:num_samples] if self.samples else self.hessian.new_empty(0, width)
        return Statistics(
            self.hessian / self.num_tokens, self.magnitude / self.num_tokens, kept, self.num_tokens
        )


# -- walking -------------------------------------------------------------------------------------------------
def block_linears(block: nn.Module) -> dict[str, FormatLinear]:
    return {name: m for name, m in block.named_modules() if isinstance(m, FormatLinear)}


def walk(
    model: Decoder, tokens_NT: Tensor, calibration: Calibration | None = None, *, start: int = 0
) -> Generator[BlockStep, None, None]:
    """Yield the statistics of one block after the other; see the module docstring.

    Blocks before `start` are yielded without statistics, for a caller that has their weights already.
    """
    calibration = calibration or Calibration()
    check_tokens(model, tokens_NT)
    device = compute_device(model, calibration)
    num_windows, context = tokens_NT.shape
    shape = (num_windows, context, model.spec.d_model)
    with ExitStack() as stack:
        store = activation_store(shape, model.compute_dtype, device, calibration, stack)
        batches = [slice(i, i + calibration.batch) for i in range(0, num_windows, calibration.batch)]
        with torch.no_grad():
            for rows in batches:
                store[rows] = embed(model, tokens_NT[rows]).to(store.device)
        rope = rope_of(model, context, device)
        for index, block in enumerate(model.blocks):
            with visiting(block, calibration.visit, model.compute_dtype, keep=True):
                # The generator is suspended outside of no_grad: the caller's grad mode stays its own.
                statistics: dict[str, Statistics] = {}
                if index >= start:
                    statistics = run_block(block, index, store, batches, rope, device, calibration)
                elif calibration.inputs == "full":
                    run_block(block, index, store, batches, rope, device, None)
                yield BlockStep(index, statistics)
                if calibration.inputs == "quantized" and index + 1 < len(model.blocks):
                    run_block(block, index, store, batches, rope, device, None)


def compute_device(model: Decoder, calibration: Calibration) -> torch.device:
    return calibration.visit or model.embed.weight.device


@torch.no_grad()
def run_block(
    block: nn.Module,
    index: int,
    store: Tensor,
    batches: list[slice],
    rope: tuple[Tensor, Tensor] | None,
    device: torch.device,
    calibration: Calibration | None,
) -> dict[str, Statistics]:
    """Run a block over the store. With a calibration: collect, and write the outputs only if nobody will run
    it again. Without: write the outputs.
    """
    write = calibration is None or calibration.inputs == "full"
    with during(f"block {index}"), ExitStack() as stack:
        collector = None
        if calibration is not None:
            num_tokens = store.shape[0] * store.shape[1]
            collector = stack.enter_context(Collector(dict(block_linears(block)), num_tokens, calibration))
        for rows in batches:
            out = block(store[rows].to(device), rope, None)
            if write:
                store[rows] = out.to(store.device)
            if collector is not None:
                collector.forget_inputs()
        return collector.statistics(f"blocks.{index}.") if collector is not None else {}


def embed(model: Decoder, tokens_BT: Tensor) -> Tensor:
    """What the first block reads, on the device of the embedding."""
    x = model.embed(tokens_BT.to(model.embed.weight.device)).to(model.compute_dtype)
    if model.spec.positions == "learned":
        x = x + model.positions(torch.arange(tokens_BT.shape[1], device=x.device)[None]).to(x.dtype)
    return x


def rope_of(model: Decoder, context: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    if model.spec.positions == "learned":
        return None
    positions = torch.arange(context, device=device)[None]
    return rope_tables(rope_frequencies(model.spec, device), positions, model.compute_dtype)


def activation_store(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    calibration: Calibration,
    stack: ExitStack,
) -> Tensor:
    """Room for the activations: on the device when they fit the budget, else in a file that goes with us."""
    num_bytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
    if num_bytes <= calibration.memory_gb * 1e9:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="shoestring-", dir=calibration.folder)
        )
        path = Path(folder) / "activations"
        with path.open("wb") as f:
            # Reserved now: a mapped file that meets a full disk later would kill the process without a word.
            os.posix_fallocate(f.fileno(), 0, num_bytes)
    except OSError as error:
        hint = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise UserError(
            f"cannot keep {num_bytes / 1e9:.1f} GB of activations in {calibration.folder or tempfile.gettempdir()}: "
            f"{hint}; give another folder (spill), more memory_gb, or fewer calibration windows"
        ) from error
    count = shape[0] * shape[1] * shape[2]
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(shape)


def check_tokens(model: Decoder, tokens_NT: Tensor) -> None:
    if tokens_NT.ndim != 2 or tokens_NT.numel() == 0:
        raise UserError(f"calibration tokens have shape {list(tokens_NT.shape)}; give [windows, context]")
    spec = model.spec
    if tokens_NT.shape[1] > spec.max_positions:
        raise UserError(
            f"calibration windows of {tokens_NT.shape[1]} tokens do not fit this model, which has "
            f"{spec.max_positions} positions"
        )
    low, high = int(tokens_NT.min()), int(tokens_NT.max())
    if low < 0 or high >= spec.vocab_size:
        raise UserError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {spec.vocab_size}; encode the "
            "calibration text with this model's own tokenizer"
        )
