"""One token of one request on a CPU as a single call: C++ that the machine's compiler makes at the first use.

`CpuStep` (cpu_step.py) spends more time in the calls between the products than in the products, and no second
thread helps there. Here the whole step, head included, is one function (kernels/_cpp/token_step.cpp): every
thread runs it over its share of each weight's rows. Same models, same cache; products are w4a8's up to rounding,
with scales and zero points as they are stored. As many threads as torch has (torch.set_num_threads).

`Tiles` is a weight as the function reads it. Left out: everything `steppable` leaves out, machines without a
C++ compiler and heads whose width is no multiple of 16 (CpuStep serves both).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shoestring.kernels
from shoestring.formats.int8_activations import Int8Linear
from shoestring.formats.int_asym import IntAsym
from shoestring.formats.linear import FormatLinear
from shoestring.kernels.cpp import load_library
from shoestring.kernels.packing import unpack_bits
from shoestring.model.attention import rope_frequencies
from shoestring.model.spec import ModelSpec
from shoestring.model.transformer import Block, Decoder
from shoestring.serve.kv_cache import KVCache, Span

SOURCE = Path(shoestring.kernels.__file__).parent / "_cpp" / "token_step.cpp"
ROWS = 8  # of a tile

_int, _address = ctypes.c_int64, ctypes.c_void_p


class _Matrix(ctypes.Structure):
    _fields_ = [
        *((n, _int) for n in ("rows", "width", "group", "bits")),
        *((n, _address) for n in ("codes", "scale", "zero", "total", "bias")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((n, _address) for n in ("attn_norm", "q_norm", "k_norm", "mlp_norm")),
        *((n, _Matrix) for n in ("qkv", "out", "gate_up", "down")),
        *((n, _address) for n in ("keys", "values")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((n, _int) for n in ("width", "heads", "groups", "head_dim", "hidden", "num_layers", "block_size")),
        *((n, _address) for n in ("frequencies", "norm")),
        ("layers", ctypes.POINTER(_Layer)),
        ("head", _Matrix),
        ("eps", ctypes.c_float),
    ]


# -- weights -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tiles:
    """A weight [out, in] in tiles of 8 rows, as token_step.cpp reads it; rows of zeros at the end fill the last."""

    bits: int
    codes: Tensor  # uint8 [tiles, pieces, 4 quads, 8 rows, 4]
    scale: Tensor  # fp32 [tiles, groups, 8]
    zero: Tensor  # uint8 [tiles, groups, 8]
    total: Tensor  # fp32 [rows]
    bias: Tensor | None

    def matrix(self, width: int) -> _Matrix:
        group = width // self.scale.shape[1]
        tensors = (self.codes, self.scale, self.zero, self.total, self.bias)
        return _Matrix(len(self.total), width, group, self.bits, *map(_pointer, tensors))


def tiles_of(*layers: FormatLinear, turns: bool = False) -> Tiles:
    """The layers, which share input and Format, one below the other; `turns`: tile by tile, in turns."""
    format, parts = layers[0].format, [x.parts() for x in layers]
    assert isinstance(format, IntAsym) and all(x.format == format and x.packed for x in layers)
    bias = None if layers[0].bias is None else [x.bias.detach().float() for x in layers]
    rows = [
        [unpack_bits(p["codes"], format.bits) for p in parts],
        [p["scale"].float() for p in parts],
        [p["zero"] for p in parts],
    ]
    codes, scale, zero = (_stack(r, turns) for r in rows)
    total = ((codes.unflatten(1, (scale.shape[1], -1)).float() - zero[..., None]).sum(-1) * scale).sum(-1)
    scale, zero = (t.unflatten(0, (-1, ROWS)).mT.contiguous() for t in (scale, zero))
    bits = 8 if format.bits == 8 else 4
    return Tiles(
        bits, _pieces(codes, bits), scale, zero, total, None if bias is None else _stack(bias, turns)
    )


def _stack(parts: Sequence[Tensor], turns: bool) -> Tensor:
    if turns:
        return torch.stack([p.unflatten(0, (-1, ROWS)) for p in parts], 1).flatten(0, 2)
    whole = torch.cat(list(parts))
    missing = -len(whole) % ROWS
    return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole


def _pieces(codes_NK: Tensor, bits: int) -> Tensor:
    """Inputs in runs of 16: four quads of a piece; two runs share its bytes at 4 bits."""
    runs = codes_NK.view(-1, ROWS, codes_NK.shape[1] // 16, 4, 4).permute(0, 2, 3, 1, 4)
    return (runs if bits == 8 else runs[:, ::2] | runs[:, 1::2] << 4).contiguous()


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


# -- the step ------------------------------------------------------------------------------------------------
@functools.cache
def _function() -> Any:
    library = load_library(SOURCE.read_text())
    if library is None:
        return None
    library.token_step.argtypes = [_address, _address, _int, _address, _address, ctypes.c_int]
    library.token_step.restype = None
    return library.token_step


def compilable(spec: ModelSpec) -> bool:
    """Whether a model that is `steppable` can be computed here; compiles at the first call."""
    # Floats are taken by 16; integers of 32 bits hold the sum of 8-bit products over this many inputs.
    return spec.head_dim % 16 == 0 and max(spec.d_model, spec.d_ff) <= 2**15 and _function() is not None


class TokenStep:
    """As CpuStep, for the same models."""

    @torch.no_grad()
    def __init__(self, model: Decoder) -> None:
        spec, self._step = model.spec, _function()
        self._embed, self._head, self._vocab = (
            model.embed.weight.detach().float(),
            model.head,
            spec.vocab_size,
        )
        self._kept: list[Any] = []  # what the structures point to
        self._layers = (_Layer * spec.num_layers)(*map(self._layer, model.blocks))
        self._cache: tuple[KVCache, int] | None = None  # whose blocks the layers point to
        in_step = isinstance(model.head, Int8Linear) and model.head.packed
        self._model = _Model(
            *(spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.d_ff, spec.num_layers, 0),
            *map(self._keep, (rope_frequencies(spec), model.norm.weight)),
            self._layers,
            self._matrix(model.head) if in_step else _Matrix(),
            spec.norm_eps,
        )

    def _keep(self, t: Tensor | None) -> int | None:
        if t is None:
            return None
        self._kept.append(t.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _matrix(self, *layers: Any, turns: bool = False) -> _Matrix:
        tiles = tiles_of(*layers, turns=turns)
        self._kept.append(tiles)
        return tiles.matrix(layers[0].in_features)

    def _layer(self, block: torch.nn.Module) -> _Layer:
        assert isinstance(block, Block)
        attn, mlp = block.attn, block.mlp
        norms = (block.attn_norm, attn.q_norm, attn.k_norm, block.mlp_norm)
        return _Layer(
            *(None if n is None else self._keep(n.weight) for n in norms),
            self._matrix(attn.q, attn.k, attn.v),
            self._matrix(attn.o),
            self._matrix(mlp.gate, mlp.up, turns=True),
            self._matrix(mlp.down),
        )

    def logits(self, token: int, span: Span, cache: KVCache) -> Tensor:
        """Logits [1, V] of the row; writes its keys and values."""
        model, size = self._model, cache.pool.block_size
        cache.reserve(model.groups, model.head_dim, torch.float32, torch.device("cpu"))
        if self._cache != (cache, cache.num_moves):
            model.block_size, self._cache = size, (cache, cache.num_moves)
            for index, layer in enumerate(self._layers):
                layer.keys, layer.values = map(_pointer, cache.stored(index))
        num = -(-span.stop // size)
        blocks = (ctypes.c_int64 * num)(*span.blocks[:num])
        result = torch.empty(1, model.head.rows or model.width)
        row, threads = self._embed[token].contiguous(), torch.get_num_threads()
        self._step(ctypes.byref(model), row.data_ptr(), span.start, blocks, result.data_ptr(), threads)
        if model.head.rows:
            return result[:, : self._vocab]
        return F.linear(result, self._embed) if self._head is None else self._head(result)
