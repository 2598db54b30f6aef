"""Eight adapters in one batch, beside the base model alone.

    python -m benchmarks.adapters                      about 90 seconds on an H200
    python -m benchmarks.adapters --formats int4 --kernels

The shape of Llama-3-8B with random weights, in bf16 and in int4 (head int8), and eight adapters of rank 16 on all
linear layers of its blocks. Eight requests, one of each adapter: 128 tokens in, 256 out, greedy; tokens per second
after the first token of each request. The baseline is the same batch of the base model, in an engine that knows no
adapter. Nothing is recorded unless the kernels are as near to fp64 as their reference, and a small model in fp32
gives, in one batch through graphs, the texts that it gives with each adapter merged into it; one may differ, where two
tokens are as likely up to rounding.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch

from benchmarks.decode import MODELS, NEW, PROMPT, attempt, built, prompts
from benchmarks.results import markdown, newest, provenance, record
from shoestring.errors import as_command
from shoestring.formats.adapter import LoraWeights
from shoestring.kernels.gemv.gather_lora import gather_lora_, gather_lora_ref_
from shoestring.model import Decoder, ModelSpec
from shoestring.model.adapter_folder import AdapterFile, linear_shapes, merge_adapter_
from shoestring.serve import Engine, Sampling

BENCH = "adapters"
SHAPE = "Llama 8B shape"
FORMATS = {"bf16": ("bf16", "bf16"), "int4": ("int4:g128", "int8:g0")}  # of the blocks, of the head
NUM, RANK = 8, 16


def adapters(model: Decoder, size: float = 0.02) -> dict[str, AdapterFile]:
    """On all layers of the blocks; random."""
    made = {}
    for n in range(NUM):
        weights = {}
        for name, (out, width) in linear_shapes(model).items():
            if name.startswith("blocks."):
                a, b = (torch.randn(s, device=model.device) * size for s in ((RANK, width), (out, RANK)))
                weights[name] = LoraWeights(a, b, 2.0)
        made[f"adapter {n}"] = AdapterFile(weights, str(n))
    return made


def check_kernel(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
    """The products of a layer of the shape in fp64 from the same numbers: at most twice as far as the reference."""
    spec = MODELS[SHAPE]
    d, ff, kv = spec.d_model, spec.d_ff, spec.num_kv_heads * spec.head_dim
    slot = torch.tensor([3, -1, 0, 7, 5, 5, 2, 1], dtype=torch.int32, device=device)
    for width, ends, swiglu in ((d, (d, d + kv, d + 2 * kv), False), (d, (ff, 2 * ff), True), (ff, (d,), False)):
        shapes = (NUM, ends[-1]), (NUM, width), (NUM, len(ends) * RANK, width), (NUM, ends[-1], RANK), (width,)
        y, x, a, b, norm = (torch.randn(s, device=device).to(dtype) for s in shapes)
        a *= width**-0.5
        fused: dict[str, Any] = {"norm_K": norm if width == d else None, "eps": 1e-5, "swiglu": swiglu}
        exact = {**fused, "norm_K": None if fused["norm_K"] is None else norm.double()}
        want = gather_lora_ref_(y.double(), x.double(), a.double(), b.double(), slot, ends, **exact)
        eager, got = (of(y.clone(), x, a, b, slot, ends, **fused) for of in (gather_lora_ref_, gather_lora_))
        errors = [float((t - want).square().mean().sqrt()) for t in (got, eager)]
        print(f"kernel {width} -> {ends}: RMS error {errors[0]:.2e}, reference {errors[1]:.2e}", flush=True)
        assert errors[0] <= 2 * errors[1]


@torch.no_grad()
def check(device: str = "cuda") -> None:
    spec = ModelSpec(
        vocab_size=512, d_model=256, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=64, d_ff=512,
        max_positions=1024, tied=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Decoder(spec).to(device).eval()
    for param in model.parameters():
        if param.ndim > 1:
            param.normal_(0, 0.1)
    files, asked, sampling = adapters(model, 0.1), prompts(spec, NUM + 1, 40), Sampling(max_tokens=60, ignore_eos=True)
    engine = Engine(copy.deepcopy(model), max_requests=NUM + 1, graphs=True)
    for name, file in files.items():
        engine.adapters.load(name, file)
    names: list[str | None] = [*files, None]
    for _ in range(2):
        got = [c.token_ids for c in engine.generate(asked, sampling, names)]
    assert engine.runner.fast, "the kernels cannot run here"
    want = []
    for prompt, chosen in zip(asked, names, strict=True):
        alone = copy.deepcopy(model)
        merge_adapter_(alone, files[chosen].weights if chosen else {}, requantize=False)
        want += [c.token_ids for c in Engine(alone, max_requests=1, graphs=False).generate([prompt], sampling)]
    same = sum(g == w for g, w in zip(got, want, strict=True))
    print(f"fp32: {same} of {len(want)} texts of a mixed batch equal those of each adapter alone", flush=True)
    assert same >= NUM, "more than one text differs, which is no tie of two tokens"


def rates(engine: Engine, names: list[str | None], repeats: int) -> list[float]:
    """Tokens per second after the first token of each request."""
    found = []
    for seed in range(repeats + 1):  # the first compiles and captures
        for prompt, name in zip(prompts(engine.model.spec, NUM, PROMPT, seed), names, strict=True):
            engine.add(prompt, Sampling(max_tokens=NEW, ignore_eos=True), adapter=name)
        engine.step()
        began = time.perf_counter()
        while engine.busy:
            engine.step()
        found.append(NUM * (NEW - 1) / (time.perf_counter() - began))
    return found[1:]


def print_kernels(engine: Engine, names: list[str | None]) -> None:
    """Where the time of a step goes, by kernel."""
    for prompt, name in zip(prompts(engine.model.spec, NUM, PROMPT), names, strict=True):
        engine.add(prompt, Sampling(max_tokens=24, ignore_eos=True), adapter=name)
    engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        while engine.busy:
            engine.step()
    print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=12, max_name_column_width=60), flush=True)


def run(format: str, repeats: int, kernels: bool) -> None:
    model = built(SHAPE, *FORMATS[format])
    options = {"max_requests": NUM, "max_context": PROMPT + NEW, "chunk": NUM * PROMPT, "prefix_cache": False}
    base = rates(Engine(model, **options), [None] * NUM, repeats)  # type: ignore[arg-type]
    engine = Engine(model, **options)  # type: ignore[arg-type]
    for name, file in adapters(model).items():
        engine.adapters.load(name, file)
    names: list[str | None] = [*engine.adapters.names]
    mixed, one = rates(engine, names, repeats), rates(engine, [names[0]] * NUM, 1)
    value, baseline = statistics.median(mixed), statistics.median(base)
    print(
        f"{format}: base {baseline:,.1f} tokens/s, {NUM} adapters {value:,.1f} ({value / baseline:.3f}), one adapter "
        f"for all {one[0]:,.1f}, {1e3 * NUM * (1 / value - 1 / baseline):.3f} ms more a step",
        flush=True,
    )
    if kernels:
        print_kernels(engine, names)
    record(
        bench=BENCH, case=f"{NUM} adapters", metric="tokens_per_s", unit="tokens/s", samples=mixed,
        baseline="base model", baseline_value=baseline, ratio=value / baseline,
        config={
            "model": SHAPE, "format": format, "rank": RANK, "batch": NUM, "context": PROMPT, "tokens": NEW,
        },
    )  # fmt: skip


def table() -> str:
    rows = []
    for n in (lines := newest(BENCH)):
        c = n["config"]
        rows.append(
            [c["format"], str(c["batch"]), str(c["rank"]), f"{n['value']:,.0f}", f"{n['baseline_value']:,.0f}",
             f"{n['ratio']:.2f}"]
        )  # fmt: skip
    header = ["weights", "adapters", "rank", "tokens/s", "base model", "ratio"]
    return markdown(header, rows) + provenance(lines) if rows else "Not measured yet."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", action="store_true", help="print where the time of a step goes")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this bench times kernels and needs a CUDA GPU")
    check_kernel()
    check()
    for format in args.formats:
        with attempt(format):
            run(format, args.repeats, args.kernels)
        built.cache_clear()


if __name__ == "__main__":
    as_command(main)
