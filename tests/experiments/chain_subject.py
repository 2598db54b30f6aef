"""What experiments/lowbit_quality needs to shrink a model that has learned a Markov chain (tiny.taught)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from experiments.lowbit_methods import Subject
from shoestring.model import Decoder
from shoestring.shrink.calibrate import windows
from shoestring.train.shards import TokenShards
from tiny import chain


def chain_subject(model: Decoder, text: TokenShards, num_test: int, num_windows: int, **options: Any) -> Subject:
    """Tested on `num_test` other tokens of the chain, calibrated on so many windows of the text's beginning."""
    test = torch.from_numpy(chain(num_test, 2).astype(np.int64))
    calibration = windows(text.head(20_000), num_windows, 32)
    return Subject("chain", model, None, test, 32, calibration, text, train_context=32, **options)
