"""Samples of fine-tuning as tokens, and SampleData: which of them a training step sees.

A sample is the tokens of one example and which of them are learned. SampleData packs whole samples into rows of
`context` tokens, best fit first; each row says where its samples begin and end (`Micro.bounds`), so that attention and
positions stay within a sample, and a packed row has the gradients of its samples alone.

Which rows a step has is a pure function of (seed, epoch, step), as in data.py. The first step has the longest samples:
where memory does not suffice, it runs out at once. A preference pair is a unit of two samples that are never parted.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from shoestring.errors import UserError
from shoestring.model.tokenizer import Tokenizer
from shoestring.train.data import rows_per_pass
from shoestring.train.examples import Example, TrainOn, render
from shoestring.train.step import IGNORED, Micro

TooLong = Literal["error", "cut", "drop"]
WINDOW = 4096  # units that are packed together: of an epoch in random order
_BATCH = 256  # examples that are encoded at a time


@dataclass(frozen=True)
class Samples:
    """Token ids end to end, which of them are learned, and where samples begin. `per_unit`: 2 for preference pairs."""

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray  # [samples + 1]
    per_unit: int = 1

    @property
    def num_units(self) -> int:
        return (len(self.starts) - 1) // self.per_unit

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that each unit takes in a row: a sample of n tokens has n - 1 targets."""
        return (np.diff(self.starts) - 1).reshape(-1, self.per_unit).sum(1)

    @property
    def fingerprint(self) -> str:
        hashed = hashlib.blake2b(digest_size=16)
        for array in (self.tokens, self.learned, self.starts):
            hashed.update(np.ascontiguousarray(array).tobytes())
        return hashed.hexdigest()


@dataclass
class Encoding:
    """What happened while encoding."""

    num_cut: int = 0
    num_dropped: int = 0


def encode_examples(
    examples: Iterable[Example],
    tokenizer: Tokenizer,
    *,
    context: int,
    train_on: TrainOn = "assistant",
    too_long: TooLong = "error",
    pairs: bool = False,
    held_out: float = 0.0,
    encoding: Encoding | None = None,
) -> tuple[Samples, Samples]:
    """The samples to train on, and those held out: a part of about `held_out`, chosen by a hash of their tokens."""
    encoding = encoding or Encoding()
    kept: tuple[list[list[_Encoded]], list[list[_Encoded]]] = ([], [])
    left = iter(examples)
    while batch := list(islice(left, _BATCH)):
        for example in batch:
            if example.is_pair != pairs:
                raise UserError(
                    f"{example.where} is {'a' if example.is_pair else 'no'} preference pair; objective=dpo learns from "
                    "prompt, chosen and rejected, and objective=sft from the other kinds"
                )
        for example, unit in zip(batch, _encode(batch, tokenizer, train_on), strict=True):
            length = sum(len(ids) - 1 for ids, _ in unit)
            if length > context and too_long != "cut":
                if too_long == "error":
                    raise UserError(
                        f"{example.where} has {length:,} tokens, more than context={context:,}; give a larger context, "
                        "too_long=cut or too_long=drop"
                    )
                encoding.num_dropped += 1
                continue
            if length > context:
                encoding.num_cut += 1
                unit = [(ids[: context // len(unit) + 1], learned[: context // len(unit) + 1]) for ids, learned in unit]
            if not all(learned[1:].any() for _, learned in unit):  # the answer was cut off
                encoding.num_dropped += 1
                continue
            digest = hashlib.blake2b(b"".join(ids.tobytes() for ids, _ in unit), digest_size=8).digest()
            kept[int.from_bytes(digest, "big") < held_out * 2**64].append(unit)
    if not kept[0] and not kept[1]:
        dropped = f": {encoding.num_dropped:,} were dropped" if encoding.num_dropped else ""
        raise UserError(f"there is no sample to learn from{dropped}; give other data, or a larger context")
    if not kept[0]:
        kept[0].extend(kept[1])
        kept[1].clear()
    train, val = (_joined(units, 2 if pairs else 1) for units in kept)
    return train, val


_Encoded = tuple[np.ndarray, np.ndarray]  # ids, and which are learned


def _encode(batch: list[Example], tokenizer: Tokenizer, train_on: TrainOn) -> Iterator[list[_Encoded]]:
    """Each example's answers; texts of one kind are encoded together."""
    rendered = [[render(e, answer, tokenizer, train_on) for answer in e.answers] for e in batch]
    flat = [one for unit in rendered for one in unit]
    encoded: list[_Encoded | None] = [None] * len(flat)
    for ends in (False, True):
        places = [i for i, one in enumerate(flat) if one.ends == ends]
        found = tokenizer.encode_with_places([flat[i].text for i in places], special=ends) if places else []
        for i, (ids, offsets) in zip(places, found, strict=True):
            encoded[i] = _learned(ids, offsets, flat[i].spans, tokenizer.eos_id if ends else None)
    rest = iter(encoded)
    for unit in rendered:
        yield [one for one in islice(rest, len(unit)) if one is not None]


def _learned(ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]], end: int | None) -> _Encoded:
    """A token is learned that stands for any character of a span. `end` follows the text and is learned."""
    start, stop = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    learned = np.zeros(len(ids), dtype=bool)
    for lo, hi in spans:
        learned |= (start < hi) & ((stop > lo) | (start >= lo))
    tokens = np.array(ids, dtype=np.int64)
    if end is not None and (not ids or ids[-1] != end):
        tokens, learned = np.append(tokens, end), np.append(learned, True)
    elif end is not None:
        learned[-1] = True  # a tokenizer that adds the end itself
    return tokens, learned


def _joined(units: list[list[_Encoded]], per_unit: int) -> Samples:
    flat = [one for unit in units for one in unit]
    empty: _Encoded = np.zeros(0, np.int64), np.zeros(0, bool)
    tokens, learned = (np.concatenate(arrays) for arrays in zip(*(flat or [empty]), strict=True))
    starts = np.cumsum([0, *(len(ids) for ids, _ in flat)])
    return Samples(tokens.astype(np.int32), learned, starts, per_unit)


def pack_rows(lengths: np.ndarray, units: np.ndarray, context: int) -> list[list[int]]:
    """Units into rows of at most `context` tokens: the longest first, each into the fullest row that has room."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, row), sorted
    for unit in units[np.argsort(-lengths[units], kind="stable")]:
        length = int(lengths[unit])
        at = bisect.bisect_left(free, (length, -1))
        if at == len(free):
            row, room = len(rows), context
            rows.append([])
        else:
            room, row = free.pop(at)
        rows[row].append(int(unit))
        bisect.insort(free, (room - length, row))
    return rows


class SampleData:
    """`Data` (step.py) of samples: `batch` rows per step over all ranks, `micro` rows per pass on one."""

    def __init__(
        self,
        samples: Samples,
        *,
        context: int,
        batch: int,
        micro: int | None = None,
        seed: int = 0,
        pack: bool = True,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        self.micro = rows_per_pass(batch, micro, dp_size)
        self.samples, self.context, self.batch, self.seed, self.pack = samples, context, batch, seed, pack
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self._lengths = samples.lengths
        self.longest = int(np.diff(samples.starts).max()) - 1
        self._rows = lru_cache(maxsize=2)(self._draw_rows)  # a step may begin in one epoch and end in the next
        self._ends: list[int] = []  # of each epoch: the number of its last row, and one

    def num_rows(self, epochs: int) -> int:
        while len(self._ends) < epochs:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self._rows(len(self._ends))))
        return self._ends[epochs - 1]

    def num_steps(self, epochs: int) -> int:
        return -(-self.num_rows(epochs) // self.batch)

    def _draw_rows(self, epoch: int) -> list[list[int]]:
        raw = np.random.Philox(key=np.array([self.seed % 2**64, epoch], dtype=np.uint64))
        order = np.argsort(raw.random_raw(self.samples.num_units), kind="stable")
        rows = [[int(unit)] for unit in order]
        if self.pack:
            windows = [order[i : i + WINDOW] for i in range(0, len(order), WINDOW)]
            packed = [row for units in windows for row in pack_rows(self._lengths, units, self.context)]
            rows = [packed[i] for i in np.argsort(raw.random_raw(len(packed)), kind="stable")]
        if epoch == 0:
            longest = sorted(range(len(rows)), key=lambda i: -max(self._lengths[unit] for unit in rows[i]))[
                : self.batch
            ]
            first = set(longest)
            rows = [*(rows[i] for i in longest), *(row for i, row in enumerate(rows) if i not in first)]
        return rows

    def row(self, number: int) -> list[int]:
        """The units of a row in the endless list of all epochs."""
        epoch = 0
        while number >= self.num_rows(epoch + 1):
            epoch += 1
        return self._rows(epoch)[number - (self.num_rows(epoch) if epoch else 0)]

    def step(self, step: int) -> list[Micro]:
        """This rank's micro-batches of a step."""
        own = self.batch // self.dp_size
        first = step * self.batch + self.dp_rank * own
        rows = [self.row(number) for number in range(first, first + own)]
        return [self._cut(rows[i : i + self.micro]) for i in range(0, own, self.micro)]

    def once(self) -> Iterator[Micro]:
        """Every unit once, in order, on this rank alone or its share of them; ranks get equally many passes."""
        units = np.arange(self.samples.num_units)
        rows = pack_rows(self._lengths, units, self.context) if self.pack else [[int(unit)] for unit in units]
        each = self.micro * self.dp_size
        for lo in range(0, len(rows), each):
            mine = rows[lo + self.dp_rank * self.micro : min(lo + each, lo + (self.dp_rank + 1) * self.micro)]
            yield self._cut(mine or [[]])

    def _cut(self, rows: list[list[int]]) -> Micro:
        """Rows of units as tensors: padded behind the last sample, the padding a segment of its own."""
        per_unit, starts = self.samples.per_unit, self.samples.starts
        width = self.context if self.pack else -(-max(1, *(int(self._lengths[row].sum()) for row in rows)) // 8) * 8
        tokens, targets = np.zeros((len(rows), width), np.int64), np.full((len(rows), width), IGNORED, np.int64)
        index, bounds, first = np.zeros((len(rows), width), np.int64), [0], []
        for r, row in enumerate(rows):
            at = 0
            for sample in (unit * per_unit + i for unit in row for i in range(per_unit)):
                lo, hi = int(starts[sample]), int(starts[sample + 1])
                n = hi - lo - 1
                tokens[r, at : at + n] = self.samples.tokens[lo : hi - 1]
                counted = self.samples.learned[lo + 1 : hi]
                targets[r, at : at + n][counted] = self.samples.tokens[lo + 1 : hi][counted]
                index[r, at : at + n] = np.arange(lo + 1, hi)
                first.append(len(bounds) - 1)
                at += n
                bounds.append(r * width + at)
            if bounds[-1] != (r + 1) * width:
                bounds.append((r + 1) * width)
        pairs = torch.tensor(first).view(-1, 2) if per_unit == 2 else None
        # Empty segments behind the last one: few different shapes, whatever is packed.
        bounds += [bounds[-1]] * (-(len(bounds) - 1) % 32)
        return Micro(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            torch.from_numpy(index),
            bounds_S=torch.tensor(bounds, dtype=torch.int32),
            pairs_P2=pairs,
            longest=width,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the step that decides its rows."""
        return {
            "fingerprint": self.samples.fingerprint,
            "context": self.context,
            "batch": self.batch,
            "seed": self.seed,
            "pack": self.pack,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError for a state under which the steps so far saw other rows."""
        for key, ours in self.state_dict().items():
            if state.get(key) != ours:
                what = "the data, its template or its tokenizer" if key == "fingerprint" else key
                raise UserError(
                    f"cannot resume: {what} changed since the checkpoint ({key} was {state.get(key)}, is {ours}); "
                    "resume with the same data, context, batch, pack and seed"
                )
