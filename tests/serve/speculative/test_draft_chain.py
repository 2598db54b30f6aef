"""Drafts that are chosen on the device, pass after pass: the same drafts as with logits on the way."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoestring.serve import Engine, Sampling
from shoestring.serve.engine import runner
from shoestring.serve.engine.block_pool import BlockPool
from shoestring.serve.engine.request import Draft, Output, Request
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.serve.speculative.draft_length import Decision, DraftLengthController, DraftLengthSettings, PassCosts
from shoestring.serve.speculative.draft_model import DraftModel, trim_head
from shoestring.serve.speculative.drafter_stack import DrafterStack
from shoestring.serve.speculative.ngram_drafter import NgramDrafter
from shoestring.serve.speculative.verify import RuleName
from tiny import near_copy, tiny_decoder

PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24], [28, 0, 14]]
SAMPLINGS = [
    Sampling(max_tokens=30),
    Sampling(temperature=0.9, seed=5, max_tokens=25),
    Sampling(temperature=0.7, top_k=8, top_p=0.9, seed=6, max_tokens=30),
    Sampling(max_tokens=20),
]


class Recorder(DraftModel):
    """Keeps what was proposed, and counts the ways it was made."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.said: list[list[int]] = []
        self.num_chained = 0

    def propose(self, requests: list[Request], n: int) -> list[Draft]:  # type: ignore[override]
        drafts = super().propose(requests, n)
        self.said += [d.tokens for d in drafts]
        return drafts

    def _chain(self, requests: list[Request], n: int) -> list[Draft] | None:
        drafts = super()._chain(requests, n)
        self.num_chained += drafts is not None
        return drafts


@pytest.mark.parametrize(
    ("num_drafts", "dtype", "vocab_ids"),
    [
        (1, torch.float64, None),
        (2, torch.float64, None),
        (5, torch.float32, None),
        (4, torch.float64, [i for i in range(29) if i % 4]),
        (1, torch.float64, [i for i in range(29) if i % 4]),
    ],
)
@pytest.mark.few(3)
def test_the_same_drafts_and_the_same_text(num_drafts: int, dtype: torch.dtype, vocab_ids: list[int] | None) -> None:
    target = tiny_decoder(0).to(dtype)
    drafter = near_copy(tiny_decoder(0), 0.03).to(dtype)
    target.compute_dtype = drafter.compute_dtype = dtype
    if vocab_ids is not None:
        trim_head(drafter, vocab_ids)
    plain = [c.token_ids for c in Engine(target, max_requests=3).generate(PROMPTS, SAMPLINGS)]
    by_way: dict[bool, Recorder] = {}
    for graphs in (False, True):
        recorder = by_way[graphs] = Recorder(drafter, graphs=graphs, vocab_ids=vocab_ids)
        engine = Engine(target, max_requests=3, drafter=recorder, num_drafts=num_drafts)
        assert [c.token_ids for c in engine.generate(PROMPTS, SAMPLINGS)] == plain
        assert engine.stats.num_accepted > 20
    assert by_way[True].said == by_way[False].said
    assert by_way[False].num_chained == 0 and by_way[True].num_chained > 10


@pytest.mark.parametrize(
    ("num", "device"), [(3, "cpu"), *(pytest.param(num, "cuda", marks=pytest.mark.gpu) for num in (1, 3))]
)
def test_prompts_are_read_in_one_launch(num: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph where the rows are few enough; drafts and texts are those of a drafter that reads pass by pass."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    target = tiny_decoder(0, max_positions=1024).to(device)
    model, draw = near_copy(target, 0.03), random.Random(num)
    prompts = [[draw.randrange(29) for _ in range(n)] for n in (40, 25, 60, 30, 700, 33, 45)]
    plain = [c.token_ids for c in Engine(target, max_requests=num).generate(prompts, Sampling(max_tokens=20))]
    said: dict[bool, list[list[int]]] = {}
    for graphs in (False, True):
        recorder = Recorder(model, graphs=graphs)
        read: list[tuple[str, int]] = []

        def heard(kind: str, rows: int, passes: int = 1, read: list[tuple[str, int]] = read) -> None:
            if kind in ("prefill", "fused"):
                read.append((kind, rows))

        monkeypatch.setattr(recorder.runner, "on_launch", heard)
        recorder.warm_up(num, ["greedy"], [3], 800)
        engine = Engine(target, max_requests=num, drafter=recorder, num_drafts=3)
        assert [c.token_ids for c in engine.generate(prompts, Sampling(max_tokens=20))] == plain
        said[graphs] = recorder.said
        # 700 tokens are two launches of at most 512 rows.
        assert not graphs or (len(read) >= 7 // num + 1 and all(how == "prefill" and n <= 512 for how, n in read))
    assert said[True] == said[False]


def test_graphs_of_prompts_are_made_by_a_warm_up_and_never_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single request does not wait for them."""
    target, draw = tiny_decoder(0, max_positions=256), random.Random(0)
    monkeypatch.setattr(DraftLengthController, "_pick", lambda *_: Decision(2, 2, 1.0))
    monkeypatch.setattr(DraftLengthController, "would_draft", lambda *_: True)
    launched: list[str] = []
    for max_requests in (1, 2):
        drafter = DraftModel(near_copy(target, 0.03), graphs=True)
        monkeypatch.setattr(drafter.runner, "on_launch", lambda kind, rows, passes=1: launched.append(kind))
        engine = Engine(target, max_requests=max_requests, max_context=128, drafter=drafter, graphs=True)

        def read(engine: Engine = engine) -> list[str]:
            launched.clear()
            for num in (30, 64, 90) * 2:
                engine.generate([[draw.randrange(29) for _ in range(num)]], Sampling(max_tokens=8))
            return [kind for kind in launched if kind != "chain"]

        if max_requests == 1:
            assert set(read()) == {"fused"}
        engine.warm_up()
        made = drafter.num_graphs
        assert set(read()) == {"prefill"} and drafter.num_graphs == made


def test_drafts_that_are_drawn_need_their_distribution() -> None:
    target = tiny_decoder(0)
    recorder = Recorder(near_copy(target, 0.03), graphs=True)
    engine = Engine(target, drafter=recorder, num_drafts=3, rule="block")
    engine.generate([[1, 2, 3]], Sampling(temperature=1.0, seed=1, max_tokens=20))
    assert recorder.num_chained == 0 and recorder.said
    engine.generate([[1, 2, 3]], Sampling(max_tokens=20))
    assert recorder.num_chained > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.few(2)
def test_steps_run_ahead_while_the_controller_abstains(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a drafter on board, plain stretches are as fast as without one, and the text is the same."""
    draw = random.Random(seed)
    target = tiny_decoder(0)
    plain = [c.token_ids for c in Engine(target, max_requests=3).generate(PROMPTS, SAMPLINGS)]
    engine = Engine(target, max_requests=3, drafter=DraftModel(near_copy(target, 0.03)), graphs=True)
    assert engine.draft_controller is not None
    pending: list[int] = []

    def choose(num_requests: int, *prospects: object) -> int:
        return pending.pop() if pending else draw.choice((0, 0, 0, 2, 3))

    def would_draft(num_requests: int, *prospects: object) -> bool:
        pending[:] = [draw.choice((0, 0, 0, 2, 3))]
        return pending != [0]

    monkeypatch.setattr(engine.draft_controller, "choose", choose)
    monkeypatch.setattr(engine.draft_controller, "would_draft", would_draft)
    num_ahead = 0
    step = engine.step

    def counted() -> list[Output]:
        nonlocal num_ahead
        outputs = step()
        num_ahead += bool(engine.pipeline.num_ahead)
        return outputs

    monkeypatch.setattr(engine, "step", counted)
    assert [c.token_ids for c in engine.generate(PROMPTS, SAMPLINGS)] == plain
    assert num_ahead > 5 and engine.stats.num_accepted > 5
    assert engine.drafting._ended is None  # nothing runs any more


def test_in_a_pause_requests_are_not_looked_at_until_somebody_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one ends and the next begins their number stays; some are ready at once, found in the prefix cache."""
    target = tiny_decoder(0)
    engine = Engine(target, max_requests=3, block_size=4, graphs=True)
    settings = DraftLengthSettings(lengths=(1,), exploration_rate=0.0)  # nor is one tried
    controller = DraftLengthController(lambda rows: float(rows), settings)  # no drafts pay
    engine.use_drafter(DraftModel(near_copy(target, 0.03), graphs=True), None, controller)
    engine.warm_up()
    log: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            log.append(name)
            return call(*args)

        return noting

    monkeypatch.setattr(engine.drafting, "prospects", noted("looked", engine.drafting.prospects))
    for name in ("choose", "would_draft"):
        monkeypatch.setattr(controller, name, noted("asked", getattr(controller, name)))
    monkeypatch.setattr(controller, "requests_joined", noted("joined", controller.requests_joined))
    prompts = [[1, 2, 3, 4, i % 3] for i in range(9)]
    engine.generate(prompts, [Sampling(max_tokens=40 - 3 * i, ignore_eos=True) for i in range(9)])
    assert engine.stats.num_prefix_hits > 0 == engine.stats.num_drafted
    after = [log[i + 1 : i + 3] for i, name in enumerate(log) if name == "joined"]
    assert len(after) >= 5 and all(pair in (["asked", "looked"], ["joined", "asked"]) for pair in after), after
    assert log.count("looked") < log.count("asked") / 2


def test_weights_are_looked_at_while_no_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a request they may not change, and with many layers it takes as long as a third of a step."""
    target, looks = tiny_decoder(0), []
    refresh = Runner.refresh

    def counted(runner: Runner) -> None:
        looks.append(runner)
        refresh(runner)

    engine = Engine(target, max_requests=2, graphs=True)
    monkeypatch.setattr(Runner, "refresh", counted)
    for _ in range(2):
        found = engine.generate(PROMPTS, SAMPLINGS)
        with torch.no_grad():
            target.embed.weight *= -1
    assert looks == [engine.runner] * 2 and len(PROMPTS) > 2
    with torch.no_grad():
        target.embed.weight *= -1
    assert [c.token_ids for c in found] == [
        c.token_ids for c in Engine(target, graphs=True).generate(PROMPTS, SAMPLINGS)
    ]


def test_a_step_is_clocked_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time outside of the model (scheduling, handing out tokens) is part of what a step costs."""
    target = tiny_decoder(0)
    engine = Engine(target, max_requests=1, drafter=DraftModel(near_copy(target, 0.03)), num_drafts=None)
    assert engine.draft_controller is not None
    engine.draft_controller.costs.pass_seconds = PassCosts(lambda rows: 0.001)
    took: list[float] = []
    stepped = engine.draft_controller.record_step

    def noted(rows: int, seconds: float, num_new: int, *, ahead: bool) -> None:
        took.append(seconds)
        stepped(rows, seconds, num_new, ahead=ahead)

    monkeypatch.setattr(engine.draft_controller, "record_step", noted)
    request = engine.add([1, 2, 3], Sampling(max_tokens=12))
    while request.finish_reason is None:
        engine.step()
        time.sleep(0.01)
    assert len(took) > 2 and all(t >= 0.009 for t in took[1:])


@pytest.mark.parametrize("graphs", [False, True])
def test_which_steps_ran_ahead(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs none does: not the last of a text either."""
    target = tiny_decoder(0)
    drafter = DraftModel(near_copy(target, 0.03), graphs=graphs)
    engine = Engine(target, max_requests=2, drafter=drafter, num_drafts=None, graphs=graphs)
    controller = engine.draft_controller
    assert controller is not None
    controller.costs.pass_seconds = PassCosts(lambda rows: 0.001 * rows)  # guesses never pay
    controller.budget.rate, controller.acceptance.accepted.values = 0.0, [0.1] * 8
    told, stepped = [], controller.record_step

    def noted(rows: int, seconds: float, num_new: int, *, ahead: bool) -> None:
        told.append((controller.step.batch, ahead))
        stepped(rows, 0.001 * rows, num_new, ahead=ahead)

    monkeypatch.setattr(controller, "record_step", noted)
    engine.generate([[1, 2, 3], [1, 2, 4]], [Sampling(max_tokens=m, ignore_eos=True) for m in (6, 12)])
    assert any(ahead for _, ahead in told) == graphs
    assert graphs or [asked for asked, _ in told] == [2] * 5 + [1] * 6, "all that run"


def test_measuring_is_no_part_of_the_next_step() -> None:
    target = tiny_decoder(0)
    engine = Engine(target, max_requests=1, drafter=DraftModel(near_copy(target, 0.03)), num_drafts=None)
    assert engine.draft_controller is not None
    engine.add([1, 2, 3], Sampling(max_tokens=12))
    for _ in range(2):
        engine.step()
    assert engine.drafting._ended is not None
    engine.draft_controller.record_step = lambda *rest, ahead: engine.drafting.profile(16)  # type: ignore[method-assign, assignment]
    engine.drafting.record_time(1, 0.0, 1)
    assert engine.drafting._ended is None


@pytest.mark.parametrize("graphs", [False, True])
def test_a_drafter_says_that_it_had_to_read_first(graphs: bool) -> None:
    """Also where there are no chains: what reading takes is learned, and not taken for what drafts take."""
    target = tiny_decoder(0)
    drafter = DraftModel(near_copy(target, 0.03), graphs=graphs)
    request = Request([1 + i % 20 for i in range(30)], 30, Sampling(max_tokens=20), 1)
    found = []
    for _ in range(2):
        drafter.propose([request], 3)
        found.append(drafter.caught_up)
        request.tokens += [5]
    request.tokens += [6] * 20
    drafter.propose([request], 3)
    assert [*found, drafter.caught_up] == [True, False, True]


def noted_batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """What runners compute from now on."""
    seen: list[Batch] = []
    forward = Runner.forward

    def noted(self: Runner, batch: Batch, *rest: object) -> torch.Tensor:
        seen.append(batch)
        return forward(self, batch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "forward", noted)
    return seen


def test_a_long_pass_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting on a CPU begins with such passes over 1 to 16 rows, for which the first text waits."""
    model = tiny_decoder(0)
    for limit, passes in ((model.spec.num_params() + 1, 2), (model.spec.num_params(), 1)):
        monkeypatch.setattr(runner, "LONG_PASS", limit)
        seen = noted_batches(monkeypatch)
        assert Runner(model, BlockPool(4, 16)).measure_seconds(4) > 0
        assert len(seen) == passes


@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 200])
def test_a_profile_of_many_rows_is_of_several_requests(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the model has positions, and never the rows of one long prompt."""
    seen = noted_batches(monkeypatch)
    assert Runner(tiny_decoder(0), BlockPool(4, 16)).measure_seconds(num_rows) > 0
    spans = seen[0].spans
    assert sum(s.num for s in spans) == num_rows and max(s.num for s in spans) <= 16
    assert len(spans) == (1 if num_rows <= 16 else -(-num_rows // 2))
    used = [b for s in spans for b in s.blocks]
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("rule", ["coupled", "token"])
@pytest.mark.parametrize("max_requests", [1, 4])
@pytest.mark.few(3)
def test_guesses_go_from_drafter_to_target_on_the_device(
    max_requests: int, rule: RuleName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's step is launched with tokens that the host does not know, and the text stays the same; under another
    rule, or for a text that ends soon, the host reads them first."""
    target = tiny_decoder()
    samplings = [s if rule == "coupled" else Sampling(max_tokens=s.max_tokens) for s in SAMPLINGS]
    plain = Engine(target, graphs=True, max_requests=max_requests).generate(PROMPTS, samplings)
    unknown: list[int] = []
    choose = Runner.launch_decode

    def spy(self: Runner, batch: Batch, *args: Any) -> Any:
        assert all(t >= 0 for t in batch.tokens) or batch.device_drafts
        unknown.append(len(batch.device_drafts))
        return choose(self, batch, *args)

    monkeypatch.setattr(Runner, "launch_decode", spy)
    drafter = DrafterStack([NgramDrafter(longest=3, shortest=3), DraftModel(near_copy(target, 0.05), graphs=True)])
    engine = Engine(target, graphs=True, max_requests=max_requests, drafter=drafter, num_drafts=4, rule=rule)
    drafted = engine.generate(PROMPTS, samplings)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert engine.stats.num_accepted > 10
    assert (max(unknown, default=0) >= min(3, max_requests)) == (rule == "coupled")
