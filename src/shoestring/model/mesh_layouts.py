"""Where the parameters of a Decoder lie on a mesh that need not exist: the cuts of parallel.py, from names and sizes.

`layout_on(name, shape, sizes)` answers for a parameter, or for an optimizer tensor that carries its name. For plans and
pictures; a running model's own DTensors are asked with state/reshard/dtensors.py, and a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoestring.errors import UserError, suggest
from shoestring.mesh import AXES
from shoestring.state.reshard.layouts import REPLICATE, MeshLayout, Placement, shard

_EXPERT = r"(?:experts\.\d+\.|shared\.)?"
_ROWS = re.compile(rf"(?:^|\.)(?:attn\.[qkv]|mlp\.{_EXPERT}(?:gate|up)|head)\.(?:weight|bias)")
_COLUMNS = re.compile(rf"(?:^|\.)(?:attn\.o|mlp\.{_EXPERT}down)\.weight")
_VOCABULARY = re.compile(r"(?:^|\.)(?:embed|head)\.weight")

MOST_RANKS = 1 << 16
PLANNED = tuple(axis for axis in AXES if axis != "pp")  # which layers a stage has is not in a name and a shape


def layout_on(name: str, shape: tuple[int, ...], sizes: Mapping[str, int], first_rank: int = 0) -> MeshLayout:
    """`sizes` of the axes replica, dp and tp; ranks count up from `first_rank`."""
    tp, dp = sizes.get("tp", 1), sizes.get("dp", 1)
    cut = REPLICATE
    if _VOCABULARY.search(name):
        cut = shard(0) if shape and shape[0] % tp == 0 else REPLICATE
    elif _ROWS.search(name) and shape and shape[0] > 1:
        cut = shard(0)
    elif _COLUMNS.search(name) and len(shape) > 1 and shape[1] > 1:
        cut = shard(1)
    if tp > 1 and cut.dim is not None and shape[cut.dim] % tp:
        raise UserError(
            f"tp={tp} cannot share {name} of shape {list(shape)} evenly; choose a divisor of {shape[cut.dim]}"
        )
    # FSDP2 cuts the rows of what tensor parallelism left.
    fsdp = (shard(0, tp) if cut.dim == 0 and tp > 1 else shard(0)) if shape else REPLICATE
    axes: list[tuple[int, Placement]] = [(sizes.get("replica", 1), REPLICATE), (dp, fsdp), (tp, cut)]
    num = sizes.get("replica", 1) * dp * tp
    return MeshLayout(tuple(n for n, _ in axes), tuple(p for _, p in axes), tuple(range(first_rank, first_rank + num)))


def parse_axes(text: str) -> dict[str, int]:
    """Sizes from `dp=16` or `replica=8,tp=2`."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, equals, number = (part.strip() for part in item.partition("="))
        if not equals or not number.isdecimal() or len(number) > 9 or int(number) < 1:
            raise UserError(
                f"{text!r} is not a mesh; give sizes such as dp=16 or replica=8,tp=2, or sizes with placements such as "
                "'2x4:S(0),R', or the folder of a checkpoint"
            )
        if name not in PLANNED:
            raise UserError(
                f"{text!r}: there is no mesh axis {name!r} here; axes are {', '.join(PLANNED)}."
                + suggest(name, list(PLANNED))
            )
        if name in sizes:
            raise UserError(f"{text!r} gives {name} twice")
        sizes[name] = int(number)
    num = 1
    for size in sizes.values():
        num *= size
    if num > MOST_RANKS:
        raise UserError(f"{text!r} has {num:,} ranks; at most {MOST_RANKS:,} can be planned")
    return sizes
