"""From a model to its drafter: prompts, generated text, the target's scores of it, and training.

    prompts   pieces of a corpus, or a list of prompts           `piece_prompts`, `listed_prompts`
    text      the target's completions of them                   `self_text.generate_text`
    scores    the target's top-k on that text, computed once     `train.teacher_cache`
    drafter   trained by an objective of objectives.py           `distil`
              (AdaSPEC first trains a reference drafter and keeps its loss on each token: `reference_losses`)

Each step writes files and is skipped where they exist, so that a stopped run continues. Not supported: several
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.evals.scoring import NanLikelihood
from shoestring.mesh import Mesh
from shoestring.methods.drafter.objectives import DraftDistill, Generate, LiveScores, OnPolicy, Selection
from shoestring.model import Decoder, Tokenizer
from shoestring.runlog import RunLog
from shoestring.serve import Engine, Sampling
from shoestring.serve.speculative.verify import Check, verify
from shoestring.shrink.self_text import read_prompts
from shoestring.state.checkpointer import Checkpointer, ResumeFrom
from shoestring.state.reshard.version import WeightsVersion
from shoestring.train.data import TokenData
from shoestring.train.optim import adamw, warmup_cosine
from shoestring.train.shards import Corpus, TokenShards
from shoestring.train.step import Objective, Run
from shoestring.train.teacher_cache import ScalarCache, TeacherCache, build_cache, build_scalar_cache, one_epoch
from shoestring.train.trainer import train

# -- prompts ------------------------------------------------------------------------------------------------


def piece_prompts(shards: TokenShards, tokenizer: Tokenizer, num: int, length: int) -> list[str]:
    """Evenly spaced pieces of a corpus as text, `length` tokens each."""
    last = len(shards) - length
    if last < 0 or num < 1:
        raise UserError(
            f"{num} prompts of {length} tokens from a {shards.name} split of {len(shards)} tokens: give more text or "
            "shorter prompts"
        )
    starts = np.unique(np.linspace(0, last, num).astype(np.int64))
    texts = [tokenizer.decode(shards.tokens[s : s + length].tolist()).strip("�") for s in starts]
    return [t for t in texts if t.strip()]


def listed_prompts(path: str, num: int, num_held_out: int) -> tuple[list[str], list[str]]:
    """Prompts of a .jsonl or .json list; evenly spaced ones are held out."""
    found = read_prompts(path, num + num_held_out)
    if len(found) < 2 * num_held_out:
        raise UserError(
            f"prompts={path} has {len(found)} prompts; {num_held_out} are held out to measure on, so give at least "
            f"{2 * num_held_out} or a smaller held_out"
        )
    every = len(found) / num_held_out
    apart = {int(i * every) for i in range(num_held_out)}
    return [p for i, p in enumerate(found) if i not in apart], [found[i] for i in sorted(apart)]


# -- training -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Steps and learning rate; the same for a reference and its drafter."""

    steps: int
    lr: float
    warmup: int
    weight_decay: float = 0.0
    clip: float = 1.0
    save_every: int = 0
    eval_every: int = 0
    seed: int = 0  # of the generators that checkpoints keep
    resume_from: ResumeFrom = "newest"
    save_last: bool = True  # the last step too, where there are checkpoints


def score_text(
    folder: Path, target: Decoder, data: TokenData, *, k: int, steps: int | None = None, progress: Any = None
) -> TeacherCache:
    """The target's top-k of every window that `steps` training steps see."""
    identity = {"data": data.shards.fingerprint, "context": data.context, "target": repr(target.spec)}
    k = min(k, target.spec.vocab_size)
    with torch.no_grad():
        first = target(data.shards.head(min(64, data.context))[None].to(target.device))
    if bool(first.isnan().any()):  # before all of the text is scored
        raise NanLikelihood
    return build_cache(
        folder, target, one_epoch(data, steps), num_targets=len(data.shards), k=k, identity=identity, progress=progress
    )


def reference_losses(
    folder: Path, objective: DraftDistill, reference: Decoder, data: TokenData, *, steps: int | None = None
) -> ScalarCache:
    """The reference's KL on every token that `steps` training steps see."""
    device = reference.device
    return build_scalar_cache(
        folder,
        lambda micro: objective.losses(reference, micro.to(device)),
        one_epoch(data, steps),
        num_targets=len(data.shards),
        identity={"data": data.shards.fingerprint, "context": data.context},
    )


def make_objective(
    cache: TeacherCache,
    *,
    loss: str = "kl",
    vocab_ids: Sequence[int] | None = None,
    reference: ScalarCache | None = None,
    fraction: float = 0.4,
    on_policy: float = 0.0,
    target: Decoder | None = None,
    num_new: int = 64,
    seed: int = 0,
) -> DraftDistill | OnPolicy:
    """DistillSpec with any loss; AdaSPEC where a reference is given. `on_policy` is the share of micro-batches on the
    drafter's own text, which `target` scores."""
    selection = None
    if reference is not None:
        selection = Selection(lambda micro: reference.lookup(micro.index_BT), fraction)
    cached = DraftDistill(lambda micro: cache.lookup(micro.index_BT), loss, vocab_ids=vocab_ids, selection=selection)
    if not on_policy:
        return cached
    if target is None:
        raise UserError("text that the drafter writes is scored by the target; give it")
    own = DraftDistill(LiveScores(target, cache.k), loss, vocab_ids=vocab_ids)
    writer = engine_writer(vocab_ids, target.spec.vocab_size)
    return OnPolicy(writer, own, cached, share=on_policy, num_new=num_new, seed=seed)


def distil(
    drafter: Decoder,
    data: TokenData,
    objective: Objective,
    schedule: Schedule,
    mesh: Mesh,
    log: RunLog,
    *,
    checkpoints: Path | None = None,
    evaluate: Callable[[Run], dict[str, float]] | None = None,
) -> Decoder:
    """Train the drafter in place, from its newest checkpoint where there is one."""
    run = Run(drafter, adamw(drafter, lr=schedule.lr, weight_decay=schedule.weight_decay), mesh, log)
    saver = None
    if checkpoints is not None:
        how: dict[str, Any] = {"seed": schedule.seed, "resume_from": schedule.resume_from}
        last = schedule.steps if schedule.save_last else None
        saver = Checkpointer(checkpoints, every=schedule.save_every, last=last, **how)
    train(
        run,
        data,
        objective,
        steps=schedule.steps,
        schedule=warmup_cosine(schedule.lr, warmup=schedule.warmup, steps=schedule.steps),
        clip=schedule.clip,
        checkpointer=saver,
        evaluate=evaluate,
        eval_every=schedule.eval_every,
    )
    return drafter


def forced_acceptance(
    target: Decoder, corpus: Corpus, context: int, *, rows: int, k: int, vocab_ids: Sequence[int] | None
) -> Callable[[Run], dict[str, float]] | None:
    """Mean acceptance and KL on the validation split's text, for curves. Teacher forced, so higher than in decoding,
    where a drafter reads its own mistakes. None: the split is too small."""
    num_rows = min(rows, max(0, len(corpus.val) - 1) // context)
    if not num_rows:
        return None
    device = target.device
    micro = TokenData(corpus.val, context=context, batch=num_rows).step(0)[0].to(device)
    top = LiveScores(target, min(k, target.spec.vocab_size))(micro)
    objective = DraftDistill(lambda _: top, vocab_ids=vocab_ids)
    if micro.num_counted == 0:
        return None

    def evaluate(run: Run) -> dict[str, float]:
        missed = objective.losses(run.model, micro, "tvd").sum() / micro.num_counted
        return {
            "val_acceptance": 1 - float(missed),
            "val_loss": float(objective.losses(run.model, micro).sum()) / micro.num_counted,
        }

    return evaluate


# -- the drafter's own text ---------------------------------------------------------------------------------


def engine_writer(vocab_ids: Sequence[int] | None, vocab_size: int) -> Generate:
    """Continues rows with the model being trained; a trimmed drafter samples from its own vocabulary.

    One engine for all calls of a shape: its graphs stay, and its copies of the weights are written again."""
    engines: dict[tuple[int, int, int], Engine] = {}
    barred_V = None
    if vocab_ids is not None:
        barred_V = torch.ones(vocab_size, dtype=torch.bool)
        barred_V[torch.tensor(sorted(vocab_ids))] = False

    def within(logits_RV: Tensor, checks: Sequence[Check]) -> list[list[int]]:
        assert barred_V is not None
        return verify(logits_RV.masked_fill(barred_V.to(logits_RV.device), -torch.inf), checks)

    def generate(model: nn.Module, prompts_BP: Tensor, num_new: int, seed: int) -> Tensor:
        assert isinstance(model, Decoder)
        rows, length = prompts_BP.shape
        engine = engines.get((rows, length, num_new))
        if engine is None or engine.model is not model:
            engine = engines[rows, length, num_new] = Engine(
                model,
                max_requests=rows,
                max_context=length + num_new,
                chunk=max(512, rows * length),
                prefix_cache=False,
                verify=verify if barred_V is None else within,
            )
        else:
            engine.runner.weights_written(WeightsVersion("training", seed))
        samplings = [
            Sampling(temperature=1.0, seed=seed + row, max_tokens=num_new, ignore_eos=True) for row in range(rows)
        ]
        texts = engine.generate(prompts_BP.tolist(), samplings)
        written = torch.tensor([c.token_ids for c in texts], device=prompts_BP.device)
        return torch.cat([prompts_BP, written], dim=1)

    return generate
