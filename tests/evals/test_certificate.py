"""Certificates of exported models: what is compared in transformers, what makes one fail, and llama.cpp's."""

from __future__ import annotations

import hashlib
import json
import shutil
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from torch import Tensor

from shoestring.cli.app import run_cli
from shoestring.errors import UserError
from shoestring.evals import certificate
from shoestring.evals.certificate import ExportTarget, certify, compare, paragraph
from shoestring.formats import convert, pack, parse_format
from shoestring.model import Tokenizer, export, load_model, save_model
from shoestring.model.export import export_model
from tiny import LLAMA, chat_tokenizer, random_model

pytest.importorskip("transformers")

SPEC = replace(LLAMA, d_model=64, head_dim=16, d_ff=96, max_positions=256, bos_id=0, eos_id=0)


def tokenizer() -> Tokenizer:
    made = chat_tokenizer()
    made.backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return Tokenizer(made.backend, special=made.special, chat_template=made.chat_template)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("certificate") / "model"
    save_model(place, random_model(replace(SPEC, vocab_size=tokenizer().vocab_size)), tokenizer())
    (place.parent / "config.json").write_text('{"recipe": "train/dense", "config": {}}')  # of a run
    return place


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, loaded = tmp_path_factory.mktemp("packed") / "model", load_model(folder)
    convert(loaded.model, [("*", parse_format("int4:sym:g32"))])
    pack(loaded.model)
    save_model(place, loaded.model, loaded.tokenizer)
    return place


def test_a_plain_folder_in_transformers(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    (tmp_path / "words.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    arguments = ["export", str(folder), str(out), "--certify", "--text", str(tmp_path / "words.txt")]
    assert run_cli(arguments) == 0
    told = capsys.readouterr().out
    found = json.loads((out / "certificate.json").read_text())
    assert found["target"] == "transformers" and found["failed"] == []
    assert 0 <= found["logits"]["largest_difference"] < 1e-3 and found["logits"]["same_choice"] == 1.0
    assert found["greedy"]["equal"] == certificate.NUM_NEW
    assert found["tokenizer"] == {"compared": True, "equal": True}
    assert found["chat_template"] == {"compared": True, "equal": True}
    assert found["stop_tokens"]["ours"] == found["stop_tokens"]["theirs"] and len(found["stop_tokens"]["ours"]) == 2
    assert found["export"]["largest_difference"] > 0.001  # bf16
    assert {"shoestring", "torch", "transformers"} <= set(found["versions"])
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert found["source"] == folder.parent.name and found["source_sha256"] == {"model.safetensors": digest}
    card = (out / "README.md").read_text()
    assert f"from `{folder.parent.name}` (sha256: model.safetensors {digest[:12]})" in card
    assert (
        card.startswith("# out\n")
        and "Largest difference of a logit" in card
        and "Chat template: rendered alike" in card
    )
    assert "certificate.json" in told and "Largest difference" in told
    assert load_model(out).spec == load_model(folder).spec


def test_scores_with_a_cap(tmp_path: Path) -> None:
    """Gemma 2: with torch's fused attention `transformers` leaves the cap out, which is no fault of the export."""
    words = tokenizer()
    gemma = {"norm": "rms_offset", "norm_placement": "both", "act": "geglu_tanh", "scaled_embeddings": True}
    caps = {"attn_softcap": 0.5, "logit_softcap": 30.0, "sliding_window": 64, "full_layers": (1,), "attn_scale": 0.25}
    spec = replace(SPEC, vocab_size=words.vocab_size, model_type="gemma2", tied=True, norm_eps=1e-6, **gemma, **caps)
    source = save_model(tmp_path / "model", random_model(spec), words)
    exported = export_model(source, tmp_path / "out", dtype=torch.float32)
    found = certify(exported)
    assert found["failed"] == [] and "eager" in found["note"] and "eager" in paragraph(found)


def test_a_compressed_folder_and_one_without_words(packed: Path, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    found = certify(export_model(packed, tmp_path / "ct", "compressed-tensors", torch.float32))
    assert found["target"] == "transformers with compressed-tensors"
    assert found["failed"] == [] and found["export"]["largest_difference"] == 0
    assert "bit for bit" in paragraph(found) and "compressed-tensors" in paragraph(found)

    save_model(tmp_path / "mute", load_model(folder).model)
    found = certify(export_model(tmp_path / "mute", tmp_path / "out", dtype=torch.float32))
    assert found["tokenizer"] == {"compared": False} and found["failed"] == [] and found["tokens"] == 128


class Wrong(ExportTarget):
    """The exported model itself, with one thing wrong."""

    name, allowed, packages = "wrong", 1e-3, ("torch",)

    def __init__(self, right: ExportTarget, what: str) -> None:
        self._right, self._what = right, what

    def encode(self, text: str) -> list[int] | None:
        ids = self._right.encode(text)
        return ids[:-1] if self._what == "ids" else ids

    def logits(self, ids: Sequence[int]) -> Tensor:
        right = self._right.logits(ids)
        return {"logits": right * 1.01, "nan": right * float("nan"), "greedy": right}.get(self._what, right)

    def greedy(self, ids: Sequence[int], num_new: int) -> list[int]:
        return [1] * num_new if self._what == "greedy" else self._right.greedy(ids, num_new)

    def render(self, messages: Sequence[Any]) -> str | None:
        return None if self._what == "chat" else self._right.render(messages)

    def stops(self) -> set[int]:
        return set() if self._what == "stops" else self._right.stops()


FAILS = {
    "ids": "other token ids",
    "logits": "logits differ by 0.01",
    "nan": "logits differ by nan",
    "greedy": "greedy text differs from token 1 on",
    "stops": "not all stop tokens are known",
    "nothing": None,
    "chat": "chat template is rendered otherwise",
}


def test_what_makes_a_certificate_fail(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = export_model(folder, tmp_path / "out")
    right = certificate.TransformersTarget(exported.path)
    for what, said in FAILS.items():
        monkeypatch.setattr(certificate, "open_target", lambda _, what=what: Wrong(right, what))
        found = compare(exported, certificate.TEXT[:80])
        assert [f for f in found["failed"] if said is not None and said in f] == found["failed"], what
        assert bool(found["failed"]) == (said is not None), what
    # The last, chat: the files are there all the same, and the command fails.
    with pytest.raises(UserError, match=r"is written, but wrong does not compute the same.*certificate\.json has"):
        certify(exported)
    assert "**Failed:**" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "certificate.json").read_text())["failed"] == found["failed"]


@pytest.mark.parametrize(
    ("more", "least"),
    [
        ({"dtype": torch.float32}, 4.0),
        ({"layout": "fp8"}, 1.0),
        ({"kind": "Q8_0"}, 34 / 32),
        ({"kind": "auto"}, 4.25 / 8),
    ],
)
def test_a_place_too_small_for_an_export_is_said_before_weights_are_read(
    more: dict[str, Any], least: float, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, usage = tmp_path / ("out.gguf" if "kind" in more else "out"), shutil.disk_usage(tmp_path)
    needed = int(load_model(folder).spec.num_params() * least)

    def read(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(export, "load_model", read)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match=r"cannot write .*out.*: it needs .* MB, the disk has .* MB left; free some"):
        export_model(folder, out, **more)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    with pytest.raises(AssertionError, match="weights were read"):
        export_model(folder, out, **more)
    assert list(tmp_path.iterdir()) == []


def test_one_model_at_a_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three used to be in memory together: the source, the exported files, and those in their target."""
    exported, alive, most = export_model(folder, tmp_path / "out"), [], 0

    def counted(function: Any) -> Any:
        def call(*given: Any) -> Any:
            nonlocal most
            found = function(*given)
            alive.append(weakref.ref(getattr(found, "model", found)))
            most = max(most, sum(one() is not None for one in alive))
            return found

        return call

    for name in ("load_as_written", "load_model", "open_target"):
        monkeypatch.setattr(certificate, name, counted(getattr(certificate, name)))
    assert certify(exported)["failed"] == []
    assert len(alive) == 3 and most == 1


def test_what_cannot_be_certified_is_said_before_the_export(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for arguments, said in (
        (["out.gguf", "--certify"], "pip install llama-cpp-python"),
        (["out", "--certify"], "pip install transformers"),
        (["out", "--as", "packed", "--certify"], "only shoestring reads packed folders"),
        (["out", "--text", "words.txt"], "only applies to --certify"),
    ):
        assert run_cli(["export", str(folder), str(tmp_path / arguments[0]), *arguments[1:]]) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1, told
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_in_llama_cpp(folder: Path, packed: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    exact = certify(export_model(packed, tmp_path / "exact.gguf"))
    assert exact["export"]["exact"] and exact["failed"] == [] and exact["logits_in_f32"]["relative"] < 1e-5
    assert exact["tokenizer"]["equal"] and exact["chat_template"]["equal"]
    assert (tmp_path / "exact.certificate.json").is_file() and (tmp_path / "exact.README.md").is_file()
    for kind in ("F32", "Q8_0", "Q5_1", "Q4_K_M"):
        found = certify(export_model(folder, tmp_path / f"{kind}.gguf", kind=kind))
        assert found["failed"] == [] and (kind != "F32" or found["logits"]["relative"] < 1e-5)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
