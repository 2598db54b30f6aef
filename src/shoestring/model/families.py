"""The families of decoders, a row each: in what a family differs from Llama.

A row says how config.json spells the fields of a ModelSpec and what a missing one means to `transformers`, which fields
all models of the family share, and what its tensors are called in Hugging Face folders and in GGUF files. hf.py and
gguf_spec.py read and write by these rows, hf_names.py and gguf_names.py name tensors by them. A family of known parts
is one more row; a new part is a field of ModelSpec first (docs/guides/add_architecture.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shoestring.json_files import REQUIRED
from shoestring.model.spec import ModelSpec

EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")  # the number in a name, which is a `*` in the tables below


@dataclass(frozen=True)
class Key:
    """Where config.json says one field of a spec."""

    name: str
    missing: Any = REQUIRED  # what its absence means; None: it follows from other fields
    read_from: str = ""  # another name, read where this one is missing
    written_to: str = ""  # another name, written with the same value


@dataclass(frozen=True)
class Windows:
    """Which layers attend to a window of positions only, where config.json has no layer_types:

    all        every layer
    every      all but each n-th
    behind     those from max_window_layers on
    before     the first, third, ... of those before max_window_layers
    unrotated  those without rotary positions
    """

    layers: Literal["all", "every", "behind", "before", "unrotated"] = "all"
    missing: int | None = None  # the window where config.json gives none
    null_means_none: bool = False  # an explicit null is no window, whatever a missing one is
    switched: bool = False  # there are windows only where use_sliding_window says so
    by_layer: bool = True  # layer_types counts
    every: int = 0
    every_key: str = ""


@dataclass(frozen=True)
class HfNames:
    """Names in a Hugging Face folder: our module -> theirs. A `*` stands for the number of an expert."""

    block: Mapping[str, str]
    layers: str = "model.layers"  # what stands before the number of a layer
    top: Mapping[str, str] = field(
        default_factory=lambda: {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    )
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # their module -> ours inside it, in row order
    by_head: bool = False  # fused rows come head by head: q, k, v of the first, then of the second
    transposed: frozenset[str] = frozenset()  # our modules whose weights are stored as [in, out]


@dataclass(frozen=True)
class GgufNames:
    """One architecture of llama.cpp: its names, and what it computes by that name alone."""

    architecture: str
    block: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaved: bool = False  # rows of q and k
    has_output: bool | None = None  # whether the head is stored beside the embedding; None: as the model has it
    windows: bool = False  # windows are read
    window: int | None = None  # where the file gives none
    caps_scores: bool = False
    renormalized: bool = False  # the weights of the chosen experts are divided by their sum
    says_head_dim: bool = False  # written even where it is the width of a head


@dataclass(frozen=True)
class Family:
    name: str  # model_type
    architecture: str  # the class of `transformers`
    keys: Mapping[str, Key]  # by field of ModelSpec
    names: HfNames
    gguf: GgufNames | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of ModelSpec that all its models share
    windows: Windows | None = None
    experts: Mapping[str, Key] = field(default_factory=dict)  # by field of Experts
    gated: bool = True  # the feed-forward layer
    whole_heads: bool = False  # the width must be a multiple of the number of heads, whatever head_dim
    # What original_max_position_embeddings is by default, where it stands beside the rotary fields (Phi-3).
    original_positions: int | None = None
    written: Mapping[str, Any] = field(default_factory=dict)  # constants of config.json

    @property
    def expert_width(self) -> bool:
        """Whether experts have a width of their own, besides `d_ff`."""
        return bool(self.experts) and self.experts["d_ff"].name != self.keys["d_ff"].name


# -- config.json ---------------------------------------------------------------------------------------------

_SIZES = {
    "vocab_size": Key("vocab_size"),
    "d_model": Key("hidden_size"),
    "num_layers": Key("num_hidden_layers"),
    "num_heads": Key("num_attention_heads"),
    "max_positions": Key("max_position_embeddings"),
    "d_ff": Key("intermediate_size"),
    "tied": Key("tie_word_embeddings", False),
}
_LLAMA_KEYS = {
    **_SIZES,
    "num_kv_heads": Key("num_key_value_heads", None),
    "head_dim": Key("head_dim", None),
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "act": Key("hidden_act", "silu"),
    "rope_theta": Key("rope_theta", 10000.0),
}
_BIASES = {"out_bias": Key("attention_bias", False), "qkv_bias": Key("attention_bias", False)}
_MLP_BIAS = {"mlp_bias": Key("mlp_bias", False)}


def _keys(**changes: Any) -> dict[str, Key]:
    """Llama's; a change is another key, or what the absence of Llama's means."""
    changed = {f: c if isinstance(c, Key) else replace(_LLAMA_KEYS[f], missing=c) for f, c in changes.items()}
    return {**_LLAMA_KEYS, **changed}


_NEOX_KEYS = {
    **_SIZES,
    "norm_eps": Key("layer_norm_eps", 1e-5),
    "act": Key("hidden_act", "gelu"),
    "rope_theta": Key("rotary_emb_base", 10000.0),
    "rotary_fraction": Key("rotary_pct", 0.25),
    "parallel_residual": Key("use_parallel_residual", True),
    **{bias: Key("attention_bias", True) for bias in ("out_bias", "qkv_bias")},
}
_GPT2_KEYS = {  # `transformers` accepts Llama's spelling of the sizes too
    "vocab_size": Key("vocab_size"),
    "d_model": Key("n_embd", read_from="hidden_size"),
    "num_layers": Key("n_layer", read_from="num_hidden_layers"),
    "num_heads": Key("n_head", read_from="num_attention_heads"),
    "max_positions": Key("n_positions", read_from="max_position_embeddings", written_to="n_ctx"),
    "d_ff": Key("n_inner", None),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "act": Key("activation_function", "gelu_new"),
    "tied": Key("tie_word_embeddings", True),
}


def _gemma_keys(attn_softcap: float | None, logit_softcap: float | None, **more: Any) -> dict[str, Key]:
    return _keys(
        num_kv_heads=REQUIRED,
        head_dim=256,
        # Its hidden_act is a leftover of the first release, which `transformers` does not look at.
        act=Key("hidden_activation", "gelu_pytorch_tanh", written_to="hidden_act"),
        tied=True,
        attn_scale=Key("query_pre_attn_scalar", 256),
        attn_softcap=Key("attn_logit_softcapping", attn_softcap),
        logit_softcap=Key("final_logit_softcapping", logit_softcap),
        **_BIASES,
        **more,
    )


_QK_NORM = {"qk_norm": True}
_QK_NORM_WIDTH = {"qk_norm": True, "qk_norm_over": "width"}
_GEMMA = {"norm": "rms_offset", "norm_placement": "both", "scaled_embeddings": True}
_MOE = {"num": Key("num_experts"), "top_k": Key("num_experts_per_tok"), "d_ff": Key("moe_intermediate_size")}
_RENORMALIZE = {"renormalize": Key("norm_topk_prob", False)}
_SPARSE = {**_MOE, **_RENORMALIZE, "dense_layers": Key("mlp_only_layers", None)}
_QWEN_WINDOWS = Windows("behind", missing=4096, switched=True)

# -- tensors -------------------------------------------------------------------------------------------------

_QKV = ("attn.q", "attn.k", "attn.v")
_ATTENTION = {
    **{f"attn.{x}": f"self_attn.{x}_proj" for x in "qkvo"},
    **{f"attn.{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
}
_PRE_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_POST_NORMS = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_PARTS = ("gate", "up", "down")
_MLP = {f"mlp.{x}": f"mlp.{x}_proj" for x in _PARTS}
_LLAMA = {**_PRE_NORMS, **_ATTENTION, **_MLP}
_LLAMA_NAMES = HfNames(_LLAMA)
_EXPERT_NAMES = HfNames(
    {
        **_LLAMA,
        "mlp.router": "mlp.gate",
        **{f"mlp.experts.*.{x}": f"mlp.experts.*.{x}_proj" for x in _PARTS},
        **{f"mlp.shared.{x}": f"mlp.shared_expert.{x}_proj" for x in _PARTS},
        "mlp.shared_gate": "mlp.shared_expert_gate",
    }
)
_MIXTRAL_NAMES = HfNames(
    {
        **_LLAMA,
        "mlp.router": "block_sparse_moe.gate",
        **{f"mlp.experts.*.{x}": f"block_sparse_moe.experts.*.w{i}" for x, i in zip(_PARTS, (1, 3, 2), strict=True)},
    }
)
_GEMMA_NAMES = HfNames({**_LLAMA, "mlp_norm": "pre_feedforward_layernorm", **_POST_NORMS})
_NEOX_NAMES = HfNames(
    {
        **_PRE_NORMS,
        **{f"attn.{x}": f"attention.{x}_proj" for x in "qkv"},
        "attn.o": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    "gpt_neox.layers",
    {"embed": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
    {"attention.query_key_value": _QKV},
    by_head=True,
)
_GPT2_NAMES = HfNames(
    {
        "attn_norm": "ln_1",
        **{f"attn.{x}": f"attn.{x}_proj" for x in "qkv"},
        "attn.o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    "transformer.h",
    {"embed": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"},
    {"attn.c_attn": _QKV},
    transposed=frozenset({*_QKV, "attn.o", "mlp.up", "mlp.down"}),
)

# -- GGUF ----------------------------------------------------------------------------------------------------

_GG_ATTENTION = {f"attn.{x}": f"attn_{x}" for x in ("q", "k", "v", "q_norm", "k_norm")} | {"attn.o": "attn_output"}
_GG_PRE_NORMS = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm"}
_GG_POST_NORMS = {"attn_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm"}
_GG_MLP = {f"mlp.{x}": f"ffn_{x}" for x in _PARTS}
_GG_LLAMA = {**_GG_PRE_NORMS, **_GG_ATTENTION, **_GG_MLP}
_GG_EXPERTS = {
    **_GG_LLAMA,
    "mlp.router": "ffn_gate_inp",
    **{f"mlp.experts.*.{x}": f"ffn_{x}_exps" for x in _PARTS},
    **{f"mlp.shared.{x}": f"ffn_{x}_shexp" for x in _PARTS},
    "mlp.shared_gate": "ffn_gate_inp_shexp",
}
_GG_GPT = {**_GG_PRE_NORMS, "attn.o": "attn_output", "mlp.up": "ffn_up", "mlp.down": "ffn_down"}
_GG_GEMMA = {**_GG_LLAMA, **_GG_POST_NORMS}
_GG_QKV = {"attn_qkv": _QKV}
_GGUF_LLAMA = GgufNames("llama", _GG_EXPERTS, interleaved=True, windows=True, renormalized=True)

# -- the rows ------------------------------------------------------------------------------------------------

# fmt: off
_ROWS = (
    Family("llama", "LlamaForCausalLM", _keys(**_BIASES, **_MLP_BIAS), _LLAMA_NAMES, _GGUF_LLAMA, whole_heads=True),
    Family("mistral", "MistralForCausalLM", _keys(num_kv_heads=REQUIRED), _LLAMA_NAMES, _GGUF_LLAMA,
           windows=Windows(missing=4096, null_means_none=True)),
    Family("qwen2", "Qwen2ForCausalLM", _keys(num_kv_heads=REQUIRED), _LLAMA_NAMES, GgufNames("qwen2", _GG_LLAMA),
           fixed={"qkv_bias": True}, windows=_QWEN_WINDOWS),
    Family("qwen3", "Qwen3ForCausalLM", _keys(num_kv_heads=REQUIRED, head_dim=128, **_BIASES), _LLAMA_NAMES,
           GgufNames("qwen3", _GG_LLAMA, says_head_dim=True), fixed=_QK_NORM, windows=_QWEN_WINDOWS),
    Family("smollm3", "SmolLM3ForCausalLM",
           _keys(num_kv_heads=REQUIRED, rope_theta=2e6, tied=True, no_rope_layers=Key("no_rope_layers", None),
                 **_BIASES, **_MLP_BIAS),
           _LLAMA_NAMES, GgufNames("smollm3", _GG_LLAMA, interleaved=True),
           windows=Windows("unrotated", switched=True)),
    Family("phi3", "Phi3ForCausalLM", _keys(norm_eps=1e-5, rotary_fraction=Key("partial_rotary_factor", 1.0)),
           HfNames(_LLAMA, fused={"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": ("mlp.gate", "mlp.up")}),
           GgufNames("phi3", _GG_LLAMA, {**_GG_QKV, "ffn_up": ("mlp.gate", "mlp.up")}, windows=True),
           windows=Windows(by_layer=False), original_positions=4096),
    Family("olmo2", "Olmo2ForCausalLM", _keys(norm_eps=1e-5, **_BIASES), HfNames({**_POST_NORMS, **_ATTENTION, **_MLP}),
           GgufNames("olmo2", {**_GG_POST_NORMS, **_GG_ATTENTION, **_GG_MLP}, has_output=True),
           fixed={**_QK_NORM_WIDTH, "norm_placement": "post"}),
    Family("gemma2", "Gemma2ForCausalLM", _gemma_keys(50.0, 30.0), _GEMMA_NAMES,
           GgufNames("gemma2", _GG_GEMMA, has_output=False, windows=True, window=4096, caps_scores=True,
                     says_head_dim=True),
           fixed=_GEMMA, windows=Windows("every", missing=4096, every=2)),
    # `transformers` writes _sliding_window_pattern beside layer_types and never reads it.
    Family("gemma3_text", "Gemma3ForCausalLM",
           _gemma_keys(None, None, rope_theta=1e6, window_rope_theta=Key("rope_local_base_freq", 10000.0)),
           _GEMMA_NAMES, GgufNames("gemma3", _GG_GEMMA, windows=True, says_head_dim=True),
           fixed={**_GEMMA, **_QK_NORM},
           windows=Windows("every", missing=4096, every=6, every_key="sliding_window_pattern")),
    Family("arcee", "ArceeForCausalLM", _keys(act="relu2", norm_eps=1e-5, **_BIASES, **_MLP_BIAS), _LLAMA_NAMES,
           gated=False),
    Family("gpt_neox", "GPTNeoXForCausalLM", _NEOX_KEYS, _NEOX_NAMES,
           GgufNames("gptneox", _GG_GPT, _GG_QKV, has_output=True), fixed={"norm": "layer", "mlp_bias": True},
           gated=False, written=dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0)),
    Family("mixtral", "MixtralForCausalLM", _keys(num_kv_heads=REQUIRED, norm_eps=1e-5, rope_theta=1e6), _MIXTRAL_NAMES,
           _GGUF_LLAMA, windows=Windows(by_layer=False),
           experts={**_MOE, "num": Key("num_local_experts"), "d_ff": Key("intermediate_size")}),
    Family("qwen2_moe", "Qwen2MoeForCausalLM", _keys(num_kv_heads=REQUIRED, qkv_bias=Key("qkv_bias", True)),
           _EXPERT_NAMES, GgufNames("qwen2moe", _GG_EXPERTS, has_output=True),
           windows=Windows("before", missing=4096, switched=True),
           experts={**_SPARSE, "shared_d_ff": Key("shared_expert_intermediate_size")}),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", _keys(num_kv_heads=REQUIRED, **_BIASES), _EXPERT_NAMES,
           GgufNames("qwen3moe", _GG_EXPERTS, renormalized=True, says_head_dim=True), fixed=_QK_NORM,
           windows=Windows(missing=4096, switched=True, by_layer=False), experts=_SPARSE),
    Family("olmoe", "OlmoeForCausalLM", _keys(norm_eps=1e-5, **_BIASES), _EXPERT_NAMES,
           GgufNames("olmoe", _GG_EXPERTS, has_output=True), fixed=_QK_NORM_WIDTH,
           experts={**_MOE, **_RENORMALIZE, "d_ff": Key("intermediate_size")}),
    # The decoder has no dropout; a fine-tuning run elsewhere should not add it unasked.
    Family("gpt2", "GPT2LMHeadModel", _GPT2_KEYS, _GPT2_NAMES, GgufNames("gpt2", _GG_GPT, _GG_QKV),
           fixed={"norm": "layer", "positions": "learned", "qkv_bias": True, "out_bias": True, "mlp_bias": True},
           gated=False, written=dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)),
)
# fmt: on
FAMILIES = {family.name: family for family in _ROWS}
MODEL_TYPES = tuple(FAMILIES)


def family_of(spec: ModelSpec) -> Family:
    return FAMILIES[spec.model_type]


def fused_rows(spec: ModelSpec, parts: tuple[str, ...], inner: str) -> tuple[int, int, int]:
    """Of a tensor that several of our layers are fused into: the first row of `inner`, the one behind its last, and
    the number of rows."""
    heights = [_height(spec, part) for part in parts]
    at = parts.index(inner)
    return sum(heights[:at]), sum(heights[: at + 1]), sum(heights)


def _height(spec: ModelSpec, inner: str) -> int:
    if inner == "attn.q":
        return spec.num_heads * spec.head_dim
    return spec.num_kv_heads * spec.head_dim if inner in _QKV else spec.d_ff
