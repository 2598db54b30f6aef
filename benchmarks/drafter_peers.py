"""`transformers`' assisted generation with the target and the drafter that experiments/drafter.py kept.

    python -m benchmarks.drafter_peers --keep DIR --seconds 28

The same folders (ordinary Hugging Face ones), prompts and draft length as in benchmarks/drafter_speed.py, one request
at a time, greedy, in bf16 on a GPU: plain `generate`, and with `assistant_model`, in turns. A run generates as many
tokens as fit into --seconds, start-up included (13 seconds on an H200), estimated by a short first run; a turn that
would not fit is left out. The line states the number of turns and tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafter_speed import NUM_DRAFTS, SERVED, read_kept, serve_rows
from benchmarks.drafter_tables import BENCH, PEER
from benchmarks.results import record, significant, spread
from shoestring.device import pick_device, pick_dtype
from shoestring.errors import as_command

FIRST, FEWEST = 8, 24  # new tokens of the first run, and of a timed one at least
NUM_PROMPTS = 2
TURNS = 3  # at most
BEGAN = time.perf_counter()


def progress(what: str) -> None:
    print(f"   [{time.perf_counter() - BEGAN:5.1f} s] {what}", flush=True)


@torch.no_grad()
def write(model: Any, prompt: list[int], new: int, helper: Any = None) -> tuple[list[int], float]:
    """The new tokens, and the seconds they took."""
    ids = torch.tensor([prompt], device=model.device)
    options: dict[str, Any] = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    if helper is not None:
        options["assistant_model"] = helper
    if ids.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    found = model.generate(ids, max_new_tokens=new, **options)[0, len(prompt) :].tolist()
    seconds = time.perf_counter() - began
    assert len(found) == new, f"{len(found)} tokens instead of {new}"
    return found, seconds


def fit(seconds: float, a_token: float, most: int) -> tuple[int, int]:
    """New tokens of a run, and turns, where a turn takes `a_token` seconds for each: fewer turns before short ones."""
    for turns in range(TURNS, 1, -1):
        if (new := int(seconds / a_token / turns)) >= FEWEST:
            return min(most, new), turns
    return max(1, min(most, FEWEST, int(seconds / a_token))), 1


def measure(keep: Path, seconds: float) -> None:
    import transformers
    from transformers import AutoModelForCausalLM

    told, rows = read_kept(keep)
    row = serve_rows(rows, SERVED)[0]
    device = pick_device("auto")
    dtype = pick_dtype("auto", device)
    progress(f"transformers {transformers.__version__} is here")

    def read(folder: Path) -> Any:
        found: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        found.generation_config.eos_token_id = None  # ignore ends of text
        return found.to(device).eval()

    model, helper = read(keep / "target"), read(keep / "drafters" / row["drafter"])
    helper.generation_config.num_assistant_tokens = NUM_DRAFTS
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    helper.generation_config.assistant_confidence_threshold = 0.0
    progress("read")
    prompts = told["prompts"][:NUM_PROMPTS]
    ways = (None, helper)
    for way in ways:
        write(model, prompts[0], 2, way)
    taken = sum(write(model, prompts[0], FIRST, way)[1] for way in ways) / FIRST
    new, turns = fit(seconds - (time.perf_counter() - BEGAN), taken * len(prompts), told["new_tokens"])
    progress(f"{taken / 2 * 1e3:.1f} ms a token; {turns} turns of {new} tokens a run")
    rates: list[list[float]] = []
    same = total = 0
    took = 0.0
    while len(rates) < turns and (not rates or time.perf_counter() - BEGAN + took < seconds):
        began = time.perf_counter()
        found = [[write(model, p, new, way) for p in prompts] for way in ways]
        rates.append([len(prompts) * new / sum(s for _, s in each) for each in found])
        pairs = [(a, b) for one, two in zip(*found, strict=True) for a, b in zip(one[0], two[0], strict=True)]
        same, total = same + sum(a == b for a, b in pairs), total + len(pairs)
        took = time.perf_counter() - began
        progress(f"{rates[-1][0]:,.1f} tokens/s, assisted {rates[-1][1]:,.1f}")
    ratios = [b / a for a, b in rates]
    line = record(
        bench=BENCH,
        case="transformers, assisted generation",
        metric="tokens_per_s",
        unit="tokens/s",
        samples=[b for _, b in rates],
        baseline="transformers, eager",
        baseline_value=statistics.median([a for a, _ in rates]),
        ratio=statistics.median(ratios),
        quality={
            "ratio_p20_p80": [significant(v, 4) for v in spread(ratios)],
            "same_tokens": significant(same / total, 4),
        },
        config={
            "target": told["name"],
            "budget": PEER,
            "drafter": row["case"],
            "steps": row["config"].get("steps"),
            "drafts": NUM_DRAFTS,
            "text": "greedy",
            "transformers": transformers.__version__,
        },
        note=f"{len(prompts)} prompts one at a time, {new} new tokens, {len(rates)} turns",
    )
    print(
        f"transformers: {line['baseline_value']:.1f} tokens/s, assisted {line['value']:.1f}, {line['ratio']:.3f}x; "
        f"{same / total:.1%} of the tokens are the same",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="the folder of experiments/drafter.py")
    parser.add_argument("--seconds", type=float, default=28.0, help="for everything, the start included")
    args = parser.parse_args()
    measure(args.keep, args.seconds)


if __name__ == "__main__":
    as_command(main)
