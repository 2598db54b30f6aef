"""Make a drafter for a model, so that it decodes faster and says the same: distilled from the model's own text.

Run:     shoestring run shrink/drafter model=RUN                             prompts from the run's own corpus
         shoestring run shrink/drafter model=DIR prompts=my.jsonl layers=4   prompts of your task: what matters most
         shoestring run shrink/drafter model=DIR prompts=FOLDER text=corpus  the corpus itself, nothing generated
         shoestring run shrink/drafter model=DIR prompts=P d_model=256 vocab=8192 method=adaspec
         shoestring run shrink/drafter resume=RUN        goes on at the stage and step where it stopped
         shoestring generate MODEL "def main(" --drafter RUN --stats
Needs:   memory for the model and its drafter; 261 bytes of disk per token of text for the model's top 64
Time:    the demo's model (2.3M parameters), 160 prompts, layers=1, 120 steps of 16 x 128 tokens: 2 minutes of a CPU
Expect:  a model of that size after 60 steps: 0.70 of drawn guesses kept (0.60 before training), of greedy ones 0.56 to
         0.78 (0.62 before). A model of 2.4B parameters on an H200, 250 steps on its own text: 2.2 to 2.4 times plain
         speed for one greedy request at a time (bench/drafter); docs/methods/drafter.md compares the methods
Leaves:  a run folder with the drafter in model/ (drafter.json names its tokens), text.jsonl, the acceptance on prompts
         that it never saw in acceptance.json and report.html, beside an untrained drafter and n-gram lookup
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoestring.config import option, to_json
from shoestring.errors import UserError, in_run
from shoestring.measure import corpus_of_run, need_tokenizer, pick_device, pick_dtype, ready
from shoestring.mesh import Mesh
from shoestring.model import Decoder, Loaded, load_model
from shoestring.report import Curves, Section, Series, Table, Text, run_sections, write_report
from shoestring.runlog import (
    RunLog,
    check_run_folder,
    check_unfinished,
    open_run_folder,
    resumable,
    write_atomically,
)
from shoestring.serve import Sampling
from shoestring.serve.drafters import Drafter, DraftModel, Ngram, open_drafter, trim_head
from shoestring.shrink.drafter import (
    Schedule,
    distil,
    forced_acceptance,
    listed_prompts,
    make_objective,
    piece_prompts,
    reference_losses,
    score_text,
)
from shoestring.shrink.drafter_acceptance import measure_acceptance, measure_rate
from shoestring.shrink.drafter_losses import pick_loss
from shoestring.shrink.drafter_model import (
    coverage,
    first_layers,
    frequent_tokens,
    fresh,
    is_drafter,
    save_drafter,
)
from shoestring.shrink.drafter_objectives import DraftDistill
from shoestring.shrink.self_text import check_room, generate_text
from shoestring.train.data import TokenData, rows_per_pass
from shoestring.train.shards import Corpus, prepare
from shoestring.train.teacher_cache import ScalarCache, TeacherCache

RECIPE = "shrink/drafter"
RESIDENT_BYTES = 8e9  # scores up to this size stay on the GPU
# Settings that do not decide what finished stages hold.
FREE = ("device", "save_every", "eval_every", "run", "resume")


@dataclass(frozen=True)
class Config:
    model: str = option("", "the model to speed up: a Hugging Face folder, a run folder or a .gguf file")
    prompts: str | None = option(
        None, "a .jsonl list of prompts, or a corpus to cut them from; a run's own corpus by default"
    )
    max_mb: float | None = option(
        20.0, "read at most this many megabytes of the corpus; none reads all", least=0.001
    )
    text: Literal["self", "corpus"] = option(
        "self", "train on what the model writes after the prompts, or on the corpus as it is"
    )
    num_prompts: int = option(1000, "prompts to complete", least=1)
    prompt_tokens: int = option(32, "tokens of a prompt that is cut from a corpus", least=1)
    new_tokens: int = option(224, "tokens the model writes after each prompt", least=1)
    temperature: float = option(1.0, "of that text", least=0)
    layers: int = option(2, "blocks of the drafter", least=1)
    d_model: int | None = option(
        None, "width of a drafter with fresh weights; none takes the model's first layers", least=1
    )
    vocab: int | None = option(None, "tokens its head knows, the most frequent ones; none: all", least=1)
    method: Literal["distill", "adaspec"] = option(
        "distill",
        "all tokens, or those where it is behind a reference drafter trained first (twice the work)",
    )
    loss: Literal["kl", "reverse_kl", "jsd", "tvd", "lk", "lk_hybrid"] = option(
        "kl", "distance to the model's distribution; lk and lk_hybrid are about the acceptance itself"
    )
    fraction: float = option(0.4, "adaspec: share of the tokens that counts")
    on_policy: float = option(0.0, "share of micro-batches whose text the drafter writes itself, 0 to 1")
    k: int = option(64, "tokens of the model's distribution that are kept", least=1)
    steps: int = option(1000, "optimizer steps", least=1)
    reference_steps: int | None = option(
        None, "adaspec: steps of the reference; none: as many as the drafter", least=1
    )
    batch: int = option(16, "rows per step", least=1)
    micro: int | None = option(None, "rows per forward pass, to save memory; none: all at once", least=1)
    context: int = option(256, "tokens per row", least=1)
    lr: float = option(1e-3, "peak learning rate; cosine to a tenth", least=0)
    warmup: int = option(50, "steps of linear warm-up", least=0)
    seed: int = option(0, "of the weights, the order of the rows and the text")
    held_out: int = option(16, "prompts kept apart, to measure on", least=1)
    num_drafts: int = option(4, "guesses per step when acceptance is measured", least=1)
    eval_tokens: int = option(64, "tokens written after each of them", least=1)
    dtype: Literal["auto", "fp32", "bf16"] = option("auto", "compute precision; auto: bf16 on a GPU")
    device: str = option("auto", "auto, cpu, cuda or cuda:1 ...")
    save_every: int = option(200, "steps between checkpoints; 0: only at the end and on Ctrl-C", least=0)
    eval_every: int = option(100, "steps between looks at the validation split; 0 is off", least=0)
    run: str | None = option(None, "folder for this run; none makes runs/shrink-drafter-DATE")
    resume: str | None = option(None, "a stopped run folder to go on with; its settings are taken over")


def main(cfg: Config) -> Path:
    check(cfg)
    device = pick_device(cfg.device)
    loaded = ready(load_model(cfg.model, device=device, dtype=pick_dtype(cfg.dtype, device)))
    need_tokenizer(loaded)
    check_shape(cfg, loaded.model)
    prompts, held_out, whole = make_prompts(cfg, loaded, *prompt_source(cfg), RunLog(None))
    if cfg.text == "corpus" and whole is not None:
        token_data(cfg, whole)
    else:
        check_room(prompts, need_tokenizer(loaded), cfg.new_tokens, cfg.batch * cfg.context + 1)
    settings = to_json(cfg)
    folder = open_run_folder(RECIPE, settings)
    with in_run(folder), resumable(RECIPE, folder):
        log = RunLog(folder)
        log.save_config({"recipe": RECIPE, "config": {**settings, "resume": None, "run": str(folder)}})
        corpus = make_text(cfg, loaded, prompts, whole, folder, log)
        train_stage(cfg, loaded, corpus, folder, log)
        rows = acceptance_stage(cfg, loaded, held_out, folder, log)
        finish(cfg, log, folder, rows)
    return folder


# -- settings -----------------------------------------------------------------------------------------------


def check(cfg: Config) -> None:
    if not cfg.model:
        raise UserError("model= is missing: give a Hugging Face folder, a run folder or a .gguf file")
    settings = to_json(cfg)
    check_run_folder(settings, [key for key in settings if key not in FREE])
    check_unfinished(cfg.resume)
    pick_loss(cfg.loss)
    if not 0 <= cfg.on_policy <= 1 or not 0 < cfg.fraction <= 1:
        raise UserError(
            f"on_policy={cfg.on_policy} must be from 0 to 1, fraction={cfg.fraction} more than 0 and at most 1"
        )


def check_shape(cfg: Config, target: Decoder) -> None:
    """Said before hours of text are generated for a drafter that cannot be built."""
    if cfg.d_model is None and not 1 <= cfg.layers < target.spec.num_layers:
        raise UserError(
            f"layers={cfg.layers}: the model has {target.spec.num_layers}; take 1 to {target.spec.num_layers - 1} of "
            "them, or give d_model= for a drafter of its own width"
        )
    if cfg.d_model is not None and (cfg.layers < 1 or cfg.d_model < 1 or cfg.d_model % 32):
        raise UserError(
            f"layers={cfg.layers}, d_model={cfg.d_model}: give at least one layer and a width that is a multiple of 32"
        )
    rows_per_pass(cfg.batch, cfg.micro)
    if cfg.context > target.spec.max_positions:
        raise UserError(
            f"context={cfg.context} is more than the model's {target.spec.max_positions} positions"
        )
    least = len(target.spec.eos_ids) + 1
    if cfg.vocab is not None and not least <= cfg.vocab <= target.spec.vocab_size:
        raise UserError(
            f"vocab={cfg.vocab}: give {least} to {target.spec.vocab_size}, the model's tokens, or none for all"
        )


def prompt_source(cfg: Config) -> tuple[str, float | None]:
    if cfg.prompts is not None:
        if cfg.text == "corpus" and is_list(cfg.prompts):
            raise UserError(f"text=corpus trains on a corpus, and prompts={cfg.prompts} is a list of prompts")
        return cfg.prompts, cfg.max_mb
    source, max_mb = corpus_of_run(Path(cfg.model))
    if source is None:
        raise UserError(
            f"{cfg.model} is no run with a corpus of its own: give prompts=, a .jsonl list or a corpus like the texts "
            "it will be used for"
        )
    # As much as the run read: another part of a corpus would be tokenised anew.
    return source, max_mb


def is_list(path: str) -> bool:
    return Path(path).suffix in (".jsonl", ".json")


# -- stages -------------------------------------------------------------------------------------------------


def make_prompts(
    cfg: Config, loaded: Loaded, source: str, max_mb: float | None, log: RunLog
) -> tuple[list[str], list[str], Corpus | None]:
    """Prompts to train on, prompts to measure on, and the corpus they come from."""
    if cfg.prompts is not None and is_list(source):  # a run's own corpus is a corpus, whatever its suffix
        prompts, held_out = listed_prompts(source, cfg.num_prompts, cfg.held_out)
        return prompts, held_out, None
    tokenizer = need_tokenizer(loaded)
    max_bytes = None if max_mb is None else int(max_mb * 1e6)
    key = "data" if cfg.prompts is None else "prompts"
    corpus = prepare(source, tokenizer=tokenizer, max_bytes=max_bytes, progress=log.progress, key=key)
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
    cfg: Config, loaded: Loaded, prompts: list[str], whole: Corpus | None, folder: Path, log: RunLog
) -> Corpus:
    """The corpus to distil on: the model's own text, or what the prompts would have been cut from."""
    if cfg.text == "corpus":
        assert whole is not None
        return whole
    sampling = Sampling(temperature=cfg.temperature, seed=cfg.seed, max_tokens=cfg.new_tokens)
    path = generate_text(
        loaded.model,
        need_tokenizer(loaded),
        prompts,
        folder / "text.jsonl",
        sampling=sampling,
        progress=log.progress,
    )
    return prepare(str(path), folder / "corpus", tokenizer=need_tokenizer(loaded), val_fraction=0.03)


def train_stage(cfg: Config, loaded: Loaded, corpus: Corpus, folder: Path, log: RunLog) -> None:
    if is_drafter(folder / "model"):
        return
    device = loaded.model.embed.weight.device
    mesh = Mesh(0, 1, device)
    data = token_data(cfg, corpus)
    vocab_ids = None
    if cfg.vocab is not None:
        vocab_ids = frequent_tokens(
            corpus.train.tokens, cfg.vocab, loaded.spec.vocab_size, loaded.spec.eos_ids
        )
        log.say(f"{cfg.vocab} tokens make {coverage(corpus.train.tokens, vocab_ids):.1%} of the text")
    steps = max(cfg.steps, cfg.reference_steps or 0)
    cache = score_text(folder / "targets", loaded.model, data, k=cfg.k, steps=steps, progress=log.progress)
    if device.type == "cuda" and cache.num_bytes < RESIDENT_BYTES:
        cache = cache.to(device)
    reference = None
    if cfg.method == "adaspec":
        reference = reference_stage(cfg, loaded, cache, data, vocab_ids, mesh, folder, log)
    objective = make_objective(
        cache,
        loss=cfg.loss,
        vocab_ids=vocab_ids,
        reference=reference,
        fraction=cfg.fraction,
        on_policy=cfg.on_policy,
        target=loaded.model,
        num_new=cfg.context // 2,
        seed=cfg.seed,
    )
    drafter = start(cfg, loaded.model)
    log.say(
        f"drafter of {drafter.spec.num_params() / 1e6:.1f}M parameters for {loaded.spec.num_params() / 1e6:.1f}M, "
        f"{len(corpus.train) / 1e6:.2f}M tokens of text"
    )
    evaluate = forced_acceptance(loaded.model, corpus, cfg.context, rows=8, k=cfg.k, vocab_ids=vocab_ids)
    distil(
        drafter,
        data,
        objective,
        schedule_of(cfg, cfg.steps),
        mesh,
        log,
        checkpoints=folder / "checkpoints",
        evaluate=evaluate,
    )
    save_drafter(
        folder / "model",
        drafter,
        loaded.tokenizer,
        vocab_ids,
        model=cfg.model,
        method=cfg.method,
        loss=cfg.loss,
        steps=cfg.steps,
        train_tokens=len(corpus.train),
    )
    for part in ("targets", "reference_losses"):  # large, and of no use to a finished drafter
        shutil.rmtree(folder / part, ignore_errors=True)


def token_data(cfg: Config, corpus: Corpus) -> TokenData:
    return TokenData(corpus.train, context=cfg.context, batch=cfg.batch, micro=cfg.micro, seed=cfg.seed)


def reference_stage(
    cfg: Config,
    loaded: Loaded,
    cache: TeacherCache,
    data: TokenData,
    vocab_ids: list[int] | None,
    mesh: Mesh,
    folder: Path,
    log: RunLog,
) -> ScalarCache:
    """AdaSPEC: a drafter of the same start, distilled on all tokens; only its losses are kept."""
    losses = folder / "reference_losses"
    if (losses / "manifest.json").is_file():
        return ScalarCache.open(losses)
    log.say("reference drafter")
    reference = start(cfg, loaded.model)
    objective = make_objective(cache, vocab_ids=vocab_ids)
    assert isinstance(objective, DraftDistill)
    steps = cfg.reference_steps or cfg.steps
    own = RunLog(folder / "reference")
    distil(reference, data, objective, schedule_of(cfg, steps), mesh, own, checkpoints=own_folder(own))
    own.close()
    return reference_losses(losses, objective, reference, data, steps=max(cfg.steps, steps))


def own_folder(log: RunLog) -> Path:
    assert log.folder is not None
    return log.folder / "checkpoints"


def schedule_of(cfg: Config, steps: int) -> Schedule:
    warmup = min(cfg.warmup, max(1, steps // 10))
    return Schedule(steps, cfg.lr, warmup, save_every=cfg.save_every, eval_every=cfg.eval_every)


def start(cfg: Config, target: Decoder) -> Decoder:
    """The drafter before training, in fp32 masters, computing like the target."""
    if cfg.d_model is None:
        drafter = first_layers(target, cfg.layers)
    else:
        head_dim = 64 if cfg.d_model % 64 == 0 else 32
        drafter = fresh(
            target.spec, num_layers=cfg.layers, d_model=cfg.d_model, head_dim=head_dim, seed=cfg.seed
        )
    drafter.to(target.embed.weight.device)
    drafter.compute_dtype = target.compute_dtype
    return drafter


def acceptance_stage(
    cfg: Config, loaded: Loaded, held_out: list[str], folder: Path, log: RunLog
) -> list[dict[str, Any]]:
    """The trained drafter beside an untrained one and n-gram lookup, on prompts that were held out."""
    path = folder / "acceptance.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))["rows"]
    log.say(f"measuring on {len(held_out)} prompts that were held out")
    tokenizer, target = need_tokenizer(loaded), loaded.model
    room = max(1, target.spec.max_positions - cfg.eval_tokens)
    prompts = [ids[-room:] for ids in map(tokenizer.encode, held_out) if ids]
    rows = []
    for name in ("drafter", "before training", "ngram"):
        row: dict[str, Any] = {"drafter": name}
        for label, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            found = measure_acceptance(
                target,
                make_drafter(name, cfg, loaded, folder),
                prompts,
                num_drafts=cfg.num_drafts,
                max_tokens=cfg.eval_tokens,
                temperature=temperature,
            )
            row[label] = found.to_json()
        rows.append(row)
    plain = measure_rate(target, None, prompts[:4], max_tokens=cfg.eval_tokens)[0]
    for row in rows:
        drafter = make_drafter(row["drafter"], cfg, loaded, folder)
        row["tokens_per_s"] = measure_rate(target, drafter, prompts[:4], max_tokens=cfg.eval_tokens)[0]
        row["speedup"] = row["tokens_per_s"] / plain
    told = {
        "num_prompts": len(prompts),
        "num_drafts": cfg.num_drafts,
        "tokens_per_s_alone": plain,
        "rows": rows,
    }
    write_atomically(path, json.dumps(told, indent=1) + "\n")
    return rows


def make_drafter(name: str, cfg: Config, loaded: Loaded, folder: Path) -> Drafter:
    target = loaded.model
    if name == "ngram":
        return Ngram()
    if name == "drafter":
        device, dtype = target.embed.weight.device, target.compute_dtype
        return open_drafter(str(folder / "model"), target, device=str(device), dtype=dtype)
    untrained = start(cfg, target).eval().requires_grad_(False)
    vocab_ids = json.loads((folder / "model" / "drafter.json").read_text(encoding="utf-8"))["vocab_ids"]
    if vocab_ids is not None:
        trim_head(untrained, vocab_ids)
    untrained.to(target.compute_dtype)
    return DraftModel(untrained, vocab_ids=vocab_ids)


# -- report -------------------------------------------------------------------------------------------------


def finish(cfg: Config, log: RunLog, folder: Path, rows: list[dict[str, Any]]) -> None:
    table = acceptance_table(rows, cfg)
    table.print()
    metrics = [row for row in log.history if row.get("val_acceptance") is not None]
    curve = Series("acceptance", [row["step"] for row in metrics], [row["val_acceptance"] for row in metrics])
    places = [
        Series(row["drafter"], list(range(1, len(row["greedy"]["at"]) + 1)), row["greedy"]["at"])
        for row in rows
    ]
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


def acceptance_table(rows: list[dict[str, Any]], cfg: Config) -> Table:
    header = [
        "drafter",
        "acceptance",
        "tokens per pass",
        "sampled: acceptance",
        "tokens per pass",
        "tokens/s",
        "times plain",
    ]
    cells = [
        [
            row["drafter"],
            round(row["greedy"]["acceptance"], 3),
            round(row["greedy"]["accepted_length"], 2),
            round(row["sampled"]["acceptance"], 3),
            round(row["sampled"]["accepted_length"], 2),
            round(row["tokens_per_s"], 1),
            round(row["speedup"], 2),
        ]
        for row in rows
    ]
    note = (
        f"{cfg.held_out} prompts that were held out, {cfg.eval_tokens} tokens each; {cfg.num_drafts} guesses per pass. "
        "Tokens/s: greedy, one request at a time, the engine chooses the number of guesses."
    )
    return Table("Acceptance", header, cells, note)
