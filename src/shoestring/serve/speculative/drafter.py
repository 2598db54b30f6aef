"""The protocol of a drafter: an object that guesses the tokens that follow a text.

A wrong guess costs time, never correctness: the target verifies every guess (verify.py). The smallest drafter is one
class with `propose`; every other member has a default. A drafter must not look at noise or tokens that were drawn in
the step in progress: whether and what it proposes may depend on committed text only, otherwise the `token` and `block`
rules no longer keep the distribution (docs/methods/speculation.md has an example).

    ngram_drafter.py        lookup in the text itself, no weights
    draft_model.py          a smaller decoder with a KV cache of its own
    layer_skip_drafter.py   the target without some of its sublayers
    drafter_stack.py        several drafters as one, and drafters by name

Left out: trees of drafts, drafters with another tokenizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shoestring.model.transformer import Decoder
from shoestring.serve.engine.graphs import SamplingKind
from shoestring.serve.engine.request import Draft, Request
from shoestring.serve.engine.runner import Runner


class Drafter(ABC):
    """All members that the engine uses. Calls come from the thread that steps the engine."""

    # Whether the last `propose` had to read a long text first, so that its time says nothing about the next one.
    caught_up: bool = False
    # The chance that the first, second, ... draft is accepted after those before it, as it was measured beforehand.
    # Empty: unknown.
    known_acceptance: tuple[float, ...] = ()

    @abstractmethod
    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        """At most n draft tokens for each request, which follow its `tokens`. NO_DRAFT is allowed."""

    def check(self, target: Decoder) -> None:  # noqa: B027
        """UserError where it cannot write drafts for this model."""

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:  # noqa: B027
        """How many drafts of the last step were accepted. Called only for a request that had drafts."""

    def release(self, request: Request) -> None:  # noqa: B027
        """The request ended, or was preempted and may come back. Drop all state that was kept for it."""

    def warm_up(  # noqa: B027
        self,
        max_requests: int,
        kinds: Sequence[SamplingKind],
        lengths: Sequence[int],
        max_context: int,
        *,
        prefills: bool = True,
    ) -> None:
        """Capture and compile everything that proposals of these lengths need, before the first request. `prefills`:
        also for reading many prompts."""

    def is_behind(self, requests: Sequence[Request]) -> bool:
        """Whether `propose` would have to read long texts of these requests first."""
        return False

    def runners(self) -> list[Runner]:
        """Of models that have weights of their own."""
        return []

    @property
    def num_graphs(self) -> int:
        """CUDA graphs captured so far. A step in which this number changes is not used as a time measurement."""
        return 0
