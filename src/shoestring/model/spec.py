"""ModelSpec: everything that decides the shape and the arithmetic of a decoder.

One spec covers every family of families.py, mixtures of experts included; `hf.py` reads it from and writes it to a
Hugging Face config.json. What is not here (dtype, device, sharding, formats) is decided outside the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoestring.errors import UserError

SIZES = ["vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff", "max_positions"]
GATED = ("swiglu", "geglu", "geglu_tanh")  # down(act(gate(x)) * up(x)); the others are down(act(up(x)))
# More is a damaged file: its matrices could not even be described.
MOST_SIZE, MOST_LAYERS, MOST_EXPERTS = 1 << 26, 10_000, 10_000


@dataclass(frozen=True)
class Llama3Rope:
    """Long wavelengths divided by `factor`, short ones kept, the rest blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class LinearRope:
    """All frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicRope:
    """A base that grows with a text longer than `max_positions`. Within them it changes nothing, and longer texts are
    refused: keys that were rotated with the smaller base would have to be rotated again."""

    factor: float


@dataclass(frozen=True)
class YarnRope:
    """YaRN: frequencies that turn fewer than `beta_slow` times in the original context are divided by `factor`, those
    that turn more than `beta_fast` times are kept; cosine and sine are multiplied by `attention_factor`."""

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the range of blended pairs is rounded outwards to whole pairs


@dataclass(frozen=True)
class LongRope:
    """One divisor per frequency, found by search: `short` for models that read up to `original_positions`, `long` for
    longer texts; cosine and sine are multiplied by `attention_factor`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_positions: int
    attention_factor: float


RopeScaling = Llama3Rope | LinearRope | DynamicRope | YarnRope | LongRope


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer: each row goes through its `top_k` experts, whose outputs
    are added with the router's softmax as weights."""

    num: int
    top_k: int
    d_ff: int
    renormalize: bool = True  # the weights of the chosen experts are divided by their sum
    shared_d_ff: int = 0  # an expert that every row goes through, weighed by a sigmoid gate of its own; 0: none
    dense_layers: tuple[int, ...] = ()  # layers with an ordinary feed-forward layer

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num <= MOST_EXPERTS or not 1 <= self.d_ff <= MOST_SIZE:
            raise UserError(
                f"{self.top_k} of {self.num} experts of width {self.d_ff} are not possible: at most {MOST_EXPERTS:,} "
                "experts, and as many chosen at most"
            )


@dataclass(frozen=True)
class ModelSpec:
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_positions: int
    model_type: str = "llama"  # the Hugging Face model_type this spec is written back as
    norm: Literal["rms", "rms_offset", "layer"] = "rms"  # rms_offset: stored as the weight minus one (Gemma)
    norm_eps: float = 1e-5
    norm_placement: Literal["pre", "post", "both"] = "pre"  # before a sublayer, after it, or both
    parallel_residual: bool = False  # attention and feed-forward layer both read the layer's input (GPT-NeoX)
    act: Literal["swiglu", "geglu", "geglu_tanh", "gelu_tanh", "gelu", "relu2"] = "swiglu"
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0  # of each head's dims that are rotated
    no_rope_layers: tuple[int, ...] = ()  # layers that rotate nothing (SmolLM3)
    window_rope_theta: float | None = None  # layers with a window rotate with this base, unscaled (Gemma 3)
    qk_norm: bool = False
    qk_norm_over: Literal["head", "width"] = "head"  # each head by itself, or all heads together (OLMo 2)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True
    attn_scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    attn_softcap: float | None = None  # scores become cap * tanh(score / cap)
    logit_softcap: float | None = None
    scaled_embeddings: bool = False  # rows of the embedding times sqrt(d_model)
    experts: Experts | None = None
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()  # layers that attend to everything although there is a window
    bos_id: int | None = None
    eos_id: int | None = None
    extra_eos_ids: tuple[int, ...] = ()  # further tokens that end a text (Llama 3's end of turn)

    def __post_init__(self) -> None:
        for name in SIZES:
            size, most = getattr(self, name), MOST_LAYERS if name == "num_layers" else MOST_SIZE
            if not isinstance(size, int) or not 1 <= size <= most:
                raise UserError(
                    f"{name}={size!r} is not possible: allowed are 1 to {most:,}; check the config or the header"
                )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "grouped-query attention needs a whole number of query heads per key/value head"
            )
        if self.positions == "rope" and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise UserError(
                f"{self.rotary_dim} of head_dim={self.head_dim} dims are rotated; rotary positions rotate pairs and "
                "need an even number of them, at most head_dim"
            )
        if isinstance(self.rope_scaling, LongRope):
            lengths = {len(self.rope_scaling.short), len(self.rope_scaling.long)}
            if lengths != {self.rotary_dim // 2}:
                raise UserError(
                    f"longrope has {sorted(lengths)} factors; a head that rotates {self.rotary_dim} dims needs "
                    f"{self.rotary_dim // 2}"
                )

    @property
    def gated(self) -> bool:
        return self.act in GATED

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (() if self.eos_id is None else (self.eos_id,)) + self.extra_eos_ids

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_fraction)

    @property
    def default_context(self) -> int:
        """How long a text is read unless more is asked for. A model with `LongRope` has other angles for longer texts,
        which also change its answers to short ones."""
        if isinstance(self.rope_scaling, LongRope):
            return min(self.max_positions, self.rope_scaling.original_positions)
        return self.max_positions

    def window(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.sliding_window

    def experts_of(self, layer: int) -> Experts | None:
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def num_params(self, *, with_embeddings: bool = True, active: bool = False) -> int:
        """`active`: only those that one token is multiplied with."""
        d, q, kv = self.d_model, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attn = d * (q + 2 * kv) + q * d
        attn += (q + 2 * kv) * self.qkv_bias + d * self.out_bias
        if self.qk_norm:
            attn += 2 * self.head_dim if self.qk_norm_over == "head" else q + kv
        norm = d * (2 if self.norm == "layer" else 1)
        norms = (4 if self.norm_placement == "both" else 2) * norm
        total = norm + self.num_layers * (attn + norms)
        total += sum(self._num_mlp_params(layer, active) for layer in range(self.num_layers))
        if with_embeddings:
            total += self.vocab_size * d * (1 if self.tied else 2)
            total += self.max_positions * d if self.positions == "learned" else 0
        return total

    def _num_mlp_params(self, layer: int, active: bool) -> int:
        d, matrices = self.d_model, 3 if self.gated else 2

        def mlp(width: int) -> int:
            return matrices * d * width + ((matrices - 1) * width + d) * self.mlp_bias

        experts = self.experts_of(layer)
        if experts is None:
            return mlp(self.d_ff)
        shared = mlp(experts.shared_d_ff) + d if experts.shared_d_ff else 0
        return (experts.top_k if active else experts.num) * mlp(experts.d_ff) + d * experts.num + shared

    def flops_per_token(self, context: int) -> float:
        """Training FLOPs per token: 6 a matrix parameter (head too) + 12*L*H*d_head*context of attention."""
        matrix = self.num_params(with_embeddings=False, active=True) + self.vocab_size * self.d_model
        return 6.0 * matrix + 12.0 * self.num_layers * self.num_heads * self.head_dim * context
