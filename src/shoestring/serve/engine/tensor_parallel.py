"""One engine over several processes, each with a shard of every matrix.

The first process has the engine: requests, schedule, drafts, sampling. The others hold a shard of the weights and of
the KV cache and follow. Before each forward the first process sends what to compute (the `Batch`, as integers); then
all of them run it and meet in the collectives inside the layers (model/parallel.py). Nothing is decided twice, so
clocks and random numbers may differ.

    ranks = open_ranks()                     None on one process
    model = ranks.share(model)               cut a loaded model to this process's share
    if not ranks.first: ranks.follow(model)  returns when the first process is done
    else: engine = Engine(model, ranks=ranks) ... ranks.dismiss()
    ranks.close()

`shoestring generate`, `chat` and `serve` do this under torchrun. Draft models are not sharded: the first process runs
them alone. A process that fails, ends or is stopped leaves the others waiting in a forward, so the whole group ends
(rank_failure.py): every process stops with a line that says who failed and why.

Left out: fused steps and CUDA graphs (collectives in them), loading only a process's own shard from disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shoestring.errors import UserError, lost_peer
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.model.adapter_folder import AdapterFile
from shoestring.model.parallel import tensor_parallel_
from shoestring.model.skip import SkipSet, Watch
from shoestring.model.transformer import Decoder
from shoestring.serve.engine.adapters import AdapterBank
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.embedding import POOLINGS, Pooling, embedding_parts
from shoestring.serve.engine.logit_rules import TokenLogprob
from shoestring.serve.engine.rank_failure import LOST_AFTER_S, RankFailureWatch
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.serve.engine.weight_pull import BackgroundPull
from shoestring.serve.engine.weight_update import WeightTarget
from shoestring.state.reshard.version import WeightsVersion

WHOLE_MODEL = -1  # instead of the number of a skip set
PULL_S = 10.0  # that the others may take longer than the first process to pull their share
LEAVE_S = 10  # the most that leaving the group may take


class Order(IntEnum):
    OPEN = 1  # a new engine: blocks, positions per block
    SKIP = 2  # a skip set, as the bytes of its JSON; they are numbered in order of arrival
    FORWARD = 3
    SECONDS = 4  # measure a forward
    SCORE = 5  # log-probabilities of a prompt, the first part
    CLOSE = 6
    DISCARD = 7  # what is not finite in these blocks
    SCORE_ON = 8  # the next part of the last SCORE or EMBED
    EMBED = 9  # the vectors of some texts, the first part
    PULL = 10  # the weights of a published step, beside the work
    SWAP = 11  # write them, if every process has them: step, digest as bytes


def open_ranks(device: str = "auto", *, lost_after_s: float = LOST_AFTER_S) -> Ranks | None:
    """The processes that torchrun started, as one tensor-parallel group; None where there is one."""
    num = int(os.environ.get("WORLD_SIZE", "1"))
    return None if num == 1 else Ranks(open_mesh(MeshConfig(tp=num), device), lost_after_s)


class Ranks:
    def __init__(self, mesh: Mesh, lost_after_s: float = LOST_AFTER_S) -> None:
        self.mesh = mesh
        axis = mesh.axis("tp")
        assert axis is not None
        self._axis: DeviceMesh = axis
        # A group of its own over the host, without a timeout: an idle server is silent for hours. A process that waits
        # here for one that is gone or stuck is ended by the watch.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self.failure_watch = RankFailureWatch(mesh.rank, mesh.world_size, self._share, lost_after_s=lost_after_s)

    def _share(self, numbers: list[int]) -> list[int]:
        shared = torch.tensor(numbers)
        dist.broadcast(shared, src=0, group=self._group)
        return shared.tolist()

    @property
    def first(self) -> bool:
        return self.mesh.is_main

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    def share(self, model: Decoder) -> Decoder:
        """Keep this process's share of a whole model, on this process's device; the same object."""
        asked = f"torchrun's {self.mesh.world_size} processes (--nproc-per-node)"
        tensor_parallel_(model, self._axis, asked=asked)
        return model.to(self.device)

    def dismiss(self) -> None:
        """From the first process: the others' `follow` returns."""
        self.send(Order.CLOSE, [])

    def close(self) -> None:
        """Leave the group, on every process. It ends by a signal where it cannot: a thread that waits in a collective
        would hold the process for ever."""
        signal.alarm(LEAVE_S)
        self.failure_watch.close()
        self.mesh.close()
        signal.alarm(0)

    def end(self) -> None:
        """The last thing the first process does."""
        signal.alarm(LEAVE_S)  # as in `close`
        if self.failure_watch.failed:  # the others have stopped; a message to them would wait for ever
            self.failure_watch.close()
            return
        with contextlib.suppress(RuntimeError):  # after an error the others may be gone already
            self.dismiss()
        self.close()

    @contextlib.contextmanager
    def lockstep(self) -> Iterator[None]:
        """Around what all processes compute together: an error in it ends all of them."""
        self.failure_watch.check()
        try:
            yield
        except Exception as error:
            self.failure_watch.announce(error)
            raise

    # -- messages -------------------------------------------------------------------------------------------
    def send(self, order: Order, numbers: Sequence[int]) -> None:
        dist.broadcast(torch.tensor([order, len(numbers)]), src=0, group=self._group)
        if numbers:
            dist.broadcast(torch.tensor(numbers), src=0, group=self._group)

    def _receive(self) -> tuple[Order, list[int]]:
        head = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(head, src=0, group=self._group)
        order, num = head.tolist()
        body = torch.zeros(num, dtype=torch.int64)
        if num:
            dist.broadcast(body, src=0, group=self._group)
        return Order(order), body.tolist()

    # -- the other processes -----------------------------------------------------------------------------------------
    def weight_target(self, model: Decoder) -> WeightTarget:
        """This process's share of the weights, for updates."""
        return WeightTarget(model, tp_rank=self.mesh.tp_rank, tp_size=self.mesh.tp)

    def adapters(self, model: Decoder) -> AdapterBank:
        """For this process's share of adapters."""
        return AdapterBank(model, self.mesh.tp_rank, self.mesh.tp)

    def all_have(self, mine: bool) -> bool:
        """Whether `mine` is true on every process."""
        flag = torch.tensor(int(mine))
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag)

    def _swap(self, step: int, digest: str, pull: BackgroundPull | None, runner: Runner | None) -> None:
        taken = None if pull is None else pull.take(step, digest, PULL_S)
        if self.all_have(taken is not None) and taken is not None and runner is not None:
            taken[0].write_()
            runner.weights_written(taken[1])

    @torch.no_grad()
    def follow(
        self, model: Decoder, pull: BackgroundPull | None = None, adapters: Mapping[str, AdapterFile] | None = None
    ) -> None:
        """Compute what the first process sends, until it closes. `pull`: where new weights come from; `adapters`: those
        that the first process loads, in its order."""
        runner: Runner | None = None
        skips: list[SkipSet] = []
        parts: Iterator[object] = iter(())
        while True:
            try:
                order, body = self._receive()
            except RuntimeError as error:
                reason = lost_peer(error) or error
                raise UserError(f"the first process is gone, so this one ends: {reason}") from None
            if order is Order.CLOSE:
                return
            with self.lockstep():
                if order is Order.OPEN:
                    num_blocks, block_size = body
                    runner, skips = Runner(model, BlockPool(num_blocks, block_size, grows=True)), []
                    runner.adapters = self.adapters(model)
                    for name, file in (adapters or {}).items():
                        runner.adapters.load(name, file)
                elif order is Order.SKIP:
                    skips.append(SkipSet.from_json(json.loads(bytes(body).decode())))
                elif order is Order.DISCARD:
                    assert runner is not None
                    runner.discard_nonfinite(body)
                elif order is Order.SCORE:
                    num_top, chunk, slot, *tokens = body
                    assert runner is not None
                    parts = runner.prompt_logprob_parts(tokens, num_top, chunk, slot)
                    next(parts)
                elif order is Order.EMBED:
                    pooling, chunk, num, *rest = body
                    lengths, ids = rest[:num], iter(rest[num:])
                    texts = [list(islice(ids, length)) for length in lengths]
                    parts = embedding_parts(model, texts, POOLINGS[pooling], chunk)
                    next(parts)
                elif order is Order.SCORE_ON:
                    next(parts)
                elif order is Order.PULL:
                    if pull is not None:
                        pull.begin(body[0])
                elif order is Order.SWAP:
                    self._swap(body[0], bytes(body[1:]).decode(), pull, runner)
                else:
                    assert runner is not None
                    skip = None if body[0] == WHOLE_MODEL else skips[body[0]]
                    if order is Order.SECONDS:
                        runner.measure_seconds(body[1], skip)
                    else:
                        runner.cache.pool.num_touched = body[1]
                        runner.forward(unpack_batch(body[2:]), skip)


class LeadRunner(Runner):
    """The runner of the first process: sends every call to the others, then does the same."""

    def __init__(self, model: Decoder, pool: BlockPool, ranks: Ranks) -> None:
        super().__init__(model, pool)
        self._ranks, self.adapters = ranks, ranks.adapters(model)
        self._numbers: dict[str, int] = {}  # skip set id -> its number with the others
        ranks.send(Order.OPEN, [pool.num_blocks, pool.block_size])

    def forward(
        self, batch: Batch, skip: SkipSet | None = None, watch: Watch | None = None, *, once: bool = False
    ) -> Tensor:
        with self._ranks.lockstep():
            number = self._number(skip)
            body = pack_batch(batch, self.cache.pool.block_size)
            self._ranks.send(Order.FORWARD, [number, self.cache.pool.num_touched, *body])
            return super().forward(batch, skip, watch)

    def measure_seconds(self, num_rows: int, skip: SkipSet | None = None) -> float:
        with self._ranks.lockstep():
            self._ranks.send(Order.SECONDS, [self._number(skip), num_rows])
            return super().measure_seconds(num_rows, skip)

    def discard_nonfinite(self, blocks: Sequence[int]) -> None:
        with self._ranks.lockstep():
            self._ranks.send(Order.DISCARD, list(blocks))
            super().discard_nonfinite(blocks)

    def announce_weights(self, step: int) -> None:
        with self._ranks.lockstep():
            self._ranks.send(Order.PULL, [step])

    def agree_on_weights(self, version: WeightsVersion) -> bool:
        with self._ranks.lockstep():
            self._ranks.send(Order.SWAP, [version.step, *version.digest.encode()])
            return self._ranks.all_have(True)

    def prompt_logprob_parts(
        self, tokens: Sequence[int], num_top: int, chunk: int, slot: int = -1
    ) -> Iterator[list[TokenLogprob | None]]:
        parts = super().prompt_logprob_parts(tokens, num_top, chunk, slot)
        for start in range(0, max(1, len(tokens) - 1), chunk):
            with self._ranks.lockstep():
                if start == 0:
                    self._ranks.send(Order.SCORE, [num_top, chunk, slot, *tokens])
                else:
                    self._ranks.send(Order.SCORE_ON, [])
                part = next(parts)
            yield part

    def embedding_parts(self, texts: Sequence[Sequence[int]], pooling: Pooling, chunk: int) -> Iterator[Tensor | None]:
        parts, vectors, first = super().embedding_parts(texts, pooling, chunk), None, True
        while vectors is None:
            with self._ranks.lockstep():
                if first:
                    head = [POOLINGS.index(pooling), chunk, len(texts), *map(len, texts)]
                    self._ranks.send(Order.EMBED, [*head, *chain.from_iterable(texts)])
                else:
                    self._ranks.send(Order.SCORE_ON, [])
                vectors, first = next(parts), False
            yield vectors

    def _number(self, skip: SkipSet | None) -> int:
        if skip is None:
            return WHOLE_MODEL
        if skip.id not in self._numbers:
            self._ranks.send(Order.SKIP, list(json.dumps(skip.to_json()).encode()))
            self._numbers[skip.id] = len(self._numbers)
        return self._numbers[skip.id]


def pack_batch(batch: Batch, block_size: int) -> list[int]:
    """A Batch as numbers: counts, then (start, rows, adapter, blocks) of each span, tokens, rows with logits."""
    tokens = batch.tokens.tolist() if isinstance(batch.tokens, Tensor) else list(batch.tokens)
    body = [len(batch.spans), len(tokens), len(batch.rows)]
    for span in batch.spans:
        blocks = list(span.blocks[: -(-span.stop // block_size)])
        body += [span.start, span.num, span.adapter, len(blocks), *blocks]
    return [*body, *tokens, *batch.rows]


def unpack_batch(body: Sequence[int]) -> Batch:
    num_spans, num_tokens, num_rows = body[:3]
    at, spans = 3, []
    for _ in range(num_spans):
        start, num, adapter, num_blocks = body[at : at + 4]
        at += 4
        spans.append(RowSpan(list(body[at : at + num_blocks]), start, num, adapter))
        at += num_blocks
    tokens, rows = body[at : at + num_tokens], body[at + num_tokens :]
    assert len(rows) == num_rows
    return Batch(spans, tokens, rows)
