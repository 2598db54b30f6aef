"""Finished blocks of a quantization on disk, so that a killed run goes on at the next block.

One safetensors file a block: its weights as chosen (and whatever a method folded into norms), the grids, and
the layers' errors as JSON in the header. A file is written beside its place and renamed: what is there is
whole. A run that goes on gives the same model, bit for bit, as one that never stopped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from shoestring.errors import UserError, out_of_memory
from shoestring.formats import Parts

if TYPE_CHECKING:
    from shoestring.shrink.quantize import LayerError


@dataclass(frozen=True)
class BlockFiles:
    folder: Path

    def path(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.safetensors"

    def count(self) -> int:
        """Blocks that are finished: 0 up to the first file that is not there."""
        index = 0
        while self.path(index).is_file():
            index += 1
        return index

    def save(
        self,
        index: int,
        block: nn.Module,
        grids: dict[str, Parts],
        errors: list[LayerError],
        notes: dict[str, float] | None = None,
    ) -> None:
        tensors = {f"block:{name}": t.detach().contiguous() for name, t in block.state_dict().items()}
        for layer, grid in grids.items():
            tensors.update({f"grid:{layer}:{part}": t.contiguous() for part, t in grid.items()})
        temp = self.path(index).with_suffix(".temp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            told = {"errors": json.dumps([asdict(e) for e in errors]), "notes": json.dumps(notes or {})}
            save_file(tensors, temp, metadata=told)
            temp.replace(self.path(index))
        except (OSError, SafetensorError) as error:
            temp.unlink(missing_ok=True)
            raise UserError(
                f"cannot write block {index} to {self.folder}: {error}; make room and go on with resume="
                f"{self.folder.parent}"
            ) from error

    def notes(self, index: int) -> dict[str, float]:
        """What `save` was told beside the errors."""
        with safe_open(self.path(index), framework="pt") as f:
            return dict(json.loads(f.metadata().get("notes", "{}")))

    def load(self, index: int, block: nn.Module) -> tuple[dict[str, Parts], list[LayerError]]:
        """Fill the block with what was chosen; returns grids and errors as `quantize_block` does."""
        from shoestring.shrink.quantize import LayerError

        path = self.path(index)
        device = next(block.parameters()).device
        state: Parts = {}
        grids: dict[str, Parts] = {}
        try:
            with safe_open(path, framework="pt", device=str(device)) as f:
                for key in f.keys():  # noqa: SIM118 - no dict
                    kind, name, *part = key.split(":")
                    if kind == "block":
                        state[name] = f.get_tensor(key)
                    else:
                        grids.setdefault(name, {})[part[0]] = f.get_tensor(key)
                errors = [LayerError(**e) for e in json.loads(f.metadata()["errors"])]
            block.load_state_dict(state)
        except (OSError, SafetensorError, RuntimeError, KeyError, TypeError, ValueError) as error:
            if out_of_memory(error):  # the file is good
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"{path} cannot be used ({reason}): delete it and go on, the block is then done again"
            ) from error
        return grids, errors
