"""Ids of the Hugging Face hub, against a stand-in hub on this machine; and what happens without it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoestring.errors import UserError
from shoestring.hub import HubId, fetched, hub_id
from shoestring.paths import find_model
from tiny import chat_tokenizer, served_model

SHA = "a" * 40
# In a process of its own: the library (which warm_process.py does not import) reads its settings when it is imported.
SCRIPT = """
import sys
from shoestring.errors import UserError
from shoestring.paths import find_model
for given in sys.argv[1:]:
    try:
        found = find_model(given)
        names = sorted(p.name for p in found.iterdir()) if found.is_dir() else [found.name]
        print("found", " ".join(names))
    except UserError as error:
        print("error", error)
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B", None, None)),
        ("org/name@v1.0", HubId("org/name", None, "v1.0")),
        ("org/name/sub/x-Q8_0.gguf@main", HubId("org/name", "sub/x-Q8_0.gguf", "main")),
        *((path, None) for path in ("name", "./org/name", "/org/name", "~/org/name", "a/b/c", "org/../name", "")),
        *((path, None) for path in ("org/model.gguf", "org/x.json", "-org/name", "org/na me", "org//name", "tests/x")),
    ],
)
def test_what_looks_like_an_id(given: str, found: HubId | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)  # tests/ exists here
    assert hub_id(given) == found


@contextlib.contextmanager
def stand_in_hub(repos: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Its URL and the paths that were asked for. `private/gated` is gated."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(self.path)
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                repo, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
                if repo == "private/gated":
                    return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
                if repo not in repos:
                    return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
                if revision not in ("main", SHA):
                    return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
                files = [str(p.relative_to(repos[repo])) for p in sorted(repos[repo].rglob("*")) if p.is_file()]
                told: Any = {"id": repo, "sha": SHA, "siblings": [{"rfilename": name} for name in files]}
                if parts[4:5] == ["tree"]:
                    sizes = {name: (repos[repo] / name).stat().st_size for name in files}
                    told = [{"type": "file", "path": n, "size": s, "oid": "b" * 40} for n, s in sizes.items()]
                return self.answer(200, json.dumps(told).encode(), {"Content-Type": "application/json"})
            file = repos.get("/".join(parts[:2]), Path("nowhere")) / "/".join(parts[4:])
            if not file.is_file():
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA})
            content = file.read_bytes()
            tag = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": SHA}
            return self.answer(200, content, tag)

        def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def run(tmp_path: Path, *given: str, script: str = SCRIPT, **env: str) -> list[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    settings = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    done = subprocess.run(
        [sys.executable, "-c", script, *given], env={**kept, **settings}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.usefixtures("warm_python")
def test_models_come_from_the_hub_and_then_from_its_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    from shoestring.model.folder import load_model, save_model

    there = tmp_path / "there"
    tokenizer = chat_tokenizer()
    save_model(there, served_model(tokenizer.vocab_size), tokenizer)
    for unwanted in ("pytorch_model.bin", "modeling_tiny.py", "consolidated.safetensors", "x.gguf"):
        (there / unwanted).write_bytes(b"GGUF")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    with stand_in_hub({"org/tiny": there, "org/pickled": pickled}) as (url, asked):
        wrong = ("org/missing", "private/gated", "org/tiny@v9", "org/tiny/none.gguf", "org/pickled")
        found, again, file, *errors = run(
            tmp_path, "org/tiny", "org/tiny@main", "org/tiny/x.gguf", *wrong, HF_ENDPOINT=url
        )
    names = set(found.split()[1:])
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not names & {"pytorch_model.bin", "modeling_tiny.py", "consolidated.safetensors", "x.gguf"}
    assert again == found and file == "found x.gguf"
    assert not any(path.endswith((".bin", ".py", "consolidated.safetensors")) for path in asked)
    said = (
        "neither on this machine nor on the hub",
        "is gated",
        "no revision 'v9'",
        "no file none.gguf",
        "no safetensors",
    )
    assert all(part in error for part, error in zip(said, errors, strict=True)), errors
    # The hub is gone; what it gave is in its cache.
    cached, missing = run(tmp_path, "org/tiny", "org/other", HF_ENDPOINT=url, HF_HUB_OFFLINE="1")
    assert cached == f"{found} x.gguf" and "nor in the cache" in missing
    (snapshot,) = (tmp_path / "hf").glob("hub/models--org--tiny/snapshots/*")
    assert load_model(snapshot).spec.vocab_size == tokenizer.vocab_size


def test_without_the_package_it_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    fetched.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'shoestring\[hub\]'"):
        find_model("org/name")
    assert "shoestring[hub]" in command("generate", "org/name", "hello", fails=True)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="runs/misspelt does not exist"):
        find_model("runs/misspelt")


# -- pushing -----------------------------------------------------------------------------------------

PUSH = """
import os, sys
from shoestring.cli.app import run_cli
for given in sys.argv[1:]:
    words = given.split()
    if "=" in words[0]:
        os.environ.update([words.pop(0).split("=")])
    code = run_cli(words)
    print("code", code, flush=True)
"""


@contextlib.contextmanager
def stand_in_uploads() -> Iterator[tuple[str, dict[str, dict[str, bytes]]]]:
    """A hub that takes commits: its URL, and the files of every repository and branch. As on the real one,
    weights go through LFS and small files into the commit. `other/...` belongs to somebody else."""
    repos: dict[str, dict[str, bytes]] = {}
    stored: dict[str, bytes] = {}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, told: Any = None) -> None:
            content = b"" if told is None else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_PUT(self) -> None:
            stored[self.path.rsplit("/", 1)[1]] = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(200)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.split("?")[0].strip("/")
            parts = path.split("/")
            if self.headers.get("Authorization") != "Bearer hf_good":
                return self.answer(401, {"error": "who are you"})
            if path == "api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                if name.startswith("other/"):
                    return self.answer(403, {"error": "not yours"})
                known = name in repos
                repos.setdefault(name, {"visibility": str(asked.get("visibility")).encode()})
                return self.answer(409 if known else 200, {"url": f"{url}/{name}"})
            if path == "api/validate-yaml":  # of the card, as the hub does before a commit
                head = yaml.safe_load(json.loads(body)["content"].split("---")[1])
                good = head["library_name"] == "shoestring" and isinstance(head["tags"], list)
                return self.answer(200 if good else 400, {"errors": [], "warnings": []})
            repo = "/".join(parts[2:4]) if parts[0] == "api" else "/".join(parts[:2]).removesuffix(".git")
            if "branch" in parts:
                repos[f"{repo}@{parts[-1]}"] = {}
                return self.answer(200, {})
            if "preupload" in parts:
                modes = {
                    f["path"]: "lfs" if f["path"].endswith("safetensors") else "regular"
                    for f in json.loads(body)["files"]
                }
                told = [{"path": k, "uploadMode": v, "shouldIgnore": False, "oid": None} for k, v in modes.items()]
                return self.answer(200, {"files": told})
            if path.endswith("info/lfs/objects/batch"):
                objects = [
                    {**o, "actions": {"upload": {"href": f"{url}/lfs/{o['oid']}", "header": {}}}}
                    for o in json.loads(body)["objects"]
                ]
                return self.answer(200, {"objects": objects, "transfer": "basic"})
            branch = parts[-1]
            files = repos[repo if branch == "main" else f"{repo}@{branch}"]
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = stored[value["oid"]]
                else:
                    files["message"] = value["summary"].encode()
            return self.answer(200, {"commitUrl": f"{url}/{repo}/commit/{SHA}", "commitOid": SHA, "success": True})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield url, repos
    finally:
        server.shutdown()
        server.server_close()


def shrunk_run(folder: Path, command: Any) -> Path:
    """A run that shrank a model, with evaluations and a file that is nobody's business."""
    from shoestring.model.folder import save_model

    tokenizer = chat_tokenizer()
    save_model(folder / "dense", served_model(tokenizer.vocab_size), tokenizer)
    (folder / "some.txt").write_text("The cat sat on the mat. " * 40)
    settings = ["text=some.txt", "max_tokens=64", "context=32", "run=small"]
    command("quantize", "dense", "int4:g16", "method=rtn", *settings)
    (folder / "small" / "model" / "notes.pkl").write_bytes(b"mine")
    return folder / "small"


@pytest.mark.usefixtures("warm_python")
def test_a_run_is_pushed_with_its_card(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    folder = shrunk_run(tmp_path, command)
    (folder / "model" / "1_Pooling").mkdir()  # as sentence-transformers keep it; a decoder's is pushed alike
    (folder / "model" / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with stand_in_uploads() as (url, repos):
        said = run(
            tmp_path,
            "push small me/dry --dry-run",
            "push small me/tiny --private",
            "push small me/tiny@v2",
            "push small other/tiny",
            "push small ../x",
            "HF_TOKEN=hf_bad push small me/tiny",
            script=PUSH,
            HF_ENDPOINT=url,
            HF_TOKEN="hf_good",
        )
    assert "me/dry" not in repos and any(line.startswith("would push: ") for line in said)
    assert [int(line.split()[1]) for line in said if line.startswith("code")] == [0, 0, 0, 2, 2, 2]
    files = repos["me/tiny"]
    assert files.pop("visibility") == b"private" and files.pop("message") == b"small, with Shoestring"
    model = folder / "model"
    wanted = {p.relative_to(model).as_posix() for p in model.rglob("*") if p.is_file() and p.suffix != ".pkl"}
    assert "1_Pooling/config.json" in wanted and set(files) == wanted | {"README.md"}
    assert all(content == (model / name).read_bytes() for name, content in files.items() if name != "README.md")
    assert {"config.json", "README.md"} <= set(repos["me/tiny@v2"])
    card = files["README.md"].decode()
    for part in (
        "library_name: shoestring\npipeline_tag: text-generation",
        "bits per weight over all tensors",
        "shoestring serve me/tiny",
        "| evaluation | some.txt | shrink/rtn |",
        "| after | int4:g16",
        "text some.txt, tokens 62, context 32",
        "| format | int4:g16 |",
        "torch 2.",
    ):
        assert part in card, part
    assert str(Path.home()) not in card


def test_what_cannot_be_pushed(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "nowhere does not exist" in command("push", "nowhere", "me/tiny", fails=True)
    assert "is not a name on the hub" in command("push", "nowhere", "tiny", fails=True)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert "is a GGUF file" in command("push", "x.gguf", "me/tiny", fails=True)
