"""One-shot pruning: the methods against their equations, whole models, resume, branches, bad input."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refusals import refused
from shoestring.errors import UserError
from shoestring.formats import FormatLinear, formats_of, pack, parse_format, unpack
from shoestring.methods.sparse24.kernels.masks import is_24, mask24
from shoestring.methods.sparse24.prune import PRUNERS, SparseGpt, Wanda, fit_branch, plan_pruning, prune, sparsegpt
from shoestring.model import Decoder, ModelSpec, load_model, save_model
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.calibrate import Calibration, Statistics, walk
from shoestring.shrink.quantize import QuantizeReport
from tiny import GPT2, QWEN2, correlated, loud_model, output_error, random_weight, tokens

every_method = pytest.mark.parametrize("name", list(PRUNERS))


def statistics(x: Tensor) -> Statistics:
    return Statistics(x.T @ x / len(x), x.abs().mean(0), x[:0], len(x))


def pruned(name: str, label: str = "sparse24", spec: ModelSpec = QWEN2) -> tuple[Decoder, QuantizeReport]:
    model = loud_model(spec)
    return model, prune(model, [("*", parse_format(label))], walk(model, tokens()), PRUNERS[name])


# -- one layer -----------------------------------------------------------------------------------------------
def test_wanda_keeps_the_best_two_products_of_weight_and_input() -> None:
    w = torch.tensor([[4.0, -3.0, 2.0, -0.0, 1.0, 1.0, 1.0, 1.0]])
    x = torch.tensor([[1.0, 2.0, 4.0, 100.0, 2.0, 2.0, 2.0, 2.0], [-1.0, 0.0, 4.0, 100.0, 2.0, -2.0, 2.0, 2.0]])
    # |x| = sqrt(mean square): 1, sqrt 2, 4, 100: scores 4, 4.24, 8, 0; then a tie, which keeps the lower indices.
    got = PRUNERS["wanda"].choose(w, statistics(x))
    assert got.tolist() == [[0.0, -3.0, 2.0, 0.0, 1.0, 1.0, 0.0, 0.0]]
    assert not torch.signbit(got[:, 3]).any()
    assert PRUNERS["magnitude"].choose(w, None).tolist() == [[4.0, -3.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]]


def surgeon(w: Tensor, hessian: Tensor, damping: float) -> Tensor:
    """SparseGPT with the inverse of what is left computed anew for every column, in fp64."""
    w, h = w.double().clone(), hessian.double()
    h = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    inverses = [torch.linalg.inv(h[j:, j:]) for j in range(len(h))]
    for row in w:
        for group in range(0, len(h), 4):
            score = torch.stack([row[j].abs() / inverses[j][0, 0].sqrt() for j in range(group, group + 4)])
            dropped = score.argsort(stable=True)[:2] + group
            for j in range(group, group + 4):
                if j in dropped:
                    row[j:] -= row[j] / inverses[j][0, 0] * inverses[j][0]
                    row[j] = 0.0
    return w


def test_sparsegpt_is_its_equation() -> None:
    x, w = correlated(160, 512), random_weight(6, 160)  # two blocks of columns
    h = x.T @ x / len(x)
    got, want = sparsegpt(w, h, 0.01), surgeon(w, h, 0.01)
    assert is_24(got) and torch.equal(got != 0, want != 0)
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-5)


def test_methods_differ_as_published_on_correlated_inputs() -> None:
    x, w = correlated(), random_weight()
    seen = statistics(x)
    error = {n: output_error(w, m.choose(w, seen), seen.hessian) for n, m in PRUNERS.items()}
    assert error["sparsegpt"] < 0.7 * error["wanda"] < 0.7 * error["magnitude"], error


def test_dead_inputs_go_first_and_stay_finite() -> None:
    x, w = correlated(32, 256), random_weight(8, 32)
    x[:, 0::4] = 0
    x[:, 8:12] = 0  # a whole group
    h = x.T @ x / len(x)
    got = sparsegpt(w, h)
    assert got.isfinite().all() and is_24(got)
    alive = [g for g in range(0, 32, 4) if g != 8]
    assert all((got[:, g] == 0).all() for g in alive)
    assert torch.equal(got[:, 8:12], w[:, 8:12] * mask24(w[:, 8:12]))  # nothing is known: the larger stay
    nothing = sparsegpt(w, torch.zeros(32, 32))
    assert torch.equal(nothing, w * mask24(w))
    few = correlated(32, 256)[:3]  # fewer tokens than inputs: singular without damping
    assert sparsegpt(w, few.T @ few).isfinite().all()


def test_the_branch_is_the_least_squares_fit_of_the_outputs() -> None:
    x, lost = correlated(64, 512).double(), random_weight(8, 64).double()
    sums = x.unflatten(1, (4, 16)).sum(-1)
    want = torch.linalg.lstsq(sums, x @ lost.T).solution.T
    got = fit_branch(lost, x.T @ x / len(x), 16, damping=1e-12)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert torch.equal(fit_branch(lost, None, 16), lost.float().unflatten(1, (4, 16)).mean(-1))


# -- whole models --------------------------------------------------------------------------------------------
@every_method
@pytest.mark.parametrize("spec", [QWEN2, GPT2], ids=["llama", "gpt2"])
def test_every_layer_is_24_and_packs_to_the_same_bits(name: str, spec: ModelSpec, tmp_path: Path) -> None:
    model, report = pruned(name, spec=spec)
    layers = [m for m in model.blocks.modules() if isinstance(m, FormatLinear)]
    assert len(report.layers) == len(layers) and all(is_24(m.weight) for m in layers)
    assert report.converted.bits_per_weight == 9.0
    assert {c.before for c in report.converted.changed} == {"dense"}
    with torch.no_grad():
        before = model(tokens())
        pack(model)
        assert torch.equal(model(tokens()), before)
        save_model(tmp_path / "packed", model)
        assert torch.equal(load_model(tmp_path / "packed").model(tokens()), before)
    assert name == "sparsegpt" or all(e.weight_error < 0.5 for e in report.layers)


def test_output_errors_are_ordered_and_a_branch_makes_them_smaller() -> None:
    first: dict[str, float] = {}
    for name in PRUNERS:
        for label in ("sparse24", "sparse24:held+slorb16"):
            model, report = pruned(name, label)
            # The first block sees the same inputs whatever the method.
            first[f"{name} {label}"] = sum(e.output_error or 0 for e in report.layers[:7])
            assert all(is_24(m.weight) for m in model.blocks.modules() if isinstance(m, FormatLinear))
    plain = [first[f"{n} sparse24"] for n in ("sparsegpt", "wanda", "magnitude")]
    assert plain == sorted(plain), first
    for name in PRUNERS:
        assert first[f"{name} sparse24:held+slorb16"] < first[f"{name} sparse24"]
    with torch.no_grad():
        before = model(tokens())
        pack(model)
        assert torch.equal(model(tokens()), before)
        unpack(model)
        assert torch.equal(model(tokens()), before)
    assert not is_24(model.blocks[0].mlp.up.weight)  # type: ignore[union-attr]


def test_magnitude_needs_no_text_and_the_others_do() -> None:
    model = loud_model()
    rules = [("*.mlp.*", parse_format("sparse24+int4:g32"))]
    report = prune(model, rules, method=PRUNERS["magnitude"])
    assert len(report.layers) == 9 and all(e.output_error is None for e in report.layers)
    assert {f.label for f in formats_of(model).values()} == {"sparse24+int4:g32"}
    refused("needs the statistics", prune, loud_model(), rules, method=PRUNERS["wanda"])


def test_stopped_and_resumed_it_is_the_same_model(tmp_path: Path) -> None:
    label = "sparse24:held+slorb16"
    whole, _ = pruned("sparsegpt", label)
    files = BlockFiles(tmp_path)
    part = loud_model()
    steps = walk(part, tokens())

    def two() -> object:
        for step in steps:
            if step.index == 2:
                raise KeyboardInterrupt
            yield step

    rules = [("*", parse_format(label))]
    with pytest.raises(KeyboardInterrupt):
        prune(part, rules, two(), SparseGpt(), files=files)  # type: ignore[arg-type]
    assert files.count() == 2
    again = loud_model()
    calibration = Calibration(memory_gb=0.0, folder=str(tmp_path))  # activations in a file
    prune(again, rules, walk(again, tokens(), calibration, start=2), SparseGpt(), files=files)
    state = again.state_dict()
    assert all(torch.equal(state[n], t) for n, t in whole.state_dict().items())


@every_method
@pytest.mark.parametrize("label", ["sparse24", "sparse24:held+slorb16"])
@pytest.mark.parametrize(
    ("stored", "compute"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=["up", "down"]
)
@pytest.mark.few(6)
def test_an_offloaded_model_is_pruned_alike(name: str, label: str, stored: torch.dtype, compute: torch.dtype) -> None:
    """Blocks are on a device one at a time; on a CPU they are there while they have the compute dtype."""
    results = []
    for held, onload_device in ((compute, None), (stored, torch.device("cpu"))):
        model = loud_model(replace(QWEN2, model_type="llama", qkv_bias=False, tied=False)).bfloat16().to(held)
        model.compute_dtype = compute
        on_it: list[int] = []
        for block in model.blocks:
            block.register_forward_hook(
                lambda *_, model=model, on_it=on_it: on_it.append(
                    sum(b.attn.q.weight.dtype == compute and b.attn.q.format.label == "dense" for b in model.blocks)
                )
            )
        rules = [("head", parse_format(label)), ("*", parse_format(label))]
        text = PRUNERS[name].needs_text
        steps = walk(model, tokens(), Calibration(onload_device=onload_device)) if text else ()
        report = prune(model, rules, steps, PRUNERS[name], onload_device=onload_device)
        if text and onload_device is not None:
            assert set(on_it) == {0, 1}  # pruned when it runs again
        results.append((model.to(compute).state_dict(), report))
    (whole, want), (streamed, got) = results
    assert list(whole) == list(streamed) and all(torch.equal(streamed[n], t) for n, t in whole.items())
    assert got.layers == want.layers and got.converted.changed == want.converted.changed


def test_an_error_on_the_device_leaves_the_block_offloaded() -> None:
    model = loud_model().bfloat16()
    model.compute_dtype = torch.float32
    before = {n: t.clone() for n, t in model.state_dict().items()}

    def fail(*_: object) -> None:
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        steps = walk(model, tokens(), Calibration(onload_device=torch.device("cpu")))
        prune(
            model, [("*", parse_format("sparse24"))], steps, Wanda(), onload_device=torch.device("cpu"), progress=fail
        )
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[n], t) for n, t in before.items())


def test_bad_input_is_said_before_any_work() -> None:
    for label, said in (("int4:g32", "not what one-shot pruning makes"), ("sparse24:tile", "sparse24:held")):
        refused(said, plan_pruning, loud_model(), [("*", parse_format(label))])
    odd = loud_model(replace(QWEN2, d_ff=92))
    refused(
        r"blocks\.0\.mlp\.down: sparse24 needs an input width that is a multiple of 8",
        plan_pruning,
        odd,
        [("*", parse_format("sparse24"))],
    )
    model, _ = pruned("magnitude")
    refused("is sparse24 already", plan_pruning, model, [("*", parse_format("sparse24"))])
    broken = loud_model()
    with torch.no_grad():
        broken.blocks[1].mlp.up.weight[0, 0] = float("nan")  # type: ignore
    refused(r"blocks\.1\.mlp\.up\.weight holds NaN", plan_pruning, broken, [("*", parse_format("sparse24"))])
    refused("damping", SparseGpt, damping=0)


def test_the_snippet_of_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs/methods/prune24.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(snippet, "prune24.md", "exec", dont_inherit=True), names)
    assert names["model"].blocks[0].mlp.up.part_names == ("values", "meta", "low")
