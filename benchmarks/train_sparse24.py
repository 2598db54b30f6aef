"""2:4 training against dense training on one GPU: whole steps, blocks, feed-forward layers, and the parts between.

    python -m benchmarks.train_sparse24                    about 8 minutes on an H200
    python -m benchmarks.train_sparse24 --at-once 280      the table's rows: compiled at once, timed in turns
    python -m benchmarks.train_sparse24 --at-once 90 --widths 5120 --what step block      some of them
    python -m benchmarks.train_sparse24 --widths 4096 --what ffn parts

A step is that of the ordinary trainer, compiled, with attention, loss, optimizer, mask search, packing, masked decay
and noise; the model is two Llama-like layers with a small vocabulary, so that the layers dominate. Block and
feed-forward rows are forward and backward of that layer alone, compiled. Up to width 2048, where the host may be slower
than the GPU (torch plans a sparse product at every call), passes are CUDA graphs on both sides: all of a step but
clipping, hooks and optimizer (`graph=true` of the recipes). FST refreshes its masks every 40 steps up to width 2048, as
is usual, and every 10 above; the timed steps are a multiple of that. The FP8 rows are the alternative to 2:4: dense FP8
products in the feed-forward layer, with per-tensor scales computed on the fly. Dense and the case take turns, so that
both run at the clock rate of a busy GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.processes import child_environment, run_in_turns, take_turn
from benchmarks.results import markdown, newest, provenance, record
from benchmarks.train_dense import FixedData
from shoestring.errors import UserError, as_command
from shoestring.formats import Dense, Format, convert, init_state
from shoestring.kernels.runtime.capture_stream import on_capture_stream
from shoestring.mesh import Mesh
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.kernels import cusparselt, ffn
from shoestring.methods.sparse24.kernels.masked_decay import masked_decay_
from shoestring.methods.sparse24.kernels.transposable_mask import transposable_mask
from shoestring.methods.sparse24.products import scaled_mm
from shoestring.methods.sparse24.training import MaskedDecay, MaskRefresh, NoiseClock
from shoestring.methods.sparse24.tune import tune_products
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.model.transformer import Mlp
from shoestring.runlog import RunLog
from shoestring.train.cuda_graph import GraphedForwardBackward
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, constant
from shoestring.train.step import Hook, Micro, Run
from shoestring.train.trainer import train

BENCH = "train_sparse24"
# d_model -> (d_ff, heads, layers)
WIDTHS = {768: (2048, 12, 2), 1280: (3456, 20, 2), 2048: (8192, 32, 2), 4096: (14336, 32, 2), 5120: (13824, 40, 2)}
ROWS, CONTEXT = 8, 2048
FORMATS: dict[str, Format] = {
    "dense": Dense(),
    "FST": Sparse24("tile", hold_mask=True, weight_grad="mvue"),
    "FST, exact weight gradient": Sparse24("tile", hold_mask=True),
    "S-STE": Sparse24("soft", weight_grad="mvue"),
    "S-STE, exact weight gradient": Sparse24("soft"),
    "S-STE in FP8": Sparse24("soft", weight_grad="mvue", precision="fp8"),
}
PRUNED = [case for case in FORMATS if case != "dense"]
WHAT = {"ffn": "FFN", "block": "block", "step": "whole step"}
GRAPHED = 2048  # up to this width passes are CUDA graphs
EXACT = ("FST, exact weight gradient", "S-STE, exact weight gradient")
# (what, width, cases, seconds for each), the most wanted first: --at-once
Row = tuple[str, int, tuple[str, ...], float]
AT_ONCE: tuple[Row, ...] = (
    ("step", 4096, ("FST", "S-STE", "FP8", *EXACT), 4.0),
    ("step", 5120, ("FST", "S-STE", "FP8"), 4.0),
    ("block", 4096, ("FST", "S-STE", "FP8"), 2.0),
    ("block", 5120, ("FST", "S-STE", "FP8"), 2.0),
    ("ffn", 4096, ("FST", "S-STE", "FP8", "S-STE in FP8", *EXACT), 1.6),
    ("ffn", 1280, (*EXACT, "FP8"), 1.0),
    ("ffn", 768, (*EXACT, "FP8", "FST"), 1.0),
    ("ffn", 2048, ("FST", "S-STE", "FP8", *EXACT), 1.5),
    ("ffn", 5120, ("FST", "S-STE", "FP8"), 1.5),
    ("parts", 4096, (), 0.0),
    ("step", 1280, (*EXACT, "FP8"), 2.0),
    ("step", 768, (*EXACT, "FP8"), 2.0),
    ("step", 2048, ("FST", "S-STE", "FP8", *EXACT), 2.0),
)


def refresh_of(width: int) -> int:
    """Steps between new masks: 40 is usual; wide models get 10, to keep the timed stretch short."""
    return 40 if width <= 2048 else 10


def spec_of(width: int) -> ModelSpec:
    d_ff, heads, layers = WIDTHS[width]
    return ModelSpec(
        vocab_size=4096, d_model=width, num_layers=layers, num_heads=heads, num_kv_heads=heads,
        head_dim=width // heads, d_ff=d_ff, max_positions=CONTEXT,
    )  # fmt: skip


def on_paper(width: int, case: str) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec_of(width))
        if case in PRUNED:
            convert(model, [("*.mlp.*", FORMATS[case])])
    return model


def tune(widths: Sequence[int], cases: Sequence[str]) -> None:
    """Choose the products of these models and write the choices to disk for other processes."""
    for width, case in itertools.product(widths, cases):
        if case in PRUNED:
            tune_products(on_paper(width, case), ROWS * CONTEXT, torch.bfloat16)


def build(width: int, case: str, mesh: Mesh) -> Decoder:
    model = on_paper(width, case)
    materialize(model, mesh.device)
    init_weights(model, 0)
    init_state(model)
    if case in PRUNED:
        tune_products(model, ROWS * CONTEXT, torch.bfloat16)
    elif case == "FP8":
        for block in model.blocks:
            block.mlp = Fp8Mlp(width, WIDTHS[width][0])
    parallelize(model, mesh, ParallelConfig(compile="blocks", compute_dtype=torch.bfloat16))
    return model


def step_loop(width: int, case: str, mesh: Mesh) -> Callable[[int], None]:
    model = build(width, case, mesh)
    gen = torch.Generator().manual_seed(0)
    stream = torch.randint(0, model.spec.vocab_size, (ROWS, CONTEXT + 1), generator=gen)
    micro = Micro(
        stream[:, :-1].contiguous(), stream[:, 1:].contiguous(), torch.zeros(ROWS, CONTEXT, dtype=torch.int64)
    )
    hooks: list[Hook] = []
    if case in PRUNED:
        hooks.append(NoiseClock(model, seed=0, tokens_per_step=ROWS * CONTEXT, mesh=mesh))
    if case.startswith("FST"):
        hooks += [MaskRefresh(refresh_of(width)), MaskedDecay(1e-4)]
    run = Run(model, adamw(model, lr=1e-5), mesh, RunLog(None, quiet=True))
    objective = CrossEntropy()
    graphed = GraphedForwardBackward() if width <= GRAPHED else None

    def steps(count: int) -> None:
        goal = run.step + count
        train(run, FixedData(micro), objective, steps=goal, schedule=constant(1e-5), hooks=hooks,
              log_every=count, forward_backward=graphed)  # fmt: skip

    def replays(count: int) -> None:
        steps(count)
        if graphed is not None and graphed.reason:
            raise RuntimeError(f"not captured: {graphed.reason}")

    return steps if graphed is None else replays


def ffn_loop(width: int, case: str, mesh: Mesh) -> Callable[[int], None]:
    """Forward and backward of one feed-forward layer, compiled."""
    layer = clocked(width, case, mesh).blocks[0].mlp
    assert isinstance(layer, torch.nn.Module)
    return there_and_back(layer, torch.compile(layer), width)


def block_loop(width: int, case: str, mesh: Mesh) -> Callable[[int], None]:
    """Forward and backward of one whole block, compiled."""
    model = clocked(width, case, mesh)
    block = model.blocks[0]
    positions = torch.arange(CONTEXT, device="cuda")[None]
    rope = model.rope_tables(positions)[0]
    return there_and_back(block, lambda x: block(x, rope, None), width)


def clocked(width: int, case: str, mesh: Mesh) -> Decoder:
    model = build(width, case, mesh)
    if case in PRUNED:
        NoiseClock(model, seed=0, tokens_per_step=ROWS * CONTEXT, mesh=mesh)
    return model


def there_and_back(layer: torch.nn.Module, call: Callable[[Tensor], Tensor], width: int) -> Callable[[int], None]:
    gen = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(ROWS, CONTEXT, width, generator=gen, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(ROWS, CONTEXT, width, generator=gen, device="cuda", dtype=torch.bfloat16)

    def forget() -> None:
        layer.zero_grad()  # to None, as in training: nothing is added up
        x.grad = None

    def steps(count: int) -> None:
        for _ in range(count):
            call(x).backward(dy)
            forget()

    if width > GRAPHED:
        return steps
    try:
        return graphed(steps, lambda: call(x).backward(dy))
    except RuntimeError as error:
        print(f"not captured: {str(error).splitlines()[0]}", flush=True)
        return steps


def graphed(eager: Callable[[int], None], once: Callable[[], None]) -> Callable[[int], None]:
    with on_capture_stream():
        eager(3)  # compiles, and reserves what it needs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()

    def replays(count: int, held: object = (eager, once)) -> None:
        # The graph reads the layer and its input where they lie: `held` keeps them there.
        for _ in range(count):
            graph.replay()

    return replays


def milliseconds(loop: Callable[[int], None], count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    loop(count)
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / count


LOOPS = {"ffn": ffn_loop, "block": block_loop, "step": step_loop}


def compare(width: int, what: str, cases: list[str], repeats: int, seconds: float, mesh: Mesh) -> None:
    """Every case against dense, in turns; everything is compiled before anything is timed."""
    loops: dict[str, Callable[[int], None]] = {}
    for case in ["dense", *cases]:
        try:
            loop = LOOPS[what](width, case, mesh)
            loop(3)
            torch.cuda.synchronize()
            loops[case] = loop
        except Exception:  # one case must not take the time of the others with it
            print(f"{what} {width} {case} failed", flush=True)
            traceback.print_exc()
        torch.cuda.empty_cache()  # other processes may be compiling beside this one
    dense = loops.pop("dense")
    take_turn()
    warm(dense)
    for case, loop in loops.items():
        in_turns(width, what, case, dense, loop, repeats, seconds)


def warm(loop: Callable[[int], None], seconds: float = 0.7) -> None:
    """Bring the GPU to the clock rate and temperature of a busy GPU."""
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        milliseconds(loop, 3)


def in_turns(
    width: int,
    what: str,
    case: str,
    dense: Callable[[int], None],
    loop: Callable[[int], None],
    repeats: int,
    seconds: float,
) -> None:
    """Time two loops that are compiled already, and record the result."""
    count = max(3, round(1000 * seconds / (2 * repeats) / milliseconds(dense, 3)))
    if what == "step" and case.startswith("FST"):
        refresh = refresh_of(width)
        count = max(1, round(count / refresh)) * refresh  # a whole number of mask refreshes
    pairs = [(milliseconds(dense, count), milliseconds(loop, count)) for _ in range(repeats)]
    ratio = statistics.median(a / b for a, b in pairs)
    d_ff, _, layers = WIDTHS[width]
    record(
        bench=BENCH,
        case=case,
        metric="ms",
        unit=f"ms per {'step' if what == 'step' else 'forward and backward'}",
        samples=[b for _, b in pairs],
        baseline="dense",
        baseline_value=statistics.median(a for a, _ in pairs),
        ratio=ratio,
        config={"what": what, "d_model": width, "d_ff": d_ff, "layers": layers if what == "step" else 1,
                "tokens": ROWS * CONTEXT},
        note=f"{count} x {repeats} in turns with dense"
        + (", as CUDA graphs" if dense.__name__ == loop.__name__ == "replays" else ""),
    )  # fmt: skip
    print(f"{what} {width} {case}: {ratio:.3f}x of dense", [round(a / b, 3) for a, b in pairs], flush=True)


# -- what surrounds the products -------------------------------------------------------------------------------
def parts(width: int, mesh: Mesh) -> None:
    """The operations that FST adds to one feed-forward layer and step, besides its products."""
    take_turn()
    mlp = clocked(width, "FST", mesh).blocks[0].mlp
    assert isinstance(mlp, Mlp)
    d_ff, tokens = WIDTHS[width][0], ROWS * CONTEXT
    weights = [linear.weight.detach() for linear in (mlp.gate, mlp.up, mlp.down)]
    masks = [transposable_mask(w) for w in weights]
    numbers = [torch.arange(w.shape[0], device="cuda", dtype=torch.int32) for w in weights]
    clocks = [torch.arange(4, device="cuda")] * 2
    z = torch.randn(2 * d_ff, tokens, device="cuda", dtype=torch.bfloat16)
    dh, dy = torch.randn_like(z[:d_ff]), torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    grads = [torch.zeros_like(w) for w in weights]

    def pack_weights() -> None:
        for group in ([0, 1], [2]):
            ws, ms = [weights[i] for i in group], [masks[i] for i in group]
            ffn.prune_and_pack(ws, ms, [], torch.bfloat16, True, True, False)

    def draw() -> None:
        ffn.glu_grad(z, dh, numbers[:2], clocks)
        cusparselt.pack_mvue(dy, numbers[2], clocks[0])

    def pull() -> None:
        for grad, w, mask in zip(grads, weights, masks, strict=True):
            masked_decay_(grad, w, mask, 1e-4)

    def cast() -> None:
        for w in weights:
            w.bfloat16()

    found = {
        "prune and pack the weights": device_ms(pack_weights),
        "cast the weights, which dense does too": device_ms(cast),
        f"search the masks, every {refresh_of(width)} steps": device_ms(lambda: [transposable_mask(w) for w in weights])
        / refresh_of(width),
        "masked decay": device_ms(pull),
        "draw and pack the gradients (MVUE)": device_ms(draw) - device_ms(lambda: ffn.glu_grad(z, dh, [], [])),
    }
    for case, ms in found.items():
        record(bench=BENCH, case=case, metric="ms", unit="ms per layer and step", samples=[ms],
               config={"what": "parts", "d_model": width, "d_ff": d_ff, "layers": 1, "tokens": tokens},
               note="kernels alone")  # fmt: skip
        print(f"parts {width} {case}: {ms:.3f} ms", flush=True)


def device_ms(call: Callable[[], object], repeats: int = 9) -> float:
    call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


# -- the FP8 peer ----------------------------------------------------------------------------------------------
class Fp8Mlp(torch.nn.Module):
    """Dense FP8 products with per-tensor scales computed on the fly: the alternative to 2:4 training."""

    def __init__(self, width: int, d_ff: int) -> None:
        super().__init__()
        shapes = {"gate": (d_ff, width), "up": (d_ff, width), "down": (width, d_ff)}
        for name, shape in shapes.items():
            weight = 0.02 * torch.randn(shape, device="cuda")  # masters in fp32, as everywhere
            self.register_parameter(name, torch.nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        hidden = F.silu(Fp8Product.apply(flat, self.gate)) * Fp8Product.apply(flat, self.up)
        return Fp8Product.apply(hidden, self.down).view_as(x)


def to_fp8(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = t.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (t.float() / scale).to(dtype), scale


class Fp8Product(torch.autograd.Function):
    """x W^T with all three products in FP8: E4M3 forward, E5M2 for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x8, sx = to_fp8(x, torch.float8_e4m3fn)
        w8, sw = to_fp8(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, sx, w8, sw)
        ctx.master = w.dtype
        return torch._scaled_mm(x8, w8.t(), scale_a=sx, scale_b=sw, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x8, sx, w8, sw = ctx.saved_tensors
        dz8, sz = to_fp8(grads[0], torch.float8_e5m2)
        # The second operand must lie column by column, so both gradients need a transposed copy.
        dx = torch._scaled_mm(dz8, w8.t().contiguous().t(), scale_a=sz, scale_b=sw, out_dtype=torch.bfloat16)
        return dx, fp8_weight_grad(dz8, sz, x8, sx, torch.bfloat16).to(ctx.master)


def fp8_weight_grad(dz8: Tensor, sz: Tensor, x8: Tensor, sx: Tensor, dtype: torch.dtype) -> Tensor:
    return scaled_mm(dz8.t().contiguous(), x8.t().contiguous(), sz, sx, dtype)


class Fp8WeightGrad(torch.autograd.Function):
    """x W^T in the dtype of x; only the weight gradient is a product in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        dz = grads[0]
        operands = (*to_fp8(dz, torch.float8_e5m2), *to_fp8(x, torch.float8_e4m3fn))
        return dz @ w, fp8_weight_grad(*operands, dz.dtype).to(w.dtype)


# -- tables ----------------------------------------------------------------------------------------------------
def parts_table() -> str:
    """Milliseconds per layer, and the share of FST's step."""
    lines = newest(BENCH)
    found = {(n["config"]["d_model"], n["config"]["what"], n["case"]): n for n in lines}
    widths = [w for w in WIDTHS if any(k[:2] == (w, "parts") for k in found)]
    names = list(dict.fromkeys(k[2] for k in found if k[1] == "parts"))
    rows = []
    for name in names:
        cells = []
        for width in widths:
            part, step = found.get((width, "parts", name)), found.get((width, "step", "FST"))
            share = "" if part is None or step is None else _share(part, step)
            cells.append("" if part is None else f"{part['value']:.2f}{share}")
        rows.append([name, *cells])
    return markdown(["ms per layer and step", *(f"d_model {w}" for w in widths)], rows)


def _share(part: dict[str, Any], step: dict[str, Any]) -> str:
    return f" ({100 * part['value'] * step['config']['layers'] / step['value']:.1f}%)"


def table() -> str:
    """Speed-up over dense, by width."""
    lines = [n for n in newest(BENCH) if n["config"]["what"] in WHAT]
    found = {(n["config"]["d_model"], n["config"]["what"], n["case"]): n for n in lines}
    widths = [w for w in WIDTHS if any(k[0] == w for k in found)]
    rows = []
    for what, shown in WHAT.items():
        for case in (*FORMATS, "FP8"):
            cells = [found.get((w, what, case)) for w in widths]
            if any(cells):
                rows.append([f"{shown}: {case}", *(f"{c['ratio']:.2f}" if c else "" for c in cells)])
    return markdown(["d_model", *map(str, widths)], rows) + (provenance(lines) if lines else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="*", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--what", nargs="*", default=[*WHAT, "parts"], choices=[*WHAT, "parts", "tune"])
    parser.add_argument("--cases", nargs="*", default=[*PRUNED, "FP8"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="timed seconds for each comparison")
    parser.add_argument(
        "--at-once",
        type=float,
        metavar="SECONDS",
        help="the table's rows of these widths and kinds, in this time; the last ones may be left out",
    )
    args = parser.parse_args()
    if "tune" in args.what and len(args.what) > 1:
        parser.error(f"--what {' '.join(args.what)}: tune measures nothing; give it alone, or the others without it")
    rows = [row for row in AT_ONCE if row[0] in args.what and row[1] in args.widths]
    if args.at_once is not None and not rows:
        there = ", ".join(f"{what} {width}" for what, width, _, _ in AT_ONCE)
        asked = f"--what {' '.join(args.what)} --widths {' '.join(map(str, args.widths))}"
        parser.error(f"--at-once has no row of {asked}; its rows are {there}")
    if not torch.cuda.is_available():
        parser.error("this bench compares GPU training steps and needs a CUDA GPU")
    if args.at_once is not None:
        at_once(rows, args.at_once, args.repeats)
        return
    if args.what == ["tune"]:
        tune(args.widths, args.cases)
        return
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 256  # every case compiles the same code anew
    mesh = Mesh(0, 1, torch.device("cuda", 0))
    for width in args.widths:
        for what in args.what:
            if what == "parts":
                parts(width, mesh)
            else:
                compare(width, what, args.cases, args.repeats, args.seconds, mesh)


def at_once(rows: Sequence[Row], seconds: float, repeats: int) -> None:
    """One process for each (what, width), as many at a time as the GPU has memory for; about half of the time is spent
    compiling. Products are chosen before, alone, because timing beside other processes gives bad choices."""
    began = time.monotonic()
    widths = sorted({str(width) for _, width, _, _ in rows})
    cases = dict.fromkeys(case for *_, each, _ in rows for case in each)
    try:
        subprocess.run(command("tune", widths, list(cases)), timeout=seconds, check=True, env=child_environment())
    except subprocess.TimeoutExpired:
        raise UserError(
            f"products were still being chosen after the {seconds:g} seconds of --at-once: give more seconds, or fewer "
            "--widths"
        ) from None
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"the process that chooses products failed with exit code {error.returncode}; what it said is above, and "
            f"--what tune --widths {' '.join(widths)} runs it alone"
        ) from None
    groups = rounds(rows, 0.9 * torch.cuda.mem_get_info()[0] / 2**30)
    timed = [sum(len(cases) * each for _, _, cases, each in group) for group in groups]
    for number, some in enumerate(groups):
        left = share(seconds - (time.monotonic() - began), timed[number:])
        with tempfile.TemporaryDirectory() as folder:
            told = run_in_turns(commands(some, repeats), Path(folder), patience=0.55 * left, seconds=left)
        for (what, width, _, _), end in zip(some, told, strict=True):
            print(f"{what} {width}: {end}", flush=True)


def rounds(rows: Sequence[Row], gib: float) -> list[list[Row]]:
    """The rows in order, in groups whose processes fit into so much memory together; a group has at least one."""
    found: list[list[Row]] = [[]]
    for row in rows:
        if found[-1] and sum(map(gib_of, (*found[-1], row))) > gib:
            found.append([])
        found[-1].append(row)
    return found


def share(seconds: float, timed: Sequence[float]) -> float:
    """Of the seconds that are left, for the first of these rounds: half of them by their number, since each compiles,
    and half by what they time."""
    return seconds * (0.5 / len(timed) + 0.5 * timed[0] / max(sum(timed), 1e-9))


def gib_of(row: Row) -> float:
    """Memory of a row's process, in which dense and all cases are ready at once: 9 and 13 GiB were seen for a case of
    steps at widths of 4,096 and 5,120 (weights, gradients and moments in fp32, the rest in bf16), and 10 for all cases
    of a layer."""
    what, width, cases, _ = row
    if what != "step":
        return 10.0
    weights = sum(p.numel() for p in on_paper(width, "dense").parameters())
    graphs = 2.5 if width <= GRAPHED else 0.0
    return (len(cases) + 1) * (20 * weights / 2**30 + graphs)


def commands(rows: Sequence[Row], repeats: int) -> list[list[str]]:
    return [
        [*command(what, [str(width)], cases), "--seconds", str(each),
         "--repeats", str(3 if what == "step" else repeats)]
        for what, width, cases, each in rows
    ]  # fmt: skip


def command(what: str, widths: Sequence[str], cases: Sequence[str]) -> list[str]:
    module = "benchmarks.train_sparse24"
    return [sys.executable, "-m", module, "--what", what, "--widths", *widths, "--cases", *cases]


if __name__ == "__main__":
    as_command(main)
