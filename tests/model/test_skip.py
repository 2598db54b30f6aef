"""Skip sets on the decoder: what is left out is left out, what is not is untouched; ids, files, compilation."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from refusals import refused
from shoestring.model.skip import PASS, SkipSet, StandIn, Sublayer, all_sublayers
from shoestring.model.spec import ModelSpec
from shoestring.model.transformer import Decoder

SPEC = ModelSpec(61, 32, 3, 4, 2, 8, 48, 32)
TOKENS = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))


def build() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SPEC)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
    return model.eval()


def vector(seed: int) -> Tensor:
    return 1 + 0.1 * torch.randn(32, generator=torch.Generator().manual_seed(seed))


def some_set() -> SkipSet:
    return SkipSet(
        {
            Sublayer(0, "mlp"): StandIn(torch.tensor([1.25])),
            Sublayer(1, "attn"): StandIn(vector(1), vector(2)),
            Sublayer(2, "attn"): PASS,
            Sublayer(2, "mlp"): StandIn(None, vector(3)),
        },
        name="some",
    )


@torch.no_grad()
def test_none_and_the_empty_set_change_no_bit() -> None:
    model = build()
    want = model(TOKENS)
    assert torch.equal(model(TOKENS, skip=None), want)
    assert torch.equal(model(TOKENS, skip=SkipSet([])), want)
    assert torch.equal(model(TOKENS, watch=lambda *_: None), want)


@torch.no_grad()
def test_skipped_sublayers_are_replaced_by_their_stand_ins() -> None:
    """Against the same weights with the sublayers' outputs patched by hand."""
    model = build()
    seen: list[int] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from shoestring.model.attention import causal_attention

        seen.append(layer)
        return causal_attention(q, k, v)

    got = model(TOKENS, attend=attend, skip=some_set())
    assert seen == [0]  # the others are skipped, so nobody hears of their keys and values
    # A sublayer that adds (scale - 1) x + shift gives scale x + shift.
    streams: dict[str, Tensor] = {}
    for layer, block in enumerate(model.blocks):
        for kind, norm, part in (("attn", block.attn_norm, block.attn), ("mlp", block.mlp_norm, block.mlp)):
            stand = some_set().skipped.get(Sublayer(layer, kind))  # type: ignore[arg-type]
            if stand is None:
                continue
            norm.register_forward_pre_hook(lambda m, args, key=f"{layer}{kind}": streams.__setitem__(key, args[0]))

            def added(m: object, args: object, out: Tensor, key: str = f"{layer}{kind}", s: StandIn = stand) -> Tensor:
                x = streams[key]
                return x * ((1 if s.scale is None else s.scale) - 1) + (0 if s.shift is None else s.shift)

            part.register_forward_hook(added)
    torch.testing.assert_close(got, model(TOKENS), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_watch_sees_the_stream_around_every_sublayer() -> None:
    model = build()
    seen: dict[Sublayer, tuple[Tensor, Tensor]] = {}
    model(TOKENS, skip=some_set(), watch=lambda layer, kind, x, y: seen.__setitem__(Sublayer(layer, kind), (x, y)))
    assert list(seen) == all_sublayers(3)
    for before, after in zip(all_sublayers(3), all_sublayers(3)[1:], strict=False):
        assert seen[before][1] is seen[after][0]
    x, y = seen[Sublayer(0, "mlp")]
    torch.testing.assert_close(y, 1.25 * x)


def test_stand_ins_keep_the_streams_dtype_and_its_precision() -> None:
    scale = torch.tensor([1.0035])  # 1.0 in bf16
    x = torch.full((1, 1, 32), 3.0, dtype=torch.float64)
    assert torch.equal(StandIn(scale, vector(0)).apply(x), x * scale.double() + vector(0).double())
    low = StandIn(scale).apply(x.bfloat16() * 100)
    assert low.dtype == torch.bfloat16 and float(low[0, 0, 0]) != 300.0


def test_ids_are_made_of_everything_but_the_name() -> None:
    ids = {
        SkipSet([]).id, SkipSet([Sublayer(1, "attn")]).id, SkipSet([Sublayer(1, "mlp")]).id,
        SkipSet({Sublayer(1, "mlp"): StandIn(torch.tensor([1.5]))}).id,
        SkipSet({Sublayer(1, "mlp"): StandIn(torch.tensor([1.6]))}).id,
        SkipSet({Sublayer(1, "mlp"): StandIn(None, torch.tensor([1.6]))}).id, some_set().id,
    }  # fmt: skip
    assert len(ids) == 7
    one = SkipSet([Sublayer(1, "mlp"), Sublayer(0, "attn")], name="a")
    two = SkipSet([Sublayer(0, "attn"), Sublayer(1, "mlp")], name="b")
    assert one == two and hash(one) == hash(two) and len(one) == 2
    both = SkipSet([Sublayer(2, "mlp")]).plus(some_set())
    assert both.skipped[Sublayer(2, "mlp")] is PASS and len(both) == 4 and both != some_set()


def test_files_round_trip_and_bad_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "skip.json"
    path.write_text(json.dumps(some_set().to_json()))
    again = SkipSet.read(path)
    assert again == some_set() and again.name == "some"
    row = {"layer": 1, "kind": "attn"}
    for bad in (
        "no json",
        "[]",
        '{"format": "other"}',
        json.dumps({**some_set().to_json(), "skipped": [{**row, "kind": "ffn"}]}),
        json.dumps({**some_set().to_json(), "skipped": [row, row]}),
        json.dumps({**some_set().to_json(), "skipped": [{**row, "scale": [float("inf")]}]}),
        json.dumps({**some_set().to_json(), "skipped": [{**row, "scale": 1.0}]}),
    ):
        path.write_text(bad)
        refused("skip set", SkipSet.read, path)
    refused("cannot read", SkipSet.read, tmp_path / "absent.json")
    refused("layer 3", SkipSet([Sublayer(3, "mlp")]).check, SPEC)
    refused("width is 32", SkipSet({Sublayer(1, "mlp"): StandIn(torch.ones(31))}).check, SPEC)


@torch.no_grad()
def test_a_set_compiles_without_a_break() -> None:
    model = build()
    want = model(TOKENS, skip=some_set()), model(TOKENS)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(TOKENS, skip=some_set()), want[0])
    torch.testing.assert_close(model(TOKENS), want[1])
