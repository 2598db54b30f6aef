"""Measured plans: for one operation, which configuration of its kernel is the fastest by shape and by GPU.

    PLANS = PlanTable("few_rows", FewRowsPlan, shipped=SOURCES / "lowbit" / "few_rows_plans.json")
    PLANS.find("int4 g128 rows<=1 4096x4096", gpu)     this machine's own measurement, else the shipped one, else None
    PLANS.remember({key: plan}, gpu)                   what was measured here, for this process and later ones
    PLANS.adopt({key: plan}, gpu)                      for this process only: another process or a run measured it

A plan is a frozen dataclass of numbers, strings and tuples of them. A file holds a JSON object, key -> the fields that
differ from their defaults. The operation chooses the key (format, rows, shape), which does not contain the GPU:

    shipped     beside the kernel's source; measured on an H200, and the default on every other GPU
    own         in the user's cache folder, one file for each GPU, and for each `version` if plans depend on one

Entries with unknown fields or values of the wrong type, and files that are not JSON, are ignored with a warning: the
operation then uses its rule or measures again. Files are replaced as a whole. The operation checks whether a plan fits
the device. Tuners are in experiments/, benchmarks/ and methods/sparse24/kernels/cusparselt_table.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from shoestring.errors import UserError
from shoestring.json_files import parse_json, read_text
from shoestring.paths import cache_folder

P = TypeVar("P")  # the dataclass of a plan
Chosen = TypeVar("Chosen")


class PlanTable(Generic[P]):
    def __init__(self, op: str, plan: type[P], *, shipped: Path | None = None, version: str = "") -> None:
        self.op, self.plan, self.shipped, self.version = op, plan, shipped, version
        self._known: dict[str, dict[str, P]] = {}  # by GPU
        self._caches: list[Callable[[], None]] = []

    def find(self, key: str, gpu: str) -> P | None:
        return self.plans(gpu).get(key)

    def plans(self, gpu: str) -> Mapping[str, P]:
        """All plans for a GPU of this name, read once."""
        if gpu not in self._known:
            shipped = read_plans(self.shipped, self.plan) if self.shipped is not None else {}
            self._known[gpu] = shipped | read_plans(self.own_file(gpu), self.plan)
        return self._known[gpu]

    def own_file(self, gpu: str) -> Path:
        """The file of this machine's measurements."""
        name = "-".join(filter(None, (self.op, gpu, self.version)))
        return cache_folder() / f"{name.replace(' ', '_').replace('/', '_')}.json"

    def adopt(self, plans: Mapping[str, P], gpu: str) -> None:
        """Use these from now on in this process, instead of known plans with the same keys."""
        self._known[gpu] = {**self.plans(gpu), **plans}
        self._clear_choices()

    def remember(self, plans: Mapping[str, P], gpu: str) -> None:
        """`adopt` these and add them to this machine's file, if it can be written."""
        self.adopt(plans, gpu)
        with contextlib.suppress(OSError):
            add_plans(self.own_file(gpu), plans, self.plan)

    def forget(self) -> None:
        """Read the files again at the next use."""
        self._known.clear()
        self._clear_choices()

    def cached(self, choose: Callable[..., Chosen]) -> functools._lru_cache_wrapper[Chosen]:
        """functools.cache for a function that depends on this table: emptied whenever the table changes."""
        kept = functools.cache(choose)
        self._caches.append(kept.cache_clear)
        return kept

    @contextlib.contextmanager
    def using(self, plans: Mapping[str, P], gpu: str) -> Iterator[None]:
        """`adopt` these inside a `with` block only: a tuner tries them."""
        before = self.plans(gpu)
        self.adopt(plans, gpu)
        try:
            yield
        finally:
            self._known[gpu] = dict(before)
            self._clear_choices()

    def _clear_choices(self) -> None:
        for clear in self._caches:
            clear()


def overridden(plan: P, variable: str, can_run: Callable[[P], bool], refusal: str) -> P:
    """`plan` with the fields that an environment variable gives as JSON; UserError where that cannot run."""
    given = os.environ.get(variable)
    if not given:
        return plan
    try:
        plan = dataclasses.replace(plan, **parse_json(given, "it", "see below"))  # type: ignore[type-var]
        runs = can_run(plan)
    except (TypeError, ValueError, ArithmeticError) as error:
        names = ", ".join(f.name for f in dataclasses.fields(plan))  # type: ignore[arg-type]
        raise UserError(f"{variable}={given!r} is not a plan ({error}): write some of {names} as JSON.") from error
    if not runs:
        raise UserError(f"{variable}={given!r} {refusal}: {plan}.")
    return plan


# -- files ---------------------------------------------------------------------------------------------------
def read_plans(path: Path, plan: type[P]) -> dict[str, P]:
    """The plans in a file: none where there is no file; unreadable ones are left out with a warning."""
    try:
        path.stat()
        found, reasons = parse_plans(read_text(path), plan)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as why:
        found, reasons = {}, [str(why)]
    if reasons:
        warnings.warn(f"{path}: measured plans are ignored: {'; '.join(reasons)}", stacklevel=2)
    return found


def parse_plans(text: str, plan: type[P]) -> tuple[dict[str, P], list[str]]:
    """The plans of a file's text, and why others are left out. ValueError where it is no JSON object."""
    lines = parse_json(text, "the file", "write it again")
    if not isinstance(lines, dict):
        raise ValueError("not a JSON object of plans")
    found, reasons = {}, []
    for key, fields in lines.items():
        try:
            found[key] = plan_of(fields, plan)
        except ValueError as why:
            reasons.append(f"{key!r}: {why}")
    return found, reasons


def plan_of(fields: Any, plan: type[P]) -> P:
    """A plan from its JSON fields; ValueError says what is wrong with them."""
    if not isinstance(fields, dict):
        raise ValueError(f"{fields!r} is no object")
    hints = typing.get_type_hints(plan)
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    for name, value in values.items():
        if name not in hints:
            raise ValueError(f"unknown field {name!r}")
        if not _is_a(value, hints[name]):
            raise ValueError(f"{name} = {value!r} is no {hints[name]}")
    try:
        return plan(**values)
    except TypeError as why:  # a field is missing
        raise ValueError(str(why)) from why


def _is_a(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            kinds = (kinds[0],) * len(value) if isinstance(value, tuple) else kinds
        return (
            isinstance(value, tuple)
            and len(value) == len(kinds)
            and all(_is_a(v, kind) for v, kind in zip(value, kinds, strict=True))
        )
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def plan_fields(plan: Any) -> dict[str, Any]:
    """The fields of a plan that differ from their defaults."""
    return {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if getattr(plan, f.name) != f.default}


def plans_text(plans: Mapping[str, Any]) -> str:
    """The text of a file: a line for each plan, so that a diff shows which changed."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(plan_fields(p))}" for key, p in plans.items())
    return f"{{\n{lines}\n}}\n"


def add_plans(path: Path, plans: Mapping[str, P], plan: type[P]) -> None:
    """Add plans to a file, atomically; what other processes add meanwhile is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)  # the file itself is replaced, so it cannot be locked
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        _replace(path, plans_text({**read_plans(path, plan), **plans}))
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
