"""Pre-train a decoder from scratch, or go on training one.

Run:     shoestring run train/dense data=python steps=2000
         shoestring run train/dense data=my/texts size=small tokenizer=DIR
         shoestring run train/dense init_from=DIR data=my.jsonl lr=2e-5     goes on from a Hugging Face folder
         shoestring run train/dense resume=runs/train-dense-...             goes on after Ctrl-C or a crash
         torchrun --nproc-per-node 4 -m shoestring run train/dense mesh.dp=2 mesh.tp=2
Needs:   a CPU for size=tiny and small; a GPU for the others
Time:    2,048 tokens a step: 0.7 s of processor time on a slow CPU core for size=tiny, 1.2 s with d_model=192
Expect:  with d_model=192, vocab_size=2048, context=128, lr=2e-3 on 8 MB of Python: a validation loss of 4.4 after
         300 steps
Leaves:  a run folder with model/ (Hugging Face), checkpoints/, metrics.jsonl, evals.jsonl, report.html
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shoestring.config import option, to_json
from shoestring.errors import UserError, in_run
from shoestring.formats import convert, init_state, parse_format
from shoestring.formats.convert import Rule
from shoestring.measure import evaluate_row, pick_dtype
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.model import Decoder, ModelSpec, Tokenizer, load_into, load_model, save_model
from shoestring.model.folder import read_spec
from shoestring.model.hf import spec_to_hf
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.report import Section, Text, eval_table, run_sections, write_report
from shoestring.runlog import RunLog, check_free, open_run_folder, read_config
from shoestring.state.checkpoint import Checkpointer, latest_step
from shoestring.train.data import TokenData
from shoestring.train.hooks import Hook
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import SCHEDULES, adamw
from shoestring.train.shards import Corpus, prepare
from shoestring.train.trainer import Run, train

# d_model, num_layers, num_heads, num_kv_heads, d_ff; Llama's architecture except for gpt2-*.
SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "tiny": (128, 4, 4, 2, 384),
    "small": (256, 6, 4, 2, 768),
    "gpt2-124m": (768, 12, 12, 12, 3072),
    "gpt2-774m": (1280, 36, 20, 20, 5120),
    "llama-350m": (1024, 24, 16, 16, 2816),
    "llama-1b": (2048, 16, 32, 8, 8192),
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "norm": "layer",
    "act": "gelu_tanh",
    "positions": "learned",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}
EVAL_TOKENS = 100_000  # of the validation split, for the perplexity at the end
# What a stopped run has done fits these only. Steps, rates, precision and mesh may change, and texts may lie elsewhere:
# the checkpoint knows what they held.
DECIDING = (
    *("size", "d_model", "num_layers", "num_heads", "num_kv_heads", "d_ff", "act"),
    *("vocab_size", "batch", "context", "seed"),
)


@dataclass(frozen=True)
class Config:
    data: str = option(
        "python", "file, folder or glob of .txt .md .py .jsonl .parquet; python: the sources here"
    )
    max_mb: float | None = option(
        100.0, "read at most this many megabytes of the corpus; none reads all", least=0.001
    )
    tokenizer: str | None = option(None, "folder or tokenizer.json to use; none trains a BPE on the corpus")
    vocab_size: int = option(4096, "vocabulary of the tokenizer that is trained")
    init_from: str | None = option(
        None, "Hugging Face folder, run or .gguf to go on from; none starts from scratch"
    )
    size: Literal["tiny", "small", "gpt2-124m", "gpt2-774m", "llama-350m", "llama-1b"] = option(
        "tiny", "shape"
    )
    d_model: int | None = option(None, "width, instead of the size's", least=1)
    num_layers: int | None = option(None, "blocks, instead of the size's", least=1)
    num_heads: int | None = option(None, "query heads, instead of the size's", least=1)
    num_kv_heads: int | None = option(None, "key/value heads, instead of the size's", least=1)
    d_ff: int | None = option(None, "feed-forward width, instead of the size's", least=1)
    act: Literal["swiglu", "geglu", "geglu_tanh"] | None = option(
        None, "gate of the feed-forward layers; none: swiglu, and plain GELU for gpt2-*"
    )
    steps: int = option(2000, "optimizer steps", least=0)
    batch: int = option(16, "rows per step over all ranks", least=1)
    context: int = option(256, "tokens per row", least=2)
    micro: int | None = option(
        None, "rows per forward pass on one rank, to save memory; none: all at once", least=1
    )
    lr: float = option(1e-3, "peak learning rate", least=0)
    warmup: int = option(100, "steps of linear warm-up", least=0)
    schedule: Literal["cosine", "wsd"] = option("cosine", "cosine to a tenth, or stable, then linear to zero")
    weight_decay: float = option(0.1, "AdamW decay of the matrices", least=0)
    clip: float = option(1.0, "largest gradient norm; 0 is off", least=0)
    seed: int = option(0, "of the weights and the order of the data")
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto", "compute precision, masters are fp32; auto: bf16 on GPU"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:1 ...")
    recompute: bool = option(
        False, "keep one activation per block, recompute the rest: less memory, more time"
    )
    compile: Literal["off", "blocks", "whole"] = option(
        "off", "torch.compile each block, or all as one graph"
    )
    graph: bool = option(
        False, "a step's passes as one CUDA graph: small models whose GPU waits for Python; one GPU"
    )
    mesh: MeshConfig = option(MeshConfig(), "how processes share the work")
    log_every: int = option(10, "steps between lines of metrics.jsonl", least=1)
    eval_every: int = option(200, "steps between validation losses; 0 is off", least=0)
    save_every: int = option(
        500, "steps between checkpoints, and one at the end; 0 saves only on Ctrl-C", least=0
    )
    run: str | None = option(None, "folder for this run; none makes runs/RECIPE-DATE")
    resume: str | None = option(None, "a run folder to go on with; its settings are taken over")


def main(cfg: Config) -> Path:
    return pretrain(cfg, "train/dense")


def pretrain(
    cfg: Config,
    recipe: str,
    *,
    rules: Sequence[Rule] = (),
    make_hooks: Callable[[Decoder, Mesh, TokenData], list[Hook]] = lambda model, mesh, data: [],
    plots: Callable[[Path], list[Section]] = lambda folder: [],
    deciding: Sequence[str] = (),
    deliver: Callable[[Path], Sequence[str]] = lambda folder: (),
) -> Path:
    """The whole run; recipes for other ways to train give Formats for the layers, hooks, and plots of their own, more
    settings that a resumed run must not change, and what is made of model/ (on the first rank), which returns
    commands to try.
    """
    if cfg.resume is not None:
        check_steps(cfg.steps, open_run_folder(recipe, to_json(cfg), (*DECIDING, *deciding)))
    elif cfg.run is not None:
        check_free(Path(cfg.run))
    if cfg.act is not None and cfg.init_from is not None:
        raise UserError(
            f"act={cfg.act} is of a new model, and init_from={cfg.init_from} has its own: leave one out"
        )
    if cfg.init_from is None:
        # A shape that is not possible, or that nobody could load, is said before a tokenizer is trained.
        spec_to_hf(make_spec(cfg, None))
    mesh = open_mesh(cfg.mesh, cfg.device)
    if cfg.graph and (mesh.device.type != "cuda" or mesh.world_size > 1):
        raise UserError(
            f"graph=true needs one CUDA GPU, this run has {mesh.world_size} x {mesh.device.type}: leave it out"
        )
    corpus = load_corpus(cfg, mesh, RunLog(None, main=mesh.is_main))
    model = build_model(cfg, mesh, corpus.tokenizer, rules)
    share = {"context": cfg.context, "dp_rank": mesh.dp_rank, "dp_size": mesh.dp_size}
    data = TokenData(corpus.train, **share, batch=cfg.batch, micro=cfg.micro, seed=cfg.seed)
    # A small validation split gives a small batch, or none.
    num_rows = min(cfg.batch, len(corpus.val) // cfg.context // mesh.dp_size * mesh.dp_size)
    micro = math.gcd(num_rows // mesh.dp_size, cfg.micro or cfg.batch)
    held_out = TokenData(corpus.val, **share, batch=num_rows, micro=micro) if num_rows else None

    # Everything that can be wrong with the settings has been said: only now is there a folder.
    folder = mesh.broadcast_object(open_run_folder(recipe, to_json(cfg), ()) if mesh.is_main else None)
    with in_run(folder):
        log = RunLog(folder, main=mesh.is_main)
        saved = read_config(folder)
        log.save_config({"recipe": recipe, "config": to_json(replace(cfg, resume=None, run=str(folder)))})
        params, tokens = model.spec.num_params() / 1e6, len(corpus.train) / 1e6
        log.say(f"{params:.1f}M parameters, {tokens:.2f}M training tokens, run in {folder}")
        if cfg.eval_every and held_out is None:
            log.say(f"no validation: {few_documents(corpus, cfg.context)}")
        last = cfg.steps if cfg.save_every else None
        checkpointer = Checkpointer(folder / "checkpoints", every=cfg.save_every, last=last)
        if cfg.resume is not None and latest_step(checkpointer.folder) is None:
            log.say(f"{folder} has no checkpoint yet: starting from the first step")
            log.truncate_after(0)
        run = Run(model, adamw(model, lr=cfg.lr, weight_decay=cfg.weight_decay), mesh, log)
        try:
            train(
                run,
                data,
                CrossEntropy(),
                steps=cfg.steps,
                schedule=SCHEDULES[cfg.schedule](cfg.lr, warmup=cfg.warmup, steps=cfg.steps),
                hooks=make_hooks(model, mesh, data),
                clip=cfg.clip,
                checkpointer=checkpointer,
                log_every=cfg.log_every,
                evaluate=validation_loss(held_out) if held_out else None,
                eval_every=cfg.eval_every,
                graph=cfg.graph,
            )
        except UserError:
            if run.step == 0 and saved:  # a checkpoint that these settings do not fit: the run keeps its own
                log.put_back_config(saved)
            raise
        save_model(folder / "model", model, corpus.tokenizer, mesh=mesh)
        if mesh.is_main:
            commands = deliver(folder)
            finish(cfg, recipe, corpus, log, folder, mesh.device, plots(folder), commands)
    mesh.close()
    return folder


def check_steps(steps: int, folder: Path) -> None:
    """A run that goes on does not go back: what it would deliver and say had more steps than asked for."""
    done = latest_step(folder / "checkpoints")
    if done is not None and steps < done:
        raise UserError(
            f"steps={steps} is less than the {done} that {folder} has done: give {done} or more, or start a new run"
        )


def few_documents(corpus: Corpus, context: int) -> str:
    return (
        f"{len(corpus.val)} tokens were set aside for it and a row has {context}; one document in fifty is, so give "
        "more or smaller ones"
    )


def load_corpus(cfg: Config, mesh: Mesh, log: RunLog) -> Corpus:
    """Tokenised once by the first rank; the others read what it wrote."""
    tokenizer = None
    if cfg.tokenizer is not None:
        tokenizer = Tokenizer.from_file(cfg.tokenizer)
    elif cfg.init_from is not None:
        tokenizer = read_spec(cfg.init_from)[1]
        if tokenizer is None:
            raise UserError(f"init_from={cfg.init_from} has no tokenizer; give its own with tokenizer=")
    max_bytes = None if cfg.max_mb is None else int(cfg.max_mb * 1e6)
    options: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": cfg.vocab_size, "max_bytes": max_bytes}
    return prepare(cfg.data, **options, progress=log.progress)


def make_spec(cfg: Config, tokenizer: Tokenizer | None) -> ModelSpec:
    """The size's shape with the keys of the command in place of its own; without a tokenizer only to see if it is
    possible.
    """
    d_model, num_layers, num_heads, num_kv_heads, d_ff = SIZES[cfg.size]
    if cfg.act is not None and cfg.size.startswith("gpt2"):
        raise UserError(
            f"act={cfg.act} is a gate, and size={cfg.size} has none: choose another size, or leave it out"
        )
    if cfg.d_model is not None and cfg.d_model != d_model:
        # A new width keeps the size's proportions where nothing else is said.
        num_heads = num_kv_heads = max(1, cfg.d_model // 64)
        d_ff = cfg.d_ff or round(d_ff * cfg.d_model / d_model / 64) * 64 or 64
        d_model = cfg.d_model
    num_heads = cfg.num_heads or num_heads
    if num_heads % num_kv_heads or cfg.size.startswith("gpt2"):  # GPT-2 shares no keys
        num_kv_heads = num_heads
    num_kv_heads = cfg.num_kv_heads or num_kv_heads
    if d_model % num_heads:
        raise UserError(
            f"d_model={d_model} is not a multiple of num_heads={num_heads}; choose one that divides it"
        )
    if (d_model // num_heads) % 2 and not cfg.size.startswith("gpt2"):  # rotary positions turn pairs
        raise UserError(
            f"d_model={d_model} with num_heads={num_heads} gives heads of {d_model // num_heads} dims, and positions "
            "need an even number; choose another d_model or num_heads"
        )
    return ModelSpec(
        vocab_size=cfg.vocab_size if tokenizer is None else tokenizer.vocab_size,
        d_model=d_model,
        num_layers=cfg.num_layers or num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=d_model // num_heads,
        d_ff=cfg.d_ff or d_ff,
        max_positions=cfg.context,
        bos_id=None if tokenizer is None else tokenizer.bos_id,
        eos_id=None if tokenizer is None else tokenizer.eos_id,
        **(GPT2 if cfg.size.startswith("gpt2") else {"act": cfg.act or "swiglu"}),
    )


def build_model(cfg: Config, mesh: Mesh, tokenizer: Tokenizer, rules: Sequence[Rule] = ()) -> Decoder:
    """Built and converted on the meta device, cut over the mesh, then filled: no rank ever holds more than its
    share.
    """
    spec = make_spec(cfg, tokenizer) if cfg.init_from is None else read_spec(cfg.init_from)[0]
    if tokenizer.vocab_size > spec.vocab_size:
        raise UserError(
            f"tokenizer={cfg.tokenizer} has {tokenizer.vocab_size} tokens, the model of init_from={cfg.init_from} only "
            f"{spec.vocab_size}; leave tokenizer out to use the model's own"
        )
    if cfg.context > spec.max_positions:
        raise UserError(
            f"context={cfg.context} is more than the {spec.max_positions} positions of {cfg.init_from}"
        )
    with torch.device("meta"):
        model = Decoder(spec)
        if rules:
            convert(model, rules)
    compute = pick_dtype(cfg.dtype, mesh.device)
    parallelize(model, mesh, ParallelConfig(cfg.recompute, cfg.compile, compute))
    materialize(model, mesh.device)
    if cfg.init_from is None:
        init_weights(model, cfg.seed)
    else:
        load_into(model, cfg.init_from)
    init_state(model)
    return model


def validation_loss(data: TokenData, num_steps: int = 4) -> Callable[[Run], dict[str, float]]:
    """The mean loss over the first few batches of the validation split, the same ones every time."""
    objective = CrossEntropy()

    @torch.no_grad()
    def evaluate(run: Run) -> dict[str, float]:
        run.model.eval()
        micros = [micro.to(run.mesh.device) for step in range(num_steps) for micro in data.step(step)]
        loss = sum((objective(run.model, m) for m in micros), torch.zeros((), device=run.mesh.device))
        count = torch.tensor(float(sum(objective.count(m) for m in micros)), device=run.mesh.device)
        return {"val_loss": float(run.mesh.sum(loss) / run.mesh.sum(count))}

    return evaluate


def int4_that_fits(spec: ModelSpec) -> list[str]:
    """The first spelling of int4 whose groups divide every layer's width, if any does."""
    for name in ("int4", "int4:g32", "int4:g0"):
        with torch.device("meta"), contextlib.suppress(UserError):
            convert(Decoder(spec), [("*", parse_format(name))])
            return [name]
    return []


def finish(
    cfg: Config,
    recipe: str,
    corpus: Corpus,
    log: RunLog,
    folder: Path,
    device: torch.device,
    plots: Sequence[Section],
    more_commands: Sequence[str],
) -> None:
    """Evaluate what was saved, write the report, say what to try next."""
    loaded = load_model(folder / "model", device=device, dtype=pick_dtype(cfg.dtype, device))
    tokens = corpus.val.head(EVAL_TOKENS) if len(corpus.val) > 1 else None
    log.evaluated(
        **evaluate_row(loaded, folder.name, tokens, f"{cfg.data} (validation)", context=cfg.context)
    )
    eval_table(log.evaluations()).print()
    commands = "\n".join(
        (
            f'shoestring generate {folder} "def main("',
            f"shoestring eval {folder} --speed",
            *(
                f"shoestring run shrink/rtn model={folder} format={name}"
                for name in int4_that_fits(loaded.spec)
            ),
            f"shoestring export {folder} my-model",
            *more_commands,
        )
    )
    sections = [*plots, *run_sections(folder), Text("Next", commands, code=True)]
    page = write_report(folder, recipe, sections, subtitle=str(folder))
    log.say(f"model in {folder}/model, report in {page}. Next:\n{commands}")
    log.close()
