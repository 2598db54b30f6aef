"""How many tokens to draft in the next step: the length with the most tokens per second, 0 included.

For B requests with g drafts each, the expected rate is

    rate(g) = B (1 + sum_{j<=g} c_j a_1 ... a_j) / (P(rows) + X(B, g)),     rows = B (1 + sum_{j<=g} c_j)

    a_j   chance that draft j is accepted after those before it were: a moving average per place (`AcceptanceModel`)
    c_j   chance that the drafter offers a j-th draft (a lookup often has none)
    P     seconds of a target pass by rows, profiled at powers of two before the first request
    X     seconds that a step with drafts takes besides: drafting, and the host, for which such a step waits

Acceptance alone would be a bad signal: whether a draft pays depends on what a step costs at this batch size. Costs are
learned from real steps (`CostModel`): medians by batch size and length, and the nearest known size times the root of
how many more drafts there are where there was none. A plain step (no drafts) takes P times a learned factor. Where
plain steps are launched ahead of the host only those count for it: the others are slower, and drafts would look good
beside them. A drafter that paused has to catch up on texts first; that cost is learned as well and spread over the
tokens that the requests may still gain.

The bound: the model may be wrong, so every loss is paid from a budget (`ExplorationBudget`): a few plain steps at the
start, the exploration rate of all time up to the cost of the next try, and a share of what drafts save. What drafts
saved is also kept per batch size, and pays for losses there first. Drafts are chosen only if the budget and a share of
the savings cover a step that gains nothing. So, if plain steps are known, all losses beyond what drafts saved are, at
most,

    first_budget plain steps + exploration_rate * time + one step of each batch size and one probe

however wrong the model is (tests/serve/speculative/test_draft_length.py).

A drafter whose acceptance was measured when it was made starts with it, as if it were the average of a full window: a
few unlucky steps at the start then do not decide about the next seconds.

Without drafts nothing is learned about them, so now and then a probe tries the longest draft, paid from the budget.
Where drafting is off it takes few requests, since their texts have to be caught up on; it teaches acceptance, not
costs, and runs only where drafts would pay if all were accepted. A probe that gains is followed by another at once;
after a loss the budget refills first. A decision for no drafts is a pause: it holds for a few steps of the same
requests, or until the budget covers the next try, so that the host is not kept busy. A request that joins or leaves
ends it. Steps with prefill have no drafts: their time says nothing. Plain steps are measured again from time to time.

Left out: classes of requests with different acceptance, different lengths within a step, changing costs of a size that
is in a pause, the length of the texts to catch up on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Sizes = tuple[int, ...]  # (batch size,) or (batch size, length), powers of two


@dataclass(frozen=True)
class DraftLengthSettings:
    """Unit and reason of each. "Plain steps" are seconds in multiples of a step without drafts at this batch size."""

    lengths: tuple[int, ...] = (1, 2, 4, 8)  # drafts per request; few, since each has CUDA graphs of its own
    # -- acceptance
    first_acceptance: float = 0.8  # chance before any observation: optimistic, so that a new drafter is tried
    smoothing: float = 0.02  # weight of the newest observation: about the last 50 count
    stale_observations: int = 5  # that older ones count as after a pause, so that a probe matters
    # -- costs
    window: int = 9  # observations of a median, so that a single slow step changes nothing
    first_overhead: float = 0.125  # plain steps: X of one draft for one request (H200), until measured
    plain_steps: int = 6  # measured at a new batch size, before drafts; a decision for none holds as long
    remeasure_steps: int = 1000  # with drafts, after which plain steps are measured again
    # -- choice
    margin: float = 1.02  # times the plain rate, for drafts to be worth their noise
    # -- budget
    exploration_rate: float = 0.004  # of all time, for tries; 0: no probes
    first_budget: float = 10.0  # plain steps, so that a new drafter is tried at once
    risked_share: float = 0.25  # of what drafts saved, that may be lost again: there, and (once) at other batch sizes
    max_credit: float = 64.0  # plain steps, of savings and of the budget: what was saved long ago is no credit
    probed_requests: int = 2  # with drafts in a probe during a pause, in turn


SETTINGS = DraftLengthSettings()


def _never() -> bool:
    return False


class Prospects(NamedTuple):
    """What the running requests allow. Without arguments: no bounds."""

    max_length: int | None = None  # drafts per request that fit; None: any number
    tokens_left: float = math.inf  # that a request may still gain, on average
    is_behind: Callable[[], bool] = _never  # whether the drafter has to catch up on texts first


class Decision(NamedTuple):
    length: int  # drafts per request, the best that the budget covers
    longest: int  # that the requests allow
    rate: float  # expected tokens per second at `length`
    needed: float = math.inf  # seconds in the budget for another choice; inf: there is none


@dataclass
class Step:
    """The step in progress, as it was decided."""

    batch: int = 0  # requests; 0: there was no decision
    length: int = 0  # drafts per request
    best_rate: float = 0.0  # expected tokens per second of the best length
    probing: bool = False
    partial: bool = False  # only some of the requests get drafts
    caught_up: bool = False  # the drafter had to catch up on texts first
    draft_seconds: float = 0.0


class PassCosts:
    """Seconds of a target pass by its number of rows: `profile` at powers of two, once each, linear in between."""

    def __init__(self, profile: Callable[[int], float]) -> None:
        self._profile = profile
        self.known: dict[int, float] = {}  # rows -> seconds

    def __call__(self, rows: float) -> float:
        low = power_of_two_below(rows)
        if rows <= low:
            return self._at(low)
        share = rows / low - 1
        return (1 - share) * self._at(low) + share * self._at(2 * low)

    def _at(self, rows: int) -> float:
        if rows not in self.known:
            self.known[rows] = self._profile(rows)
        return self.known[rows]


class MedianTable:
    """Medians of the last observations, by sizes."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._last: dict[Sizes, deque[float]] = {}
        self.known: dict[Sizes, float] = {}

    def get(self, sizes: Sizes, default: float) -> float:
        """Of these sizes, or of the nearest that are known, or the default."""
        found = self.known.get(sizes)
        if found is not None or not self.known:
            return default if found is None else found
        return max(0.0, self.known[min(self.known, key=lambda known: _distance(known, sizes))])

    def add(self, sizes: Sizes, value: float, default: float) -> None:
        """The expectation counts as one observation, so that a first one that is far off does not decide."""
        last = self._last.setdefault(sizes, deque([self.get(sizes, default)], maxlen=self._window))
        last.append(value)
        self.known[sizes] = sorted(last)[(len(last) - 1) // 2]


class CostModel:
    """Seconds of steps, learned from real ones. Overheads and catch-up grow with the root of their sizes, which was
    about right wherever it was measured; tables hold them divided by it."""

    def __init__(self, profile: Callable[[int], float], settings: DraftLengthSettings = SETTINGS) -> None:
        self.settings = settings
        self.pass_seconds = PassCosts(profile)
        self.plain_factors = MedianTable(settings.window)  # (batch,) -> plain step over the profiled pass
        self.overheads = MedianTable(settings.window)  # (batch, length) -> X over the root
        self.catch_ups = MedianTable(settings.window)  # (batch,) -> seconds over the root
        self.seconds_per_draft: dict[int, float] = {}  # batch -> the least seen; for reports only
        self._runs_ahead = False  # plain steps were seen that were launched ahead of the host

    def plain(self, batch: int) -> float:
        return self.pass_seconds(batch) * self.plain_factors.get((power_of_two_below(batch),), 1.0)

    def drafted(self, batch: int, length: int, rows: float) -> float:
        """A step with drafts, a plain one's at least: X is below zero where a profile was too slow, and there may be
        fewer rows than when it was measured."""
        plain, sizes = self.plain(batch), (power_of_two_below(batch), length)
        overhead = self.settings.first_overhead * plain
        return max(plain, self.pass_seconds(rows) + self.overheads.get(sizes, overhead) * _root(sizes))

    def catch_up(self, num_texts: int) -> float:
        sizes = (power_of_two_below(num_texts),)
        return self.catch_ups.get(sizes, self.plain(num_texts)) * _root(sizes)

    def add_plain(self, batch: int, seconds: float, ahead: bool) -> None:
        if ahead and not self._runs_ahead:
            self._runs_ahead, self.plain_factors = True, MedianTable(self.settings.window)
        if ahead or not self._runs_ahead:
            self.plain_factors.add((power_of_two_below(batch),), seconds / self.pass_seconds(batch), 1.0)

    def add_drafted(self, batch: int, length: int, rows: int, seconds: float) -> None:
        default, sizes = self.settings.first_overhead * self.plain(batch), (power_of_two_below(batch), length)
        self.overheads.add(sizes, (seconds - self.pass_seconds(rows)) / _root(sizes), default)

    def add_catch_up(self, batch: int, seconds: float) -> None:
        default, sizes = self.plain(batch), (power_of_two_below(batch),)
        self.catch_ups.add(sizes, seconds / _root(sizes), default)


def power_of_two_below(number: float) -> int:
    """The power of two at or below it, 1 at least."""
    return 1 << (int(number).bit_length() - 1) if number >= 2 else 1


def _root(sizes: Sizes) -> float:
    return math.sqrt(math.prod(sizes))


def _distance(sizes: Sizes, others: Sizes) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(sizes, others, strict=True))


class MovingAverages:
    """One average per place of a draft; the first observations weigh more."""

    def __init__(self, first: float, num: int, smoothing: float) -> None:
        self.values, self.counts, self._smoothing = [first] * num, [0] * num, smoothing

    def add(self, num_places: int, num_true: int) -> None:
        """Of the first `num_places` places, whether they are among the first `num_true`."""
        for j in range(min(num_places, len(self.values))):
            self.counts[j] += 1
            weight = max(self._smoothing, 1 / (self.counts[j] + 1))
            self.values[j] += weight * (float(j < num_true) - self.values[j])


class AcceptanceModel:
    def __init__(self, settings: DraftLengthSettings = SETTINGS, known: Sequence[float] = ()) -> None:
        """`known`: the acceptance of the first places, measured beforehand; later places are like the last of them."""
        self._stale, num = settings.stale_observations, max(settings.lengths)
        self.accepted = MovingAverages(settings.first_acceptance, num, settings.smoothing)  # a_j
        if known:
            self.accepted.values = [*known, *[known[-1]] * num][:num]
            self.accepted.counts = [round(1 / settings.smoothing)] * num
        self.offered = MovingAverages(1.0, num, settings.smoothing)  # c_j

    def num_offered(self, length: int) -> float:
        """Drafts that a request is expected to get."""
        return sum(self.offered.values[:length])

    def gain(self, length: int) -> float:
        """Tokens that a request is expected to gain from drafts, besides the one of every step."""
        gain, alive = 0.0, 1.0
        for accepted, offered in list(zip(self.accepted.values, self.offered.values, strict=True))[:length]:
            alive *= accepted
            gain += offered * alive
        return gain

    def discount(self) -> None:
        """What was seen before a pause is old."""
        self.accepted.counts = [min(count, self._stale) for count in self.accepted.counts]


class SizeRecord:
    """What drafts saved at one batch size, and what is to be measured there."""

    def __init__(self, settings: DraftLengthSettings = SETTINGS) -> None:
        self._settings = settings
        self.savings = 0.0  # seconds that drafts saved and did not lose again
        self.num_plain_due = settings.plain_steps  # plain steps to measure first
        self.num_drafted = 0  # steps with drafts since the last plain one
        self.probe_loss = 0.0  # seconds that the last probe lost

    @property
    def risked(self) -> float:
        """Seconds of the savings that may be lost again."""
        return self._settings.risked_share * self.savings

    def add_savings(self, saved: float, plain: float) -> float:
        """Seconds that a step with drafts saved. Returns the part of a loss that earlier savings do not cover."""
        savings = self.savings + saved
        self.savings = max(0.0, min(savings, self._settings.max_credit * plain))
        return max(0.0, -savings)

    def add_probe(self, lost: float) -> None:
        self.probe_loss = max(0.0, lost)


class ExplorationBudget:
    """Seconds that may be lost by drafting, for all batch sizes together."""

    def __init__(self, settings: DraftLengthSettings = SETTINGS) -> None:
        self._settings, self.rate = settings, settings.exploration_rate
        self.seconds: float | None = None  # None: no step yet
        self.needed = 0.0  # for the next try

    def settle(self, loss: float, saved: float, plain: float) -> None:
        """Pay a loss that savings do not cover, and take a share of what a step saved."""
        assert self.seconds is not None
        self.seconds -= loss
        if saved > 0:
            grown = self.seconds + self._settings.risked_share * saved
            self.seconds = max(self.seconds, min(grown, self._settings.max_credit * plain))

    def accrue(self, spent: float) -> None:
        """The exploration rate's part of the time that passed, up to what is needed."""
        assert self.seconds is not None
        if self.seconds < self.needed:
            self.seconds = min(self.needed, self.seconds + self.rate * spent)


@dataclass
class Pause:
    """No drafts for these requests, until the budget has what is needed or the decision is old."""

    batch: int
    needed: float
    age: int = 0  # steps


class DraftLengthController:
    """One decision per step: `choose` (or `would_draft`), then what happened, then `record_step` or `discard_step`."""

    def __init__(
        self,
        profile: Callable[[int], float],
        settings: DraftLengthSettings = SETTINGS,
        known_acceptance: Sequence[float] = (),
    ) -> None:
        """`profile(rows)` measures the seconds of one target pass; it is called once per power of two.
        `known_acceptance`: `Drafter.known_acceptance`."""
        self.settings, self.lengths = settings, settings.lengths
        self.costs = CostModel(profile, settings)
        self.acceptance = AcceptanceModel(settings, known_acceptance)
        self.budget = ExplorationBudget(settings)
        self.sizes: dict[int, SizeRecord] = {}  # by batch size (a power of two)
        self.step = Step()
        self._next_probed = 0  # index of the first request of the next partial probe
        self._pause: Pause | None = None

    def size(self, batch: int) -> SizeRecord:
        return self.sizes.setdefault(power_of_two_below(batch), SizeRecord(self.settings))

    # -- the decision ---------------------------------------------------------------------------------------
    def choose(self, batch: int, prospects: Callable[[], Prospects] = Prospects) -> int:
        """Drafts per request for a step of this many requests. `prospects` is not called during a pause."""
        found = self._decide(batch, prospects)
        probing = found.length < found.longest and self._available(batch) >= found.needed
        partial = probing and found.length == 0 and batch > self.settings.probed_requests
        length = found.longest if probing else found.length
        self.step = Step(batch, length, found.rate, probing, partial)
        return length

    def would_draft(self, batch: int, prospects: Callable[[], Prospects] = Prospects) -> bool:
        """Whether `choose` would return more than 0 now. Begins no step."""
        found = self._decide(batch, prospects)
        return found.length > 0 or self._available(batch) >= found.needed

    def drafted_requests(self, requests: Sequence[T]) -> Sequence[T]:
        """The requests of the step that get drafts: all of them, or a few in turn."""
        if not self.step.partial:
            return requests
        first = self._next_probed % len(requests)
        self._next_probed += self.settings.probed_requests
        return (*requests[first:], *requests[:first])[: self.settings.probed_requests]

    def requests_joined(self) -> None:
        """The running requests are others: texts that begin may be worth drafts."""
        self._pause = None

    def _decide(self, batch: int, prospects: Callable[[], Prospects]) -> Decision:
        pause = self._pause
        if pause is not None and pause.age < self.settings.plain_steps:
            pause.age += 1
            if pause.batch == batch and self._available(batch) < pause.needed:
                return Decision(0, 0, 0.0)
        found = self._pick(batch, prospects())
        pauses = found.length == 0 and self._available(batch) < found.needed
        self._pause = Pause(batch, found.needed) if pauses and not self.size(batch).num_plain_due else None
        return found

    def _available(self, batch: int) -> float:
        """Seconds in the budget."""
        seconds = self.budget.seconds
        return self.settings.first_budget * self.costs.plain(batch) if seconds is None else seconds

    def _pick(self, batch: int, prospects: Prospects) -> Decision:
        most, left, is_behind = prospects
        longest = max((g for g in self.lengths if most is None or g <= most), default=0)
        size, plain, available = self.size(batch), self.costs.plain(batch), self._available(batch)
        if size.num_plain_due or longest == 0:
            return Decision(0, longest, batch / plain)
        behind = is_behind()
        catch_up = self.costs.catch_up(batch) if behind else 0.0
        rates = self.rates(batch, longest, catch_up / max(1.0, left))
        worth = self.settings.margin * rates[0]
        risks = self._risks(batch, [g for g in rates if g and rates[g] >= worth], catch_up)
        covered = [g for g in risks if risks[g] <= max(0.0, available) + size.risked]
        best = max(covered, key=lambda g: (rates[g], -g), default=0)
        if best == 0 and risks:  # worth it, but the budget has to grow first
            self.budget.needed = max(0.0, min(risks.values()) - size.risked)
            return Decision(0, longest, rates[0], self.budget.needed)
        loss = self._probe_loss(batch, longest, best, rates[best], worth, behind)
        if loss is None:
            return Decision(best, longest, rates[best])
        self.budget.needed = max(0.0, loss, size.probe_loss)
        return Decision(best, longest, rates[best], self.budget.needed)

    def _risks(self, batch: int, lengths: Sequence[int], catch_up: float) -> dict[int, float]:
        """Seconds that a step of each length loses if no draft is accepted."""
        plain = self.costs.plain(batch)
        return {g: self.seconds(batch, g) + catch_up - plain for g in lengths}

    def _probe_loss(
        self, batch: int, longest: int, best: int, best_rate: float, worth: float, behind: bool
    ) -> float | None:
        """Seconds that a probe is expected to lose against the best length; None: nothing to learn from one."""
        if (behind and best) or best == longest or not self.budget.rate:
            return None
        num = batch if best else min(batch, self.settings.probed_requests)
        if num < batch and self._certain_rate(batch, longest) < worth:
            return None
        seconds = self.seconds(batch, longest, num)
        gained = self.rate(batch, longest, num) * seconds / best_rate
        return seconds + (self.costs.catch_up(num) if behind else 0.0) - gained

    def _certain_rate(self, batch: int, longest: int) -> float:
        """The best rate if all drafts were offered and accepted."""
        lengths = [g for g in self.lengths if g <= longest]
        return max(batch * (1 + g) / self.costs.drafted(batch, g, batch + batch * g) for g in lengths)

    # -- the model ------------------------------------------------------------------------------------------
    def seconds(self, batch: int, length: int, num_drafted: int | None = None) -> float:
        """Expected seconds of a step with drafts for so many of the requests (None: all)."""
        if length == 0:
            return self.costs.plain(batch)
        num = batch if num_drafted is None else num_drafted
        return self.costs.drafted(batch, length, batch + num * self.acceptance.num_offered(length))

    def rate(self, batch: int, length: int, num_drafted: int | None = None, catch_up_per_token: float = 0.0) -> float:
        """Expected tokens per second. `catch_up_per_token`: seconds per token of a request with drafts."""
        gain = self.acceptance.gain(length)
        num_new = batch + (batch if num_drafted is None else num_drafted) * gain
        entry = catch_up_per_token * (1 + gain) if length else 0.0
        return num_new / (self.seconds(batch, length, num_drafted) + entry)

    def rates(self, batch: int, longest: int, catch_up_per_token: float = 0.0) -> dict[int, float]:
        """The same by length, 0 included."""
        lengths = [g for g in (0, *self.lengths) if g <= longest]
        return {g: self.rate(batch, g, None, catch_up_per_token) for g in lengths}

    # -- what happened --------------------------------------------------------------------------------------
    def record_drafting(self, num: int, length: int, seconds: float, caught_up: bool = False) -> None:
        """One call of the drafter, for `num` requests. `caught_up`: it had to read texts or capture graphs first."""
        self.step.draft_seconds, self.step.caught_up = seconds, caught_up
        if not caught_up:
            size, known = power_of_two_below(num), self.costs.seconds_per_draft
            known[size] = min(known.get(size, math.inf), seconds / length)

    def record_offer(self, num_wanted: int, num_offered: int) -> None:
        """One request got num_offered drafts."""
        self.acceptance.offered.add(num_wanted, num_offered)

    def record_acceptance(self, num_drafted: int, num_accepted: int) -> None:
        """Of one request's drafts. Those after the first wrong one say nothing."""
        self.acceptance.accepted.add(min(num_drafted, num_accepted + 1), num_accepted)

    def discard_step(self) -> None:
        """The step in progress says nothing."""
        self.step = Step()

    def record_step(self, rows: int, seconds: float, num_new: int, *, ahead: bool = False) -> None:
        """A step that computed `rows` rows in `seconds` (drafting apart) and gained num_new tokens. `ahead`: it was
        launched before the tokens of the step before it were known."""
        step, budget = self.step, self.budget
        batch, spent = step.batch or rows, seconds + step.draft_seconds
        size, plain = self.size(batch), self.costs.plain(batch)
        budget.seconds = self._available(batch)
        if step.length == 0:
            self.costs.add_plain(batch, seconds, ahead)
            size.num_plain_due, size.num_drafted = max(0, size.num_plain_due - 1), 0
        else:
            saved = num_new * plain / batch - spent  # against a plain step
            pausing = step.best_rate <= batch / plain
            loss = self._settle(size, plain, pausing, spent - num_new / step.best_rate, saved)
            if loss and step.probing and pausing:
                budget.seconds = min(budget.seconds, budget.needed)  # the next probe is saved for anew
            budget.settle(loss, saved, plain)
            if step.caught_up and not step.partial:
                self.costs.add_catch_up(batch, max(0.0, spent - self.seconds(batch, step.length)))
            elif not step.partial:
                self.costs.add_drafted(batch, step.length, rows, spent)
        budget.accrue(spent)
        self.discard_step()

    def _settle(self, size: SizeRecord, plain: float, pausing: bool, lost: float, saved: float) -> float:
        """Record what a step with drafts saved; returns the loss that the budget has to pay. `lost`: seconds against
        the best length. `pausing`: that is 0."""
        step = self.step
        if step.probing:
            if pausing:
                self.acceptance.discount()
            size.add_probe(lost)
            if lost > 0:
                return lost
        size.num_drafted += 1
        if size.num_drafted >= self.settings.remeasure_steps:
            size.num_plain_due, size.num_drafted = self.settings.plain_steps, 0
        return size.add_savings(saved, plain)
