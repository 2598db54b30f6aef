"""How many tokens to draft in the next step: the number that gives the most tokens per second, 0 included.

For B requests that each get g drafts the model is

    rate(g) = B (1 + sum_{j<=g} c_j a_1 ... a_j) / (P(rows) + X(B, g)),     rows = B (1 + sum_{j<=g} c_j)

    a_j   chance that draft j is accepted once those before it were: a moving average per position
    c_j   chance that the drafter offers a j-th draft when asked for it (a lookup often has none)
    P     seconds of a target pass by rows: profiled at powers of two before the first request, interpolated between
    X     what a step with drafts takes beside it: the drafts, and the host, which such a step waits for

A plain step takes P times a factor of its size. Only plain steps that ran ahead of the host count for that (where any
do): the others, between requests that end, are slower, and drafting would look good beside them. X and the factors are
medians of the last real steps (`Seen`). Where none was seen X is that of the nearest size that was, times the root of
how many more drafts there are in all, which was about right wherever it was measured; before any was seen, what it
was on an H200. Acceptance alone would be a bad signal: whether a draft pays depends on what a step costs at this
number of requests, which is why costs are measured.

`choose` returns the best g of a few (LENGTHS): every length has programs of its own, which are made before the first
request (prepare.py). A drafter that was not asked for a while has texts to read first (`behind`): what that takes is
learned like X, and spread over the tokens that these requests may still gain; where drafts have won nothing yet they
begin with the texts only, when least is to be read. While prompts are read nothing is drafted: the time of such a step
says nothing, and those who are ready first are not all who will be there. A decision for no drafts holds for
RECONSIDER steps of the same requests (a pause), or until the purse has what the next try needs: nothing is asked about
them meanwhile, for the host is busy. Who joins ends it (`joined`), since texts that begin may be worth it; who leaves
changes their number, which does, too.

The model may be wrong, so nothing is done on credit. There is one `purse`: five plain steps at the start, and
`explore` (1%) of all time that passes, up to what the next try is expected to cost, and a tenth of what drafts win, up
to FULL plain steps: a load that changes is tried at once where drafts have won before. And every size keeps what drafts
won there: a step with drafts adds what it saved against a plain one, or takes what it lost from that and then from the
purse, in full, whatever the cause. Drafts are only made where the purse and half of what was won (the `balance`) could
pay for a step that gains nothing. So all losses together are at most

    five plain steps + 1% of the time + one step of each size and one probe (those that emptied what there was),

beyond what drafts won, however wrong the model is (tests/serve/test_goodput.py); plain steps must be known for that.

What is not tried is not learned: at g = 0 the averages would stand still for ever. So now and then the longest draft is
tried again (a probe), out of the purse: in a pause for few of the requests, in turn, since they have texts to be read,
and only where drafts would pay if all were right (a probe of few does not teach costs).
One that gains is followed by the next at once; after one that lost the purse is filled anew, and with every one in a
row more slowly.

Left out: classes of requests with different acceptance, lengths that differ between requests of one step, costs of
a size that change while it pauses (probes of a few requests do not show them), how long the texts to be read are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

LENGTHS = (1, 2, 4, 8)  # drafts to choose from, and none
START_ACCEPTANCE = 0.8  # hopeful, so that a new drafter is tried
SMOOTHING = 0.02  # weight of the newest observation, after the first few
STEPS = 9  # whose median counts
START = 5  # plain steps in the purse
SHARE = 0.5  # of what was won at a size, that may be risked there
MOST = 128  # plain steps that count as won
TITHE, FULL = 0.1, 32  # of what is won, for tries at other sizes, until the purse has so many plain steps
FIRST_EXTRA = 0.125  # X of one draft for one request, in plain steps, before any was seen
FIRST_READ = 0.5  # the same of one text that is read
LONGER = 2  # times as long as usual a text may be
LEAST = 0.25  # plain steps that any step with drafts may lose
FRESH, FORGET = 0.75, 0.998  # of the most tokens that requests had left, which is forgotten slowly
PROBED = 2  # requests that get drafts in a probe of a pause
ENOUGH = 16  # tokens that requests may still gain, for a probe of a pause
SLOWER = 3  # times in a row that the purse fills more slowly
OLD = 5  # observations that those before a pause count for
RECONSIDER = 8  # steps
MARGIN = 1.02  # times the rate without drafts, for drafts to be worth it
ENTER = 1.1  # the same where texts are to be read first
PLAIN_STEPS = 6  # measured at a size before anything is drafted there
CLOSE, AGAIN = 1.25, 250  # a win by less is looked at again after so many steps

T = TypeVar("T")
Key = tuple[int, ...]
# The most drafts that fit (None: any number), tokens that a request may still gain, and whether the drafter has texts
# to read first.
Prospects = tuple[int | None, float, Callable[[], bool]]


def no() -> bool:
    return False


def unbounded() -> Prospects:
    return None, math.inf, no


class StepCosts:
    """Seconds of a target pass by its number of rows, as profiled."""

    def __init__(self, profile: Callable[[int], float]) -> None:
        self._profile = profile
        self.known: dict[int, float] = {}  # rows (a power of two) -> seconds, of what was asked for so far

    def __call__(self, rows: float) -> float:
        low = _bracket(rows)
        share = max(0.0, rows / low - 1)
        return (1 - share) * self._at(low) + (share * self._at(2 * low) if share else 0.0)

    def _at(self, rows: int) -> float:
        if rows not in self.known:
            self.known[rows] = self._profile(rows)
        return self.known[rows]


class Seen:
    """Medians of what was seen last, by sizes (powers of two)."""

    def __init__(self) -> None:
        self._last: dict[Key, deque[float]] = {}
        self.known: dict[Key, float] = {}

    def get(self, key: Key, first: float) -> float:
        """Of this size, or of the nearest that is known, or `first`."""
        if key in self.known or not self.known:
            return self.known.get(key, first)
        near = min(self.known, key=lambda k: sum(abs(math.log2(a / b)) for a, b in zip(k, key, strict=True)))
        return max(0.0, self.known[near])

    def note(self, key: Key, value: float, first: float) -> None:
        """What was expected counts as one observation, so that a single one that is far off does not decide."""
        last = self._last.setdefault(key, deque([self.get(key, first)], maxlen=STEPS))
        last.append(value)
        self.known[key] = sorted(last)[(len(last) - 1) // 2]


class Account:
    """What drafts won at one size, and what is to be measured there."""

    def __init__(self) -> None:
        self.won = 0.0  # seconds that drafts saved and did not lose again
        self.owed = PLAIN_STEPS  # plain steps to measure first
        self.num_drafted = 0  # steps with drafts since the last plain one
        self.dear, self.failed = 0.0, 0  # what the last probe lost, and how many in a row did

    @property
    def balance(self) -> float:
        """Seconds that may be lost again."""
        return SHARE * self.won

    def book(self, saved: float, plain: float) -> float:
        """Seconds that a step with drafts saved; those of a loss that were not won before."""
        won = self.won + saved
        self.won = max(0.0, min(won, MOST * plain))
        return max(0.0, -won)


class Goodput:
    def __init__(
        self, profile: Callable[[int], float], *, max_drafts: int = 8, explore: float = 0.01
    ) -> None:
        """`profile(rows)` measures the seconds of one target pass; it is called once per power of two."""
        self.costs = StepCosts(profile)
        self.max_drafts, self.explore = max_drafts, explore
        self.lengths = tuple(g for g in LENGTHS if g <= max_drafts)
        self.acceptance, self._counts = [START_ACCEPTANCE] * max_drafts, [0] * max_drafts
        self.offered, self._offer_counts = [1.0] * max_drafts, [0] * max_drafts
        self.factors = Seen()  # of plain steps by requests
        self.extras = Seen()  # X by requests and drafts, over the root of both
        self.reads = Seen()  # seconds that texts to be read first take, by their number, over its root
        self.draft_costs: dict[int, float] = {}  # requests -> seconds a draft, the least seen; to look at
        self.accounts: dict[int, Account] = {}  # by requests (a power of two)
        self.purse: float | None = None  # seconds; None: no step yet
        self._due = 0.0  # what the next try needs
        self._ahead = False  # steps run ahead here
        self._step = 0, 0  # requests and drafts of the step in progress, where somebody was asked
        self._usual = True  # no text was read before its drafts
        self._most_left = self._best_rate = 0.0
        self.probing = self._partial = False  # it is a probe, of a few requests
        self._turn = 0  # whose turn it is in the next of those
        self._paused: tuple[int, float] | None = None  # requests of a pause, and the purse that ends it
        self._age = 0  # how often that was used
        self.draft_seconds = 0.0  # of the step in progress

    # -- the decision ---------------------------------------------------------------------------------------
    def choose(self, num_requests: int, prospects: Callable[[], Prospects] = unbounded) -> int:
        """Drafts per request for a step of this many requests, one of the lengths that their prospects allow; these
        are not asked for in a pause."""
        best, limit, rate, due = self._decide(num_requests, prospects)
        self.spoiled()
        self.probing, self._best_rate = best < limit and self._funds(num_requests) >= due, rate
        self._partial = self.probing and best == 0 and num_requests > PROBED
        self._step = num_requests, limit if self.probing else best
        return self._step[1]

    def ask(self, requests: Sequence[T]) -> Sequence[T]:
        """Those of the step's requests that are to get drafts: all of them, or a few in turn."""
        if not self._partial:
            return requests
        first = self._turn % len(requests)
        self._turn += PROBED
        return (*requests[first:], *requests[:first])[:PROBED]

    def abstains(self, num_requests: int, prospects: Callable[[], Prospects] = unbounded) -> bool:
        """Whether `choose` would say 0 now; begins no step."""
        best, _, _, due = self._decide(num_requests, prospects)
        return best == 0 and self._funds(num_requests) < due

    def joined(self) -> None:
        """Others are among the requests."""
        self._paused = None

    def _decide(self, num: int, prospects: Callable[[], Prospects]) -> tuple[int, int, float, float]:
        """The best number of drafts, the most, and what else `_pick` says; in a pause that none are best."""
        if self._paused is not None and self._age < RECONSIDER:
            paused, need = self._paused
            self._age += 1
            if paused == num and self._funds(num) < need:
                return 0, 0, 0.0, math.inf
        most, left, behind = prospects()
        limit = self._longest(most)
        best, rate, due = self._pick(num, limit, left, behind)
        pause = best == 0 and self._funds(num) < due and not self.account(num).owed
        self._paused, self._age = ((num, due) if pause else None), 0
        return best, limit, rate, due

    def account(self, num_requests: int) -> Account:
        return self.accounts.setdefault(_bracket(num_requests), Account())

    def _longest(self, limit: int | None) -> int:
        return max((g for g in self.lengths if limit is None or g <= limit), default=0)

    def _funds(self, num: int) -> float:
        """Seconds in the purse."""
        return START * self.plain(num) if self.purse is None else self.purse

    def _pick(
        self, num: int, limit: int, left: float = math.inf, behind: Callable[[], bool] = no
    ) -> tuple[int, float, float]:
        """The best number of drafts, its rate, and what the purse must hold for another choice."""
        account, plain, purse = self.account(num), self.plain(num), self._funds(num)
        if account.owed or limit == 0:
            return 0, num / plain, math.inf
        late = behind()
        entry = self.read_seconds(num) if late else 0.0
        rates = self.rates(num, limit, entry / max(1.0, left))
        worth = (ENTER if late else MARGIN) * rates[0]
        # Drafts that are worth it, and what they lose where none of them is right.
        risks = {
            g: max(self.seconds(num, g) + LONGER * entry - plain, LEAST * plain)
            for g in rates
            if g and rates[g] >= worth
        }
        begins = not late or account.won > 0 or self._fresh(left)
        best = max(
            (g for g, risk in risks.items() if begins and risk <= max(0.0, purse) + account.balance),
            key=lambda g: (rates[g], -g),
            default=0,
        )
        if best == 0 and risks:  # to be saved for
            self._due = max(0.0, min(risks.values()) - account.balance)
            return 0, rates[0], self._due if begins else math.inf
        if best == limit or not self.explore or (late if best else left < ENOUGH):
            return best, rates[best], math.inf
        asked = min(num, PROBED) if best == 0 else num
        if asked < num and self._certain(num, limit) < worth:
            return best, rates[best], math.inf
        seconds = self.seconds(num, limit, asked)
        won = self.rate(num, limit, asked) * seconds / rates[best]
        reads = self.read_seconds(asked) if late else 0.0
        self._due = max(0.0, seconds + reads - won, account.dear)
        return best, rates[best], self._due

    def _certain(self, num: int, limit: int) -> float:
        """The rate where all drafts are offered and right. A probe of a few requests says nothing of costs, so where
        even this is not worth it there is nothing to learn."""
        lengths = [g for g in self.lengths if g <= limit]
        return max(num * (1 + g) / self.seconds(num, g, sure=True) for g in lengths)

    def _fresh(self, left: float) -> bool:
        """Whether texts have just begun, so that little is to be read."""
        if math.isfinite(left):
            self._most_left = max(left, FORGET * self._most_left)
        return left >= FRESH * self._most_left

    # -- the model ------------------------------------------------------------------------------------------
    def plain(self, num: int) -> float:
        """Seconds of a step without drafts."""
        return self.costs(num) * self.factors.get((_bracket(num),), 1.0)

    def seconds(self, num: int, g: int, asked: int | None = None, *, sure: bool = False) -> float:
        """Expected seconds of a step with g drafts for each of `asked` requests (default: all), a plain one's at least:
        where a profile was too slow X is below zero, and fewer drafts may be offered than when it was measured."""
        plain = self.plain(num)
        if g == 0:
            return plain
        rows = num + (num if asked is None else asked) * (g if sure else sum(self.offered[:g]))
        key = _bracket(num), g
        return max(plain, self.costs(rows) + self.extras.get(key, FIRST_EXTRA * plain) * _root(key))

    def read_seconds(self, num: int) -> float:
        """Expected seconds that a drafter takes to read so many texts."""
        key = (_bracket(num),)
        return self.reads.get(key, FIRST_READ * self.plain(num)) * _root(key)

    def gain(self, g: int) -> float:
        """Tokens that g drafts are expected to give a request, beside the one of every step."""
        gain, alive = 0.0, 1.0
        for accepted, offered in zip(self.acceptance[:g], self.offered[:g], strict=True):
            alive *= accepted
            gain += offered * alive
        return gain

    def rate(self, num: int, g: int, asked: int | None = None, entry: float = 0.0) -> float:
        """Expected tokens per second; `entry`: seconds for every token that a request gains with drafts."""
        gain = self.gain(g)
        new = num + (num if asked is None else asked) * gain
        return new / (self.seconds(num, g, asked) + (entry * (1 + gain) if g else 0.0))

    def rates(self, num: int, limit: int, entry: float = 0.0) -> dict[int, float]:
        """The same by length, 0 included."""
        return {g: self.rate(num, g, None, entry) for g in (0, *self.lengths) if g <= limit}

    # -- what happened --------------------------------------------------------------------------------------
    def drafted(self, num_requests: int, g: int, seconds: float, usual: bool = True) -> None:
        """One call of the drafter, asked for g drafts for each request. Not `usual`: it read texts first."""
        self.draft_seconds, self._usual = seconds, usual
        if usual:
            size = _bracket(num_requests)
            self.draft_costs[size] = min(self.draft_costs.get(size, math.inf), seconds / g)

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

    def stepped(self, rows: int, seconds: float, num_new: int, *, ahead: bool = False) -> None:
        """A step that computed `rows` rows in `seconds` (drafting apart) and gained num_new tokens. `ahead`: it was
        launched before those of the one before it were known."""
        asked, drafts = self._step
        num, spent = asked or rows, seconds + self.draft_seconds
        account, plain = self.account(num), self.plain(num)
        purse = self._funds(num)
        if drafts == 0:
            self._see_plain(num, seconds, ahead)
            account.owed, account.num_drafted = max(0, account.owed - 1), 0
        else:
            saved = num_new * plain / num - spent  # against a plain step
            paid = self._book(account, num, plain, spent, num_new, saved)
            if paid and self.probing and self._best_rate <= num / plain:
                purse = min(purse, self._due)  # the next one in a pause is saved for anew
            purse -= paid
            if saved > 0:
                purse = max(purse, min(purse + TITHE * saved, FULL * plain))
            if not self._partial:
                self._see_drafted(num, drafts, rows, spent)
        if purse < self._due:
            purse = min(self._due, purse + self.explore / (1 + account.failed) * spent)
        self.purse = purse
        self.spoiled()

    def _see_plain(self, num: int, seconds: float, ahead: bool) -> None:
        if ahead and not self._ahead:
            self._ahead, self.factors = True, Seen()  # those before did not
        if ahead or not self._ahead:
            self.factors.note((_bracket(num),), seconds / self.costs(num), 1.0)

    def _see_drafted(self, num: int, drafts: int, rows: int, spent: float) -> None:
        plain, key = self.plain(num), (_bracket(num), drafts)
        if self._usual:
            self.extras.note(key, (spent - self.costs(rows)) / _root(key), FIRST_EXTRA * plain)
        else:
            read = max(0.0, spent - self.seconds(num, drafts))
            self.reads.note(key[:1], read / _root(key[:1]), FIRST_READ * plain)

    def _book(
        self, account: Account, num: int, plain: float, spent: float, num_new: int, saved: float
    ) -> float:
        """Note what a step with drafts won; what the purse is to pay."""
        lost = spent - num_new / self._best_rate
        if self.probing:
            if self._best_rate <= num / plain:  # in a pause: what was seen before it is old
                self._counts = [min(c, OLD) for c in self._counts]
            account.dear = max(0.0, lost)
            account.failed = min(SLOWER, account.failed + 1) if lost > 0 else 0
            if lost > 0:
                return lost
        account.num_drafted += 1
        if account.num_drafted >= AGAIN and self._best_rate < CLOSE * num / plain:
            account.owed, account.num_drafted = PLAIN_STEPS, 0
        return account.book(saved, plain)


def _bracket(rows: float) -> int:
    """The power of two at or below `rows`."""
    return 1 << (max(1, int(rows)).bit_length() - 1)


def _root(key: Key) -> float:
    return math.prod(key) ** 0.5


def _move(averages: list[float], counts: list[int], j: int, seen: float) -> None:
    counts[j] += 1
    averages[j] += max(SMOOTHING, 1 / (counts[j] + 1)) * (seen - averages[j])
