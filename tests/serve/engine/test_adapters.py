"""Requests with adapters: texts of a mixed batch are those of the base model with each adapter merged into it."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from shoestring.errors import UserError
from shoestring.formats import convert, pack, parse_format
from shoestring.formats.adapter import LoraWeights
from shoestring.formats.convert import format_hosts
from shoestring.formats.int8_activations import quantize_activations
from shoestring.model import Decoder
from shoestring.model.adapter_folder import AdapterFile, digest_of, linear_shapes
from shoestring.model.skip import SkipSet, Sublayer
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.adapters import UnknownAdapter
from shoestring.serve.engine.weight_update import WeightTarget
from shoestring.serve.speculative.draft_model import DraftModel
from shoestring.state.reshard.version import WeightsVersion
from tiny import LLAMA, near_copy, tiny_decoder, tiny_llama

PROMPTS = [[1 + (7 * i + j) % 28 for j in range(5 + 3 * i)] for i in range(9)]
NAMES = ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", None]


def adapter(seed: int, model: Decoder, *, rank: int | None = None, only: str = "") -> AdapterFile:
    """Random, strong enough to change texts; ranks and layers differ from adapter to adapter."""
    gen = torch.Generator().manual_seed(100 + seed)
    weights = {}
    for i, (name, (out, width)) in enumerate(sorted(linear_shapes(model).items())):
        if not name.startswith("blocks.") or only not in name or (not only and (seed + i) % 4 == 0):
            continue
        r = rank or 1 + (seed + i) % 5
        a, b = (torch.randn(s, generator=gen) for s in ((r, width), (out, r)))
        weights[name] = LoraWeights(a, b, 0.2)
    return AdapterFile(weights, digest_of(weights))


def merged(model: Decoder, file: AdapterFile | None) -> Decoder:
    copy = near_copy(model, 0.0)
    hosts = dict(format_hosts(copy))
    with torch.no_grad():
        for name, (a, b, scale, _) in (file.weights if file else {}).items():
            hosts[name].weight += scale * b.double() @ a.double()
    return copy


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_decoder()


@pytest.fixture(scope="module")
def files(model: Decoder) -> dict[str | None, AdapterFile]:
    return {name: adapter(i, model) for i, name in enumerate(NAMES) if name is not None}


@pytest.fixture(scope="module")
def alone(model: Decoder, files: dict[str | None, AdapterFile]) -> list[list[int]]:
    """The texts, each by an engine of its own."""
    texts = []
    for prompt, name in zip(PROMPTS, NAMES, strict=True):
        engine = Engine(merged(model, files.get(name)), max_requests=1, graphs=False)
        texts.append(engine.generate([prompt], Sampling(max_tokens=12))[0].token_ids)
    return texts


def engine_of(model: Decoder, files, **options) -> Engine:
    engine = Engine(near_copy(model, 0.0), **options)
    for name, file in files.items():
        engine.adapters.load(name, file)
    return engine


def texts(engine: Engine, names=NAMES) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(PROMPTS, Sampling(max_tokens=12), names)]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_mixed_batch_is_each_adapter_alone(model, files, alone, graphs):
    engine = engine_of(model, files, max_requests=9, graphs=graphs)
    launched = []
    engine.runner.on_launch = lambda kind, *_: launched.append(kind)
    assert texts(engine) == alone
    assert len({tuple(t) for t in alone}) == len(alone)
    assert (set(launched) >= {"decode", "next"}) == graphs


@pytest.mark.parametrize("graphs", [False, True])
def test_preemption_chunks_and_one_request_at_a_time(model, files, alone, graphs):
    tight = engine_of(model, files, max_requests=9, graphs=graphs, block_size=2, num_blocks=40, chunk=11)
    assert texts(tight) == alone
    assert tight.stats.num_preemptions > 0
    assert texts(engine_of(model, files, max_requests=1, graphs=graphs)) == alone


def test_prefixes_are_shared_within_an_adapter_only(model, files):
    engine = engine_of(model, files, max_requests=4, block_size=2)
    once = texts(engine, [None] * 9)
    hits = engine.stats.num_prefix_hits  # of prompts that begin alike
    first = texts(engine, ["a0"] * 9)
    assert first != once and engine.stats.num_prefix_hits == 2 * hits
    assert texts(engine, ["a0"] * 9) == first and engine.stats.num_prefix_hits > 4 * hits
    assert texts(engine, [None] * 9) == once


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_of_the_base_model_are_checked_with_the_adapter(model, files, alone, graphs):
    engine = engine_of(
        model, files, max_requests=9, graphs=graphs, drafter=DraftModel(near_copy(model, 0.02)), num_drafts=3
    )
    assert texts(engine) == alone
    assert 0 < engine.stats.num_accepted < engine.stats.num_drafted


@pytest.mark.parametrize("graphs", [False, True])
def test_loading_and_unloading_while_requests_run(model, files, alone, graphs):
    """What runs is finished by its adapter, also where another takes its name, and slots come back."""
    engine = engine_of(model, {"a0": files["a0"]}, max_requests=9, graphs=graphs)
    first = engine.add(PROMPTS[0], Sampling(max_tokens=12), adapter="a0")
    for _ in range(3):
        engine.step()
    engine.adapters.unload("a0")
    with pytest.raises(UnknownAdapter, match="there are: none is loaded"):
        engine.add(PROMPTS[0], adapter="a0")
    engine.adapters.load("a0", files["a1"])
    second = engine.add(PROMPTS[1], Sampling(max_tokens=12), adapter="a0")
    for i in range(2, 8):  # of higher rank and for more layers: stacks grow
        engine.adapters.load(f"a{i}", files[f"a{i}"])
        engine.step()
    large = adapter(50, model, rank=33)
    for i in range(4):
        engine.adapters.load(f"large {i}", large)
    while engine.busy:
        engine.step()
    assert [first.new_tokens, second.new_tokens] == alone[:2]
    assert texts(engine, ["a0", "a0", *NAMES[2:]])[1:] == alone[1:]
    first.adapter = second.adapter = None
    for name in list(engine.adapters.names):
        engine.adapters.unload(name)
    gc.collect()
    assert len(engine.adapters._free) == engine.adapters._num_slots == 16


def test_what_is_refused(model, files):
    engine = engine_of(model, {"a0": files["a0"]})
    weights = files["a1"].weights
    dora = {n: w._replace(magnitude=torch.ones(len(w.b))) for n, w in weights.items()}
    cases = [
        ("a0", files["a1"], "there is an adapter 'a0' already"),
        ("", files["a1"], "cannot be called"),
        ("x\n", files["a1"], "cannot be called"),
        ("dora", AdapterFile(dora, ""), "DoRA"),
        ("rank", adapter(1, model, rank=65), "at most 64"),
        ("head", AdapterFile({"head": next(iter(weights.values()))}, ""), "changes head"),
    ]
    for name, file, message in cases:
        with pytest.raises(UserError, match=message):
            engine.adapters.load(name, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoestring.serve.engine.adapters.MOST_SLOTS", 8)
        for i in range(7):
            engine.adapters.load(f"more {i}", files["a1"])
        with pytest.raises(UserError, match="8 adapters are held"):
            engine.adapters.load("too many", files["a1"])
        for i in range(7):
            engine.adapters.unload(f"more {i}")
    with pytest.raises(UserError, match="there is no adapter 'none'; there are: a0"):
        engine.generate([[1]], adapters=["none"])
    assert engine.adapters.names.keys() == {"a0"}


def test_an_adapter_without_room_changes_nothing(model, monkeypatch):
    engine = engine_of(model, {"attn": adapter(0, model, only="attn")}, graphs=False)
    bank, (before, _, _) = engine.adapters, engine.generate([PROMPTS[0]] * 3, adapters=["attn"] * 3)

    def empty(key, names, num_slots, rank):
        if key[1] == "up":
            raise torch.OutOfMemoryError
        return real(key, names, num_slots, rank)

    real = bank._empty
    monkeypatch.setattr(bank, "_empty", empty)
    with pytest.raises(UserError, match="no memory for 8 adapters of rank 16"):
        bank.load("all", adapter(1, model))
    engine.forget_prefixes()
    assert engine.generate([PROMPTS[0]], adapters=["attn"])[0].token_ids == before.token_ids


def test_log_probabilities_of_a_prompt_are_the_adapters(model, files):
    engine, own = engine_of(model, files), Engine(merged(model, files["a3"]))
    slot = engine.adapters.get("a3").slot
    with torch.no_grad():
        got, want = (
            [e.logprob for part in r.prompt_logprob_parts(*asked) for e in part if e is not None]
            for r, asked in ((engine.runner, (PROMPTS[8], 2, 7, slot)), (own.runner, (PROMPTS[8], 2, 7)))
        )
    assert got == pytest.approx(want, abs=1e-9) and len(got) == len(PROMPTS[8]) - 1


def test_packed_bases(model, files):
    """int4: texts in a mixed batch equal those of a batch of one, and differ from the base's."""
    base = near_copy(model, 0.0)
    convert(base, [("blocks.*", parse_format("int4:g8"))])
    pack(base, dtype=torch.float64)
    engine = Engine(base, max_requests=9)
    for name, file in files.items():
        engine.adapters.load(name, file)
    together = texts(engine)
    each = [
        engine.generate([p], Sampling(max_tokens=12), [n])[0].token_ids for p, n in zip(PROMPTS, NAMES, strict=True)
    ]
    assert together == each and together != texts(engine, [None] * 9)


@pytest.mark.parametrize("graphs", [False, True])
def test_skipped_sublayers_and_warm_up(model, files, graphs):
    """Adapters of sublayers that are left out do nothing; graphs with adapters are made before the first request."""
    skip = SkipSet([Sublayer(0, "attn"), Sublayer(1, "mlp")])
    engine = engine_of(model, files, max_requests=4, graphs=graphs, skip=skip)
    engine.warm_up()
    made = engine.num_graphs
    want = [
        Engine(merged(model, files.get(n)), skip=skip, graphs=False).generate([p], Sampling(max_tokens=12))[0].token_ids
        for p, n in zip(PROMPTS, NAMES, strict=True)
    ]
    assert texts(engine) == want
    assert made == 0 if not graphs else {shape.adapted for shape in engine.runner.graphs._graphs} == {False, True}


def test_new_weights_of_the_model_leave_adapters_alone(model, files, alone):
    """The same weights again, written in place while graphs with adapters exist."""
    engine = engine_of(model, files, max_requests=9, graphs=True)
    assert texts(engine) == alone
    target = WeightTarget(engine.model)
    values = {name: {"": p.detach().clone()} for name, p in engine.model.named_parameters()}
    engine.update_weights(target, values, WeightsVersion("run", 1, "digest"))
    assert texts(engine) == alone


def test_layers_that_round_their_inputs(files):
    """On a CPU with 8-bit activations rows of adapters go the plain way, beside those of the model in one call."""
    base = tiny_llama(replace(LLAMA, d_model=64, head_dim=16, d_ff=64))
    convert(base, [("blocks.*", parse_format("int4:g32"))])
    pack(base)
    try:
        quantize_activations(base)
    except UserError as error:
        pytest.skip(str(error))
    engine, plain = Engine(base, max_requests=3), Sampling(max_tokens=8)
    once = engine.generate(PROMPTS[:3], plain)
    engine.adapters.load("x", adapter(3, base))
    mixed = engine.generate(PROMPTS[:3], plain, [None, "x", None])
    each = [engine.generate([p], plain, [n])[0].token_ids for p, n in zip(PROMPTS, [None, "x", None], strict=False)]
    assert [c.token_ids for c in mixed] == each
    assert [each[0], each[2]] == [once[0].token_ids, once[2].token_ids] and each[1] != once[1].token_ids
