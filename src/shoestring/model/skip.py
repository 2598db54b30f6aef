"""Which sublayers a decoder leaves out, and the stand-ins that replace them.

A decoder of M blocks has 2M sublayers, each of which adds to the residual stream: y = x + f(norm(x)). A skipped
sublayer is not computed; a stand-in approximates its output from its input,

    y_hat = scale * x + shift        scale: one number or one per channel (1 where absent), shift: one per channel

A `SkipSet` is the skipped sublayers with their stand-ins. It is applied from outside (`Decoder.forward(skip=)`) and
immutable: its id is a hash of its content, and everything that depends on a set (keys and values in a prefix cache,
CUDA graphs) is keyed by that id. A skipped attention sublayer writes no keys and values.

methods/skipping/sets.py chooses sets; serve/engine/skip_policy.py uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from shoestring.errors import UserError, shown
from shoestring.json_files import read_object
from shoestring.model.spec import ModelSpec

Kind = Literal["attn", "mlp"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# watch(layer, kind, x, y): the residual stream before and after a sublayer
Watch = Callable[[int, Kind, Tensor, Tensor], None]


class Sublayer(NamedTuple):
    layer: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.layer}.{self.kind}"


class StandIn(NamedTuple):
    """fp32 tensors [1] or [D], so that a bf16 stream is promoted to fp32 and an fp64 stream stays fp64."""

    scale: Tensor | None = None
    shift: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        if self.scale is None and self.shift is None:
            return x
        y = x if self.scale is None else x * self.scale
        return (y if self.shift is None else y + self.shift).to(x.dtype)


PASS = StandIn()  # y_hat = x


class BlockSkip(NamedTuple):
    """One block's share of a set; None: computed."""

    attn: StandIn | None = None
    mlp: StandIn | None = None


COMPUTE = BlockSkip()


class SkipSet:
    def __init__(self, skipped: Mapping[Sublayer, StandIn] | Iterable[Sublayer], *, name: str = "") -> None:
        """Sublayers with their stand-ins; without stand-ins the stream passes unchanged. The name is not part of the
        id."""
        if not isinstance(skipped, Mapping):
            skipped = dict.fromkeys(skipped, PASS)
        self.skipped: dict[Sublayer, StandIn] = {s: skipped[s] for s in sorted(skipped)}
        self.name = name
        self.id = _digest(self.skipped)
        self.attn = frozenset(s.layer for s in self.skipped if s.kind == "attn")
        self.mlp = frozenset(s.layer for s in self.skipped if s.kind == "mlp")
        self._moved: dict[torch.device, tuple[BlockSkip, ...]] = {}
        self._joined: dict[torch.device, dict[Sublayer, Tensor | None]] = {}

    def __len__(self) -> int:
        return len(self.skipped)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SkipSet) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"SkipSet({self.name or self.id[:8]}: {len(self.attn)} attention, {len(self.mlp)} mlp)"

    def blocks(self, num_layers: int, device: torch.device) -> tuple[BlockSkip, ...]:
        """Stand-ins by block. The same tensors at every call, since a CUDA graph may hold their addresses."""
        if device not in self._moved:
            moved = {
                s: StandIn(*(None if t is None else t.to(device) for t in stand)) for s, stand in self.skipped.items()
            }
            self._moved[device] = tuple(
                BlockSkip(moved.get(Sublayer(layer, "attn")), moved.get(Sublayer(layer, "mlp")))
                for layer in range(num_layers)
            )
        return self._moved[device]

    def after(self, num_layers: int, width: int, device: torch.device) -> dict[Sublayer, Tensor | None]:
        """For every computed sublayer with skipped ones directly behind it: their joint scale and shift [2, D] (None:
        they pass the stream unchanged). The same tensors at every call, as in `blocks`."""
        if device not in self._joined:
            found: dict[Sublayer, Tensor | None] = {}
            last: Sublayer | None = None  # computed
            for sub in all_sublayers(num_layers):
                stand = self.skipped.get(sub)
                if stand is None:
                    last = sub
                elif last is not None:
                    found[last] = _joined(found.get(last), stand, width)
            exact = torch.float64 if device.type == "cpu" else torch.float32
            self._joined[device] = {s: None if t is None else t.to(device, exact) for s, t in found.items()}
        return self._joined[device]

    def check(self, spec: ModelSpec) -> SkipSet:
        """Returns the set itself; UserError where it does not fit a model."""
        for sub, stand in self.skipped.items():
            if not 0 <= sub.layer < spec.num_layers:
                raise UserError(
                    f"the skip set names layer {sub.layer}, but the model has {spec.num_layers}; "
                    "it was made for another model"
                )
            for part in stand:
                if part is not None and part.numel() not in (1, spec.d_model):
                    raise UserError(
                        f"the skip set has {part.numel()} numbers for {sub}, but the model's width is "
                        f"{spec.d_model}; it was made for another model"
                    )
        return self

    def plus(self, other: SkipSet | Mapping[Sublayer, StandIn], *, name: str = "") -> SkipSet:
        """The union of both sets; this set's stand-ins take precedence."""
        more = other.skipped if isinstance(other, SkipSet) else other
        return SkipSet({**more, **self.skipped}, name=name or self.name)

    # -- files ----------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        rows = [
            {**sub._asdict(), **{name: part.tolist() for name, part in stand._asdict().items() if part is not None}}
            for sub, stand in self.skipped.items()
        ]
        return {"format": FORMAT, "name": self.name, "skipped": rows}

    @classmethod
    def from_json(cls, data: Any, where: str = "the skip set") -> SkipSet:
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"format is {shown(data['format'])}, not {FORMAT!r}")
            skipped: dict[Sublayer, StandIn] = {}
            for row in data["skipped"]:
                if row["kind"] not in KINDS:
                    raise ValueError(f"kind {shown(row['kind'])} is neither attn nor mlp")
                sub = Sublayer(int(row["layer"]), row["kind"])
                if sub in skipped:
                    raise ValueError(f"{sub} is named twice")
                skipped[sub] = StandIn(*(_tensor(row.get(name)) for name in StandIn._fields))
            return cls(skipped, name=str(data.get("name", "")))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{where} is not a skip set ({error!r}); write one with shoestring run shrink/skip_set"
            ) from None

    @classmethod
    def read(cls, path: Path) -> SkipSet:
        return cls.from_json(read_object(path, remedy="it cannot be a skip set"), str(path))


FORMAT = "shoestring skip set 1"


def all_sublayers(num_layers: int) -> list[Sublayer]:
    return [Sublayer(layer, kind) for layer in range(num_layers) for kind in KINDS]


def _joined(before_2D: Tensor | None, stand: StandIn, width: int) -> Tensor | None:
    """The joint scale and shift of `before` and a stand-in after it; None: the stream passes unchanged."""
    if stand.scale is None and stand.shift is None:
        return before_2D
    parts = zip(stand, (1.0, 0.0), strict=True)
    scale, shift = (torch.tensor([d]) if t is None else t.detach().cpu() for t, d in parts)
    own_2D = torch.stack([t.double().expand(width) for t in (scale, shift)])
    if before_2D is None:
        return own_2D
    return torch.stack([before_2D[0] * own_2D[0], before_2D[1] * own_2D[0] + own_2D[1]])


def _tensor(numbers: Any) -> Tensor | None:
    if numbers is None:
        return None
    made = torch.tensor(numbers, dtype=torch.float32)
    if made.ndim != 1 or not made.isfinite().all():
        raise ValueError("scale and shift are lists of finite numbers")
    return made


def _digest(skipped: Mapping[Sublayer, StandIn]) -> str:
    digest = blake2b(digest_size=16)
    for sub, stand in skipped.items():
        digest.update(str(sub).encode())
        for part in stand:
            if part is not None:
                assert part.ndim == 1 and part.dtype == torch.float32
            digest.update(b"-" if part is None else part.cpu().numpy().tobytes())
    return digest.hexdigest()
