"""Live weights under attack and under kills: the tables of the campaigns; and what checking new weights costs.

    python -m pytest -m lab tests/fuzz/test_fuzz_live.py tests/serve/http/test_follow_lab.py     run and record them
    python -m benchmarks.tables                                                writes the table into the page
    python -m benchmarks.live_weights check            the longest step while new weights are prepared; 20 s on a GPU
    python -m benchmarks.live_weights check --shape tiny --device cpu          a check of the script

The campaigns are tests; of them this module only lays out what they have recorded in results/live_weights.jsonl.
`check`: a model of 1B random parameters in bf16 decodes eight texts while another thread prepares new weights, with the
check for values that are not finite and without it, in turns.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any
from unittest import mock

import torch

from benchmarks.results import markdown, newest, provenance, record
from benchmarks.serve_saturation import SHAPES
from shoestring.device import pick_device, pick_dtype
from shoestring.model import Decoder
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.weight_update import WeightTarget

NOTHING = "No campaign has been recorded."


def table() -> str:
    """What was tried, and what came of it. Kills are recorded in parts, which are summed."""
    lines = [line for line in newest("live_weights") if line["metric"] != "longest_step"]
    found: dict[str, list[float]] = {}
    for line in lines:
        found.setdefault(line["metric"], []).append(line["value"])
    if not {"hostile_sessions", "kills"} <= found.keys():
        return NOTHING
    answers = sum(line["quality"]["answers"] for line in lines if line["metric"] == "kills")
    rows = [
        ["hostile sessions against publisher and follower", f"{sum(found['hostile_sessions']):,.0f}"],
        ["of these, weights taken over", f"{sum(found['taken_over']):.0f}"],
        ["longest time that an honest follower was kept out", f"{max(found['lockout_s']):.2f} s"],
        ["memory above the start", f"{1e3 * max(found['memory_gb']):.0f} MB"],
        ["kills of trainer, agent, HTTP and engine during updates", f"{sum(found['kills']):,.0f}"],
        ["answers that one whole version did not write", f"{sum(found['mixed_versions']):.0f} of {answers:,}"],
    ]
    return f"{markdown(['campaign', 'found'], rows)}{provenance(lines)}"


def measure_check(shape: str, device: torch.device, repeats: int) -> None:
    torch.manual_seed(0)
    dtype = pick_dtype("auto", device)
    with torch.device("meta"):
        model = Decoder(SHAPES[shape])
    model = model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.02) if p.ndim > 1 else torch.nn.init.ones_(p)
    engine, target = Engine(model, max_requests=8, max_context=1024), WeightTarget(model)
    values = target.empty()
    for name, p in model.named_parameters():
        values[name][""].copy_(p.detach())
    found: dict[str, list[tuple[float, float]]] = {"with the check": [], "without": []}
    quiet: list[float] = []
    for turn in range(repeats + 1):  # the first one warms up
        for case, seen in found.items():
            steps, seconds = _steps_during(engine, target, values, checked=case != "without")
            if turn:
                seen.append((max(steps), seconds))
        quiet += _steps(engine, 20) if turn else []
    print(f"longest of {len(quiet)} steps with nothing beside them {1e3 * max(quiet):.2f} ms", flush=True)
    for case, seen in found.items():
        slowest, prepared = [s for s, _ in seen], sorted(s for _, s in seen)
        line = record(
            bench="live_weights",
            case=case,
            metric="longest_step",
            unit="ms",
            samples=[1e3 * s for s in slowest],
            quality={"prepare_s": round(prepared[len(prepared) // 2], 4), "quiet_ms": round(1e3 * max(quiet), 3)},
            config={"shape": shape, "requests": 8},
        )
        print(
            f"{case:15} longest step {line['value']:.2f} ms, prepared in {line['quality']['prepare_s']} s", flush=True
        )


def _steps_during(engine: Engine, target: WeightTarget, values: Any, *, checked: bool) -> tuple[list[float], float]:
    """Seconds of each step while new weights are prepared, and of the preparation."""
    took: list[float] = []

    def prepare() -> None:
        began = time.perf_counter()
        target.prepare(values)
        took.append(time.perf_counter() - began)

    with mock.patch.object(WeightTarget, "_check_numbers", WeightTarget._check_numbers if checked else _no_check):
        thread = threading.Thread(target=prepare)
        _steps(engine, 4)
        thread.start()
        steps = _steps(engine, 1)
        while thread.is_alive():
            steps += _steps(engine, 1)
        thread.join()
    assert took, "the preparation failed"
    return steps, took[0]


def _no_check(self: WeightTarget, values: Any) -> None:
    return


def _steps(engine: Engine, num: int) -> list[float]:
    seconds = []
    for _ in range(num):
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 8:
            engine.add([7] * 16, Sampling(max_tokens=900, ignore_eos=True))
            engine.step()
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="table", choices=["table", "check"])
    parser.add_argument("--shape", choices=list(SHAPES), default="1b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.part == "check":
        measure_check(args.shape, pick_device(args.device), args.repeats)
    else:
        print(table())


if __name__ == "__main__":
    main()
