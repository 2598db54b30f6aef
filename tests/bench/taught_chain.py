"""A model that learned a Markov chain, and what bench/lowbit_quality needs to shrink it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoestring.bench.lowbit_methods import Subject
from shoestring.mesh import open_mesh
from shoestring.model import Decoder, ModelSpec
from shoestring.model.parallel import init_weights
from shoestring.runlog import RunLog
from shoestring.shrink.calibrate import windows
from shoestring.train.data import TokenData
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import adamw, warmup_cosine
from shoestring.train.shards import TokenShards
from shoestring.train.trainer import Run, train

VOCAB = 24


def chain(num: int, seed: int) -> np.ndarray:
    """Every pair of tokens has two successors, at 80 and 20 percent: a perplexity of 1.65 is the least possible."""
    table = np.random.default_rng(0).integers(0, VOCAB, (VOCAB, VOCAB, 2))
    second = (np.random.default_rng(seed).random(num) < 0.2).astype(int)
    tokens = np.zeros(num, dtype="<u2")
    for i in range(2, num):
        tokens[i] = table[tokens[i - 2], tokens[i - 1], second[i]]
    return tokens


def taught(steps: int, *, width: int = 32, lr: float = 1e-2, seed: int = 0) -> tuple[Decoder, TokenShards]:
    text = TokenShards(chain(60_000, 1), None, "chain")
    model = Decoder(ModelSpec(VOCAB, width, 2, 2, 2, width // 2, 2 * width, 64))
    init_weights(model, seed)
    run = Run(model, adamw(model, lr=lr, weight_decay=0.0), open_mesh(), RunLog(None, quiet=True))
    data = TokenData(text, context=32, batch=32, seed=seed)
    train(run, data, CrossEntropy(), steps=steps, schedule=warmup_cosine(lr, warmup=20, steps=steps))
    return model, text


def chain_subject(
    model: Decoder, text: TokenShards, num_test: int, num_windows: int, **options: Any
) -> Subject:
    """Tested on `num_test` other tokens of the chain, calibrated on so many windows of the text's beginning."""
    test = torch.from_numpy(chain(num_test, 2).astype(np.int64))
    calibration = windows(text.head(20_000), num_windows, 32)
    return Subject("chain", model, None, test, 32, calibration, text, train_context=32, **options)
