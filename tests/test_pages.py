"""What the pages refer to exists: files, headings, and the scripts in their commands; so do the tests of make check."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import docs

REPO = Path(__file__).resolve().parents[1]
PAGES = [
    *(REPO / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "results/README.md")),
    *sorted((REPO / "experiments").glob("*.md")),
    *sorted((REPO / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|^    .*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"-m (benchmarks|experiments)\.([a-z0-9_]+)")


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_lead_somewhere_and_scripts_in_commands_exist() -> None:
    links = [(page, link) for page in PAGES for link in LINK.findall(CODE.sub("", page.read_text()))]
    for page, link in links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, which does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in headings(target), f"{page.name} links to {link}, which has no such heading"
    for page in PAGES:
        for folder, name in COMMAND.findall(page.read_text()):
            assert (REPO / folder / f"{name}.py").is_file(), f"{page.name}: python -m {folder}.{name}"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_tests_of_make_check_exist() -> None:
    dry = subprocess.run(["make", "-n", "check"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    paths = re.findall(r"tests/[\w/.]+", next(line for line in dry.splitlines() if "-m pytest" in line))
    assert len(paths) > 20 and not [p for p in paths if not (REPO / p).exists()]


@pytest.mark.parametrize("folder", ["benchmarks", "experiments"])
def test_the_readme_of_a_folder_lists_its_scripts(folder: str) -> None:
    listed = set(re.findall(r"^\| `(\w+)`", (REPO / folder / "README.md").read_text(), flags=re.MULTILINE))
    assert listed == {p.stem for p in (REPO / folder).glob("*.py")} - {"__init__"}


def test_the_readme_is_one_screen() -> None:
    text = docs.README.read_text()
    headlines = text.partition("<!-- results:headlines -->")[2].partition("<!-- /results -->")[0].strip().splitlines()
    assert 2 < len(headlines) <= 2 + 8  # two lines of header
    assert docs.words(text) <= 650 and docs.longest_cell() <= 8 and text.count("](docs/figures/") == 1
    assert "make demo" in text and "make test" in text


@pytest.mark.parametrize("page", sorted((REPO / "docs/methods").glob("*.md")), ids=lambda p: p.stem)
def test_method_pages_are_short_and_say_when_not_to_use_the_method(page: Path) -> None:
    """What does not fit belongs on the method's lab page in experiments/."""
    text = docs.by_hand(page)
    assert docs.words(text) <= 700
    assert page.read_text().count("<!-- results:") <= 2, "the short table; the others stand in docs/results/"
    assert "## When not to use it" in text and "shoestring " in text


@pytest.mark.parametrize("page", docs.plain_pages(), ids=lambda p: str(p.relative_to(REPO)))
def test_sentences_for_users_are_short(page: Path) -> None:
    assert not docs.faults(page)


def test_pages_are_short() -> None:
    assert sum(docs.words(docs.by_hand(page)) for page in docs.pages()) <= 34_500


def test_pages_for_users_name_no_commits() -> None:
    """Tables do, below; a sentence about a commit belongs on a lab page."""
    for page in docs.pages():
        assert not re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,8}\b", docs.by_hand(page)), page
