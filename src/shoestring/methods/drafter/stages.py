"""The stages of shrink/drafter: prompts, text, training, acceptance on held-out prompts, report.

check(cfg), check_shape(cfg, loaded)    all checks of the settings, before text is generated
make_prompts, make_text                 prompts and the corpus to distil on
train_drafter(cfg, ...)                 model/: scores of the text, a reference drafter for AdaSPEC, training
measure_stage, finish                   acceptance.json and report.html

Each stage writes files and is skipped where they exist, so that a stopped run continues.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoestring.config import deciding, option, to_json
from shoestring.errors import UserError
from shoestring.evals.model_row import corpus_of_run, need_tokenizer
from shoestring.mesh import Mesh
from shoestring.methods.drafter.acceptance import COMPARED, acceptance_table, compare_drafters, least_at
from shoestring.methods.drafter.model import (
    DrafterShape,
    coverage,
    frequent_tokens,
    is_drafter,
    note_acceptance,
    save_drafter,
)
from shoestring.methods.drafter.objectives import DraftDistill, pick_loss
from shoestring.methods.drafter.training import (
    Schedule,
    distil,
    forced_acceptance,
    listed_prompts,
    make_objective,
    piece_prompts,
    reference_losses,
    score_text,
)
from shoestring.model import Decoder, LoadedModel
from shoestring.recipes.settings import ScheduleSettings, SourceSettings, TrainSettings
from shoestring.recipes.shrink_run import check_start
from shoestring.report import Curves, Section, Series, Text, run_sections, write_report
from shoestring.runlog import RunLog
from shoestring.serve import Sampling
from shoestring.serve.speculative.draft_model import DraftModel, read_drafter_file, trim_head
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.drafter_stack import open_drafter
from shoestring.serve.speculative.ngram_drafter import NgramDrafter
from shoestring.shrink.self_text import generate_text
from shoestring.train.data import TokenData, check_pass, rows_per_pass
from shoestring.train.shards import Corpus, tokenize_corpus
from shoestring.train.teacher_cache import ScalarCache, TeacherCache

RECIPE = "shrink/drafter"
RESIDENT_BYTES = 8e9  # scores up to this size stay on the GPU


@dataclass(frozen=True)
class DrafterSettings(ScheduleSettings, TrainSettings, SourceSettings):
    model: str = option(
        "", "the model to speed up: a Hugging Face folder, a run folder or a .gguf file; required without resume="
    )
    prompts: str | None = option(
        None, "a .jsonl list of prompts, or a corpus to cut them from; a run's own corpus by default"
    )
    max_mb: float | None = option(20.0, "read at most this many megabytes of the corpus; none reads all", least=0.001)
    text: Literal["self", "corpus"] = option(
        "self", "train on what the model writes after the prompts, or on the corpus as it is"
    )
    num_prompts: int = option(1000, "prompts to complete", least=1)
    prompt_tokens: int = option(32, "tokens of a prompt that is cut from a corpus", least=1, advanced=True)
    new_tokens: int = option(224, "tokens the model writes after each prompt", least=1)
    temperature: float = option(1.0, "sampling temperature of what the model writes", least=0, advanced=True)
    start: str | None = option(
        None, "a small model with the same tokens to begin with, such as a sibling of its family; none: its own layers"
    )
    layers: int = option(2, "blocks of the drafter, without start=", least=1)
    d_model: int | None = option(
        None, "width of a drafter with fresh weights; none takes the model's first layers", least=1
    )
    vocab: int | None = option(
        None, "tokens that the drafter's head knows, the most frequent ones; none: all", least=1, advanced=True
    )
    method: Literal["distill", "adaspec"] = option(
        "distill", "all tokens, or those where it is behind a reference drafter trained first (twice the work)"
    )
    loss: Literal["kl", "reverse_kl", "jsd", "tvd", "lk", "lk_hybrid"] = option(
        "kl", "distance to the model's distribution; lk and lk_hybrid optimise the acceptance itself"
    )
    fraction: float = option(0.4, "adaspec: share of the tokens that counts", advanced=True)
    on_policy: float = option(0.0, "share of micro-batches whose text the drafter writes itself, 0 to 1", advanced=True)
    k: int = option(64, "tokens of the model's distribution that are kept", least=1, advanced=True)
    steps: int = option(1000, deciding=True)
    reference_steps: int | None = option(
        None, "adaspec: steps of the reference; none: as many as the drafter", least=1, advanced=True
    )
    batch: int = option(16, "rows per step")
    micro: int | None = option(None, "rows per forward pass, to save memory; none: all at once", deciding=True)
    context: int = option(256)
    lr: float = option(1e-3, "peak learning rate; cosine to a tenth")
    seed: int = option(0, "random seed of the weights, the order of the rows and the text")
    held_out: int = option(16, "prompts held out for measuring", least=1, advanced=True)
    num_drafts: int = option(4, "drafts per step when acceptance is measured", least=1, advanced=True)
    eval_tokens: int = option(64, "tokens written after each held-out prompt", least=1, advanced=True)
    dtype: Literal["auto", "fp32", "bf16"] = option("auto", "compute precision; auto: bf16 on a GPU")
    save_every: int = option(200, "steps between checkpoints; 0: only at the end and on Ctrl-C")
    eval_every: int = option(100, "steps between evaluations of the validation split; 0 is off")

    @property
    def shape(self) -> DrafterShape:
        return DrafterShape(self.layers, self.d_model, self.seed, self.start)

    def train_data(self, corpus: Corpus) -> TokenData:
        rows: dict[str, Any] = {"context": self.context, "batch": self.batch, "micro": self.micro}
        return TokenData(corpus.train, **rows, seed=self.seed)

    def training_schedule(self, steps: int) -> Schedule:
        warmup = min(self.warmup, max(1, steps // 10))
        often: dict[str, Any] = {"save_every": self.save_every, "eval_every": self.eval_every}
        return Schedule(steps, self.lr, warmup, **often, seed=self.seed, resume_from=self.resume_from)


# -- before --------------------------------------------------------------------------------------------------


def check(cfg: DrafterSettings) -> None:
    settings = to_json(cfg)
    check_start(settings, deciding(type(cfg)))
    pick_loss(cfg.loss)
    if not 0 <= cfg.on_policy <= 1 or not 0 < cfg.fraction <= 1:
        raise UserError(
            f"on_policy={cfg.on_policy} must be from 0 to 1, fraction={cfg.fraction} more than 0 and at most 1"
        )


def check_shape(cfg: DrafterSettings, loaded: LoadedModel) -> None:
    """Checks against the model, before hours of text are generated."""
    cfg.shape.check(loaded, cfg.context)
    rows = rows_per_pass(cfg.batch, cfg.micro)
    check_pass(rows, cfg.context, loaded.spec.d_model, loaded.model.device, loaded.model.compute_dtype)
    if cfg.context > loaded.spec.max_positions:
        most = loaded.spec.max_positions
        raise UserError(f"context={cfg.context} is more than the model's {most} positions; give context={most} or less")
    least = len(loaded.spec.eos_ids) + 1
    if cfg.vocab is not None and not least <= cfg.vocab <= loaded.spec.vocab_size:
        raise UserError(
            f"vocab={cfg.vocab}: give {least} to {loaded.spec.vocab_size}, the model's tokens, or none for all"
        )


def prompt_source(cfg: DrafterSettings) -> tuple[str, float | None]:
    if cfg.prompts is not None:
        if cfg.text == "corpus" and is_list(cfg.prompts):
            raise UserError(f"text=corpus trains on a corpus, and prompts={cfg.prompts} is a list of prompts")
        return cfg.prompts, cfg.max_mb
    source, max_mb = corpus_of_run(Path(cfg.model))
    if source is None:
        raise UserError(
            f"{cfg.model} is not a run with its own corpus; give prompts=, a .jsonl list or a corpus like the texts "
            "it will be used for"
        )
    # As much as the run read, so that its tokenised corpus is used.
    return source, max_mb


def is_list(path: str) -> bool:
    return Path(path).suffix in (".jsonl", ".json")


# -- text ----------------------------------------------------------------------------------------------------


def make_prompts(
    cfg: DrafterSettings, loaded: LoadedModel, source: str, max_mb: float | None, log: RunLog
) -> tuple[list[str], list[str], Corpus | None]:
    """Prompts to train on, prompts to measure on, and the corpus they come from."""
    if cfg.prompts is not None and is_list(source):  # a run's own corpus is a corpus, whatever its suffix
        prompts, held_out = listed_prompts(source, cfg.num_prompts, cfg.held_out)
        return prompts, held_out, None
    tokenizer = need_tokenizer(loaded)
    max_bytes = None if max_mb is None else int(max_mb * 1e6)
    key = "data" if cfg.prompts is None else "prompts"
    corpus = tokenize_corpus(source, tokenizer=tokenizer, max_bytes=max_bytes, progress=log.progress, key=key)
    if len(corpus.val) < cfg.prompt_tokens:
        raise UserError(
            f"prompts={source} leaves {len(corpus.val)} tokens to hold out: give more documents, or a list of prompts"
        )
    held_out = piece_prompts(corpus.val, tokenizer, cfg.held_out, cfg.prompt_tokens)
    prompts = []
    if cfg.text == "self":
        prompts = piece_prompts(corpus.train, tokenizer, cfg.num_prompts, cfg.prompt_tokens)
    return prompts, held_out, corpus


def make_text(
    cfg: DrafterSettings, loaded: LoadedModel, prompts: list[str], whole: Corpus | None, folder: Path, log: RunLog
) -> Corpus:
    """The corpus to distil on: the model's own text, or the corpus of the prompts."""
    if cfg.text == "corpus":
        assert whole is not None
        return whole
    sampling = Sampling(temperature=cfg.temperature, seed=cfg.seed, max_tokens=cfg.new_tokens)
    path = generate_text(
        loaded.model, need_tokenizer(loaded), prompts, folder / "text.jsonl", sampling=sampling, progress=log.progress
    )
    return tokenize_corpus(str(path), folder / "corpus", tokenizer=need_tokenizer(loaded), val_fraction=0.03)


# -- training ------------------------------------------------------------------------------------------------


def train_drafter(cfg: DrafterSettings, loaded: LoadedModel, corpus: Corpus, folder: Path, log: RunLog) -> None:
    """Write model/: score the text, train the reference where the method has one, train the drafter."""
    if is_drafter(folder / "model"):
        return
    target, tokens = loaded.model, corpus.train.tokens
    mesh, data = Mesh(0, 1, target.device), cfg.train_data(corpus)
    vocab_ids = None
    if cfg.vocab is not None:
        vocab_ids = frequent_tokens(tokens, cfg.vocab, loaded.spec.vocab_size, loaded.spec.eos_ids)
        log.say(f"{cfg.vocab} tokens make {coverage(tokens, vocab_ids):.1%} of the text")
    steps = max(cfg.steps, cfg.reference_steps or 0)
    cache = score_text(folder / "targets", target, data, k=cfg.k, steps=steps, progress=log.progress)
    if target.device.type == "cuda" and cache.num_bytes < RESIDENT_BYTES:
        cache = cache.to(target.device)
    reference = None
    if cfg.method == "adaspec":
        reference = train_reference(cfg, target, cache, data, vocab_ids, mesh, folder, log)
    objective = make_objective(
        cache,
        loss=cfg.loss,
        vocab_ids=vocab_ids,
        reference=reference,
        fraction=cfg.fraction,
        on_policy=cfg.on_policy,
        target=target,
        num_new=cfg.context // 2,
        seed=cfg.seed,
    )
    drafter = cfg.shape.build(target)
    log.say(
        f"drafter of {drafter.spec.num_params() / 1e6:.1f}M parameters for {loaded.spec.num_params() / 1e6:.1f}M, "
        f"{len(corpus.train):,} tokens of text"
    )
    evaluate = forced_acceptance(target, corpus, cfg.context, rows=8, k=cfg.k, vocab_ids=vocab_ids)
    schedule, checkpoints = cfg.training_schedule(cfg.steps), folder / "checkpoints"
    distil(drafter, data, objective, schedule, mesh, log, checkpoints=checkpoints, evaluate=evaluate)
    save_drafter(
        folder / "model",
        drafter,
        loaded.tokenizer,
        vocab_ids,
        model=cfg.model,
        start=cfg.start,
        method=cfg.method,
        loss=cfg.loss,
        steps=cfg.steps,
        train_tokens=len(corpus.train),
    )
    for part in ("targets", "reference_losses"):  # large, and no longer needed
        shutil.rmtree(folder / part, ignore_errors=True)


def train_reference(
    cfg: DrafterSettings,
    target: Decoder,
    cache: TeacherCache,
    data: TokenData,
    vocab_ids: list[int] | None,
    mesh: Mesh,
    folder: Path,
    log: RunLog,
) -> ScalarCache:
    """AdaSPEC: a drafter with the same initial weights, distilled on all tokens; only its losses are kept."""
    losses = folder / "reference_losses"
    if (losses / "manifest.json").is_file():
        return ScalarCache.open(losses)
    log.say("reference drafter")
    reference = cfg.shape.build(target)
    objective = make_objective(cache, vocab_ids=vocab_ids)
    assert isinstance(objective, DraftDistill)
    steps = cfg.reference_steps or cfg.steps
    own, own_folder = RunLog(folder / "reference"), folder / "reference"
    distil(reference, data, objective, cfg.training_schedule(steps), mesh, own, checkpoints=own_folder / "checkpoints")
    own.close()
    return reference_losses(losses, objective, reference, data, steps=max(cfg.steps, steps))


# -- after ---------------------------------------------------------------------------------------------------


def measure_stage(
    cfg: DrafterSettings, loaded: LoadedModel, held_out: list[str], folder: Path, log: RunLog
) -> list[dict[str, Any]]:
    """The trained drafter, an untrained one and n-gram lookup, on held-out prompts."""
    path = folder / "acceptance.json"
    if not path.is_file():
        log.say(f"measuring on {len(held_out)} prompts that were held out")
    room = max(1, loaded.spec.max_positions - cfg.eval_tokens)
    prompts = [ids[-room:] for ids in map(need_tokenizer(loaded).encode, held_out) if ids]
    lengths: dict[str, Any] = {"num_drafts": cfg.num_drafts, "max_tokens": cfg.eval_tokens}
    rows = compare_drafters(
        loaded.model, lambda name: make_drafter(name, cfg, loaded, folder), prompts, path, **lengths
    )
    trained = rows[COMPARED.index("drafter")]
    note_acceptance(folder / "model", least_at([trained["greedy"]["at"], trained["sampled"]["at"]]))
    return rows


def make_drafter(name: str, cfg: DrafterSettings, loaded: LoadedModel, folder: Path) -> Drafter:
    target = loaded.model
    if name == "ngram":
        return NgramDrafter()
    if name == "drafter":
        device, dtype = target.device, target.compute_dtype
        return open_drafter(str(folder / "model"), target, device=str(device), dtype=dtype)
    untrained = cfg.shape.build(target).eval().requires_grad_(False)
    vocab_ids = read_drafter_file(folder / "model", target.spec.vocab_size).vocab_ids
    if vocab_ids is not None:
        trim_head(untrained, vocab_ids)
    untrained.to(target.compute_dtype)
    return DraftModel(untrained, vocab_ids=vocab_ids)


# -- report -------------------------------------------------------------------------------------------------


def finish(cfg: DrafterSettings, log: RunLog, folder: Path, rows: list[dict[str, Any]]) -> None:
    table = acceptance_table(
        rows,
        f"{cfg.held_out} prompts that were held out, {cfg.eval_tokens} tokens each; {cfg.num_drafts} guesses per pass. "
        "Tokens/s: greedy, one request at a time, the engine chooses the number of guesses.",
    )
    table.print()
    metrics = [row for row in log.history if row.get("val_acceptance") is not None]
    curve = Series("acceptance", [row["step"] for row in metrics], [row["val_acceptance"] for row in metrics])
    places = [Series(row["drafter"], list(range(1, len(row["greedy"]["at"]) + 1)), row["greedy"]["at"]) for row in rows]
    commands = (
        f'shoestring generate {cfg.model} "def main(" --drafter {folder} --stats\n'
        f"shoestring serve {cfg.model} --drafter {folder}"
    )
    sections: list[Section] = [
        table,
        Curves("Acceptance by place of the guess (greedy)", places, "guess", "acceptance"),
        Curves("Acceptance on the validation text while training", [curve], "step", "acceptance"),
        *run_sections(folder),
        Text("Next", commands, code=True),
    ]
    page = write_report(folder, RECIPE, sections, subtitle=str(folder))
    log.say(f"drafter in {folder}/model, report in {page}. Next:\n{commands}")
    log.close()
