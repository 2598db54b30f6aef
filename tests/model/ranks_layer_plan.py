"""Run on two ranks by test_layer_plan.py: every plan cut in two has the whole model's logits, or is refused."""

from __future__ import annotations

import sys

import torch
from layer_plans import SPEC, decoder, in_the_suite, single_changes

from shoestring.errors import UserError
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.model.mesh_layouts import layout_on
from shoestring.model.parallel import tensor_parallel_

mesh = open_mesh(MeshConfig(tp=2), "cpu")
axis = mesh.axis("tp")
assert axis is not None
tokens = torch.arange(12)[None] % SPEC.vocab_size
plans = single_changes()
for name, plan in (plans if sys.argv[1] == "all" else in_the_suite(plans)).items():
    whole, cut = decoder(plan), decoder(plan)
    try:
        tensor_parallel_(cut, axis)
    except UserError as error:
        assert "cannot share num_kv_heads=1" in str(error) or "is not possible for a model with" in str(error), error
        if mesh.is_main:
            print(name, "refused", flush=True)
        continue
    with torch.no_grad():
        torch.testing.assert_close(cut(tokens), whole(tokens), rtol=1e-5, atol=1e-5)
    if "experts" in name or "width" in name:
        got, want = cut.hidden(tokens), whole.hidden(tokens)
        (got * want.detach().square()).sum().backward()
        (want * want.detach().square()).sum().backward()
        for (n, p), q in zip(cut.named_parameters(), whole.parameters(), strict=True):
            gradient = torch.zeros_like(q) if p.grad is None else p.grad.full_tensor()
            want_gradient = torch.zeros_like(q) if q.grad is None else q.grad
            torch.testing.assert_close(gradient, want_gradient, rtol=1e-4, atol=1e-5, msg=f"{name}: {n}")
            placed = layout_on(n, tuple(p.shape), {"tp": 2}).placements[-1].dim
            assert placed == getattr(p.placements[0], "dim", None), n
    if mesh.is_main:
        print(name, "same logits", flush=True)
mesh.close()
