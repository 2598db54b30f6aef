"""The models that experiments/lowbit_quality shrinks: SmolLM2-135M, two that are trained here, and stories260K."""

from __future__ import annotations

import argparse
import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.smollm2 import need_smollm2, novels
from experiments.lowbit_methods import Subject
from experiments.stories260k import BOS, StoryCodec, load_stories
from experiments.trained_model import fingerprint, open_trained
from shoestring.model import load_model
from shoestring.recipes.train import dense
from shoestring.serve.engine.sampling import Sampling
from shoestring.shrink.blockwise import Blockwise
from shoestring.shrink.calibrate import windows
from shoestring.shrink.qat import Rates
from shoestring.shrink.self_text import generate_text, read_prompts
from shoestring.train.corpus import END_OF_TEXT
from shoestring.train.shards import TokenShards, tokenize_corpus

SMOLLM2, STORIES = "SmolLM2-135M-Instruct", "stories260K"
KEPT = "GPT-2's small shape, trained here"  # a dense row of experiments/sparse24_quality
LLAMA = "Llama of width 256, trained here"
TASKS = ("lambada_openai", "arc_easy", "piqa", "openbook_qa")
NOTES = {
    SMOLLM2: "linear layers only; training text written by the model itself",
    KEPT: "linear layers only; training text is the model's own corpus",
    LLAMA: "linear layers only; trained on stories that the model was trained on, measured on others",
    STORIES: "linear layers but the down projections (172 wide); trained on other stories than those measured",
}
HELD_OUT = 80  # stories that are measured, and as many that choose
# 1,024,000 tokens: some minutes on one core of a CPU.
LLAMA_256: dict[str, Any] = {
    "vocab_size": 1024, "d_model": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "d_ff": 512,
    "context": 128, "batch": 16, "steps": 500, "lr": 2e-3, "warmup": 50, "device": "cpu",
}  # fmt: skip
SMALL_RATES = Rates(weight=1e-2, scale=5e-4, zero=3e-3, norm=5e-3, rest=2e-2)


def on_gpu() -> bool:
    return torch.cuda.is_available()


def smollm2(args: argparse.Namespace, folder: Path) -> Subject:
    path = args.model or need_smollm2()
    loaded = load_model(path, device="cuda" if on_gpu() else "cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    if on_gpu():
        model.compute_dtype = torch.bfloat16
    texts = args.assets / "text/wikitext-2"
    test, valid = (torch.tensor(tokenizer.encode((texts / f"{n}.txt").read_text())) for n in ("test", "valid"))
    began = time.perf_counter()
    text = args.text
    if text is None:
        prompts = read_prompts(str(texts / "valid.txt"), args.prompts)
        sampling = Sampling(temperature=0.7, max_tokens=args.max_new, seed=0)
        out = folder / "self.jsonl"
        text = generate_text(model.eval(), tokenizer, prompts, out, sampling=sampling)
    corpus = tokenize_corpus(str(text), folder / "tokens", tokenizer=tokenizer, val_fraction=0.0)
    seconds = time.perf_counter() - began
    print(f"{len(corpus.train):,} tokens of text, {seconds:.0f} s", flush=True)
    return Subject(
        SMOLLM2,
        model,
        tokenizer,
        test[: args.tokens or None],
        args.context,
        windows(valid, 32, 512),
        corpus.train,
        args.steps,
        args.batch,
        512,
        args.micro,
        [p for t in TASKS if args.items and (p := args.assets / f"eval/{t}.jsonl").is_file()],
        args.items,
        blockwise_part=0.2,
        blockwise=Blockwise(batch=4),
        cache_folder=folder / "cache-smollm2",
        damage_file=folder / "damage.jsonl",
        valid=valid[: min(1 << 16, args.tokens or len(valid))],
        novels=novels(args.assets, tokenizer, min(1 << 16, args.tokens or 1 << 16)),
        told={"text": args.text_name} if args.text_name else {},
    )


def kept(args: argparse.Namespace, folder: Path) -> Subject:
    """A dense row of experiments/sparse24_quality: GPT-2's small shape, trained for long on Python sources."""
    if args.kept is None:
        raise SystemExit("this part needs --kept: a folder that experiments/sparse24_quality --keep left")
    model, corpus, told = open_trained(args.kept, device="cuda" if on_gpu() else "cpu")
    if on_gpu():
        model.compute_dtype = torch.bfloat16
    context = min(args.context, model.spec.max_positions)
    train_context = min(512, context)
    held_out, tested = corpus.val.head(), args.tokens or 1 << 18
    rest = held_out[tested : tested + (1 << 16)]  # to choose between settings on
    return Subject(
        KEPT,
        model,
        corpus.tokenizer,
        held_out[:tested],
        context,
        windows(corpus.train.head(200_000), 32, train_context),
        first_tokens(corpus.train, args.steps * args.batch * train_context + 1),
        args.steps,
        args.batch,
        train_context,
        args.micro,
        blockwise_part=0.2,
        blockwise=Blockwise(batch=4),
        cache_folder=folder / "cache-kept",
        valid=rest if len(rest) > context else None,
        told=told,
    )


def first_tokens(shards: TokenShards, num: int) -> TokenShards:
    """The tokens that are trained on, so that the teacher's cache holds no more."""
    return replace(shards, tokens=shards.tokens[:num], fingerprint=f"{shards.fingerprint}:{num}")


def stories(args: argparse.Namespace, folder: Path) -> Subject:
    """stories260K with TinyStories: the last stories are measured, those before them choose, the first are trained
    on."""
    home = args.assets / "models/stories260k"
    model, codec = load_stories(home / "stories260K.bin"), StoryCodec(home / "tok512.bin")
    text = (args.assets / "text/tinystories_2M.txt").read_text().split("<|endoftext|>")
    learn, valid, test = (
        [i for s in part for i in (BOS, *codec.encode(s.strip()))] for part in (text[:250], text[-60:-40], text[-40:])
    )
    ids = np.array(learn, dtype="<u2")
    shards = TokenShards(ids, None, hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest())
    return Subject(
        STORIES,
        model,
        None,
        torch.tensor(test)[: args.tokens or 16384],
        256,
        windows(shards.head(), 32, 256),
        shards,
        args.small_steps,
        16,
        128,
        args.micro,
        kept_dense=("*.mlp.down",),
        blockwise_part=0.2,
        blockwise=Blockwise(batch=4),
        rates=SMALL_RATES,
        cache_folder=folder / "cache-stories",
        valid=torch.tensor(valid)[: args.tokens or 8192],
    )


def llama256(args: argparse.Namespace, folder: Path) -> Subject:
    """A Llama of width 256, trained with train/dense on TinyStories where `folder` has none from an earlier call. The
    last stories are measured, those before them choose, and neither model nor method was trained on them."""
    text = (args.assets / "text/tinystories_2M.txt").read_text().split(END_OF_TEXT)
    source, run = folder / "stories.txt", folder / "llama-256"
    if not (run / "model").is_dir():
        source.write_text(END_OF_TEXT.join(text[: -2 * HELD_OUT]))
        dense.main(dense.Config(data=str(source), run=str(run), **LLAMA_256))
    loaded = load_model(run, device="cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    shards = tokenize_corpus(str(source), folder / "tokens", tokenizer=tokenizer, val_fraction=0.0).train
    valid, test = (
        torch.tensor(tokenizer.encode(END_OF_TEXT.join(part)))
        for part in (text[-2 * HELD_OUT : -HELD_OUT], text[-HELD_OUT:])
    )
    return Subject(
        LLAMA,
        model,
        tokenizer,
        test[: args.tokens or None],
        128,
        windows(shards.head(), 32, 128),
        shards,
        args.small_steps,
        16,
        128,
        args.micro,
        blockwise_part=0.2,
        blockwise=Blockwise(batch=4),
        cache_folder=folder / "cache-llama",
        damage_file=folder / "damage-llama.jsonl",
        valid=valid[: args.tokens or None],
        told={
            "model_tokens": LLAMA_256["steps"] * LLAMA_256["batch"] * LLAMA_256["context"],
            "parameters": model.spec.num_params(),
            "vocabulary": model.spec.vocab_size,
            "weights": fingerprint(model)[:8],
        },
    )
