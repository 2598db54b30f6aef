"""House rules that a machine can check: the tree of docs/design.md, words, quick imports, recipes that say how to run
them.
"""

from __future__ import annotations

import ast
import re
import resource
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


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def test_names_are_those_of_the_glossary_and_have_one_meaning(trees: dict[Path, ast.Module]) -> None:
    found: dict[str, list[Path]] = {}
    for path, tree in trees.items():
        assert path.stem not in RETIRED_MODULES | {"utils", "util", "common", "helpers", "misc"}, path
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        bad = [c for c in classes if c.startswith("Base") or c.endswith(("Manager", "Factory", "Handler", "Mixin"))]
        assert not bad and not RETIRED_CLASSES & set(classes), path
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "Config":
                found.setdefault(node.name, []).append(path)
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


def test_every_file_says_what_it_is_and_reads_nothing_pickled(trees: dict[Path, ast.Module]) -> None:
    """torch.load and pickle run what a stranger's file tells them to."""
    for path, tree in trees.items():
        assert ast.get_docstring(tree) or path.name in ("__init__.py", "__main__.py"), path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr[:4] == "load":
                name = ast.unparse(node.func)
                assert name not in ("torch.load", "pickle.load", "pickle.loads"), f"{path}:{node.lineno}"


def test_importing_shoestring_is_quick_and_pulls_no_torch() -> None:
    heavy = "[m for m in ('torch', 'numpy', 'transformers', 'typer', 'rich') if m in sys.modules]"
    assert run_python(f"import sys, shoestring; print({heavy})") == "[]"
    # Processor time: what others do on this machine must not decide.
    measured = "import time; t = time.process_time(); import shoestring; print(time.process_time() - t)"
    assert min(float(run_python(measured)) for _ in range(3)) < 0.2


def test_the_command_line_module_pulls_no_torch() -> None:
    assert run_python("import sys, shoestring.cli.app; print('torch' in sys.modules)") == "False"


def test_help_comes_at_once() -> None:
    command = [sys.executable, "-m", "shoestring", "--help"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0  # seconds of processor time
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
