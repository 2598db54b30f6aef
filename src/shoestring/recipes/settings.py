"""Settings that several recipes share. A recipe's Config is composed of them, and says again only what differs.

`deciding=False`: a resumed run may change it, because nothing that a stopped run has done depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoestring.config import option
from shoestring.mesh import MeshConfig
from shoestring.shrink.quality_gate import MAX_PERPLEXITY
from shoestring.shrink.whole_model import EMBED, EMBED_HELP
from shoestring.state.checkpointer import ResumeFrom


@dataclass(frozen=True)
class RunSettings:
    device: str = option("auto", "auto, cpu, cuda or cuda:1 ...", deciding=False)
    run: str | None = option(None, "folder for this run; none makes runs/RECIPE-DATE", deciding=False)


@dataclass(frozen=True)
class ResumeSettings(RunSettings):
    resume: str | None = option(None, "a stopped run folder to continue; its settings are used", deciding=False)


@dataclass(frozen=True)
class TrainSettings(ResumeSettings):
    steps: int = option(1000, "optimizer steps", least=1, deciding=False)
    batch: int = option(16, "rows per step over all ranks", least=1, deciding=True)
    context: int = option(1024, "tokens per row", least=1, deciding=True)
    micro: int | None = option(
        None,
        "rows per forward pass on one rank, to save memory; none: all at once",
        least=1,
        advanced=True,
        deciding=False,
    )
    seed: int = option(0, "random seed of the order of the data", least=0, deciding=True)
    dtype: Literal["auto", "fp32", "bf16"] = option("auto", "compute precision, masters are fp32; auto: bf16 on a GPU")
    save_every: int = option(200, "steps between checkpoints; 0 saves only on Ctrl-C", least=0, deciding=False)
    resume_from: ResumeFrom = option(
        "newest", "previous: from the checkpoint before the newest, which is set aside", advanced=True, deciding=False
    )


@dataclass(frozen=True)
class ScheduleSettings:
    lr: float = option(1e-3, "peak learning rate", least=0)
    warmup: int = option(50, "steps of linear warm-up", least=0)
    eval_every: int = option(100, "steps between validation losses; 0 is off", least=0, deciding=False)


@dataclass(frozen=True)
class OptimSettings(ScheduleSettings):
    schedule: Literal["cosine", "wsd"] = option(
        "cosine", "cosine to a tenth, or stable, then linear to zero", advanced=True, deciding=False
    )
    weight_decay: float = option(0.0, "AdamW decay of the matrices", least=0, advanced=True, deciding=False)


@dataclass(frozen=True)
class RanksSettings:
    """Of training on one or several processes."""

    clip: float = option(1.0, "largest gradient norm; 0 is off", least=0, advanced=True, deciding=False)
    recompute: bool = option(
        False,
        "keep one activation per block, recompute the rest: less memory, more time",
        advanced=True,
        deciding=False,
    )
    compile: Literal["off", "blocks", "whole"] = option(
        "off", "torch.compile each block, or all as one graph", advanced=True, deciding=False
    )
    mesh: MeshConfig = option(MeshConfig(), "how processes share the work", deciding=False)
    log_every: int = option(10, "steps between lines of metrics.jsonl", least=1, advanced=True, deciding=False)


@dataclass(frozen=True)
class SourceSettings:
    model: str = option("", "a Hugging Face folder, a run folder or a .gguf file; required without resume=")


@dataclass(frozen=True)
class FormatSettings:
    """What becomes of the weights, and where they go."""

    format: str = option("nf3", "for all linear layers: int2 int3 int4 int8 nf2 nf3 nf4 fp3 fp4, with :g128 :s1")
    rules: str | None = option(None, "instead of format: glob=format;glob=format, the first that matches wins")
    embed: str = option(EMBED, EMBED_HELP)
    out: str | None = option(None, "folder for the packed model; none puts it into the run folder", deciding=False)


@dataclass(frozen=True)
class CalibSettings:
    calib: str | None = option(None, "calibration text or corpus")
    calib_windows: int = option(32, "windows of calibration text", least=1)
    calib_context: int = option(512, "tokens in a window", least=1)


@dataclass(frozen=True)
class OffloadSettings:
    stream: Literal["auto", "true", "false"] = option(
        "auto",
        "true: the model stays in the host's memory and one block at a time goes to the device; auto: where the "
        "whole model would take more than half of the device's free memory",
        advanced=True,
        deciding=False,
    )
    memory_gb: float = option(4.0, "activations beyond this go to a file", least=0, advanced=True, deciding=False)
    spill: str | None = option(
        None, "folder for that file; none: the system's temporary folder", advanced=True, deciding=False
    )


@dataclass(frozen=True)
class MixSettings:
    bits_budget: float | None = option(
        None,
        "instead of format: bits per weight at most, metadata included; each layer gets one of the candidates, by "
        "measured damage",
    )
    candidates: str = option("int2,int3,int4", "bits_budget: the formats to choose from", advanced=True)
    damage_windows: int = option(
        4, "bits_budget: windows of text that the damage is measured on", least=1, advanced=True
    )


@dataclass(frozen=True)
class EvalSettings:
    """Of recipes that run the model and do not train it as a whole."""

    text: str | None = option(None, "a text file: perplexity before and after")
    data: str | None = option(None, "or a corpus: its validation split. A run is evaluated on its own by default")
    max_tokens: int = option(16384, "tokens of the text to evaluate at most", least=2, advanced=True)
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option("auto", "compute precision; auto: bf16 on a GPU")


@dataclass(frozen=True)
class RoundSettings(EvalSettings):
    """... and whose result is the rounded model."""

    context: int = option(512, "tokens the model sees at once in the evaluation", least=2, advanced=True)
    dense_out: str | None = option(
        None, "also write the rounded weights as a dense Hugging Face folder", advanced=True, deciding=False
    )


@dataclass(frozen=True)
class GateSettings:
    """Of shrink/quality_gate.py."""

    verify: Literal["auto", "true", "false"] = option(
        "auto",
        "run one short input through the packed model and compare with its decoded weights; auto: up to 2B",
        advanced=True,
        deciding=False,
    )
    max_perplexity: float = option(
        MAX_PERPLEXITY,
        "do not deliver a model whose perplexity is more than this many times the original one",
        least=1,
        advanced=True,
        deciding=False,
    )
    force: bool = option(
        False, "deliver the model even if it is broken or its perplexity exceeds max_perplexity", deciding=False
    )
