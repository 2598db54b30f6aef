"""Apply a method to one block after the other, with finished blocks on disk: a killed run continues at the next block.

A block is one safetensors file: its chosen weights (and norms, where a method folds scales into them), the grids, and
the layers' errors as JSON in the header. It is written under a temporary name and renamed, so a file that exists is
complete. A resumed run gives the same model, bit for bit, as one that never stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from shoestring.errors import UserError, during, out_of_memory
from shoestring.formats import Parts
from shoestring.formats.convert import F, LayerTarget
from shoestring.model.blocks import BlocksModel, block_prefixes
from shoestring.shrink.calibrate import BlockStep
from shoestring.shrink.chosen_grid import LayerError

BlockProgress = Callable[[int, int, float], None]  # blocks done, blocks, error
Step = TypeVar("Step", bound=BlockStep)


@dataclass(frozen=True)
class FinishedBlock:
    """The result of a method for one block, besides the weights in it; keys are layer names in the model."""

    grids: dict[str, Parts] = field(default_factory=dict)  # or other state of the layers' Formats
    errors: list[LayerError] = field(default_factory=list)
    notes: dict[str, float] = field(default_factory=dict)  # of block-wise training: errors "before" and "after"

    @property
    def error(self) -> float:
        """For progress: that of the block's outputs, or the mean over its layers."""
        known = [e.output_error for e in self.errors if e.output_error is not None]
        return self.notes.get("after", sum(known) / max(1, len(known)))


@dataclass(frozen=True)
class BlockFiles:
    folder: Path

    def path(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.safetensors"

    def count(self) -> int:
        """The number of finished blocks: the index of the first missing file."""
        index = 0
        while self.path(index).is_file():
            index += 1
        return index

    def save(self, index: int, block: nn.Module, made: FinishedBlock) -> None:
        tensors = {f"block:{name}": t.detach().contiguous() for name, t in block.state_dict().items()}
        for layer, grid in made.grids.items():
            tensors.update({f"grid:{layer}:{part}": t.contiguous() for part, t in grid.items()})
        temp = self.path(index).with_suffix(".temp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            header = {"errors": json.dumps([asdict(e) for e in made.errors]), "notes": json.dumps(made.notes)}
            save_file(tensors, temp, metadata=header)
            temp.replace(self.path(index))
        except (OSError, SafetensorError) as error:
            temp.unlink(missing_ok=True)
            raise UserError(
                f"cannot write block {index} to {self.folder}: {error}; make room and go on with resume="
                f"{self.folder.parent}"
            ) from error

    def load(self, index: int, block: nn.Module) -> FinishedBlock:
        """Fill the block with the chosen weights; returns what `save` was given."""
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
                notes = json.loads(f.metadata().get("notes", "{}"))
            block.load_state_dict(state)
        except (OSError, SafetensorError, RuntimeError, KeyError, TypeError, ValueError) as error:
            if out_of_memory(error):  # the file is good
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"{path} cannot be used ({reason}): delete it and go on, the block is then done again"
            ) from error
        return FinishedBlock(grids, errors, notes)


def finish_blocks(
    model: BlocksModel,
    targets: Sequence[LayerTarget[F]],
    steps: Iterable[Step],
    work: Callable[[Step, nn.Module, dict[str, F], str], FinishedBlock],
    files: BlockFiles | None,
    progress: BlockProgress | None,
) -> Generator[tuple[list[LayerTarget[F]], FinishedBlock], None, None]:
    """Call work(step, block, Formats of its layers, prefix of their names) for each step, or load the block from
    `files`.

    Yields (its targets, the finished block) while the block is still on its device. An error closes the walk,
    which offloads its block.
    """
    prefixes = block_prefixes(model)
    num_finished = files.count() if files is not None else 0
    try:
        for step in steps:
            block, prefix = model.blocks[step.index], prefixes[step.index]
            own = [t for t in targets if t.owner is block]
            if files is not None and step.index < num_finished:
                made = files.load(step.index, block)
            else:
                with during(f"block {step.index}"):
                    made = work(step, block, {t.name.removeprefix(prefix): t.format for t in own}, prefix)
                if files is not None:
                    files.save(step.index, block, made)
            yield own, made
            if progress is not None:
                progress(step.index + 1, len(model.blocks), made.error)
    finally:
        if isinstance(steps, Generator):
            steps.close()
