"""What a step with drafts asks of the device: a copy each way for drafting, and one each way for verification, whatever
the number of requests. A copy from a Python list, or a number read in between, waits for all that was launched before;
on a GPU that several processes share each of them waits for a turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoestring.kernels.sampling import sample_tokens
from shoestring.serve import DraftModel, Engine, Request, Sampling
from shoestring.serve.engine import sampling as sampling_module
from shoestring.serve.speculative import verify as verify_module
from shoestring.serve.speculative.draft_model import decode_drafts
from shoestring.serve.speculative.verify import RULES, Check, RuleName, verify
from tiny import near_copy, tiny_decoder

VOCAB, NUM_DRAFTS = 40, 4
LOGITS_NV = torch.randn(48, VOCAB, generator=torch.Generator().manual_seed(0))
READS = "aten::_local_scalar_dense"  # item(), int(), bool() of a tensor


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Operations by name; `from lists`: tensors made of lists; `sent`, `read`: copies to and from the device."""
    found: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return function(*args, **kwargs)

        return call

    with patch.context() as patched, Operations() as operations:
        patched.setattr(torch, "tensor", counting("from lists", torch.tensor))
        patched.setattr(torch.Tensor, "tolist", counting("read", torch.Tensor.tolist))
        for module in (sampling_module, verify_module):
            patched.setattr(module, "to_device", counting("sent", module.to_device))
        yield found
    found.update(operations.count)


def requests_of(num: int, rule: RuleName) -> list[Request]:
    """At three temperatures, as acceptance is measured."""
    samplings = [Sampling(temperature=(0.0, 0.7, 1.0)[i % 3], seed=i) for i in range(num)]
    return [Request([1, 2, 3 + i], 3, s, i, rule=RULES[rule]) for i, s in enumerate(samplings)]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_drafting_and_verifying_are_a_copy_each_way(rule: RuleName, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tokens are chosen by kernels on a GPU; their stand-in here is not what is counted.
    monkeypatch.setattr(sampling_module, "sample_tokens_", lambda logits, *given, cuts: given[-1].fill_(7))
    totals: dict[str, set[int]] = {"drafting": set(), "verifying": set()}
    for num in (6, 48):
        requests, gen = requests_of(num, rule), torch.Generator().manual_seed(num)
        logits_NV = LOGITS_NV[:num]
        with counted(monkeypatch) as drafting:
            drafts = decode_drafts(requests, NUM_DRAFTS, logits_NV, lambda tokens_N, i: LOGITS_NV[: len(tokens_N)])
        pairs = zip(requests, drafts, strict=True)
        checks = [Check(tuple(d.tokens), 3, r.sampling, d.probs_GV, r.rule) for r, d in pairs]
        assert [check.probs_GV is None for check in checks] == [r.sampling.greedy for r in requests]
        logits_RV = torch.randn(num * (NUM_DRAFTS + 1), VOCAB, generator=gen)
        with counted(monkeypatch) as verifying:
            verify(logits_RV, checks)
        for name, found in (("drafting", drafting), ("verifying", verifying)):
            assert (found["from lists"], found[READS], found["sent"], found["read"]) == (0, 0, 1, 1), name
            totals[name].add(sum(found.values()))
    assert all(len(total) == 1 for total in totals.values()), "as many operations for 6 requests as for 48"
    assert max(totals["drafting"]) < 150 and max(totals["verifying"]) < 280, totals


def test_a_whole_step_makes_no_tensor_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the programs that a GPU captures, the passes of both models included."""
    target = tiny_decoder()
    engine = Engine(target, max_requests=12, max_context=64, graphs=True, prefix_cache=False, rule="token", eos_ids=())
    engine.use_drafter(DraftModel(near_copy(target, 0.1), graphs=True), NUM_DRAFTS)
    for i in range(12):
        temperature = (0.0, 0.7, 1.0)[i % 3]
        engine.add([1, 2, 3 + i], Sampling(temperature=temperature, seed=i, max_tokens=50, ignore_eos=True))
    for _ in range(3):
        engine.step()
    before = engine.stats.num_drafted
    monkeypatch.setattr(sample_tokens, "LEAST_VOCAB", 10**9)  # not the CPU's way, row by row
    with counted(monkeypatch) as found:
        engine.step()
    assert engine.stats.num_drafted == before + 12 * NUM_DRAFTS
    assert (found["from lists"], found["sent"]) == (0, 2)
