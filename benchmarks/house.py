"""The house in numbers: how large its rooms, files and classes are, how far things walk, how long the tests take.

    python -m benchmarks.house                              count the tree and record it
    python -m benchmarks.house --tests pytest.log           also the seconds of a whole `make test`, from its output
    python -m benchmarks.house --before TREE                headline benches of that tree and of this one, in one run

Lines are those of Python, CUDA, C++ and the web page, with comments and blank lines. A walk is a numbered list under
"The five walks" in docs/design.md; a station is one item of it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import markdown, newest, provenance, record, recorded

REPO = Path(__file__).resolve().parents[1]
CORE = REPO / "src" / "shoestring"
METHODS = CORE / "methods"
KINDS = {".py", ".pyi", ".cu", ".cpp", ".h", ".js", ".css", ".html"}
HEADING = "## The five walks"
HEADLINE = "headline"
NOTHING = "Nothing is recorded."
# Headline benches, with what is asked of them: about 12 minutes for both trees on an H200, 10 on a CPU.
ON_GPU: dict[str, list[str]] = {
    "decode": ["--cases", "8b", "8b-int4", "8b-batch64", "--peers", "none"],
    "cold_start": ["--rows", "int4", "--no-serial"],
    "train_dense": ["--cases", "GPT-2 124M"],
    "serve_saturation": ["--no-peer"],
}
ON_CPU: dict[str, list[str]] = {"cpu_decode": ["speed"]}
PEERS = re.compile("transformers|llama.cpp|bare torch.compile")
UNITS = {"tokens/s": 1, "seconds": -1}  # more is better, or less


def lines_of(folder: Path, without: Path | None = None) -> int:
    files = (path for path in folder.rglob("*") if path.suffix in KINDS and path.is_file())
    return sum(count(path) for path in files if without is None or not path.is_relative_to(without))


def count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def largest_file() -> tuple[int, str]:
    return max((count(path), path.relative_to(REPO).as_posix()) for path in CORE.rglob("*.py"))


def largest_class() -> tuple[int, str]:
    """By its methods; properties count."""
    return max(
        (sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body), node.name)
        for path in CORE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )


def walks() -> dict[str, int]:
    """Of each walk on the design page, its stations."""
    page = (REPO / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\*\*(.+?)\*\*.*?\n((?:(?!^\*\*).*\n?)*)", section, re.MULTILINE)
    return {name: len(re.findall(r"^\d+\. ", text, re.MULTILINE)) for name, text in named}


def seconds_of_tests(log: Path) -> float:
    """From the last line of pytest: `6624 passed, 491 skipped in 952.39s (0:15:52)`."""
    found = re.findall(r"\d+ passed.* in ([\d.]+)s", log.read_text(encoding="utf-8"))
    if not found:
        raise SystemExit(f"{log} is no output of a whole pytest run: it has no line '... passed ... in ...s'")
    return float(found[-1])


def measure(log: Path | None) -> None:
    def line(metric: str, unit: str, value: float, case: str = "shoestring") -> None:
        record(bench="house", case=case, metric=metric, unit=unit, samples=[value])

    line("core_lines", "lines", lines_of(CORE, without=METHODS))
    line("methods_lines", "lines", lines_of(METHODS))
    line("test_lines", "lines", lines_of(REPO / "tests") + lines_of(REPO / "extras" / "tests"))
    for metric, unit, (size, name) in (
        ("largest_file", "lines", largest_file()),
        ("largest_class", "methods", largest_class()),
    ):
        record(bench="house", case="shoestring", metric=metric, unit=unit, samples=[size], note=name)
    for walk, stations in walks().items():
        line("walk_stations", "stations", stations, case=walk)
    if log is not None:
        line("test_seconds", "s", seconds_of_tests(log))


def measure_headlines(before: Path, benches: Mapping[str, Sequence[str]]) -> None:
    """Each bench in the other tree and then here, with the same interpreter; lines that both have are compared."""
    for bench, options in benches.items():
        old, new = (run_bench(tree, bench, options) for tree in (before, REPO))
        for line, other in pairs(old, new):
            ratio = (line["value"] / other["value"]) ** UNITS[line["unit"]]
            record(
                **{"bench": "house", "case": f"{bench}: {line['case']}", "metric": HEADLINE, "unit": line["unit"]},
                samples=[line["value"]],
                baseline=f"{other['commit']}, before",
                baseline_value=other["value"],
                ratio=ratio,
                quality=line["quality"],
                config={"bench": bench, "of": line["metric"], **line["config"]},
                note="both trees in one run on one machine",
            )
            print(
                f"{bench}: {line['case']}, {line['metric']}: {other['value']:g} -> {line['value']:g}, {ratio:.3f}",
                flush=True,
            )


def run_bench(tree: Path, bench: str, options: Sequence[str]) -> list[dict[str, Any]]:
    """The lines that a bench of a tree records, kept out of that tree."""
    with tempfile.TemporaryDirectory() as place:
        paths = os.pathsep.join([str(tree / "src"), str(tree)])
        env = {**os.environ, "PYTHONPATH": paths, "SHOESTRING_RESULTS": place}
        subprocess.run([sys.executable, "-m", f"benchmarks.{bench}", *options], cwd=tree, env=env, check=True)
        return recorded(bench, Path(place))


def pairs(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Lines of our own speed that both trees have, this tree's first."""

    def key(line: dict[str, Any]) -> str:
        return json.dumps([line["case"], line["metric"], line["config"]], sort_keys=True)

    found = {key(line): line for line in old if line["unit"] in UNITS and not PEERS.search(line["case"])}
    return [(line, found[key(line)]) for line in new if key(line) in found]


def table() -> str:
    """Sizes as they are now."""
    lines = [line for line in newest("house") if line["metric"] != HEADLINE]
    rows = [
        [line["metric"].replace("_", " "), line["case"], f"{line['value']:,.0f} {line['unit']}", line["note"]]
        for line in lines
    ]
    return f"{markdown(['what', 'of', 'now', 'where'], rows)}{provenance(lines)}" if rows else NOTHING


def headlines() -> str:
    """Headline benches of two trees in one run: that a rewrite cost nothing. Lines are taken from the benches'."""
    lines = [line for line in newest("house") if line["metric"] == HEADLINE]
    rows = [
        [line["case"], _setting(line["config"]), f"{line['value']:,} {line['unit']}", f"{line['baseline_value']:,}",
         f"{line['ratio']:.3f}"]
        for line in lines
    ]  # fmt: skip
    header = ["bench", "of", "after", "before", "times as good"]
    return f"{markdown(header, rows)}{provenance(lines)}" if rows else NOTHING


def _setting(config: dict[str, Any]) -> str:
    return ", ".join(str(config[key]) for key in ("model", "blocks", "batch") if key in config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, help="the output of a whole run of make test")
    parser.add_argument("--before", type=Path, help="another tree, whose headline benches are run, too")
    parser.add_argument("--benches", nargs="*", choices=[*ON_GPU, *ON_CPU], help="with --before: by default the GPU's")
    args = parser.parse_args()
    if args.before is not None:
        benches = {**ON_GPU, **ON_CPU}
        measure_headlines(args.before.resolve(), {name: benches[name] for name in args.benches or ON_GPU})
        print(headlines())
        return
    measure(args.tests)
    print(table())


if __name__ == "__main__":
    main()
