"""How long the pages are, and how many of their programs run; with --demo, how long the demo takes.

    python -m benchmarks.docs              count, print and record
    python -m benchmarks.docs --demo       the same, then `shoestring demo` (--quick: with quick=true)

Words are counted outside of tables that code writes, and not on pages that are generated as a whole. The rules for
sentences are here, too: tests/test_pages.py asks them of the README, start/, guides/ and methods/.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import markdown, newest, provenance, record

BENCH = "docs"
REPO = Path(__file__).resolve().parents[1]
DOCS = REPO / "docs"
README = REPO / "README.md"
GENERATED_PAGE = "<!-- Generated"
GENERATED = re.compile(r"<!-- (results:[\w.]+|support) -->.*?<!-- /(results|support) -->", re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LONGEST_SENTENCE, MOST_BRACKETS, MOST_NUMBERS = 28, 1, 3
# Pages for users, whose sentences have rules.
PLAIN = ("start", "guides", "methods")
# Programs of pages that the test suite runs as they stand, and the tests that do so.
RUN = {
    "start/python.md": "tests/test_python_page.py",
    "explain/formats.md": "tests/formats/test_docs.py",
    "reference/formats.md": "tests/formats/test_docs.py",
    "guides/crashes.md": "tests/state/levels/test_levels_cache.py",
    "methods/prune24.md": "tests/methods/sparse24/test_prune.py",
    "methods/sparse24.md": "tests/methods/sparse24/test_sparse24_recipes.py",
}


def pages() -> list[Path]:
    """The pages that people write."""
    found = [README, *sorted(DOCS.rglob("*.md"))]
    return [page for page in found if not page.read_text(encoding="utf-8").startswith(GENERATED_PAGE)]


def plain_pages() -> list[Path]:
    return [README, *(page for folder in PLAIN for page in sorted((DOCS / folder).glob("*.md")))]


def words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def by_hand(page: Path) -> str:
    return GENERATED.sub("", page.read_text(encoding="utf-8"))


def longest_cell() -> int:
    """Of the table of the README."""
    rows = (
        README.read_text(encoding="utf-8").partition("<!-- results:headlines -->")[2].partition("<!-- /results -->")[0]
    )
    return max(words(cell) for row in rows.splitlines() for cell in row.split("|"))


def sentences(page: Path) -> Iterator[str]:
    """Sentences of paragraphs and list items. Code, tables, headings, pictures and sources are left out, inline code is
    a word."""
    text = re.sub(r"<!--.*?-->", "", FENCED.sub("", by_hand(page)), flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if re.match(r"\s*(\||#|!\[| {4,}\S)", block) and not re.match(r"\s*([-*]|\d+\.) ", block):
            continue
        flat = re.sub(r"`[^`]*`", "code", " ".join(block.split()))
        flat = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", flat)
        flat = re.sub(r"^([-*]|\d+\.) |\*\*?", "", flat)
        yield from (part for part in re.split(r"(?<=[.!?:])\)?\s+", flat) if words(part) and "arXiv" not in part)


def faults(page: Path) -> list[str]:
    """What the rules for sentences find on a page."""
    found = []
    for sentence in sentences(page):
        count, brackets = words(sentence), len(re.findall(r"(?<!\w)\((?=\w)", sentence))
        numbers = len(re.findall(r"(?<![\w:-])\d[\d,.]*", sentence))
        if count > LONGEST_SENTENCE or brackets > MOST_BRACKETS or numbers > MOST_NUMBERS:
            found.append(f"{count} words, {brackets} brackets, {numbers} numbers: {sentence}")
    return found


def snippets_run() -> int:
    """Python programs of pages that tests execute."""
    return sum(len(re.findall(r"^```python$", (DOCS / page).read_text("utf-8"), re.MULTILINE)) for page in RUN)


def demo_seconds(quick: bool) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "shoestring", "demo", *(["quick=true"] if quick else [])], check=True)
    return time.perf_counter() - began


def table() -> str:
    lines = newest(BENCH)
    rows = [
        [
            n["metric"].replace("_", " ") + (", quick" if n["config"].get("quick") else ""),
            f"{n['value']:,.0f} {n['unit']}",
            n["note"],
        ]
        for n in lines
    ]
    return markdown(["what", "now", "note"], rows) + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="also run and time the demo")
    parser.add_argument("--quick", action="store_true", help="the demo with quick=true")
    parser.add_argument("--note", default="", help="what else the machine did")
    given = parser.parse_args()
    counts = {
        "readme_words": words(README.read_text(encoding="utf-8")),
        "hand_written_words": sum(words(by_hand(page)) for page in pages()),
        "longest_cell_words": longest_cell(),
        "snippets_run": snippets_run(),
    }
    for metric, value in counts.items():
        unit = "programs" if metric == "snippets_run" else "words"
        record(bench=BENCH, case="pages", metric=metric, unit=unit, samples=[value])
    if given.demo or given.quick:
        told: dict[str, Any] = {"config": {"quick": given.quick}, "note": given.note}
        record(bench=BENCH, case="demo", metric="demo_s", unit="s", samples=[demo_seconds(given.quick)], **told)
    for line in newest(BENCH):
        print(line["metric"], line["value"], line["unit"], line["config"] or "")


if __name__ == "__main__":
    main()
