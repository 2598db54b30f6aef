"""A race to a loss: recipes of ours, and nanochat's own trainer, on the same rows of the same text.

    python -m benchmarks.race --out F                               the cases below, a minute of an H200 each
    python -m benchmarks.race --out F --runs "muon bf16@lr=2e-3" "adamw bf16@lr=1e-3,seed=1" --steps 100
    python -m benchmarks.race --out F --peers PEERS --runs nanochat     PEERS/nanochat: its repository
    python -m benchmarks.race --out F --toy                         all of it on a CPU, in miniature

A run is a recipe with its own settings: model, rules, hooks, optimizer and schedule are those that
`shoestring run RECIPE ...` makes. Its loop is called here, so that it is timed: it compiles, takes three steps, begins
again from its first weights and waits for its turn. Runs of one graph share a process. All processes compile before the
first turn, so that nothing else runs on the machine then. Seconds are those of training: without compilation and
without validation, which is the same 4 batches for all, every 25 steps.
nanochat runs from its own scripts/base_train.py: its model, optimizer and schedule; its text reader and its validation
are replaced by ours, and so are modules that a bare machine lacks (wandb, rustbpe) and a run does not use. Its first
ten steps, in which it compiles, count as much as its median step, in seconds.

Every run is a line of F/races.jsonl with its curve. At the end each case's best run of each seed and number of steps is
recorded, against the final loss of the best `adamw bf16` of as many steps.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import markdown, newest, provenance, record
from shoestring.config import apply_overrides
from shoestring.errors import UserError, as_command
from shoestring.mesh import Mesh, open_mesh
from shoestring.methods.sparse24.training import end_dense_phase, sparse_layers, start_dense_phase
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.recipes.find import load_recipe, resolve_config
from shoestring.recipes.train import dense
from shoestring.runlog import append_jsonl, read_jsonl
from shoestring.train import muon
from shoestring.train.data import TokenData
from shoestring.train.gradients import clip_gradients
from shoestring.train.muon import ROUNDS, orthogonalize, orthogonalize_all
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import constant
from shoestring.train.pretraining import validation_data
from shoestring.train.reducers.build import OPTIMIZERS
from shoestring.train.shards import Corpus, CorpusConfig, load_corpus
from shoestring.train.step import Micro, Objective, PlainForwardBackward, Run
from shoestring.train.trainer import train

BASELINE, RECIPE = "adamw bf16", "muon bf16"
HEADS_OF_64 = ["num_heads=12", "num_kv_heads=12"]
OLD = ["train/dense", "size=base", *HEADS_OF_64, "optimizer=adamw", "schedule=cosine", "warmup=50", "lr=1e-3"]
NEW = ["train/speedrun", *HEADS_OF_64]
SPARSE = ["size=base", *HEADS_OF_64, "qk_norm=true", "tied=false", "init=zero", "optimizer=muon", "lr=3e-3",
          "weight_decay=0", "schedule=wsd", "cooldown=0.6", "warmup=0"]  # fmt: skip
CASES: dict[str, list[str]] = {
    BASELINE: OLD,
    RECIPE: NEW,
    "half width": [*NEW, "d_ff=1024"],
    "muon fp8": [*NEW, "precision=fp8"],
    "adamw fp8": [*OLD, "precision=fp8"],
    "fst": ["train/sparse24_fst", *SPARSE],
    "s-ste fp8": ["train/sparse24_sste", *SPARSE, "precision=fp8"],
    "nanochat": [],
    "heads of 128": [*NEW, "num_heads=6", "num_kv_heads=6"],
    # The recipe without one of its parts.
    "no muon": [*NEW, "optimizer=adamw", "warmup=50", "lr=1e-3"],
    "no qk-norm": [*NEW, "qk_norm=false"],
    "gpt2's weights": [*NEW, "init=gpt2"],
    "tied head": [*NEW, "tied=true"],
    "cosine": [*NEW, "schedule=cosine"],
    "qkv as one": NEW,
}
GRAPHS = dict.fromkeys(["no muon", "gpt2's weights", "cosine", "qkv as one"], RECIPE)
USUAL = [BASELINE, RECIPE, "nanochat", "half width", "muon fp8", "fst"]
BATCH, CONTEXT, VOCAB, EVERY, WARM = 64, 1024, 8192, 25, 3
MEGABYTES = 160  # of text, about 50M tokens
COMPILING = 150.0  # seconds that the first turn waits for processes that compile
TOY = ["size=tiny", "d_model=64", "num_layers=2", "num_heads=2", "num_kv_heads=2", "compile=off"]
TOY_BATCH, TOY_CONTEXT, TOY_VOCAB = 4, 64, 512


def corpus_settings(toy: bool, tokenizer: str) -> list[str]:
    vocabulary = f"tokenizer={tokenizer}" if tokenizer != "None" else f"vocab_size={TOY_VOCAB if toy else VOCAB}"
    return [vocabulary, "data=python", f"max_mb={2 if toy else MEGABYTES}"]


def settings_of(run: dict[str, Any]) -> list[str]:
    """The recipe and its settings; later ones win."""
    toy, case = run["toy"], CASES[run["case"]]
    rows = [f"batch={TOY_BATCH if toy else BATCH}", f"context={TOY_CONTEXT if toy else CONTEXT}"]
    own = [
        *rows,
        *corpus_settings(toy, run["tokenizer"]),
        f"steps={run['steps']}",
        "compile=whole",
        "save_every=0",
        *case[1:],
    ]
    own += [*(TOY if toy else []), *run["settings"], f"run={run['out']}/runs/{run['number']}"]
    return [case[0], *(f"{key}={value}" for key, value in dict(s.split("=", 1) for s in own).items())]


# -- one run ---------------------------------------------------------------------------------------------------


class Watch:
    """For `train(evaluate=...)`: the curve, and seconds without those of the evaluations."""

    def __init__(self, evaluate: Callable[[Run], dict[str, float]], tokens: int) -> None:
        self.evaluate, self.tokens, self.curve = evaluate, tokens, []  # type: ignore[var-annotated]
        self.seconds, self.began = 0.0, now()

    def __call__(self, run: Run) -> dict[str, float]:
        self.seconds += now() - self.began
        found = self.evaluate(run)
        self.curve.append([run.step * self.tokens, round(self.seconds, 3), round(found["val_loss"], 5)])
        self.began = now()
        return found


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def turn(run: dict[str, Any], step_seconds: float) -> Iterator[None]:
    """The machine for this run alone; LeftOut where its time would not be enough."""
    mark(run, "ready")
    while not marked(run, "turn"):
        time.sleep(0.02)
    left, needed = run["until"] - time.time(), run["steps"] * step_seconds * 1.1
    if needed > left:
        raise LeftOut(f"{run['name']} needs {needed:.0f} s and {left:.0f} s are left; it is left out")
    yield
    mark(run, "done")


class LeftOut(Exception):
    """There is no time for a run."""


def mark(run: dict[str, Any], what: str) -> None:
    Path(run["out"], "turns", f"{run['number']}.{what}").touch()


def marked(run: dict[str, Any], what: str) -> bool:
    return Path(run["out"], "turns", f"{run['number']}.{what}").exists()


def race_ours(run: dict[str, Any]) -> dict[str, Any]:
    recipe_name, *settings = settings_of(run)
    recipe = load_recipe(recipe_name)
    finished: dict[str, Any] = {}

    def timed(raced: Run, data: TokenData, objective: Objective, **options: Any) -> Run:
        step_seconds = warm_up(raced, data, objective, options)
        watch_from = options.pop("evaluate")
        options |= {"checkpointer": None, "log_every": 50, "eval_every": run["every"]}
        with turn(run, step_seconds):
            watch = Watch(watch_from, data.tokens_per_step)
            train(raced, data, objective, evaluate=watch, **options)
        assert isinstance(raced.model, Decoder)
        spec = raced.model.spec
        finished.update(curve=watch.curve, width=spec.d_model, layers=spec.num_layers, parameters=spec.num_params(),
                        flops_per_token=spec.flops_per_token(data.context))  # fmt: skip
        raise Finished

    recipe_config = resolve_config(recipe, settings)
    dense.train = timed  # type: ignore[assignment]
    muon.orthogonalize_all = qkv_as_one if run["case"] == "qkv as one" else orthogonalize_all
    try:
        recipe.main(recipe_config)
    except Finished:
        return {**finished, "lr": recipe_config.lr, "recipe": recipe_name}
    raise AssertionError("the recipe did not train")


def qkv_as_one(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Queries, keys and values of a block as one matrix, of a model with as many key heads as query heads: its square
    matrices are q, k, v and o of each block."""
    if not matrices or matrices[0].shape[0] != matrices[0].shape[1]:
        return orthogonalize_all(matrices)
    joined = [torch.cat(matrices[i : i + 3]) for i in range(0, len(matrices), 4)]
    moved = zip(orthogonalize_all(joined), orthogonalize_all(matrices[3::4]), strict=True)
    return [m for qkv, o in moved for m in (*(3**0.5 * qkv).chunk(3), o)]


class Finished(Exception):
    """What a recipe does after training is not part of the race."""


def warm_up(raced: Run, data: TokenData, objective: Objective, options: dict[str, Any]) -> float:
    """Compile everything, then give the run its first weights back; seconds of a step."""
    first = {name: p.detach().clone() for name, p in raced.model.named_parameters()}
    plain = {key: options[key] for key in ("reducer", "clip", "forward_backward") if key in options}

    def steps(count: int) -> float:
        began, raced.step = now(), 0
        train(raced, data, objective, steps=count, schedule=constant(1e-6), log_every=count, **plain)
        return (now() - began) / count

    steps(1)
    if sparse_layers(raced.model, dense_phase=True):
        dense_at_first = not sparse_layers(raced.model)
        (end_dense_phase if dense_at_first else start_dense_phase)(raced.model)
        steps(1)
        (start_dense_phase if dense_at_first else end_dense_phase)(raced.model)
    options["evaluate"](raced)
    steps(1)  # compiled again where the evaluation changed what is expected
    step_seconds = steps(WARM)
    with torch.no_grad():
        for name, p in raced.model.named_parameters():
            p.copy_(first[name])
    raced.optimizer.state.clear()
    raced.step = 0
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for those that compile
        torch.cuda.reset_peak_memory_stats()
    return step_seconds


# -- nanochat ----------------------------------------------------------------------------------------------------


def race_nanochat(run: dict[str, Any]) -> dict[str, Any]:
    """Its scripts/base_train.py, in this process."""
    root = Path(run["peers"], "nanochat").resolve()
    if not (root / "scripts" / "base_train.py").is_file():
        raise UserError(f"{root} has no scripts/base_train.py; give --peers FOLDER with nanochat's repository in it")
    toy = run["toy"]
    corpus = corpus_of(toy, run["tokenizer"])
    batch, context = (TOY_BATCH, TOY_CONTEXT) if toy else (BATCH, CONTEXT)
    seed = seed_of(run)
    data = TokenData(corpus.train, context=context, batch=batch, seed=seed)
    held_out = validation_data(corpus, open_mesh(), context=context, batch=batch, micro=None)
    assert held_out is not None
    printed: list[str] = []
    opened: list[Any] = []
    losses: list[tuple[int, float]] = []

    def rows(of: TokenData, device: Any, *, train: bool) -> Iterator[Any]:
        for step in range(10**9):
            if train and step == WARM:  # it has compiled
                opened.append(turn(run, 0.1))
                opened[0].__enter__()
            micro = of.step(step)[0]
            yield micro.tokens_BT.to(device), micro.targets_BT.to(device), {"epoch": 1, "pq_idx": 0, "rg_idx": step}

    @torch.no_grad()
    def evaluate(model: Any, batches: Any, steps: int, token_bytes: Any) -> float:
        found = [model(x, y) for x, y, _ in (next(batches) for _ in range(4))]
        loss = float(torch.stack(found).mean())
        losses.append((len(losses) * run["every"], loss))
        return loss

    def loader(tokenizer: Any, rows_: int, length: int, split: str, device: Any, **_: Any) -> Iterator[Any]:
        return rows(data if split == "train" else held_out, device, train=split == "train")

    tokenizer = types.SimpleNamespace(get_vocab_size=lambda: corpus.tokenizer.vocab_size)
    stand_in("wandb")
    stand_in("scripts.base_eval", evaluate_core=None)
    stand_in("nanochat.engine", Engine=None)
    stand_in("nanochat.tokenizer", get_tokenizer=lambda: tokenizer, get_token_bytes=lambda device: None)
    stand_in("nanochat.checkpoint_manager", save_checkpoint=lambda *a, **k: None, load_checkpoint=None)
    stand_in("nanochat.loss_eval", evaluate_bpb=evaluate)
    stand_in(
        "nanochat.dataloader",
        tokenizing_distributed_data_loader_bos_bestfit=loader,
        tokenizing_distributed_data_loader_with_state_bos_bestfit=loader,
    )
    sys.path.insert(0, str(root))
    common = vars(importlib.import_module("nanochat.common"))
    common["print0"] = lambda text="", **_: printed.append(str(text))
    shape = ["--depth=2", "--head-dim=32"] if toy else ["--depth=12"]
    given = [f"--{s}" for s in run["settings"] if not s.startswith("seed=")]
    sys.argv = ["base_train", *shape, f"--max-seq-len={context}", "--window-pattern=L",
                f"--num-iterations={run['steps']}", f"--device-batch-size={batch}",
                f"--total-batch-size={batch * context}", f"--eval-every={run['every']}", "--core-metric-every=-1",
                "--sample-every=-1", "--save-every=-1", *given]  # fmt: skip
    torch.manual_seed(seed)
    runpy.run_path(str(root / "scripts" / "base_train.py"), run_name="__main__")
    for held in opened:
        held.__exit__(None, None, None)
    took = [float(m[1]) / 1000 for text in printed if (m := re.search(r"\bdt: ([\d.]+)ms", text))]
    usual = statistics.median(took)
    seconds = [0.0]
    for step, one in enumerate(took):
        seconds.append(seconds[-1] + (usual if step < 10 else one))
    curve = [[s * batch * context, round(seconds[s], 3), round(loss, 5)] for s, loss in losses if s]
    counts = next(text for text in printed if text.startswith("total "))
    parameters = int(counts.split(":")[1].replace(",", ""))
    return {"curve": curve, "width": 768, "layers": 12, "lr": 0.02, "recipe": "base_train", "parameters": parameters}


def seed_of(run: dict[str, Any]) -> int:
    return int(dict(s.split("=", 1) for s in run["settings"]).get("seed", 0))


def stand_in(name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module


def corpus_of(toy: bool, tokenizer: str) -> Corpus:
    cfg = apply_overrides(CorpusConfig, corpus_settings(toy, tokenizer))
    return load_corpus(cfg)


# -- all runs ----------------------------------------------------------------------------------------------------


def parse_run(text: str, args: argparse.Namespace) -> dict[str, Any]:
    case, _, settings = text.partition("@")
    if case not in CASES:
        raise UserError(f"{case!r} is no case; they are {', '.join(CASES)}")
    given = dict(s.split("=", 1) for s in settings.split(",") if s)
    steps = int(given.pop("steps", args.steps))
    return {
        "case": case,
        "name": text,
        "number": args.runs.index(text),
        "settings": [f"{key}={value}" for key, value in given.items()],
        "steps": steps,
        "toy": args.toy,
        "out": str(args.out.resolve()),
        "peers": str(args.peers),
        "tokenizer": str(args.tokenizer),
        "every": args.every,
        "until": time.time() + args.seconds,
        "graph": GRAPHS.get(case, case),
    }


def race_all(runs: list[dict[str, Any]]) -> None:
    """In the order given, among those that are ready."""
    together: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        together.setdefault(run["graph"], []).append(run)
    command = [sys.executable, "-m", "benchmarks.race", "--worker"]
    going = {graph: subprocess.Popen([*command, json.dumps(same)]) for graph, same in together.items()}

    def lives(run: dict[str, Any]) -> bool:
        return going[run["graph"]].poll() is None

    began, until = time.time(), runs[0]["until"]
    firsts = [same[0] for same in together.values()]
    while time.time() - began < COMPILING and any(lives(run) and not marked(run, "ready") for run in firsts):
        time.sleep(0.1)
    print(f"compiled in {time.time() - began:.0f} s", flush=True)
    waiting = list(runs)
    while waiting and time.time() < until:
        waiting = [run for run in waiting if lives(run)]
        ready = [run for run in waiting if marked(run, "ready")]
        for run in ready[:1]:
            mark(run, "turn")
            while lives(run) and not marked(run, "done"):
                time.sleep(0.02)
            waiting.remove(run)
        time.sleep(0.02)
    for process in going.values():
        if process.poll() is None and time.time() >= until:
            process.kill()
        process.wait()


def work_all(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        try:
            work(run)
        except LeftOut as left_out:
            print(left_out, flush=True)
            mark(run, "done")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def work(run: dict[str, Any]) -> None:
    torch.set_float32_matmul_precision("high")
    found = race_nanochat(run) if run["case"] == "nanochat" else race_ours(run)
    tokens, seconds, loss = found["curve"][-1]
    line = {key: run[key] for key in ("case", "name", "settings", "steps")} | found
    line |= {"seed": seed_of(run), "final_loss": loss}
    line |= {"tokens_per_s": round(tokens / seconds), "peak_gib": round(peak_gib(), 2)}
    append_jsonl(Path(run["out"], "races.jsonl"), line)
    print(f"{run['name']:40} {loss:.4f} after {tokens / 1e6:.1f}M tokens, {seconds:.1f} s", flush=True)


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


# -- the optimizer's share of a step -----------------------------------------------------------------------------


def optimizer_share(width: int, batch: int, *, layers: int = 4) -> None:
    """Seconds of a step and of its optimizer, at the usual FFN of four times the width; one GPU."""
    device = torch.device("cuda", 0)
    heads = width // 128
    spec = ModelSpec(VOCAB, width, layers, heads, heads, 128, 4 * width, CONTEXT, model_type="qwen3", qk_norm=True,
                     norm_eps=1e-6, tied=False)  # fmt: skip
    with torch.device("meta"):
        model = Decoder(spec)
    parallelize(model, Mesh(0, 1, device), ParallelConfig(compile="blocks", compute_dtype=torch.bfloat16))
    materialize(model, device)
    init_weights(model, 0)
    stream = torch.randint(0, VOCAB, (16, CONTEXT + 1), device=device)
    micros = [Micro(stream[:, :-1], stream[:, 1:], stream[:, 1:], 16 * CONTEXT)] * (batch // 16)
    config = {"width": width, "layers": layers, "batch": batch}
    for name, make in OPTIMIZERS.items():
        optimizer = make(model, lr=1e-6)
        passes, moves = [], []
        for _ in range(6):
            began = now()
            PlainForwardBackward()(model, CrossEntropy(), micros, float(batch * CONTEXT))
            clip_gradients(model.parameters(), 1.0)
            passed = now()
            optimizer.step()
            passes.append(passed - began)
            moves.append(now() - passed)
            optimizer.zero_grad()
        share = statistics.median(moves) / (statistics.median(moves) + statistics.median(passes))
        print(f"width {width}, {batch * CONTEXT:,} tokens: {name} {statistics.median(moves) * 1000:.2f} ms, "
              f"{share:.1%} of a step", flush=True)  # fmt: skip
        record(bench="race", case=f"{name} bf16", metric="optimizer_share", unit="of a step", samples=[share],
               config=config, note=f"{statistics.median(moves) * 1000:.2f} ms")  # fmt: skip
    x = torch.randn(layers * 2, width, 4 * width, device=device, dtype=torch.bfloat16)
    for name, call in (("eager", orthogonalize), ("compiled", torch.compile(orthogonalize, dynamic=False))):
        call(x)
        began = now()
        for _ in range(5):
            call(x)
        took = (now() - began) / 5
        products = ROUNDS * (2 * x.numel() * width * 2 + 2 * width**3 * len(x))
        print(f"orthogonalize {list(x.shape)} {name}: {took * 1000:.2f} ms, {products / took / 1e12:.0f} TFLOP/s")


# -- results -----------------------------------------------------------------------------------------------------


def reached(curve: list[list[float]], loss: float) -> tuple[float, float] | None:
    """(tokens, seconds) at which the curve crosses `loss`, on straight lines between its points."""
    for before, after in zip([None, *curve], curve, strict=False):
        if after[2] <= loss:
            if before is None or before[2] <= after[2]:
                return after[0], after[1]
            part = (before[2] - loss) / (before[2] - after[2])
            return before[0] + part * (after[0] - before[0]), before[1] + part * (after[1] - before[1])
    return None


def best(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every case, seed and number of steps, the run of the lowest final loss."""
    found: dict[Any, dict[str, Any]] = {}
    for line in sorted(lines, key=lambda line: line["final_loss"]):
        found.setdefault((line["steps"], line["case"], line["seed"]), line)
    return list(found.values())


def baseline_of(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The best AdamW; of short runs, which leave out a part of the recipe, the recipe."""
    for case in (BASELINE, RECIPE):
        found = [line for line in lines if line["case"] == case]
        if found:
            return min(found, key=lambda line: line["final_loss"])
    return None


def record_races(lines: list[dict[str, Any]]) -> None:
    raced = best(lines)
    for line in raced:
        base = baseline_of([other for other in raced if other["steps"] == line["steps"]])
        config = {key: line[key] for key in ("width", "layers", "seed", "lr", "steps")}
        shared: dict[str, Any] = {"bench": "race", "case": line["case"], "config": config}
        note = f"{line['recipe']} {' '.join(line['settings'])}, {line['tokens_per_s']:,} tokens/s, "
        note += f"{line['parameters'] / 1e6:.0f}M parameters, peak {line['peak_gib']:.1f} GiB"
        against: dict[str, Any] = {}
        if base is not None:
            against = {"baseline": base["case"], "baseline_value": base["final_loss"]}
            against["ratio"] = base["final_loss"] / line["final_loss"]
        record(**shared, metric="final_loss", unit="nats/token", samples=[line["final_loss"]], note=note,
               quality={"curve": line["curve"]}, **against)  # fmt: skip
        passed = base and reached(line["curve"], base["final_loss"])
        if base and passed:
            for i, (metric, unit) in enumerate((("tokens_to_loss", "tokens"), ("seconds_to_loss", "s"))):
                record(**shared, metric=metric, unit=unit, samples=[round(passed[i], 2)], baseline=base["case"],
                       baseline_value=base["curve"][-1][i], ratio=base["curve"][-1][i] / passed[i])  # fmt: skip


def table() -> str:
    """Every case and seed."""
    return laid_out(CASES, 500)


def parts() -> str:
    """The recipe without one of its parts, in short runs."""
    return laid_out(CASES, 100)


def verdict() -> str:
    """2:4 on top of the recipe, against the recipe and half its width."""
    return laid_out((RECIPE, "muon fp8", "half width", "fst", "s-ste fp8"), 500)


def share() -> str:
    """The optimizer's share of a step."""
    lines = [line for line in newest("race") if line["metric"] == "optimizer_share"]
    rows = [
        [str(c["width"]), f"{c['batch'] * CONTEXT:,}", line["case"].split()[0], line["note"], f"{line['value']:.1%}"]
        for line in lines
        for c in [line["config"]]
    ]
    return markdown(["width", "tokens a step", "optimizer", "time", "of a step"], rows) + provenance(lines)


def laid_out(cases: Collection[str], steps: int) -> str:
    lines = [line for line in newest("race") if line["config"].get("steps") == steps and line["case"] in cases]
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault(json.dumps([line["case"], line["config"]]), {})[line["metric"]] = line
    rows = []
    for of in sorted(runs.values(), key=lambda of: of["final_loss"]["value"]):
        line, config = of["final_loss"], of["final_loss"]["config"]
        row = [line["case"], str(config["seed"]), f"{config['lr']:g}", f"{line['value']:.3f}"]
        for metric, digits, scale in (("tokens_to_loss", "{:.1f}M", 1e6), ("seconds_to_loss", "{:.1f} s", 1)):
            at = of.get(metric)
            row.append("" if at is None else f"{digits.format(at['value'] / scale)} ({1 / at['ratio']:.2f})")
        rows.append([*row, line["note"].partition(", ")[2].rpartition(", peak")[0]])
    base = lines[0]["baseline"]
    header = ["case", "seed", "rate", "final loss", f"tokens until {base} ends (part of its own)", "seconds"]
    return markdown([*header, "speed and size"], rows) + provenance(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for races.jsonl")
    parser.add_argument("--runs", nargs="*", default=USUAL, help="CASE or CASE@key=value,key=value")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=EVERY, help="steps between validations")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no run begins that would end later")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer; by default one is trained on the text")
    parser.add_argument("--peers", type=Path, default=Path("peers"))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--no-record", action="store_true", help="only races.jsonl, for trials")
    parser.add_argument("--share", action="store_true", help="the optimizer's share of a step, first")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work_all(json.loads(args.worker))
    if args.share:
        for width, batch in ((2048, 64), (2048, 512), (768, 64)):
            optimizer_share(width, batch)
    if args.out is None:
        raise UserError("--out FOLDER is missing: the place of races.jsonl")
    shutil.rmtree(args.out / "turns", ignore_errors=True)
    for name in ("runs", "turns"):
        (args.out / name).mkdir(parents=True, exist_ok=True)
    runs = [parse_run(text, args) for text in args.runs]
    race_all(runs)
    lines = read_jsonl(args.out / "races.jsonl")
    if not args.no_record:
        record_races(lines)
    for line in sorted(lines, key=lambda line: line["final_loss"]):
        half = line["curve"][len(line["curve"]) // 2 - 1]
        print(f"{line['name']:44} {line['final_loss']:.4f}  {half[2]:.4f} at half  {line['curve'][-1][1]:6.1f} s  "
              f"{line['tokens_per_s']:8,} tokens/s  {line['peak_gib']:.1f} GiB")  # fmt: skip
    return None


if __name__ == "__main__":
    as_command(main)
