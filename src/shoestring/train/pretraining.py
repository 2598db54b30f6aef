"""A pre-training run around its loop: the initial model, validation, the report.

The model is a new one of a named size, or a loaded one. It is built and converted on the meta device, cut over the
mesh, then filled, so that no rank holds more than its share. Validation is the loss on the first rows of the held-out
split, the same rows every time; evals/perplexity.py measures a finished model on a whole text.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoestring.config import option
from shoestring.errors import Interrupted, UserError
from shoestring.formats import convert, init_state, parse_format
from shoestring.formats.convert import Rule
from shoestring.mesh import Mesh
from shoestring.model import Decoder, ModelSpec, Tokenizer, load_into
from shoestring.model.folder import read_spec
from shoestring.model.hf import spec_to_hf
from shoestring.model.parallel import InitialWeights, ParallelConfig, init_weights, materialize, parallelize
from shoestring.model.stages import Stages, cut_stages_
from shoestring.report import Section, Text, eval_table, run_sections, write_report
from shoestring.runlog import RunLog
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy
from shoestring.train.shards import Corpus
from shoestring.train.step import Micro, Objective, Run

Size = Literal["tiny", "small", "base", "base-6heads", "gpt2-124m", "gpt2-774m", "llama-350m", "llama-1b"]
# What a size says stays as it is: a resumed run builds its model by the name alone.
# d_model, num_layers, num_heads, num_kv_heads, d_ff; Llama's architecture except for gpt2-*.
SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "tiny": (128, 4, 4, 2, 384),
    "small": (256, 6, 4, 2, 768),
    "base": (768, 12, 12, 12, 2048),
    "base-6heads": (768, 12, 6, 6, 2048),  # of 128 dims
    "gpt2-124m": (768, 12, 12, 12, 3072),
    "gpt2-774m": (1280, 36, 20, 20, 5120),
    "llama-350m": (1024, 24, 16, 16, 2816),
    "llama-1b": (2048, 16, 32, 8, 8192),
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "norm": "layer", "act": "gelu_tanh", "positions": "learned"}
GPT2 |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
QWEN3: dict[str, Any] = {"model_type": "qwen3", "qk_norm": True, "norm_eps": 1e-6}
OF_NEW_MODELS = ("act", "qk_norm", "tied", "init")
VALIDATION_STEPS = 4

Losses = Callable[[nn.Module, Objective, list[Micro]], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    init_from: str | None = option(None, "Hugging Face folder, run or .gguf to continue from; none starts from scratch")
    size: Size = option("tiny", "shape of the model", deciding=True)
    d_model: int | None = option(None, "width, instead of the size's", least=1, advanced=True, deciding=True)
    num_layers: int | None = option(None, "blocks, instead of the size's", least=1, advanced=True, deciding=True)
    num_heads: int | None = option(None, "query heads, instead of the size's", least=1, advanced=True, deciding=True)
    num_kv_heads: int | None = option(
        None, "key/value heads, instead of the size's", least=1, advanced=True, deciding=True
    )
    d_ff: int | None = option(None, "feed-forward width, instead of the size's", least=1, advanced=True, deciding=True)
    act: Literal["swiglu", "geglu", "geglu_tanh", "relu2"] | None = option(
        None,
        "gate of the feed-forward layers, or relu2: squared ReLU without a gate (the model is then an Arcee); none: "
        "swiglu, and plain GELU for gpt2-*",
        advanced=True,
        deciding=True,
    )
    qk_norm: bool = option(
        False, "norm the queries and keys of each head; the model is then a Qwen3", advanced=True, deciding=True
    )
    tied: bool = option(True, "one matrix for embeddings and output head", advanced=True, deciding=True)
    init: InitialWeights = option(
        "gpt2",
        "initial weights: GPT-2's, or its with output projections and an untied head of zeros",
        advanced=True,
        deciding=True,
    )


def check_model(cfg: ModelConfig, *, vocab_size: int, context: int) -> None:
    """UserError for a shape that is not possible or cannot be saved, before any text is read."""
    changed = [f.name for f in fields(cfg) if f.name in OF_NEW_MODELS and getattr(cfg, f.name) != f.default]
    if changed and cfg.init_from is not None:
        raise UserError(
            f"{changed[0]}={getattr(cfg, changed[0])} only applies to a new model, and init_from={cfg.init_from} has "
            "its own; leave one out"
        )
    if cfg.init_from is None:
        spec_to_hf(new_spec(cfg, vocab_size=vocab_size, context=context))


def expected_spec(cfg: ModelConfig, *, vocab_size: int, context: int) -> ModelSpec:
    """The spec before the text is read: all of it but what the tokenizer says."""
    if cfg.init_from is not None:
        return read_spec(cfg.init_from)[0]
    return new_spec(cfg, vocab_size=vocab_size, context=context)


def initial_spec(cfg: ModelConfig, tokenizer: Tokenizer, *, context: int, named: str | None = None) -> ModelSpec:
    """The spec of the model for this tokenizer, which the setting tokenizer=`named` gave."""
    if cfg.init_from is None:
        ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}
        return new_spec(cfg, vocab_size=tokenizer.vocab_size, context=context, **ids)
    spec = read_spec(cfg.init_from)[0]
    if tokenizer.vocab_size > spec.vocab_size:
        raise UserError(
            f"tokenizer={named} has {tokenizer.vocab_size} tokens, the model of init_from={cfg.init_from} only "
            f"{spec.vocab_size}; leave tokenizer out to use the model's own"
        )
    if context > spec.max_positions:
        most = spec.max_positions
        raise UserError(f"context={context} is more than the {most} positions of {cfg.init_from}; give context={most}")
    return spec


def new_spec(
    cfg: ModelConfig, *, vocab_size: int, context: int, bos_id: int | None = None, eos_id: int | None = None
) -> ModelSpec:
    """The shape of the named size, with the given settings instead of its own."""
    d_model, num_layers, num_heads, num_kv_heads, d_ff = SIZES[cfg.size]
    if cfg.act is not None and cfg.size.startswith("gpt2"):
        raise UserError(
            f"act={cfg.act} is not for size={cfg.size}, whose layers have GELU: choose another size, or leave it out"
        )
    if cfg.act == "relu2" and cfg.qk_norm:
        raise UserError("act=relu2 with qk_norm=true is no architecture that exports: leave one of them out")
    if cfg.qk_norm and cfg.size.startswith("gpt2"):
        raise UserError(
            f"qk_norm=true is for models with rotary positions, not for size={cfg.size}; choose another size, or "
            "give qk_norm=false"
        )
    if cfg.d_model is not None and cfg.d_model != d_model:
        # A new width keeps the proportions of the size by default.
        num_heads = num_kv_heads = max(1, cfg.d_model // 64)
        d_ff = cfg.d_ff or round(d_ff * cfg.d_model / d_model / 64) * 64 or 64
        d_model = cfg.d_model
    num_heads = cfg.num_heads or num_heads
    if num_heads % num_kv_heads or cfg.size.startswith("gpt2"):  # GPT-2 has no grouped-query attention
        num_kv_heads = num_heads
    num_kv_heads = cfg.num_kv_heads or num_kv_heads
    if d_model % num_heads:
        raise UserError(f"d_model={d_model} is not a multiple of num_heads={num_heads}; choose one that divides it")
    if (d_model // num_heads) % 2 and not cfg.size.startswith("gpt2"):  # RoPE rotates pairs
        raise UserError(
            f"d_model={d_model} with num_heads={num_heads} gives heads of {d_model // num_heads} dims, and positions "
            "need an even number; choose another d_model or num_heads"
        )
    return ModelSpec(
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=cfg.num_layers or num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=d_model // num_heads,
        d_ff=cfg.d_ff or d_ff,
        max_positions=context,
        bos_id=bos_id,
        eos_id=eos_id,
        tied=cfg.tied,
        **(GPT2 if cfg.size.startswith("gpt2") else {"act": cfg.act or "swiglu"}),
        **(QWEN3 if cfg.qk_norm else {"model_type": "arcee"} if cfg.act == "relu2" else {}),
    )


def build_model(
    spec: ModelSpec,
    mesh: Mesh,
    parallel: ParallelConfig,
    *,
    rules: Sequence[Rule] = (),
    init_from: str | Path | None = None,
    seed: int = 0,
    init: InitialWeights = "gpt2",
    stages: Stages | None = None,
) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec)
        if rules:
            convert(model, rules)
    if stages is not None:
        cut_stages_(model, stages, stages.held_by(mesh.stage, mesh.pp))
    parallelize(model, mesh, parallel)
    materialize(model, mesh.device)
    if init_from is None:
        init_weights(model, seed, init)
    else:
        load_into(model, init_from)
    init_state(model)
    return model


@contextlib.contextmanager
def can_be_continued(run: Run, recipe: str, folder: Path, saved: dict[str, Any]) -> Iterator[None]:
    """Around the loop: a stop says how to go on, and settings that do not fit the checkpoint are not kept. `saved`: the
    settings that the folder had."""
    try:
        yield
    except KeyboardInterrupt:  # before the trainer handles it, or for the second time
        raise Interrupted(f"stopped; continue with `shoestring run {recipe} resume={folder}`") from None
    except UserError:
        if run.step == 0 and saved:
            run.log.put_back_config(saved)
        raise


# -- validation ----------------------------------------------------------------------------------------------


def validation_data(corpus: Corpus, mesh: Mesh, *, context: int, batch: int, micro: int | None) -> TokenData | None:
    """Rows of the validation split: fewer than `batch` where the split is small, None where it has no full row."""
    windows = max(0, len(corpus.val) - 1) // context  # the last target is one token behind the last row
    num_rows = min(batch, windows // mesh.dp_size * mesh.dp_size)
    if not num_rows:
        return None
    micro = math.gcd(num_rows // mesh.dp_size, micro or batch)
    share = {"dp_rank": mesh.dp_rank, "dp_size": mesh.dp_size}
    return TokenData(corpus.val, context=context, batch=num_rows, micro=micro, **share)


def summed_losses(model: nn.Module, objective: Objective, micros: list[Micro]) -> Tensor:
    return torch.stack([objective(model, m) for m in micros]).sum()


def validation_loss(data: TokenData, losses: Losses = summed_losses) -> Callable[[Run], dict[str, float]]:
    """For `train(evaluate=...)`: the mean loss over the first VALIDATION_STEPS batches of `data`. `losses`: of all
    micro-batches (a pipeline has its own way)."""

    def evaluate(run: Run) -> dict[str, float]:
        micros = (micro for step in range(VALIDATION_STEPS) for micro in data.step(step))
        return {"val_loss": mean_loss(run.model, micros, CrossEntropy(), run.mesh, losses)}

    return evaluate


@torch.no_grad()
def mean_loss(
    model: nn.Module, micros: Iterable[Micro], objective: Objective, mesh: Mesh, losses: Losses = summed_losses
) -> float:
    """The objective over the micro-batches of all ranks, by its count. Leaves the model in eval mode."""
    model.eval()
    here = [micro.to(mesh.device) for micro in micros]
    loss, count = losses(model, objective, here), float(sum(objective.count(m) for m in here))
    return float(mesh.sum(loss) / mesh.sum(torch.tensor(count, device=mesh.device)))


def few_documents(corpus: Corpus, context: int) -> str:
    """Why there is no validation, and what to change."""
    return (
        f"{len(corpus.val)} tokens were set aside for it and a row needs {context + 1}; one document in fifty is, so "
        "give more or smaller ones"
    )


# -- report --------------------------------------------------------------------------------------------------


def report_training(
    recipe: str, log: RunLog, spec: ModelSpec, plots: Sequence[Section] = (), commands: Sequence[str] = ()
) -> None:
    """Print the rows of evals.jsonl, write the page with `plots`, and suggest next commands."""
    assert log.folder is not None
    folder = log.folder
    eval_table(log.evaluations()).print()
    shrink = [f"shoestring quantize {folder} {name}" for name in int4_that_fits(spec)]
    first = [f'shoestring generate {folder} "def main("', f"shoestring eval {folder} --speed"]
    tries = "\n".join([*first, *shrink, f"shoestring export {folder} my-model", *commands])
    sections = [*plots, *run_sections(folder), Text("Next", tries, code=True)]
    page = write_report(folder, recipe, sections, subtitle=str(folder))
    log.say(f"model in {folder}/model, report in {page}. Next:\n{tries}")
    log.close()


def int4_that_fits(spec: ModelSpec) -> list[str]:
    """The first spelling of int4 whose groups divide every layer's width, if any does."""
    for name in ("int4", "int4:g32", "int4:g0"):
        with torch.device("meta"), contextlib.suppress(UserError):
            convert(Decoder(spec), [("*", parse_format(name))])
            return [name]
    return []
