"""Configuration: files, overlays, overrides, and errors that a person can act on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.config import RunConfig, load, override, resolved
from rollwright.errors import ConfigError
from rollwright.plugins import PartConfig
from rollwright.tasks.config import RecordsConfig


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_later_files_and_overrides_win(tmp_path: Path) -> None:
    base = write(tmp_path, 'seed = 1\n[loop]\nsteps = 5\ngroups = 3\n[tasks]\ntype = "records"\nhops = 2\n')
    top = write(tmp_path, "[loop]\nsteps = 7\n", "top.toml")
    config = load([base, top], ["seed=4", "tasks.people=6", 'mode="coupled"'])
    assert (config.seed, config.loop.steps, config.loop.groups, config.mode) == (4, 7, 3, "coupled")
    assert isinstance(config.tasks, RecordsConfig)
    assert (config.tasks.hops, config.tasks.people) == (2, 6)


def test_a_bare_word_in_an_override_is_text() -> None:
    assert load([], ["mode=coupled"]).mode == "coupled"


def test_the_resolved_form_round_trips(tmp_path: Path) -> None:
    config = load([], ["tasks.hops=2", "algorithm.type=rloo", "loop.steps=3"])
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_override_of_a_resolved_config_keeps_the_rest() -> None:
    config = override(load([], ["tasks.hops=2"]), ["tasks.people=9"])
    assert isinstance(config.tasks, RecordsConfig)
    assert (config.tasks.hops, config.tasks.people) == (2, 9)


WRONG = {
    "unknown key": ("[lop]\n", "loop"),
    "unknown key in a branch": ("[loop]\nstep = 3\n", "did you mean 'steps'"),
    "unknown key in a chosen part": ("[tasks]\nhop = 3\n", "did you mean 'hops'"),
    "unknown implementation": ('[tasks]\ntype = "record"\n', "did you mean 'records'"),
    "unimportable implementation": ('[tasks]\ntype = "nowhere:Tasks"\n', "PYTHONPATH"),
    "wrong type": ('[loop]\nsteps = "many"\n', "loop.steps"),
    "out of range": ("[loop]\ngroups = 0\n", "loop.groups"),
    "contradiction": ('mode = "async"\n[queue]\ntype = "memory"\n', "coupled"),
    "bad mode": ('mode = "sync"\n', "coupled"),
    "model that does not divide": ("[model]\ndim = 97\n", "divide"),
    "not TOML": ("[loop\n", "not TOML"),
    "branch that is no table": ("tasks = 3\n", "table"),
}


@pytest.mark.parametrize(("text", "expected"), WRONG.values(), ids=WRONG)
def test_wrong_input_names_file_and_mend_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load([path])
    told = str(caught.value)
    assert str(path) in told and expected in told, told
    assert "\n" not in told


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "", "records.toml")
    with pytest.raises(ConfigError, match=r"did you mean .*records\.toml"):
        load([tmp_path / "record.toml"])


@pytest.mark.parametrize("text", ["loop.steps", "=3", ""])
def test_an_override_without_key_or_value_says_what_it_wants(text: str) -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        load([], [text])


@given(st.text(max_size=30))
def test_no_override_ends_in_anything_but_a_config_or_a_config_error(text: str) -> None:
    try:
        assert isinstance(load([], [text]), RunConfig)
    except ConfigError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('loop.steps="3"', 'an integer ≥ 0, got "3"; write 3 without quotes'),
        ("loop.steps=1.5", "an integer ≥ 0, got 1.5"),
        ("loop.steps=true", "an integer ≥ 0, got true"),
        ("trainer.lr=true", "a number > 0, got true"),
        ("trainer.lr=inf", "must be finite"),
        ("trainer.lr=nan", "a number > 0"),
        ("model.tied=1", "true or false, got 1"),
        ("folder=3", "text, got 3"),
        ("tasks.syllables=true", "1 or 2, got true"),
        ("mode=asnyc", 'did you mean "async"?'),
        ("trainer.betas=[0.9]", "a list of 2 values"),
        ('trainer.betas=[0.9, "0.99"]', "each a number"),
        ("tasks.habits.forgotten=[3]", "each value text"),
        ("loop.schedule=3", "a table, got 3"),
        ('name="a b"', "that matches"),
        ("tasks.type=jsonl", "tasks.train is missing: give a path"),
        ("seed=-1", "≥ 0 and < "),
    ],
)
def test_a_value_is_not_bent_into_its_type(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([], [text])
    assert expected in str(caught.value) and "Input" not in str(caught.value)


def test_an_integer_is_a_number() -> None:
    assert load([], ["trainer.lr=1"]).trainer.lr == 1.0


def test_a_table_that_gives_some_keys_keeps_the_documented_defaults_of_the_others() -> None:
    schedule = load([], ["warmstart.schedule.final=0.5"]).warmstart.schedule
    assert (schedule.warmup, schedule.final) == (load([]).warmstart.schedule.warmup, 0.5)
    assert schedule.warmup == 20


def test_another_type_starts_its_branch_anew(tmp_path: Path) -> None:
    base = write(tmp_path, '[algorithm]\ntype = "grpo"\nscale = "std"\n')
    top = write(tmp_path, '[algorithm]\ntype = "rloo"\n', "top.toml")
    assert load([base, top]).algorithm == override(load([base]), ["algorithm.type=rloo"]).algorithm
    with pytest.raises(ConfigError, match="scale"):  # but not within one layer
        load([], ["algorithm.scale=std", "algorithm.type=rloo"])


def test_paths_and_tuples_come_back_from_saved_json() -> None:
    config = load([], ["tasks.type=jsonl", "tasks.train=a", "tasks.heldout=b", 'sandbox.require=["fs"]'])
    assert resolved(json.loads(json.dumps(config.model_dump(mode="json"))), "saved") == config


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (":", "module:Class"),
        ("os:path", "no configuration class"),
        ("rollwright.config:LoopConfig", "no field 'type'"),
        ("rollwright.plugins:Nothing", "cannot be imported"),
    ],
)
def test_what_cannot_be_a_part_is_told(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load([], [f"tasks.type={name}"])


def test_a_plug_in_that_fails_in_its_own_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plugin.py").write_text("raise ZeroDivisionError('two\\nlines')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="ZeroDivisionError: two lines"):
        load([], ["tasks.type=broken_plugin:Tasks"])


def leaves(part: PartConfig, above: str = "") -> list[str]:
    """Every key of a configuration."""
    found = []
    for name in type(part).model_fields:
        value = getattr(part, name)
        found += leaves(value, f"{above}{name}.") if isinstance(value, PartConfig) else [above + name]
    return found


VALUES = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans().map(lambda value: str(value).lower()),
    st.text(max_size=8).map(json.dumps),
    st.lists(st.sampled_from(["1", '"a"', "0.5", "{}"])).map(lambda items: f"[{', '.join(items)}]"),
    st.sampled_from(["{}", "{a = 1}", '{type = "x"}', "1979-05-27", "[[]]"]),
)


@given(st.sampled_from(leaves(load([]))), VALUES)
def test_any_value_of_any_key_is_taken_as_it_is_or_refused_in_our_words(key: str, value: object) -> None:
    try:
        config = load([], [f"{key}={value}"])
    except ConfigError as error:
        told = str(error)
        assert key.partition(".")[0] in told
        assert not re.search(r"Input should|valid (integer|number|string)|pydantic|Extra inputs", told), told
    else:
        assert resolved(json.loads(json.dumps(config.model_dump(mode="json"))), "saved") == config
