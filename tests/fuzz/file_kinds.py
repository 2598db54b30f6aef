"""Every kind of file that a user can hand over: a good one, how it is damaged, and the code that reads it."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from file_cases import Kind, on
from file_damage import LONG_NAME, damage_value, hostile_json

from foreign_folders import save_gptq_awq
from shoestring.cli.inspect import summarize
from shoestring.errors import UserError
from shoestring.evals.tasks import read_task
from shoestring.formats import convert, pack, parse_format
from shoestring.hardware.plan_table import read_plans
from shoestring.host.arena import _GEOMETRY as GEOMETRY
from shoestring.host.arena import Arena
from shoestring.host.checksums import checksum
from shoestring.kernels.lowbit.few_rows import FewRowsPlan
from shoestring.mesh import Mesh
from shoestring.methods.skipping.policies import open_policy
from shoestring.model import Tokenizer, load_model, save_model
from shoestring.model.adapter_folder import read_adapter
from shoestring.model.chat import fault, render
from shoestring.model.compressed_tensors import save_compressed_tensors
from shoestring.model.gguf import load_gguf
from shoestring.model.gguf_file import GgufFile, open_gguf
from shoestring.model.gguf_names import place_of
from shoestring.model.gguf_write import save_gguf
from shoestring.model.skip import SkipSet, StandIn, Sublayer
from shoestring.model.spec import Experts
from shoestring.model.verify import verify
from shoestring.recipes import find
from shoestring.recipes.train import dense
from shoestring.runlog import RunLog
from shoestring.serve.engine.adapters import AdapterBank
from shoestring.serve.speculative.draft_model import read_drafter_file
from shoestring.shrink.self_text import read_prompts
from shoestring.state.boxes import Box, local_box
from shoestring.state.checkpoint import load_checkpoint, save_checkpoint
from shoestring.state.checkpoint_files import HOST_FORMAT, HOST_MANIFEST, MANIFEST, seal
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels.drain import drain
from shoestring.state.levels.host_folder import arena_path, list_copies
from shoestring.state.levels.restore import Offer, plan_pieces, read_offer
from shoestring.state.levels.settings import CheckpointConfig, LevelsConfig
from shoestring.state.levels.version import HeldBox, HeldCopy, dump_index, sum_of_names
from shoestring.state.manifest import read_manifest
from shoestring.state.reshard.layouts import REPLICATE, BoxLayout, MeshLayout, shard
from shoestring.state.reshard.plan import make_plan
from shoestring.state.reshard.tasks import MovedTensor
from shoestring.state.reshard.topology import read_topology
from shoestring.state.storage import HostReader
from shoestring.train.corpus import documents
from shoestring.train.step import Micro
from shoestring.train.teacher_cache import ScalarCache, build_scalar_cache
from tiny import GPT2, LLAMA, QWEN2, chat_tokenizer, make_adapter, random_model, tiny_llama, tiny_tokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé <b> 😀"}]


# -- models ----------------------------------------------------------------------------------------


def use_model(folder: Path) -> None:
    """What `generate` does with a folder, for three tokens; then what `inspect` does."""
    loaded = load_model(folder)
    if loaded.tokenizer is not None:
        loaded.tokenizer.decode(loaded.tokenizer.encode("the cat sat"))
    with torch.no_grad():
        loaded.model(torch.tensor([[0, 1, 2]]))
    summarize(folder)


def use_tensors_file(folder: Path) -> None:
    """What `inspect --layers --verify` does with one file."""
    summarize(folder / SAFE, each_layer=True)
    verify(folder / SAFE)


def make_llama(folder: Path) -> None:
    save_model(folder, tiny_llama(), tiny_tokenizer())


def make_qwen2(folder: Path) -> None:
    save_model(folder, random_model(QWEN2))


def make_gpt2(folder: Path) -> None:
    save_model(folder, random_model(GPT2))


def make_shards(folder: Path) -> None:
    save_model(folder, tiny_llama(), shard_bytes=20_000)


def make_packed(folder: Path) -> None:
    model = tiny_llama()
    convert(model, [("*.mlp.*", parse_format("nf3:g16")), ("*.attn.*", parse_format("int4:g16"))])
    pack(model)
    save_model(folder, model, tiny_tokenizer())
    layers = [{"name": "blocks.0.mlp.up", "output_error": 0.1, "weight_error": 0.2}]
    (folder / "quantization.json").write_text(json.dumps({"method": "gptq", "layers": layers}))
    (folder / "pruning.json").write_text(json.dumps({"layers": 3, "kept": 7}))


def make_compressed(folder: Path) -> None:
    model = random_model(QWEN2)
    convert(model, [("*.mlp.*", parse_format("int4:g32")), ("*.attn.*", parse_format("int8:g32"))])
    pack(model)
    save_compressed_tensors(folder, model)


def make_gptq(folder: Path) -> None:
    model = random_model(QWEN2)
    convert(model, [("blocks.*", parse_format("int4:g32"))])
    pack(model)
    save_gptq_awq(folder, model, "gptq")


def use_adapter(folder: Path) -> None:
    """What a server does with an adapter's folder: read it for a model, and load it."""
    model = random_model(LLAMA)
    AdapterBank(model).load("a", read_adapter(folder, model))


def traversal(folder: Path, rng: random.Random) -> str:
    """An index that names files elsewhere."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = rng.choice(list(index["weight_map"]))
    places = ("../secret", "/etc/passwd", "a/b", "", ".", "..", LONG_NAME, "x\0y", "config.json", "~/x", "/dev/zero")
    index["weight_map"][name] = rng.choice(places)
    path.write_text(json.dumps(index))
    return f"index names {index['weight_map'][name]!r}"


def header(folder: Path, rng: random.Random) -> str:
    """A safetensors header with hostile values and a length that fits it."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    values, told = damage_value(json.loads(data[8 : 8 + length]), rng)
    text = hostile_json(values).encode(errors="replace")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return f"header{told}"


# -- tokenizers and chats --------------------------------------------------------------------------


def use_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(folder)
    ids = tokenizer.encode("the cat sat. 日本語 <|endoftext|>\n\n 123")
    tokenizer.decode(ids)
    stream = tokenizer.stream()
    for i in ids[:20]:
        stream.step(i)
    tokenizer.spelling()
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat(CHAT)


def make_tokenizer(folder: Path) -> None:
    chat_tokenizer().save(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [0, 1]}))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"0": {"content": "<|endoftext|>", "special": True}}
    config["add_bos_token"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_gpt2_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads(tiny_tokenizer().backend.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]))


BITS = (
    *("{{", "}}", "{%", "%}", "{% for m in messages %}", "{% endfor %}", "{% if ", "{% endif %}", "{{ m.content }}"),
    *("{{ messages", "| tojson", "| length", "[0]", ".role", "{{ bos_token }}", "{% set x = ", "x ~ x", "range(99999)"),
    *(
        "{% macro f(n) %}",
        "{% endmacro %}",
        "{{ f(3) }}",
        "raise_exception('no')",
        " * 10",
        "** 9",
        "'a'",
        "''",
        "((",
        "))",
    ),
    *("{% generation %}", "{% endgeneration %}", "{% break %}", "{% include 'x' %}", "{% import 'os' as o %}", "{# "),
    *(
        "{{ self.__class__ }}",
        "{{ ''.__class__ }}",
        "{{ m | attr('__init__') }}",
        "{% raw %}",
        "{% endraw %}",
        "\0",
        "\n",
    ),
    *("strftime_now('%Y')", "{{ namespace(a=1).a }}", "{{ lipsum }}", "{{ cycler }}", "loop.index", "| center(999999)"),
)
BOMBS = (
    "{{ 9 ** (9 ** (9 ** 9)) }}",
    "{{ 'a'.ljust(10 ** 11) }}",
    "{% for i in range(9999) %}{% for j in range(9999) %}{{ i }}{% endfor %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
)


def write_template(folder: Path, rng: random.Random) -> str:
    if rng.random() < 0.01:
        text = rng.choice(BOMBS)
    else:
        text = "".join(rng.choice(BITS) for _ in range(rng.randrange(1, 14)))
    (folder / "chat_template.jinja").write_text(text)
    return text


def use_template(folder: Path) -> None:
    text = (folder / "chat_template.jinja").read_text()
    fault(text)
    render(text, CHAT, add_generation_prompt=True, special={"bos_token": "<s>"})


def make_template(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat_template.jinja").write_text("{{ messages }}")


# -- GGUF ------------------------------------------------------------------------------------------


def write_gguf(path: Path, changes: dict[str, Any] | None = None) -> None:
    """A tiny Llama as llama.cpp would write it; `changes` of its metadata, None takes a key out."""
    import gguf

    spec, model = LLAMA, tiny_llama()
    vocabulary = json.loads(tiny_tokenizer().backend.to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    metadata: dict[str, Any] = {
        "llama.block_count": spec.num_layers,
        "llama.context_length": spec.max_positions,
        "llama.embedding_length": spec.d_model,
        "llama.feed_forward_length": spec.d_ff,
        "llama.attention.head_count": spec.num_heads,
        "llama.attention.head_count_kv": spec.num_kv_heads,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.attention.sliding_window": 0,
        "llama.rope.dimension_count": spec.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(m) for m in vocabulary["merges"]],
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
        **(changes or {}),
    }
    writer = gguf.GGUFWriter(path, "llama")
    _add_metadata(writer, metadata)
    for name, tensor in model.state_dict().items():
        stored = place_of(spec, name).name
        writer.add_tensor(stored, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_gguf(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / "m.gguf")


GGUF_KEYS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "rope.freq_base", "attention.layer_norm_rms_epsilon", "attention.sliding_window"),
    *("rope.dimension_count", "attention.key_length", "attention.value_length", "expert_count", "rope.scaling.type"),
)
GGUF_TOKENIZER_KEYS = (
    *("model", "pre", "tokens", "merges", "token_type", "scores", "bos_token_id", "eos_token_id", "eot_token_id"),
    *("unknown_token_id", "add_bos_token", "padding_token_id"),
)
GGUF_VALUES: tuple[Any, ...] = (
    *(None, 0, 1, 2, 3, 7, -1, -5, 2**31, 2**32, 2**40, -(2**63), 0.0, -1.0, 0.5, 1e-30, 1e30, -1e30, True, False, ""),
    *("x", "llama", "none", "yarn", "y" * 5000, float("nan"), float("inf"), [1, 2], [1.5], ["a", "b"], ["a"] * 400),
)


def metadata(folder: Path, rng: random.Random) -> str:
    """A whole file whose metadata has a hostile value."""
    changes = {}
    for _ in range(rng.choice((1, 1, 2))):
        arch = f"llama.{rng.choice(GGUF_KEYS)}"
        vocabulary = f"tokenizer.ggml.{rng.choice(GGUF_TOKENIZER_KEYS)}"
        key = rng.choice((arch, arch, vocabulary, "tokenizer.chat_template", "general.alignment"))
        changes[key] = rng.choice(GGUF_VALUES)
    (folder / "m.gguf").unlink()
    write_gguf(folder / "m.gguf", changes)
    return str({k: str(v)[:40] for k, v in changes.items()})


OTHER_KEYS = (
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base_swa"),
    *("attention.sliding_window_pattern", "attention.sliding_window", "attn_logit_softcapping", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor", "block_count"),
)


SUPERBLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}  # of 256 weights


def make_other_ggufs(folder: Path) -> None:
    """A mixture of experts, and a model with windows, soft caps and norms of its own, in blocks of several types."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = replace(LLAMA, d_model=64, head_dim=16, d_ff=96)
    experts = replace(plain, model_type="qwen3_moe", qk_norm=True, experts=Experts(4, 2, 32), norm_eps=1e-6)
    gemma = replace(
        plain, model_type="gemma2", norm="rms_offset", norm_placement="both", act="geglu_tanh", attn_scale=0.25,
        attn_softcap=50.0, logit_softcap=30.0, scaled_embeddings=True, sliding_window=8, full_layers=(1,),
    )  # fmt: skip
    for name, spec, kind in (("experts", experts, "Q5_1"), ("windows", gemma, "Q4_0")):
        save_gguf(folder / f"{name}.gguf", random_model(spec), tiny_tokenizer(), kind=kind)
    wide = replace(LLAMA, d_model=256, head_dim=64, d_ff=256, num_layers=1)
    save_gguf(folder / "superblocks.gguf", random_model(wide), tiny_tokenizer(), kind="Q8_0")
    write_superblocks(folder, random.Random(0), sound=True)


def superblocks(folder: Path, rng: random.Random) -> str:
    return write_superblocks(folder, rng, sound=rng.random() < 0.5)


def write_superblocks(folder: Path, rng: random.Random, *, sound: bool) -> str:
    """A whole file with matrices of random bytes in Q4_K, Q5_K and Q6_K; unless it is to be sound their scales are
    random, too: infinities and NaN among them."""
    path = folder / "superblocks.gguf"
    file, replaced = open_gguf(path), dict[str, tuple[str, np.ndarray]]()
    for tensor in file.tensors.values():
        if len(tensor.shape) == 2 and tensor.shape[-1] % 256 == 0 and rng.random() < 0.5:
            kind = rng.choice(list(SUPERBLOCK_BYTES))
            shape = tensor.shape[0], tensor.shape[1] // 256, SUPERBLOCK_BYTES[kind]
            blocks = np.frombuffer(rng.randbytes(math.prod(shape)), np.uint8).reshape(shape).copy()
            if sound:
                scales = slice(-2, None) if kind == "Q6_K" else slice(4)
                blocks[..., scales].view(np.float16)[:] = 0.001
            replaced[tensor.name] = kind, blocks.reshape(len(blocks), -1)
    _rewrite(file, file.metadata(), path, replaced)
    return f"{path.name}: { {name: kind for name, (kind, _) in replaced.items()} }"


def other_metadata(folder: Path, rng: random.Random) -> str:
    """A whole file whose metadata of its architecture has hostile values."""
    path = folder / rng.choice(("experts.gguf", "windows.gguf"))
    file = open_gguf(path)
    metadata = file.metadata()
    changes: dict[str, Any] = {}
    for _ in range(rng.choice((1, 1, 2))):
        key = f"{metadata['general.architecture']}.{rng.choice(OTHER_KEYS)}"
        changes[rng.choice((key, key, key, "general.architecture"))] = rng.choice(GGUF_VALUES)
    _rewrite(file, {**metadata, **changes}, path)
    return f"{path.name}: {changes}"


def _add_metadata(writer: Any, metadata: dict[str, Any]) -> None:
    """Every value in the type of GGUF that holds it; empty lists are left out."""
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value) if 0 <= value < 2**32 else writer.add_int64(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list) and value:
            writer.add_array(key, value)


def _rewrite(
    file: GgufFile, metadata: dict[str, Any], path: Path, replaced: Mapping[str, tuple[str, np.ndarray]] | None = None
) -> None:
    """The file with other metadata, and with these tensors (type, bytes by row) in place of its own."""
    import gguf

    writer = gguf.GGUFWriter(path.with_suffix(".new"), "none")
    _add_metadata(writer, metadata)
    whole = path.read_bytes()
    for tensor in file.tensors.values():
        raw = np.frombuffer(whole[tensor.offset : tensor.offset + tensor.num_bytes], np.uint8)
        kind, rows = (replaced or {}).get(tensor.name, (tensor.kind, raw.reshape(*tensor.shape[:-1], -1)))
        writer.add_tensor(tensor.name, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


def use_other_ggufs(folder: Path) -> None:
    for name in ("experts", "windows", "superblocks"):
        _use_gguf(folder / f"{name}.gguf")


def use_gguf(folder: Path) -> None:
    _use_gguf(folder / "m.gguf")


def _use_gguf(path: Path) -> None:
    from shoestring.errors import UserError

    if not path.is_file():
        raise UserError(f"{path} is no file")  # who asks for it looks first
    load_gguf(path)
    load_model(path, packed=True)
    summarize(path)


# -- runs ------------------------------------------------------------------------------------------


def make_run(folder: Path) -> None:
    save_model(folder / "model", tiny_llama(), tiny_tokenizer())
    log = RunLog(folder, quiet=True)
    log.save_config({"recipe": "train/dense", "config": find.to_json(dense.Config())})
    for step in range(1, 4):
        (folder / "metrics.jsonl").open("a").write(json.dumps({"step": step, "time": 1.0, "loss": 3.0 / step}) + "\n")
    log.evaluated(model="m", perplexity=3.5, megabytes=1.0, format="dense")
    log.close()


def use_run(folder: Path) -> None:
    summarize(folder)
    log = RunLog(folder, quiet=True)
    log.truncate_after(2)
    log.evaluations()
    find.resolve_config(dense, [f"resume={folder}", "steps=5"])


STATE: dict[str, Any] = {
    "w": torch.arange(12.0).view(3, 4),
    "n": torch.ones(5, dtype=torch.int64),
    "step": 3,
    "of": "x",
}


def make_checkpoint(folder: Path) -> None:
    save_checkpoint(folder / "step-00000003", {**STATE}, step=3)


def held_state() -> HeldCopy:
    """Two tensors as one rank's copy of a version."""
    names = {"w": ("F32", (4, 3)), "n": ("I64", (2,))}
    boxes = (HeldBox("w", "F32", (4, 3), Box((0, 0), (4, 3)), 0), HeldBox("n", "I64", (2,), Box((0,), (2,)), 256))
    return HeldCopy(3, "0a", 0, 1, "h", sum_of_names(names), boxes, {"step": 3})


def make_arena(folder: Path) -> None:
    """A copy in memory, with a checkpoint of the same version beside it as one host's share."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = held_state()
    arena = Arena.create(arena_path(folder, 0, 1), 2000, copy.num_bytes)
    arena.slot_view(0)[: copy.num_bytes] = bytes(range(256)) + bytes(copy.num_bytes - 256)
    whole = arena.slot_view(0)[: copy.num_bytes]
    summed = replace(copy, chunks=(checksum(whole, arena.algorithm),), algorithm=arena.algorithm)
    whole.release()
    arena.commit(0, 1, 3, dump_index(summed))
    arena.close()
    entries = list_copies(folder)[0]
    with ThreadPoolExecutor(1) as pool:
        drain(entries, folder / "step-00000003", pool)
    manifest = json.loads((folder / "step-00000003" / MANIFEST).read_bytes())
    body = {**manifest, "format": HOST_FORMAT}
    del body["checksum"]
    (folder / "step-00000003" / MANIFEST).unlink()
    (folder / "step-00000003" / HOST_MANIFEST).write_bytes(seal(body))


def forged_index(folder: Path, rng: random.Random) -> str:
    """Hostile values in the index of a copy, under checksums that fit."""
    path = arena_path(folder, 0, 1)
    arena = Arena.open(path)
    root, told = damage_value(arena.versions()[0].index, rng)
    text = hostile_json(root).encode(errors="replace")[: arena.index_bytes]
    arena._commit_text(0, 2, 3, text)
    arena.close()
    return f"{path.name}: forged{told}"


def forged_geometry(folder: Path, rng: random.Random) -> str:
    """Huge and odd sizes, under a checksum that fits."""
    path = arena_path(folder, 0, 1)
    fields = list(GEOMETRY.unpack(path.read_bytes()[: GEOMETRY.size]))
    which, new = rng.randrange(1, len(fields)), rng.choice([0, 1, 3, 2**31 - 1, 2**20])
    fields[which] = new if which < 3 else rng.choice([new, 2**45, 2**62, 2**64 - 1])
    head = GEOMETRY.pack(*fields)
    with path.open("r+b") as file:
        file.write(head + checksum(head).encode().ljust(16, b"\0"))
    return f"{path.name}: geometry {fields}"


def use_remote(folder: Path) -> None:
    """What a run does that finds nothing on its own machine: fetch the newest checkpoint, and read it."""
    settings = CheckpointConfig(checkpoint="auto", levels=LevelsConfig(remote=f"file://{folder}", remote_timeout_s=5.0))
    saver = Checkpointer(folder / "fetched", settings)
    if saver.levels[-1].fetch(SimpleNamespace(mesh=Mesh(0, 1, torch.device("cpu")), log=None), None):
        use_checkpoint(folder / "fetched")


def use_arena(folder: Path) -> None:
    """What a resumed run does with a host's copies in memory; then with the host's share on disk."""
    copies, problems = list_copies(folder)
    for problem in problems:
        raise UserError(problem)
    for entry in copies:
        tensors = {"w": torch.zeros(4, 3), "n": torch.zeros(2, dtype=torch.int64)}
        offer = Offer("memory", "h", str(entry.path), entry.copy, entry.slot, entry.sequence)
        pieces, missing = plan_pieces([(n, local_box(t), t) for n, t in tensors.items()], [offer], "h")
        if missing or (damage := read_offer(offer, pieces.get(offer, []))) is not None:
            raise UserError(f"not used: {missing or damage}")
    reader = HostReader(folder / "step-00000003")
    reader.verify()


def use_checkpoint(folder: Path) -> None:
    place = folder / "step-00000003"
    read_manifest(place)
    state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in STATE.items()}
    load_checkpoint(place, state)
    summarize(place)


def forged_manifest(folder: Path, rng: random.Random) -> str:
    """Hostile values under a checksum that fits."""
    path = folder / "step-00000003" / MANIFEST
    root = json.loads(path.read_bytes())
    del root["checksum"]
    root, told = damage_value(root, rng)
    if not isinstance(root, dict) or not root:
        path.write_text(hostile_json(root))
        return told
    rest = hostile_json(root).removeprefix("{").encode(errors="replace")
    path.write_bytes(f'{{"checksum": "{hashlib.sha256(rest).hexdigest()}",\n'.encode() + rest)
    return f"forged{told}"


# -- texts -----------------------------------------------------------------------------------------


def make_tasks(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    cloze = [{"context": f"the cat {i}", "continuation": "sat"} for i in range(5)]
    choice = [{"query": f"the cat {i}?", "choices": ["sat", "ran"], "gold": i % 2} for i in range(5)]
    (folder / "cloze.jsonl").write_text("\n".join(map(json.dumps, cloze)) + "\n")
    (folder / "choice.jsonl").write_text("\n".join(map(json.dumps, choice)) + "\n")


def use_tasks(folder: Path) -> None:
    read_task(folder / "cloze.jsonl")
    read_task(folder / "choice.jsonl", limit=4)


def make_corpora(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(f"Paragraph {i}. " + "words and more words. " * 30 for i in range(20))
    (folder / "a.txt").write_text(text + "<|endoftext|>" + text)
    rows = [{"text": f"text {i}"} for i in range(5)] + [{"prompt": "p", "completion": "c"}]
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    table = pyarrow.table({"text": [f"row {i} " * 20 for i in range(300)], "other": list(range(300))})
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=100)


def use_corpora(folder: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.parquet"):
        for _ in documents(str(folder / name), max_bytes=1_000_000):
            pass
    for _ in documents(str(folder), max_bytes=1_000_000):
        pass


def parquet_bomb(folder: Path, rng: random.Random) -> str:
    import pyarrow
    import pyarrow.parquet

    text, num = rng.choice((("", 3000), ("word " * 200_000, 5000), ("\0" * 100_000, 20_000), (" ", 5000)))
    index = pyarrow.array([0] * num, pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(index, pyarrow.array([text]))
    options = {"compression": rng.choice(("zstd", "snappy", "gzip")), "store_schema": rng.random() < 0.5}
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), folder / "c.parquet", **options)
    return f"parquet of {num} x {len(text)} characters, {options}"


def make_prompts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"instruction": "Sum:", "input": "1 2"}, {"question": "1+1?"}, {"turns": ["hello", "more"]}]
    (folder / "p.json").write_text(json.dumps([*rows, "plain"]))
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def use_prompts(folder: Path) -> None:
    read_prompts(str(folder / "p.json"))
    read_prompts(str(folder / "p.jsonl"), 2)


# -- what recipes leave ----------------------------------------------------------------------------


def make_skip(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    skipped = {Sublayer(0, "attn"): StandIn(torch.tensor([1.5])), Sublayer(1, "mlp"): StandIn(None, torch.ones(32))}
    data = SkipSet(skipped, name="s").to_json()
    (folder / "s.json").write_text(json.dumps({**data, "notes": {"context": 64}}))
    online = {"beta": 0.9, "ratios": [1.0, 1.1], "num_watched": 4}
    (folder / "o.json").write_text(json.dumps({**data, "online": online}))
    (folder / "drafter.json").write_text(json.dumps({"version": 1, "vocab_ids": [1, 5, 7], "acceptance": [0.75, 0.5]}))


def use_skip(folder: Path) -> None:
    open_policy(str(folder / "s.json"), LLAMA)
    open_policy(str(folder / "o.json"), LLAMA)
    read_drafter_file(folder, LLAMA.vocab_size)


def make_reshard(folder: Path) -> None:
    folder.mkdir()
    topology = {"hosts": {"a": [0, 1], "b": [2]}, "nic": "rank", "nic_gbit_s": 10, "host_gbit_s": {"b": 1.5}}
    (folder / "topology.json").write_text(json.dumps({**topology, "ranks_per_host": 2, "hop_s": 0.001}))


def use_reshard(folder: Path) -> None:
    topology = read_topology(folder / "topology.json")
    src, dst = MeshLayout((3,), (shard(0),)), MeshLayout((2, 2), (REPLICATE, shard(1)), (2, 3, 4, 5))
    tensors = {f"t{i}": MovedTensor((7, 6), 2, src, dst) for i in range(2)}
    boxes = BoxLayout(((0, Box((0,), (3,))), (1, Box((2,), (5,)))))
    tensors["boxes"] = MovedTensor((5,), 4, boxes, MeshLayout((1,), (REPLICATE,), (4,)))
    make_plan(tensors, topology)


def make_plans(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).parents[2] / "src/shoestring/kernels/lowbit/few_rows_plans.json"
    plans = dict(list(json.loads(source.read_text()).items())[:6])
    (folder / "plans.json").write_text(json.dumps(plans))


def use_plans(folder: Path) -> None:
    read_plans(folder / "plans.json", FewRowsPlan)


def make_cache(folder: Path) -> None:
    tokens = torch.arange(12).view(2, 6)
    micro = Micro(tokens[:, :-1], tokens[:, 1:], torch.arange(10).view(2, 5))
    build_scalar_cache(folder / "cache", lambda m: m.targets_BT.float(), [micro], num_targets=10)


def use_cache(folder: Path) -> None:
    cache = ScalarCache.open(folder / "cache")
    cache.lookup(torch.arange(10).view(2, 5))


def checksums(folder: Path) -> None:
    verify(folder)


SAFE = "model.safetensors"
KINDS: tuple[Kind, ...] = (
    Kind("config.json", make_llama, (*on("config.json", "json", "json", "json", "json", "entry", "bytes"),), use_model),
    Kind("config.json of qwen2", make_qwen2, on("config.json", "json", "json", "json", "bytes"), use_model),
    Kind("config.json of gpt2", make_gpt2, on("config.json", "json", "json", "json", "bytes"), use_model),
    Kind("safetensors", make_llama, (*on(SAFE, "entry", "bytes", "bytes", head=2500), header, header), use_model),
    Kind(
        "safetensors file alone",
        make_llama,
        (*on(SAFE, "entry", "bytes", "bytes", head=2500), header, header),
        use_tensors_file,
    ),
    Kind(
        "adapters",
        lambda folder: make_adapter(folder, random_model(LLAMA)),
        (
            *on("adapter_config.json", "json", "json", "json", "json", "bytes", "entry"),
            *on("adapter_model.safetensors", "bytes", "bytes", "entry", head=2500),
        ),
        use_adapter,
    ),
    Kind(
        "safetensors index",
        make_shards,
        (*on("model.safetensors.index.json", "entry", "bytes", "json", "json"), traversal, traversal),
        use_model,
    ),
    Kind(
        "tokenizer.json", make_tokenizer, on("tokenizer.json", "json", "json", "json", "bytes", "entry"), use_tokenizer
    ),
    Kind(
        "tokenizer configs",
        make_tokenizer,
        (
            *on("tokenizer_config.json", "json", "json", "json", "bytes", "entry"),
            *on("special_tokens_map.json", "json", "json", "bytes", "entry"),
        ),
        use_tokenizer,
    ),
    Kind(
        "generation_config.json",
        make_llama,
        on("generation_config.json", "json", "json", "json", "bytes", "entry"),
        use_model,
    ),
    Kind(
        "GPT-2 vocabulary",
        make_gpt2_tokenizer,
        (*on("vocab.json", "json", "json", "bytes", "entry"), *on("merges.txt", "bytes", "bytes", "entry")),
        use_tokenizer,
    ),
    Kind("chat template", make_template, (write_template,), use_template),
    Kind(
        "chat template file",
        lambda folder: (make_tokenizer(folder), make_template(folder))[0],
        on("chat_template.jinja", "entry", "bytes"),
        use_tokenizer,
    ),
    Kind("GGUF", make_gguf, (*on("m.gguf", "bytes", "bytes", "entry", head=9000), metadata, metadata), use_gguf),
    Kind(
        "GGUF, other architectures",
        make_other_ggufs,
        (
            *on("experts.gguf", "bytes", head=9000),
            *on("windows.gguf", "bytes", "entry", head=9000),
            superblocks,
            other_metadata,
            other_metadata,
        ),
        use_other_ggufs,
    ),
    Kind(
        "compressed-tensors",
        make_compressed,
        (*on("config.json", "json", "json"), *on(SAFE, "bytes", "entry", head=6000), header, header),
        use_model,
    ),
    Kind(
        "GPTQ folder",
        make_gptq,
        (*on("config.json", "json", "json"), *on(SAFE, "bytes", "entry", head=6000), header, header),
        use_model,
    ),
    Kind(
        "packed folder",
        make_packed,
        (
            *on("shoestring.json", "json", "json", "json", "bytes", "entry"),
            *on("packed.safetensors", "bytes", "entry", head=6000),
            *on("quantization.json", "json", "bytes", "entry"),
            *on("pruning.json", "json", "bytes", "entry"),
        ),
        use_model,
    ),
    Kind("checksums", make_llama, on("checksums.json", "json", "json", "json", "bytes", "entry"), checksums),
    Kind(
        "run folder",
        make_run,
        (
            *on("config.json", "json", "json", "json", "bytes", "entry"),
            *on("evals.jsonl", "lines", "bytes", "entry"),
            *on("model/config.json", "entry"),
        ),
        use_run,
    ),
    Kind("metrics.jsonl", make_run, on("metrics.jsonl", "lines", "lines", "bytes", "entry"), use_run),
    Kind(
        "arena and host manifest",
        make_arena,
        (
            *on("rank-00000-of-00001.arena", "bytes", "bytes", "bytes", "entry", head=20000),
            *on("step-00000003/host.json", "json", "bytes", "entry"),
            *(forged_index,) * 4,
            forged_geometry,
        ),
        use_arena,
    ),
    Kind(
        "checkpoint in remote storage",
        make_checkpoint,
        (*on("step-00000003/manifest.json", "json", "bytes"), *(forged_manifest,) * 4),
        use_remote,
    ),
    Kind(
        "checkpoint",
        make_checkpoint,
        (
            *on("step-00000003/manifest.json", "json", "bytes", "entry"),
            *on("step-00000003/part-00000.safetensors", "bytes", "entry"),
            *(forged_manifest,) * 4,
        ),
        use_checkpoint,
    ),
    Kind(
        "task file",
        make_tasks,
        (
            *on("cloze.jsonl", "lines", "lines", "bytes", "entry"),
            *on("choice.jsonl", "lines", "lines", "bytes", "entry"),
        ),
        use_tasks,
    ),
    Kind(
        "corpus",
        make_corpora,
        (
            *on("a.txt", "bytes", "entry"),
            *on("b.jsonl", "lines", "lines", "bytes", "entry"),
            *on("c.parquet", "bytes", "bytes", "bytes", "entry"),
            parquet_bomb,
        ),
        use_corpora,
    ),
    Kind(
        "prompts",
        make_prompts,
        (*on("p.json", "json", "json", "bytes", "entry"), *on("p.jsonl", "lines", "bytes", "entry")),
        use_prompts,
    ),
    Kind(
        "skip sets and drafters",
        make_skip,
        (
            *on("s.json", "json", "json", "bytes", "entry"),
            *on("o.json", "json", "json", "bytes", "entry"),
            *on("drafter.json", "json", "json", "bytes", "entry"),
        ),
        use_skip,
    ),
    Kind("topologies", make_reshard, (*on("topology.json", "json", "json", "json", "bytes", "entry"),), use_reshard),
    Kind("plan table", make_plans, on("plans.json", "json", "json", "bytes", "entry"), use_plans),
    Kind(
        "teacher cache",
        make_cache,
        (*on("cache/manifest.json", "json", "json", "bytes", "entry"), *on("cache/value.bin", "bytes", "entry")),
        use_cache,
    ),
)
