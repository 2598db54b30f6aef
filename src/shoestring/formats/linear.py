"""FormatHost: a module with a weight in a Format. FormatLinear is one, FormatEmbedding (embedding.py) the other.

Training: `weight` is the master Parameter (any float dtype); the forward casts it to the dtype of the activations and
passes it to `format.train_linear` with the Format's state (`weight_<name>` Parameters and buffers).
Packed: there is no `weight`; the parts are buffers named `weight_<part>`, and the forward is `format.linear`.

Formats see plain tensors: of a sharded weight the module passes the local shard, and the parallel styles of
`model.parallel` put the collectives around the module. The parts of a sharded weight are sharded like it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.base import Aux, Format, Parts, rows_at_a_time
from shoestring.formats.dense import Dense
from shoestring.formats.frozen import frozen_product
from shoestring.formats.rounding import cast_weight

DENSE_PHASE = Dense()  # one object for all layers: Formats are compared by identity


def is_sharded(t: Any) -> TypeGuard[Any]:
    """Whether t is a DTensor. Not isinstance, because importing DTensor takes seconds."""
    return hasattr(type(t), "to_local")  # of the type: in a compiled block the tensor itself does not say so


def local(t: Tensor) -> Tensor:
    """The plain local tensor of a DTensor, or the tensor itself."""
    return t.to_local() if is_sharded(t) else t


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype the matrix product will run in: autocast's inside an autocast region, else that of x.

    Quantizing has to see this dtype: autocast would otherwise round the decoded weight a second time.
    """
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def all_finite(t: Tensor) -> Tensor:
    """t.isfinite().all() without a copy of t."""
    return torch.stack(t.aminmax()).isfinite().all() if t.numel() else torch.ones((), dtype=torch.bool, device=t.device)


class FormatHost(nn.Module):
    """What holds a weight [rows, width] in a Format, trained or packed. A subclass says its shape and its forward."""

    weight: Tensor
    format: Format
    packed: bool
    part_names: tuple[str, ...]  # of the stored parts
    state_names: tuple[str, ...]
    defer_bias: bool  # set by the row-parallel style: the bias is added after the partial products are summed
    decoded: Tensor | None  # see keep_decoded
    made: Tensor | None  # the weight of this pass, encoded together with other layers (train/batched_formats.py)
    suspended: Format | None  # the Format that returns after a dense phase
    kernel_part_names: tuple[str, ...]  # empty unless the parts are held in the kernels' order: see use_kernels
    cuts: dict[str, Cut]

    def _host(self) -> None:
        """Set the attributes that torch's module lacks; also called by `convert` after it changes a module's class."""
        self.format = Dense()
        self.packed = self.defer_bias = False
        self.part_names = self.state_names = self.kernel_part_names = ()
        self.decoded = self.made = self.suspended = None
        self.cuts = {}

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the logical weight."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        held = self.kernel_part_names or self.part_names
        return (getattr(self, f"weight_{held[0]}") if self.packed else self.weight).device

    def check_format(self, format: Format) -> None:
        """UserError for a Format that this module cannot hold."""
        format.check(self.shape)

    # -- reading ---------------------------------------------------------------------------------------------
    def format_state(self) -> Parts:
        return {n: local(getattr(self, f"weight_{n}")) for n in self.state_names}

    def trained_state(self) -> dict[str, nn.Parameter]:
        """The state that gets gradients, as the Parameters themselves."""
        held = {n: getattr(self, f"weight_{n}") for n in self.state_names}
        return {n: t for n, t in held.items() if isinstance(t, nn.Parameter) and t.requires_grad}

    def parts(self) -> Parts:
        """The stored parts of a packed weight (this rank's, when it is sharded), however they are held."""
        return self.in_stored_order(self.operands()) if self.kernel_part_names else self.operands()

    def decode_rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows `index` of a packed weight, of which tables belong to all."""
        parts = {n: t if n in self.format.whole_parts else t[index] for n, t in self.parts().items()}
        return self.format.decode(parts, dtype)

    def operands(self) -> Parts:
        """What `format.linear` multiplies with: the parts as they are held (see use_kernels)."""
        return {n: local(getattr(self, f"weight_{n}")) for n in self.kernel_part_names or self.part_names}

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight the forward multiplies with, in `dtype`."""
        if self.decoded is not None and self.decoded.dtype == dtype:
            return self.decoded
        if self.packed:
            return self.format.decode(self.parts(), dtype)
        return self.format.fake_in_pieces(cast_weight(local(self.weight), dtype), self.format_state())

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias, in the compute dtype of x."""
        dtype = compute_dtype(x)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        if self.decoded is not None and self.decoded.dtype == dtype:
            return F.linear(x, self.decoded, bias)
        if self.packed:
            if x.requires_grad and torch.is_grad_enabled():
                return frozen_product(x, self.format, self.operands(), bias)
            return self.format.linear(x, self.operands(), bias)
        if self.made is not None and self.made.dtype == dtype:
            return F.linear(x, self.made, bias)
        return self.format.train_linear(x, cast_weight(local(self.weight), dtype), self.format_state(), bias)

    def frozen_operands(self, dtype: torch.dtype) -> tuple[Format, Parts]:
        """What `frozen_product` multiplies with: a Format and its parts."""
        if self.packed and (self.decoded is None or self.decoded.dtype != dtype):
            return self.format, self.operands()
        return DENSE_PHASE, {"weight": self.effective_weight(dtype).detach()}

    # -- changing the Format ---------------------------------------------------------------------------------
    def set_format(self, format: Format) -> None:
        """Train with `format` from now on. The weight stays; the state of the old Format is removed."""
        if self.packed:
            raise UserError(f"A packed {self.format.label} weight cannot change its format: call unpack(model) first.")
        self.check_format(format)
        check_cut(self.weight, format, self.shape)
        self._drop(self.state_names)
        self.format, self.suspended = format, None
        self.state_names = ()
        self.init_state()

    def start_dense_phase(self) -> None:
        """Compute densely from now on, and keep the Format's state.

        All names stay, which FSDP2, optimizers and checkpoints rely on; `set_format(Dense())` would remove
        Parameters that they hold.
        """
        if not self.packed and self.suspended is None:
            self.format, self.suspended = DENSE_PHASE, self.format

    def end_dense_phase(self) -> None:
        """Compute with the Format again, with its old state: refresh masks that should follow the weight."""
        if self.suspended is not None:
            self.format, self.suspended = self.suspended, None

    def init_state(self) -> None:
        """(Re)compute the Format's state from the weight; needed after a meta build has been filled."""
        if self.packed:
            return
        with torch.no_grad():
            state = (self.suspended or self.format).state(full(self.weight))
            for name, aux in state.items():
                self._set_state(f"weight_{name}", aux)
        self.state_names = tuple(state)

    def _set_state(self, name: str, aux: Aux) -> None:
        value = like_weight(aux.tensor, self.weight) if aux.kind in ("rows", "trained") else aux.tensor
        old = self._parameters.get(name, self._buffers.get(name))
        if old is not None and old.shape == value.shape and old.is_meta == value.is_meta:
            old.copy_(value)  # in place: optimizers and FSDP hold this tensor
        elif aux.kind in ("rows", "trained"):
            setattr(self, name, nn.Parameter(value, requires_grad=aux.kind == "trained"))
        else:
            self.register_buffer(name, value)

    @torch.no_grad()
    def store_state(self, state: Parts) -> None:
        """Overwrite parts of the state in place with logical tensors; a sharded layer takes its shard."""
        for name, t in state.items():
            held = getattr(self, f"weight_{name}")
            whole = t.reshape(held.shape).to(local(held).device, held.dtype)
            local(held).copy_(local(like_weight(whole, held)))

    # -- packing ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def encode(self, dtype: torch.dtype) -> Parts:
        """The parts that `pack` would store; those of a sharded weight are sharded like it."""
        w = cast_weight(local(self.weight), dtype)
        state = self.format_state()
        named = {"weight": w} | {f"weight's {n}": t for n, t in state.items()}
        finite = torch.stack([all_finite(t) for t in named.values()]).tolist()  # waits for a GPU once
        for what, good in zip(named, finite, strict=True):
            if not good:
                raise UserError(
                    f"The {what} holds NaN or infinite values; packing would hide them. Check the training run."
                )
        parts = self._encode(w, state)
        with torch.device("meta"):
            shapes = {n: t.shape for n, t in self.format.empty_parts(self.shape, dtype).items()}
        return {
            n: t.clone() if n in self.format.whole_parts else like_shard(t, self.weight, shapes[n])
            for n, t in parts.items()
        }

    def _encode(self, w: Tensor, state: Parts) -> Parts:
        """In pieces where every row is by itself: encoding takes several times the memory of what it encodes."""
        made, tables = [self.format.encode(*piece) for piece in self.format.pieces(w, state)], self.format.whole_parts
        return (
            made[0]
            if len(made) == 1
            else {n: t if n in tables else torch.cat([m[n] for m in made]) for n, t in made[0].items()}
        )

    def pack(self, dtype: torch.dtype = torch.float32) -> None:
        """Replace weight and state by the stored parts of weight.to(dtype)."""
        self._hold(self.encode(dtype))
        self.format = self.format.stored()

    def allocate_packed(self, format: Format, dtype: torch.dtype = torch.float32) -> None:
        """Become a packed module with uninitialised parts, for load_state_dict to fill."""
        self.check_format(format)
        self.use_stored_parts()
        with torch.device(next(iter(self._held().values())).device if self.packed else self.weight.device):
            parts = format.empty_parts(self.shape, dtype)
        self._drop(self.state_names)
        self.format = format
        self._hold(parts)

    def keep_decoded(self, dtype: torch.dtype) -> None:
        """Multiply with a copy decoded now, for machines without a kernel: the speed and memory of a dense weight."""
        if not self.packed:
            return
        num_rows, width = self._local_shape()
        step = rows_at_a_time(width)
        if not self.format.row_wise or num_rows <= step:
            self.decoded = self.format.decode(self.parts(), dtype)
            return
        place = self.operands()[self.part_names[0]].device
        self.decoded = torch.empty(num_rows, width, dtype=dtype, device=place)
        for start in range(0, num_rows, step):
            rows = torch.arange(start, min(start + step, num_rows), device=place)
            self.decoded[start : start + step] = self.decode_rows(rows, dtype)

    def in_kernel_order(self, parts: Parts) -> Parts:
        """Stored parts as the kernel of their device reads them; the same object where there is none."""
        return self.format.kernel_parts(parts)

    def in_stored_order(self, operands: Parts) -> Parts:
        """The inverse, of what this rank holds."""
        return self.format.stored_parts(operands, self._local_shape())

    def use_kernels(self) -> bool:
        """Hold a packed weight in the order its kernel reads: same numbers, same memory. Saving, exporting and moving
        convert back to the stored parts. False where there is no kernel."""
        if not self.packed or self.kernel_part_names:
            return self.packed and bool(self.kernel_part_names)
        parts = self.parts()
        operands = self.in_kernel_order(parts)
        if operands is parts:
            return False
        held: dict[str, Any] = {**self._held()}
        self.cuts = {n: Cut(t.device_mesh, t.placements, t.shape) for n, t in held.items() if is_sharded(t)}
        self._drop(self.part_names)
        for name, t in operands.items():
            self.register_buffer(f"weight_{name}", t, persistent=False)
        self.kernel_part_names, self.decoded = tuple(operands), None
        return True

    def use_stored_parts(self) -> bool:
        """Undo `use_kernels`; returns whether it was in effect."""
        if not self.kernel_part_names:
            return False
        parts = self._stored_shards()
        self._drop(self.kernel_part_names)
        for name, part in parts.items():
            self.register_buffer(f"weight_{name}", part)
        self.kernel_part_names, self.cuts = (), {}
        return True

    def _stored_shards(self) -> Parts:
        """The stored parts of a weight that is held in the kernels' order, sharded as they were before."""
        parts = self.parts()
        return {n: like_shard(t, self.cuts[n], self.cuts[n].shape) if n in self.cuts else t for n, t in parts.items()}

    def _local_shape(self) -> tuple[int, int]:
        """[out, in] of what this rank holds."""
        rows, width = self.shape
        cut = next((c for n, c in self.cuts.items() if n not in self.format.whole_parts), None)
        for axis, placement in enumerate(() if cut is None else cut.placements):
            if cut is not None and placement.is_shard():
                ranks = cut.device_mesh.size(axis)
                rows, width = (rows // ranks, width) if placement.dim == 0 else (rows, width // ranks)
        return rows, width

    def unpack(self, dtype: torch.dtype = torch.float32) -> None:
        """A dense weight again: what the packed module multiplied with, in `dtype`."""
        self.use_stored_parts()
        weight = self.effective_weight(dtype)
        any_part = next(t for n, t in self._held().items() if n not in self.format.whole_parts)
        self._drop(self.part_names)
        self.weight = nn.Parameter(like_shard(weight, any_part, torch.Size(self.shape)))
        self.format, self.packed, self.part_names, self.decoded = Dense(), False, (), None

    def _hold(self, parts: Parts) -> None:
        self._drop(self.state_names)
        self._drop(self.part_names)
        self.weight = None  # type: ignore[assignment]
        for name, part in parts.items():
            self.register_buffer(f"weight_{name}", part)
        self.packed, self.part_names, self.state_names = True, tuple(parts), ()
        self.suspended, self.decoded = None, None

    def _held(self) -> Parts:
        return {n: getattr(self, f"weight_{n}") for n in self.part_names}

    def _drop(self, names: tuple[str, ...]) -> None:
        for name in names:
            delattr(self, f"weight_{name}")

    # -- nn.Module -------------------------------------------------------------------------------------------
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # Parts and state follow the model to another device, but not to another dtype: model.to(torch.bfloat16) must
        # not round tables and scales.
        by_kernels = self.use_stored_parts()
        names = (f"weight_{n}" for n in self.part_names + self.state_names)
        kept = {n: getattr(self, n).detach() for n in names}  # detached: a Parameter changes in place
        self.decoded = None  # of the old device or dtype
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = getattr(self, name)
            if new.dtype != old.dtype:
                restored = old.to(new.device)
                if isinstance(new, nn.Parameter):
                    new.data = restored  # the same Parameter: optimizers hold it
                else:
                    setattr(self, name, restored)
        if by_kernels:
            self.use_kernels()  # where the new device has any
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.decoded = None
        by_kernels = self.use_stored_parts()
        super()._load_from_state_dict(*args, **kwargs)
        if by_kernels:
            self.use_kernels()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.kernel_part_names:
            destination.update({f"{prefix}weight_{n}": t for n, t in self._stored_shards().items()})

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format.label}{', packed' if self.packed else ''}"


class FormatLinear(FormatHost, nn.Linear):
    adapter: nn.Module | None  # a branch beside the weight: called with this layer, x and the bias (adapter.py)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: Format | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self._host()
        if format is not None:
            self.set_format(format)

    def _host(self) -> None:
        super()._host()
        self.adapter = None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None or self.defer_bias else local(self.bias)
        return self.multiply(x, bias) if self.adapter is None else self.adapter(self, x, bias)


# -- sharded weights -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cut:
    """How a part was sharded before it was laid out for the kernels; a stand-in for a DTensor in `like_shard`."""

    device_mesh: Any
    placements: Any
    shape: torch.Size


def full(t: Tensor) -> Tensor:
    """The logical tensor, gathered when it is sharded."""
    return t.full_tensor() if is_sharded(t) else t


def like_weight(t: Tensor, weight: Any) -> Tensor:
    """The logical tensor `t` sharded as `weight` is (every rank has all of `t`, so nothing is sent)."""
    if not is_sharded(weight):
        return t
    from torch.distributed.tensor import Replicate, distribute_tensor

    # A dim of size 1 stands for all of the weight's dim (one scale per row, say) and cannot be cut with it.
    whole = [d for d in range(t.ndim) if t.shape[d] == 1]
    placements = [Replicate() if p.is_shard() and p.dim in whole else p for p in weight.placements]
    return distribute_tensor(t, weight.device_mesh, placements, src_data_rank=None)


def like_shard(t: Tensor, other: Any, shape: torch.Size) -> Tensor:
    """The local `t` as this rank's shard of a logical tensor of `shape`, cut as `other` is."""
    if not (is_sharded(other) or isinstance(other, Cut)):
        return t.detach()
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        t.detach().contiguous(), other.device_mesh, other.placements, run_check=False, shape=shape, stride=stride
    )


def check_cut(weight: Tensor, format: Format, shape: tuple[int, int]) -> None:
    """Raise UserError when this rank's shard of `weight` does not end on the Format's block boundaries."""
    if not is_sharded(weight):
        return
    block = format.block(shape)
    for dim in (0, 1):
        have = local(weight).shape[dim]
        if have != shape[dim] and have % block[dim]:
            raise UserError(
                f"{format.label} cannot cut a weight of {list(shape)} into shards of {have} along dim {dim}: "
                f"shards must be multiples of {block[dim]}. Use fewer ranks or a smaller group."
            )
