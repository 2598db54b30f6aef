"""Adapters of a served model: which there are, and their weights where products read them.

Every adapter has a slot. For each group of layers that is one product (q, k, v; o; gate, up; down) the weights of all
adapters lie in one stack, so that rows of different adapters, and of none, are one batch
(kernels/gemv/gather_lora.py): a row has the number of its slot, -1 for none. Fused steps read the stacks beside their
products (`RowAdapters`); in the plain forward each layer has a branch that does the same, row by row.

Loading writes a slot in place. Graphs that were captured stay valid, unless the stacks have to grow (`generation`). An
adapter that is unloaded serves no new request; its slot is free when its last request is gone.

Refused: DoRA, which changes the length of the base's rows; adapters of experts and of the head; ranks above MOST_RANK.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.errors import UserError, shown
from shoestring.formats import FormatLinear
from shoestring.formats.convert import format_linear
from shoestring.kernels.gemv.gather_lora import gather_lora_, gather_lora_ref_
from shoestring.kernels.runtime.triton_backend import next_power_of_2
from shoestring.model.adapter_folder import AdapterFile, LoraWeights
from shoestring.model.mesh_layouts import layout_on
from shoestring.model.transformer import Block, Decoder, Mlp
from shoestring.state.boxes import Box

LEAST_RANK, MOST_RANK = 16, 64  # as the kernels know them; others are padded
LEAST_SLOTS, MOST_SLOTS = 8, 256  # adapters that there is room for
MOST_NAME = 200

Key = tuple[int, str]  # layer, group


class UnknownAdapter(UserError):
    """No adapter has this name; the server answers 404."""


@dataclass(eq=False)
class ServedAdapter:
    """Requests hold the adapter that they are computed with."""

    name: str
    slot: int
    digest: str


class LoraStack(NamedTuple):
    """The weights of all adapters for one product, in the dtype the model computes in; B times the scale."""

    a_SQK: Tensor
    b_SNR: Tensor
    ends: tuple[int, ...]  # rows of y, by layer


class GroupLora(NamedTuple):
    """What the adapters of a step's rows add to one product."""

    stack: LoraStack
    slot_T: Tensor

    def add_(self, y_TN: Tensor, x_TK: Tensor, **fused: Any) -> Tensor:
        """`fused`: norm_K and eps where x is not normed yet; swiglu. The result may be y, changed."""
        a_SQK, b_SNR, ends = self.stack
        return gather_lora_(y_TN.contiguous(), x_TK.contiguous(), a_SQK, b_SNR, self.slot_T, ends, **fused)


class RowAdapters(NamedTuple):
    """The adapters of a step's rows."""

    stacks: Mapping[Key, LoraStack]
    slot_T: Tensor

    def of(self, layer: int, group: str) -> GroupLora | None:
        stack = self.stacks.get((layer, group))
        return None if stack is None else GroupLora(stack, self.slot_T)


class AdapterBank:
    """The adapters of one model."""

    def __init__(self, model: Decoder, tp_rank: int = 0, tp_size: int = 1) -> None:
        """`tp_rank`: this process's share."""
        self._model, self._rank_of, self._num_ranks = model, tp_rank, tp_size
        self.names: dict[str, ServedAdapter] = {}
        self.stacks: dict[Key, LoraStack] = {}
        self.generation = 0  # changes where graphs that hold stacks are void
        self.slot_T: Tensor | None = None  # of the rows of a plain forward
        self._free: list[int] = []
        self._num_slots = self._rank = 0

    def get(self, name: str) -> ServedAdapter:
        if name not in self.names:
            known = ", ".join(sorted(self.names)) or "none is loaded"
            raise UnknownAdapter(f"there is no adapter {shown(name)}; there are: {known}")
        return self.names[name]

    @torch.no_grad()
    def load(self, name: str, file: AdapterFile) -> ServedAdapter:
        """UserError, and nothing changed, for a name that is taken or weights that are not served."""
        if not name or len(name) > MOST_NAME or not name.isprintable():
            raise UserError(f"an adapter cannot be called {shown(name)}; give up to {MOST_NAME} printable characters")
        if name in self.names:
            raise UserError(f"there is an adapter {shown(name)} already; unload it first, or give another name")
        places = self._places()
        for module, w in file.weights.items():
            if w.magnitude is not None:
                raise UserError(
                    f"the adapter {name} is DoRA, which cannot share a batch with others; merge it: shoestring export "
                    "MODEL OUT --adapter DIR"
                )
            if module not in places:
                raise UserError(f"the adapter {name} changes {module}; attention and dense feed-forward are served")
            if len(w.a) > MOST_RANK:
                raise UserError(f"the adapter {name} has rank {len(w.a)}; at most {MOST_RANK} is served")
        self._make_room({places[module][0] for module in file.weights}, file.rank)
        slot = self._free.pop()
        self._write(slot, file.weights, places)
        served = self.names[name] = ServedAdapter(name, slot, file.digest)
        weakref.finalize(served, self._free.append, slot)
        return served

    def unload(self, name: str) -> None:
        """Requests that run keep it."""
        self.get(name)
        del self.names[name]

    # -- the plain forward ----------------------------------------------------------------------------------
    @contextmanager
    def applied(self, slots: Sequence[int]) -> Iterator[None]:
        """Inside, a plain forward over so many rows adds their adapters; one number stands for all rows."""
        if any(slot >= 0 for slot in slots):
            self.slot_T = torch.tensor(slots, dtype=torch.int32, device=self._model.device)
        try:
            yield
        finally:
            self.slot_T = None

    # -- stacks ---------------------------------------------------------------------------------------------
    def _groups(self) -> Iterator[tuple[Key, list[str]]]:
        for layer, block in enumerate(self._model.blocks):
            assert isinstance(block, Block)
            yield (layer, "qkv"), ["attn.q", "attn.k", "attn.v"]
            yield (layer, "o"), ["attn.o"]
            if isinstance(block.mlp, Mlp):
                yield (layer, "up"), ["mlp.gate", "mlp.up"] if block.mlp.gated else ["mlp.up"]
                yield (layer, "down"), ["mlp.down"]

    def _places(self) -> dict[str, tuple[Key, int]]:
        """{layer: (its group, its part)}"""
        return {
            f"blocks.{key[0]}.{name}": (key, part) for key, names in self._groups() for part, name in enumerate(names)
        }

    def _box(self, name: str) -> Box:
        """This process's part of a layer's weight."""
        shape = format_linear(self._model, name).shape
        tiles = layout_on(f"{name}.weight", shape, {"tp": self._num_ranks}).tiles(shape)
        return next(box for box, ranks in tiles if self._rank_of in ranks)

    def _make_room(self, keys: set[Key], rank: int) -> None:
        """Stacks for these groups and this rank, and a free slot."""
        rank = max(self._rank, LEAST_RANK, next_power_of_2(rank))
        num_slots = self._num_slots or LEAST_SLOTS
        if self._num_slots and not self._free:
            num_slots *= 2
        if num_slots > MOST_SLOTS:
            raise UserError(f"{self._num_slots} adapters are held, as many as are served; unload some first")
        wanted = keys | self.stacks.keys()
        if (rank, num_slots, wanted) == (self._rank, self._num_slots, self.stacks.keys()):
            return
        groups = dict(self._groups())
        try:
            fresh = {key: self._empty(key, groups[key], num_slots, rank) for key in sorted(wanted)}
        except torch.OutOfMemoryError:
            raise UserError(f"there is no memory for {num_slots} adapters of rank {rank}; unload some first") from None
        for key, old in self.stacks.items():
            parts = len(old.ends)
            fresh[key].a_SQK.unflatten(1, (parts, rank))[: self._num_slots, :, : self._rank] = old.a_SQK.unflatten(
                1, (parts, self._rank)
            )
            fresh[key].b_SNR[: self._num_slots, :, : self._rank] = old.b_SNR
        self._free += range(self._num_slots, num_slots)
        self._free.sort(reverse=True)
        self._rank, self._num_slots = rank, num_slots
        self.stacks.update(fresh)
        for module, (key, part) in self._places().items():
            if key in self.stacks:
                format_linear(self._model, module).adapter = _Branch(self, key, part)
        self.generation += 1

    def _empty(self, key: Key, names: list[str], num_slots: int, rank: int) -> LoraStack:
        boxes, ends = [self._box(f"blocks.{key[0]}.{name}") for name in names], list[int]()
        for box in boxes:
            ends.append(box.shape[0] + (ends[-1] if ends else 0))
        like: dict[str, Any] = {"dtype": self._model.compute_dtype, "device": self._model.device}
        a_SQK = torch.zeros(num_slots, len(names) * rank, boxes[0].shape[1], **like)
        return LoraStack(a_SQK, torch.zeros(num_slots, ends[-1], rank, **like), tuple(ends))

    def _write(self, slot: int, weights: Mapping[str, LoraWeights], places: Mapping[str, tuple[Key, int]]) -> None:
        for stack in self.stacks.values():
            stack.a_SQK[slot] = 0
            stack.b_SNR[slot] = 0
        for module, (a, b, scale, _) in weights.items():
            key, part = places[module]
            stack, (rows, columns) = self.stacks[key], self._box(module).slices()
            first = stack.ends[part - 1] if part else 0
            stack.a_SQK[slot, part * self._rank :][: len(a)] = a[:, columns].to(stack.a_SQK)
            wide = torch.promote_types(stack.b_SNR.dtype, torch.float32)
            stack.b_SNR[slot, first : stack.ends[part], : len(a)] = (scale * b[rows].to(wide)).to(stack.b_SNR)


class _Branch(nn.Module):
    """What one layer adds in the plain forward."""

    def __init__(self, bank: AdapterBank, key: Key, part: int) -> None:
        super().__init__()
        self._bank, self._key, self._part = weakref.ref(bank), key, part

    def forward(self, host: FormatLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        y, bank = host.multiply(x, bias), self._bank()
        if bank is None or bank.slot_T is None:
            return y
        stack, part = bank.stacks[self._key], self._part
        rank, first, end = stack.b_SNR.shape[2], stack.ends[part - 1] if part else 0, stack.ends[part]
        a_SRK, b_SNR = stack.a_SQK[:, part * rank : (part + 1) * rank], stack.b_SNR[:, first:end]
        y_TN, x_TK = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        gather_lora_ref_(y_TN, x_TK, a_SRK, b_SNR, bank.slot_T.expand(len(y_TN)), (end - first,))
        return y
