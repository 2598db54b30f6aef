"""How many tokens to draft in the next step: the number that gives the most tokens per second, 0 included.

For B requests that each get g drafts the model is

    rate(g) = B (1 + sum_{j<=g} c_j a_1 ... a_j) / (T_verify(rows) + T_draft(B) g),  rows = B (1 + sum_{j<=g} c_j)

    a_j       chance that draft j is accepted once those before it were: a moving average per position
    c_j       chance that the drafter offers a j-th draft when asked for it (a lookup often has none)
    T_verify  seconds of a target pass by rows: measured at powers of two when first needed, then the median of
              the last real steps of about that size, interpolated between; those without drafts apart
    T_draft   seconds per drafted position: lower quartile of the last calls, since some of the first capture
              graphs, which takes a hundred times as long

`choose` returns the best g of a few (LENGTHS): every length has programs of its own, which are made before the first
request (prepare.py). A step in which one had to be made all the same is not counted. Acceptance alone would be a
bad signal: whether a draft pays depends on what a row costs at this batch size, which is why costs are measured.

What is not tried is not learned: at g = 0 the averages would stand still for ever. So now and then the longest
draft is tried again (a probe), for a few requests only, in turn: a drafter that paused has their whole text to
catch up on. Probes spend a credit that grows by `explore` (0.7%) of the time that passes; a probe costs what it lost
against the best choice, and one that gained tokens costs nothing, so the next follows at once. None is begun
before the credit holds what the last one cost. That bounds the price of looking and makes the way back quick.

A drafter that was not asked for a while has a text to read first (`behind`). What that costs is measured by number of
requests, and spread over the tokens that these may still gain: drafting begins where it pays in spite of it.

The model may be wrong, so two things do not rest on it. Plain steps are measured before anything is drafted at a size,
and again now and then where drafting wins by little. And every size has an account of what drafting won and lost
against them: it grows by half of `explore` of the time, a step with drafts adds the seconds it saved or takes those it
lost, up to a limit (gains of long ago are no licence). Below zero nothing is drafted until it has grown again. So in
the long run at most `explore` of the time goes into probes and half as much into drafts that did not pay.

While prompts are read nothing is drafted: the time of such a step says nothing, and those who are ready first are not
all who will be there.

Left out: classes of requests with different acceptance, lengths that differ between requests of one step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

LENGTHS = (1, 2, 4, 8)  # drafts to choose from, and none
START_ACCEPTANCE = 0.8  # hopeful, so that a new drafter is tried
SMOOTHING = 0.1  # weight of the newest observation, after the first few
DRAFT_CALLS = 9  # calls that the draft cost is taken from
STEPS = 9  # of a size, whose median counts
MIN_DRAFT_CALLS = 3  # the first calls read whole prompts; before this many, drafting counts as free
PROBED = 4  # requests that get drafts in a probe of a pause
RECONSIDER = 8  # steps
DEAREST = 20.0  # plain steps that a step can lose: beyond this the machine did something else
ENTRIES = 5  # times that a drafter read texts first, of which the shortest counts
FADE = 0.9  # of that, after a probe of a few
MARGIN = 1.02  # times the rate without drafts, for drafts to be worth it
ENTER = 1.1  # the same where texts are to be read first
PLAIN_STEPS = 6  # measured at a size before anything is drafted there
CLOSE, AGAIN = 1.25, 250  # a win by less is looked at again after so many steps
TRIAL = 4  # plain steps that an account must hold to draft again after it was empty

T = TypeVar("T")


def no() -> bool:
    return False


class StepCosts:
    """Seconds of a target pass by its number of rows."""

    def __init__(self, profile: Callable[[int], float]) -> None:
        self._profile = profile
        self._seconds: dict[int, float] = {}  # rows (a power of two) -> seconds
        self._steps: dict[int, deque[float]] = {}  # the same -> the last real ones
        self._seen: set[int] = set()  # powers of two that a real step had at least as many rows as

    @property
    def known(self) -> dict[int, float]:
        """Rows -> seconds, of what was asked for so far."""
        return dict(self._seconds)

    def __call__(self, rows: float) -> float:
        low, share = _bracket(rows)
        return (1 - share) * self._at(low) + (share * self._at(2 * low) if share else 0.0)

    def _at(self, rows: int) -> float:
        if rows not in self._seconds:
            self._seconds[rows] = self._profile(rows)
        return self._seconds[rows]

    def observe(self, rows: int, seconds: float) -> None:
        """A real step. The first of about so many rows says nothing: it compiled, touched memory. Of the others the
        median counts, so that a busy moment of the machine does not."""
        low, share = _bracket(rows)
        if low not in self._seen:
            self._seen.add(low)
            return
        sizes = [(size, weight) for size, weight in ((low, 1 - share), (2 * low, share)) if weight]
        if any(size not in self._seconds for size, _ in sizes):
            return  # nobody asked about such a step yet (a long prompt, say)
        ratio = seconds / self(rows)
        for size, weight in sizes:
            steps = self._steps.setdefault(size, deque(maxlen=STEPS))
            steps.append(self._seconds[size] * (1 + weight * (ratio - 1)))
            if len(steps) >= STEPS // 2:
                self._seconds[size] = sorted(steps)[len(steps) // 2]


class Account:
    """What drafting may still lose at one size, and what is to be measured there."""

    def __init__(self) -> None:
        self.balance: float | None = None  # seconds; None: nothing happened yet
        self.resting = False  # it was empty and has not grown enough
        self.owed = PLAIN_STEPS  # plain steps to measure first
        self.num_drafted = 0  # steps with drafts since the last plain one
        self.entries: deque[float] = deque(maxlen=ENTRIES)  # seconds that texts to be read first took

    @property
    def entry(self) -> float:
        return min(self.entries, default=0.0)

    def note(self, num: int, plain: float, saved: float, grown: float) -> None:
        """A step of `num` requests that saved so many seconds against `plain` ones, and the growth of its time."""
        # A step gains a random number of tokens, the more even the more requests it has.
        most = plain * (4 + 28 / num**0.5) + 2 * self.entry
        balance = most if self.balance is None else self.balance
        self.balance = max(-most, min(most, balance + saved + grown))
        self.resting = self.balance < (TRIAL * plain + self.entry if self.resting else 0.0)


class Goodput:
    def __init__(
        self, profile: Callable[[int], float], *, max_drafts: int = 8, explore: float = 0.007
    ) -> None:
        """`profile(rows)` measures the seconds of one target pass; it is called once per power of two."""
        profile = lru_cache(maxsize=None)(profile)
        # Apart: a step with drafts holds the drafter's time on the device, too, and other numbers of requests.
        self.plain, self.costs = StepCosts(profile), StepCosts(profile)
        self.max_drafts, self.explore = max_drafts, explore
        self.lengths = tuple(g for g in LENGTHS if g <= max_drafts)
        self.acceptance = [START_ACCEPTANCE] * max_drafts
        self.offered = [1.0] * max_drafts
        self._counts = [0] * max_drafts
        self._offer_counts = [0] * max_drafts
        self._draft_calls: dict[int, deque[float]] = {}  # batch (a power of two) -> seconds per position
        self.draft_costs: dict[int, float] = {}  # the same -> their lower quartile
        self.credit = 0.0
        self.accounts: dict[int, Account] = {}  # by requests (a power of two)
        self._usual = True  # no text was read before the drafts of the step in progress
        self._step = (0, 0)  # requests and drafts of the step in progress
        self.probing = False
        self._partial = False  # a probe of a few requests
        self._turn = 0  # whose turn it is in the next of those
        self._best_rate = self._expected_loss = 0.0
        self._dear = 0.0  # what the last probe lost
        # (requests and limit of the step that chose a pause, what a probe would have lost then), and how often used.
        self._paused: tuple[tuple[int, int], float] | None = None
        self._age = 0
        self.draft_seconds = 0.0  # of the step in progress

    # -- the decision ---------------------------------------------------------------------------------------
    def choose(
        self,
        num_requests: int,
        limit: int | None = None,
        left: float = math.inf,
        behind: Callable[[], bool] = no,
    ) -> int:
        """Drafts per request for a step of this many requests, one of the lengths that `limit` allows. `left`: tokens
        that a request may still gain; `behind`: whether the drafter has texts to read first."""
        limit = self._longest(limit)
        best, self._best_rate, loss = self._pick(num_requests, limit, left, behind)
        # What went well for long is no licence to lose for long.
        due = max(loss, self._dear)
        self.credit = min(self.credit, 2 * due) if best < limit else self.credit
        self.probing = best < limit and self.credit >= due and not self.account(num_requests).owed
        self._partial = self.probing and best == 0 and num_requests > PROBED
        self._expected_loss = loss
        self.draft_seconds = 0.0
        chosen = limit if self.probing else best
        self._step, self._usual = (num_requests, chosen), True
        return chosen

    def ask(self, requests: Sequence[T]) -> Sequence[T]:
        """Those of the step's requests that are to get drafts: all of them, or a few in turn."""
        if not self._partial:
            return requests
        first = self._turn % len(requests)
        self._turn += PROBED
        return (*requests[first:], *requests[:first])[:PROBED]

    def abstains(
        self,
        num_requests: int,
        limit: int | None = None,
        left: float = math.inf,
        behind: Callable[[], bool] = no,
    ) -> bool:
        """Whether `choose` would say 0 now; changes nothing. A pause is thought over anew every few steps only: little
        changes in it, and the host is busy."""
        limit = self._longest(limit)
        asked = num_requests, limit
        if self._paused is not None and self._paused[0] == asked and self._age < RECONSIDER:
            self._age += 1
            if self._waits(num_requests, limit, self._paused[1]):
                return True
        best, _, loss = self._pick(num_requests, limit, left, behind)
        self._paused, self._age = (None if best else (asked, loss)), 0
        return best == 0 and self._waits(num_requests, limit, loss)

    def _waits(self, num_requests: int, limit: int, loss: float) -> bool:
        """Whether a pause goes on without a probe."""
        return limit == 0 or self.account(num_requests).owed > 0 or self.credit < max(loss, self._dear)

    def account(self, num_requests: int) -> Account:
        return self.accounts.setdefault(_bracket(num_requests)[0], Account())

    def _entry(self, num_requests: int) -> float:
        """Seconds that texts to be read first take: as measured at this size, or by what the nearest one took."""
        known = {size: a.entry for size, a in self.accounts.items() if a.entries}
        size = _bracket(num_requests)[0]
        if not known or size in known:
            return known.get(size, 0.0)
        near = min(known, key=lambda other: max(other, size) / min(other, size))
        return known[near] * math.sqrt(size / near)  # more texts, in passes of more rows

    def _longest(self, limit: int | None) -> int:
        return max((g for g in self.lengths if limit is None or g <= limit), default=0)

    def _pick(
        self, num_requests: int, limit: int, left: float = math.inf, behind: Callable[[], bool] = no
    ) -> tuple[int, float, float]:
        """The best number of drafts, its rate, and what trying `limit` of them instead is expected to lose."""
        account = self.account(num_requests)
        late = limit > 0 and behind()
        entry = self._entry(num_requests) if late else 0.0
        rates = self.rates(num_requests, limit, entry / max(1.0, left))
        best = 0
        if not account.resting and not account.owed:
            best = max((g for g in (0, *self.lengths) if g <= limit), key=lambda g: (rates[g], -g))
            if rates[best] < (ENTER if late else MARGIN) * rates[0]:
                best = 0
        asked = min(num_requests, PROBED) if best == 0 else num_requests
        seconds = self.seconds(num_requests, limit, asked)
        won = seconds * self.rate(num_requests, limit, asked) / rates[best]
        return best, rates[best], max(0.0, seconds + entry * asked / num_requests - won)

    def rates(self, num_requests: int, limit: int, entry: float = 0.0) -> list[float]:
        """Expected tokens per second with 0 to `limit` drafts for each request, in one pass: a step waits for it.
        `entry`: seconds for every token that a request gains with drafts, before they begin."""
        gain, alive, num_offered, cost = 1.0, 1.0, 1.0, self._draft_cost(num_requests)
        found = [num_requests / self.plain(num_requests)]
        for j in range(limit):
            alive *= self.acceptance[j]
            gain += self.offered[j] * alive
            num_offered += self.offered[j]
            seconds = self.costs(num_requests * num_offered) + (j + 1) * cost + gain * entry
            found.append(num_requests * gain / seconds)
        return found

    def rate(self, num_requests: int, g: int, asked: int | None = None) -> float:
        """Expected tokens per second with g drafts for each of `asked` requests (default: all)."""
        gain, alive = 0.0, 1.0
        for accepted, offered in zip(self.acceptance[:g], self.offered[:g], strict=True):
            alive *= accepted
            gain += offered * alive
        num_new = num_requests + (num_requests if asked is None else asked) * gain
        return num_new / self.seconds(num_requests, g, asked)

    def seconds(self, num_requests: int, g: int, asked: int | None = None) -> float:
        """Expected seconds of a step with g drafts for each of `asked` requests."""
        asked = num_requests if asked is None else asked
        if g == 0:
            return self.plain(num_requests)
        rows = num_requests + asked * sum(self.offered[:g])
        return self.costs(rows) + g * self._draft_cost(asked)

    def _draft_cost(self, num_requests: int) -> float:
        known = self.draft_costs
        return known[min(known, key=lambda b: abs(b - num_requests))] if known else 0.0

    # -- what happened --------------------------------------------------------------------------------------
    def drafted(self, num_requests: int, g: int, seconds: float, usual: bool = True) -> None:
        """One call of the drafter, asked for g drafts for each request. Not `usual`: paid for, but no measure of others
        (it read a whole prompt, say)."""
        self.draft_seconds, self._usual = seconds, usual
        if not usual:
            return
        size = _bracket(num_requests)[0]
        calls = self._draft_calls.setdefault(size, deque(maxlen=DRAFT_CALLS))
        calls.append(seconds / g)
        if len(calls) >= MIN_DRAFT_CALLS:
            self.draft_costs[size] = sorted(calls)[len(calls) // 4]

    def offer(self, asked: int, num_offered: int) -> None:
        """A request got num_offered of the drafts that were asked for."""
        for j in range(min(asked, self.max_drafts)):
            _move(self.offered, self._offer_counts, j, float(j < num_offered))

    def accept(self, num_drafted: int, num_accepted: int) -> None:
        """How one request's drafts fared: those behind the first wrong one say nothing."""
        for j in range(min(num_drafted, num_accepted + 1, self.max_drafts)):
            _move(self.acceptance, self._counts, j, float(j < num_accepted))

    def spoiled(self) -> None:
        """The step in progress says nothing (more)."""
        self.probing = self._partial = False
        self._step, self._usual = (0, 0), True
        self.draft_seconds = 0.0

    def stepped(self, rows: int, seconds: float, num_new: int) -> None:
        """A step that computed `rows` rows in `seconds` (drafting apart) and gained num_new tokens."""
        # Rows so uneven take another path than the same number of drafted ones; a text read first is not their cost.
        num, drafts = self._step
        if not self._partial and self._usual:
            (self.costs if drafts else self.plain).observe(rows, seconds)
        spent = seconds + self.draft_seconds
        num = num or rows  # steps that run ahead have no drafts, and nobody was asked
        plain = self._account(num, drafts, spent, num_new)
        if self.probing and self._best_rate > 0:
            lost = min(spent - num_new / self._best_rate, DEAREST * (self._expected_loss + plain))
            self._dear = max(0.0, lost)
            self.credit -= lost
        else:
            self.credit += self.explore * spent
        self.spoiled()

    def _account(self, num: int, drafts: int, spent: float, num_new: int) -> float:
        """Note what the step won or lost against a plain one of its size; the seconds of such a one."""
        account, plain = self.account(num), self.plain(num)
        saved = max(num_new * plain / num - spent, -DEAREST * plain)
        if drafts and not self._usual:
            first, asked = not account.entries, min(num, PROBED) if self._partial else num
            read = (spent - self.seconds(num, drafts, asked)) * num / asked
            if (
                self._partial and not first
            ):  # few texts say little about many, but what was dear once may not be now
                read = min(read, FADE * self._entry(num))
            account.entries.append(min(max(0.0, read), DEAREST * plain))
            saved = max(0.0, saved) if first else saved  # nobody knew
        if drafts == 0:
            account.owed, account.num_drafted, saved = max(0, account.owed - 1), 0, 0.0
        elif self.probing:
            saved = max(0.0, saved)
        else:
            account.num_drafted += 1
            if account.num_drafted >= AGAIN and self._best_rate < CLOSE * num / plain:
                account.owed, account.num_drafted = PLAIN_STEPS, 0
        account.note(num, plain, saved, self.explore / 2 * spent)
        return plain


def _bracket(rows: float) -> tuple[int, float]:
    """The power of two at or below `rows`, and how far `rows` is on the way to the next."""
    low = 1 << (max(1, int(rows)).bit_length() - 1)
    return low, max(0.0, rows / low - 1)


def _move(averages: list[float], counts: list[int], j: int, seen: float) -> None:
    counts[j] += 1
    averages[j] += max(SMOOTHING, 1 / (counts[j] + 1)) * (seen - averages[j])
