"""New weights for a model that is being served, written in place.

Addresses stay, so CUDA graphs stay valid. A served weight exists in several forms, and all of them are written:

    parameters          in the dtype they have here
    packed weights      the parts, or what the kernels read (their own order), and the copy decoded for a CPU
    8-bit activations   operands made from the codes (again at the next use)
    fused step          joined biases, a tied head in another dtype, weights that a Format changes (fused_decoder.py)
    CPU step            made again

`WeightTarget.wanted` says what a publisher must send: a tensor by name, or the parts of a Format. `prepare` takes all
of it, on the device finite and not so large that products overflow, or raises before the first byte is written.
`Engine.update_weights` makes sure that no step is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import Format, FormatHost
from shoestring.formats.convert import format_hosts
from shoestring.formats.int8_activations import Int8Host
from shoestring.formats.linear import local
from shoestring.host.page_locked import HostBuffers
from shoestring.kernels.comm.copy_table import CopyTable
from shoestring.model.mesh_layouts import layout_on
from shoestring.model.transformer import Decoder
from shoestring.state.boxes import Box, local_box
from shoestring.state.reshard.version import UnfitWeights

LARGEST = 1e15  # of a weight's magnitude: products of two larger ones, summed, leave the range of bf16 and fp32
SPARE = 1.2  # free memory, in sizes of the new weights, that lets them wait on the GPU
Values = Mapping[str, Mapping[str, Tensor]]  # name of a weight -> its parts; a plain tensor has the one part ""


@dataclass(frozen=True)
class WantedWeight:
    """A weight of the whole model: this process needs `box` of it, in `dtype` or as the parts of `format`."""

    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    format: Format | None = None


class WeightTarget:
    def __init__(self, model: Decoder, *, tp_rank: int = 0, tp_size: int = 1) -> None:
        """UserError, with its name, for a weight that cannot be replaced. `tp_rank`: this process's share."""
        self.model = model
        self._hosts: dict[str, FormatHost] = {}
        self._like: dict[str, dict[str, Tensor]] = {}  # shapes and dtypes of what is sent, without memory
        self.wanted: dict[str, WantedWeight] = {}
        for name, layer in format_hosts(model):
            if layer.state_names:
                raise UserError(
                    f"{name} is in training form ({layer.format.label} with a state); only dense and packed weights "
                    "can be updated while they are served"
                )
            if layer.packed:
                weight, shape = f"{name}.weight", layer.shape
                self._hosts[weight] = layer
                self._like[weight] = {n: torch.empty_like(t, device="meta") for n, t in layer.parts().items()}
                # The parts of a tensor-parallel rank are plain buffers, which do not know their place.
                tiles = layout_on(weight, shape, {"tp": tp_size}).tiles(shape)
                box = next(box for box, ranks in tiles if tp_rank in ranks)
                self.wanted[weight] = WantedWeight(shape, box, model.compute_dtype, layer.format)
        self._parameters = dict(model.named_parameters())
        for name, p in self._parameters.items():
            self.wanted[name] = WantedWeight(tuple(p.shape), local_box(p), p.dtype)
            self._like[name] = {"": torch.empty(self.wanted[name].box.shape, dtype=p.dtype, device="meta")}

    def empty(self) -> dict[str, dict[str, Tensor]]:
        """Host memory for everything that is wanted, page-locked for a GPU."""
        return host_memory(self._like, self.model.device)

    def check(self, values: Values) -> None:
        """UserError unless these are exactly the weights that are wanted."""
        for name, like in self._like.items():
            if name not in values:
                raise UserError(f"the update has no {name!r}, which this model needs; nothing was changed")
            have, need = ({n: tuple(t.shape) for n, t in parts.items()} for parts in (values[name], like))
            if have != need:
                raise UserError(f"the update has {have} for {name!r}, this model needs {need}; nothing was changed")
        if extra := sorted(values.keys() - self.wanted.keys()):
            raise UserError(f"the update has {extra[0]!r}, which this model does not have; nothing was changed")

    @torch.no_grad()
    def prepare(self, values: Values, *, staged: bool | None = None) -> PreparedWeights:
        """The values in the form and on the device of what they replace, so that writing them is one copy. Takes memory
        for a second set of weights on a GPU; where there is too little (`staged`: decided by the caller), values stay
        on the host until they are written.

        May be called from another thread than the engine's."""
        self.check(values)
        device = self.model.device
        num_bytes = sum(t.nbytes for parts in values.values() for t in parts.values())
        if staged is None:
            staged = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > SPARE * num_bytes
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(stream):
            if staged:
                values = {n: {p: t.to(device, non_blocking=True) for p, t in v.items()} for n, v in values.items()}
            self._check_numbers(values)
            write = self._on_device(values) if staged else self._on_host(values)
        if stream is not None:
            stream.synchronize()
        return PreparedWeights(device, write)

    def _check_numbers(self, values: Values) -> None:
        """UnfitWeights for values that make every answer NaN."""
        fits: dict[str, Tensor] = {}
        for name, parts in values.items():
            most = LARGEST
            if name in self._hosts:  # a scale multiplies codes of up to 8 bits
                most = min(most, torch.finfo(self.model.compute_dtype).max / 256)
            for part, t in parts.items():
                if t.is_floating_point() and t.numel():
                    t = t.to(self.model.device, non_blocking=True)
                    low, high = torch.aminmax(t.bfloat16() if t.itemsize == 1 else t)
                    fits[f"{name} {part}".rstrip()] = (low.float() >= -most) & (high.float() <= most)  # not where NaN
        if fits and not all(found := torch.stack(list(fits.values())).tolist()):
            name = list(fits)[found.index(False)]
            raise UnfitWeights(f"{name!r} holds NaN, infinite or far too large values; nothing was changed")

    def _on_device(self, sent: Values) -> Callable[[], None]:
        new = {n: as_held(self._hosts[n], parts) if n in self._hosts else parts for n, parts in sent.items()}
        copies = CopyTable(pair for n, parts in new.items() for pair in self._pairs(n, parts))

        def write() -> None:
            copies.run()
            for name, host in self._hosts.items():
                renew_(host, sent[name])

        return write

    def _on_host(self, values: Values) -> Callable[[], None]:
        """Packed parts go to the GPU weight by weight and come back in the kernels' order, so that only bytes are left
        to be copied when the weights are written."""
        moved = {name: host for name, host in self._hosts.items() if host.kernel_part_names}
        room = host_memory({name: host.operands() for name, host in moved.items()}, self.model.device)
        for name, host in moved.items():
            new = as_held(host, {n: t.to(self.model.device) for n, t in values[name].items()})
            for part, t in new.items():
                room[name][part].copy_(t)
        ordered = {**values, **room}

        def write() -> None:
            for name, parts in ordered.items():
                for t, value in self._pairs(name, parts):
                    t.copy_(value, non_blocking=True)
            for name, host in self._hosts.items():
                renew_(host, values[name])

        return write

    def _pairs(self, name: str, new: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(what is served, its new value), of values in the order in which the module holds them."""
        if name not in self._hosts:
            return [(local(self._parameters[name]), new[""])]
        held = self._hosts[name].operands()
        assert new.keys() == held.keys()
        return [(t, new[part]) for part, t in held.items()]


@dataclass(frozen=True)
class PreparedWeights:
    device: torch.device
    write: Callable[[], None]

    @torch.no_grad()
    def write_(self) -> None:
        """Replace the weights. The executors' own copies follow with `Runner.weights_written`."""
        self.write()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the new values' memory may be used for others now


def host_memory(like: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Room on the host for parts of weights, page-locked where they go to a GPU."""
    room = HostBuffers({(name, part): t for name, parts in like.items() for part, t in parts.items()}, device).tensors
    return {name: {part: room[name, part] for part in parts} for name, parts in like.items()}


def as_held(host: FormatHost, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stored parts in the order in which the module holds them."""
    return dict(host.in_kernel_order(dict(parts)) if host.kernel_part_names else parts)


def renew_(host: FormatHost, parts: Mapping[str, Tensor]) -> None:
    """What a packed module keeps beside its parts, in place."""
    if host.decoded is not None:
        sent = {n: t.to(host.decoded.device) for n, t in parts.items()}
        host.decoded.copy_(host.format.decode(sent, host.decoded.dtype))
    if isinstance(host, Int8Host):
        host.int8 = None
