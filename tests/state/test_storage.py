"""SafeWriter and SafeReader: exact round trips, refusal of crafted and damaged folders, full disks, kills."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import CheckpointException

from shoestring.errors import UserError
from shoestring.state.checkpoint import latest, load_checkpoint, save_checkpoint, step_folder
from shoestring.state.checkpoint_files import MANIFEST, NEW
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.files import DTYPES
from shoestring.state.manifest import decode_value, encode_value, read_manifest
from shoestring.state.storage import SafeReader, SafeWriter, split_parts
from warm_process import WarmPopen

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {name: torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    return {
        **made,
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4, dtype=torch.int16),
        "bf16": torch.randn(7, 3).bfloat16(),
        "nan": torch.tensor([math.nan, math.inf, -0.0]),
        "transposed": torch.randn(4, 6).t(),
        "view": torch.randn(10)[3:7],
    }


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
        assert bits(a[name]) == bits(b[name]), name


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in state.items()}


def test_every_dtype_and_shape_round_trips_bit_for_bit(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", tensors(), step=3)
    loaded = blank(tensors())
    assert load_checkpoint(tmp_path / "c", loaded) == []
    assert_same(loaded, tensors())
    assert names(tmp_path) == ["c"]
    assert names(tmp_path / "c") == [MANIFEST, "part-00000.safetensors"]
    manifest = read_manifest(tmp_path / "c")
    assert manifest.step == 3 and manifest.world_size == 1
    # The part is a plain safetensors file for everybody else.
    part = load_file(tmp_path / "c" / "part-00000.safetensors")
    assert torch.equal(part["bf16@0,0"], tensors()["bf16"]) and part["scalar@"].shape == ()


def test_dcp_users_can_pass_the_writer_and_reader_directly(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    state = {"model": model.state_dict(), "lr": 1e-3, "betas": (0.9, 0.95), "names": ["a", "b"], "none": None}
    dcp.save(state, storage_writer=SafeWriter(tmp_path / "c"))
    other = {"model": torch.nn.Linear(4, 3).state_dict(), "lr": 0.0, "betas": (), "names": [], "none": 1}
    dcp.load(other, storage_reader=SafeReader(tmp_path / "c"))
    assert_same(other.pop("model"), model.state_dict())
    assert other == {"lr": 1e-3, "betas": (0.9, 0.95), "names": ["a", "b"], "none": None}
    assert SafeReader.validate_checkpoint_id(tmp_path / "c") and not SafeReader.validate_checkpoint_id(tmp_path)


def test_reads_only_the_boxes_that_are_asked_for(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", {"a": torch.arange(6), "b": torch.arange(4)})
    partial = {"b": torch.zeros(4, dtype=torch.int64)}
    dcp.load(partial, storage_reader=SafeReader(tmp_path / "c"))
    assert partial["b"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "value",
    [
        *[None, True, 0, -(2**80), 0.1, 1e-308, math.inf, -math.inf, "ü\n", [1, [2.5, None]], (1, (2,)), {}],
        *[[], {"a": {"b": [1]}}, {1: "x", None: 2}, {"__tuple__": 3}, ((), {"k": (1,)})],
    ],
)
def test_values_round_trip_exactly(value: Any) -> None:
    back = decode_value(json.loads(json.dumps(encode_value("v", value), allow_nan=False)))
    assert back == value and type(back) is type(value)


def test_nan_round_trips_and_objects_are_refused(tmp_path: Path) -> None:
    assert math.isnan(decode_value(encode_value("v", math.nan)))
    with pytest.raises(UserError, match=r"'x\.y' holds a PosixPath"):
        save_checkpoint(tmp_path / "c", {"x": {"y": Path("a"), "t": torch.zeros(1)}})
    with pytest.raises(UserError, match="complex128"):
        save_checkpoint(tmp_path / "c", {"x": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(UserError, match=r"called 'a\.b'"):
        save_checkpoint(tmp_path / "c", {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}})
    with pytest.raises(CheckpointException, match="holds a set"):
        dcp.save({"x": {1, 2}}, storage_writer=SafeWriter(tmp_path / "c"))
    assert names(tmp_path) == []


def test_existing_target_is_kept_unless_overwrite(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", {"a": torch.zeros(2)})
    with pytest.raises(UserError, match="exists already"):
        save_checkpoint(tmp_path / "c", {"a": torch.ones(2)})
    save_checkpoint(tmp_path / "c", {"a": torch.ones(2)}, overwrite=True)
    state = {"a": torch.zeros(2)}
    load_checkpoint(tmp_path / "c", state)
    assert state["a"].tolist() == [1, 1] and names(tmp_path) == ["c"]


def test_parts_are_shared_out_evenly() -> None:
    sizes = {f"part-{i:05d}.safetensors": 10 * (i + 1) for i in range(7)}
    shares = split_parts(sizes, 3)
    assert sorted(n for s in shares for n in s) == sorted(sizes)
    loads = [sum(sizes[n] for n in s) for s in shares]
    assert max(loads) - min(loads) <= 40
    assert split_parts({}, 2) == [(), ()]


# -- crafted and damaged folders ---------------------------------------------------------------------


def bomb(checkpoint: Path) -> bytes:
    return pickle.dumps(Bomb(checkpoint.parent / "boom"))


class Bomb:
    """Unpickling this creates the file `path`: how a test sees that a pickle was read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and give it a correct checksum again, as an attacker would."""
    root = json.loads((folder / MANIFEST).read_bytes())
    change(root)
    del root["checksum"]
    rest = json.dumps(root).removeprefix("{").encode()
    (folder / MANIFEST).write_bytes(f'{{"checksum": "{hashlib.sha256(rest).hexdigest()}",\n'.encode() + rest)


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, change)


PART = "part-00000.safetensors"


def replace_part(folder: Path, data: bytes) -> None:
    """Other bytes in the part, with the size and checksum in the manifest that fit them."""
    (folder / PART).write_bytes(data)
    new = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(folder, lambda m: m["parts"].update({PART: new}))


def other_part(folder: Path, **changes: torch.Tensor) -> None:
    """A valid safetensors part with other tensors in it, described by a matching checksum."""
    held = {"w": torch.zeros(4, 3), "b": torch.zeros(2)} | changes
    save_file({f"{n}@{','.join('0' * t.dim())}": t for n, t in held.items()}, folder / "new")
    data = (folder / "new").read_bytes()
    (folder / "new").unlink()
    replace_part(folder, data)


def w(m: dict[str, Any]) -> dict[str, Any]:
    return m["tensors"]["w"]


def rename_part(m: dict[str, Any], name: str) -> None:
    m["parts"][name] = m["parts"].pop(PART)
    for t in m["tensors"].values():
        for b in t["boxes"]:
            b["part"] = name


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(bytes(data))


def two_boxes(m: dict[str, Any], cut: int, start: int) -> None:
    box = w(m)["boxes"][0]
    w(m)["boxes"] = [{**box, "stop": [cut, 3]}, {**box, "start": [start, 0], "key": "w@x"}]


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickle as a part": (lambda c: replace_part(c, bomb(c)), f"{PART} is not a saf"),
    "pickle bytes, old checksum": (lambda c: (c / PART).write_bytes(bomb(c)), f"{PART} has .* bytes instead of"),
    "DCP's .metadata beside": (lambda c: (c / ".metadata").write_bytes(bomb(c)), r"\.metadata does not belong"),
    "manifest is a pickle": (lambda c: (c / MANIFEST).write_bytes(bomb(c)), "not valid JSON"),
    "manifest is not JSON": (lambda c: (c / MANIFEST).write_text("{"), "not valid JSON"),
    "manifest is deep JSON": (lambda c: (c / MANIFEST).write_text("[" * 200_000), "not valid JSON"),
    "manifest is other JSON": (lambda c: (c / MANIFEST).write_text("[]"), "not a checkpoint manifest"),
    "manifest with a key twice": (
        lambda c: (c / MANIFEST).write_text('{"format": "x", "format": "shoestring-checkpoint"}'),
        "same key twice",
    ),
    "manifest gone": (lambda c: (c / MANIFEST).unlink(), "has no manifest.json"),
    "manifest changed": (
        lambda c: (c / MANIFEST).write_bytes((c / MANIFEST).read_bytes().replace(b'"lr": 0.5', b'"lr": 0.6')),
        "its own checksum",
    ),
    "newer version": (edit(lambda m: m.update(version=2)), "version 2"),
    "extra field": (edit(lambda m: m.update(more=2)), "unknown or missing fields"),
    "missing field": (edit(lambda m: m.pop("values")), "unknown or missing fields"),
    "part in another folder": (edit(lambda m: rename_part(m, "../x.safetensors")), r"'\.\./x"),
    "absolute part": (edit(lambda m: rename_part(m, "/etc/passwd")), "'/etc/passwd'"),
    "part cut off": (lambda c: os.truncate(c / PART, 100), "100 bytes instead of"),
    "flipped byte in data": (lambda c: flip(c / PART, -1), f"{PART} is damaged"),
    "flipped byte in header": (lambda c: flip(c / PART, 20), f"{PART} is damaged"),
    "part gone": (lambda c: (c / PART).unlink(), f"{PART} is missing"),
    "unknown file": (lambda c: (c / "part-00001.safetensors").touch(), "part-00001.safetensors does not belong"),
    "part is a link": (
        lambda c: (shutil.move(c / PART, c.parent / "x"), (c / PART).symlink_to(c.parent / "x")),
        "not a plain file",
    ),
    "overlapping boxes": (edit(lambda m: two_boxes(m, 3, 2)), "overlap"),
    "the same box twice": (edit(lambda m: w(m)["boxes"].append(w(m)["boxes"][0] | {"key": "w@y"})), "overlap"),
    "the same key twice": (edit(lambda m: m["tensors"].update(w2=w(m))), "same key of a part"),
    "gap between boxes": (edit(lambda m: two_boxes(m, 2, 3)), r"nothing covers \[2, 0\]-\[3, 3\]"),
    "no box": (edit(lambda m: w(m).update(boxes=[])), "nothing covers"),
    "box outside": (edit(lambda m: w(m)["boxes"][0].update(stop=[5, 3])), "outside"),
    "empty box": (edit(lambda m: w(m)["boxes"][0].update(stop=[0, 3])), "empty box"),
    "negative start": (edit(lambda m: w(m)["boxes"][0].update(start=[-1, 0])), "bad box"),
    "boolean shape": (edit(lambda m: w(m).update(shape=[True, 3])), "bad entry"),
    "unknown dtype": (edit(lambda m: w(m).update(dtype="F32X")), "unknown dtype 'F32X'"),
    "wrong dtype in the part": (lambda c: other_part(c, w=torch.zeros(4, 3, dtype=torch.int32)), "is I32 .* says F32"),
    "wrong shape in the part": (lambda c: other_part(c, w=torch.zeros(3, 4)), r"is F32 \[3, 4\].* says F32 \[4, 3\]"),
    "extra tensor in the part": (lambda c: other_part(c, z=torch.zeros(1)), r"does not hold the tensors.*'z@0'"),
    "box in an unlisted part": (edit(lambda m: w(m)["boxes"][0].update(part="part-00007.safetensors")), "unknown part"),
    "other key": (edit(lambda m: w(m)["boxes"][0].update(key="lost")), "does not hold the ten"),
    "tensor dropped from the manifest": (edit(lambda m: m["tensors"].pop("w")), "missing in the"),
    "bad value": (edit(lambda m: m["values"].update(lr={"__dict__": [[[], 1]]})), "cannot be dec"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_crafted_and_damaged_checkpoints_are_refused(kind: str, tmp_path: Path) -> None:
    c = tmp_path / "c"
    save_checkpoint(c, {"w": torch.arange(12.0).reshape(4, 3), "b": torch.ones(2), "lr": 0.5})
    damage, message = DAMAGE[kind]
    damage(c)
    state = {"w": torch.zeros(4, 3), "b": torch.zeros(2), "lr": 0.0}
    with pytest.raises(UserError, match=message) as caught:
        load_checkpoint(c, state)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert not (tmp_path / "boom").exists()


def test_a_rewritten_but_honest_manifest_still_loads(tmp_path: Path) -> None:
    """The cases above fail for their reason, not because rewriting breaks the file."""
    save_checkpoint(tmp_path / "c", {"w": torch.arange(12.0).reshape(4, 3), "lr": 0.5})
    rewrite(tmp_path / "c", lambda m: m["values"].update(lr=0.25))
    state = {"w": torch.zeros(4, 3), "lr": 0.0}
    load_checkpoint(tmp_path / "c", state)
    assert state["lr"] == 0.25 and torch.equal(state["w"], torch.arange(12.0).reshape(4, 3))
    # And the pickles above would have been seen, had anyone read them.
    pickle.loads(bomb(tmp_path / "c"))
    assert (tmp_path / "boom").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_checkpoint(tmp_path / "nothing", {})


# -- full disks and kills ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; skips where mounting is not allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount a tmpfs here; the RLIMIT_FSIZE test covers the same path")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk_leaves_the_previous_checkpoint(small_disk: Path) -> None:
    small = {"w": torch.randn(2**18)}
    save_checkpoint(step_folder(small_disk, 1), small, step=1)
    with pytest.raises(UserError, match=r"00002: No space left on device \(.* MiB free.*8\.0 MiB were") as e:
        save_checkpoint(step_folder(small_disk, 2), {"w": torch.randn(2**21)}, step=2)
    assert "\n" not in str(e.value)
    assert names(small_disk) == ["step-00000001"]
    loaded = {"w": torch.zeros(2**18)}
    load_checkpoint(latest(small_disk) or "", loaded)
    assert torch.equal(loaded["w"], small["w"])
    save_checkpoint(step_folder(small_disk, 2), small, step=2)


def test_file_size_limit_is_a_user_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(UserError, match=r"File too large.*earlier checkpoints are untouched"):
            save_checkpoint(tmp_path / "c", {"w": torch.zeros(2**20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        save_checkpoint(tmp_path / "file" / "c", {"w": torch.zeros(2)})


KILLED = """
import sys, torch
from types import SimpleNamespace
from shoestring.state.checkpointer import Checkpointer
model = torch.nn.Linear(4, 2)
sgd = torch.optim.SGD(model.parameters(), lr=1.0)
run = SimpleNamespace(trained_only=False, step=0, model=model, optimizer=sgd, mesh=None, log=None)
class Slow:
    def state_dict(self):
        return {"big": torch.full((2**23,), float(run.step))}
c = Checkpointer(sys.argv[1], every=1)
while True:
    run.step += 1
    c.after_step(run, {"slow": Slow()})
    print(run.step, flush=True)
"""


def stop_while_saving(process: subprocess.Popen[str], folder: Path) -> int:
    """Stop the process while the part of a third or later step is half written; that step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        parts = [p for p in folder.glob(f"{NEW}step-*/{PART}") if not p.match(f"{NEW}step-0000000[12]/*")]
        if parts:
            os.kill(process.pid, signal.SIGSTOP)
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.0005)
            if parts[0].exists() and not (parts[0].parent / MANIFEST).exists():
                return int(parts[0].parent.name[-8:])
            os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.0005)
    raise AssertionError("never met it while saving")


def test_kill_while_saving_then_the_previous_checkpoint_is_found(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = WarmPopen(command, stdout=subprocess.DEVNULL, text=True)
    try:
        step = stop_while_saving(process, tmp_path)
    finally:
        process.kill()
        process.wait()
    found = latest(tmp_path)
    assert found == step_folder(tmp_path, step - 1)
    SafeReader(found).verify()

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = SimpleNamespace(trained_only=False, step=0, model=model, optimizer=optimizer, mesh=None, log=None)
    big = SimpleNamespace(big=torch.zeros(2**23))
    big.state_dict, big.load_state_dict = lambda: {"big": big.big}, lambda state: None
    again = Checkpointer(tmp_path, every=1)
    assert again.resume(run, {"slow": big}) and run.step == step - 1
    assert optimizer.param_groups[0]["lr"] == 1.0 and bool((big.big == step - 1).all())
    run.step = step
    again.save(run, {"slow": big})
    assert names(tmp_path) == [step_folder(tmp_path, n).name for n in (step - 1, step)]


def test_a_pipe_in_the_place_of_a_manifest_is_no_hang(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    os.mkfifo(tmp_path / "step" / MANIFEST)
    with pytest.raises(UserError, match="is a pipe"):
        read_manifest(tmp_path / "step")
