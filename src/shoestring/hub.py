"""Models of the Hugging Face hub by their id, `org/name`, fetched and uploaded through the package `huggingface_hub`,
which is optional (pip install 'shoestring[hub]').

Its cache, its sign-in and its settings are the library's: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT.
Only configs, tokenizers and safetensors are fetched: never a pickle, never code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from shoestring.errors import UserError

WANTED = (
    *("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "vocab.bpe", "encoder.json"),
    *("LICENSE*", "README.md"),
)
# The same weights again in other layouts, for other programs.
UNWANTED = ("consolidated*.safetensors", "original/*", "onnx/*", "openvino/*", "coreml/*", "flax_*", "tf_*")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ID = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:/(?P<file>[A-Za-z0-9._/-]+\.gguf))?(?:@(?P<revision>[A-Za-z0-9._/-]+))?"
)


class HubId(NamedTuple):
    repo: str  # org/name
    file: str | None  # one .gguf file of it
    revision: str | None


def hub_id(path: str | Path) -> HubId | None:
    """What a path that does not exist may name on the hub: org/name, org/name@revision or org/name/file.gguf. A path
    into a folder that exists is a path, so that a misspelt one is never sent anywhere."""
    text = str(path)
    found = _ID.fullmatch(text)
    if found is None or ".." in text or Path(text.partition("/")[0]).exists():
        return None
    if found["file"] is None and found["repo"].endswith((".gguf", ".safetensors", ".json", ".bin", ".pt", ".jsonl")):
        return None
    return HubId(found["repo"], found["file"], found["revision"])


@lru_cache(maxsize=64)  # commands look for their model more than once
def fetched(asked: HubId) -> Path:
    """The folder or .gguf file in the hub's cache, downloaded where it is not there; what goes wrong is one line."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ModuleNotFoundError:
        raise UserError(
            f"{asked.repo} does not exist on this machine; to take it from the Hugging Face hub, "
            "pip install 'shoestring[hub]', or download its folder yourself and give its path"
        ) from None
    try:
        if asked.file is not None:
            return Path(huggingface_hub.hf_hub_download(asked.repo, asked.file, revision=asked.revision))
        folder = Path(
            huggingface_hub.snapshot_download(
                asked.repo, revision=asked.revision, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)
            )
        )
    except errors.GatedRepoError:
        raise UserError(
            f"{asked.repo} is gated: accept its terms on the hub, then sign in with `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{asked.repo} has no revision {asked.revision!r} on the hub") from None
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise UserError(_not_cached(asked)) from None
        raise UserError(f"{asked.repo} has no file {asked.file} on the hub") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{asked.repo} exists neither on this machine nor on the hub; check its spelling, or sign in with "
            "`hf auth login` where it is private"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise UserError(_not_cached(asked)) from None
    except Exception as error:  # of the network, in the words of the library's own client
        raise UserError(
            f"{asked.repo} does not exist on this machine, and the hub did not give it: {_first_line(error)}"
        ) from None
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{asked.repo} has no safetensors files on the hub; pickled weights are never read, and a GGUF file is "
            f"named like {asked.repo}/FILE.gguf"
        )
    return folder


def upload(asked: HubId, folder: Path, files: Sequence[Path], card: str, *, private: bool, message: str) -> str:
    """Commit files of the folder and the card to the repository, which is made where there is none; returns its URL."""
    try:
        from huggingface_hub import CommitOperationAdd, HfApi, errors
    except ModuleNotFoundError:
        raise UserError("to push to the Hugging Face hub, pip install 'shoestring[hub]'") from None
    api = HfApi()
    names = {path.relative_to(folder).as_posix(): path for path in files}
    operations = [CommitOperationAdd(name, str(path)) for name, path in names.items() if name != "README.md"]
    operations.append(CommitOperationAdd("README.md", card.encode()))
    try:
        url = api.create_repo(asked.repo, private=private or None, exist_ok=True)
        if asked.revision is not None:
            api.create_branch(asked.repo, branch=asked.revision, exist_ok=True)
        api.create_commit(asked.repo, operations, commit_message=message, revision=asked.revision)
    except errors.OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set: unset it to push") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise UserError(
                f"the hub does not let you write to {asked.repo}: sign in with `hf auth login` or set HF_TOKEN to a "
                "token that may write, and check the name before the slash"
            ) from None
        raise UserError(f"the hub refused {asked.repo}: {_first_line(error)}") from None
    except Exception as error:  # of the network, in the words of the library's own client
        raise UserError(f"{asked.repo} was not pushed: {_first_line(error)}") from None
    return str(url)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _not_cached(asked: HubId) -> str:
    return (
        f"{asked.repo} is neither on this machine nor in the cache of the hub, which cannot be reached (or "
        "HF_HUB_OFFLINE is set); connect, or download it on another machine and give the folder's path"
    )
