"""Settings: what is merged, what is refused and how it is said, and that nothing is lost on the way to TOML."""

import math
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import settings
from config import Auto, ConfigError, check_options, describe, dump_toml, flatten, load_config, option
from loss import ADVANTAGES, LOSSES
from policies.planner import RULES
from scheduler import POLICIES


@dataclass(frozen=True)
class Inner:
    deep: int = option(4, "a number two sections down")


@dataclass(frozen=True)
class Section:
    count: int = option(3, "a whole number", min=1, max=10)
    rate: float = option(0.5, "a closed range", min=0.0, max=1.0)
    speed: float = option(2.0, "an open end", above=0.0)
    name: str = option("tiny", "any text")
    mode: str = option("fast", "one of two", choices=("fast", "slow"))
    flag: bool = option(False, "yes or no")
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class Small:
    first: Section = field(default_factory=Section)
    second: Section = field(default_factory=Section)


@pytest.fixture
def toml(tmp_path):
    """Write a TOML file and return its path."""

    def write(text: str) -> str:
        (tmp_path / "some.toml").write_text(text, encoding="utf-8")
        return str(tmp_path / "some.toml")

    return write


def test_what_an_editor_puts_before_a_file_is_skipped(toml) -> None:
    assert load(path=toml("\ufeff[first]\ncount = 7\n")).first.count == 7


def test_a_path_may_begin_in_the_home_folder(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load_config(settings.Config, None, ["--model.path=~/qwen"]).model.path == "/home/me/qwen"
    assert load_config(settings.Config, {"data.template": "~{prompt}"}).data.template == "~{prompt}"


def test_a_text_is_not_cut_behind_a_quote() -> None:
    for text, name in (('"a" # b', '"a" # b'), ('"a # b"', "a # b"), ("a # b", "a # b"), ("'a'", "a")):
        assert load(f"--first.name={text}").first.name == name


def load(*overrides: str, path: str | None = None) -> Small:
    return load_config(Small, path, list(overrides))


def refusal(*overrides: str, path: str | None = None, cls=Small) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(cls, path, list(overrides))
    return str(caught.value)


# ---- merging


def test_defaults_then_file_then_overrides_in_order(toml):
    path = toml("[first]\ncount = 5\nrate = 0.25\n[first.inner]\ndeep = 7\n")
    assert load() == Small()
    assert load(path=path) == Small(first=Section(count=5, rate=0.25, inner=Inner(7)))
    config = load("--first.count=6", "--second.inner.deep=9", "--first.count=8", path=path)
    assert config == Small(Section(count=8, rate=0.25, inner=Inner(7)), Section(inner=Inner(9)))


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        load().first.count = 4


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("--first.rate=1", "rate", 1.0),
        ("--first.speed=1e-3", "speed", 0.001),
        ("--first.count=1_0", "count", 10),
        ("--first.flag=true", "flag", True),
        ("--first.name=runs/a b", "name", "runs/a b"),
        ("--first.name=", "name", ""),
        ("--first.name=7", "name", "7"),
        ("--first.name=1e-3", "name", "1e-3"),
        ("--first.name=0x10", "name", "0x10"),
        ("--first.name=true", "name", "true"),
        ("--first.name=nan", "name", "nan"),
        ("--first.name=2024-05-06", "name", "2024-05-06"),
        ("--first.name=a=b", "name", "a=b"),
        ("--first.name=--x", "name", "--x"),
        ("--first.name={prompt}!", "name", "{prompt}!"),
        ("--first.name=it's # not a comment", "name", "it's # not a comment"),
        ('--first.name="quo\\ted"', "name", "quo\ted"),
        ("--first.name='7'", "name", "7"),
        ("--first.mode=slow", "mode", "slow"),
    ],
)
def test_an_override_is_read_as_its_key_wants_it(override, key, value):
    found = getattr(load(override).first, key)
    assert found == value and type(found) is type(value)


def test_a_whole_number_in_a_file_becomes_a_float(toml):
    rate = load(path=toml("[first]\nrate = 1")).first.rate
    assert rate == 1.0 and type(rate) is float


# ---- refusals


@pytest.mark.parametrize(
    "override, words",
    [
        ("--first.cuont=3", ["unknown key first.cuont", "did you mean first.count?"]),
        ("--frist.count=3", ["unknown key frist", "did you mean first?"]),
        ("--first.inner.depe=3", ["unknown key first.inner.depe", "did you mean first.inner.deep?"]),
        ("--first.zzz=3", ["unknown key first.zzz", "known here: count, rate, speed, name, mode, flag, inner"]),
        ("--first=3", ["first is a section", "first.count"]),
        ("--first.inner=3", ["first.inner is a section", "first.inner.deep"]),
        ("--first.count.deeper=3", ["first.count", "wrong type", "int"]),
        ("--first.count=2.5", ["first.count = 2.5", "wrong type", "int, such as 3"]),
        ("--first.count=3.0", ["first.count = 3.0", "wrong type", "int"]),
        ("--first.count=many", ["first.count = 'many'", "wrong type", "int"]),
        ("--first.count=", ["first.count = ''", "wrong type", "int"]),
        ("--first.count=true", ["first.count = True", "wrong type", "int"]),
        ("--first.flag=1", ["first.flag = 1", "wrong type", "bool"]),
        ("--first.flag=True", ["first.flag = 'True'", "wrong type", "bool, true or false"]),
        ("--first.rate=half", ["first.rate = 'half'", "wrong type", "float, such as 0.5"]),
        ("--first.rate=true", ["first.rate = True", "wrong type", "float"]),
        ("--first.name=[1, 2]", ["first.name = [1, 2]", "wrong type", "str"]),
        ("--first.mode=medium", ["first.mode = 'medium'", "fast, slow"]),
        ("--first.mode=3", ["first.mode = '3'", "fast, slow"]),
        ("--first.count=0", ["first.count = 0", "too small", "at least 1"]),
        ("--first.count=11", ["first.count = 11", "too large", "at most 10"]),
        ("--first.rate=-0.001", ["first.rate = -0.001", "too small", "at least 0.0"]),
        ("--first.rate=1.001", ["first.rate = 1.001", "too large", "at most 1.0"]),
        ("--first.rate=2", ["first.rate = 2.0", "too large", "at most 1.0"]),
        ("--first.speed=0", ["first.speed = 0.0", "too small", "more than 0.0"]),
        ("--first.speed=-inf", ["first.speed = -inf"]),
        ("--first.speed=nan", ["first.speed = nan", "number"]),
        ("--first.rate=-nan", ["first.rate = nan", "number"]),
        ("--first.rate=inf", ["first.rate = inf"]),
        ("--first.speed=inf", ["first.speed = inf", "finite"]),
        ("--first.speed=1" + 400 * "0", ["first.speed", "too large"]),
        ("first.count=3", ["'first.count=3'", "--section.key=value"]),
        ("--first.count", ["'--first.count'", "--section.key=value"]),
        ("--first..count=3", ["'--first..count=3'", "--section.key=value"]),
        ("--=3", ["'--=3'", "--section.key=value"]),
        ("--.count=3", ["'--.count=3'", "--section.key=value"]),
        ("-first.count=3", ["'-first.count=3'", "--section.key=value"]),
        ("", ["''", "--section.key=value"]),
        ("configs/tiny.toml", ["'configs/tiny.toml' is not a setting; write --config configs/tiny.toml ("]),
    ],
)
def test_a_wrong_override_is_refused(override, words):
    text = refusal(override)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    "text, words",
    [
        ("[first]\ncuont = 3", ["unknown key first.cuont", "did you mean first.count?"]),
        ("[third]\ncount = 3", ["unknown key third", "known here: first, second"]),
        ("first = 3", ["first is a section"]),
        ("[first]\ncount = '3'", ["first.count = '3'", "wrong type", "int"]),
        ("[first]\nname = 7", ["first.name = 7", "wrong type", "str"]),
        ("[first]\nname = true", ["first.name = True", "wrong type", "str"]),
        ("[first.name]\nx = 7", ["first.name = {'x': 7}", "wrong type", "str"]),
        ("[first]\nrate = 2024-05-06", ["first.rate", "wrong type", "float"]),
        ("[first]\nrate = nan", ["first.rate = nan", "number"]),
        ("[first]\ncount = 11", ["first.count = 11", "at most 10"]),
        ("[first]\nmode = 'medium'", ["first.mode = 'medium'", "fast, slow"]),
        ("[first", ["not valid TOML", "(at end of document)"]),
        ("[first]\ncount = 1\ncount = 2", ["not valid TOML", "overwrite a value"]),
        ("[first]\ncount =", ["not valid TOML", "Invalid value"]),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(text, words, toml):
    path = toml(text)
    found = refusal(path=path)
    assert [word for word in [path, *words] if word not in found] == []


def test_a_missing_file_a_folder_and_no_text_are_refused(tmp_path):
    assert "cannot read it (No such file" in refusal(path=str(tmp_path / "none.toml"))
    assert "cannot read it (Is a directory" in refusal(path=str(tmp_path))
    (tmp_path / "latin.toml").write_bytes("[first]\nname = 'café'".encode("latin-1"))
    assert "not valid TOML" in refusal(path=str(tmp_path / "latin.toml"))


def test_the_error_of_an_override_does_not_blame_the_file(toml):
    path = toml("[first]\ncount = 5\n")
    assert path not in refusal("--first.count=0", path=path)


# ---- the real config


def limits(config: Any = settings.Config(), prefix: str = "") -> list[tuple[str, Any, Mapping]]:  # noqa: B008
    """(key, default, limits) of every key of the real config"""
    rows: list[tuple[str, Any, Mapping]] = []
    for each in fields(config):
        value, key = getattr(config, each.name), f"{prefix}{each.name}"
        rows += limits(value, f"{key}.") if is_dataclass(value) else [(key, value, each.metadata)]
    return rows


def value_of(config, key: str):
    return flatten(config)[key][0]


def just(x: float, towards: float) -> float:
    """The next float, but for denormals: the trainer has the processor flush them to 0."""
    return math.nextafter(x, towards) if x else math.copysign(sys.float_info.min, towards)


@pytest.mark.parametrize("key, default, limit", [row for row in limits() if isinstance(row[1], float)])
def test_every_float_takes_its_limits_and_nothing_beyond(key, default, limit):
    low, above, high = limit["min"], limit["above"], limit["max"]
    assert low is not None or above is not None, f"{key} needs a lower limit"
    inside = [x for x in (low, high, default) if x is not None]
    inside += [] if above is None else [just(above, math.inf)]
    outside = [] if low is None else [just(low, -math.inf)]
    outside += [] if high is None else [just(high, math.inf)]
    outside += [] if above is None else [float(above)]
    for value in inside:
        assert value_of(load_config(settings.Config, None, [f"--{key}={value!r}"]), key) == value
    for value in [*outside, math.nan, math.inf, -math.inf]:
        assert key in refusal(f"--{key}={value!r}", cls=settings.Config)


@pytest.mark.parametrize("key, default, limit", [row for row in limits() if type(row[1]) is int])
def test_every_whole_number_takes_its_limits_and_nothing_beyond(key, default, limit):
    low, high = limit["min"], limit["max"]
    assert low is not None, f"{key} needs a lower limit"
    for value in [x for x in (low, high, default) if x is not None]:
        assert value_of(load_config(settings.Config, None, [f"--{key}={value}"]), key) == value
    for value in [low - 1] + ([] if high is None else [high + 1]):
        assert key in refusal(f"--{key}={value}", cls=settings.Config)


@pytest.mark.parametrize(
    "key, table",
    [("loss.name", LOSSES), ("loss.advantage", ADVANTAGES), ("scheduler.policy", POLICIES), ("planner.rule", RULES)],
)
def test_an_entry_of_a_table_can_be_chosen_and_help_says_what_it_is(key: str, table: dict) -> None:
    section, _, name = key.partition(".")
    field = getattr(settings.Config(), section).__dataclass_fields__[name]
    assert [*field.metadata["choices"]] == [*table]
    for entry_name, value in table.items():
        assert f"{entry_name}: " in field.metadata["help"], f"{key}: {entry_name}"
        assert value.__doc__, f"{key}: {entry_name} needs a docstring: --help prints its first sentence"


def test_a_number_that_the_program_may_choose_is_auto(toml) -> None:
    given = load_config(settings.Config, toml('[overlap]\ntrain_ranks = "auto"'), [])
    assert given == load_config(settings.Config, None, ["--overlap.train_ranks=auto"])
    over = load_config(settings.Config, toml('[overlap]\ntrain_ranks = "auto"'), ["--overlap.train_ranks=2"])
    assert over.overlap.train_ranks == 2
    assert isinstance(given.overlap.train_ranks, Auto) and given.overlap.train_ranks < 0
    assert load_config(settings.Config, toml(dump_toml(given)), []) == given
    check_options(given.overlap, "overlap")
    assert "must be int or auto" in refusal("--overlap.train_ranks=some", cls=settings.Config)
    assert "must be int, such as" in refusal("--run.steps=auto", cls=settings.Config)
    assert "too small" in refusal("--overlap.train_ranks=-1", cls=settings.Config)


@pytest.mark.parametrize("key, default, limit", [row for row in limits() if row[2]["choices"]])
def test_every_choice_is_taken_and_no_other(key, default, limit):
    assert default in limit["choices"]
    for value in limit["choices"]:
        assert value_of(load_config(settings.Config, None, [f"--{key}={value}"]), key) == value
    assert ", ".join(limit["choices"]) in refusal(f"--{key}=none of them", cls=settings.Config)


def changed(config):
    """Every key of a config unlike its default."""
    new = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            new[f.name] = changed(value)
        elif isinstance(value, bool):
            new[f.name] = not value
        elif isinstance(value, int):
            new[f.name] = value + 1
        elif isinstance(value, tuple):
            new[f.name] = (*value, "END", *AWKWARD[:-1])
        elif isinstance(value, float):
            new[f.name] = next(x for x in (1 / 3, 2 / 3, 4 / 3) if x != value and x >= (f.metadata["min"] or 0))
        elif f.metadata["choices"]:
            new[f.name] = [*f.metadata["choices"]][-1]
        else:
            new[f.name] = value + "x"
    return replace(config, **new)


def test_the_resolved_config_reads_back_equal(toml):
    config = changed(settings.Config())
    before, after = flatten(settings.Config()), flatten(config)
    alike = {key for key in before if before[key][0] == after[key][0]}
    assert alike <= {key for key, _, limit in limits() if limit["choices"]}
    assert load_config(settings.Config, toml(dump_toml(config)), []) == config
    assert load_config(settings.Config, toml(dump_toml(settings.Config())), []) == settings.Config()


AWKWARD = [
    '"',
    "'",
    "\\",
    "\\n",
    "a\nb\r\nc",
    "\t\b\f\x1f\x7f\x85",
    "ü 🙂 \u2028",
    "# [x]",
    '"""',
    "{prompt}",
    "nan",
    "",
]


@pytest.mark.parametrize(
    "given, texts",
    [("END", ("END",)), ("7", ("7",)), ('["a", "\\n"]', ("a", "\n")), ("[]", ()), ("</a>", ("</a>",))],
)
def test_a_list_of_texts_may_be_one_text(given, texts):
    assert load_config(settings.Config, None, [f"--rollout.stop={given}"]).rollout.stop == texts


@pytest.mark.parametrize("given", ["[1]", '["a", ""]', '""', '[["a"]]', "{a = 1}"])
def test_what_is_no_list_of_texts_is_refused(given):
    assert "rollout.stop" in refusal(f"--rollout.stop={given}", cls=settings.Config)


def test_a_list_whose_quotes_a_shell_took_is_refused():
    said = refusal("--rollout.stop=[</answer>]", cls=settings.Config)
    assert "is not a list" in said and """'--rollout.stop=["END"]'""" in said
    assert load_config(settings.Config, None, ['--rollout.stop="[END]"']).rollout.stop == ("[END]",)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_reads_back_equal(text, toml):
    config = settings.Config()
    config = replace(config, data=replace(config.data, template=text, train="a" + text))
    assert load_config(settings.Config, toml(dump_toml(config)), []) == config


@pytest.mark.parametrize("number", [1e-300, 1e300, 1e16, 1e22, 0.1, 3e-05, 123456789.0])
def test_awkward_numbers_read_back_equal(number, toml):
    config = Small(first=Section(speed=number))
    assert load(path=toml(dump_toml(config))) == config


def test_a_model_on_the_command_line_takes_the_place_of_a_files_warm_start(toml):
    path = toml("[warm_start]\nsteps = 9\n")
    assert settings.load_run(path, []).warm_start.steps == 9
    assert settings.load_run(path, ["--model.path=x"]).warm_start == settings.WarmStartConfig()
    own = settings.load_run(path, ["--model.path=x", "--warm_start.lr=1"]).warm_start  # check_settings refuses it
    assert own == settings.WarmStartConfig(lr=1.0)


def test_help_lists_every_key_with_default_and_meaning():
    short = [line for line in describe(settings.Config(), is_short=True).splitlines() if line]
    assert len(short) == len(limits()) and max(map(len, short)) <= 110, "a line a key"
    assert all(line.startswith(f"  --{key}=") for (key, *_), line in zip(limits(), short))
    assert all(line.count("(") == line.count(")") for line in short)
    text = "\n".join(describe(settings.Config(), field.name) for field in fields(settings.Config))
    assert max(map(len, text.splitlines())) <= 110
    lines = [line.strip() for line in re.sub(r"\n {10,}", " ", text).splitlines() if line.strip()]
    assert len(lines) == len(limits())
    for (key, default, limit), line in zip(limits(), lines):
        assert line.startswith(f"--{key}=") and line.endswith("  " + limit["help"])
        assert len(limit["help"]) >= 10 and "\n" not in limit["help"]
        shown = line.removeprefix(f"--{key}=").removesuffix(limit["help"])
        found = tomllib.loads(f"value = {shown}")["value"]
        assert (tuple(found) if isinstance(default, tuple) else found) == default


def test_help_of_a_part_of_a_section_or_of_a_key() -> None:
    lines = describe(settings.Config(), "trainer.lora").strip().splitlines()
    assert lines[0].startswith("--trainer.lora.rank=") and len(lines) >= 3
    assert describe(settings.Config(), "distill.top_k").strip().startswith("--distill.top_k=0  tokens that")


def test_help_of_an_unknown_section_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="--help lost: there is no such section; possible: run, model, "):
        describe(settings.Config(), "lost")


def test_every_default_is_within_its_own_limits():
    overrides = [f"--{key}={default}" for key, default, _ in limits() if not isinstance(default, bool | str | tuple)]
    assert load_config(settings.Config, None, overrides) == settings.Config()


CONFIGS = Path(__file__).parent.parent / "configs"
GROUPS = {CONFIGS / "mux.toml"}  # test_mux.py reads them


@pytest.mark.parametrize("path", sorted({*CONFIGS.glob("*.toml"), *CONFIGS.glob("mux/*.toml")} - GROUPS), ids=str)
def test_every_shipped_config_loads_and_fits_a_gpu_too(path, monkeypatch):
    config = load_config(settings.Config, str(path), [])
    assert config != settings.Config()
    ranks = 4 + (config.overlap.train_ranks if isinstance(config.overlap.train_ranks, int) else 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    settings.check_settings(config, ranks)
    loss = config.loss.for_dtype(torch.bfloat16, config.trains_older)  # to which model.dtype = auto leads there
    assert loss.name == "decoupled" or loss.old_logprobs == "rollout" or not config.overlap.depth
