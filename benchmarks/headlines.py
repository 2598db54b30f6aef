"""The table of README.md: eight results, each with model, hardware and baseline, and the page that has the rest.

Every number is looked up in results/; a row whose lines are missing is an error, not an empty cell. Quality stands
beside speed in the same row.
"""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks import cpu_decode, drafter_tables
from benchmarks.controller_start import BENCH, KNOWN
from benchmarks.results import markdown, newest, recorded

GPU = "H200"


def table() -> str:
    rows = [train_dense(), train_sparse24(), quality(4), quality(2), kernel(), decode(), speculation(), cpu()]
    return markdown(["", "model", "hardware", "baseline", "Shoestring", "page"], rows)


def find(bench: str, case: str, metric: str, device: str = "", **config: Any) -> dict[str, Any]:
    """The newest line of a case with these settings, on a machine of this kind."""
    found = find_or_none(bench, case, metric, device, **config)
    if found is None:
        raise LookupError(f"results/{bench}.jsonl has no line {case!r}, {metric}, {config} {device}")
    return found


def find_or_none(bench: str, case: str, metric: str, device: str = "", **config: Any) -> dict[str, Any] | None:
    found = [
        n
        for n in recorded(bench)
        if (n["case"], n["metric"]) == (case, metric)
        and n["device"].startswith(device)
        and all(n["config"].get(k) == v for k, v in config.items())
    ]
    return found[-1] if found else None


def link(name: str, target: str) -> str:
    return f"[{name}](docs/{target})"


def train_dense() -> list[str]:
    model = {"model": "GPT-2 774M", "compile": "whole"}
    speed = find("train_dense", "shoestring", "tokens_per_s", **model)
    memory = find("train_dense", "shoestring", "peak_memory", **model)
    bare = find("train_dense", "bare torch.compile loop", "peak_memory", **model)
    return [
        "dense pre-training",
        "GPT-2 774M, 16 x 1,024 tokens",
        GPU,
        f"bare `torch.compile` loop: {speed['baseline_value']:,.0f} tokens/s, {bare['value']:.1f} GiB",
        f"{speed['value']:,.0f} tokens/s ({speed['ratio']:.2f}x), {memory['value']:.1f} GiB",
        link("training", "explain/training.md#speed"),
    ]


def train_sparse24() -> list[str]:
    fst = find("train_sparse24", "FST", "ms", what="step", d_model=4096)
    fp8 = find("train_sparse24", "FP8", "ms", what="step", d_model=4096)
    tables = importlib.import_module("experiments.sparse24_tables")
    lines = tables.lines_of(tables.GPT2, repeats=False, schedule=tables.WSD)
    dense = {n["config"]["seed"]: n["value"] for n in lines if n["case"] == "dense"}
    gaps = [n["value"] / dense[n["config"]["seed"]] - 1 for n in lines if n["case"] == "FST"]
    return [
        "2:4 sparse pre-training (FST)",
        "speed: two layers of width 4,096; loss: GPT-2 small, 100M tokens, rate 6e-4 for both",
        GPU,
        f"dense bf16; dense FP8 is {fp8['ratio']:.2f}x",
        f"sparse step {fst['ratio']:.2f}x (77% of all steps of FST are sparse), validation loss "
        f"{100 * sum(gaps) / len(gaps):+.1f}% ({len(gaps)} seeds)",
        link("sparse24", "methods/sparse24.md"),
    ]


# The setting of shrink/lowbit_best at 2 and 4 bits, which its rows show whether or not validation prefers another.
SHIPPED = "ours@live,gamma=0,0.25,batch=16"


def quality(bits: int) -> list[str]:
    tables = importlib.import_module("experiments.lowbit_tables")
    best, grid = tables.best_settings(), f"int{bits}:g64"

    def spread(lines: list[dict[str, Any]]) -> str:
        """Lowest to highest, where they differ in what is shown; in brackets on novels, of those that have that."""

        def ends(text: str) -> str:
            values = [n["quality"][text] for n in lines if text in n["quality"]]
            return " to ".join(dict.fromkeys((f"{min(values):.1f}", f"{max(values):.1f}"))) if values else "not run"

        return f"{ends('perplexity')} [{ends('novels')}]"

    def seeds(*methods: list[dict[str, Any]]) -> str:
        counts = [len({n["config"]["seed"] for n in lines}) for lines in methods]
        said = " and ".join(str(count) for count in dict.fromkeys(counts))
        if len(set(counts)) > 1:
            return f"{counts[0]} seeds, BitDistiller {counts[1]}"
        return "one seed each" if counts[0] == 1 else f"{said} seeds each"

    def texts(lines: list[dict[str, Any]]) -> set[str | None]:
        return {n["config"].get("text_id") for n in lines}

    def shown(method: str, label: str = grid) -> str:
        return spread(best[tables.SMOLLM2, method, label].lines)

    lines = [n for n in tables.counting() if n["config"]["model"] == tables.SMOLLM2 and n["config"]["format"] == grid]

    def pair(ours: list[dict[str, Any]], theirs: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        shipped = tables.Found(SHIPPED, ours)
        a, b = tables.on_shared_texts(shipped, best[tables.SMOLLM2, theirs, grid])
        return a.lines, b.lines

    def elsewhere(shared: list[dict[str, Any]], theirs: str) -> str:
        """What the baseline gets on the training texts that only it has."""
        others = [n for n in best[tables.SMOLLM2, theirs, grid].lines if not texts([n]) & texts(shared)]
        return f" (another text: {spread(others)})" if others else ""

    ours, theirs = pair([n for n in lines if n["config"]["method"] == SHIPPED], "bitdistiller")
    theirs_shown = spread(theirs) + elsewhere(theirs, "bitdistiller")
    stored = ours[0]["config"]["bits"]
    theirs_mixed = ours_mixed = mixed = ""
    alike = texts(ours) == texts(theirs)
    if {(tables.SMOLLM2, m, grid) for m in (tables.MIXED, tables.THEIRS_MIXED)} <= best.keys():
        shipped = [n for n in lines if n["config"]["method"].startswith(f"{SHIPPED},mix=")]
        shipped, others = pair(shipped, tables.THEIRS_MIXED)
        theirs_mixed, ours_mixed = (f", with mixed formats {spread(n)}" for n in (others, shipped))
        theirs_mixed += elsewhere(others, tables.THEIRS_MIXED)
        if seeds(shipped, others) != seeds(ours, theirs):
            mixed = f"; mixed: {seeds(shipped, others)}"
        alike = alike and texts(shipped) == texts(others)
    recorded_text = "" if None in texts(ours) else " of one text"
    count = seeds(ours, theirs) + mixed + ("" if alike else "; the training texts of the two methods differ")
    return [
        f"{bits}-bit weights ({stored:.2f} bits stored), perplexity",
        f"{tables.SMOLLM2}, WikiText-2 [novels]",
        GPU,
        f"full {shown('dense', 'dense')}; no training (`shrink/ptq`, 16,384 calibration tokens) {shown(tables.TODAY)} "
        f"on its own text, {shown(tables.WEIGHED)} on WikiText-2; BitDistiller "
        f"{theirs_shown}{theirs_mixed}",
        f"{spread(ours)}{ours_mixed} (1M training tokens{recorded_text if alike else ''}, {count})",
        link("bitdistiller", "methods/bitdistiller.md"),
    ]


def kernel() -> list[str]:
    shape: dict[str, Any] = {"n": 14336, "k": 4096}
    one, many = (find("lowbit_gemm", "shoestring int4:g128", "time", rows=r, **shape) for r in (1, 16))
    peer = [find("lowbit_gemm", "humming int4, symmetric", "time", rows=r, **shape) for r in (1, 16)]
    return [
        "int4 matrix product, 1 and 16 rows",
        "14,336 x 4,096, groups of 128",
        GPU,
        f"bf16 cuBLAS of the same run 1x; humming (symmetric, run at {peer[0]['commit']}) {peer[0]['ratio']:.1f}x and "
        f"{peer[1]['ratio']:.1f}x",
        f"{one['ratio']:.1f}x ({one['commit']}) and {many['ratio']:.1f}x ({many['commit']})",
        link("kernels", "explain/kernels.md"),
    ]


def decode() -> list[str]:
    shape: dict[str, Any] = {"model": "Llama 8B shape", "batch": 1}
    bf16 = find("decode", "shoestring", "decode_tokens_per_s", blocks="bf16", **shape)
    int4 = find("decode", "shoestring", "decode_tokens_per_s", blocks="int4:g128", **shape)
    peer = find("decode", "transformers, static cache, compiled", "decode_tokens_per_s", **shape)
    return [
        "decoding one request",
        "Llama 8B shape, random weights",
        GPU,
        f"transformers, static cache, compiled: {peer['value']:,.0f} tokens/s (run at {peer['commit']})",
        f"bf16 {bf16['value']:,.0f} ({bf16['commit']}), int4 with an 8-bit head {int4['value']:,.0f} tokens/s "
        f"({int4['commit']})",
        link("decoding", "results/index.md#decoding-on-one-gpu"),
    ]


def controller_start() -> str:
    """What drafts gain over plain steps in one kernel; on another target."""
    lines = [n for n in newest(BENCH) if n["metric"] == "first" and n["case"] == KNOWN and "plain" in n["config"]]
    means = {n["config"]["temperature"]: f"{n['quality']['mean']:.2f}x" for n in lines}
    trained = drafter_tables.trained_on(lines[-1]["config"]["target"]).strip(", ")
    return f"{means[1.0]} and {means[0.7]} (another target, of {trained}; mean of ten first runs)"


def speculation() -> list[str]:
    target, easy = drafter_tables.sampled_target(), drafter_tables.newest_target()
    lines = [n for n in drafter_tables.sampled_lines() if n["config"]["target"] == target]
    drafter = lines[0]["config"]["drafter"]
    found = {text: drafter_tables.speeds(target, text)[drafter] for text in ("drawn", "drawn at 0.7")}
    sizes = sorted(found["drawn"])
    times = {text: " / ".join(f"{by_size[b]['ratio']:.2f}x" for b in sizes) for text, by_size in found.items()}
    greedy = drafter_tables.speeds(easy)
    trained = next(name for name in drafter_tables.TRAINED if name in greedy)
    fixed = drafter_tables.fixed_drafts(easy)
    on_easy = ", ".join(f"{greedy[trained][b]['ratio']:.1f}x with {b}" for b in (1, 16, 64) if b in greedy[trained])
    return [
        f"speculative decoding, {' / '.join(map(str, sizes))} requests, sampled text",
        target.replace(", 4096 tokens", ""),
        GPU,
        "same engine without a drafter, kernel by kernel (its default for this shape)",
        f"temperature 1: {times['drawn']}; 0.7: {times['drawn at 0.7']} (three turns). One request against plain steps "
        f"in one kernel: {controller_start()}. "
        f"Greedy text of an easier target (same shape{drafter_tables.trained_on(easy)}): {on_easy} requests; "
        f"always 4 drafts, one request, one turn: trained {fixed[trained]:.2f}x, n-gram lookup "
        f"{fixed[drafter_tables.LOOKUP]:.2f}x",
        link("drafter", "methods/drafter.md"),
    ]


def cpu() -> list[str]:
    machines = ("aarch64", "x86_64")

    def each(case: str, metric: str, form: str, **config: Any) -> str:
        found = (find_or_none("cpu_decode", case, metric, machine, **config) for machine in machines)
        return " / ".join("–" if line is None else f"{line['value']:{form}}" for line in found)

    def said(case: str, quality: str) -> str:
        speed = each(case, "tokens_per_s", ",.0f", threads=2, clock="wall")
        return f"{speed} tokens/s, perplexity {each(case, quality, '.1f')}"

    peers = (f"{case.removeprefix('llama.cpp ')}: {said(case, 'perplexity')}" for case in cpu_decode.LLAMA)
    tokens = find("cpu_decode", cpu_decode.SHRUNK, "perplexity_by_token")["config"]["tokens"]
    return [
        "4-bit decoding on a CPU",
        f"SmolLM2-135M-Instruct (a Q4_1 file), perplexity on {tokens:,} tokens of WikiText-2",
        f"2 CPU cores ({' / '.join(machines)})",
        "llama.cpp (aarch64: default build, through llama-cpp-python's class, which is slower than its own calls; "
        f"x86_64: AVX-512 VNNI without AMX), {'; '.join(peers)}",
        f"the Q4_1 file as it is: {said(cpu_decode.FILES['Q4_1'], 'perplexity_by_token')}; "
        f"`gptq+clip` on its own text: {said(cpu_decode.SHRUNK, 'perplexity_by_token')} (calibrated on "
        "16,384 tokens)",
        link("8-bit activations", "explain/int8_activations.md"),
    ]
