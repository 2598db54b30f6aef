"""SkipSets in the engine: every schedule writes the text of the definition; sets never meet in a block; a set as a
drafter changes no text (fp64)."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_decoding import LookupDrafter, drawn_st, greedy_st, naive
from torch import Tensor

from refusals import refused
from shoestring.methods.skipping.policies import AdaSkip, ByContext, open_policy
from shoestring.model import Decoder
from shoestring.model.attention import attend_with, mask_at
from shoestring.model.skip import SkipSet, StandIn, Sublayer
from shoestring.serve import Engine, NgramDrafter, Sampling
from shoestring.serve.engine.sampling import sample
from shoestring.serve.engine.skip_policy import MAX_SETS, Fixed, SkipPolicy
from shoestring.serve.speculative.layer_skip_drafter import LayerSkipDrafter
from tiny import tiny_decoder

decoder = functools.cache(tiny_decoder)
LAYERS = 4


def model_of() -> Decoder:
    return decoder(seed=1, eos_id=7, num_layers=LAYERS)


def one(*names: str, scale: float | None = None) -> SkipSet:
    stand = StandIn() if scale is None else StandIn(torch.tensor([scale]))
    subs = [Sublayer(int(name[0]), name[1:]) for name in names]  # type: ignore[arg-type]
    return SkipSet(dict.fromkeys(subs, stand), name=" ".join(names))


SMALL, LARGE, FFN = one("2mlp", scale=1.1), one("1attn", "1mlp", "2attn", scale=0.9), one("0mlp", "3mlp")


@dataclass(frozen=True)
class Mixed:
    """Sets by the number of tokens, so that neighbours in a batch differ; later one that adds an FFN."""

    num_watched: int = 0

    @property
    def sets(self) -> Sequence[SkipSet]:
        return [SMALL, LARGE]

    def choose(self, num_tokens: int) -> SkipSet | None:
        return (None, SMALL, LARGE)[num_tokens % 3]

    def observe(self, chosen: SkipSet | None, similarity: Sequence[float]) -> SkipSet | None:
        if chosen is SMALL or similarity[3] < 0.2:
            return chosen
        return one("3mlp", scale=1.2) if chosen is None else chosen.plus(one("3mlp", scale=1.2))


def definition(
    model: Decoder, policy: SkipPolicy, prompt: list[int], sampling: Sampling, eos: frozenset[int]
) -> list[int]:
    """One token at a time on a plain cache: the set of a position depends on the position only."""
    skip = policy.choose(len(prompt) + sampling.max_tokens)
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    cosines: list[list[float]] = []
    tokens = list(prompt)
    for at in range(len(prompt) + sampling.max_tokens):
        seen = [0.0] * LAYERS

        def watch(layer: int, kind: str, x: Tensor, y: Tensor, seen: list[float] = seen) -> None:
            if kind == "mlp":
                seen[layer] = float(F.cosine_similarity(x[0, 0], y[0, 0], dim=0))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, at: int = at) -> Tensor:
            if layer in kept:
                k, v = (torch.cat([old, new], 1) for old, new in zip(kept[layer], (k, v), strict=True))
            kept[layer] = k, v
            assert k.shape[1] == at + 1, "an attention sublayer was left out at some positions only"
            return attend_with(q, k, v, mask_at(torch.tensor([[at]]), at + 1))

        with torch.no_grad():
            logits = model(torch.tensor([[tokens[at]]]), torch.tensor([[at]]), attend=attend, skip=skip, watch=watch)
        if at >= len(prompt):
            cosines.append(seen)
            if len(cosines) == policy.num_watched:
                skip = policy.observe(skip, torch.tensor(cosines, dtype=torch.float64).mean(0).tolist())
        if at + 1 == len(tokens):
            if len(tokens) == model.spec.max_positions:
                break
            tokens.append(int(sample(logits[0], [sampling], [len(tokens)])))
            if tokens[-1] in eos or len(tokens) == len(prompt) + sampling.max_tokens:
                break
    return tokens[len(prompt) :]


@settings(max_examples=6, deadline=None)
@given(
    stems=st.lists(st.lists(st.integers(0, 28), min_size=1, max_size=14), min_size=1, max_size=2),
    tails=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 28), max_size=5)), min_size=1, max_size=5),
    samplings=st.lists(st.one_of(greedy_st, drawn_st), min_size=5, max_size=5),
    num_watched=st.sampled_from([0, 1, 3, 6]), kind=st.sampled_from(["none", "lookup", "self", "stacked"]),
    num_drafts=st.sampled_from([None, 1, 3, 6]), chunk=st.sampled_from([1, 2, 5, 9, 64]),
    size=st.sampled_from([1, 2, 4, 16]), spare=st.sampled_from([0, 1, 3, None]), max_requests=st.integers(1, 5),
    prefix_cache=st.booleans(), graphs=st.sampled_from([None, True]),
)  # fmt: skip
@example(  # a draft behind the last token of a prompt that was read in chunks is watched only if it is accepted
    stems=[[22, 26, 15, 7, 28, 23, 4, 22, 10], [0, 26, 28]],
    tails=[(1, [27]), (0, []), (0, [24, 0, 2])],
    samplings=[
        Sampling(temperature=0.4, top_k=6, seed=43, max_tokens=14),
        Sampling(temperature=0.4, top_k=6, seed=12, max_tokens=8),
        Sampling(max_tokens=14),
    ],
    num_watched=1,
    kind="self",
    num_drafts=1,
    chunk=5,
    size=16,
    spare=3,
    max_requests=4,
    prefix_cache=False,
    graphs=None,
)
def test_every_schedule_writes_the_text_of_the_definition(
    stems: list[list[int]],
    tails: list[tuple[int, list[int]]],
    samplings: list[Sampling],
    num_watched: int,
    kind: str,
    num_drafts: int | None,
    chunk: int,
    size: int,
    spare: int | None,
    max_requests: int,
    prefix_cache: bool,
    graphs: bool | None,
) -> None:
    """Three sets side by side, FFN sets that change, shared beginnings, pools too small, drafters; everything twice,
    so that the second time meets the first's blocks."""
    model, policy = model_of(), Mixed(num_watched)
    prompts = [(stems[which % len(stems)] + tail) for which, tail in tails]
    samplings = samplings[: len(prompts)]
    want = [definition(model, policy, p, s, frozenset({7})) for p, s in zip(prompts, samplings, strict=True)]
    longest = max(len(p) + s.max_tokens for p, s in zip(prompts, samplings, strict=True))
    engine = Engine(
        model, max_requests=max_requests, chunk=chunk, block_size=size,
        num_blocks=None if spare is None else -(-longest // size) + spare, max_context=min(64, longest),
        prefix_cache=prefix_cache, drafter=LookupDrafter() if kind in ("lookup", "stacked") else None,
        draft_skip=one("0mlp", "2attn", "2mlp") if kind in ("self", "stacked") else None, num_drafts=num_drafts,
        skip=policy, graphs=graphs,
    )  # fmt: skip
    for _ in range(2):
        assert [c.token_ids for c in engine.generate(prompts, samplings)] == want
        pool = engine.cache.pool
        assert pool.num_used == 0 and pool.num_free + pool.num_cached == pool.num_blocks
    assert len(engine.skip_sets.sets) <= MAX_SETS


@settings(max_examples=6, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 28), min_size=1, max_size=12), min_size=1, max_size=5),
    samplings=st.lists(st.one_of(greedy_st, drawn_st), min_size=5, max_size=5),
    names=st.sets(st.sampled_from([f"{n}{k}" for n in range(LAYERS) for k in ("attn", "mlp")]), max_size=8),
    ngram=st.booleans(), rule=st.sampled_from(["coupled", "token", "block"]),
    num_drafts=st.sampled_from([None, 1, 4]), chunk=st.sampled_from([2, 7, 64]), size=st.sampled_from([1, 4, 16]),
    spare=st.sampled_from([0, 2, None]), graphs=st.sampled_from([None, True]),
)  # fmt: skip
def test_a_set_as_a_drafter_changes_no_text(
    prompts: list[list[int]],
    samplings: list[Sampling],
    names: set[str],
    ngram: bool,
    rule: str,
    num_drafts: int | None,
    chunk: int,
    size: int,
    spare: int | None,
    graphs: bool | None,
) -> None:
    model = model_of()
    samplings = samplings[: len(prompts)]
    if rule != "coupled":
        samplings = [Sampling(max_tokens=s.max_tokens) for s in samplings]
    want = [naive(model, p, s, frozenset({7})) for p, s in zip(prompts, samplings, strict=True)]
    longest = max(len(p) + s.max_tokens for p, s in zip(prompts, samplings, strict=True))
    engine = Engine(
        model,
        chunk=chunk,
        block_size=size,
        num_blocks=None if spare is None else -(-longest // size) + spare,
        max_context=longest,
        drafter=NgramDrafter(longest=3, shortest=1) if ngram else None,
        draft_skip=one(*names),
        num_drafts=num_drafts,
        rule=rule,  # type: ignore[arg-type]
        graphs=graphs,
    )
    for _ in range(2):
        assert [c.token_ids for c in engine.generate(prompts, samplings)] == want
        assert engine.cache.pool.num_used == 0


def test_a_drafter_that_skips_nothing_is_always_right_and_takes_no_memory() -> None:
    model, sampling = model_of(), Sampling(max_tokens=40, ignore_eos=True)
    plain = Engine(model)
    twin = Engine(model, draft_skip=SkipSet([]), num_drafts=4)
    assert isinstance(twin.drafter, LayerSkipDrafter)
    assert twin.generate([[3, 1, 4]], sampling) == plain.generate([[3, 1, 4]], sampling)
    assert twin.stats.num_accepted == twin.stats.num_drafted == 31 and twin.stats.num_steps == 9
    assert twin.cache.num_bytes == plain.cache.num_bytes
    drawn = Sampling(temperature=1.3, seed=2, max_tokens=40, ignore_eos=True)
    free = Engine(model, draft_skip=SkipSet([]), num_drafts=4, rule="block")
    free.generate([[3, 1, 4]], drawn)  # draws for itself, and p equals q
    assert free.stats.num_accepted == free.stats.num_drafted == 31
    # Without two sublayers it is right sometimes.
    some = Engine(model, draft_skip=one("2mlp", "1attn"), num_drafts=4)
    assert some.generate([[3, 1, 4]], sampling) == plain.generate([[3, 1, 4]], sampling)
    assert 0 < some.stats.num_accepted < some.stats.num_drafted


def test_no_policy_and_skip_none_give_the_same_bits() -> None:
    """fp32, logits compared bit for bit as the sampler sees them."""
    model = tiny_decoder(seed=1, num_layers=LAYERS).float()
    model.compute_dtype = torch.float32
    seen: list[list[Tensor]] = []
    for options in ({}, {"skip": None}, {"skip": SkipSet([])}, {"skip": Fixed(SkipSet([]))}):
        logits: list[Tensor] = []

        def verify(logits_RV: Tensor, checks: Sequence[object], logits: list[Tensor] = logits) -> list[list[int]]:
            logits.append(logits_RV.clone())
            return [[int(row)] for row in logits_RV.argmax(-1)]

        engine = Engine(model, verify=verify, chunk=5, **options)  # type: ignore[arg-type]
        engine.generate([[1, 2, 3, 4, 5, 6, 7], [8, 9]], Sampling(max_tokens=9))
        seen.append(logits)
    for other in seen[1:]:
        assert len(other) == len(seen[0]) and all(map(torch.equal, seen[0], other))


def test_skipped_attention_takes_no_memory_and_blocks_of_other_sets_are_not_met() -> None:
    model, text = model_of(), [5, 6, 7, 8, 9, 10, 11, 12, 13]
    whole, part = Engine(model, block_size=4), Engine(model, block_size=4, skip=one("1attn", "2attn"))
    for engine in (whole, part):
        engine.generate([text], Sampling(max_tokens=3))
    assert part.cache.num_bytes == whole.cache.num_bytes // 2

    @dataclass(frozen=True)
    class ByPrompt(Mixed):
        def choose(self, num_tokens: int) -> SkipSet | None:
            return None if num_tokens == 12 else SMALL if num_tokens == 13 else FFN

        @property
        def sets(self) -> Sequence[SkipSet]:
            return [SMALL, FFN]

    engine = Engine(model, block_size=4, num_blocks=40, skip=ByPrompt())
    hits = []
    for max_tokens in (3, 4, 5, 3, 4, 5):
        request = engine.add(text, Sampling(max_tokens=max_tokens))
        while engine.busy:
            engine.step()
        hits.append(request.num_cached)
    assert hits == [0, 0, 0, 8, 8, 8]


def test_blocks_after_a_switch_are_not_shared() -> None:
    model = model_of()

    @dataclass(frozen=True)
    class Later(Fixed):
        num_watched: int = 4

        def observe(self, chosen: SkipSet | None, similarity: Sequence[float]) -> SkipSet | None:
            assert chosen is not None and len(similarity) == LAYERS
            return chosen.plus(FFN)

    sampling = Sampling(max_tokens=20, ignore_eos=True)
    engine = Engine(model, block_size=2, num_blocks=40, skip=Later(SMALL))
    first = engine.generate([[3, 1, 4, 1]], sampling)[0].token_ids
    assert len(engine.skip_sets.sets) == 2
    longer = engine.add([3, 1, 4, 1, *first], Sampling(max_tokens=1))
    engine.step()
    assert longer.num_cached == 8  # the prompt and the 4 watched tokens


def test_adaskip_adds_the_ffns_that_are_idle_enough_once() -> None:
    fixed = one("1attn", "2mlp", scale=1.1)
    policy = AdaSkip(fixed, beta=0.7, ratios=(1.0, 1.5, 1.1, 1.3), num_watched=3)
    assert policy.observe(fixed, [0.5, 0.6, 0.9, 0.69]) is fixed
    more = policy.observe(fixed, [0.5, 0.7, 0.1, 0.9])
    assert more is not None and more.attn == fixed.attn and more.mlp == {1, 2, 3}
    assert more.skipped[Sublayer(1, "mlp")].scale == torch.tensor([1.5])  # the offline ratio
    assert more.skipped[Sublayer(2, "mlp")] == fixed.skipped[Sublayer(2, "mlp")]
    model = model_of()
    engine = Engine(model, skip=AdaSkip(fixed, beta=-1.0, ratios=(1.0,) * 4, num_watched=3))
    request = engine.add([1, 2, 3], Sampling(max_tokens=12, ignore_eos=True))
    used = []
    while engine.busy:
        used.append(len(request.skip_at(request.num_computed) or ()))
        engine.step()
    assert used == [2] * 4 + [5] * 8  # the prompt, three watched tokens, the rest


def test_a_fifth_set_is_replaced_by_the_largest_known_one_within_it() -> None:
    @dataclass(frozen=True)
    class Growing(Fixed):
        num_watched: int = 1

        def observe(self, chosen: SkipSet | None, similarity: Sequence[float]) -> SkipSet | None:
            assert chosen is not None
            return chosen.plus(wanted.pop(0))

    wanted = [one("0mlp"), one("1mlp"), one("1mlp", "3mlp"), one("1mlp", "2mlp", "0mlp"), one("2mlp")]
    engine = Engine(model_of(), skip=Growing(one("2attn")))
    sizes = []
    for _ in range(5):
        request = engine.add([1, 2, 3], Sampling(max_tokens=5, ignore_eos=True))
        while engine.busy:
            engine.step()
        assert request.late_skip is not None
        sizes.append(len(request.late_skip))
    assert sizes == [2, 2, 3, 2, 1] and len(engine.skip_sets.sets) == MAX_SETS
    refused(
        "at most 4",
        Engine,
        model_of(),
        skip=ByContext(tuple((n + 1, one(f"{n % 4}mlp", scale=n + 1.0)) for n in range(5))),
    )


def test_policies_come_from_files(tmp_path: Path) -> None:
    spec = model_of().spec
    short, long = tmp_path / "short.json", tmp_path / "long.json"
    short.write_text(json.dumps({**SMALL.to_json(), "notes": {"context": 100}}))
    long.write_text(json.dumps({**LARGE.to_json(), "notes": {"context": 10_000}}))
    assert open_policy(str(short), spec) == Fixed(SMALL)
    both = open_policy(f"{short}+{long}", spec)
    assert [both.choose(n) for n in (10, 900, 1100, 10**6)] == [SMALL, SMALL, LARGE, LARGE]
    ada = AdaSkip(SMALL, 0.9, (1.0, 1.1, 1.2, 1.3))
    short.write_text(json.dumps(ada.to_json()))
    assert open_policy(str(short), spec) == ada
    refused("context length", open_policy, f"{short}+{long}", spec)
    short.write_text(json.dumps({**SMALL.to_json(), "online": {"beta": 1}}))
    refused("damaged", open_policy, str(short), spec)
