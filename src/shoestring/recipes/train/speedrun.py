"""Pre-train at the frontier: the recipe that reaches a loss in the fewest seconds, in one file.

    model       Qwen3's architecture (QK-norm, gated feed-forward layers, no biases), untied head: exports everywhere
    weights     output projections and head begin as zeros
    optimizer   Muon for the matrices of blocks, AdamW for the rest, one lr= for all widths
    schedule    constant, then linear to zero over the last 60% of the steps

Run:     shoestring run train/speedrun data=python
         shoestring run train/speedrun data=my/texts d_model=1024 num_layers=16 steps=5000
         shoestring run train/speedrun optimizer=adamw lr=2e-3      each part can be off: also qk_norm=false tied=true
                                                                    init=gpt2 schedule=cosine
         shoestring run train/speedrun size=tiny batch=8 context=128 compile=off     on a CPU
         shoestring run train/speedrun resume=runs/train-speedrun-...
Needs:   a GPU with 24 GB free for 64 rows of 1,024 tokens; micro=16 for a quarter of that
Time:    500 steps of 65,536 tokens: a minute on an H200, and half as long again to compile
Expect:  a validation loss of 3.22 with steps=100 (6.6M tokens of Python seen once, max_mb=160). With heads of 64 3.32,
         and 1.66 after 500 steps, where AdamW with Llama's shape ends at 2.07
Leaves:  a run folder as train/dense does
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoestring.config import option
from shoestring.model.parallel import CompileMode, InitialWeights
from shoestring.recipes.train import dense
from shoestring.train.pretraining import Size


@dataclass(frozen=True)
class Config(dense.Config):
    size: Size = option("base-6heads")
    qk_norm: bool = option(True)
    tied: bool = option(False)
    init: InitialWeights = option("zero")
    vocab_size: int = option(8192)

    optimizer: Literal["adamw", "muon"] = option("muon")
    lr: float = option(3e-3, "AdamW's rate of norms and biases; other groups follow it (train/muon.py)")
    weight_decay: float = option(0.0)
    warmup: int = option(0)
    cooldown: float = option(0.6)

    steps: int = option(500)
    batch: int = option(64)
    context: int = option(1024)
    compile: CompileMode = option("whole")


def main(cfg: Config) -> Path:
    return dense.pretrain(cfg, "train/speedrun")
