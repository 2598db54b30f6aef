"""Adapters in PEFT's layout: the same logits as peft's, both ways, and what is refused. peft/ holds folders that peft
0.21.2 wrote for models of tiny.py, each with the logits that it computed."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from shoestring.errors import UserError
from shoestring.formats import convert, pack, parse_format
from shoestring.formats.convert import format_hosts
from shoestring.model import Decoder
from shoestring.model.adapter_folder import (
    KEYS,
    AdapterFile,
    LoraWeights,
    linear_shapes,
    merge_adapter_,
    read_adapter,
    write_adapter,
)
from tiny import random_model

PEFT = Path(__file__).parent / "peft"
GPT2 = replace(tiny.GPT2, d_model=32, head_dim=8, d_ff=64)
SPECS = {"patterns": tiny.LLAMA, "dora": tiny.LLAMA, "gpt2": GPT2}
IDS = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def merged_logits(spec, weights) -> torch.Tensor:
    model = random_model(spec)
    merge_adapter_(model, weights, requantize=False)
    return model(IDS)


@pytest.mark.parametrize("name", SPECS)
def test_logits_equal_those_of_peft_and_survive_writing(name, tmp_path):
    spec = SPECS[name]
    base, want = random_model(spec), load_file(PEFT / name / "logits.safetensors")["logits"]
    found = read_adapter(PEFT / name, base)
    assert (want - base(IDS)).abs().max() > 0.1
    torch.testing.assert_close(merged_logits(spec, found.weights), want, atol=1e-5, rtol=0)
    write_adapter(tmp_path / "out", base, found.weights)
    again = read_adapter(tmp_path / "out", base)
    assert {n: torch.equal(w.b, again.weights[n].b) for n, w in found.weights.items()} == dict.fromkeys(
        again.weights, True
    )
    torch.testing.assert_close(merged_logits(spec, again.weights), want, atol=1e-5, rtol=0)
    theirs, ours = (load_file(p / "adapter_model.safetensors") for p in (PEFT / name, tmp_path / "out"))
    assert {n: t.shape for n, t in theirs.items()} == {n: t.shape for n, t in ours.items()}


def test_every_key_that_peft_writes_is_known():
    for name in SPECS:
        assert json.loads((PEFT / name / "adapter_config.json").read_text()).keys() <= KEYS


def test_fused_layers_of_which_some_have_adapters(tmp_path):
    """Written block-diagonal; q alone gives zeros for k and v."""
    model, gen = random_model(GPT2), torch.Generator().manual_seed(5)
    given = {
        f"blocks.0.attn.{n}": LoraWeights(*(torch.randn(s, generator=gen) for s in ((r, 32), (32, r))), 0.5 * r)
        for n, r in (("q", 2), ("v", 3))
    } | {"blocks.1.attn.q": LoraWeights(torch.randn(2, 32, generator=gen), torch.randn(32, 2, generator=gen), 2.0)}
    write_adapter(tmp_path / "a", model, given)
    found = read_adapter(tmp_path / "a", model).weights
    assert {n for n in found if "attn.k" in n} == {"blocks.0.attn.k", "blocks.1.attn.k"}
    torch.testing.assert_close(merged_logits(GPT2, found), merged_logits(GPT2, given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("format", ["int4:g16", "nf4:g16", "sparse24"])
def test_merging_into_packed_layers(format):
    """Requantized: the Format's own encode of decoded weight plus product. Dense: that weight itself."""
    weights = read_adapter(PEFT / "patterns", random_model(tiny.LLAMA)).weights
    models = []
    for _ in range(3):
        model = random_model(tiny.LLAMA)
        convert(model, [("blocks.*", parse_format(format))])
        pack(model)
        models.append(model)
    _, dense, again = models
    merge_adapter_(dense, weights, requantize=False)
    merge_adapter_(again, weights, requantize=True)
    hosts = [dict(format_hosts(m)) for m in models]
    for name in hosts[0]:
        w, to, back = (h[name].effective_weight(torch.float32) for h in hosts)
        if name not in weights:
            assert torch.equal(w, to) and torch.equal(w, back)
            continue
        a, b, scale, _ = weights[name]
        torch.testing.assert_close(to, w + scale * b @ a)
        assert hosts[2][name].packed and hosts[2][name].format == hosts[0][name].format
        format_ = hosts[0][name].format
        made = format_.encode(to.detach(), {n: aux.tensor for n, aux in format_.state(to.detach()).items()})
        assert torch.equal(format_.decode(made, torch.float32), back)


def test_requantize_needs_a_packed_base():
    with pytest.raises(UserError, match="nothing to quantize again"):
        model = random_model(tiny.LLAMA)
        merge_adapter_(model, read_adapter(PEFT / "patterns", model).weights, requantize=True)


def damaged(place: Path, name: str = "patterns", *, config=None, tensors=None) -> Path:
    shutil.copytree(PEFT / name, place)
    if config is not None:
        path = place / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    if tensors is not None:
        held = load_file(place / "adapter_model.safetensors")
        save_file(tensors(held), place / "adapter_model.safetensors")
    return place


Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIGS = {
    "peft_type is 'LOHA'": {"peft_type": "LOHA"},
    "task_type is 'SEQ_CLS'": {"task_type": "SEQ_CLS"},
    "bias is 'all'": {"bias": "all"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "lora_bias is True": {"lora_bias": True},
    "target_parameters": {"target_parameters": ["mlp.experts"]},
    "also changes the base": {"init_lora_weights": "pissa"},
    "'use_everything' is not known": {"use_everything": 1},
    "r must be a whole number": {"r": 10**9},
    "lora_alpha must be a positive number": {"lora_alpha": "many"},
    "'(a+)+', which is not read": {"rank_pattern": {"(a+)+": 2}},
    "this model and adapter_config.json ask for": {"r": 5},
    "rank_pattern must be an object": {"rank_pattern": [1]},
    "no lora_magnitude_vector": {"use_dora": True},
}


@pytest.mark.parametrize("message", CONFIGS)
def test_settings_that_are_refused(message, tmp_path):
    place = damaged(tmp_path / "a", config=CONFIGS[message])
    with pytest.raises(UserError, match=re.escape(message)):
        read_adapter(place, random_model(tiny.LLAMA))


@torch.no_grad()
def test_tensors_that_are_refused(tmp_path):
    model = random_model(tiny.LLAMA)
    a, b = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
    cases = {
        "NaN or infinite": lambda t: {**t, a: t[a] * torch.nan},
        "has no lora_B": lambda t: {n: v for n, v in t.items() if n != b},
        "is not known; an adapter has": lambda t: {**t, f"{Q}.lora_embedding_A": t[a].clone()},
        "this model has not": lambda t: {**t, a.replace("layers.0", "layers.7"): t[a].clone()},
        "is of another model": lambda t: {**t, a: t[a][:, :8].contiguous()},
        "stored as I32": lambda t: {**t, a: t[a].int()},
        "of no layer": lambda t: {},
    }
    for number, (message, change) in enumerate(cases.items()):
        with pytest.raises(UserError, match=message):
            read_adapter(damaged(tmp_path / str(number), tensors=change), model)
    pickled = damaged(tmp_path / "p")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    for path, message in (
        (pickled, "never read"), (tmp_path, "no adapter_config.json"), (tmp_path / "none", "is no folder"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            read_adapter(path, model)
    other = replace(tiny.LLAMA, d_model=64, head_dim=16)
    with torch.device("meta"), pytest.raises(UserError, match="of another model"):
        read_adapter(PEFT / "dora", Decoder(other))


def test_digests_tell_adapters_apart(tmp_path):
    model = random_model(tiny.LLAMA)
    first = read_adapter(PEFT / "patterns", model)
    assert first.digest == read_adapter(damaged(tmp_path / "same", config={"lora_dropout": 0.1}), model).digest
    assert first.digest != read_adapter(damaged(tmp_path / "other", config={"lora_alpha": 7}), model).digest
    assert isinstance(first, AdapterFile) and first.rank == 4 and first.weights.keys() <= linear_shapes(model).keys()


@pytest.mark.lab
@pytest.mark.parametrize("name", SPECS)
def test_peft_reads_what_is_written(name, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from shoestring.model import save_model

    base = random_model(SPECS[name])
    save_model(tmp_path / "base", base, dtype=torch.float32)
    write_adapter(tmp_path / "adapter", base, read_adapter(PEFT / name, base).weights)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    got = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()(IDS).logits
    torch.testing.assert_close(got, load_file(PEFT / name / "logits.safetensors")["logits"], atol=1e-5, rtol=0)
