"""A tiny random Llama, once as ours and once as the `transformers` model with the same weights."""

from __future__ import annotations

from typing import Any

import torch

from shoestring.model import Decoder, ModelSpec
from shoestring.model.tokenizer import Tokenizer

SPEC = ModelSpec(
    vocab_size=300,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=48,
    max_positions=64,
)
TEXT = "the cat sat on the mat and the dog sat on the log. was it a cat? it was a dog, he said. "


def tiny_model(spec: ModelSpec = SPEC, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(spec)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(0, 0.25)
    return model.eval()


def as_transformers(model: Decoder) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    s = model.spec
    other = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=s.vocab_size,
            hidden_size=s.d_model,
            intermediate_size=s.d_ff,
            num_hidden_layers=s.num_layers,
            num_attention_heads=s.num_heads,
            num_key_value_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            max_position_embeddings=s.max_positions,
            rms_norm_eps=s.norm_eps,
            tie_word_embeddings=True,
        )
    )
    names = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **{f"attn.{n}": f"self_attn.{n}_proj" for n in "qkvo"},
        **{f"mlp.{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")},
    }
    state = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    for layer in range(s.num_layers):
        for ours, theirs in names.items():
            state[f"model.layers.{layer}.{theirs}.weight"] = model.get_parameter(
                f"blocks.{layer}.{ours}.weight"
            )
    missing = other.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
    return other.eval()


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT * 20], vocab_size=300)
