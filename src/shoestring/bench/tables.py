"""Writes the tables of README.md and docs/ from results/*.jsonl, so that no number there is typed by hand.

    python -m shoestring.bench.tables            rewrite what lies between the markers
    python -m shoestring.bench.tables --check    exit with 1 when something would change

A table stands between `<!-- results:NAME -->` and `<!-- /results -->`. The bench script that records the
numbers also lays them out: NAME is its module, whose `table()` returns the markdown.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
MARKED = re.compile(r"(<!-- results:([\w.]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def table(name: str) -> str:
    """`NAME` is `table()` of bench/NAME.py, `NAME.OTHER` its `OTHER()`."""
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"shoestring.bench.{module}"), function or "table")()


def pages() -> list[Path]:
    return [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]


def rewrite(text: str) -> str:
    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{table(match[2])}\n{match[3]}"

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
    for path in pages():
        before = path.read_text()
        after = rewrite(before)
        if after != before:
            stale.append(str(path.relative_to(REPO)))
            if not check:
                path.write_text(after)
    if check and stale:
        sys.exit(f"stale tables in {', '.join(stale)}; run `python -m shoestring.bench.tables`")


if __name__ == "__main__":
    main()
