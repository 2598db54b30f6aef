"""ModelSpec: everything that decides the shape and the arithmetic of a decoder.

One spec covers Llama, Mistral, Qwen2, Qwen3, SmolLM2 and GPT-2; `hf.py` reads it from and writes it to a Hugging Face
config.json. Dtype, device, sharding and formats are decided outside the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoestring.errors import UserError

SIZES = ["vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff", "max_positions"]
GATED = ("swiglu", "geglu", "geglu_tanh")  # down(act(gate(x)) * up(x)); the others are down(act(up(x)))
MOST_SIZE, MOST_LAYERS = 1 << 26, 10_000  # more means a damaged file


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling: long wavelengths divided by `factor`, short ones kept, the rest blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


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
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    act: Literal["swiglu", "geglu", "geglu_tanh", "gelu_tanh", "gelu"] = "swiglu"
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True
    sliding_window: int | None = None
    first_window_layer: int = 0  # layers below this attend to everything (Qwen2's max_window_layers)
    bos_id: int | None = None
    eos_id: int | None = None
    extra_eos_ids: tuple[int, ...] = ()  # further tokens that end a text (Llama 3's end of turn)

    def __post_init__(self) -> None:
        for name in SIZES:
            size, most = getattr(self, name), MOST_LAYERS if name == "num_layers" else MOST_SIZE
            if not isinstance(size, int) or not 1 <= size <= most:
                raise UserError(
                    f"{name}={size!r} is not a model's: allowed are 1 to {most:,}; check the config or the header"
                )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "grouped-query attention needs a whole number of query heads per key/value head"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} is odd; rotary positions rotate pairs and need it even")

    @property
    def gated(self) -> bool:
        return self.act in GATED

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (() if self.eos_id is None else (self.eos_id,)) + self.extra_eos_ids

    def window(self, layer: int) -> int | None:
        return self.sliding_window if layer >= self.first_window_layer else None

    def num_params(self, *, with_embeddings: bool = True) -> int:
        d, q, kv = self.d_model, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attn = d * (q + 2 * kv) + q * d
        attn += (q + 2 * kv) * self.qkv_bias + d * self.out_bias + 2 * self.head_dim * self.qk_norm
        matrices = 3 if self.gated else 2
        mlp = matrices * d * self.d_ff + ((matrices - 1) * self.d_ff + d) * self.mlp_bias
        norm = d * (2 if self.norm == "layer" else 1)
        total = self.num_layers * (attn + mlp + 2 * norm) + norm
        if with_embeddings:
            total += self.vocab_size * d * (1 if self.tied else 2)
            total += self.max_positions * d if self.positions == "learned" else 0
        return total

    def flops_per_token(self, context: int) -> float:
        """Training FLOPs per token: 6 per matrix parameter (head included) + 12*L*H*d_head*context for attention."""
        matrix = self.num_params(with_embeddings=False) + self.vocab_size * self.d_model
        return 6.0 * matrix + 12.0 * self.num_layers * self.num_heads * self.head_dim * context
