"""`shoestring push RUN org/name`: a finished model to the Hugging Face hub, with a model card made from its run.

The card says what a reader needs to judge the model and to make it again: size and bits, the commands from the first
run to this one, the data, the settings that were changed, the evaluations with their conditions, versions and commit.
Everything in it is read from the run folders; what a run did not write down is not in the card. A README.md that lies
beside the weights is the user's own card and is uploaded as it is.

Only the model is uploaded: no checkpoints, no logs. The user's home folder is written as ~ in commands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.cli.inspect import folder_weights
from shoestring.errors import UserError, shown
from shoestring.evals.model_row import megabytes_on_disk
from shoestring.hub import HubId, hub_id, upload
from shoestring.json_files import read_object, read_text
from shoestring.model.folder import weight_files
from shoestring.paths import find_model
from shoestring.report import eval_table, flatten, markdown
from shoestring.runlog import lineage, read_config, read_evals
from shoestring.state.files import POOLING

DATA = {
    "data": "training data",
    "init_from": "started from",
    "calib": "calibration",
    "prompts": "prompts",
    "text": "evaluation",
}


MOST_CARD = 1 << 20  # bytes of a user's own card


@dataclass(frozen=True)
class Pushed:
    url: str
    files: list[str]
    card: str
    own_card: bool  # the user's, which was there


def push(given: str, repo: str, *, private: bool = False, dry_run: bool = False, message: str | None = None) -> Pushed:
    asked = hub_id(f"{repo}")
    if asked is None or asked.file is not None or Path(repo).exists():
        raise UserError(
            f"{shown(repo)} is not a name on the hub; write it as org/name or user/name, with @branch for a branch"
        )
    if not Path(given).expanduser().exists():
        raise UserError(f"{given} does not exist; give a run folder or a model folder of this machine")
    folder = model_of(Path(given).expanduser())
    if folder.is_file():
        raise UserError(
            f"{given} is a GGUF file; push takes folders: put it into a folder with a README.md of your own"
        )
    files = model_files(folder)
    own = (folder / "README.md").is_file()
    runs = lineage(Path(given).expanduser()) or lineage(folder)
    card = read_text(folder / "README.md", MOST_CARD) if own else model_card(folder, asked, runs)
    names = sorted({*(f.relative_to(folder).as_posix() for f in files), "README.md"})
    if dry_run:
        return Pushed("", names, card, own)
    said = message or f"{folder.parent.name if folder.name == 'model' else folder.name}, with Shoestring"
    return Pushed(upload(asked, folder, files, card, private=private, message=said), names, card, own)


def model_of(path: Path) -> Path:
    """The model folder of a path; of a run whose model was written elsewhere (out=), that place."""
    out = read_config(path).get("config", {}).get("out")
    return find_model(out if out and "recipe" in read_config(path) and not (path / "model").is_dir() else path)


def model_files(folder: Path) -> list[Path]:
    """What a reader of the model needs: weights, configs, tokenizer. Nothing else that may lie there."""
    weights = weight_files(folder)
    if not weights:
        raise UserError(f"{folder} has no safetensors files, so there is no model to push")
    others = [p for p in folder.iterdir() if p.suffix in (".json", ".jinja") or p.name in ("merges.txt", "vocab.txt")]
    others.append(folder / POOLING / "config.json")  # without it an encoder's vectors are pooled otherwise
    return sorted({*weights, *(p for p in others if p.is_file())})


# -- the card ------------------------------------------------------------------------------------------


def model_card(folder: Path, asked: HubId, runs: list[tuple[Path, dict[str, Any]]]) -> str:
    """Markdown with the hub's YAML header; `runs` made the model, oldest first."""
    packed = (folder / "shoestring.json").is_file()
    stored = folder_weights(folder)
    kinds = sorted({s.kind for s in stored})
    weights = sum(s.weights for s in stored)
    bits = sum(s.bits for s in stored) / max(1, weights)
    size = sum(f.stat().st_size for f in weight_files(folder)) / 1e6
    last = runs[-1][1] if runs else {}
    recipe = f" It was made by the recipe `{last['recipe']}`." if last else ""
    parts = [
        _header(folder, asked, runs, packed),
        f"# {asked.repo.partition('/')[2]}",
        f"{weights / 1e6:,.1f}M weights in {size:,.1f} MB, {bits:.2f} bits per weight over all tensors "
        f"({', '.join(kinds)}).{recipe}",
        _use(asked, packed),
    ]
    if runs:
        parts.append("## How it was made\n\n" + _code([_homeless(str(c.get("command", ""))) for _, c in runs]))
    parts += [_data(runs), _evaluation(runs), _settings(last), _versions(last)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(folder: Path, asked: HubId, runs: list[tuple[Path, dict[str, Any]]], packed: bool) -> str:
    lines = [f"library_name: {'shoestring' if packed else 'transformers'}", "pipeline_tag: text-generation"]
    first = runs[0][1].get("config", {}) if runs else {}
    source = hub_id(str(first.get("model") or first.get("init_from") or ""))
    if source is not None:
        lines += [f"base_model: {source.repo}"]
    model_type = read_object(folder / "config.json").get("model_type")
    tags = ["shoestring", *([str(model_type)] if isinstance(model_type, str) and model_type.isidentifier() else [])]
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _use(asked: HubId, packed: bool) -> str:
    commands = [f"pip install 'shoestring[hub,serve]'\nshoestring serve {asked.repo}"]
    text = "## Use\n\n" + _code(commands)
    if packed:
        return f"{text}\n\n`shoestring export {asked.repo} DIR` writes dense weights, which `transformers` loads."
    load = (
        f'from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained("{asked.repo}")'
    )
    return f"{text}\n\n```python\n{load}\n```"


def _data(runs: list[tuple[Path, dict[str, Any]]]) -> str:
    rows = []
    for _, config in runs:
        settings = config.get("config", {})
        for key, what in DATA.items():
            if settings.get(key):
                rows.append([what, _homeless(str(settings[key])), str(config["recipe"])])
    return "## Data\n\n" + markdown(["what for", "data", "recipe"], rows) if rows else ""


def _evaluation(runs: list[tuple[Path, dict[str, Any]]]) -> str:
    rows = read_evals(runs[-1][0] / "evals.jsonl") if runs else []
    if not rows:
        return ""
    table = eval_table([{k: v for k, v in row.items() if k != "time"} for row in rows])
    note = f"\n\n{table.note}" if table.note else ""
    return f"## Evaluation\n\n{table.markdown()}{note}"


def _settings(config: dict[str, Any]) -> str:
    changed, flat = config.get("changed"), flatten(config.get("config", {}))
    keys = [k for k in changed if k in flat] if isinstance(changed, list) else list(flat)
    rows = [[key, _homeless(str(flat[key]))] for key in keys]
    return "## Settings that differ from the defaults\n\n" + markdown(["setting", "value"], rows) if rows else ""


def _versions(config: dict[str, Any]) -> str:
    found = config.get("versions")
    if not isinstance(found, dict):
        return ""
    commit = f", commit {config['commit']}" if config.get("commit") else ""
    return (
        "## Versions\n\n"
        + ", ".join(f"{k} {v}" for k, v in found.items())
        + f"{commit}; started {config.get('started')}."
    )


def _code(lines: list[str]) -> str:
    return "```bash\n" + "\n".join(lines) + "\n```"


def _homeless(text: str) -> str:
    """Without the name of the user, which the path of a home folder has."""
    return re.sub(rf"{re.escape(str(Path.home()))}(?=/|$|\s)", "~", text)


def described(pushed: Pushed, folder: str) -> str:
    """What was or would be uploaded, in lines."""
    size = megabytes_on_disk(model_of(Path(folder).expanduser()))
    card = "your README.md" if pushed.own_card else "a card from the run"
    return f"{len(pushed.files)} files, {size:,.1f} MB, {card}: {', '.join(pushed.files)}"
