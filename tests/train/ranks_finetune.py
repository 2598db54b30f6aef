"""Runs on every rank: shoestring finetune on several meshes.

ranks_finetune.py '[["model=...", "data=...", "mesh.tp=2", ...], ...]'
"""

from __future__ import annotations

import json
import sys

from shoestring.config import apply_overrides
from shoestring.recipes.train import finetune

if __name__ == "__main__":
    for settings in json.loads(sys.argv[1]):
        finetune.main(apply_overrides(finetune.Config, settings))
