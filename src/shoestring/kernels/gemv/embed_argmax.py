"""Both ends of a decoding step: from the tokens of the rows to the residual stream, and from logits to a token.

    embed_rows      x = embed[token]; token -1 stands for the token that the previous step chose in this row; where that
                    is NO_TOKEN, token 0: the step is computed and its result not used. With a grid (scale and zero
                    of each row) the rows are 8-bit codes: x = (embed[token] - zero[token]) * scale[token]
    argmax_token_   argmax of each row, the first of equal ones. Many programs search pieces of a row, and the last one
                    compares the pieces: torch's argmax uses one SM per row, which takes longer than all layers of a
                    small model. NO_TOKEN where the logits
                    of a row have a NaN or no finite largest one: the kernel reads every logit in any case, so the host
                    learns of it with the token and no step waits for a check.

In torch these are a dozen small kernels. `embed_rows` lets the kernel behind it start only after the previous step has
finished: later kernels of the step rely on that when they read old keys and values early.

Shapes: T rows, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import next_power_of_2, triton_usable

PIECE = 2048  # logits of a program
NO_TOKEN = -1  # in place of a token: the logits are not finite


Grid = tuple[Tensor, Tensor]  # scale [V], 16 bits, and zero point [V], uint8


def chosen_tokens(tokens_T: Tensor, last_T: Tensor) -> Tensor:
    return torch.where(tokens_T >= 0, tokens_T, last_T).clamp(min=0)


def embed_rows_ref(
    tokens_T: Tensor, last_T: Tensor, embed_VD: Tensor, dtype: torch.dtype, grid: Grid | None = None
) -> Tensor:
    tokens_T = chosen_tokens(tokens_T, last_T)
    if grid is None:
        return F.embedding(tokens_T, embed_VD).to(dtype)
    scale_T1, zero_T1 = (t[tokens_T].float()[:, None] for t in grid)
    return ((embed_VD[tokens_T].float() - zero_T1) * scale_T1).to(dtype)


def embed_rows(
    tokens_T: Tensor, last_T: Tensor, embed_VD: Tensor, dtype: torch.dtype, grid: Grid | None = None
) -> Tensor:
    """As embed_rows_ref; chooses the kernel."""
    if not triton_usable(embed_VD if grid is None else grid[0]):
        return embed_rows_ref(tokens_T, last_T, embed_VD, dtype, grid)
    from shoestring.kernels.gemv.embed_argmax_triton import _embed_rows_kernel

    num_rows, width = tokens_T.shape[0], embed_VD.shape[1]
    assert tokens_T.dtype == last_T.dtype == torch.int64 and embed_VD.is_contiguous()
    assert tokens_T.is_contiguous() and last_T.is_contiguous() and last_T.shape[0] >= num_rows
    out_TD = torch.empty(num_rows, width, dtype=dtype, device=embed_VD.device)
    _embed_rows_kernel[(num_rows, -(-width // 1024))](
        tokens_T, last_T, embed_VD, *(grid or (None, None)), out_TD, WIDTH=width, BLOCK=1024, num_warps=4,
        **pdl_options(out_TD),
    )  # fmt: skip
    return out_TD


def finite_argmax(logits_TV: Tensor, nonfinite: int = NO_TOKEN) -> Tensor:
    """The argmax of each row, [T]; `nonfinite` where the row has a NaN or no finite largest logit."""
    peak_T, best_T = logits_TV.max(dim=-1)  # a NaN counts as the largest; a third of argmax's time on a CPU
    return torch.where(peak_T.isfinite(), best_T, nonfinite)


def argmax_token_ref_(logits_TV: Tensor, out_T: Tensor, nonfinite: int = NO_TOKEN) -> None:
    out_T.copy_(finite_argmax(logits_TV, nonfinite))


def argmax_token_(logits_TV: Tensor, out_T: Tensor, arrived_T: Tensor, nonfinite: int = NO_TOKEN) -> None:
    """As argmax_token_ref_; chooses the kernel. `arrived_T`: int32 zeros, zeros again afterwards; one launch at a time
    may use them."""
    if not triton_usable(logits_TV) or not logits_TV.is_contiguous() or logits_TV.dtype == torch.float64:
        argmax_token_ref_(logits_TV, out_T, nonfinite)
        return
    from shoestring.kernels.gemv.embed_argmax_triton import _argmax_kernel

    assert out_T.dtype == torch.int64 and out_T.is_contiguous()
    assert arrived_T.dtype == torch.int32 and arrived_T.is_contiguous() and len(arrived_T) >= len(out_T)
    peaks, places = _pieces(logits_TV)
    num_rows, num_pieces = peaks.shape
    _argmax_kernel[(num_rows, num_pieces)](
        logits_TV, peaks, places, arrived_T, out_T, logits_TV.shape[1], num_pieces, BLOCK=PIECE,
        PIECES=next_power_of_2(num_pieces), NONFINITE=nonfinite, num_warps=4, **pdl_options(logits_TV),
    )  # fmt: skip


def piece_argmax(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of every piece of a row, fp32, and where it is, int32: [T, pieces] each; where kernels run. A
    NaN in the piece counts as the largest."""
    from shoestring.kernels.gemv.embed_argmax_triton import _piece_argmax_kernel

    peaks, places = _pieces(logits_TV)
    _piece_argmax_kernel[peaks.shape](
        logits_TV, peaks, places, logits_TV.shape[1], peaks.shape[1], BLOCK=PIECE, num_warps=4, **pdl_options(logits_TV)
    )
    return peaks, places


def _pieces(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Room for what `piece_argmax` returns."""
    num_rows, vocab = logits_TV.shape
    assert logits_TV.is_contiguous() and vocab < 2**31
    peaks = torch.empty(num_rows, -(-vocab // PIECE), dtype=torch.float32, device=logits_TV.device)
    return peaks, torch.empty(peaks.shape, dtype=torch.int32, device=logits_TV.device)
