"""Follows a publishing run: pulls every new version beside the server's work, then has the engine take it over.

A thread of its own. Whatever goes wrong (no publisher, a lost connection, another architecture) is one line in the log
and a new try later; the server goes on with the weights it has. A version is pulled whole and checked before the engine
hears of it. Versions that are refused are counted (weights_updates_refused_total).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection

from shoestring.errors import UserError, shortened
from shoestring.serve.engine.weight_pull import WeightPull
from shoestring.serve.engine.weight_update import WeightTarget
from shoestring.serve.http.engine_thread import EngineThread
from shoestring.state.reshard.exchange import Gone, Offered
from shoestring.state.reshard.version import UnfitWeights, WeightsVersion

RETRY_S = 1.0
RETRY_OTHER_S = 30.0  # after a publisher of another model
WAIT_S = 5.0  # for the next version, at a time
log = logging.getLogger("shoestring.serve")


class WeightFollower:
    def __init__(
        self,
        address: tuple[str, int],
        target: WeightTarget,
        engine_thread: EngineThread,
        *,
        older: bool = False,
        hosts: Collection[str] = (),
    ) -> None:
        """`target`: the model's, or that of its draft model. `older`: also take a step that is before the one served
        now. `hosts`: of further ranks of the run."""
        self.hosts = hosts
        self.address, self.target, self.engine_thread, self.older = address, target, engine_thread, older
        self.version: WeightsVersion | None = None
        self._turns = 0  # of that version
        self._refused: WeightsVersion | None = None
        self._said = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoestring-follow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        where = f"{self.address[0]}:{self.address[1]}"
        while not self._stopping.is_set():
            pause = RETRY_S
            try:
                pull = WeightPull(self.address, self.target, hosts=self.hosts)
                try:
                    self._say(f"following {pull.run} at {where}")
                    self._follow(pull)
                finally:
                    pull.close()
            except OSError as error:
                self._say(f"no publisher at {where} ({error.strerror or error}); trying again")
            except UserError as error:
                self._say(f"cannot follow {where}: {shortened(str(error), 600)}; trying again")
                pause = RETRY_OTHER_S
            except Exception:  # a defect of ours must not take the server down
                log.exception("following %s failed; trying again", where)
                pause = RETRY_OTHER_S
            self._stopping.wait(pause)

    def _say(self, line: str) -> None:
        """Once, not at every try."""
        if line != self._said:
            self._said = line
            log.info("%s", line)

    def _follow(self, pull: WeightPull) -> None:
        seen: Offered | None = None
        while not self._stopping.is_set():
            found = pull.newest(other_than=seen, seconds=0.0 if seen is None else WAIT_S)
            if found is None or found == seen:
                if found is None:
                    self._stopping.wait(0.5)
                continue
            seen, served, version = found, self.version, WeightsVersion(pull.run, found.step)
            went_back = served is not None and served.run == version.run and found.turns > self._turns
            if served is not None and version.step <= served.step and not (self.older or went_back):
                if (version.run, version.step) != (served.run, served.step) and version != self._refused:
                    self._refused = version
                    log.warning(
                        "%s is not taken: %s is served, which is as new or newer; --follow-older takes it",
                        version,
                        served,
                    )
                continue
            try:
                self._take(pull, found.step)
                self._turns = found.turns
            except Gone:
                seen = None  # a newer one is there
            except UnfitWeights as error:
                self.engine_thread.metrics.weights_refused.inc()
                log.warning("%s is not taken: %s", version, error)
            except UserError:
                self.engine_thread.metrics.weights_refused.inc()
                raise

    def _take(self, pull: WeightPull, step: int) -> None:
        began = time.monotonic()
        if self.engine_thread.serves(self.target):
            self.engine_thread.announce_weights(step)  # draft models have one process
        values, version, num_bytes = pull.pull(step)
        prepared = self.target.prepare(values)
        pulled = time.monotonic()
        stall = self.engine_thread.update_weights(self.target, prepared, version)
        self.version = version
        log.info(
            "%s are now %s: %.1f MB pulled in %.2f s, taken over after %.2f s, engine stopped for %.0f ms",
            "weights" if self.engine_thread.serves(self.target) else "weights of the drafter",
            *(version, num_bytes / 1e6, pulled - began, time.monotonic() - pulled, 1e3 * stall),
        )
