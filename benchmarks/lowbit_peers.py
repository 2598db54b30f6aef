"""Low-bit products of other libraries, for lowbit_gemm.py: how each packs a weight, and its time.

    python -m benchmarks.lowbit_peers humming              # all cells of one library
    python -m benchmarks.lowbit_peers humming --missing    # those that results/ lacks, compiled side by side

Every result is first compared with fp64 on the decoded weight. A wrong result, and a library that is missing or fails,
is reported in a line, and the next one follows. Libraries that are not installed are searched in ./peers. Each library
chooses its own settings.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import re
import statistics
import sys
import time
from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.lowbit_gemm import (
    BASELINES,
    DEVICE,
    DTYPE,
    ROWS,
    SHAPES,
    copies,
    finish,
    graph_times,
    record_time,
    relative_error,
    replays,
    run_module,
    say,
)
from benchmarks.results import device_name, markdown, newest
from shoestring.errors import as_command

MOST_ERROR = 0.05  # more than this is a wrong product, not a rounding error


# Each makes a list of functions of x, one per copy of a weight, and the dense weight that they stand for; group 128.
Functions = list[Callable[[Tensor], Tensor]]
Peer = Callable[[int, int, int], tuple[Functions, Tensor]]
Case = tuple[str, int, Peer, tuple[int, ...]]  # name, bits, how it is made, rows


def random_codes(out: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """4-bit codes, scales and zero points [out, width / 128] of a random weight."""
    codes = torch.randint(0, 16, (out, width), device=DEVICE, dtype=torch.uint8)
    scale = torch.rand(out, width // 128, device=DEVICE, dtype=DTYPE) * 0.004 + 0.002
    return codes, scale, torch.randint(5, 11, scale.shape, device=DEVICE).to(DTYPE)


def decode_codes(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    groups = codes.unflatten(1, (-1, 128)).float() - zero.float().unsqueeze(-1)
    return (groups * scale.float().unsqueeze(-1)).flatten(1)


def seen_weight(function: Callable[[Tensor], Tensor], original: Tensor, bits: int, rows: int = ROWS[-1]) -> Tensor:
    """The weight that a function multiplies with, measured column by column, for libraries that do not expose it; it
    must equal `original` up to the rounding to so many bits."""
    hot = torch.eye(original.shape[1], device=DEVICE, dtype=DTYPE)
    seen = torch.cat([function(part) for part in hot.split(rows)]).t().float()
    error = relative_error(seen, original.double())
    assert error < 4 * 0.5**bits, f"it multiplies with another weight, {error:.2f} away"
    return seen


def tinygemm(out: int, width: int, count: int) -> tuple[Functions, Tensor]:
    codes, scale, zero = random_codes(out, width)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    shift = (8 - zero.float()) * scale.float()  # it decodes as (code - 8) * scale + shift
    grid = torch.stack([scale.t(), shift.to(DTYPE).t()], -1).contiguous()
    dense = decode_codes(codes, scale, 8 - grid[..., 1].t().float() / scale.float())

    def one(w: Tensor, g: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.ops.aten._weight_int4pack_mm(x, w, 128, g)

    return [one(packed.clone(), grid.clone()) for _ in range(count)], dense


def torchao_int4(out: int, width: int, count: int) -> tuple[Functions, Tensor]:
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    linear = torch.nn.Linear(width, out, bias=False, device=DEVICE, dtype=DTYPE)
    weight, layer = linear.weight.detach().clone(), torch.nn.Sequential(linear)
    quantize_(layer, Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))
    return [copy.deepcopy(layer) for _ in range(count)], seen_weight(layer, weight, 4, 64)


def gemlite_int4(out: int, width: int, count: int) -> tuple[Functions, Tensor]:
    """With the settings that its authors tuned on an H100, or the nearest ones."""
    import gemlite
    from gemlite.core import GEMLITE_TRITON_CONFIG_CACHE as KNOWN
    from gemlite.helper import A16W4_HQQ_INT

    if "GEMM" not in KNOWN:
        gemlite.GemLiteLinearTriton.load_config(str(Path(gemlite.__file__).parent / "configs" / "h100.json"))
    tuned = (14336, 4096) if (out, width) == (8192, 8192) else (out, width)
    for known in KNOWN.values():
        near = [k for k in map(literal_eval, known) if k[1:5] == (*tuned, 128, 8)]
        for rows in ROWS if near else ():
            best = min(near, key=lambda k: abs(math.log(k[0] / rows)))
            known.setdefault(str((rows, out, width, *best[3:])), known[str(best)])

    codes, scale, zero = random_codes(out, width)
    dense = decode_codes(codes, scale, zero)
    pack = A16W4_HQQ_INT(device=f"{DEVICE}:0", dtype=DTYPE).from_weights
    return [pack(codes, scale.view(-1, 1), zero.view(-1, 1)) for _ in range(count)], dense


def humming(kind: str, zero_point: bool, rows_list: Sequence[int]) -> Peer:
    """With its own settings for each number of rows; only those of `rows_list` are compiled."""

    def make(out: int, width: int, count: int) -> tuple[Functions, Tensor]:
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        config = {"dtype": kind, "group_size": 128, "has_zero_point": zero_point}
        layer = HummingLayer(out, width, config, torch_dtype=DTYPE).cuda()
        weight = torch.randn(out, width, device=DEVICE, dtype=DTYPE) * 0.02
        layer.load_from_unquantized(weight)
        layer.transform()
        chosen = [
            [below, rows, get_heuristics_config(layer.humming_config, shape_m=rows)]
            for below, rows in itertools.pairwise((0, *rows_list))
        ]
        tuning = json.dumps(chosen)
        functions: Functions = [partial(copy.deepcopy(layer).forward, tuning_config=tuning) for _ in range(count)]
        return functions, seen_weight(functions[0], weight, int(kind[-1]), rows_list[-1])

    return make


def humming_case(name: str, kind: str, zero_point: bool, rows: tuple[int, ...]) -> Case:
    return f"humming {name}", int(kind[-1]), humming(kind, zero_point, rows), rows


PEERS: dict[str, list[Case]] = {
    "tinygemm": [("torch tinygemm int4", 4, tinygemm, ROWS[:7])],
    "torchao": [("torchao int4", 4, torchao_int4, ROWS[:7])],
    "gemlite": [("gemlite int4", 4, gemlite_int4, ROWS)],
    "humming": [
        humming_case("int4, zero points", "uint4", True, ROWS),
        humming_case("int4, symmetric", "uint4", False, (1, 4, 16, 64, 256)),
        humming_case("int3, symmetric", "uint3", False, ROWS[:-1]),
        humming_case("int2, symmetric", "uint2", False, ROWS[:-1]),
    ],
}


def measure_case(
    case: str, bits: int, make: Peer, rows_list: Sequence[int], shape: tuple[int, int], until: float, timed: bool
) -> None:
    """One line of the output, also when something fails; `timed` False: only call everything once."""
    out, width = shape
    told, began = [], time.monotonic()
    try:
        functions, dense = make(out, width, copies(out * width * bits // 8) if timed else 1)
        for rows in rows_list:
            if time.monotonic() > until:
                told.append("out of time")
                break
            x = torch.randn(rows, width, device=DEVICE, dtype=DTYPE)
            error = relative_error(functions[0](x), x.double() @ dense.double().t())
            if not error <= MOST_ERROR:
                told.append(f"{rows}: wrong, error {error:.4f}")
            elif timed:
                samples = graph_times([partial(f, x) for f in functions], replays(rows))
                ratio = record_time(case, samples, out, width, rows, error=error, bits=bits, group=128)
                told.append(f"{rows}: {statistics.median(samples):.1f}us x{ratio:.2f} e{error:.4f}")
    except Exception as error:
        told.append(f"not measured ({type(error).__name__}: {str(error)[:300]})")
    say(f"{case} {out}x{width} {time.monotonic() - began:.1f}s  " + "  ".join(told))


Cell = tuple[Case, tuple[int, int]]  # a case with the rows that are wanted, and a shape


def cells(peer: str, shapes: Sequence[tuple[int, int]], rows: Sequence[int], missing: bool) -> list[Cell]:
    """The cells to measure; `missing`: only those that results/ lacks for this kind of GPU."""
    known = {
        (n["case"], n["config"]["n"], n["config"]["k"], n["config"]["rows"])
        for n in newest("lowbit_gemm")
        if missing and n["metric"] == "time" and n["device"] == device_name()
    }
    found: list[Cell] = []
    for (case, bits, make, measured), shape in itertools.product(PEERS[peer], shapes):
        wanted = tuple(r for r in measured if r in rows and (case, *shape, r) not in known)
        if wanted:
            found.append(((case, bits, make, wanted), shape))
    return found


def prepare(peer: str, some: Sequence[Cell], rows: Sequence[int], seconds: float) -> None:
    """Compile what is missing with one process per shape, since a library compiles its kernels one by one."""
    until = time.monotonic() + seconds
    more = ("--prepare", "--missing", "--seconds", f"{seconds:.0f}", "--rows", *map(str, rows))
    shapes = dict.fromkeys(f"{out}x{width}" for _, (out, width) in some)
    running = {shape: run_module("lowbit_peers", peer, "--shapes", shape, *more) for shape in shapes}
    for shape, process in running.items():
        finish(process, f"compiling for {peer} {shape}", until + 5)


def against() -> str:
    """Time of each library over ours of the same width, group 128: the least and the most over the shapes."""
    times: dict[str, dict[tuple[int, int, int], float]] = {}
    for n in newest("lowbit_gemm"):
        if n["metric"] == "time":
            place = n["config"]["n"], n["config"]["k"], n["config"]["rows"]
            times.setdefault(n["case"], {})[place] = n["value"]
    rows = []
    for case, peer in times.items():
        width = re.search(r"int\d", case)
        if case.startswith("shoestring") or width is None:
            continue
        ours = times[f"shoestring {width[0]}:g128"]
        shown = []
        for count in ROWS:
            found = [peer[place] / ours[place] for place in peer if place in ours and place[2] == count]
            shown.append(f"{min(found):.2f} to {max(found):.2f}" if found else "")
        rows.append([case, *shown])
    return markdown(["library", *map(str, ROWS)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--prepare", action="store_true", help="call everything once and time nothing")
    parser.add_argument("--missing", action="store_true", help="leave out what the results have")
    parser.add_argument("--baseline", type=Path, help="times of F.linear that this run has measured already")
    parser.add_argument("--seconds", type=float, default=200, help="start nothing new after this long")
    names = {f"{out}x{width}": (out, width) for out, width in SHAPES}
    parser.add_argument("--shapes", nargs="*", default=list(names), choices=list(names), help="only these")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="only these")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    sys.path.append("peers")
    until = time.monotonic() + args.seconds
    if args.baseline:
        BASELINES.update(json.loads(args.baseline.read_text()))
    some = cells(args.peer, [names[shape] for shape in args.shapes], args.rows, args.missing)
    if args.missing and not args.prepare:
        prepare(args.peer, some, args.rows, 0.6 * args.seconds)
    for (case, bits, make, rows), shape in some:
        if time.monotonic() > until:
            say(f"{case} {shape[0]}x{shape[1]}: out of time")
            continue
        measure_case(case, bits, make, rows, shape, until, timed=not args.prepare)


if __name__ == "__main__":
    as_command(main)
