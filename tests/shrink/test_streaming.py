"""An offloaded model: one block at a time is on the device, and the results are the same, bit for bit.

On a CPU the host and the device differ in dtype only: a block is on the device while it is in the compute dtype.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interrupted import dying
from refusals import refused
from shoestring.evals.perplexity import perplexity
from shoestring.formats import convert, pack, parse_format
from shoestring.host.block_offload import fits_on_device, on_device
from shoestring.methods.sparse24.prune import prune
from shoestring.model import Decoder, ModelSpec, save_model
from shoestring.recipes.shrink_run import offload_dtype
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.blockwise import Blockwise, train_blocks
from shoestring.shrink.calibrate import Calibration, block_linears, walk
from shoestring.shrink.gptq import gptq
from shoestring.shrink.mixed_bits import measure_damage
from shoestring.shrink.quantize import METHODS, QuantizeReport, quantize, usual_inputs
from tiny import GPT2, QWEN2, loud_model, tokens

CPU = torch.device("cpu")
HALF, FULL = torch.bfloat16, torch.float32
UNTIED = replace(QWEN2, model_type="llama", qkv_bias=False, tied=False)
RULES = [("*.mlp.*", parse_format("nf3:s2:g32")), ("*", parse_format("int3:g32"))]


def held_in(stored: torch.dtype, compute: torch.dtype, spec: ModelSpec = QWEN2) -> Decoder:
    """A model whose checkpoint is bf16, held in `stored`."""
    model = loud_model(spec).to(HALF).to(stored)
    model.compute_dtype = compute
    return model


def shrink(
    model: Decoder, name: str, onload_device: torch.device | None, files: BlockFiles | None = None, **given: Any
) -> QuantizeReport:
    rules, progress = given.pop("rules", RULES), given.pop("progress", None)
    text = given.pop("text", tokens())
    shared: dict[str, Any] = {"files": files, "progress": progress}
    if name == "blockwise":
        settings = Blockwise(epochs=1, **given)
        return train_blocks(model, rules, text, settings, Calibration(onload_device=onload_device), **shared)
    method = METHODS[name]
    calibration = Calibration(inputs=usual_inputs(method), onload_device=onload_device)
    start = files.count() if files is not None else 0
    steps = walk(model, text, calibration, start=start)
    return quantize(model, rules, steps, method, onload_device=onload_device, **shared)


def delivered(model: Decoder) -> dict[str, Tensor]:
    """What would be stored: packed, everything else in the compute dtype."""
    pack(model, dtype=model.compute_dtype)
    return model.to(model.compute_dtype).state_dict()


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return list(got) == list(want) and all(got[n].dtype == want[n].dtype and torch.equal(got[n], want[n]) for n in want)


def is_on_device(block: nn.Module, compute: torch.dtype) -> bool:
    """Whether any of its matrices is dense in the compute dtype; those that were offloaded are packed."""
    return any(
        layer.decoded is not None or (not layer.packed and layer.weight.dtype == compute)
        for layer in block_linears(block).values()
    )


def watch_blocks(model: Decoder, compute: torch.dtype) -> list[list[int]]:
    """Which blocks are on the device, noted at the end of every forward pass of a block."""
    seen: list[list[int]] = []
    for block in model.blocks:
        block.register_forward_hook(
            lambda *_: seen.append([i for i, b in enumerate(model.blocks) if is_on_device(b, compute)])
        )
    return seen


# -- the same bits -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "stored", "compute"),
    [(name, HALF, FULL) for name in (*METHODS, "blockwise")]
    + [
        (name, *dtypes)
        for name in ("rtn", "awq", "gptq+clip+cd", "blockwise")
        for dtypes in ((FULL, FULL), (FULL, HALF))
    ],
)
@pytest.mark.few(5)
def test_streamed_and_unstreamed_give_the_same_bits(name: str, stored: torch.dtype, compute: torch.dtype) -> None:
    spec = replace(QWEN2, num_layers=2)
    whole, streamed = held_in(compute, compute, spec), held_in(stored, compute, spec)
    # Shorter windows are enough for training, three steps in a block as ever: a CPU may be slow with products in bf16.
    text = tokens(context=12) if name == "blockwise" else tokens()
    want, got = shrink(whole, name, None, text=text), shrink(streamed, name, CPU, text=text)
    assert all(layer.packed for block in streamed.blocks for layer in block_linears(block).values())
    assert same(delivered(streamed), delivered(whole))
    assert got.layers == want.layers and got.blocks == want.blocks
    assert got.converted.changed == want.converted.changed and got.converted.left == want.converted.left


@pytest.mark.parametrize("name", ["gptq", "awq", "blockwise"])
def test_other_shapes_a_named_head_and_dense_layers(name: str) -> None:
    for spec, rules in (
        (GPT2, [("*", parse_format("int4:g32"))]),
        (UNTIED, [("head", parse_format("int4:g32")), ("*.o", parse_format("int3:g32"))]),
    ):
        whole, streamed = held_in(FULL, FULL, spec), held_in(HALF, FULL, spec)
        want, got = shrink(whole, name, None, rules=rules), shrink(streamed, name, CPU, rules=rules)
        assert same(delivered(streamed), delivered(whole)) and got.layers == want.layers


def test_rounding_without_a_text_goes_block_by_block() -> None:
    whole, streamed = held_in(FULL, FULL), held_in(HALF, FULL)
    want = quantize(whole, RULES, (), METHODS["rtn"])
    got = quantize(streamed, RULES, (), METHODS["rtn"], onload_device=CPU)
    assert not any(is_on_device(block, FULL) for block in streamed.blocks)
    assert same(delivered(streamed), delivered(whole)) and got.layers == want.layers


def test_masters_of_blockwise_training_are_the_same() -> None:
    want = shrink(held_in(FULL, FULL), "blockwise", None, keep_masters=True)
    got = shrink(held_in(HALF, FULL), "blockwise", CPU, keep_masters=True)
    assert len(want.masters) == 21 and same(got.masters, want.masters)


@pytest.mark.parametrize(("measure", "units"), [("kl", "layer"), ("loss", "block")])
@pytest.mark.parametrize("spec", [UNTIED, QWEN2], ids=["own head", "tied"])
@pytest.mark.few(2)
def test_damage_is_the_same_and_leaves_the_model_as_it_was(
    spec: ModelSpec, measure: str, units: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = [parse_format("int2:g32"), parse_format("int4:g32")]
    options: dict[str, Any] = {"measure": measure, "units": units}
    want = measure_damage(held_in(FULL, FULL, spec), candidates, tokens(3), **options)
    streamed = held_in(HALF, FULL, spec)
    before = {n: t.clone() for n, t in streamed.state_dict().items()}
    on_it = watch_blocks(streamed, FULL)
    onloaded: list[nn.Module] = []

    def counted(module: nn.Module, *rest: Any) -> Any:
        onloaded.append(module)
        return on_device(module, *rest)

    monkeypatch.setattr("shoestring.shrink.mixed_bits.on_device", counted)
    got = measure_damage(streamed, candidates, tokens(3), calibration=Calibration(onload_device=CPU), **options)
    assert got == want and all(len(blocks) == 1 for blocks in on_it)
    assert same(streamed.state_dict(), before)
    # Once whole; then, for all trials of a block at once, those from it on, and one step to the next.
    blocks = [list(streamed.blocks).index(m) for m in onloaded if m in list(streamed.blocks)]
    assert blocks == [0, 1, 2, 0, 1, 2, 0, 1, 2, 1, 2]
    assert len(onloaded) == len(blocks) + 2  # the norm and the head stay for all of it


@pytest.mark.parametrize("spec", [QWEN2, GPT2, UNTIED], ids=["tied", "gpt2", "own head"])
@pytest.mark.parametrize(("stride", "memory_gb"), [(None, 4.0), (7, 0.0)])
@pytest.mark.few(3)
def test_perplexity_is_that_of_whole_passes(
    spec: ModelSpec, stride: int | None, memory_gb: float, tmp_path: Path
) -> None:
    text = tokens(1, 173)[0]  # the last window is shorter
    calibration = Calibration(onload_device=CPU, memory_gb=memory_gb, folder=str(tmp_path))
    options: dict[str, Any] = {"context": 20, "stride": stride, "batch": 3}
    for packed in (False, True):
        whole, streamed = held_in(FULL, FULL, spec), held_in(HALF, FULL, spec)
        if packed:
            for model in (whole, streamed):
                convert(model, [("*", parse_format("int4:g32"))])
                pack(model, dtype=FULL)
        on_it = watch_blocks(streamed, FULL)
        done: list[int] = []
        want = perplexity(whole, text, **options)
        told = partial(lambda done, now, total: done.append(now), done)
        got = perplexity(streamed, text, offload=calibration, **options, progress=told)
        assert got == want
        assert all(len(blocks) == 1 for blocks in on_it) and len(on_it) > spec.num_layers
        assert len(done) == spec.num_layers and done[-1] == want.num_tokens
        assert not any(is_on_device(block, FULL) for block in streamed.blocks)
        assert streamed.embed.weight.dtype == HALF
    refused("does not fit this model", perplexity, streamed, text, offload=calibration, context=65)


# -- one block at a time -------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gptq", "awq", "blockwise"])
def test_one_block_is_on_the_device_at_a_time_and_is_offloaded_packed(name: str) -> None:
    model = held_in(HALF, FULL)
    large = sum(t.nbytes for t in model.blocks.state_dict().values())
    on_it = watch_blocks(model, FULL)
    shrink(model, name, CPU)
    assert {i for blocks in on_it for i in blocks} == {0, 1, 2}
    assert all(len(blocks) == 1 for blocks in on_it)
    assert not any(is_on_device(block, FULL) for block in model.blocks)
    assert sum(t.nbytes for t in model.blocks.state_dict().values()) < large / 2


@pytest.mark.parametrize("name", ["gptq", "blockwise"])
def test_what_is_alive_becomes_less_with_every_block(name: str) -> None:
    """No grid, gradient or guest is left behind; collected by nobody but the last reference."""
    shrink(held_in(HALF, FULL, replace(QWEN2, num_layers=1)), name, CPU)  # first use makes tables
    model = held_in(HALF, FULL, replace(QWEN2, num_layers=4))
    alive: list[int] = []
    gc.collect()
    gc.disable()
    try:
        shrink(model, name, CPU, progress=lambda *_: alive.append(live_bytes()))
    finally:
        gc.enable()
    packed = sum(t.nbytes for t in model.blocks[0].state_dict().values())
    dense = sum(p.nbytes for p in held_in(HALF, FULL).blocks[0].parameters())
    assert [a - b for a, b in pairwise(alive)] == [dense - packed] * 3


def live_bytes() -> int:
    found: dict[int, int] = {}
    for t in gc.get_objects():
        if issubclass(type(t), Tensor):
            for held in (t, t.grad) if t.is_leaf else (t,):
                with suppress(RuntimeError):  # a compiler's tensors, left by another test, have no storage
                    if held is not None:
                        found[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
    return sum(found.values())


def test_a_visit_is_undone_unless_it_is_kept() -> None:
    model = held_in(HALF, FULL)
    block = model.blocks[0]
    before = {n: t.clone() for n, t in block.state_dict().items()}
    parameters = [id(p) for p in block.parameters()]

    def change() -> None:
        assert all(p.dtype == FULL for p in block.parameters())
        convert(block, [("*", parse_format("int4:g32"))])
        pack(block, dtype=FULL)
        with torch.no_grad():
            block.attn_norm.weight.zero_()  # type: ignore[union-attr]

    with on_device(block, CPU, FULL):
        change()
    assert same(block.state_dict(), before) and [id(p) for p in block.parameters()] == parameters
    with pytest.raises(ZeroDivisionError), on_device(block, CPU, FULL, keep=True):
        change()
        raise ZeroDivisionError
    assert same(block.state_dict(), before) and all(p.requires_grad for p in block.parameters())
    with on_device(block, CPU, FULL, keep=True):
        change()
    assert block.attn.q.packed and not block.attn_norm.weight.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("keep", [False, True])
def test_a_module_without_tensors_has_nothing_to_move(keep: bool) -> None:
    module = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    with on_device(module, torch.device("meta"), HALF, keep=keep):
        module.label = "changed"  # type: ignore[assignment]
        assert module(torch.zeros(2)).tolist() == [0.0, 0.0]
    assert hasattr(module, "label") == keep  # it is undone as for any other module


def test_a_kept_visit_without_a_move_still_works_on_a_copy() -> None:
    block = held_in(FULL, FULL).blocks[0]
    before = {n: t.clone() for n, t in block.state_dict().items()}
    with pytest.raises(ZeroDivisionError), on_device(block, CPU, FULL, keep=True), torch.no_grad():
        for p in block.parameters():
            p.zero_()
        raise ZeroDivisionError
    assert same(block.state_dict(), before)


@pytest.mark.parametrize("name", ["gptq", "blockwise"])
def test_an_error_in_the_middle_of_a_block_leaves_it_offloaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = held_in(HALF, FULL)
    before = {n: t.clone() for n, t in model.blocks[1].state_dict().items()}
    if name == "gptq":  # four groups of layers in a block: dies at the second of the second block
        monkeypatch.setattr("shoestring.shrink.gptq.gptq", dying(5, gptq))
    else:  # three steps in a block: dies in the second block, its layers in the Format they are trained in
        monkeypatch.setattr(torch.optim.AdamW, "step", dying(4, torch.optim.AdamW.step))
    with pytest.raises(KeyboardInterrupt) as stopped:
        shrink(model, name, CPU)
    assert stopped.value.__traceback__ is not None  # it holds the frames, and the walk in them
    assert [block.attn.q.packed for block in model.blocks] == [True, False, False]  # type: ignore[union-attr]
    assert same(model.blocks[1].state_dict(), before)
    assert all(p.requires_grad and p.grad is None for p in model.blocks[1].parameters())


# -- stopping and going on -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gptq", "awq", "blockwise"])
@pytest.mark.parametrize("first", [None, CPU], ids=["whole first", "streamed first"])
@pytest.mark.few(4)
def test_a_run_may_be_resumed_streamed_or_not(
    name: str, first: torch.device | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = held_in(FULL, FULL)
    want = shrink(whole, name, None)
    stored = {None: FULL, CPU: HALF}
    files = BlockFiles(tmp_path / "blocks")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BlockFiles, "save", dying(2, BlockFiles.save))
        shrink(held_in(stored[first], FULL), name, first, files)
    assert files.count() == 2
    then = None if first is not None else CPU
    model = held_in(stored[then], FULL)
    got = shrink(model, name, then, files)
    assert same(delivered(model), delivered(whole)) and got.layers == want.layers


# -- which dtype is offloaded ---------------------------------------------------------------------------------
def test_offloaded_weights_have_the_dtype_of_the_checkpoint_where_the_compute_dtype_holds_it(tmp_path: Path) -> None:
    def stored(dtype: torch.dtype) -> Path:
        return save_model(tmp_path / f"{dtype}", loud_model(), dtype=dtype)

    assert offload_dtype(stored(HALF), FULL) == HALF and offload_dtype(stored(HALF), HALF) == HALF
    assert offload_dtype(stored(FULL), FULL) == FULL
    assert offload_dtype(stored(FULL), HALF) == HALF  # rounded in any case
    assert offload_dtype(stored(HALF), torch.float16) == torch.float16
    assert offload_dtype(tmp_path / "none.gguf", FULL) == FULL
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    stored(HALF).rename(run / "model")
    assert offload_dtype(run, FULL) == HALF
    refused("does not exist", offload_dtype, tmp_path / "nowhere", FULL)
    model = loud_model()
    convert(model, [("*", parse_format("int4:g32"))])
    pack(model)
    assert offload_dtype(save_model(tmp_path / "packed", model), FULL) == FULL


def test_half_of_the_free_memory_is_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.host.block_offload.free_bytes", lambda device: 800)
    assert fits_on_device(100, CPU, FULL)
    monkeypatch.setattr("shoestring.host.block_offload.free_bytes", lambda device: 799)
    assert not fits_on_device(100, CPU, FULL) and fits_on_device(100, CPU, HALF)


# -- on a GPU ------------------------------------------------------------------------------------------------
WIDE = replace(QWEN2, d_model=512, num_heads=8, num_kv_heads=8, head_dim=64, d_ff=1024)
WIDER = replace(UNTIED, d_model=2048, num_heads=16, num_kv_heads=16, head_dim=128, d_ff=2048)
LIBRARIES = 64 << 20  # bytes that cuBLAS and the attention kernels may take for themselves

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def gpu_peak(action: Callable[[], object]) -> int:
    """Bytes that `action` had on the GPU at once, beyond what was there before."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def deep(spec: ModelSpec, num_layers: int = 12) -> Decoder:
    """bf16 on the host and on the device; its blocks are alike, which is quick to make."""
    one = held_in(HALF, HALF, replace(spec, num_layers=1))
    with torch.device("meta"):
        model = Decoder(replace(spec, num_layers=num_layers))
    model.to(HALF).to_empty(device="cpu").eval()
    model.compute_dtype = HALF
    state = {n: t for n, t in one.state_dict().items() if not n.startswith("blocks.")}
    for i in range(num_layers):
        state |= {f"blocks.{i}.{n}": t for n, t in one.blocks[0].state_dict().items()}
    model.load_state_dict(state)
    with torch.no_grad():
        for p in model.blocks.parameters():
            if p.ndim == 2:
                p.mul_(0.7 / 0.15 / p.shape[1] ** 0.5)  # outputs of the size of the inputs, at any width
    return model


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["rtn", "gptq", "awq", "blockwise"])
def test_depth_adds_nothing_on_the_gpu(name: str) -> None:
    """What one block takes there, with its statistics and the work of the method, is all that is ever there."""
    shrink(deep(WIDE, 2), name, gpu())  # first use: libraries, captured sweeps
    shallow, model = deep(WIDE, 2), deep(WIDE)
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    few = gpu_peak(lambda: shrink(shallow, name, gpu()))
    many = gpu_peak(lambda: shrink(model, name, gpu()))
    assert many < few + block / 2
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["rtn", "clip", "gptq", "awq"])
def test_streamed_and_unstreamed_give_the_same_bits_on_the_gpu(name: str) -> None:
    whole, streamed = deep(WIDE).to(gpu()), deep(WIDE)
    shrink(deep(WIDE, 1), name, gpu())  # sweeps are captured, and replayed by both
    shrink(streamed, name, gpu())
    shrink(whole, name, None)
    want = {n: t.cpu() for n, t in delivered(whole).items()}
    assert same(delivered(streamed), want)


@pytest.mark.gpu
@needs_gpu
def test_depth_adds_nothing_to_pruning_on_the_gpu() -> None:
    def run(model: Decoder) -> None:
        steps = walk(model, tokens(), Calibration(onload_device=gpu()))
        prune(model, [("*", parse_format("sparse24:held+slorb16"))], steps, onload_device=gpu())

    run(deep(WIDE, 2))
    shallow, model = deep(WIDE, 2), deep(WIDE)
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    assert gpu_peak(lambda: run(model)) < gpu_peak(lambda: run(shallow)) + block / 2
    whole = deep(WIDE).to(gpu())
    prune(whole, [("*", parse_format("sparse24:held+slorb16"))], walk(whole, tokens()))
    assert same(model.state_dict(), {n: t.cpu() for n, t in whole.state_dict().items()})


@pytest.mark.gpu
@needs_gpu
def test_a_walk_and_an_evaluation_hold_little_more_than_a_block() -> None:
    model, calibration = deep(WIDER), Calibration(onload_device=gpu())
    spec = model.spec
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    ends = 2 * model.embed.weight.nbytes
    text = tokens(1, 6 * 32)[0]
    activations = 6 * 32 * spec.d_model * 2
    # fp32; of q, o, gate and down: sums, means, and the means of the block before.
    hessians = 3 * 4 * (3 * spec.d_model**2 + spec.d_ff**2)

    def go_through(model: Decoder) -> None:
        for _ in walk(model, tokens(), calibration):
            pass

    go_through(deep(WIDER, 1))
    perplexity(deep(WIDER, 1), text, offload=calibration, context=32)
    room = ends + 2.5 * block + activations + LIBRARIES
    assert gpu_peak(lambda: perplexity(model, text, offload=calibration, context=32)) < room
    assert gpu_peak(lambda: go_through(model)) < room + hessians < 12 * block
    got = perplexity(model, text, offload=calibration, context=32)
    want = perplexity(deep(WIDER).to(gpu()), text, context=32)
    assert got.nll == pytest.approx(want.nll, rel=1e-3)
