"""Model folders: round trips with `transformers`, packed and sharded ones, every kind of bad input."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from refusals import refused
from shoestring.errors import UserError
from shoestring.formats import IntAsym, convert, pack, packed_state, parse_format
from shoestring.model import ModelSpec, Tokenizer, load_into, load_model, read_spec, save_model
from shoestring.state.tensor_files import TensorFiles
from tiny import logits, random_model, tiny_llama

transformers = pytest.importorskip("transformers")

SPEC = ModelSpec(97, 32, 2, 4, 2, 8, 48, 64, tied=False, bos_id=1, eos_id=2)
QWEN3 = replace(SPEC, model_type="qwen3", qk_norm=True, head_dim=16, norm_eps=1e-6, tied=True)
QWEN2 = replace(SPEC, model_type="qwen2", qkv_bias=True, sliding_window=4, full_layers=(0,))
MISTRAL = replace(SPEC, model_type="mistral", sliding_window=5)
GPT2 = ModelSpec(
    97, 32, 2, 4, 4, 8, 48, 64, model_type="gpt2", norm="layer", act="gelu_tanh", positions="learned",
    qkv_bias=True, out_bias=True, mlp_bias=True, bos_id=1, eos_id=2,
)  # fmt: skip
SPECS = {"llama": SPEC, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "gpt2": GPT2}


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_stored_head_that_is_not_the_embedding_unties_the_model(name: str, tmp_path: Path) -> None:
    """As in `transformers`: such folders come from a head that was trained by itself."""
    out = save_model(tmp_path / "m", random_model(SPECS[name]))
    tensors, file = load_file(out / "model.safetensors"), out / "model.safetensors"
    embed = tensors["transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embed.clone()}, file, metadata={"format": "pt"})
    assert load_model(out).spec == SPECS[name]
    for row in (0, 96):
        head = embed.clone()
        head[row] += 1
        save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
        loaded = load_model(out)
        assert read_spec(out)[0] == loaded.spec == replace(SPECS[name], tied=False)
        torch.testing.assert_close(logits(loaded.model), logits(from_transformers(out)), atol=1e-5, rtol=1e-5)
        again = load_model(save_model(tmp_path / f"again{row}", loaded.model)).model
        assert torch.equal(logits(again), logits(loaded.model))
    save_file({**tensors, "lm_head.weight": head[:50].clone()}, file)
    refused(r"head\.weight.*\[50, 32\]", load_model, out)


def test_a_stored_copy_of_the_embedding_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command opens a folder several times, and the two matrices of a large vocabulary have gigabytes."""
    out = save_model(tmp_path / "m", random_model(QWEN3))
    tensors, file = load_file(out / "model.safetensors"), out / "model.safetensors"
    embed = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embed.clone()}, file, metadata={"format": "pt"})
    read: list[str] = []
    plain_read = TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", lambda files, name, *a: read.append(name) or plain_read(files, name, *a))
    for _ in range(3):
        assert read_spec(out)[0] == QWEN3
    assert read == ["lm_head.weight", "model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": -embed}, file, metadata={"format": "pt"})  # another file of the same size
    assert not read_spec(out)[0].tied
    embed[0, 0], head = 0.0, embed.clone()
    head[0, 0] = -0.0
    for equal in (head, embed.double()):  # in numbers, not in bytes
        save_file({**tensors, "lm_head.weight": equal}, file, metadata={"format": "pt"})
        assert read_spec(out)[0].tied


def from_transformers(path: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.mark.parametrize("name", SPECS)
def test_saved_folder_loads_in_transformers_and_here_with_the_same_logits(name: str, tmp_path: Path) -> None:
    model = random_model(SPECS[name])
    out = save_model(tmp_path / "m", model)
    assert out == (tmp_path / "m").resolve() and [p.name for p in tmp_path.iterdir()] == ["m"]
    theirs = from_transformers(out)
    assert next(theirs.parameters()).dtype == torch.float32
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=1e-5)
    loaded = load_model(out)
    assert loaded.spec == SPECS[name] and loaded.tokenizer is None and loaded.path == tmp_path / "m"
    assert torch.equal(logits(loaded.model), logits(model))

    theirs.save_pretrained(tmp_path / "theirs")  # and back: what transformers writes, bit for bit
    assert torch.equal(logits(load_model(tmp_path / "theirs").model), logits(model))
    mine, stored = load_file(out / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors")
    assert mine.keys() == stored.keys() and all(torch.equal(mine[k], stored[k]) for k in mine)


def test_bfloat16_round_trip(tmp_path: Path) -> None:
    model = random_model(SPEC)
    save_model(tmp_path / "m", model, dtype=torch.bfloat16)
    theirs = from_transformers(tmp_path / "m")
    assert next(theirs.parameters()).dtype == torch.bfloat16
    loaded = load_model(tmp_path / "m")
    for name, p in loaded.model.state_dict().items():
        assert p.dtype == torch.float32 and torch.equal(p, model.state_dict()[name].bfloat16().float()), name
    again = load_model(tmp_path / "m", dtype=torch.bfloat16).model
    assert again.compute_dtype == torch.bfloat16 and again.embed.weight.dtype == torch.bfloat16
    save_model(tmp_path / "again", again)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "m/model.safetensors").read_bytes()


def test_shards_and_their_index(tmp_path: Path) -> None:
    model = random_model(GPT2)
    save_model(tmp_path / "m", model, shard_bytes=20_000)
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 2 and files[0].startswith("model-00001-of-")
    assert torch.equal(logits(load_model(tmp_path / "m").model), logits(model))
    torch.testing.assert_close(logits(from_transformers(tmp_path / "m")), logits(model), atol=1e-5, rtol=1e-5)

    (tmp_path / "m" / files[1]).unlink()
    refused(r"is missing, but model.safetensors.index.json lists it", load_model, tmp_path / "m")
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../../secret.safetensors"}}))
    refused("only files beside it", load_model, tmp_path / "m")
    index.write_text("{}")
    refused("weight_map", load_model, tmp_path / "m")


def test_tokenizer_and_end_tokens_travel(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["hello world, hello there"] * 4, vocab_size=270)
    model = random_model(replace(SPEC, vocab_size=300, eos_id=None))
    save_model(tmp_path / "m", model, tokenizer)
    loaded = load_model(tmp_path / "m")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("hello world") == tokenizer.encode("hello world")
    assert set(loaded.spec.eos_ids) == tokenizer.eos_ids  # by generation_config.json
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    spec, only_tokenizer = read_spec(tmp_path / "m")
    assert spec == loaded.spec and only_tokenizer is not None
    assert theirs("hello world")["input_ids"] == tokenizer.encode("hello world")

    small = random_model(replace(SPEC, vocab_size=100))
    save_model(tmp_path / "small", small, tokenizer)
    refused(r"tokenizer has \d+ tokens but the embedding only 100", load_model, tmp_path / "small")


def test_a_run_folder_loads_its_model_or_says_what_it_has(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000200").mkdir(parents=True)
    (run / "config.json").write_text('{"recipe": "train/dense", "config": {"steps": 400}}')
    refused(r"run without a finished model .*step-00000200.*run train/dense resume=", load_model, run)
    model = random_model(SPEC)
    save_model(run / "model", model)
    loaded = load_model(run)
    assert loaded.path == run / "model" and torch.equal(logits(loaded.model), logits(model))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("format", ["int4:g16", "nf3:g16"])
def test_packed_round_trip(name: str, format: str, tmp_path: Path) -> None:
    model = random_model(SPECS[name])
    convert(model, [("blocks.0.attn.v", parse_format("dense")), ("*", parse_format(format))])
    trained = logits(model)
    save_model(tmp_path / "dense", model)  # not packed: written as what the forward multiplies with
    torch.testing.assert_close(logits(from_transformers(tmp_path / "dense")), trained, atol=1e-5, rtol=1e-5)
    save_model(tmp_path / "state", model, weights=packed_state(model))

    pack(model)
    save_model(tmp_path / "m", model, dtype=torch.float16)
    packed = load_model(tmp_path / "m").model
    assert packed.blocks[1].attn.q.packed and not packed.blocks[0].attn.v.packed
    for key, want in model.state_dict().items():
        got = packed.state_dict()[key]
        assert torch.equal(got, want if "weight_" in key else want.half().float()), key
    full = load_model(tmp_path / "state").model
    assert torch.equal(logits(full), logits(model))

    info = json.loads((tmp_path / "m" / "shoestring.json").read_text())
    module = "transformer.h.0.attn.q_proj" if name == "gpt2" else "model.layers.0.self_attn.q_proj"
    entry = info["modules"][module]
    assert entry["format"] == parse_format(format).to_json() and 3 < entry["bits_per_weight"] < 7
    size = (tmp_path / "m" / "packed.safetensors").stat().st_size
    assert info["bits_per_parameter"] == pytest.approx(8 * size / model.spec.num_params(), rel=0.5)
    # transformers must stop, not go on with random weights.
    with pytest.raises((OSError, ValueError)):
        from_transformers(tmp_path / "m")
    refused(r"packed weights.*shoestring export", load_into, random_model(SPECS[name]), tmp_path / "m")

    (tmp_path / "m" / "shoestring.json").write_text(json.dumps({**info, "version": 99}))
    refused("version 99", load_model, tmp_path / "m")
    (tmp_path / "m" / "shoestring.json").unlink()
    refused(r"shoestring.json is missing", load_model, tmp_path / "m")


def test_load_into_fills_a_converted_model(tmp_path: Path) -> None:
    model = random_model(SPEC)
    save_model(tmp_path / "m", model)
    other = random_model(SPEC, seed=1)
    convert(other, [("*", IntAsym(bits=4, group=16))])
    load_into(other, tmp_path / "m")
    assert torch.equal(other.blocks[0].mlp.up.weight, model.blocks[0].mlp.up.weight)
    refused(r"d_ff \(model 64, file 48\)", load_into, random_model(replace(SPEC, d_ff=64)), tmp_path / "m")


# -- bad input ---------------------------------------------------------------------------------------------


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return save_model(tmp_path / "m", random_model(SPEC))


def test_paths_that_are_no_model(tmp_path: Path, good: Path) -> None:
    for path, words in [
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "absent.gguf", "does not exist"),
        (good / "config.json", "is a file"),
        (tmp_path, "no config.json"),
    ]:
        refused(words, load_model, path)
    refused("gpu9", load_model, good, device="gpu9")
    if not torch.cuda.is_available():
        refused("no CUDA GPU", load_model, good, device="cuda")


def test_broken_config(good: Path) -> None:
    (good / "config.json").write_text("{")
    refused("not valid JSON", load_model, good)
    (good / "config.json").write_text("[]")
    refused("JSON object", load_model, good)


@pytest.mark.parametrize("keep", [0, 4, 200, -100])
def test_truncated_weights(good: Path, keep: int) -> None:
    file = good / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused("truncated or corrupt", load_model, good)


def test_corrupt_header_and_lfs_pointer(good: Path) -> None:
    file = good / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(bytes(data))
    refused("truncated or corrupt", load_model, good)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    refused("git lfs pull", load_model, good)


def test_weights_that_are_absent_pickled_or_elsewhere(good: Path) -> None:
    (good / "model.safetensors").rename(good / "other.safetensors")
    refused(r"expected model.safetensors", load_model, good)
    (good / "pytorch_model.bin").write_bytes(b"\x80\x02")
    refused(r"never read.*convert", load_model, good)
    (good / "pytorch_model.bin").rename(good / "small.gguf")
    refused(r"give the file itself: .*small.gguf", load_model, good)


def test_tensors_that_disagree_with_the_config(good: Path) -> None:
    for change, words in [
        ({"intermediate_size": 64}, r"shape \[48, 32\].*\[64, 32\]"),
        ({"vocab_size": 98}, r"shape \[97, 32\].*\[98, 32\]"),
        ({"num_hidden_layers": 3}, r"model.layers.2.* is missing"),
        ({"num_hidden_layers": 1}, r"model.layers.1.* no place"),
        ({"attention_bias": True}, r"bias.* is missing"),
        ({"model_type": "qwen3"}, r"k_norm.* is missing"),
        ({"model_type": "gpt9"}, "gpt9"),
    ]:
        before = (good / "config.json").read_text()
        edit_config(good, **change)
        refused(words, load_model, good)
        (good / "config.json").write_text(before)
    load_model(good)

    file = good / "model.safetensors"
    tensors = load_file(file)
    head = tensors.pop("lm_head.weight")
    save_file(tensors, file)
    refused(r"lm_head.weight.*tie_word_embeddings", load_model, good)
    save_file({**tensors, "lm_head.weight": head.to(torch.int8)}, file)
    refused("stored as I8", load_model, good)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**tensors, "lm_head.weight": head, **extra}, file)
    load_model(good)
    save_file({**tensors, "lm_head.weight": head, "model.layers.0.mlp.router.weight": torch.ones(4)}, file)
    refused("router", load_model, good)


def test_fused_gpt2_weight_of_the_wrong_height(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", random_model(GPT2))
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    refused("shape", load_model, folder)


def test_saving_replaces_only_model_folders(tmp_path: Path, good: Path) -> None:
    other = random_model(SPEC, seed=3)
    save_model(good, other)
    assert torch.equal(logits(load_model(good).model), logits(other))
    (good / "notes.txt").write_text("mine")
    refused(r"'notes.txt'", save_model, good, random_model(SPEC))
    assert (good / "notes.txt").read_text() == "mine"
    assert torch.equal(logits(load_model(good).model), logits(other))

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "data.json").write_text("{}")
    refused(r"no config.json", save_model, tmp_path / "thesis", random_model(SPEC))
    (tmp_path / "file").write_text("x")
    refused("is a file", save_model, tmp_path / "file", random_model(SPEC))
    refused(r"Not a directory|is a file|exists", save_model, tmp_path / "file" / "m", random_model(SPEC))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "m", "thesis"]


def test_a_spec_that_no_config_can_say_writes_nothing(tmp_path: Path) -> None:
    refused("qwen3", save_model, tmp_path / "m", random_model(replace(SPEC, qk_norm=True)))
    refused(
        r"lack 'norm.weight'", save_model, tmp_path / "m", random_model(SPEC),
        weights={k: v for k, v in random_model(SPEC).state_dict().items() if k != "norm.weight"},
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import resource, sys
from shoestring.errors import UserError
from shoestring.model import load_model, save_model
model = load_model(sys.argv[1]).model
for limit in (500, 20_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save_model(sys.argv[1], model)
    except UserError as error:
        print(error)
"""


@pytest.mark.usefixtures("warm_python")
def test_a_write_that_fails_midway_leaves_the_old_folder(good: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands in for a full disk: the same failing write(2)."""
    before = (good / "model.safetensors").read_bytes()
    run = [sys.executable, "-c", FULL_DISK, str(good)]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "cannot write" in line and "File too large" in line and "free some space" in line
    assert (good / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_no_room_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refused(r"the disk has 0.0 MB left", save_model, tmp_path / "m", random_model(SPEC))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOENT])
def test_a_place_that_may_not_be_written_is_not_called_full(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc refuses (ENOENT) and has no room either; root is refused nothing, so this stands in for it."""

    def refuse(self: Path, *args: object, exist_ok: bool = False, **options: object) -> None:
        if not exist_ok:  # the folder above is there
            raise OSError(code, os.strerror(code), str(self))

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError) as caught:
        save_model(tmp_path / "m", random_model(SPEC))
    said = f"cannot write {tmp_path / 'm'}: {os.strerror(code)}; nothing was changed; choose another folder"
    assert str(caught.value) == said and list(tmp_path.iterdir()) == []


def test_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    class Stops:
        vocab_size, eos_ids = 4, {2}

        def save(self, folder: Path) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_model(tmp_path / "m", random_model(SPEC), Stops())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


RANKS = '''
"""Four ranks, dp x tp: save from shards, load into shards."""
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from shoestring.errors import UserError
from shoestring.formats import IntAsym, convert, pack, packed_state
from shoestring.mesh import MeshConfig, open_mesh
from shoestring.model import Decoder, load_into, load_model, save_model
from shoestring.model.parallel import ParallelConfig, parallelize

mesh = open_mesh(MeshConfig(dp=2, tp=2), device="cpu")
folder, out = Path(sys.argv[1]), Path(sys.argv[2])
for name in ("llama", "gpt2"):
    whole = load_model(folder / name)
    model = parallelize(Decoder(whole.spec), mesh, ParallelConfig())
    load_into(model, folder / name)
    want = whole.model.state_dict()
    for key, t in model.state_dict().items():
        full = t.full_tensor() if hasattr(t, "full_tensor") else t
        assert torch.equal(full, want[key]), key
    assert any(hasattr(t, "full_tensor") for t in model.state_dict().values())
    save_model(out / name, model, mesh=mesh)
    mesh.barrier()
    file = f"{name}/model.safetensors"
    assert (out / file).read_bytes() == (folder / file).read_bytes()
# Converted: the shards' parts and fake weights make the same files as one process does (formats, law 5).
rules = [("*", IntAsym(bits=4, group=8))]
whole = load_model(folder / "llama").model
model = Decoder(whole.spec)
convert(model, rules)
parallelize(model, mesh, ParallelConfig())
load_into(model, folder / "llama")
convert(whole, rules)
save_model(out / "fake", model, mesh=mesh)
save_model(out / "packed", model, weights=packed_state(model), mesh=mesh)
if mesh.is_main:
    save_model(out / "fake1", whole)
    pack(whole)
    save_model(out / "packed1", whole)
    for kind, file in (("fake", "model.safetensors"), ("packed", "packed.safetensors")):
        ranks, one = load_file(out / kind / file), load_file(out / f"{kind}1" / file)
        assert ranks.keys() == one.keys()
        assert all(torch.equal(ranks[k], one[k]) for k in one), [k for k in one if not torch.equal(ranks[k], one[k])]
        assert (out / kind / "config.json").read_text() == (out / f"{kind}1" / "config.json").read_text()
# An error on the rank that writes is raised on all ranks: none is left waiting.
mesh.barrier()
(out / "llama" / "notes.txt").touch()
mesh.barrier()
try:
    save_model(out / "llama", model, mesh=mesh)
    raise SystemExit("replaced a folder with the user's own file")
except UserError as error:
    assert "notes.txt" in str(error)
print("ok")
mesh.close()
'''


@pytest.mark.ranks
def test_shards_are_gathered_and_scattered(tmp_path: Path, run_ranks: Callable[..., str]) -> None:
    for name in ("llama", "gpt2"):
        save_model(tmp_path / "in" / name, random_model(SPECS[name]))
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    assert "ok" in run_ranks(4, script, str(tmp_path / "in"), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 9999), ("vocab_size", 1 << 26), ("intermediate_size", 1 << 26)]
)
def test_a_config_that_asks_for_more_than_the_files_hold_costs_nothing(tmp_path: Path, key: str, value: int) -> None:
    folder = save_model(tmp_path / "m", tiny_llama())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    began = time.monotonic()
    refused(r"asks for 9999 layers|the file has shape", load_model, folder)
    assert time.monotonic() - began < 5
