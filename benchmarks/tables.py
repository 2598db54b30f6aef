"""Writes the tables of README.md, docs/ and experiments/ from results/*.jsonl, so that no number is typed by hand.

    python -m benchmarks.tables            rewrite the text between the markers
    python -m benchmarks.tables --check    exit with 1 when something would change

A table is between `<!-- results:NAME -->` and `<!-- /results -->`. NAME is the script that records the numbers; its
`table()` returns the markdown.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- results:([\w.]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


@cache  # a table of a method's page is one of results/, too
def table(name: str) -> str:
    """`NAME` is `table()` of the script NAME.py, `NAME.OTHER` its `OTHER()`."""
    module, _, function = name.partition(".")
    package = next(p for p in ("benchmarks", "experiments") if (REPO / p / f"{module}.py").is_file())
    return getattr(importlib.import_module(f"{package}.{module}"), function or "table")()


def pages() -> list[Path]:
    return [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md")), *sorted((REPO / "experiments").glob("*.md"))]


def rewrite(text: str) -> str:
    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{table(match[2])}\n{match[3]}"

    return MARKED.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a table is stale")
    check = parser.parse_args().check
    stale = []
    for path in pages():
        before = path.read_text()
        after = rewrite(before)
        if after != before:
            stale.append(str(path.relative_to(REPO)))
            if not check:
                path.write_text(after)
    if check and stale:
        sys.exit(f"stale tables in {', '.join(stale)}; run `python -m benchmarks.tables`")


if __name__ == "__main__":
    main()
