"""The step in C++: the function it states, on any number of threads, and what happens where it cannot be had."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoestring.formats import convert, int8_activations, pack, parse_format
from shoestring.formats.int8_activations import Int8Linear, quantize_activations
from shoestring.kernels import cpp
from shoestring.kernels.w4a8 import unusable, w4a8_ref
from shoestring.model import Decoder, ModelSpec
from shoestring.model.untie import untie_head
from shoestring.serve import token_step
from shoestring.serve.blocks import BlockPool
from shoestring.serve.kv_cache import KVCache, Span
from shoestring.serve.runner import Runner
from shoestring.serve.token_step import TokenStep, compilable

SPEC = ModelSpec(90, 64, 2, 4, 2, 16, 160, 64, bos_id=1, eos_id=2)
pytestmark = [
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
    pytest.mark.skipif(cpp.find_compiler() is None, reason="needs a C++ compiler"),
]
WITHOUT = "#undef __ARM_FEATURE_DOTPROD\n#undef __AVX2__\n"


def served(spec: ModelSpec = SPEC, label: str = "int4:g32", head: str = "int8:sym:g0") -> Decoder:
    torch.manual_seed(0)
    model = Decoder(spec).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
    convert(model, [("*", parse_format(label))])
    pack(model)
    if head:
        untie_head(model, parse_format(head))
    quantize_activations(model)
    return model


def cache_of(spec: ModelSpec, block_size: int = 4) -> KVCache:
    cache = KVCache(spec, BlockPool(16, block_size))
    cache.pool.num_touched = 16  # type: ignore[misc]
    return cache


@torch.no_grad()
def difference(model: Decoder, monkeypatch: pytest.MonkeyPatch, threads: int = 2, num: int = 13) -> float:
    """Of the logits of the last of `num` tokens that step after step has read, to those of the whole model with
    inputs rounded in plain torch; keys and values too. In units of the largest."""
    step, cache, blocks = TokenStep(model), cache_of(model.spec), [6, 1, 3, 0]
    tokens = torch.randint(model.spec.vocab_size, (num,), generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for position, token in enumerate(tokens.tolist()):
            got = step.logits(token, Span(blocks, position, 1), cache)
    finally:
        torch.set_num_threads(before)
    with monkeypatch.context() as patch:
        patch.setattr(Int8Linear, "operands8", lambda self: self.effective_weight(torch.float32))
        patch.setattr(int8_activations, "w4a8", w4a8_ref)
        other = cache_of(model.spec)
        plan = other.plan([Span(blocks, 0, num)], "cpu")
        wanted = model(tokens[None], torch.arange(num)[None], attend=plan)[0, -1:]
    assert got.shape == wanted.shape
    pairs = [(got, wanted)]
    for layer in range(model.spec.num_layers):
        pairs += zip(cache.stored(layer), other.stored(layer), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, model_type="qwen2", qkv_bias=True),
        replace(SPEC, model_type="qwen3", qk_norm=True),
        replace(SPEC, num_kv_heads=1, mlp_bias=True, out_bias=True),
        replace(SPEC, num_heads=2, num_kv_heads=2, head_dim=48),
    ],
    ids=["llama", "qwen2", "qwen3", "biases", "heads of 48"],
)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_it_computes_products_of_rounded_inputs(
    spec: ModelSpec, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert difference(served(spec), monkeypatch, threads) < 1e-4


@pytest.mark.parametrize("label", ["int4:sym:g32", "int4:g0", "int3:g32", "int2:sym:g32", "int8:g32"])
@pytest.mark.parametrize("head", ["", "int8:g32", "int4:g64"])
def test_formats_and_heads(label: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert difference(served(label=label, head=head), monkeypatch, num=5) < 1e-4


def test_without_special_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cpp.load_library(WITHOUT + token_step.SOURCE.read_text())
    assert library is not None
    known = token_step._function()
    library.token_step.argtypes, library.token_step.restype = known.argtypes, known.restype
    monkeypatch.setattr(token_step, "_function", lambda: library.token_step)
    assert difference(served(), monkeypatch) < 1e-4


@torch.no_grad()
def test_what_is_not_a_number_stays_so() -> None:
    for poison in (float("nan"), float("inf")):
        model = served()
        model.embed.weight[7, 3] = poison
        logits = TokenStep(model).logits(7, Span([0], 0, 1), cache_of(SPEC))
        assert logits.isnan().all()


def test_callers_on_several_threads_take_turns_and_a_fork_has_threads_of_its_own() -> None:
    model = served()
    step = TokenStep(model)
    wanted = step.logits(5, Span([0], 0, 1), cache_of(SPEC))
    found: list[bool] = []

    def ask() -> None:
        cache = cache_of(SPEC)
        own = TokenStep(model)
        found.extend(torch.equal(own.logits(5, Span([0], 0, 1), cache), wanted) for _ in range(20))

    callers = [threading.Thread(target=ask) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 60
    child = os.fork()
    if child == 0:
        same = step.logits(5, Span([0], 0, 1), cache_of(SPEC)).tolist() == wanted.tolist()
        os._exit(0 if same else 1)
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
    assert ended and status == 0


def test_a_cache_that_grew_is_found_again() -> None:
    model = served()
    step = TokenStep(model)
    cache = KVCache(SPEC, BlockPool(64, 4, grows=True))
    table = cache.pool.open(b"", [5])
    assert table is not None
    logits = []
    for position in range(100):
        assert cache.pool.grow(table, position + 1)
        logits.append(step.logits(5 + position % 7, Span(table.blocks, position, 1), cache))
    assert cache.num_moves > 2 * SPEC.num_layers  # moved on the way
    large, step = cache_of(SPEC, 16), TokenStep(model)
    for position in range(100):
        again = step.logits(5 + position % 7, Span(list(range(16)), position, 1), large)
        torch.testing.assert_close(again, logits[position], atol=1e-4, rtol=1e-4)


# -- compiling -----------------------------------------------------------------------------------------------
def test_a_compiler_that_is_there_takes_the_step() -> None:
    assert compilable(SPEC)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path))
    cpp.load_library.cache_clear()
    return tmp_path


ANSWER = 'extern "C" int answer() { return 41 + 1; }'


def test_compiled_once_and_kept(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = cpp.load_library(ANSWER)
    assert library is not None and library.answer() == 42
    (made,) = empty_cache.glob("kernels/*")
    cpp.load_library.cache_clear()
    ran: list[list[str]] = []
    run = cpp._output

    def watched(command: list[str], given: str = "") -> str:
        ran.append(command)
        return run(command, given)

    monkeypatch.setattr(cpp, "_output", watched)
    again = cpp.load_library(ANSWER)
    assert again is not None and again.answer() == 42
    assert [command[1:] for command in ran] == [["--version"]] and made.exists()


def test_a_folder_that_cannot_be_written_is_no_error(empty_cache: Path) -> None:
    (empty_cache / "kernels").write_text("a file")
    library = cpp.load_library(ANSWER)
    assert library is not None and library.answer() == 42


def test_without_a_compiler_the_other_step_is_taken(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(UserWarning, match="could not compile a kernel, which costs speed only"):
        assert cpp.load_library("no C++ at all") is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    token_step._function.cache_clear()
    try:
        assert not compilable(SPEC)
        runner = Runner(served(), BlockPool(4, 4))
        runner.refresh()
        assert type(runner._cpu).__name__ == "CpuStep"
    finally:
        token_step._function.cache_clear()
        cpp.load_library.cache_clear()
