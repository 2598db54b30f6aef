"""Attention of several requests as one kernel or as three, inside whole steps (fused_decoder.PAIRS_IN_ONE).

python -m experiments.attention_pairs        about 30 s on an H200
"""

from __future__ import annotations

import statistics

import torch

from benchmarks.decode import LLAMA_1B, LLAMA_8B, SMOLLM2_135M, attempt, build
from benchmarks.decode_timeline import Step, captured, microseconds
from shoestring.serve.engine import fused_decoder

CASES = [
    ("1b", LLAMA_1B, [(1, 256), (2, 256), (2, 4096), (3, 4096)]),
    ("smollm2", SMOLLM2_135M, [(4, 256), (4, 4096), (8, 256), (8, 4096), (11, 256), (64, 256)]),
    ("8b", LLAMA_8B, [(2, 256), (2, 4096), (3, 256), (128, 256), (256, 256)]),
]


def main() -> None:
    for name, spec, sizes in CASES:
        model = build(spec)
        for requests, context in sizes:
            with attempt(f"{name}, {requests} x {context}"), torch.no_grad():
                took = []
                for least in (1 << 30, 1):
                    fused_decoder.PAIRS_IN_ONE = least
                    graph = captured(Step(model, context, requests).kernels)
                    took.append(statistics.median(microseconds(graph, 15)))
                print(
                    f"{name}, {requests} x {context}: three kernels {took[0]:,.1f} us, one {took[1]:,.1f}", flush=True
                )
        del model


if __name__ == "__main__":
    main()
