"""A model that one experiment trains for another: a Hugging Face folder that also states its training corpus.

experiments/sparse24_quality --keep writes one, experiments/lowbit_quality --kept shrinks it. The folder has only the
path of the corpus, which must still have the same tokens. Every training makes another model, even with the same seed
and text; `weights` in the result lines identifies it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from experiments.python_corpus import open_prepared
from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.model import Decoder, load_model, save_model
from shoestring.train.shards import Corpus

TRAINED = "trained.json"


def save_trained(folder: Path, model: Decoder, corpus: Corpus, *, mesh: Mesh, seed: int, tokens: int) -> None:
    """`tokens`: number of training tokens, repetitions included."""
    save_model(folder, model, corpus.tokenizer, mesh=mesh)
    if not (corpus.folder / "tokenizer.json").is_file():
        corpus.tokenizer.save(corpus.folder)  # else it could not be opened by its folder alone
    trained = {
        "seed": seed,
        "tokens": tokens,
        "corpus": str(corpus.folder.absolute()),
        "fingerprint": corpus.train.fingerprint,
    }
    (folder / TRAINED).write_text(json.dumps(trained, indent=1) + "\n", encoding="utf-8")


def open_trained(folder: Path, device: str) -> tuple[Decoder, Corpus, dict[str, Any]]:
    """The model, its corpus, and the settings for its result lines."""
    try:
        trained = json.loads((folder / TRAINED).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no {TRAINED}: it is not a model that a bench kept (--keep)") from error
    corpus = open_prepared(trained["corpus"])
    if corpus.train.fingerprint != trained["fingerprint"]:
        raise UserError(f"{corpus.folder} is not the corpus any more that {folder} was trained on")
    model = load_model(folder, device=device).model
    told = {
        "model_tokens": trained["tokens"],
        "model_seed": trained["seed"],
        "parameters": model.spec.num_params(),
        "vocabulary": model.spec.vocab_size,
        "corpus": trained["fingerprint"][:8],
        "weights": fingerprint(model)[:8],
    }
    return model, corpus, told


def fingerprint(model: Decoder) -> str:
    """A hash of its weights, on any device."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
