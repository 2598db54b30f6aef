"""Hooks of the site's build (mkdocs.yml): pages of the repository that lie outside docs/, links, lists.

Pages are written for readers of the repository: a link is a path from the page to a file. In the site the pages of
PROJECT_PAGES appear below project/, and links between all of them are rewritten. A link to any other file of the
repository (a source, a folder of results) has no page to lead to: its text stays, the link goes.

Pages that have moved are found at their old addresses, too: MOVED has where they were.

Lists are written as forges read them (CommonMark): they may follow a paragraph at once, and what belongs to an item is
indented as far as its text. Python-Markdown wants a blank line and four spaces, and gets them here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

REPO = Path(__file__).resolve().parents[1]
PROJECT_PAGES = (
    *("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md"),
    "benchmarks/README.md",
    "results/README.md",
    *sorted(path.relative_to(REPO).as_posix() for path in (REPO / "experiments").glob("*.md")),
)
# Addresses of the site before pages were sorted by kind.
MOVED = {
    **{f"{name}.html": f"start/{name}.html" for name in ("tutorial", "install", "python")},
    **{f"{name}.html": f"explain/{name}.html" for name in ("training", "checkpoint_levels", "resharding", "formats")},
    **{f"{name}.html": f"explain/{name}.html" for name in ("int8_activations", "engine", "kernels")},
    **{f"{name}.html": f"reference/{name}.html" for name in ("support", "data", "tokenizer", "checkpoint", "models")},
    **{f"{name}.html": f"reference/{name}.html" for name in ("evals", "gguf", "security")},
    **{f"{name}.html": f"guides/{name}.html" for name in ("export", "add_architecture")},
    "server.html": "guides/serve.html",
    "server_features.html": "guides/tools.html",
    "server_load.html": "results/serving.html",
    "benchmarks.html": "results/index.html",
    "cli.html": "reference/commands.html",
    "one_kernel.html": "project/experiments/one_kernel.html",
    "reference/engine.html": "explain/engine.html",
    "reference/recipes.html": "reference/recipes/index.html",
}
FORWARD = """<!doctype html><meta charset="utf-8"><title>Moved</title><link rel="canonical" href="{to}">
<meta http-equiv="refresh" content="1; url={to}"><script>location.replace("{to}" + location.hash)</script>
<p>This page is <a href="{to}">here</a> now.
"""
README = "README.md"  # docs/index.md takes its place
# Fenced code, a link, inline code: what comes first in the text wins, so that links may contain code and code links.
LINK = re.compile(
    r"^(?:```|~~~).*?^(?:```|~~~)|(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<link>[^)\s]+)\)|`[^`\n]*`",
    re.MULTILINE | re.DOTALL,
)

ITEM = re.compile(r"(?:[-*]|[1-9]\.) (?=\S)")


def on_files(files: Files, config: Any) -> Files:
    for page in PROJECT_PAGES:
        text = (REPO / page).read_text(encoding="utf-8")
        files.append(File.generated(config, site_path(page), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return spread_lists(rewrite_links(markdown, page.file.src_uri))


def on_post_build(config: Any) -> None:
    site = Path(config["site_dir"])
    for old, new in MOVED.items():
        assert (site / new).is_file() and not (site / old).exists(), f"{old} -> {new}"
        (site / old).parent.mkdir(parents=True, exist_ok=True)
        to = os.path.relpath(new, PurePosixPath(old).parent)
        (site / old).write_text(FORWARD.format(to=to), encoding="utf-8")


def site_path(repo_path: str) -> str | None:
    """Where the site has a file of the repository; None where it has not."""
    if repo_path.startswith("docs/"):
        return repo_path.removeprefix("docs/")
    if repo_path == README:
        return "index.md"
    return f"project/{repo_path}" if repo_path in PROJECT_PAGES else None


def repo_path(site_path: str) -> str:
    project = site_path.removeprefix("project/")
    return project if project in PROJECT_PAGES and project != site_path else f"docs/{site_path}"


def rewrite_links(markdown: str, page: str) -> str:
    """The page's text with links that hold in the site; code is left alone."""
    folder = PurePosixPath(repo_path(page)).parent

    def rewritten(match: re.Match[str]) -> str:
        image, text, link = match["image"], match["text"], match["link"]
        path, hash_sign, anchor = (link or "").partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        target = site_path(os.path.normpath(folder / path))
        if target is None:
            return match[0] if image else text
        return f"{image}[{text}]({os.path.relpath(target, PurePosixPath(page).parent)}{hash_sign}{anchor})"

    return LINK.sub(rewritten, markdown)


def spread_lists(markdown: str) -> str:
    """The text with a blank line before every list, and four spaces before what continues an item."""
    lines: list[str] = []
    fenced, indent = False, 0  # indent: of the text of the item that the line may belong to; 0 outside of lists
    for line in markdown.splitlines():
        item = ITEM.match(line)
        if line.startswith(("```", "~~~")):
            fenced, indent = not fenced, 0
        elif fenced:
            pass
        elif item:
            if not indent and lines and lines[-1].strip():
                lines.append("")
            indent = len(item[0])
            line = line[: indent - 1].ljust(3) + " " + line[indent:]
        elif indent and line.startswith(" " * indent):
            line = " " * (4 - indent) + line
        elif line and indent and not lines[-1].strip():
            indent = 0  # a paragraph after the list
        lines.append(line)
    return "\n".join(lines) + "\n"
