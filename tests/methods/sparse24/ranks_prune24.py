"""Runs on 2 gloo ranks (see test_prune24_ranks.py): the recipe in the current folder, with the given settings."""

from __future__ import annotations

import sys

from shoestring.cli.app import run_cli

if __name__ == "__main__":
    sys.exit(run_cli(["run", "shrink/prune24", *sys.argv[1:]]))
