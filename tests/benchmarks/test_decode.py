from __future__ import annotations

import pytest
import torch

from benchmarks import decode
from shoestring.model import Decoder, ModelSpec


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_step_must_read(tied: bool) -> None:
    spec = ModelSpec(
        vocab_size=50, d_model=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=24,
        max_positions=64, tied=tied,
    )  # fmt: skip
    model = Decoder(spec).to(torch.bfloat16)
    weights = 2 * (spec.num_params(with_embeddings=False) + 50 * 16)  # the head once, tied or not
    # 5 requests of 7 tokens: keys and values of 3 layers, 2 heads of 4, 2 bytes each
    assert decode.step_bytes(model, 5, 7) == weights + 5 * 7 * 2 * 3 * 2 * 4 * 2


def test_the_step_rounds_no_worse_than_the_plain_forward() -> None:
    error, plain = decode.check_rounding("int4:g128", "cpu", 4, 2)
    assert error > 0 and 0 < plain < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("blocks", ["bf16", "int4:g128", "int3:g128", "int2:g64", "nf4:s2:g64"])
def test_the_step_rounds_no_worse_on_the_gpu(blocks: str) -> None:
    decode.check_rounding(blocks)
