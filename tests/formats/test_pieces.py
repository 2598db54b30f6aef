"""Large weights are encoded, decoded and read in pieces: the same numbers, in less memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shoestring.formats import FormatEmbedding, base, convert, pack, parse_format
from shoestring.formats.linear import all_finite
from shoestring.model import folder, load_model, save_model
from shoestring.model.gguf_write import save_gguf
from shoestring.state import tensor_files
from tiny import LLAMA, random_model, tiny_tokenizer


@pytest.mark.parametrize("label", ["int8:sym:g0", "int4:g32", "nf3:s2:g32", "int4:min:g32", "fp8"])
def test_pieces_of_a_weight_are_the_weight(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 64)

    def packed() -> FormatEmbedding:
        table = nn.ModuleDict({"embed": nn.Embedding(37, 64, _weight=weight.clone())})
        convert(table, [("embed", parse_format(label))])
        pack(table)
        table["embed"].keep_decoded(torch.float32)  # type: ignore[operator]
        return table["embed"]  # type: ignore[return-value]

    whole = packed()
    sizes: list[int] = []
    encode = type(whole.format).encode
    monkeypatch.setattr(type(whole.format), "encode", lambda self, w, s: sizes.append(len(w)) or encode(self, w, s))
    monkeypatch.setattr(base, "PIECE", 10 * 64)
    pieces = packed()
    assert sizes == [10, 10, 10, 7]
    assert all(torch.equal(t, whole.parts()[n]) for n, t in pieces.parts().items())
    assert torch.equal(pieces.decoded, whole.decoded)  # type: ignore[arg-type]
    format, fake = parse_format(label), type(whole.format).fake
    state = {n: aux.tensor for n, aux in format.state(weight).items()}
    monkeypatch.setattr(type(format), "fake", lambda self, w, s: sizes.append(len(w)) or fake(self, w, s))
    with torch.no_grad():
        assert torch.equal(format.fake_in_pieces(weight, state), whole.decoded)  # type: ignore[arg-type]
    assert sizes[4:] == [10, 10, 10, 7]
    format.fake_in_pieces(weight, state)
    assert sizes[8:] == [37], "one that may be trained has one gradient"


def test_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(replace(LLAMA, d_model=64, d_ff=96, head_dim=16)).eval()
    save_model(tmp_path / "m", model, tiny_tokenizer())
    save_gguf(tmp_path / "m.gguf", model, tiny_tokenizer(), kind="F32")
    monkeypatch.setattr(folder, "_PIECE", 1000)
    monkeypatch.setattr(tensor_files, "MOST_MAPPED", 5000)
    for path in ("m", "m.gguf"):
        read = load_model(tmp_path / path).model.state_dict()
        assert all(torch.equal(t, read[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_found(bad: float, dtype: torch.dtype) -> None:
    t = torch.randn(5, 7).to(dtype)
    assert all_finite(t) and all_finite(t[:0])
    t[3, 2] = bad
    assert not all_finite(t)
