"""What the verbs of `shoestring ckpt` show and do."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoestring.errors import UserError, room
from shoestring.host.arena import lock_file
from shoestring.json_files import read_object
from shoestring.report import Table
from shoestring.state.checkpoint_files import NEW, OLD, hidden, replace_folder, sync
from shoestring.state.levels.agent import Agent, agent_pid, read_status
from shoestring.state.levels.drain import drain
from shoestring.state.levels.events import read_events
from shoestring.state.levels.host_folder import (
    AGENT_LOCK,
    NOT_STOPPED,
    STOP,
    ArenaCopy,
    damage_of,
    host_name,
    memory_places,
    reading,
    remove_host_folder,
    trainers_alive,
)
from shoestring.state.levels.policy import EXPLAINED, Cost, Interval, IntervalPlan, explain
from shoestring.state.levels.restore import Offer, choose, offers_here, open_folder
from shoestring.state.levels.version import missing_of


def _offers(checkpoints: Path) -> tuple[list[Offer], list[str]]:
    found, problems = offers_here(memory_places(checkpoints)[0], [checkpoints], host_name())
    more = offers_here(memory_places(checkpoints)[1], [], host_name())
    return [*found, *more[0]], [*problems, *more[1]]


def versions_table(checkpoints: Path) -> Table:
    offers, problems = _offers(checkpoints)
    rows = []
    for key in sorted({o.copy.key for o in offers}, reverse=True):
        some = [o for o in offers if o.copy.key == key]
        places = sorted({"peer memory" if o.is_peer else o.source for o in some})
        lacking = missing_of(o.copy for o in some)
        size = sum(b.num_bytes for o in some[:1] for b in o.copy.boxes) / 2**20
        rows.append([key[0], ", ".join(places), len(some), f"{size:.1f}", lacking or "complete here"])
    note = "; ".join(["What other hosts hold is not shown.", *problems])
    return Table("Versions", ["step", "where", "copies", "MiB of the first", "state"], rows, note)


def agent_line(run: Path) -> str:
    for folder in memory_places(run / "checkpoints"):
        pid = agent_pid(folder) if folder.is_dir() else None
        if pid is not None:
            status = read_status(folder)
            drains = "" if status is None or not status.drains else f", last wrote step {status.drains[-1]['step']}"
            errors = "" if status is None or not status.errors else f"; last problem: {status.errors[-1]}"
            alive = sum(trainers_alive(folder))
            return f"agent {pid} watches {folder}, {alive} trainers alive{drains}{errors}"
    return "no agent runs on this host"


def version_table(checkpoints: Path, step: int | None) -> Table:
    offers = _offers(checkpoints)[0]
    if not offers:
        raise UserError(f"{checkpoints} has no version that can be read from this host")
    wanted = step if step is not None else max(o.copy.step for o in offers)
    some = [o for o in offers if o.copy.step == wanted]
    if not some:
        raise UserError(f"there is no version of step {wanted}; there are {sorted({o.copy.step for o in offers})}")
    rows = [
        [
            "peer memory" if o.is_peer else o.source,
            o.path,
            o.copy.rank,
            len(o.copy.boxes),
            round(sum(b.num_bytes for b in o.copy.boxes) / 2**20, 1),
        ]
        for o in some
    ]
    return Table(f"Step {wanted}", ["source", "place", "rank", "boxes", "MiB"], rows)


def verified_versions(checkpoints: Path) -> tuple[Table, list[str]]:
    """Every copy with what is wrong with it, and the problems alone."""
    offers, problems = _offers(checkpoints)
    rows: list[list[Any]] = []
    with ThreadPoolExecutor(4) as pool:
        for offer in offers:
            problem: str | None = None
            try:
                if offer.source == "disk":
                    open_folder(Path(offer.path)).verify()
                else:
                    entry = ArenaCopy(Path(offer.path), offer.slot, offer.sequence, offer.copy)
                    with reading(entry) as arena:
                        problem = None if arena is None else damage_of(arena, entry, pool)
            except UserError as error:
                problem = str(error)
            rows.append([offer.copy.step, offer.source, offer.path, problem or "sound"])
            problems.extend([problem] if problem else [])
    return Table("Verified", ["step", "source", "place", "state"], rows), problems


def export_version(checkpoints: Path, out: Path, step: int | None) -> tuple[str, int]:
    """(source, step) of what was written to `out`, which is complete or absent."""
    offers = [o for o in _offers(checkpoints)[0] if step is None or o.copy.step == step]
    choice = choose(offers)
    if choice is None:
        which = "" if step is None else f" of step {step}"
        raise UserError(
            f"no complete version{which} is on this host; `shoestring ckpt ls {checkpoints.parent}` lists what is"
        )
    memory = [o for o in choice.offers if o.source == "memory"]
    if missing_of(o.copy for o in memory) is None:
        entries = [ArenaCopy(Path(o.path), o.slot, o.sequence, o.copy) for o in memory]
        with _write_errors(out), ThreadPoolExecutor(4) as pool:
            drain(entries, out.absolute(), pool)
        return "memory", choice.step
    disk = next((o for o in choice.offers if missing_of([o.copy]) is None), None)
    if disk is None:
        raise UserError(
            f"step {choice.step} is in shares of several hosts; resume the run once, which puts them together"
        )
    with _write_errors(out, Path(disk.path)):
        _copy_checkpoint(Path(disk.path), out.absolute())
    return "disk", choice.step


def _copy_checkpoint(source: Path, target: Path) -> None:
    """The files of a checkpoint, copied beside `target` first: a folder with that name is complete."""
    temp = hidden(target, NEW)
    shutil.rmtree(temp, ignore_errors=True)
    try:
        temp.mkdir(parents=True)
        for file in source.iterdir():
            shutil.copyfile(file, temp / file.name)
            sync(temp / file.name)
        replace_folder(temp, target, hidden(target, OLD))
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@contextlib.contextmanager
def _write_errors(out: Path, source: Path | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        # Of a copy that fails, Python names the source, also where it is the target's disk that is full.
        named = source is not None and error.filename and Path(error.filename).is_relative_to(source)
        if named and not room(error):
            raise UserError(f"cannot read {error.filename}: {reason}; nothing was written") from None
        raise UserError(f"cannot write {out}: {reason}; {room(error)}choose another place") from None


def stop_agent(run: Path) -> str:
    for folder in memory_places(run / "checkpoints"):
        if not folder.is_dir():
            continue
        if any(trainers_alive(folder)):
            raise UserError(f"{run} is being trained: stop the trainer first (Ctrl-C saves)")
        if agent_pid(folder) is None:
            agent = Agent(folder)
            with lock_file(folder / AGENT_LOCK, fcntl.LOCK_EX) as free:
                if not free or not agent.write_all():
                    why = agent.why_not() if free else "an agent has just started"
                    raise UserError(f"{why}; nothing in memory was freed: stop again when it can be written")
                remove_host_folder(folder)
            return f"no agent was running; wrote what was in memory to {run / 'checkpoints'} and freed {folder}"
        answer = folder / NOT_STOPPED
        answer.unlink(missing_ok=True)
        (folder / STOP).touch()
        deadline = time.monotonic() + 120
        while folder.is_dir() and time.monotonic() < deadline:
            if answer.exists():
                why = answer.read_text() or "the disk is full"  # so full that this could not be written to it
                raise UserError(f"{why}; nothing in memory was freed: stop again when it can be written")
            time.sleep(0.05)
        if folder.is_dir():
            raise UserError(f"the agent did not end in two minutes; its log is {folder}/agent.log")
        return f"the agent wrote what was in memory to {run / 'checkpoints'} and ended"
    return "no agent runs on this host, and nothing is in memory"


def plan_table(checkpoints: Path) -> Table:
    path = checkpoints / ".plan.json"
    if not path.is_file():
        raise UserError(f"{checkpoints.parent} has no plan: it was not trained with checkpoint=auto, or not for long")
    found = read_object(path)
    try:
        intervals = tuple(Interval(**{**i, "cost": Cost(**i["cost"])}) for i in found["intervals"])
        plan = IntervalPlan(intervals, float(found["step_s"]), float(found["waste"]))
        rows = explain(plan)
        note = (
            f"A step takes {plan.step_s:.3g} s. Predicted share of time lost to saving and failures: {plan.waste:.2%}. "
            f"Saves so far {found['saves']}, skipped {found['skipped']}."
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a plan of this version of Shoestring ({error}); delete it") from None
    return Table("Plan", EXPLAINED, rows, note)


def events_table(checkpoints: Path) -> Table:
    rows = []
    for event in read_events(checkpoints):
        with contextlib.suppress(ValueError, OverflowError, OSError):
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
            rows.append([when, event.kind, event.step, event.source or ""])
    return Table("Events", ["time", "event", "step", "from"], rows)
