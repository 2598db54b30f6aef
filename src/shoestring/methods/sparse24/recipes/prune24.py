"""Prune a pretrained model to 2:4: one-shot (SparseGPT, Wanda or magnitude), then retrain it (AST), with SLoRB.

Run:     shoestring run shrink/prune24 model=DIR calib=some.txt data=texts/ steps=2000 text=other.txt
         shoestring run shrink/prune24 model=DIR calib=some.txt train=none               one-shot only, no data
         shoestring run shrink/prune24 model=DIR calib=some.txt data=texts/ slorb=16     with a branch over block sums
         shoestring run shrink/prune24 model=DIR calib=some.txt data=texts/ train=cast   dense until the end
         shoestring run shrink/prune24 model=DIR calib=some.txt data=self prompts=questions.jsonl     on its own text
         shoestring run shrink/prune24 resume=RUN        continues after Ctrl-C or a crash
         torchrun --nproc-per-node 4 -m shoestring run shrink/prune24 mesh.dp=4 ...
Needs:   one-shot: the model in fp32 or bf16 on the device, or one block of it (stream=true, the model in the host's
         memory), and one block's activations (or disk: memory_gb); at the end 3 bytes a weight in the host's memory
         (5 in fp32 or with slorb).
         Retraining: 16 bytes a weight for the student and the model again as its teacher; a GPU beyond toy sizes
Time:    SmolLM2-135M, SparseGPT: 6 minutes of a CPU core with 12 windows of 512, half a minute on an H200 with 32;
         2,441 steps of AST with 16k tokens each: 7 minutes on an H200 that has two such runs, compile=blocks
Expect:  SmolLM2-135M, WikiText-2, context 2048: perplexity 18.5 dense; one-shot 5,664 (magnitude), 98 (wanda), 40.3
         (sparsegpt, calib_windows=64), 38.4 (with slorb=16); retrained on 40M tokens of free English and of what the
         model wrote (lr=3e-4): 24.0 (ast), 25.0 (start=dense), 23.8 (slorb=16), 30.3 (train=cast
         lr=5e-4)
Leaves:  a run folder with model/ (Hugging Face, zeros in dense weights; with slorb the branch is added in, which makes
         them dense again), packed/ (9 bits per weight, 10 with slorb=16), pruning.json in both (what was counted:
         every pruned layer is 2:4), oneshot/, checkpoints/, flip rates and magnitudes in metrics.jsonl, report.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoestring.formats import convert
from shoestring.mesh import open_mesh
from shoestring.methods.sparse24 import stages as stages
from shoestring.methods.sparse24.retrain import gather
from shoestring.methods.sparse24.stages import RECIPE
from shoestring.model import Decoder, load_model
from shoestring.model.folder import LoadedModel, read_spec
from shoestring.recipes.shrink_run import deliver_or_refuse, open_run, run_once
from shoestring.shrink.quality_gate import judge, verify_model
from shoestring.shrink.whole_model import check_embedding


@dataclass(frozen=True)
class Config(stages.Prune24Settings):
    """stages.py has the settings."""


def main(cfg: Config) -> Path:
    stages.check(cfg)
    settings = None if cfg.train == "none" else stages.retraining(cfg)
    mesh = open_mesh(cfg.mesh, cfg.device)
    rules, method = stages.make_rules(cfg), stages.pruner(cfg)
    spec, tokenizer = read_spec(cfg.model)
    with torch.device("meta"):
        blank = Decoder(spec)
        convert(blank, rules)  # raises for layers that cannot be 2:4
    check_embedding(blank, rules, cfg.embed)
    if settings is not None:
        stages.check_memory(cfg, spec, mesh)
    calib_NT = stages.check_texts(cfg, LoadedModel(blank, tokenizer, spec, Path(cfg.model))) if mesh.is_main else None
    with open_run(RECIPE, cfg, cfg.model, device=mesh.device, mesh=mesh) as run:
        folder = run.folder
        evaluated = stages.EvaluatedText(cfg.model, cfg.text, cfg.calib_context, cfg.max_tokens)
        given = (cfg, run, rules, method, calib_NT, evaluated)
        run_once(mesh, folder, "pruned", lambda: stages.prune_one_shot(*given))
        notes: dict[str, Any] = {"one_shot": cfg.method}
        whole = None
        if settings is not None:
            if cfg.data == "self":
                run_once(mesh, folder, "written", lambda: stages.write_text(cfg, run))
            corpus = stages.training_text(cfg, folder, run.log, tokenizer)
            tokens = cfg.steps * cfg.batch * cfg.context
            notes |= {"train": cfg.train, "train_tokens": tokens, "unique_tokens": min(tokens, len(corpus.train))}
            whole = gather(stages.train_student(cfg, settings, rules, run, corpus), rules, mesh)
        elif mesh.is_main:
            # As it was written; a branch is kept in fp32 until it is packed.
            whole = stages.load_pruned(folder, rules, torch.float32 if cfg.slorb else run.compute)
        reason = None
        if whole is not None:
            coverage = stages.deliver_pruned(run, whole, rules, tokenizer, cfg.embed, **notes)
            if settings is not None:
                loaded = load_model(folder / "packed", device=mesh.device, dtype=run.compute)
                verify_model(loaded.model, cfg.verify)
                evaluated.measure(run, loaded, f"{cfg.train}{' + slorb' if cfg.slorb else ''}")
            reason = judge(whole, run.log, max_perplexity=cfg.max_perplexity, force=cfg.force)
        deliver_or_refuse(run, reason, folder / "model", folder / "packed")
        if whole is not None:
            stages.report_pruned(run, coverage, trained=settings is not None)
    mesh.barrier()
    mesh.close()
    return folder
