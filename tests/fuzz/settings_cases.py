"""Hostile `key=value` settings of every built-in recipe: read alone, and given to a run of a tiny model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from file_cases import outcome_of
from outcomes import Outcome, outcome_of_process

from shoestring.cli.app import run_cli
from shoestring.config import Option, describe, with_settings
from shoestring.model import Tokenizer, save_model
from shoestring.recipes.find import builtin_recipes, load_recipe, resolve_config
from tiny import QWEN2, random_model

RECIPES = tuple(builtin_recipes())
NUMBERS = (
    *(
        "-1",
        "0",
        "1",
        "2",
        "0.5",
        "-0.0",
        "1e-300",
        "1e300",
        "1e400",
        "-1e400",
        "nan",
        "inf",
        "-inf",
        "9" * 30,
        "9" * 5000,
    ),
    *("1_000", "0x10", "1e18", "٣", "1,2", "1;2", "true", "none", "", " ", "x", "１２", "1e", "--1", "1\0", "\udcff"),
)
TEXTS = (
    *("", " ", "x", "none", "null", "../..", "/", "/dev/null", "/dev/zero", "~", "~nobody-there/x", "a\0b", "\udcff"),
    *(
        "n" * 300,
        "a/" * 3000,
        "{x}",
        "%s",
        "*",
        "**",
        "[",
        "?",
        "nowhere",
        "here/nothing",
        "-",
        "=",
        "a=b",
        "int4",
        "cuda:99",
    ),
    *(
        "int5",
        "int4:g0",
        "int4:g-1",
        "int4:g48",
        "nf3:g99999",
        "sparse24+",
        "+",
        "*=int4",
        "=int4",
        "*=",
        ";",
        "*=int4;",
        "tpu",
    ),
    # reducers and selectors
    *("auto", "int8", "int8:", "int8:4", "topk:", "topk:0", "topk:1e400", "topk:nan", "topk:0.01:2", "arc-topk:1e-300"),
    *("powersgd:1e9", "powersgd:2.5", "demo:-1", "lossy", "round-robin", "l-greco"),
)
KEYS = (
    "",
    "=",
    "model.",
    ".model",
    "MODEL",
    "стeps",
    "n" * 300,
    "--help",
    "-x",
    "resume",
    "run",
    "out",
    "mesh",
    "mesh.dp.x",
)


def overrides(rng: random.Random, options: list[Option]) -> list[str]:
    """One to four settings, most of them of keys that exist."""
    made = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        option = rng.choice(options)
        key = option.key if rng.random() < 0.9 else rng.choice(KEYS)
        pool = NUMBERS if option.type.startswith(("int", "float")) and rng.random() < 0.8 else TEXTS
        made.append(f"{key}={rng.choice(pool)}" if rng.random() < 0.97 else key)
    return made


def read_case(recipe: str, seed: int) -> tuple[Outcome, str, str]:
    """Settings read as the command line reads them."""
    module = load_recipe(recipe)
    given = overrides(random.Random(f"{recipe} {seed}"), describe(module.Config))
    outcome, told = outcome_of(lambda: resolve_config(module, given))
    return outcome, f"{recipe} {seed}: {given!r}"[:300], told


# Pieces of YAML beside settings: aliases, tags, several documents, what is no mapping, what does not end.
YAML_PIECES = (
    *(
        "a: &x [1]",
        "b: *x",
        "<<: *x",
        "*x : 1",
        "--- ",
        "...",
        "- 1",
        "? [1]\n: 2",
        "{",
        "[",
        "'",
        '"',
        "|",
        ">",
        "%YAML 9",
    ),
    *(
        "x: !!python/object/apply:os.getcwd []",
        "x: !!binary =",
        "x: !<",
        "\t",
        "\0",
        "\ufeff",
        "mesh:",
        "mesh: 1",
        "  dp: 2",
    ),
    *(
        "{a: " * 400,
        "[" * 3000,
        "x: " + "9" * 9000,
        "a: &a [*a]",
        "steps: [1, 2]",
        "steps: {x: 1}",
        "steps: '~'",
        "steps: ~",
    ),
)


def settings_file(rng: random.Random, options: list[Option]) -> str:
    """The text of a file: settings as on a command line, and pieces of YAML between them."""
    lines = [": ".join(item.split("=", 1)) for item in overrides(rng, options)]
    lines += [rng.choice(YAML_PIECES) for _ in range(rng.choice((0, 1, 1, 2)))]
    rng.shuffle(lines)
    return "\n".join(lines)


def file_case(recipe: str, seed: int, folder: Path) -> tuple[Outcome, str, str]:
    """Settings read as `--config FILE` reads them."""
    module = load_recipe(recipe)
    text = settings_file(random.Random(f"file {recipe} {seed}"), describe(module.Config))
    file = folder / "settings.yaml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    outcome, told = outcome_of(lambda: resolve_config(module, with_settings(file, ["run=new"])))
    return outcome, f"{recipe} {seed}: {text!r}"[:300], told


# -- runs ------------------------------------------------------------------------------------------

SMALL_TRAIN = [*("data=corpus.jsonl", "size=tiny", "steps=2", "batch=2", "context=16", "vocab_size=300", "device=cpu")]
SMALL_SHRINK = ["model=model", "device=cpu"]
CALIB = ["calib=calib.txt", "calib_windows=2", "calib_context=16", "text=test.txt", "max_tokens=64", "context=16"]
LOWBIT = [
    *("format=int2:g32", "data=corpus.jsonl", "calib_windows=2", "context=16", "batch=2", "micro=1", "steps=2"),
    *("text=test.txt", "eval_context=16", "eval_tokens=64"),
]
# Settings with which a recipe is done in seconds.
RUNS: dict[str, list[str]] = {
    "train/dense": SMALL_TRAIN,
    "shrink/rtn": [*SMALL_SHRINK, "format=int4:g32", "text=test.txt", "max_tokens=64", "context=16"],
    "shrink/ptq": [*SMALL_SHRINK, *CALIB, "format=int4:g32"],
    "shrink/bitdistiller": [*SMALL_SHRINK, *LOWBIT],
    "shrink/skip_set": [*SMALL_SHRINK, "calib=calib.txt", "context=16"],
}
PATH_KEYS = ("model", "text", "data", "calib", "run", "out", "dense_out", "resume", "spill", "prompts")
PLACES = (
    *("nowhere", "n" * 300, "a/" * 3000, "a\0b", "pipe", "folder", "calib.txt", "empty", "loop", "binary", "model"),
    *(
        "/dev/zero",
        "/dev/null",
        "/",
        "binary.txt",
        "pipe.txt",
        "pipe.jsonl",
        "half.jsonl",
        "empty.txt",
        "loop.txt",
        "\udcff",
    ),
)
SIZES = ("-1", "0", "1", "2", "0.5", "nan", "", "x", "none", "1e-9", "1e400", "7")


def make_home(folder: Path) -> Path:
    """A tiny model, texts, and things that are not what their names say."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 5))) for _ in range(60)]
    for name in ("calib.txt", "test.txt"):
        (folder / name).write_text(" ".join(draw.choices(words, k=300)))
    rows = [json.dumps({"text": " ".join(draw.choices(words, k=60))}) for _ in range(120)]
    (folder / "corpus.jsonl").write_text("\n".join(rows))
    (folder / "half.jsonl").write_text(rows[0] + '\n{"text": "\\ud800"}\n')
    tokenizer = Tokenizer.train([(folder / "calib.txt").read_text()], vocab_size=300)
    save_model(folder / "model", random_model(replace(QWEN2, vocab_size=tokenizer.vocab_size)), tokenizer)
    (folder / "folder").mkdir()
    (folder / "folder" / "mine").write_text("keep")
    for name in ("pipe", "pipe.txt", "pipe.jsonl"):
        os.mkfifo(folder / name)
    for name in ("empty", "empty.txt"):
        (folder / name).write_bytes(b"")
    for name in ("binary", "binary.txt"):
        (folder / name).write_bytes(bytes(range(256)) * 9)
    for name in ("loop", "loop.txt"):
        (folder / name).symlink_to(name)
    return folder


def run_settings(recipe: str, seed: int) -> list[str]:
    rng = random.Random(f"run {recipe} {seed}")
    options = [
        o for o in describe(load_recipe(recipe).Config) if o.key not in ("steps", "epochs", "recompute", "compile")
    ]
    base = {s.partition("=")[0]: s for s in (*RUNS[recipe], "run=new")}
    paths = [o.key for o in options if o.key in PATH_KEYS]
    if rng.random() < 0.5:
        key, value = rng.choice(paths), rng.choice(PLACES)
    else:
        option = rng.choice(options)
        key, value = option.key, rng.choice(SIZES if option.type.startswith(("int", "float")) else (*TEXTS, "true"))
    return [*(s for k, s in base.items() if k != key), f"{key}={value}"]


def run_case(recipe: str, home: Path, seed: int, chdir: Callable[[Path], None]) -> tuple[Outcome, str, str]:
    """A run in a copy of `home`; what lay there before must lie there unchanged."""
    here = home.with_name("here")
    shutil.rmtree(here, ignore_errors=True)
    copy_special(home, here)
    chdir(here)
    given, err = run_settings(recipe, seed), io.StringIO()
    code: list[int] = []

    def call() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code.append(run_cli(["run", recipe, *given]))

    outcome, told = outcome_of(call)
    case = f"run {recipe} {seed}: {given[-1]!r}"[:200]
    if outcome != "ok":
        return outcome, case, told
    outcome, told = outcome_of_process(code[0], err.getvalue()), err.getvalue()
    lost = _lost(home, here)
    return ("abort", case, f"lost or changed {lost}") if lost else (outcome, case, told)


def copy_special(source: Path, target: Path) -> None:
    """As copytree, for folders that hold pipes and links to themselves."""
    target.mkdir()
    for path in source.iterdir():
        place = target / path.name
        if path.is_symlink():
            place.symlink_to(path.readlink())
        elif path.is_fifo():
            os.mkfifo(place)
        elif path.is_dir():
            shutil.copytree(path, place)
        else:
            shutil.copy(path, place)


def _lost(home: Path, here: Path) -> list[str]:
    """Ordinary files of `home` that are gone or have other bytes in `here`."""
    files = [p for p in home.rglob("*") if not p.is_symlink() and p.is_file()]
    found = {p: here / p.relative_to(home) for p in files}
    return [str(p.relative_to(home)) for p, q in found.items() if not q.is_file() or p.read_bytes() != q.read_bytes()]
