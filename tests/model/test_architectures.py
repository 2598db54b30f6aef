"""Every architecture from end to end: a folder of `transformers` in, greedy texts, training, shrinking, a folder out.

Logits, names and config.json of each are compared in test_hf.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from refusals import refused
from shoestring.formats import convert, pack, parse_format
from shoestring.model import Decoder, ModelSpec, load_model, save_model
from shoestring.model.parallel import init_weights
from shoestring.model.spec import Experts, LongRope
from shoestring.serve import Engine, Sampling
from shoestring.shrink.awq import Awq
from shoestring.shrink.calibrate import Calibration, walk
from shoestring.shrink.gptq import Gptq
from shoestring.shrink.quantize import quantize
from shoestring.train.data import Micro
from shoestring.train.objectives import CrossEntropy

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 63, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 6},
    "phi3": {"partial_rotary_factor": 0.5}, "olmo2": {}, "smollm3": {"num_hidden_layers": 4},
    "arcee": {},
    "gpt_neox": {"num_key_value_heads": None}, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
    "qwen3_moe": {**MOE, "head_dim": 16, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
NUM_NEW = 6
GREEDY = Sampling(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
TOKENS = torch.randint(1, 60, (4, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model_and_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random model of `transformers`, and its folder."""
    fields = {k: v for k, v in {**SMALL, **ARCHITECTURES[request.param]}.items() if v is not None}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **copy.deepcopy(fields))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    folder = tmp_path_factory.mktemp(request.param) / "model"
    model.save_pretrained(folder)
    return model, folder


def test_greedy_texts_are_those_of_transformers(model_and_folder: tuple[Any, Path]) -> None:
    theirs, folder = model_and_folder
    ours = load_model(folder).model
    engine = Engine(ours)
    texts = engine.generate([row[:n].tolist() for row, n in zip(TOKENS, (3, 9, 17, 24), strict=True)], GREEDY)
    for row, n, text in zip(TOKENS, (3, 9, 17, 24), texts, strict=True):
        want = row[None, :n]
        for _ in range(NUM_NEW):
            with torch.no_grad():
                want = torch.cat([want, theirs(want).logits[:, -1:].argmax(-1)], dim=1)
        assert list(text.token_ids) == want[0, n:].tolist()


def test_loss_and_gradients_are_those_of_transformers(model_and_folder: tuple[Any, Path]) -> None:
    theirs, folder = model_and_folder
    ours = load_model(folder).model.train()
    want = F.cross_entropy(theirs(TOKENS[:, :-1]).logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum")
    theirs.zero_grad()
    want.backward()
    micro = Micro(TOKENS[:, :-1], TOKENS[:, 1:], torch.zeros_like(TOKENS[:, 1:]), TOKENS[:, 1:].numel())
    got = CrossEntropy()(ours, micro)
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)
    embedding = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(ours.embed.weight.grad, embedding, rtol=1e-3, atol=1e-3)


def test_a_folder_out_is_the_same_model(model_and_folder: tuple[Any, Path], tmp_path: Path) -> None:
    theirs, folder = model_and_folder
    loaded = load_model(folder)
    save_model(tmp_path / "again", loaded.model)
    auto = transformers.AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path / "again", attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)

    packed = loaded.model
    convert(packed, [("blocks.*", parse_format("int4:g16"))])
    pack(packed)
    save_model(tmp_path / "packed", packed)
    with torch.no_grad():
        got = load_model(tmp_path / "packed").model(TOKENS)
        torch.testing.assert_close(got, packed(TOKENS))
        assert 0 < (got - theirs(TOKENS).logits).square().mean() < theirs(TOKENS).logits.var()


@pytest.mark.few(5)
def test_calibrated_quantization(model_and_folder: tuple[Any, Path]) -> None:
    _, folder = model_and_folder
    tokens = torch.randint(1, 60, (16, 32), generator=torch.Generator().manual_seed(2))
    rules, dense, errors = [("blocks.*", parse_format("int3:g16"))], load_model(folder).model, {}
    for method in (None, Gptq(), Awq(ratios=4)):
        model = load_model(folder).model
        if method is None:
            convert(model, rules)
        else:
            quantize(model, rules, walk(model, tokens, Calibration()), method)
        with torch.no_grad():
            errors[method] = float((model(tokens) - dense(tokens)).square().mean())
    assert all(errors[method] < errors[None] for method in errors if method is not None), errors


def test_long_texts_have_their_own_rotary_angles() -> None:
    """By default an engine reads what the short factors are for; asked for more it uses the long ones throughout."""
    rope = LongRope((1.0,) * 4, (2.0,) * 4, original_positions=32, attention_factor=1.1)
    spec = ModelSpec(64, 32, 2, 4, 2, 8, 48, 64, model_type="phi3", rope_scaling=rope, tied=False)
    model = Decoder(spec)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.4 + (p.ndim == 1))
    text = TOKENS[0].tolist()
    short = Engine(model).generate([text], GREEDY)[0].token_ids
    assert Engine(model).max_context == 32
    assert short == greedy(model, TOKENS[:1])
    refused("32", Engine(model).generate, [text + text], GREEDY)
    long = TOKENS[:2].reshape(1, -1)
    assert Engine(model, max_context=64).generate([long[0].tolist()], GREEDY)[0].token_ids == greedy(model, long)


@torch.no_grad()
def greedy(model: Decoder, tokens: torch.Tensor) -> list[int]:
    for _ in range(NUM_NEW):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens[0, -NUM_NEW:].tolist()


def test_experts_that_no_calibration_token_reaches() -> None:
    spec = ModelSpec(64, 32, 1, 4, 2, 8, 48, 64, model_type="mixtral", experts=Experts(8, 1, 48))
    model = Decoder(spec)
    init_weights(model, 0)
    with torch.no_grad():
        model.blocks[0].mlp.router.weight.zero_()[0].fill_(1.0)  # type: ignore[union-attr, operator, index]
        model.blocks[0].mlp_norm.weight.abs_()  # type: ignore[union-attr, operator]
    with pytest.warns(UserWarning, match=r"layers saw no calibration token.*blocks\.0\.mlp\.experts\.\d"):
        quantize(model, [("blocks.*", parse_format("int4:g16"))], walk(model, TOKENS, Calibration()), Gptq())
    pack(model)
    assert model(TOKENS).isfinite().all()
