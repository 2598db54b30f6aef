"""2:4 beside int4 where weights are served: what each stores, loses and gains, from the lines of three benches.

Quality is SmolLM2-135M's on the whole test text (experiments/prune24, experiments/lowbit_quality), speed a decoding
step of an 8B shape with random weights (benchmarks/decode_sparse24): no one model has both.
"""

from __future__ import annotations

from typing import Any

from benchmarks.results import markdown, newest, provenance
from experiments.lowbit_tables import SMOLLM2, TODAY, WEIGHED, best_settings
from experiments.prune24 import grouped


def table() -> str:
    lines = max(grouped(), key=lambda own: own[-1]["config"]["tokens"])
    pruned = {n["case"]: n for n in lines}
    best = best_settings()
    timed = [n for n in newest("decode_sparse24") if n["metric"] == "decode_tokens_per_s"]
    speed = {(n["case"], n["config"]["batch"]): n for n in timed}

    def times(case: str) -> list[str]:
        return [f"{speed[case, batch]['ratio']:.2f}x" for batch in (1, 16)] if case else ["not measured"] * 2

    def pruned_row(name: str, case: str, kernel: str) -> list[str]:
        n = pruned[case]
        tokens = f"{n['config']['train_tokens'] / 1e6:.0f}M" if "train_tokens" in n["config"] else "none"
        return [name, f"{n['config']['bits']:.3g}", f"{n['value']:.1f}", tokens, *times(kernel)]

    def lowbit_row(name: str, method: str) -> list[str]:
        found = best[SMOLLM2, method, "int4:g64"]
        trained = found.lines[0]["config"]["training_tokens"]
        bits = f"{found.lines[0]['config']['bits']:.3g}"
        return [name, bits, f"{found.mean:.1f}", f"{trained / 1e6:.0f}M" if trained else "none", *times("int4:g128")]

    rows = [
        pruned_row("full precision", "dense", "bf16"),
        pruned_row("2:4, SparseGPT", "sparsegpt", "2:4"),
        pruned_row("2:4, AST", "ast", "2:4"),
        pruned_row("2:4, AST + SLoRB", "ast+slorb", ""),
        lowbit_row("int4, `shrink/ptq` (16,384 tokens of its own text)", TODAY),
        lowbit_row("int4, the same (16,384 tokens of WikiText-2)", WEIGHED),
        lowbit_row("int4, lowbit_best", "ours"),
    ]
    header = ["weights", "bits/weight", "perplexity", "training tokens", "decoding, 1 request", "16 requests"]
    packed = [n for method in (TODAY, WEIGHED, "ours") for n in best[SMOLLM2, method, "int4:g64"].lines]
    shown: list[dict[str, Any]] = [*lines, *packed, *timed]
    return markdown(header, rows) + provenance(shown)
