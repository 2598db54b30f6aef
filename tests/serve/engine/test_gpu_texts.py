"""The same text whatever a step is made of: skip sets and packed weights in captured programs, against plain passes and
against the same programs launched kernel by kernel. What holds on a CPU, where a program simply runs, runs there, too.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shoestring.formats import FormatLinear, convert, pack, parse_format, unpack, use_kernels
from shoestring.kernels.lowbit.lowbit_linear import chunks_usable
from shoestring.methods.skipping.policies import AdaSkip
from shoestring.model import Decoder
from shoestring.model.skip import SkipSet, StandIn, Sublayer
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine import fused_decoder
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.graphs import CapturedStep
from shoestring.serve.engine.prefill_graph import PrefillGraph
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.serve.engine.skip_policy import Fixed, SkipPolicy
from tiny import tiny_decoder

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
)
DEVICES = ["cpu", GPU]
LAYERS = 4
Asked = tuple[list[list[int]], list[Sampling]]


def decoder(device: str, dtype: torch.dtype = torch.float32, **changes: object) -> Decoder:
    """Weights narrow enough for the order of additions not to decide a token in fp32; heads that all kernels take."""
    shape = {"num_layers": LAYERS, "d_model": 64, "head_dim": 32, "d_ff": 128, "max_positions": 256}
    model = tiny_decoder(1, **{**shape, **changes})
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(0.5)
    model.compute_dtype = dtype
    return model.to(device, dtype)


def asked(num: int, **sampling: object) -> Asked:
    """Prompts and answers of several lengths, in whose plain texts no two tokens are nearly as likely (in fp32)."""
    draw = random.Random(5)
    prompts = [[draw.randrange(29) for _ in range(draw.choice([1, 3, 20, 50, 90]))] for _ in range(num)]
    samplings = [Sampling(max_tokens=draw.randint(6, 24), ignore_eos=True, **sampling) for _ in range(num)]  # type: ignore[arg-type]
    return prompts, samplings


def written(engine: Engine, prompts: Sequence[list[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
    """Texts of requests that come one by one, while those before them are read and write."""
    requests = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        requests.append(engine.add(prompt, sampling))
        for _ in range(3):
            engine.step()
    while engine.busy:
        engine.step()
    return [r.new_tokens for r in requests]


def one_by_one(
    model: Decoder, prompts: Sequence[list[int]], samplings: Sequence[Sampling], skip: SkipPolicy | None = None
) -> list[list[int]]:
    """One request at a time, by the model's own forward."""
    engine = Engine(model, graphs=False, max_requests=1, chunk=16, prefix_cache=False, skip=skip)
    return [c.token_ids for c in engine.generate(prompts, samplings)]


def programs(engine: Engine) -> list[CapturedStep]:
    """What the engine's steps were made of; on a GPU all of it is captured."""
    assert engine.runner._graphs is not None
    made = list(engine.runner._graphs._graphs.values())
    captured = engine.runner.device.type == "cuda"
    assert made and all((g.replay != g._whole_program) == captured for g in made)
    return made


def reads(engine: Engine) -> bool:
    """Whether prompts were read by programs, not only prepared for."""
    graphs = engine.runner._graphs
    assert graphs is not None
    return any(isinstance(graphs._graphs.get(key), PrefillGraph) for key in graphs._seen)


# -- skip sets -----------------------------------------------------------------------------------------------

WIDE = torch.linspace(0.9, 1.1, 64)
SKIP = SkipSet(
    {
        Sublayer(1, "attn"): StandIn(torch.tensor([1.1])),
        Sublayer(1, "mlp"): StandIn(WIDE, WIDE - 1.0),
        Sublayer(3, "attn"): StandIn(),
    }
)
# Of the FFNs that are left those are added that change the stream least; which ones differs from text to text.
ADASKIP = AdaSkip(SKIP, beta=0.55, ratios=(1.2, 1.0, 1.1, 1.3), num_watched=3)


@pytest.mark.parametrize(
    ("policy", "device"),
    [
        pytest.param(ADASKIP, "cpu", id="adaskip-cpu"),
        pytest.param(Fixed(SKIP), "cpu", id="fixed-cpu", marks=pytest.mark.lab),  # the set that adaskip begins with
        pytest.param(ADASKIP, *GPU.values, id="adaskip-cuda", marks=GPU.marks),
        pytest.param(Fixed(SKIP), *GPU.values, id="fixed-cuda", marks=GPU.marks),
    ],
)
def test_requests_that_skip_write_the_text_of_the_plain_path(policy: SkipPolicy, device: str) -> None:
    model, ask = decoder(device), asked(8)
    want = one_by_one(model, *ask, policy)
    assert want[:3] != one_by_one(model, ask[0][:3], ask[1][:3])
    engine = Engine(model, graphs=True, max_requests=6, chunk=64, skip=policy)
    engine.warm_up()
    for _ in range(2):  # the second time behind prefixes that are there
        assert written(engine, *ask) == want
    used = {g.skip for g in programs(engine)}
    assert SKIP in used and reads(engine)
    if policy is ADASKIP:
        assert len(engine.skip_sets.sets) > 1 and used >= set(engine.skip_sets.sets.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", [None, Fixed(SKIP)], ids=["whole", "skipping"])
def test_a_set_that_drafts_changes_no_text(policy: SkipPolicy | None, device: str) -> None:
    model, ask = decoder(device), asked(8)
    engine = Engine(
        model,
        graphs=True,
        max_requests=6,
        chunk=64,
        skip=policy,
        draft_skip=SkipSet([Sublayer(2, "mlp")]),
        num_drafts=3,
    )
    assert written(engine, *ask) == one_by_one(model, *ask, policy)
    assert 0 < engine.stats.num_accepted < engine.stats.num_drafted
    used = {g.skip for g in programs(engine)}
    assert len(used) == 2 and engine.skip_sets.usual in used  # the requests' own, and what their drafts leave out


# -- packed weights ------------------------------------------------------------------------------------------

FORMATS = [  # the three that run on a CPU in the suite, too, and those that do in campaigns
    *("int4:g32", "nf3:s2:g32", "sparse24+int4:g32"),
    *("int8:g0", "int2:g32", "sparse24", "sparse24:soft:fp8"),  # trained in FP8; kept values are stored as they are
]
TRIED = [
    *(pytest.param(format, "cpu", marks=[pytest.mark.lab] * (i >= 3)) for i, format in enumerate(FORMATS)),
    *(pytest.param(format, *GPU.values, marks=GPU.marks) for format in FORMATS),
]


def packed(format: str, device: str, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """A model with packed weights as their kernels read them, and one with the same weights unpacked, in fp32."""
    model = decoder(device, dtype, num_layers=2)
    convert(model, [("blocks.*", parse_format(format))])
    pack(model, dtype=dtype)
    plain = copy.deepcopy(model)
    unpack(plain)
    plain.float().compute_dtype = torch.float32
    served = use_kernels(model)
    if device == "cuda" and dtype != torch.float32 and chunks_usable(model.embed.weight):
        # Bytes have kernels that read them as they are stored.
        assert len(served) == (0 if format == "int8:g0" else 2 * 7)
    layers = [m for m in model.blocks.modules() if isinstance(m, FormatLinear)]
    assert len(layers) == 2 * 7 and all(layer.packed for layer in layers)
    return model, plain


@pytest.mark.parametrize(("format", "device"), TRIED)
def test_packed_weights_write_the_text_of_the_plain_path(format: str, device: str) -> None:
    """fp32: weights are decoded for every product, in programs as in plain passes."""
    model, _ = packed(format, device, torch.float32)
    ask = asked(5)
    want = one_by_one(model, *ask)
    engine = Engine(model, graphs=True, max_requests=4, chunk=64, prefix_cache=False)
    for _ in range(2):  # a program that reads is made when its size comes again
        assert written(engine, *ask) == want
    assert programs(engine) and reads(engine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("heat", [0.0, 0.7])
@pytest.mark.parametrize("format", ["dense", *FORMATS])
def test_a_capture_changes_no_text(format: str, heat: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16, with the kernels of packed weights: the same ones launched one by one give the same bits."""
    if format == "dense":
        model = decoder("cuda", torch.bfloat16)
    else:
        model, _ = packed(format, "cuda", torch.bfloat16)
    ask = asked(8, temperature=heat, seed=5)
    options = {"max_requests": 5, "chunk": 64, "prefix_cache": False}
    # Only captured steps are launched several at a time, and a request that comes meanwhile joins another step.
    monkeypatch.setattr("shoestring.serve.engine.graphs.STEPS_PER_LAUNCH", ())
    captured = Engine(model, **options)  # type: ignore[arg-type]
    got = [written(captured, *ask) for _ in range(2)]
    assert programs(captured) and reads(captured)
    monkeypatch.setattr(CapturedStep, "_capture", lambda step: None)
    launched = Engine(model, **options)  # type: ignore[arg-type]
    assert [written(launched, *ask) for _ in range(2)] == got
    assert launched.runner._graphs is not None
    assert all(g.replay == g._whole_program for g in launched.runner._graphs._graphs.values())


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # CPUs without bf16 say so at length
@pytest.mark.parametrize(("format", "device"), TRIED)
@torch.no_grad()
def test_logits_of_packed_weights_are_near_those_of_unpacked_ones(
    format: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 against fp32: prompts, few rows, single rows, one with a long context; of one request and of several.
    Measured by what bf16 does to the unpacked weights."""
    monkeypatch.setattr(fused_decoder, "SHORT_CONTEXT", 50)
    model, plain = packed(format, device, torch.bfloat16)
    texts = torch.randint(0, 29, (3, 120), generator=torch.Generator().manual_seed(2)).to(device)
    exact = plain(texts)
    plain.bfloat16().compute_dtype = torch.bfloat16
    allowed = 2 * error(plain(texts), exact)
    assert allowed < 0.1
    runner = Runner(model, BlockPool(48, 8), graphs=True)
    blocks, done = [list(range(16 * i + 15, 16 * i - 1, -1)) for i in range(3)], [0, 0, 0]
    found, wanted = [], []
    for nums in [(40, 0, 0), (1, 0, 0), (4, 0, 0), (1, 70, 20), (1, 1, 1), (3, 3, 3), (16, 9, 1), (1, 0, 1), (1, 0, 0)]:
        part = [i for i in range(3) if nums[i]]
        spans = [RowSpan(blocks[i], done[i], nums[i]) for i in part]
        tokens = [t for i in part for t in texts[i, done[i] : done[i] + nums[i]].tolist()]
        found.append(runner.forward(Batch(spans, tokens, range(len(tokens)))))
        wanted.append(torch.cat([exact[i, done[i] : done[i] + nums[i]] for i in part]))
        assert error(found[-1], wanted[-1]) < 2 * allowed, nums  # single rows may have worse luck
        done = [d + n for d, n in zip(done, nums, strict=True)]
    assert error(torch.cat([f.float() for f in found]), torch.cat(wanted)) < allowed
