"""Overrides reach every field with the annotated type, and every mistake is answered in one helpful line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from shoestring.config import (
    Retired,
    apply_overrides,
    deciding,
    describe,
    from_json,
    option,
    read_settings,
    to_json,
    with_settings,
)
from shoestring.errors import UserError


@dataclass(frozen=True)
class Inner:
    dp: int = option(1, "ranks")
    axis: str = option("rows", "which")


@dataclass(frozen=True)
class Config:
    model: str = option(help="what to shrink")
    steps: int = option(100, "optimizer steps", least=1)
    lr: float = option(1e-3, "peak learning rate")
    compile: bool = option(False, "use torch.compile")
    size: Literal["tiny", "small"] = option("tiny", "preset")
    text: str | None = option(None, "a file")
    limit: int | None = option(5, "at most", least=0)
    widths: tuple[int, ...] = option((1, 2), "several")
    out: Path = option(Path("out"), "where to")
    mesh: Inner = option(Inner(dp=3), "the mesh")


@dataclass(frozen=True)
class Levels:
    RETIRED: ClassVar[dict[str, Retired]] = {"peer=xor": Retired(None, "give peer=all"), "set": Retired(4, "none")}
    peer: Literal["off", "all"] = option("off", "who has it")


@dataclass(frozen=True)
class Saved:
    levels: Levels = option(Levels(), "where")


def test_a_retired_setting_is_one_line_and_old_folders_without_use_of_it_are_read() -> None:
    @dataclass(frozen=True)
    class Base:
        RETIRED: ClassVar[dict[str, Retired]] = {"delta": Retired(False, "all of it is sent")}

    @dataclass(frozen=True)
    class Run(Base):
        steps: int = option(3, "steps")

    assert [row.key for row in describe(Run)] == ["steps"]
    with pytest.raises(UserError, match=r"^the setting delta is retired: all of it is sent; leave it out$"):
        apply_overrides(Run, ["delta=false"])
    assert from_json(Run, {"steps": 4, "delta": False}) == Run(4)
    with pytest.raises(UserError, match=r"^delta=True in the saved config.json is retired: all of it is sent; delete"):
        from_json(Run, {"steps": 4, "delta": True})

    with pytest.raises(UserError, match=r"^levels\.peer=xor is retired: give peer=all$"):
        apply_overrides(Saved, ["levels.peer=xor"])
    with pytest.raises(UserError, match=r"^the setting levels\.set is retired: none; leave it out$"):
        apply_overrides(Saved, ["levels.set=5"])
    assert from_json(Saved, {"levels": {"set": 4}}) == Saved()
    with pytest.raises(UserError, match=r"peer=xor in the saved config\.json is retired: give peer=all; change it"):
        from_json(Saved, {"levels": {"peer": "xor"}})


def test_every_type_is_read_from_its_annotation() -> None:
    cfg = apply_overrides(
        Config,
        [
            "model=a=b",
            "steps=1e4",
            "lr=3e-4",
            "compile=yes",
            "size=small",
            "text=f.txt",
            "limit=none",
            "widths=4,5,6",
            "out=x",
            "mesh.axis=c",
        ],
    )
    assert cfg == Config("a=b", 10_000, 3e-4, True, "small", "f.txt", None, (4, 5, 6), Path("x"), Inner(3, "c"))
    assert apply_overrides(Config, ["model=m"]) == Config("m")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stesp=3", "unknown setting 'stesp'. Did you mean 'steps'?"),
        ("mesh.pd=3", "Did you mean 'mesh.dp'?"),
        ("mesh=3", "'mesh' is a group of settings; set one of mesh.dp, mesh.axis"),
        ("steps=many", "steps='many' is not a value of type int; write for example 2000"),
        ("steps=1.5", "steps='1.5' is not a value of type int"),
        ("steps=0", "steps=0 is not possible; give 1 or more"),
        ("limit=-1", "limit=-1 is not possible; give 0 or more"),
        ("lr=nan", "lr='nan' is not a value of type float"),
        ("lr=-inf", "lr='-inf' is not a value of type float"),
        ("lr=fast", "lr='fast' is not a value of type float"),
        ("compile=maybe", "compile='maybe' is not a value of type true | false"),
        ("size=smal", "size='smal': allowed are tiny, small. Did you mean 'small'?"),
        ("limit=x", "limit='x' is not a value of type int | none"),
        ("steps", "'steps' is not key=value"),
        ("widths=1,b", "widths='b' is not a value of type int"),
        ("text=", "text= is empty; give a value, or none to unset it"),
        ("limit=", "limit= is empty"),
        ("out=", "out= is empty; give a value"),
    ],
)
def test_mistakes_say_what_to_write(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        apply_overrides(Config, ["model=m", override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_required_and_repeated_keys() -> None:
    with pytest.raises(UserError, match=r"model=... is required \(what to shrink\)"):
        apply_overrides(Config, ["steps=3"])
    with pytest.raises(UserError, match="'steps' is given twice"):
        apply_overrides(Config, ["model=m", "steps=3", "steps=4"])


def test_a_type_that_a_command_cannot_set_is_named() -> None:
    @dataclass(frozen=True)
    class Mine:
        names: list = option((), "several")  # type: ignore[type-arg]

    with pytest.raises(UserError, match=r"names is of a type \(list\)"):
        apply_overrides(Mine, ["names=a"])


def test_json_round_trip() -> None:
    cfg = apply_overrides(Config, ["model=m", "mesh.dp=7", "widths=9", "out=a/b"])
    assert from_json(Config, json.loads(json.dumps(to_json(cfg)))) == cfg
    with pytest.raises(UserError, match="unknown setting 'bogus'"):
        from_json(Config, {"model": "m", "bogus": 1})


def test_describe_lists_every_key_with_default_and_help() -> None:
    rows = {row.key: row for row in describe(Config)}
    assert rows["model"].default == "(required)"
    assert rows["steps"] == ("steps", "int", "100", "optimizer steps", False)
    assert rows["compile"].default == "false"
    assert rows["text"].default == "none"
    assert rows["widths"].default == "1,2"
    assert rows["size"].type == "tiny | small"
    assert rows["mesh.dp"].help == "ranks"
    assert rows["mesh.dp"].default == "3"  # the default of Config, not the one of Inner


@dataclass(frozen=True)
class Group:
    inner: int = option(1, "of a group")


@dataclass(frozen=True)
class Base:
    model: str = option(help="which")
    rarely: int = option(1, "hardly ever", advanced=True)
    group: Group = option(Group(), "a group")
    run: str | None = option(None, "where")
    steps: int = option(10, "how long")


@dataclass(frozen=True)
class Mine(Base):
    sometimes: int = option(2, "now and then", advanced=True)
    lr: float = option(0.1, "how fast")
    steps: int = option(20, "how long")  # declared again: its place stays the base's


def test_what_users_change_first_is_listed_first() -> None:
    rows = describe(Mine)
    assert [row.key for row in rows if not row.advanced] == ["model", "steps", "lr", "run"]
    assert [row.key for row in rows if row.advanced] == ["rarely", "sometimes", "group.inner"]
    assert [row.advanced for row in rows] == [False] * 4 + [True] * 3
    assert apply_overrides(Mine, ["model=m", "rarely=4", "group.inner=5"]) == Mine("m", 4, Group(5))


@dataclass(frozen=True)
class Training:
    steps: int = option(100, "optimizer steps", least=1, deciding=False)
    batch: int = option(16, "rows per step", least=1, advanced=True, deciding=True)
    seed: int = option(0, "random seed")


@dataclass(frozen=True)
class Longer(Training):
    steps: int = option(800)
    batch: int = option(8, "rows", advanced=False)


@dataclass(frozen=True)
class Masked:
    seed: int = option(1, deciding=False)


@dataclass(frozen=True)
class Both(Masked, Longer):
    pass


def test_an_option_is_declared_once_and_a_class_says_what_differs() -> None:
    assert {row.key: (row.default, row.help, row.advanced) for row in describe(Both)} == {
        "steps": ("800", "optimizer steps", False),
        "batch": ("8", "rows", False),
        "seed": ("1", "random seed", False),
    }
    with pytest.raises(UserError, match="give 1 or more"):
        apply_overrides(Both, ["steps=0"])
    assert deciding(Training) == {"batch": 16, "seed": 0} and deciding(Longer) == {"batch": 8, "seed": 0}
    assert deciding(Both) == {"batch": 8}
    assert deciding(Training, unless_said=False) == {"batch": 16}


def test_a_saved_config_is_typed_and_ranged_like_a_command() -> None:
    good = json.loads(json.dumps(to_json(Config(model="m"))))
    assert from_json(Config, good) == Config(model="m")
    for key, bad in [
        *(("steps", v) for v in ("3", 3.5, True, None, [3], float("nan"))),
        *(("model", v) for v in (3, None, ["m"])),
        ("lr", "1e-3"),
        ("size", "smal"),
        ("mesh", 3),
        ("mesh", {"dp": "2"}),
    ]:
        with pytest.raises(UserError, match="is not a value of type"):
            from_json(Config, {**good, key: bad})
    with pytest.raises(UserError, match="no 'model'"):
        from_json(Config, {k: v for k, v in good.items() if k != "model"})
    with pytest.raises(UserError, match="limit=-1 is not possible"):
        from_json(Config, {**good, "limit": -1})
    with pytest.raises(UserError, match="steps="):
        apply_overrides(Config, ["model=m", "steps=" + "9" * 400])


def test_a_file_means_what_the_command_line_means(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: a=b\nlr: 1e-4\ncompile: yes\ntext: ~\nlimit: none\nwidths: [3, 4]\nmesh:\n  dp: 2\n")
    cfg = apply_overrides(Config, with_settings(file, ["lr=2e-4"]))
    assert cfg == Config(model="a=b", lr=2e-4, compile=True, text=None, limit=None, widths=(3, 4), mesh=Inner(dp=2))
    file.write_text('{"steps": 7, "mesh.axis": "rows"}')  # JSON is YAML
    assert read_settings(file) == ["steps=7", "mesh.axis=rows"]
    file.write_text("# nothing\n")
    assert read_settings(file) == []


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("a: &x [1]\nb: *x\n", "line 2: write the value out"),
        ("a: 1\na: 2\n", "line 2: 'a' is given twice"),
        ("- a\n", "not a sequence"),
        ("a: [1, [2]]\n", "is a list of words or numbers"),
        ("a: {b: 1\n", "line 2 is not YAML"),
        ("a: b: c\n", "line 1 is not YAML"),
        ("a\0b", "is not YAML"),
        ("? [x]\n: 1\n", "the name of a setting"),
        ("[" * 4_000, "is not YAML: it is nested too deeply"),
        ("a: " + "x" * 70_000, "bytes"),
    ],
)
def test_a_file_that_is_no_settings_is_one_line(tmp_path: Path, text: str, needle: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        read_settings(file)
    assert needle in str(error.value) and "\n" not in str(error.value)


def test_no_tag_runs_code(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"steps: !!python/object/apply:os.system ['touch {tmp_path}/ran']\n")
    assert read_settings(file) == [f"steps=touch {tmp_path}/ran"]
    assert not (tmp_path / "ran").exists()
