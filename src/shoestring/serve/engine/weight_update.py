"""New weights for a model that is being served, written in place.

Addresses stay, so CUDA graphs stay valid. A served weight exists in several forms, and all of them are written:

    parameters          in the dtype they have here
    packed weights      the parts, or what the kernels read (their own order), and the copy decoded for a CPU
    8-bit activations   operands made from the codes (again at the next use)
    fused step          joined biases, a tied head in another dtype, weights that a Format changes (fused_decoder.py)
    CPU step            made again

`WeightTarget.wanted` says what a publisher must send: a tensor by name, or the parts of a Format. `prepare` takes all
of it or raises before the first byte is written. `Engine.update_weights` makes sure that no step is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import Format, FormatHost
from shoestring.formats.convert import format_hosts
from shoestring.formats.int8_activations import Int8Linear
from shoestring.formats.linear import local
from shoestring.model.mesh_layouts import layout_on
from shoestring.model.transformer import Decoder
from shoestring.state.boxes import Box, local_box

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
                # The parts of a tensor-parallel rank are plain buffers, which do not know their place.
                tiles = layout_on(weight, shape, {"tp": tp_size}).tiles(shape)
                box = next(box for box, ranks in tiles if tp_rank in ranks)
                self.wanted[weight] = WantedWeight(shape, box, model.compute_dtype, layer.format)
        for name, p in model.named_parameters():
            self.wanted[name] = WantedWeight(tuple(p.shape), local_box(p), p.dtype)

    def empty(self) -> dict[str, dict[str, Tensor]]:
        """Host memory for everything that is wanted."""
        return {name: self._empty(name, want) for name, want in self.wanted.items()}

    def _empty(self, name: str, want: WantedWeight) -> dict[str, Tensor]:
        if want.format is None:
            return {"": torch.empty(want.box.shape, dtype=want.dtype)}
        layer = self._hosts[name]
        return {n: torch.empty(t.shape, dtype=t.dtype) for n, t in layer.parts().items()}

    def check(self, values: Values) -> None:
        """UserError unless these are exactly the weights that are wanted."""
        for name, want in self.wanted.items():
            if name not in values:
                raise UserError(f"the update has no {name!r}, which this model needs; nothing was changed")
            shapes = {"": want.box.shape}
            if want.format is not None:
                shapes = {n: tuple(t.shape) for n, t in self._hosts[name].parts().items()}
            have = {n: tuple(t.shape) for n, t in values[name].items()}
            if have != shapes:
                raise UserError(f"the update has {have} for {name!r}, this model needs {shapes}; nothing was changed")
        if extra := sorted(values.keys() - self.wanted.keys()):
            raise UserError(f"the update has {extra[0]!r}, which this model does not have; nothing was changed")

    @torch.no_grad()
    def prepare(self, values: Values) -> PreparedWeights:
        """The values in the form and on the device of what they replace, so that writing them is a copy. Takes memory
        for a second set of weights on a GPU; where there is too little, values stay on the host until they are written.

        May be called from another thread than the engine's."""
        self.check(values)
        parameters = dict(self.model.named_parameters())
        device = self.model.device
        num_bytes = sum(t.nbytes for parts in values.values() for t in parts.values())
        staged = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > SPARE * num_bytes
        stream = torch.cuda.Stream(device) if staged else None
        writes: list[Callable[[], object]] = []
        with torch.cuda.stream(stream):
            for name, parts in values.items():
                if name in self._hosts:
                    host = self._hosts[name]
                    sent = {n: t.to(device) for n, t in parts.items()} if staged else dict(parts)
                    writes.append(partial(write_parts_, host, sent, as_held(host, sent) if staged else None))
                else:
                    held = local(parameters[name])
                    value = parts[""].to(device, held.dtype) if staged else parts[""]
                    writes.append(partial(held.copy_, value))
        if stream is not None:
            stream.synchronize()
        return PreparedWeights(self, writes)


@dataclass(frozen=True)
class PreparedWeights:
    target: WeightTarget
    writes: list[Callable[[], object]]

    @torch.no_grad()
    def write_(self) -> None:
        """Replace the weights. The executors' own copies follow with `Runner.weights_written`."""
        for write in self.writes:
            write()


def as_held(host: FormatHost, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stored parts in the order in which the module holds them."""
    return dict(host.format.kernel_parts(dict(parts)) if host.kernel_part_names else parts)


def write_parts_(host: FormatHost, parts: Mapping[str, Tensor], ordered: Mapping[str, Tensor] | None = None) -> None:
    """Other stored parts for a packed module, in place; `ordered`: `as_held` of them, where it is known."""
    held = host.operands()
    device = next(iter(held.values())).device
    sent = {n: t.to(device) for n, t in parts.items()}
    new = as_held(host, sent) if ordered is None else ordered
    assert new.keys() == held.keys()
    for name, t in held.items():
        t.copy_(new[name])
    if host.decoded is not None:
        host.decoded.copy_(host.format.decode(sent, host.decoded.dtype))
    if isinstance(host, Int8Linear):
        host.int8 = None
