"""The site is built strictly (links, anchors, navigation), loads nothing from elsewhere, and its reference is true."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[1]
DOCS = REPO / "docs"
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}  # what a browser fetches by itself


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(folder)]
    # The variable silences a notice of the theme's authors.
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPO, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Fetches(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "prev", "next"):
            return
        if url := given.get(LOADED.get(tag, "")):
            self.found.append(url)


def test_the_site_needs_no_network(site: Path) -> None:
    moved = {site / old: site / new for old, new in script("site_hooks").MOVED.items()}
    for old, new in moved.items():
        led = re.findall(r'(?:href|url)="?([^"]+)"', old.read_text("utf-8"))
        assert len(led) == 3 and {(old.parent / to).resolve() for to in led} == {new} and new.is_file(), old
    pages = sorted({*site.rglob("*.html")} - moved.keys())
    assert len(pages) > 30
    for page in pages:
        parser = Fetches()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.found and not [url for url in parser.found if "//" in url], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_lists_and_code_of_the_pages_are_rendered(site: Path) -> None:
    """Forges and the site read Markdown a little differently; what the site missed stays in its text as marks."""
    for page in sorted(site.rglob("*.html")):
        article = page.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.DOTALL)
        found = re.search(r"^\s*(<p>)?(- |\d\. |\| |#+ |```)\S.*", text, flags=re.MULTILINE)
        assert not found, f"{page.relative_to(site)}: {found[0]}"
        # A numbered list right after one with bullets becomes part of it, without its numbers.
        source = DOCS / page.relative_to(site).with_suffix(".md")
        if source.is_file():
            code = r"^```.*?^```"
            numbered = re.findall(
                r"^1\. ", re.sub(code, "", source.read_text(encoding="utf-8"), flags=re.M | re.S), re.M
            )
            assert article.count("<ol>") >= len(numbered), page.relative_to(site)


def script(name: str) -> ModuleType:
    """A Python file of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "written", "built"),
    [
        ("limits.md", "[log](../experiments/LOG.md#x)", "[log](project/experiments/LOG.md#x)"),
        (
            "methods/ptq.md",
            "[c](../../CONTRIBUTING.md), [r](../../README.md)",
            "[c](../project/CONTRIBUTING.md), [r](../index.md)",
        ),
        ("project/experiments/LOG.md", "[d](../docs/design.md)", "[d](../../design.md)"),
        ("limits.md", "[`results/`](../results/) and [`a[0]`](../src/a.py)", "`results/` and `a[0]`"),
        (
            "limits.md",
            "`f[x](../src/y)` [t](#here) [w](https://a.b/c)",
            "`f[x](../src/y)` [t](#here) [w](https://a.b/c)",
        ),
    ],
)
def test_links_hold_in_the_site(page: str, written: str, built: str) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed")
    assert script("site_hooks").rewrite_links(written, page) == built


def test_lists_are_spread_and_code_is_not() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed")
    spread = script("site_hooks").spread_lists
    assert spread("Text:\n- a\n  more\n- b\n\nEnd\n  x\n") == "Text:\n\n-   a\n    more\n-   b\n\nEnd\n  x\n"
    assert spread("1. a\n\n       code\n2. b\n") == "1.  a\n\n        code\n2.  b\n"
    assert spread("```\nx\n- a\n```\n") == "```\nx\n- a\n```\n"


def test_the_reference_is_what_the_code_says() -> None:
    pages = script("generate_reference").pages()
    recipes = {f"recipes/{page.name}" for page in (DOCS / "reference" / "recipes").glob("*.md")}
    assert recipes == {name for name in pages if name.startswith("recipes/")}
    for name, text in pages.items():
        written = (DOCS / "reference" / name).read_text(encoding="utf-8")
        assert written == text, f"docs/reference/{name} is old: python docs/generate_reference.py"
        assert "what it does |\n" not in text.replace("| what it does |", ""), name


def test_every_variable_is_listed() -> None:
    used = {
        name
        for path in (REPO / "src").rglob("*.py")
        for name in re.findall(r"SHOESTRING_[A-Z0-9_]+", path.read_text(encoding="utf-8"))
    }
    listed = set(
        re.findall(r"SHOESTRING_[A-Z0-9_]+", (DOCS / "reference" / "variables.md").read_text(encoding="utf-8"))
    )
    assert used and used <= listed


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_what_pages_import_is_there(page: Path) -> None:
    for module, names in re.findall(
        r"^ *from (shoestring[\w.]*) import ([\w, ]+)", page.read_text(encoding="utf-8"), re.M
    ):
        found = importlib.import_module(module)
        for name in names.replace(" ", "").split(","):
            assert name in dir(found) or importlib.util.find_spec(f"{module}.{name}"), f"{module} has no {name}"


def test_the_reference_has_the_options_that_the_command_line_takes() -> None:
    import typer.main

    from shoestring.cli.app import app

    def options(command: Any) -> set[str]:
        below = set[str]().union(*map(options, getattr(command, "commands", {}).values()))
        return below | {name for param in command.params for name in param.opts if name.startswith("--")}

    listed = set(re.findall(r"^\| `(--[\w-]+)`", (DOCS / "reference" / "cli.md").read_text(encoding="utf-8"), re.M))
    assert listed == options(typer.main.get_command(app)) - {"--version"}
