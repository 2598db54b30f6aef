from __future__ import annotations

import pytest
import torch

from shoestring.errors import UserError
from shoestring.evals import measure_speed, weight_bytes
from shoestring.formats import FormatLinear
from tiny import LLAMA, tiny_llama


def test_speed_is_measured_through_the_engine() -> None:
    model = tiny_llama()
    speed = measure_speed(model, prompt=40, new=8, repeats=2)
    assert speed.prefill_tokens_per_s > speed.decode_tokens_per_s > 0  # 40 rows a step against 1
    assert speed.weight_bytes == 4 * LLAMA.num_params()  # tied: the embedding counts once
    assert speed.peak_memory_bytes > speed.weight_bytes
    assert 0 <= speed.growth_bytes < speed.peak_memory_bytes
    assert speed.device == "cpu"


def test_packed_weights_count_at_their_packed_size() -> None:
    linear = FormatLinear(64, 32, bias=True)
    assert weight_bytes(linear) == 4 * (64 * 32 + 32)
    del linear.weight
    linear.register_buffer("weight_codes", torch.zeros(32, 32, dtype=torch.uint8))
    linear.register_buffer("weight_scale", torch.zeros(32, 1, dtype=torch.float16))
    assert weight_bytes(linear) == 32 * 32 + 2 * 32 + 4 * 32


def test_bad_sizes() -> None:
    with pytest.raises(UserError, match="64 positions"):
        measure_speed(tiny_llama(), prompt=60, new=8)
    with pytest.raises(UserError, match="new=1"):
        measure_speed(tiny_llama(), prompt=4, new=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_speed_on_a_gpu() -> None:
    speed = measure_speed(tiny_llama().cuda(), prompt=40, new=8)
    assert speed.decode_tokens_per_s > 0
    assert speed.weight_bytes <= speed.peak_memory_bytes
