"""Losses and objectives for drafters against their formulas, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from refusals import refused
from shoestring.methods.drafter.objectives import (
    LOSSES,
    DraftDistill,
    LiveScores,
    OnPolicy,
    Selection,
    cells,
    kl,
    lk_hybrid,
    pick_loss,
    select_tokens,
)
from shoestring.model import Decoder, ModelSpec
from shoestring.train.step import IGNORED, Micro
from shoestring.train.teacher_cache import TopK

V = 23


def distributions(num: int = 40, sharp: float = 2.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    p = (sharp * torch.randn(num, V, generator=g, dtype=torch.float64)).softmax(-1)
    return p, sharp * torch.randn(num, V, generator=g, dtype=torch.float64)


def top(p: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    best = p.topk(k, dim=-1)
    tail = (1 - best.values.sum(-1)).clamp(min=0)
    return best.indices, best.values.log(), tail.log().clamp(min=-65504.0)


def by_definition(name: str, p: Tensor, q: Tensor) -> Tensor:
    a = torch.minimum(p, q).sum(-1)
    forward = (p * (p / q).log()).sum(-1)
    if name == "kl":
        return forward
    if name == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    if name == "jsd":
        m = (p + q) / 2
        return ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2
    if name == "tvd":
        return (p - q).abs().sum(-1) / 2
    if name == "lk":
        return -a.log()
    w = torch.exp(-3 * a.detach())
    return w * forward + (1 - w) * (1 - a)


@pytest.mark.parametrize("name", LOSSES)
def test_over_the_whole_vocabulary_a_loss_is_its_formula(name: str) -> None:
    p, logits = distributions()
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = pick_loss(name)(cells(ours, *top(p, V)))
    want = by_definition(name, p, plain.softmax(-1))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_over_few_tokens_it_is_the_formula_over_cells(name: str) -> None:
    """Top-k and one cell for the rest; the rest is never accepted."""
    p, logits = distributions()
    ids, logp, tail = top(p, 5)
    got = pick_loss(name)(cells(logits, ids, logp, tail))
    q = logits.softmax(-1)
    coarse = [torch.cat([d.gather(1, ids), 1 - d.gather(1, ids).sum(-1, keepdim=True)], 1) for d in (p, q)]
    want = by_definition(name, *coarse)
    if name in ("tvd", "lk", "lk_hybrid"):
        a = torch.minimum(coarse[0], coarse[1])[:, :-1].sum(-1)
        assert (a <= torch.minimum(p, q).sum(-1) + 1e-12).all()
        w = torch.exp(-3 * a)
        kl_N = by_definition("kl", *coarse)
        want = {"tvd": 1 - a, "lk": -a.log(), "lk_hybrid": w * kl_N + (1 - w) * (1 - a)}[name]
    else:
        assert (got <= by_definition(name, p, q) + 1e-9).all()
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_the_weight_of_the_hybrid_has_no_gradient() -> None:
    p, logits = distributions()
    x = logits.clone().requires_grad_()
    c = cells(x, *top(p, V))
    (got,) = torch.autograd.grad(lk_hybrid(c).sum(), x)
    y = logits.clone().requires_grad_()
    c = cells(y, *top(p, V))
    w = torch.exp(-3 * c.acceptance_N).detach()
    (of_kl,) = torch.autograd.grad((w * kl(c)).sum(), y, retain_graph=True)
    (of_tv,) = torch.autograd.grad(((1 - w) * (1 - c.acceptance_N)).sum(), y)
    torch.testing.assert_close(got, of_kl + of_tv, rtol=1e-9, atol=1e-12)


def test_tokens_the_drafter_cannot_say_belong_to_the_rest() -> None:
    p, logits = distributions()
    said = list(range(0, V, 2))
    place = torch.full((V,), -1)
    place[said] = torch.arange(len(said))
    small = logits[:, : len(said)]
    got = cells(small, *top(p, V), place)
    q = torch.zeros_like(p)
    q[:, said] = small.softmax(-1)
    torch.testing.assert_close(got.acceptance_N, torch.minimum(p, q).sum(-1))
    odd = 1 - p[:, said].sum(-1)
    torch.testing.assert_close(got.p_NC[:, -1], odd)
    assert kl(got).isfinite().all()


def test_unknown_loss() -> None:
    refused("lk_hybrid", pick_loss, "lk-hybrid")


# -- AdaSPEC's selection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 5, 6, 11, 100, 1001])
@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.4, 0.5, 0.6, 1.0])
def test_selection_is_the_published_quantile(num: int, fraction: float) -> None:
    gap = torch.randn(num, generator=torch.Generator().manual_seed(num), dtype=torch.float64)
    want = gap >= gap.quantile(1 - fraction)
    assert select_tokens(gap, fraction).equal(want)
    assert select_tokens(gap, fraction).any()


def test_selection_keeps_ties_and_takes_the_upper_end() -> None:
    gap = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    assert select_tokens(gap, 0.4).tolist() == [True, False, True, True, True, False]
    assert select_tokens(torch.arange(10.0), 0.4).tolist() == [False] * 6 + [True] * 4
    assert select_tokens(torch.zeros(0), 0.4).tolist() == []
    refused("fraction", select_tokens, gap, 0.0)


# -- objectives ---------------------------------------------------------------------------------------------


def tiny(seed: int, *, tied: bool = True) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(ModelSpec(V, 16, 1, 2, 2, 8, 24, 64, tied=tied))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.5)
    return model


def micro(rows: int = 3, context: int = 12) -> Micro:
    g = torch.Generator().manual_seed(5)
    text = torch.randint(0, V, (rows, context + 1), generator=g)
    targets = text[:, 1:].clone()
    targets[0, :5] = IGNORED
    targets[-1, 8:] = IGNORED
    return Micro(text[:, :-1].contiguous(), targets, torch.arange(rows * context).view(rows, context) + 1)


def exact_losses(model: Decoder, target: Decoder, m: Micro) -> Tensor:
    """[counted] KL(p || q) of the definition, with gradients."""
    counted = m.targets_BT != IGNORED
    with torch.no_grad():
        p = target(m.tokens_BT)[counted].softmax(-1)
    logq = model(m.tokens_BT)[counted].log_softmax(-1)
    return (p * (p.log() - logq)).sum(-1)


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk", [0, 4])
def test_distillation_over_the_targets_scores(chunk: int) -> None:
    target, m = tiny(0), micro()
    ours, plain = tiny(1), tiny(1)
    objective = DraftDistill(LiveScores(target, k=V), "kl", chunk=chunk)
    assert objective.count(m) == m.num_counted == 7 + 12 + 8
    got, want = objective(ours, m), exact_losses(plain, target, m).sum()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got.backward()
    want.backward()
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(ours)[name], grad, rtol=1e-4, atol=1e-5, msg=name)
    assert not any(p.grad is not None for p in target.parameters())
    losses_BT = objective.losses(plain, m)
    torch.testing.assert_close(losses_BT[m.targets_BT != IGNORED], exact_losses(plain, target, m).detach())
    assert not losses_BT[m.targets_BT == IGNORED].any()


def test_adaspec_sums_the_losses_of_the_chosen_tokens_only() -> None:
    target, m = tiny(0), micro()
    reference = tiny(2)
    plain, ours = tiny(1), tiny(1)
    scores = LiveScores(target, k=V)
    held = DraftDistill(scores).losses(reference, m)
    objective = DraftDistill(scores, selection=Selection(lambda _: held, 0.4), chunk=5)
    losses = exact_losses(plain, target, m)
    gap = losses.detach() - exact_losses(reference, target, m).detach()
    chosen = gap >= gap.quantile(0.6)
    assert 10 <= chosen.sum() <= 12
    got, want = objective(ours, m), losses[chosen].sum()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got.backward()
    want.backward()
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(ours)[name], grad, rtol=1e-4, atol=1e-5, msg=name)
    assert objective.count(m) == m.num_counted  # the published normaliser: all of them


def test_a_trimmed_vocabulary_trains_its_own_rows() -> None:
    target, m = tiny(0, tied=False), micro()
    drafter = tiny(1, tied=False)
    said = [0, 3, 4, 9, 17]
    DraftDistill(LiveScores(target, k=V), "lk", vocab_ids=said)(drafter, m).backward()
    assert drafter.head is not None and drafter.head.weight.grad is not None
    touched = drafter.head.weight.grad.abs().sum(-1) > 0
    assert touched.nonzero()[:, 0].tolist() == said
    assert (drafter.embed.weight.grad.abs().sum(-1) > 0).sum() > len(said)  # type: ignore[union-attr]


def test_nothing_counted_moves_nothing() -> None:
    m = micro()
    m = Micro(m.tokens_BT, torch.full_like(m.targets_BT, IGNORED), m.index_BT)
    drafter = tiny(1)
    loss = DraftDistill(LiveScores(tiny(0)))(drafter, m)
    loss.backward()
    assert loss.item() == 0 and not any(g.any() for g in grads(drafter).values())


def test_on_policy_scores_what_the_drafter_wrote() -> None:
    target, m = tiny(0), micro(rows=2, context=12)
    asked: list[tuple[tuple[int, ...], int, int]] = []

    def generate(model: nn.Module, prompt_BP: Tensor, num_new: int, seed: int) -> Tensor:
        asked.append((tuple(prompt_BP.shape), num_new, seed))
        return torch.cat([prompt_BP, torch.full((2, num_new), 7)], 1)

    live = LiveScores(target, k=V)
    objective = OnPolicy(generate, DraftDistill(live), DraftDistill(live), share=1.0, num_new=4)
    ours, plain = tiny(1), tiny(1)
    assert objective.count(m) == 8
    got = objective(ours, m)
    text = torch.cat([m.tokens_BT[:, :8], torch.full((2, 4), 7)], 1)
    with torch.no_grad():
        p = target(text[:, :-1])[:, 7:].softmax(-1)
    want = (p * (p.log() - plain(text[:, :-1])[:, 7:].log_softmax(-1))).sum()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got.backward()
    want.backward()
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(ours)[name], grad, rtol=1e-4, atol=1e-5, msg=name)
    objective(ours, m)
    assert asked == [((2, 8), 4, asked[0][2])] * 2  # the same rows, the same seed


def test_on_policy_takes_its_share_of_the_rows_and_leaves_the_others() -> None:
    def never(model: nn.Module, prompt_BP: Tensor, num_new: int, seed: int) -> Tensor:
        raise AssertionError

    live = LiveScores(tiny(0), k=V)
    objective = OnPolicy(never, DraftDistill(live), DraftDistill(live), share=0.3, num_new=4, seed=1)
    m = micro()
    several = [Micro(m.tokens_BT, m.targets_BT, m.index_BT + 36 * i) for i in range(400)]
    own = [objective.written(s) > 0 for s in several]
    assert 80 < sum(own) < 160
    assert own == [objective.count(s) == 12 for s in several]
    kept = several[own.index(False)]
    torch.testing.assert_close(objective(tiny(1), kept), DraftDistill(live)(tiny(1), kept))
    refused("share", OnPolicy, never, DraftDistill(live), DraftDistill(live), share=0.0)


def test_on_policy_reads_the_place_of_a_micro_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read waits for the device; a step asks for its count, whether it writes, and a seed."""
    m, reads, read = micro(), [], Tensor.tolist
    other = Micro(m.tokens_BT, m.targets_BT, m.index_BT + 36)

    def counting(tensor: Tensor) -> object:
        reads.append(tuple(tensor.shape))
        return read(tensor)

    def write(model: nn.Module, prompt_BP: Tensor, num_new: int, seed: int) -> Tensor:
        return torch.cat([prompt_BP, torch.full((len(prompt_BP), num_new), 7)], 1)

    live = LiveScores(tiny(0), k=V)
    objective = OnPolicy(write, DraftDistill(live), DraftDistill(live), share=1.0, num_new=4)
    monkeypatch.setattr(Tensor, "tolist", counting)
    monkeypatch.setattr(Tensor, "__int__", lambda tensor: pytest.fail("one number at a time"))
    objective.count(m)
    objective(tiny(1), m)
    assert reads == [(2,)]
    assert objective._key(other) != objective._key(m) and len(reads) == 2


def test_scores_of_a_target_are_its_likeliest_tokens() -> None:
    target, m = tiny(0), micro()
    got = LiveScores(target, k=4)(m)
    assert isinstance(got, TopK) and got.ids_BTk.shape == (3, 12, 4)
    with torch.no_grad():
        p = target(m.tokens_BT).softmax(-1)
    torch.testing.assert_close(got.logp_BTk.exp(), p.topk(4, -1).values)
    torch.testing.assert_close(got.tail_logp_BT.exp(), 1 - p.topk(4, -1).values.sum(-1), rtol=1e-3, atol=1e-6)
