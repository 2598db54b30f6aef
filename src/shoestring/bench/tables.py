"""Writes the tables of README.md and docs/ from results/*.jsonl, so that no number there is typed by hand.

    python -m shoestring.bench.tables            rewrite what lies between the markers
    python -m shoestring.bench.tables --check    exit with 1 when something would change

A table stands between `<!-- results:NAME -->` and `<!-- /results -->`; NAME is a key of TABLES.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoestring.bench.results import newest

REPO = Path(__file__).resolve().parents[3]
PAGES = ("README.md", "docs/training.md", "docs/evals.md", "docs/formats.md", "docs/methods/ptq.md")
MARKED = re.compile(r"(<!-- results:(\w+) -->\n).*?(<!-- /results -->)", re.DOTALL)

Line = dict[str, Any]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def provenance(lines: list[Line]) -> str:
    """Where the numbers come from, in one line under the table."""
    devices = sorted({f"{n['device']}, torch {n['versions'].get('torch', '?')}" for n in lines})
    commits = sorted({n["commit"] for n in lines})
    return f"\n\n{'; '.join(devices)}; commit {', '.join(commits)}; {max(n['date'] for n in lines)}."


def train_dense() -> str:
    lines = newest("train_dense")
    speed = {
        n["config"]["model"]: n for n in lines if n["metric"] == "tokens_per_s" and n["case"] == "shoestring"
    }
    memory = {(n["config"]["model"], n["case"]): n for n in lines if n["metric"] == "peak_memory"}
    rows = []
    for model, line in speed.items():
        ours, bare = memory[model, "shoestring"], memory[model, line["baseline"]]
        rows.append(
            [
                f"{model}, {line['config']['batch']}x{line['config']['context']}",
                f"{line['value']:,.0f}",
                f"{line['baseline_value']:,.0f}",
                f"{line['ratio']:.3f}",
                f"{ours['value']:.1f}",
                f"{ours['baseline_value']:.1f}",
                f"{bare['value']:.1f}",
            ]
        )
    header = ["model", "ours, tokens/s", "bare loop", "ratio", "peak GiB", "plain loss", "bare loop"]
    return markdown(header, rows) + provenance(lines)


def smollm2() -> str:
    lines = newest("smollm2")
    tasks = sorted({name for n in lines for name in n["quality"] if name.startswith("accuracy_")})
    rows = [
        [
            n["case"],
            f"{n['config']['bits']:.2f}",
            f"{n['value']:.2f}",
            *[f"{100 * n['quality'][t]:.1f}" if t in n["quality"] else "" for t in tasks],
        ]
        for n in lines
    ]
    header = ["SmolLM2-135M-Instruct", "bits/weight", "perplexity"]
    header += [t.removeprefix("accuracy_") + ", %" for t in tasks]
    return markdown(header, rows) + provenance(lines)


def ptq() -> str:
    """One row a grid, one column a method; what was not measured is empty."""
    lines = newest("ptq")
    methods = [
        m
        for m in ("rtn", "clip", "awq", "gptq", "gptq+clip")
        if any(n["config"]["method"] == m for n in lines)
    ]
    found = {(n["config"]["format"], n["config"]["method"]): n for n in lines}
    rows = []
    for label in sorted({f for f, _ in found if f != "dense"}, key=_grid_order):
        cells = {m: found.get((label, m)) for m in methods}
        bits = next(n["config"]["bits"] for n in cells.values() if n is not None)
        rows.append([label, f"{bits:.2f}", *(f"{n['value']:.1f}" if n else "" for n in cells.values())])
    dense = found["dense", "dense"]
    config = next(n["config"] for n in lines if n["case"] != "dense")
    said = (
        f"\n\nPerplexity of {config['model']} on the first {config['tokens']:,} tokens of the WikiText-2 test text "
        f"(tokenised edition), context {config['context']}; unquantized {dense['value']:.2f}. Calibrated on "
        f"{config['calibration_tokens']:,} tokens of the validation text."
    )
    return markdown(["format", "bits/weight", *methods], rows) + said + provenance(lines)


def _grid_order(label: str) -> tuple[int, int, str]:
    """int4:g64 before nf4:s1:g64 before int4:g192 before int3:g64."""
    kind, *options = label.split(":")
    return -int(kind[-1]), int(options[-1][1:]), label


TABLES: dict[str, Callable[[], str]] = {"train_dense": train_dense, "smollm2": smollm2, "ptq": ptq}


def rewrite(text: str) -> str:
    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{TABLES[match[2]]()}\n{match[3]}"

    return MARKED.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 when a table is stale"
    )
    check = parser.parse_args().check
    stale = []
    for page in PAGES:
        path = REPO / page
        if not path.exists():
            continue
        before = path.read_text()
        after = rewrite(before)
        if after != before:
            stale.append(page)
            if not check:
                path.write_text(after)
    if check and stale:
        sys.exit(f"stale tables in {', '.join(stale)}; run `python -m shoestring.bench.tables`")


if __name__ == "__main__":
    main()
