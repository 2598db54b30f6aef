"""Embeddings: one vector per text, from the hidden states after the last layer; the head is not computed.

Short texts are computed several at once, padded to the longest of them: attention is causal, so padding behind a text
changes nothing in it. A text longer than `chunk` is computed in parts, with a KV cache of its own.
Left out: a cache of embeddings, and sharing prefixes between texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from shoestring.model.transformer import Decoder
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.kv_cache import KVCache
from shoestring.serve.engine.prompt_attention import limit_cudnn_plans

KV_BLOCK = 16
Pooling = Literal["mean", "last", "cls"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last", "cls")  # of all tokens, the last one, the first one


def embedding_batches(lengths: Sequence[int], chunk: int) -> list[list[int]]:
    """Which texts are computed together: numbers of texts, in rows of at most `chunk` with their padding. A longer text
    is alone."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= chunk:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


@torch.no_grad()
def embedding_parts(
    model: Decoder, texts: Sequence[Sequence[int]], pooling: Pooling, chunk: int
) -> Iterator[Tensor | None]:
    """A forward for each part: None for all but the last, which gives the vectors [N, D] in fp32 on the CPU. `texts`
    are one batch of `embedding_batches`."""
    if len(texts) == 1 and len(texts[0]) > chunk:
        yield from _long_parts(model, texts[0], pooling, chunk)
        return
    ids_NT = padded(texts).to(model.norm.weight.device)
    with limit_cudnn_plans():
        hidden_NTD = model.hidden(ids_NT)
    yield pooled(hidden_NTD, [len(text) for text in texts], pooling)


def _long_parts(model: Decoder, text: Sequence[int], pooling: Pooling, chunk: int) -> Iterator[Tensor | None]:
    device = model.norm.weight.device
    cache = KVCache(model.plan, BlockPool(-(-len(text) // KV_BLOCK), KV_BLOCK, prefix_cache=False))
    found = torch.zeros(0)
    for start in range(0, len(text), chunk):
        stop = min(start + chunk, len(text))
        ids, at = torch.tensor([list(text[start:stop])], device=device), torch.arange(start, stop, device=device)[None]
        span = RowSpan(range(cache.pool.num_blocks), start, stop - start)
        with limit_cudnn_plans():
            hidden_TD = model.hidden(ids, at, attend=cache.plan([span], device))[0].float()
        if pooling == "mean":
            found = hidden_TD.sum(0) + (found.to(device) if start else 0)
        elif pooling == "last" or start == 0:
            found = hidden_TD[-1 if pooling == "last" else 0]
        yield None if stop < len(text) else (found / len(text) if pooling == "mean" else found)[None].cpu()


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """Token ids [N, T], with zeros behind the shorter texts."""
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])


def pooled(hidden_NTD: Tensor, lengths: Sequence[int], pooling: Pooling) -> Tensor:
    """[N, D] in fp32 on the CPU; what stands behind the end of a text is left out."""
    num = torch.tensor(lengths, device=hidden_NTD.device)
    if pooling == "mean":
        inside_NT = torch.arange(hidden_NTD.shape[1], device=hidden_NTD.device)[None] < num[:, None]
        return (torch.where(inside_NT[..., None], hidden_NTD.float(), 0).sum(1) / num[:, None]).cpu()
    at = num - 1 if pooling == "last" else torch.zeros_like(num)
    return hidden_NTD[torch.arange(len(lengths), device=at.device), at].float().cpu()
