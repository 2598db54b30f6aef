"""Which method without training is best across kinds of text, and which calibration text it needs.

    python -m experiments.ptq_domains --assets FOLDER --model FILE         seconds a cell on a GPU
    ... --tokens 4096 --formats int4:g64         minutes a cell on a CPU, which computes in fp32: a table of its own
    ... --seconds 240 --missing                  stop before the time is over; leave out what the results have
    ... --share 0/2                              every second cell: two processes share one GPU

A model is quantized by every method after calibration on one kind of text (`wiki`, `code`), on a mix of four (`mix`:
wiki, books, code, chat) or on what the model writes itself (`own`). It is measured on six kinds, of which two
(speeches, stories) are in no calibration text. Calibration and measurement never see the same passage. Measured per
kind: perplexity, and the mean Kullback-Leibler divergence of the full model's prediction from the quantized one's,
which is far less noisy than a difference of
perplexities. The score of a cell is the mean divergence over the six kinds.

    wiki      WikiText-2 (tokenised edition): validation text | test text
    books     passages of novels (LAMBADA): even | odd
    code      this Python's standard library: every other file
    chat      instructions with answers (alpaca) in the model's own turns: even | odd
    speeches  State of the Union addresses: not for calibration
    stories   TinyStories: not for calibration

A cell is METHOD[,OPTION...]@CALIBRATION[:WINDOWS]. Options: act_order, damping=0.1, token (every token counts alike in
the Hessian, instead of by its squares), full (GPTQ sees the inputs of full blocks, not of quantized ones).
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import device_name, markdown, newest, provenance, record
from benchmarks.smollm2 import need_smollm2
from shoestring.errors import UserError, as_command
from shoestring.formats import pack, parse_format, unpack
from shoestring.model import Decoder, Tokenizer, load_model
from shoestring.shrink.calibrate import BlockStep, Calibration, walk, windows
from shoestring.shrink.gptq import Gptq
from shoestring.shrink.quantize import METHODS, Method, quantize, usual_inputs
from shoestring.shrink.self_text import own_windows

BENCH = "ptq_domains"
SMOLLM2 = "SmolLM2-135M-Instruct"
MIX = ("wiki", "books", "code", "chat")
UNSEEN = ("speeches", "stories")
DOMAINS = (*MIX, *UNSEEN)
CONTEXT = 512
PLAIN = ("rtn", "clip", "awq", "gptq", "gptq+clip", "gptq+cd", "gptq+clip+cd")
OPTIONS = ("act_order", "damping=", "token", "full")
# The most important first, so that a stopped run leaves a useful table.
CELLS = (
    *("rtn@wiki", "awq@wiki", "gptq@wiki", "gptq+clip@wiki", "gptq+cd@wiki", "gptq+clip+cd@wiki"),
    *("awq@mix", "gptq@mix", "gptq+clip@mix", "gptq+cd@mix", "gptq+clip+cd@mix"),
    *("gptq+clip@own", "awq@own"),
    *("gptq+clip,token@wiki", "gptq+clip,token@mix", "gptq+clip+cd,token@mix"),
    *("gptq+clip,damping=0.1@wiki", "gptq+clip,damping=1@wiki", "gptq+clip,damping=0.1@mix", "gptq+clip,damping=1@mix"),
    *("gptq+clip,act_order@wiki", "gptq,act_order@wiki", "gptq+clip,act_order@mix", "gptq+clip,full@mix"),
    *("gptq+clip@mix:128", "gptq+clip@wiki:128", "gptq+clip+cd@mix:128", "awq@mix:128", "clip@wiki", "clip@mix"),
    *("gptq+clip@code", "awq@code"),
)
FORMATS = ("int4:g64", "nf3:s2:g64")


# -- texts ---------------------------------------------------------------------------------------------------
def read_texts(assets: Path, chat: Callable[[str, str], str]) -> dict[str, tuple[list[str], list[str]]]:
    """{kind: (passages to calibrate on, passages to measure)}."""
    wiki = [[(assets / f"text/wikitext-2/{part}.txt").read_text()] for part in ("valid", "test")]
    novels = [json.loads(line) for line in (assets / "eval/lambada_openai.jsonl").read_text().splitlines()]
    passages = [n["context"] + n["continuation"] for n in novels]
    asked = json.loads((assets / "prompts/alpaca_en_demo.json").read_text())
    turns = [chat((a["instruction"] + "\n" + a["input"]).strip(), a["output"]) for a in asked]
    speeches = (assets / "text/sotu.txt").read_text()
    stories = (assets / "text/tinystories_2M.txt").read_text().split("<|endoftext|>")
    files = library()
    return {
        "wiki": (wiki[0], wiki[1]),
        "books": (passages[::2], passages[1::2]),
        "code": (files[::2], files[1::2]),
        "chat": (turns[::2], turns[1::2]),
        "speeches": ([], [speeches[len(speeches) // 2 :]]),
        "stories": ([], [s.strip() + "\n\n" for s in stories]),
    }


def library() -> list[str]:
    """Files of Python's standard library in an order that mixes them, those of a middling size."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in folder.glob("*.py") if 4_000 < p.stat().st_size < 60_000]
    return [
        p.read_text(errors="replace") for p in sorted(paths, key=lambda p: hashlib.md5(p.name.encode()).hexdigest())
    ]


def turns_of(tokenizer: Tokenizer) -> Callable[[str, str], str]:
    """One exchange as the model's template writes it; plain names where it has none."""
    if tokenizer.backend.token_to_id("<|im_start|>") is not None:
        return lambda q, a: f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>\n"
    return lambda q, a: f"User: {q}\n\nAssistant: {a}\n\n"


def tokens_of(tokenizer: Tokenizer, passages: list[str], most: int) -> Tensor:
    """The first `most` tokens, books and files one after the other."""
    found: list[int] = []
    for passage in passages:
        found += tokenizer.encode(passage[: 8 * most], special=False)
        if len(found) >= most:
            break
    return torch.tensor(found[:most])


# -- cells ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cell:
    text: str  # gptq+clip,damping=0.1@mix:128
    format: str

    @property
    def method(self) -> str:
        return self.text.partition("@")[0]

    @property
    def calibration(self) -> tuple[str, int]:
        name, _, num = self.text.partition("@")[2].partition(":")
        return name, int(num or 32)

    @property
    def options(self) -> list[str]:
        return self.method.split(",")[1:]

    def build(self) -> tuple[Method, Calibration]:
        base, options = self.method.split(",")[0], self.options
        if unknown := [o for o in options if not o.startswith(OPTIONS)]:
            raise UserError(f"{self.text}: unknown option {unknown[0]!r}; use {', '.join(OPTIONS)}")
        if base not in METHODS:
            raise UserError(f"{self.text}: unknown method {base!r}; use {', '.join(METHODS)}")
        method = METHODS[base]
        if isinstance(method, Gptq):
            damping = next((float(o.partition("=")[2]) for o in options if o.startswith("damping=")), method.damping)
            method = replace(method, act_order="act_order" in options, damping=damping)
        inputs = "full" if "full" in options else usual_inputs(method)
        return method, Calibration(inputs=inputs, weigh="token" if "token" in options else "square", batch=16)


def calibration_tokens(texts: dict[str, Tensor], name: str, num: int) -> Tensor:
    """[num, CONTEXT] windows of one kind, or of the four of the mix in equal parts."""
    kinds = MIX if name == "mix" else (name,)
    return torch.cat([windows(texts[kind], num // len(kinds), CONTEXT) for kind in kinds])


@torch.no_grad()
def judge(model: Decoder, full: Decoder, tokens: Tensor, batch: int) -> tuple[float, float]:
    """Perplexity, and the mean divergence from the full model in nats per token."""
    nll = torch.zeros((), dtype=torch.float64, device=model.device)
    divergence, count = nll.clone(), 0
    for rows in tokens.unfold(0, CONTEXT, CONTEXT).split(batch):
        x = rows.to(model.device)
        new, old = (m(x)[:, :-1].float().log_softmax(-1) for m in (model, full))
        nll -= new.gather(-1, x[:, 1:, None]).double().sum()
        divergence += (old.exp() * (old - new)).sum(-1).double().sum()
        count += x[:, 1:].numel()
    return float((nll / count).exp()), float(divergence / count)


def main() -> None:
    args = arguments()
    ends = time.perf_counter() + args.seconds
    cuda = torch.cuda.is_available()
    loaded = load_model(args.model or need_smollm2(), device="cuda" if cuda else "cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    if cuda:
        model.compute_dtype = torch.bfloat16
    texts = read_texts(args.assets, turns_of(tokenizer))
    most = 160 * CONTEXT
    calibrating = {kind: tokens_of(tokenizer, passages, most) for kind, (passages, _) in texts.items() if passages}
    test = {kind: tokens_of(tokenizer, passages, args.tokens) for kind, (_, passages) in texts.items()}
    for kind, tokens in test.items():
        if len(tokens) < args.tokens:
            raise UserError(f"the text of {kind} has {len(tokens)} tokens of {args.tokens}")
    full = copy.deepcopy(model)
    batch = 16 if cuda else 1
    common = {"model": args.name, "context": CONTEXT, "tokens": args.tokens * len(DOMAINS)}
    known = [
        (n["case"], n["config"]["format"])
        for n in newest(BENCH)
        if n["device"] == device_name() and n["config"]["tokens"] == common["tokens"]
    ]
    dense = {kind: judge(full, full, tokens, batch)[0] for kind, tokens in test.items()}
    print("dense".ljust(30), *(f"{kind} {value:.2f}" for kind, value in dense.items()), flush=True)
    if args.share[0] == 0:
        save("dense", dense, dict.fromkeys(dense, 0.0), {**common, "method": "dense", "format": "dense", "bits": 16.0})
    cells = [Cell(text, label) for label in args.formats for text in args.cells]
    cells = [c for c in cells if not (args.missing and (c.text, c.format) in known)]
    walks: dict[Any, list[BlockStep]] = {}
    written: dict[int, Tensor] = {}
    for cell in cells[args.share[0] :: args.share[1]]:
        if time.perf_counter() > ends:
            print(f"not measured: {cell.text} {cell.format}", flush=True)
            continue
        began = time.perf_counter()
        method, calibration = cell.build()
        name, num = cell.calibration
        if name == "own" and num not in written:
            written[num] = own_windows(full, tokenizer, num, CONTEXT)
        tokens = written[num] if name == "own" else calibration_tokens(calibrating, name, num)
        key = (name, num, calibration)
        if calibration.inputs == "full" and key not in walks:  # methods on the full model's inputs share them
            walks = {key: list(walk(model, tokens, calibration))}
        steps = walks[key] if key in walks else walk(model, tokens, calibration)
        report = quantize(model, [("*", parse_format(cell.format))], steps, method)
        pack(model)
        unpack(model)
        model.float()
        seconds = time.perf_counter() - began
        found = {kind: judge(model, full, tokens, batch) for kind, tokens in test.items()}
        errors = [e.output_error for e in report.layers if e.output_error is not None]
        config = {
            **common, "method": cell.method, "format": cell.format, "bits": round(report.bits_per_weight, 3),
            "calibration": name, "calibration_tokens": 0 if cell.method == "rtn" else tokens.numel(),
        }  # fmt: skip
        perplexities, divergences = ({kind: pair[i] for kind, pair in found.items()} for i in (0, 1))
        save(cell.text, perplexities, divergences, config, statistics.fmean(errors), seconds)
        model = restored(model, full)


def restored(model: Decoder, full: Decoder) -> Decoder:
    """The full model again, in a fresh copy: layers of `model` have other Formats now."""
    del model
    return copy.deepcopy(full)


def save(
    case: str, perplexities: dict[str, float], divergences: dict[str, float], config: dict[str, Any],
    error: float = 0.0, seconds: float = 0.0,
) -> None:  # fmt: skip
    score = statistics.fmean(divergences.values())
    unseen = statistics.fmean(divergences[kind] for kind in UNSEEN)
    told = " ".join(f"{kind} {value:.2f}/{divergences[kind]:.4f}" for kind, value in perplexities.items())
    print(f"{config['format']} {case:30} mean {score:.4f} unseen {unseen:.4f} | {told} | {seconds:.0f} s", flush=True)
    record(
        bench=BENCH,
        case=case,
        metric="divergence from the full model, mean over six kinds of text",
        unit="nats per token",
        samples=[score],
        quality={
            "perplexity": {k: round(v, 3) for k, v in perplexities.items()},
            "divergence": {k: round(v, 5) for k, v in divergences.items()},
            "output_error": round(error, 5),
            "seconds": round(seconds, 1),
        },
        config=config,
        note="linear layers only; speeches and stories are in no calibration text",
    )


# -- tables --------------------------------------------------------------------------------------------------
SHOWN = (
    *("rtn@wiki", "gptq@wiki", "gptq+clip@wiki", "awq@wiki", "gptq+clip@mix", "awq@mix", "gptq+clip,act_order@mix"),
    *("gptq+clip,token@mix", "gptq+clip,act_order,token@mix", "gptq+clip,act_order,token@own"),
)


def measured(cpu: bool = False) -> list[dict[str, Any]]:
    """The lines of SmolLM2 that compare: of GPUs, which compute in bf16, or of CPUs, which compute in fp32; on as many
    tokens as the full model was measured on last."""
    lines = [n for n in newest(BENCH) if n["config"]["model"] == SMOLLM2 and ("CPU" in n["device"]) == cpu]
    tokens = [n["config"]["tokens"] for n in lines if n["case"] == "dense"]
    return [n for n in lines if n["config"]["tokens"] == tokens[-1]]


def table() -> str:
    """Perplexity by kind of text: rows are methods and calibration texts."""
    return _table(measured())


def short() -> str:
    """The rows that say what matters."""
    return _table(measured(), SHOWN)


def on_cpu() -> str:
    """The rows of a CPU."""
    return _table(measured(cpu=True))


def _table(lines: list[dict[str, Any]], shown: Sequence[str] | None = None) -> str:
    """Best first within a format, by mean divergence."""
    if not lines:
        return "Not measured yet."
    dense = next(n for n in lines if n["case"] == "dense")
    rows = [["", "full precision", "", *_cells(dense), "", ""]]
    for label in FORMATS:
        own = [n for n in lines if n["config"]["format"] == label and (shown is None or n["case"] in shown)]
        for n in sorted(own, key=lambda n: n["value"]):
            c, more = n["config"], f"{100 * increase(n, dense):+.1f}%"
            rows.append([label, c["method"], _calibration(c), *_cells(n), more, f"{n['value']:.3f}"])
    header = ["format", "method", "calibration", *DOMAINS, "mean increase", "divergence"]
    c = dense["config"]
    said = (
        f"\n\nPerplexity of {SMOLLM2} (the file's Q4_1 weights, de-quantized) on {c['tokens'] // len(DOMAINS):,} "
        f"tokens of each kind, context {c['context']}; one run. Speeches and stories are in no calibration text. "
        "Increase: geometric mean over the six kinds. Divergence: of the full model's prediction from the quantized "
        "one's, mean over the six kinds in nats per token; it orders the rows."
    )
    return markdown(header, rows) + said + provenance(lines)


def increase(line: dict[str, Any], dense: dict[str, Any], kinds: Sequence[str] = DOMAINS) -> float:
    """Of perplexity, geometric mean over kinds of text."""
    ours, full = (n["quality"]["perplexity"] for n in (line, dense))
    return math.exp(statistics.fmean(math.log(ours[kind] / full[kind]) for kind in kinds)) - 1


def said(config: dict[str, Any]) -> str:
    """`GPTQ + clip, token weights, mix`"""
    words = {"rtn": "rounding", "awq": "AWQ", "gptq": "GPTQ", "act_order": "act order", "token": "token weights"}
    base, *options = config["method"].split(",")
    base = " + ".join({"cd": "descent"}.get(part, words.get(part, part)) for part in base.split("+"))
    calibration = [config["calibration"]] if config["calibration_tokens"] else []
    return ", ".join([base, *(words.get(o, o) for o in options), *calibration])


def _cells(line: dict[str, Any]) -> list[str]:
    return [f"{line['quality']['perplexity'][kind]:.2f}" for kind in DOMAINS]


def _calibration(config: dict[str, Any]) -> str:
    tokens = config["calibration_tokens"]
    return f"{config['calibration']}, {tokens // 1024}k" if tokens else ""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True, help="holds text/, eval/ and prompts/")
    parser.add_argument("--model", type=Path, help="the .gguf file, where the package is not installed")
    parser.add_argument("--name", default=SMOLLM2, help="of the model, in the results")
    parser.add_argument("--cells", nargs="*", default=CELLS)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--tokens", type=int, default=16384, help="of each kind that are measured")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--share", type=_share, default=(0, 1), help="I/N: the cells I, I + N, ...")
    parser.add_argument("--missing", action="store_true", help="leave out what the results have")
    return parser.parse_args()


def _share(text: str) -> tuple[int, int]:
    first, _, of = text.partition("/")
    return int(first), int(of)


if __name__ == "__main__":
    as_command(main)
