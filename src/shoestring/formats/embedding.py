"""FormatEmbedding: an embedding whose table has a Format.

A packed table stays packed: a lookup gathers the rows of the stored parts and decodes those. A tied output head is the
same table (`multiply`), with the Format's kernel where there is one, so that nothing is stored twice.

A Format must treat every row by itself (`Format.row_wise`: integers and tables), or rows could not be looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.formats.base import Format
from shoestring.formats.dense import Dense
from shoestring.formats.linear import FormatHost, local
from shoestring.formats.rounding import cast_weight


def check_row_wise(format: Format) -> None:
    if not (format.row_wise or isinstance(format, Dense)):
        raise UserError(
            f"An embedding cannot be {format.label}: its rows are looked up one by one. Use an integer or table "
            "format, for example int8:g0 or int4:g64."
        )


class FormatEmbedding(FormatHost, nn.Embedding):
    """Indices [...] -> rows [..., width]."""

    packed_dtype: torch.dtype  # in which a packed table gives its rows; follows model.to(dtype)

    def __init__(self, num_embeddings: int, embedding_dim: int, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        self._host()

    def _host(self) -> None:
        super()._host()
        self.packed_dtype = self.weight.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return (self.num_embeddings, self.embedding_dim)

    def check_format(self, format: Format) -> None:
        check_row_wise(format)
        super().check_format(format)

    def forward(self, index: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """In `dtype`; by default in that of the weight, or in that in which it was packed."""
        if dtype is None:
            dtype = self.packed_dtype if self.packed else self.weight.dtype
        return self.rows(index, dtype)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows `index`, in `dtype`."""
        if self.decoded is not None and self.decoded.dtype == dtype:
            return F.embedding(index, self.decoded)
        if self.packed:
            return self.decode_rows(index.flatten(), dtype).view(*index.shape, -1)
        rows = F.embedding(index, local(self.weight))
        if isinstance(self.format, Dense):
            return rows.to(dtype)
        # Tables belong to all rows.
        of_rows = {n: t if n in self.format.whole_parts else t[index.flatten()] for n, t in self.format_state().items()}
        return self.format.fake(cast_weight(rows, dtype).flatten(0, -2), of_rows).view(*index.shape, -1)

    def use_kernels(self) -> bool:
        """False: rows are looked up in the stored parts, which the kernels of a tied head read as they are."""
        return False

    def pack(self, dtype: torch.dtype = torch.float32) -> None:
        super().pack(dtype)
        self.packed_dtype = dtype

    def allocate_packed(self, format: Format, dtype: torch.dtype = torch.float32) -> None:
        super().allocate_packed(format, dtype)
        self.packed_dtype = dtype

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.packed_dtype = fn(torch.empty(0, dtype=self.packed_dtype)).dtype
        return super()._apply(fn, recurse)
