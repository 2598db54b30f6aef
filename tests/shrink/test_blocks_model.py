"""Shrinking a model that is no decoder: a small vision transformer, which sees all its patches at once.

Expected values come from applying each method layer by layer, with inputs taken from ordinary forward passes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.formats import FormatLinear, pack, parse_format
from shoestring.methods.sparse24.prune import PRUNERS, prune, sparsegpt
from shoestring.model.blocks import BlocksModel, InputSource, block_prefixes
from shoestring.shrink.blockwise import Blockwise, train_blocks
from shoestring.shrink.calibrate import Calibration, walk
from shoestring.shrink.chosen_grid import round_to_nearest, state_of
from shoestring.shrink.gptq import gptq
from shoestring.shrink.mixed_bits import measure_damage
from shoestring.shrink.quantize import METHODS, quantize

WIDTH, NUM_BLOCKS, NUM_CLASSES = 32, 3, 10
INT3 = parse_format("int3:g32")
RULES = [("encoder.*", INT3)]


class EncoderBlock(nn.Module):
    """Pre-norm attention over all patches, a bias for every pair of them, and a plain MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = FormatLinear(WIDTH, 3 * WIDTH), FormatLinear(WIDTH, WIDTH)
        self.fc1, self.fc2 = FormatLinear(WIDTH, 2 * WIDTH), FormatLinear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, bias_TT: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_TT)
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class TinyVit(BlocksModel):
    def __init__(self) -> None:
        super().__init__()
        self.compute_dtype = torch.float32
        self.patch = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(EncoderBlock() for _ in range(NUM_BLOCKS))})
        self.last_norm, self.classes = nn.LayerNorm(WIDTH), FormatLinear(WIDTH, NUM_CLASSES)

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        return self.encoder["layers"]  # type: ignore[return-value]

    def embed_inputs(self, inputs: Tensor) -> Tensor:
        return self.patch(inputs).flatten(2).transpose(1, 2)

    def block_args(self, length: int, device: torch.device) -> list[tuple[Tensor]]:  # type: ignore[override]
        at = torch.arange(length, device=device)
        near = -0.1 * (at[:, None] - at[None]).abs().float()
        return [(near * (i + 1),) for i in range(NUM_BLOCKS)]

    def tail_modules(self) -> list[nn.Module]:
        return [self.last_norm, self.classes]

    def final_hidden(self, x: Tensor) -> Tensor:
        return self.last_norm(x)

    def read_logits(self, hidden_RD: Tensor) -> Tensor:
        return self.classes(hidden_RD)

    def input_sources(self, block: nn.Module) -> list[InputSource]:
        assert isinstance(block, EncoderBlock)
        return [InputSource(block.norm1, ("qkv",)), InputSource(block.norm2, ("fc1",))]

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed_inputs(images)
        for block, args in zip(self.blocks, self.block_args(x.shape[1], x.device), strict=True):
            x = block(x, *args)
        return self.read_logits(self.final_hidden(x))


def tiny_vit() -> TinyVit:
    torch.manual_seed(0)
    model = TinyVit().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.norm1.weight[::7] *= 6  # loud channels, as trained models have  # type: ignore[union-attr, operator, index]
    return model


def images(num: int = 6) -> Tensor:
    return torch.randn(num, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def hessian_of(model: TinyVit, name: str) -> Tensor:
    """Mean of x x^T of a layer's inputs in one ordinary forward pass."""
    seen: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda m, a: seen.append(a[0].flatten(0, 1)))
    with torch.no_grad():
        model(images())
    hook.remove()
    return seen[0].T @ seen[0] / len(seen[0])


def by_hand(method: str) -> TinyVit:
    """Layer by layer; GPTQ and SparseGPT see the blocks before as they were changed, and their own block unchanged."""
    model = tiny_vit()
    for prefix in block_prefixes(model):
        names = [prefix + n for n in ("qkv", "proj", "fc1", "fc2")]
        hessians = {name: hessian_of(model, name) for name in names}
        for name in names:
            w = model.get_submodule(name).weight
            assert isinstance(w, Tensor)
            with torch.no_grad():
                if method == "rtn":
                    w.copy_(round_to_nearest(w, INT3, state_of(INT3, w)).weight)  # type: ignore[arg-type]
                elif method == "gptq":
                    w.copy_(gptq(w, hessians[name], INT3, state_of(INT3, w)).weight)  # type: ignore[arg-type]
                else:
                    w.copy_(sparsegpt(w, hessians[name]))
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: m.effective_weight(torch.float32) for n, m in model.named_modules() if isinstance(m, FormatLinear)}


def test_names_of_blocks_are_the_models_own() -> None:
    assert block_prefixes(tiny_vit()) == [f"encoder.layers.{i}." for i in range(NUM_BLOCKS)]


@pytest.mark.parametrize("inputs", ["quantized", "full"])
def test_statistics_are_those_of_a_forward_pass(inputs: str) -> None:
    model = tiny_vit()
    for step in walk(model, images(), Calibration(inputs=inputs, batch=4)):  # type: ignore[arg-type]
        assert list(step.statistics) == ["qkv", "proj", "fc1", "fc2"]
        for name, seen in step.statistics.items():
            expected = hessian_of(model, f"encoder.layers.{step.index}.{name}")
            torch.testing.assert_close(seen.hessian, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offloaded", [False, True], ids=["whole", "one block at a time"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_quantization_agrees_with_the_method_by_hand(method: str, offloaded: bool) -> None:
    model, device = tiny_vit(), torch.device("cpu") if offloaded else None
    steps = walk(model, images(), Calibration(onload_device=device))
    report = quantize(model, RULES, steps, METHODS[method], onload_device=device)
    assert [e.name for e in report.layers][:2] == ["encoder.layers.0.qkv", "encoder.layers.0.proj"]
    assert len(report.layers) == 4 * NUM_BLOCKS and len(pack(model)) == (0 if offloaded else 4 * NUM_BLOCKS)
    got, expected = weights(model), weights(by_hand(method))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)
    assert torch.equal(got["classes"], weights(tiny_vit())["classes"])
    if method == "gptq":
        moved, rounded = ((m(images()) - tiny_vit()(images())).square().mean() for m in (model, by_hand("rtn")))
        assert moved < rounded


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_pruning_agrees_with_the_method_by_hand(method: str) -> None:
    model = tiny_vit()
    steps = walk(model, images()) if method == "sparsegpt" else ()
    report = prune(model, [("encoder.*", parse_format("sparse24"))], steps, PRUNERS[method])
    assert len(report.layers) == 4 * NUM_BLOCKS
    got = weights(model)
    dense = weights(tiny_vit())
    expected = weights(by_hand("sparsegpt")) if method == "sparsegpt" else dense
    for name in got:
        if not name.startswith("encoder."):
            assert torch.equal(got[name], dense[name])
            continue
        assert (got[name].unflatten(-1, (-1, 4)).ne(0).sum(-1) <= 2).all()
        if method == "magnitude":
            kept = got[name] != 0
            assert torch.equal(got[name][kept], dense[name][kept])
        else:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-4)


def test_awq_scales_the_channels_that_the_model_names() -> None:
    model, before = tiny_vit(), tiny_vit()
    quantize(model, RULES, walk(model, images(), Calibration(inputs="full")), METHODS["awq"])
    norms = [not torch.equal(a.norm1.weight, b.norm1.weight) for a, b in zip(model.blocks, before.blocks, strict=True)]  # type: ignore[union-attr, arg-type]
    assert any(norms)
    moved, rounded = ((m(images()) - before(images())).square().mean() for m in (model, by_hand("rtn")))
    assert moved < rounded


def test_damage_is_the_divergence_of_whole_models() -> None:
    units = measure_damage(tiny_vit(), [parse_format("int2:g32"), INT3], images(4))
    assert units[0].name == "encoder.layers.0.qkv" and len(units) == 4 * NUM_BLOCKS
    full = tiny_vit()(images(4)).flatten(0, 1).log_softmax(-1)
    changed = tiny_vit()
    layer = changed.get_submodule(units[5].name)
    with torch.no_grad():
        layer.weight.copy_(round_to_nearest(layer.weight, INT3, state_of(INT3, layer.weight)).weight)  # type: ignore[arg-type, operator, union-attr]
        other = changed(images(4)).flatten(0, 1).log_softmax(-1)
    expected = F.kl_div(other, full, reduction="batchmean", log_target=True)
    assert units[5].options[1].damage == pytest.approx(expected.item(), rel=1e-3)


def test_block_wise_training_makes_every_block_better() -> None:
    model = tiny_vit()
    settings = Blockwise(init="rtn", epochs=2, held_out=0.0, lr_weight=0.1)
    report = train_blocks(model, [("encoder.*", parse_format("int2:g32"))], images(), settings)
    assert len(report.blocks) == NUM_BLOCKS and all(b["after"] < b["before"] for b in report.blocks)
