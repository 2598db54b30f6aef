"""House rules that a machine can check: the tree of docs/design.md, words, quick imports, recipes that say how to run
them.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoestring.recipes.find import builtin_recipes

REPO = Path(__file__).resolve().parent.parent
SOURCES = sorted((REPO / "src").rglob("*.py"))
TESTS = sorted((REPO / "tests").rglob("*.py"))
DESIGN = (REPO / "docs" / "design.md").read_text(encoding="utf-8")

# Names of modules and public classes that the field's words have replaced (the glossary of docs/design.md).
RETIRED_MODULES = {
    *("asks", "answers", "loop", "alarm", "prepare", "whole_texts", "goodput", "stack", "self_skip"),
    *("read_graph", "chain_graph", "token_step", "cpu_step", "fused", "text", "draw", "draw_host", "step_ends"),
    *("overlap", "side_stream", "cslt", "cslt8", "byte_linear", "rotate_store", "row_attention", "places"),
    *("together", "visit", "resume", "sweep", "kept", "measure", "summary", "serving", "serving24"),
}
RETIRED_CLASSES = {
    *("Flight", "Awaited", "Goodput", "Ask", "EngineLoop", "Alarm", "ReadGraph", "ChainGraph", "TokenStep", "CpuStep"),
    *("SelfSkip", "Together", "WidePlan", "Plan", "Laid", "StepGraph", "Skipping", "Mailbox", "Answer"),
}


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def listed_files() -> set[str]:
    """The files that the tree in docs/design.md names: `folder/` opens a folder, every `name.ext` is a file in it."""
    tree = DESIGN.split("<!-- tree -->")[1].split("<!-- /tree -->")[0]
    folder, found = "", set()
    for line in tree.splitlines():
        opened = re.match(r"\s*([\w/]+)/(?:\s|$)", line)
        if opened:
            folder = opened[1]
        found |= {
            f"{folder}/{name}" for name in re.findall(r"[\w.-]+\.(?:pyi?|md|cu|cpp|h|json|html|js|css|typed)\b", line)
        }
    return found


def test_the_tree_in_the_design_is_the_tree_on_disk() -> None:
    root = REPO / "src" / "shoestring"
    on_disk = {
        f"src/shoestring/{path.relative_to(root)}"
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "__init__.py"
    }
    listed = listed_files()
    assert not on_disk - listed, "files that docs/design.md does not list"
    assert not listed - on_disk, "files that docs/design.md lists and that are not there"


def test_names_are_those_of_the_glossary_and_have_one_meaning() -> None:
    found: dict[str, list[Path]] = {}
    for path in SOURCES:
        assert path.stem not in RETIRED_MODULES | {"utils", "util", "common", "helpers", "misc"}, path
        text = path.read_text("utf-8")
        classes = re.findall(r"^ *class (\w+)", text, re.MULTILINE)
        bad = [c for c in classes if c.startswith("Base") or c.endswith(("Manager", "Factory", "Handler", "Mixin"))]
        assert not bad and not RETIRED_CLASSES & set(classes), path
        for name in re.findall(r"^class ([A-Za-z]\w*)", text, re.MULTILINE):
            found.setdefault(name, []).append(path)
    assert not {name: paths for name, paths in found.items() if len(paths) > 1 and name != "Config"}


def test_every_file_says_what_it_is_and_reads_nothing_pickled() -> None:
    """torch.load and pickle run what a stranger's file tells them to."""
    for path in SOURCES:
        text = path.read_text("utf-8")
        assert re.match(r'(#.*\n)*r?"""', text) or path.name in ("__init__.py", "__main__.py"), path
        assert not re.search(r"\b(torch\.load|pickle\.loads?)\(", text), path


def test_importing_shoestring_and_asking_for_help_pull_no_heavy_packages() -> None:
    loaded = "; print([m for m in {} if m in sys.modules])"
    heavy = ("torch", "numpy", "transformers")
    assert run_python("import sys, shoestring" + loaded.format((*heavy, "typer", "rich", "pydantic"))) == "[]"
    out = run_python("import sys; from shoestring.cli.app import run_cli; run_cli(['--help'])" + loaded.format(heavy))
    assert out.splitlines()[-1] == "[]"
    for verb in ("demo", "recipes", "run", "generate", "chat", "eval", "inspect", "export", "serve"):
        assert verb in out


@pytest.mark.parametrize("name", builtin_recipes())
def test_every_recipe_says_how_to_run_it_and_what_to_expect(name: str) -> None:
    tree = ast.parse(builtin_recipes()[name].read_text("utf-8"))
    doc = ast.get_docstring(tree) or ""
    starts = [line.split(":")[0].strip() for line in doc.splitlines() if ":" in line]
    for part in ("Run", "Needs", "Time", "Expect"):
        assert part in starts, f"recipe {name} has no line '{part}:'"
    defined = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    assert {"Config", "main"} <= defined
