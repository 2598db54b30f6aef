"""convert, pack, unpack and load on our modules and on Hugging Face models, with a plain PyTorch loop."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from refusals import refused
from shoestring.formats import (
    Aux,
    Dense,
    FloatAsym,
    Format,
    FormatLinear,
    IntAsym,
    Parts,
    allocate_packed,
    bits_per_parameter,
    bypassed,
    convert,
    formats_of,
    init_state,
    keep_decoded,
    pack,
    packed_state,
    parse_format,
    unpack,
)
from shoestring.formats.base import straight_through
from shoestring.methods.sparse24.format import Sparse24


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tiny(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tiny(**kwargs: Any) -> Tiny:
    torch.manual_seed(0)
    return Tiny(**kwargs)


TOKENS = torch.arange(24).view(2, 12)


# -- rules ---------------------------------------------------------------------------------------------------
def test_rules_first_match_wins_and_the_report_says_so() -> None:
    model = tiny(layers=3)
    names, weight = set(model.state_dict()), model.blocks[1].up.weight
    report = convert(model, [("blocks.0.*", Dense()), ("*.down", FloatAsym("nf3")), ("*", IntAsym(bits=4))])
    assert formats_of(model) == {
        **{f"blocks.{i}.down": FloatAsym("nf3") for i in (1, 2)},
        **{f"blocks.{i}.up": IntAsym(bits=4) for i in (1, 2)},
    }
    assert model.blocks[1].up.weight is weight and names <= set(model.state_dict())
    assert type(model.blocks[0].up) is nn.Linear and type(model.head) is nn.Linear
    text = str(report)
    assert "blocks.*.up" in text and "Linear -> int4:g64" in text and "x2" in text and "4.38 bits" in text
    assert "dense by rule" in text and "the output head" in text and "an embedding; name it" in text
    assert len(report.changed) == 4 and {x.name for x in report.left} >= {"head", "embed", "blocks.0.up"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("blocks.0.upp", IntAsym())], "matches no linear layer and no embedding. Did you mean 'blocks.0.up'"),
        ([("*", "int4")], r"is no rule.*parse_format"),
        ({"*": IntAsym()}, r"is no rule"),
        ([("layers.*", IntAsym())], r"matches no linear layer.*blocks\.\*\.down"),
        ([("*", IntAsym()), ("blocks.0.*", Dense())], "Put it before them"),
        ([("embed", Sparse24(select="tile"))], "embed: An embedding cannot be sparse24"),
        ([("e*", IntAsym())], "left alone .embed: an embedding; name it in a rule"),
        ([("he*", IntAsym())], "left alone .head: the output head"),
        ([("*", IntAsym(group=48))], "blocks.0.up: Group 48 does not divide input width 64: use group 32, 64"),
    ],
)
def test_rules_that_cannot_work_change_nothing(rules: list[tuple[str, Format]], message: str) -> None:
    model = tiny()
    refused(message, convert, model, rules)
    assert not formats_of(model) and not any(isinstance(m, FormatLinear) for m in model.modules())
    refused("this model has no linear layer and no embedding", convert, nn.Sequential(nn.ReLU()), [("*", IntAsym())])


def test_the_head_is_converted_when_named() -> None:
    model = tiny()
    convert(model, [("head", IntAsym(bits=8)), ("*", IntAsym())])
    assert formats_of(model)["head"] == IntAsym(bits=8)
    model = tiny()
    convert(model, [("*", IntAsym())], skip=())
    assert "head" in formats_of(model)


def test_a_tied_head_is_left_alone_or_refused() -> None:
    model = tiny(tied=True)
    report = convert(model, [("*", IntAsym())], skip=())
    assert [x.reason for x in report.left if x.name == "head"] == ["its weight is tied to embed"]
    refused("head cannot be converted: its weight is tied to embed", convert, model, [("head", IntAsym())])
    pack(model)
    assert model.head.weight is model.embed.weight
    refused("tied", allocate_packed, model, {"head": IntAsym().to_json()})


def test_modules_with_a_life_of_their_own_are_left_alone() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 2), "ff": nn.Linear(64, 64)})
    report = convert(model, [("*", IntAsym())])
    assert [c.name for c in report.changed] == ["ff"]
    assert "NonDynamicallyQuantizableLinear" in str(report)


def test_one_module_in_two_places_is_converted_once_for_both() -> None:
    model = tiny()
    model.again = model.blocks[0]
    report = convert(model, [("*", IntAsym())])
    assert len(report.changed) == 4 and isinstance(model.again.up, FormatLinear)


def test_hooks_and_existing_optimizers_survive() -> None:
    model, calls = tiny(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    convert(model, [("*", IntAsym())])
    before = model.blocks[0].up.weight.clone()
    model(TOKENS).sum().backward()
    optimizer.step()
    assert calls and not torch.equal(before, model.blocks[0].up.weight)


# -- pack, load, unpack --------------------------------------------------------------------------------------
def converted() -> Tiny:
    model = tiny()
    convert(model, [("*.up", FloatAsym("nf3", group=32)), ("*", IntAsym(bits=3))])
    return model


def test_packed_state_dict_and_safetensors_round_trip(tmp_path: Path) -> None:
    model = converted()
    expected = model(TOKENS)
    state_before = packed_state(model)
    assert pack(model) == [f"blocks.{i}.{n}" for i in (0, 1) for n in ("up", "down")]
    state = model.state_dict()
    assert state.keys() == state_before.keys() and all(torch.equal(state[k], state_before[k]) for k in state)
    assert "blocks.0.up.weight" not in state and "blocks.0.up.weight_table" in state
    assert state["blocks.0.down.weight_codes"].shape == (64, 128 * 3 // 8)
    assert torch.equal(model(TOKENS), expected)

    save_file(state, tmp_path / "model.safetensors")
    fresh = Tiny()
    allocate_packed(fresh, {n: f.to_json() for n, f in formats_of(model).items()})
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(fresh(TOKENS), expected) and formats_of(fresh) == formats_of(model)

    with torch.device("meta"):
        built = Tiny()
    allocate_packed(built, {n: f.to_json() for n, f in formats_of(model).items()})
    built.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert torch.equal(built(TOKENS), expected)

    allocate_packed(fresh, {"blocks.0.down": IntAsym(bits=3).to_json()})  # a packed layer can be prepared again
    fresh.load_state_dict(state)
    assert unpack(fresh) and not formats_of(fresh)
    assert torch.equal(fresh(TOKENS), expected)
    assert fresh.blocks[0].up.weight.requires_grad and "blocks.0.up.weight_codes" not in fresh.state_dict()


def test_training_state_dict_round_trips() -> None:
    model = converted()
    other = tiny()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    convert(other, [("*.up", FloatAsym("nf3", group=32)), ("*", IntAsym(bits=3))])
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_convert_on_meta_then_fill() -> None:
    with torch.device("meta"):
        model = Tiny()
    convert(model, [("*.up", FloatAsym("nf3", group=32)), ("*", IntAsym(bits=3))])
    model.to_empty(device="cpu")
    model.load_state_dict(tiny().state_dict(), strict=False)
    init_state(model)
    assert torch.equal(model(TOKENS), converted()(TOKENS))


def test_changing_the_dtype_of_a_model_leaves_the_stored_parts() -> None:
    model = converted()
    pack(model)
    before = {n: t.clone() for n, t in model.state_dict().items() if ".weight_" in n}
    model.to(torch.bfloat16)
    after = model.state_dict()
    assert all(after[n].dtype == t.dtype and torch.equal(after[n], t) for n, t in before.items())
    assert model(TOKENS).dtype == torch.bfloat16
    training = converted().to(torch.bfloat16)
    assert training.blocks[0].up.weight_table.dtype == torch.float32


def test_misuse_is_explained() -> None:
    model = converted()
    pack(model)
    refused("call unpack", convert, model, [("*", IntAsym())])
    refused(r"Did you mean 'blocks\.0\.up'", allocate_packed, tiny(), {"blocks.0.upp": IntAsym().to_json()})
    broken = converted()
    with torch.no_grad():
        broken.blocks[1].down.weight[3, 3] = float("nan")
    refused(r"blocks\.1\.down: The weight holds NaN", pack, broken)


def test_autocast_and_pack_agree() -> None:
    """Under autocast the quantizer sees autocast's dtype, so packing in that dtype gives the same output."""
    layer, x = FormatLinear(64, 16, format=IntAsym(bits=3)), torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        assert expected.dtype == torch.bfloat16
        layer.pack(torch.bfloat16)
        assert torch.equal(layer(x), expected)


def test_bits_per_parameter_of_a_model() -> None:
    model = tiny()
    convert(model, [("*", IntAsym(bits=4, group=64))])
    assert bits_per_parameter(model) == 4.375
    pack(model)
    assert bits_per_parameter(model) == 4.375
    assert bits_per_parameter(nn.Sequential(FormatLinear(8, 8))) == 32.0  # fp32 weights are 32 bits
    assert Dense().bits_per_weight((8, 8)) == 16.0


# -- a Format of one's own, with every kind of state ---------------------------------------------------------
@dataclass(frozen=True)
class Masked(Format):
    """Half the weights, times a learned scale per row: rows, trained, whole and clock state in one Format."""

    name: ClassVar[str] = "masked"
    whole_parts: ClassVar[tuple[str, ...]] = ("factor",)

    def bits_per_weight(self, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> float:
        return 8.0 * dtype.itemsize

    def state(self, w: Tensor) -> dict[str, Aux]:
        keep = w.abs() >= w.abs().median(1, keepdim=True).values
        return {
            "mask": Aux(keep, "rows"),
            "gain": Aux(torch.ones(w.shape[0], 1, device=w.device), "trained"),
            "factor": Aux(torch.tensor([2.0], device=w.device), "whole"),
            "step": Aux(torch.zeros((), dtype=torch.int64, device=w.device), "clock"),
        }

    def encode(self, w: Tensor, state: Parts) -> Parts:
        value = (w.float() * state["mask"] * state["gain"] * state["factor"]).to(w.dtype)
        return {"value": value, "factor": state["factor"]}

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        return parts["value"].to(dtype)

    def empty_parts(self, shape: tuple[int, int], dtype: torch.dtype) -> Parts:
        return {"value": torch.empty(shape, dtype=dtype), "factor": torch.empty(1)}

    def fake(self, w: Tensor, state: Parts) -> Tensor:
        hard = self.decode(self.encode(w.detach(), {n: t.detach() for n, t in state.items()}), w.dtype)
        return straight_through(w * state["mask"] * state["gain"] * state["factor"], hard)

    def error_bound(self, w: Tensor, state: Parts) -> Tensor:
        return w.abs() * (state["gain"].abs() * state["factor"] + 1)


def test_a_format_is_whole_or_none() -> None:
    @dataclass(frozen=True)
    class Partial(Format):
        name: ClassVar[str] = "partial"

    with pytest.raises(TypeError, match="abstract"):
        Partial()


def test_every_kind_of_state_is_hosted() -> None:
    model = tiny()
    convert(model, [("*", Masked())])
    assert bits_per_parameter(model) == 32.0
    layer = model.blocks[0].up
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    assert not parameters["weight_mask"].requires_grad and parameters["weight_gain"].requires_grad
    assert set(buffers) == {"weight_factor", "weight_step"}
    model(TOKENS).square().mean().backward()
    assert layer.weight_gain.grad.abs().sum() > 0
    assert (layer.weight.grad[~layer.weight_mask] == 0).all() and layer.weight.grad.abs().sum() > 0
    with torch.no_grad():
        layer.weight_gain.add_(0.5)
    expected = model(TOKENS)
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(TOKENS), expected)
    pack(model)
    assert torch.equal(model(TOKENS), expected)
    assert not any("mask" in n or "gain" in n or "step" in n for n in model.state_dict())
    convert(twin, [("*", Dense())])  # back to dense: the state goes, the weight stays
    assert not any(".weight_" in n for n in twin.state_dict())


# -- torch.compile -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", ["nf3:g32", pytest.param("int4:g32", marks=pytest.mark.lab)])
def test_ten_layers_compile_once(label: str) -> None:
    """Layers differ in tensors only, so one compiled block serves all of them, training and packed."""
    from torch._dynamo.testing import CompileCounterWithBackend

    for is_packed in (False, True):
        torch._dynamo.reset()
        model = tiny(layers=10, width=32)
        convert(model, [("*", parse_format(label))])
        if is_packed:
            pack(model)
        counter = CompileCounterWithBackend("aot_eager")
        step = torch.compile(lambda block, x: block(x), backend=counter, fullgraph=True)
        x = torch.randn(4, 32)
        for block in model.blocks:
            assert torch.equal(step(block, x), block(x))
        assert counter.frame_count == 1


# -- someone else's model, someone else's loop ---------------------------------------------------------------
def hf_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bring_your_own_loop(kind: str) -> None:
    model = hf_model(kind)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    names, dense = set(model.state_dict()), model(tokens).logits
    report = convert(model, [("*", IntAsym(bits=8, group=32))])
    assert (model(tokens).logits - dense).abs().max() < 0.02  # 8 bits: the same function, transposes included
    convert(model, [("*", FloatAsym("nf3", group=32))])
    assert names <= set(model.state_dict())
    assert len(report.changed) == (14 if kind == "llama" else 8)
    assert "lm_head" in {x.name for x in report.left}

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5
    for name in formats_of(model):
        grad = model.get_submodule(name).weight.grad
        assert grad is not None and grad.abs().sum() > 0, name

    last = model(tokens).logits
    pack(model)
    assert torch.equal(model(tokens).logits, last)
    if kind == "gpt2":  # tied in this model, and still so
        assert model.lm_head.weight is model.transformer.wte.weight


def test_kept_decoded_weights_give_the_same_outputs_until_the_model_changes() -> None:
    layer = FormatLinear(64, 16)
    convert(nn.Sequential(layer), [("*", parse_format("nf3:g32"))])
    layer.pack()
    x = torch.randn(3, 64)
    want = layer(x)
    keep_decoded(layer)
    assert layer.decoded is not None and torch.equal(layer(x), want)
    assert set(layer.state_dict()) == {"bias", "weight_codes", "weight_scale", "weight_table"}
    other = {k: v.clone() for k, v in layer.state_dict().items()}
    other["weight_scale"] *= 2
    layer.load_state_dict(other)  # the copy is stale now and must not be used
    torch.testing.assert_close(layer(x) - layer.bias, 2 * (want - layer.bias))
    keep_decoded(layer)
    layer.to(torch.bfloat16)
    assert layer.decoded is None


# -- modules that read weights past their layers ---------------------------------------------------------------


def encoder(norm_first: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_transformer_encoder_computes_with_its_formats(norm_first: bool, masked: bool) -> None:
    """torch's fast path reads linear1.weight: it evaluated the unquantized model, and failed on a packed one."""
    model, x = encoder(norm_first), torch.randn(3, 5, 32)
    mask = torch.arange(5)[None] >= torch.tensor([[5], [3], [4]]) if masked else None
    dense = model(x, src_key_padding_mask=mask)
    report = convert(model, [("*", IntAsym(bits=2, group=16))])
    assert {c.name.rsplit(".", 1)[1] for c in report.changed} == {"linear1", "linear2"}
    got = model(x, src_key_padding_mask=mask)
    seen = slice(None) if mask is None else ~mask
    assert (got[seen] - dense[seen]).abs().max() > 1e-2
    torch.testing.assert_close(got[seen], model.train()(x, src_key_padding_mask=mask)[seen])
    pack(model.eval())
    torch.testing.assert_close(model(x, src_key_padding_mask=mask)[seen], got[seen])
    assert bypassed(model, x) == []


def test_every_weight_that_stays_dense_is_named() -> None:
    model = encoder()
    report = convert(model, [("*", IntAsym(bits=4, group=16))])
    left = {x.name: x for x in report.left}
    assert left["layers.0.self_attn.in_proj_weight"].num_bytes == 96 * 32 * 4
    assert left["layers.1.self_attn.out_proj"].num_bytes == (32 * 32 + 32) * 4
    assert str(report).endswith(f"{len(report.left)} left alone (0.0 MB)")


def test_layers_that_other_code_reads_are_found() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.read = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.own(x), self.read.weight)

    model = Reader()
    convert(model, [("*", IntAsym(bits=4, group=16))])
    assert bypassed(model, torch.randn(2, 32)) == ["read"]
