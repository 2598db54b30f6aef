"""The target of experiments/drafter.py: all sizes, a target trained on the spot, and the text it writes.

Speculation gains where a pass of the target is expensive, the drafter's is cheap, and the drafter knows the kind of
text. A model that is large enough for this and is trained within a minute is not a good model: its validation loss is
reported beside the results.

The target is trained for given seconds, and the learning rate follows the clock. A deep one starts with fewer layers,
whose steps are cheaper; after a part of the time, blocks with output weights of 0 are inserted between them (block
expansion, Wu et al. 2024). Then all blocks are trained.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.drafter_speed import clock, inference
from experiments.python_corpus import open_prepared
from experiments.stories260k import StoryCodec, load_stories
from shoestring.evals.perplexity import perplexity
from shoestring.mesh import Mesh
from shoestring.methods.drafter import model as drafter_model
from shoestring.methods.drafter.training import piece_prompts
from shoestring.model import Decoder, ModelSpec, Tokenizer
from shoestring.model.parallel import ParallelConfig, init_weights, materialize, parallelize
from shoestring.runlog import RunLog, write_atomically
from shoestring.serve import Engine, Sampling
from shoestring.train.corpus import documents
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, constant, warmup_cosine
from shoestring.train.shards import Corpus, TokenShards, tokenize_corpus
from shoestring.train.step import Run
from shoestring.train.trainer import train


@dataclass(frozen=True)
class Size:
    shape: dict[str, Any]  # of the target
    vocab_size: int
    max_mb: float  # of text
    context: int
    batch: int  # rows of a step of its training
    seconds: float  # of the target's training
    begins: int  # with so many layers; 0: with all
    lr: float
    layers: int  # of the drafter
    vocab: int  # tokens in the drafter's head; 0: all
    own_text: int  # texts that the target writes for drafters to learn from; 0: they learn from the corpus
    draft_context: int
    draft_batch: int
    draft_steps: int
    draft_lr: float
    num_new: int  # tokens that an on-policy drafter writes per row
    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    at_once: int  # requests at once where acceptance is measured
    repeats: int
    text_seconds: float = 1e9  # of that writing
    deep_share: float = 1 / 3  # of the target's seconds: with all layers
    deep_micro: int | None = None  # rows of a pass with all layers
    compiled: bool = False  # on a GPU: the blocks while they are trained
    # A small model that is trained on the target's corpus, for drafters that begin with it; 0 layers: none.
    small_layers: int = 0
    small_width: int = 0
    small_batch: int = 0
    small_seconds: float = 0.0
    small_lr: float = 0.0

    def small_spec(self, target: ModelSpec) -> ModelSpec:
        return drafter_model.fresh(target, num_layers=self.small_layers, d_model=self.small_width).spec


# Wide layers: a pass over 5 rows costs about as much as one over 1 row, which speculation needs.
GPU = {
    "d_model": 3072, "num_layers": 24, "num_heads": 48, "num_kv_heads": 12, "head_dim": 64, "d_ff": 8192,
}  # fmt: skip
MEDIUM = {"d_model": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "d_ff": 1536}
CPU = {"d_model": 192, "num_layers": 6, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "d_ff": 512}
SIZES = {
    "gpu": Size(
        GPU, 4096, 9.0, 512, 8, 50.0, 6, 4e-4, 1, 0, 4096, 256, 32, 250, 3e-4, 48, 64, 64, 96, 64, 8, 22.0,
    ),
    # The same shape, trained for longer, alone on the GPU.
    "long": Size(
        GPU, 4096, 80.0, 512, 32, 330.0, 4, 5e-4, 1, 0, 8192, 256, 32, 800, 3e-4, 48, 64, 64, 96, 64, 3, 40.0,
        deep_share=0.3, deep_micro=16, compiled=True,
        small_layers=4, small_width=1024, small_batch=64, small_seconds=60.0, small_lr=1e-3,
    ),
    # 80M tokens in three minutes of a third of an H200: for acceptance, too small for speeds.
    "medium": Size(
        MEDIUM, 4096, 80.0, 512, 64, 150.0, 0, 1.5e-3, 2, 0, 16384, 256, 32, 400, 1e-3, 24, 32, 64, 96, 96, 3, 22.0,
        compiled=True,
    ),
    # For a given model: a head of the frequent tokens, since its vocabulary is large.
    "given": Size({}, 0, 24.0, 512, 0, 0.0, 0, 0.0, 2, 8192, 0, 512, 16, 250, 1e-3, 48, 64, 64, 96, 32, 3),
    "cpu": Size(CPU, 2048, 8.0, 128, 16, 150.0, 0, 2e-3, 1, 0, 0, 128, 8, 60, 1e-3, 32, 64, 32, 80, 16, 2),
    # stories260K: a target that was trained to the end, on a CPU.
    "stories": Size({}, 0, 2.1, 0, 0, 0.0, 0, 0.0, 2, 0, 0, 128, 8, 200, 1e-3, 32, 64, 32, 48, 64, 2),
    "smoke": Size(
        CPU, 512, 1.0, 64, 8, 3.0, 2, 2e-3, 1, 0, 16, 64, 8, 6, 1e-3, 16, 4, 16, 16, 4, 2,
        small_layers=2, small_width=64, small_batch=8, small_seconds=1.0, small_lr=2e-3,
    ),
}  # fmt: skip


def english_and_python(english: Path, folder: Path, max_mb: float) -> str:
    """A corpus in `folder` of the .txt files of `english` (none of them WikiText's test text) and of as much Python of
    this machine as there is room for, in the order of a hash, so that every part of it is a mixture."""
    path = folder / "english_and_python.jsonl"
    if not path.is_file():
        paths = [p for p in sorted(english.rglob("*.txt")) if p.name != "test.txt"]
        texts = [d.text for p in paths for d in documents(str(p))]
        room = int(max_mb * 1e6) - sum(len(t.encode()) for t in texts)
        texts += [d.text for d in documents("python", max_bytes=max(1, room))]
        texts.sort(key=lambda text: hashlib.blake2b(text.encode(), digest_size=8).digest())
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def train_target(
    size: Size,
    device: torch.device,
    dtype: torch.dtype,
    steps: int | None = None,
    prepared: Path | None = None,
    data_of: str = "python",
) -> tuple[Decoder, Corpus, str]:
    """A model, its corpus and its name in the results. `steps` None: as many as the seconds allow. `prepared`: a
    tokenised corpus of Python from another machine."""
    with clock("corpus"):
        if prepared is not None:
            corpus = open_prepared(prepared)
        else:
            corpus = tokenize_corpus(data_of, vocab_size=size.vocab_size, max_bytes=int(size.max_mb * 1e6))
    spec = ModelSpec(
        vocab_size=corpus.tokenizer.vocab_size, max_positions=size.context, eos_id=corpus.tokenizer.eos_id, **size.shape
    )
    data = TokenData(corpus.train, context=size.context, batch=size.batch)
    log = RunLog(None, quiet=True)
    compiled = size.compiled and device.type == "cuda"
    if steps is None and size.begins:
        small = _fresh(replace(spec, num_layers=size.begins), device, dtype, compiled)
        run, seconds = _run(small, size.lr, log), (1 - size.deep_share) * size.seconds
        done = train_for(run, data, size.lr, seconds, compiles=compiled)
        target = expand(small, _fresh(spec, device, dtype, compiled))
        data = TokenData(corpus.train, context=size.context, batch=size.batch, micro=size.deep_micro)
        del small, run
        gc.collect()
        run, lr, seconds = _run(target, size.lr, log, done), size.lr / 2, size.deep_share * size.seconds
    else:
        target = _fresh(spec, device, dtype, compiled)
        run, lr, seconds = _run(target, size.lr, log), size.lr, size.seconds
    if steps is None:
        steps = train_for(run, data, lr, seconds, compiles=compiled)
    else:
        schedule = warmup_cosine(size.lr, warmup=max(1, steps // 10), steps=steps)
        train(run, data, CrossEntropy(), steps=steps, schedule=schedule)
    del run
    num_tokens = steps * data.tokens_per_step
    target, found = _finished(target, compiled, size, corpus, log, num_tokens)
    name = f"Llama shape {spec.num_layers}x{spec.d_model}, {spec.num_params() / 1e6:,.0f}M parameters, trained on "
    text = "Python" if prepared is not None or data_of == "python" else "English and Python"
    name += f"{num_tokens / 1e6:.1f}M tokens of {text} (validation perplexity {found:.0f}, {spec.vocab_size} tokens)"
    return target, corpus, name


def train_small(size: Size, target: Decoder, corpus: Corpus) -> tuple[Decoder, int, float]:
    """A small model of the target's corpus, its tokens and its perplexity."""
    device, dtype = target.device, target.compute_dtype
    compiled, log = size.compiled and device.type == "cuda", RunLog(None, quiet=True)
    small = _fresh(size.small_spec(target.spec), device, dtype, compiled)
    data = TokenData(corpus.train, context=size.context, batch=size.small_batch)
    steps = train_for(_run(small, size.small_lr, log), data, size.small_lr, size.small_seconds, compiles=compiled)
    num_tokens = steps * data.tokens_per_step
    small, found = _finished(small, compiled, size, corpus, log, num_tokens)
    return small, num_tokens, found


def _finished(
    model: Decoder, compiled: bool, size: Size, corpus: Corpus, log: RunLog, num_tokens: int
) -> tuple[Decoder, float]:
    """A trained model, ready for use, and its perplexity."""
    losses, dtype = [row["loss"] for row in log.history if "loss" in row], model.compute_dtype
    if compiled:  # blocks that are compiled for training would be compiled again for every other use
        trained, model = model, _fresh(model.spec, model.device, dtype)
        model.load_state_dict(trained.state_dict())
        del trained
    model = inference(model, dtype)
    found = perplexity(model, corpus.val.head(16 * size.context), context=size.context).value
    first, last = (losses[0], losses[-1]) if losses else (math.nan, math.nan)
    print(f"loss {first:.2f} -> {last:.2f} on {num_tokens / 1e6:.1f}M tokens, perplexity {found:.1f}", flush=True)
    return model, found


def _fresh(spec: ModelSpec, device: torch.device, dtype: torch.dtype, compiled: bool = False) -> Decoder:
    with torch.device("meta"):
        model = Decoder(spec)
    parallelize(model, Mesh(0, 1, device), ParallelConfig(compile="blocks" if compiled else "off", compute_dtype=dtype))
    materialize(model, device)
    init_weights(model, 0)
    return model


def _run(model: Decoder, lr: float, log: RunLog, step: int = 0) -> Run:
    return Run(model, adamw(model, lr=lr), Mesh(0, 1, model.device), log, step)


@torch.no_grad()
def expand(small: Decoder, large: Decoder) -> Decoder:
    """The same function with more blocks: those of `small`, evenly spread, and others with output weights of 0."""
    every, rest = divmod(len(large.blocks), len(small.blocks))
    assert not rest, "the number of layers must be a multiple of those it begins with"
    for block in large.blocks:
        for part in (block.attn.o, block.mlp.down):  # type: ignore[union-attr]
            part.weight.zero_()  # type: ignore[union-attr, operator]
    for name, param in small.named_parameters():
        if name.startswith("blocks."):
            _, index, rest_of_name = name.split(".", 2)
            name = f"blocks.{int(index) * every}.{rest_of_name}"
        large.get_parameter(name).copy_(param)
    return large


def train_for(run: Run, data: TokenData, lr: float, seconds: float, *, compiles: bool = False) -> int:
    """As many steps as fit: the rate rises over a tenth of the time and falls to a tenth over the rest. `compiles`: in
    two steps before the clock begins, at a rate of almost 0."""
    if compiles:
        train(run, data, CrossEntropy(), steps=run.step + 2, schedule=constant(lr / 100))
    began, first = time.perf_counter(), run.step
    while (share := (time.perf_counter() - began) / seconds) < 1:
        rate = lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * max(0.0, share - 0.1) / 0.9)))
        rate *= min(1.0, (share + 0.01) / 0.1)
        steps = run.step + (2 if share < 0.5 else max(1, min(10, (run.step - first) // 10)))
        train(run, data, CrossEntropy(), steps=steps, schedule=constant(rate), log_every=10)
    layers = run.model.spec.num_layers  # type: ignore[union-attr]
    print(f"[{time.perf_counter() - began:.1f} s: to step {run.step}, {layers} layers]", flush=True)
    return run.step


def open_stories(assets: Path, max_mb: float) -> tuple[Decoder, TokenShards, TokenShards]:
    """stories260K, and TinyStories in its tokens: the stories to learn from, and every 50th, held out. The target may
    have been trained on these."""
    codec = StoryCodec(assets / "models/stories260k/tok512.bin")
    splits: dict[str, list[int]] = {"train": [], "val": []}
    found = documents(str(assets / "text/tinystories_2M.txt"), max_bytes=int(max_mb * 1e6))
    for i, story in enumerate(found):
        splits["train" if i % 50 else "val"] += codec.encode(story.text)
    train, val = (
        TokenShards(np.array(ids, np.uint16), None, hashlib.blake2b(np.array(ids).tobytes()).hexdigest(), name)
        for name, ids in splits.items()
    )
    return load_stories(assets / "models/stories260k/stories260K.bin"), train, val


def write_own_text(target: Decoder, corpus: Corpus, size: Size, folder: Path) -> Corpus:
    """The target's completions of pieces of its corpus, half greedy and half sampled at temperature 1, as in the
    measurement; a corpus in which the pieces do not count. Batch by batch, until the time is over."""
    tokenizer, length, began = corpus.tokenizer, size.draft_context, time.perf_counter()
    pieces = piece_prompts(corpus.train, tokenizer, size.own_text, size.prompt_tokens)
    prompts = [tokenizer.encode(piece)[: length - 1] for piece in pieces]
    at_once = min(len(prompts), 256 if target.embed.weight.is_cuda else 16)
    engine = Engine(target, max_requests=at_once, max_context=length, chunk=max(512, 8 * at_once), prefix_cache=False)
    # Every batch is spread over the corpus, so that a text cut short is still a sample of all of it.
    batches = [prompts[i :: -(-len(prompts) // at_once)] for i in range(-(-len(prompts) // at_once))]
    lines: list[str] = []
    num_new = 0
    for i, batch in enumerate(batches):
        if i > 1 and time.perf_counter() - began > size.text_seconds:
            break
        samplings = [
            Sampling(temperature=float(i % 2), seed=i * at_once + j, max_tokens=length - len(p), ignore_eos=True)
            for j, p in enumerate(batch)
        ]
        for prompt, done in zip(batch, engine.generate(batch, samplings), strict=True):
            num_new += len(done.token_ids)
            told = {"prompt": tokenizer.decode(prompt), "completion": tokenizer.decode(done.token_ids)}
            if told["completion"].strip():
                lines.append(json.dumps(told) + "\n")
    (folder / "text").mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "text" / "own.jsonl", "".join(lines))
    print(f"[{time.perf_counter() - began:.1f} s: {len(lines)} texts, {num_new / 1e3:,.0f}k new tokens]", flush=True)
    return open_own_text(tokenizer, folder)


def open_own_text(tokenizer: Tokenizer, folder: Path) -> Corpus:
    return tokenize_corpus(str(folder / "text"), folder / "corpus", tokenizer=tokenizer, val_fraction=0.0)
