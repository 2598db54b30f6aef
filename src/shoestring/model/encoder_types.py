"""Which folders hold an encoder, told by config.json alone, without torch; encoder.py loads them."""

from __future__ import annotations

from pathlib import Path

from shoestring.json_files import read_object

# What transformers computes without code of the model's own, and what has no causal mask.
TEXT_TYPES = (
    *("albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "ernie", "modernbert", "mpnet", "roberta"),
    *("roformer", "xlm-roberta"),
)
IMAGE_TYPES = ("beit", "deit", "dinov2", "vit")


def encoder_type(folder: Path) -> str | None:
    """The model_type of a folder with an encoder; None for other folders."""
    file = folder / "config.json"
    kind = read_object(file).get("model_type") if file.is_file() else None
    return kind if kind in (*TEXT_TYPES, *IMAGE_TYPES) else None
