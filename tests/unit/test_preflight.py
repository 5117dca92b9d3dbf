"""What follows from a configuration, and what is refused before a run starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.config import RunConfig, load, resolved
from rollwright.errors import ConfigError, PluginError, SandboxUnavailable
from rollwright.run import preflight
from rollwright.run.derived import CHECKPOINTS_KEPT, WEIGHTS_KEPT, derive, human, parameters
from rollwright.run.written import differing, literal, toml

ROOT = Path(__file__).parents[2]


def derived(*sets: str) -> Any:
    config = load([], sets)
    return derive(config, preflight.taskset(config))


@pytest.mark.parametrize(
    "sets", [[], ["model.tied=false", "model.kv_heads=2"], ["model.layers=1", "model.dim=64"]]
)
def test_parameters_and_bytes_are_those_of_the_real_model(sets: list[str]) -> None:
    from rollwright.model import state as codec
    from rollwright.model.decoder import Decoder
    from rollwright.trainer.torch_trainer import TorchTrainer

    config, told = load([], sets), derived(*sets)
    decoder = Decoder(config.model, told.vocabulary)
    assert told.parameters == sum(p.numel() for p in decoder.parameters())
    assert told.parameters == parameters(config.model, told.vocabulary)
    trainer = TorchTrainer(decoder, config.trainer)
    stored = len(codec.encode(trainer.weights()))
    assert told.weights_bytes <= stored < told.weights_bytes + 20_000  # names and a header
    assert told.checkpoint_bytes == 5 * told.weights_bytes  # two moments for each optimiser


def test_steps_prompts_rollouts_updates() -> None:
    told = derived("loop.steps=5", "loop.groups=3", "rollout.group_size=4", "trainer.minibatches=2")
    assert (told.prompts_per_step, told.rollouts_per_step, told.updates_per_step) == (3, 12, 2)
    tree = told.tree()
    assert (tree["prompts"], tree["rollouts"], tree["updates"]) == (15, 60, 10)
    assert told.evaluation_rollouts == 4 * RunConfig().evaluation.tasks
    assert all(isinstance(line, str) for line in told.lines())


def test_key_and_value_memory_is_the_embedded_engines_rounding() -> None:
    told = derived("engine.max_batch=3", "engine.row_tokens=100", "engine.kv_tokens=1000", "model.kv_heads=2")
    # 3 layers, 2 heads of 24, keys and values in float32: 1,152 bytes a token; 8 rows of 128 positions
    assert told.kv_rows_bytes == 8 * 128 * 1152
    assert told.kv_cache_bytes == 1000 * 1152
    assert told.kv_host_bytes == 0


def test_running_requests_and_the_tasks_rows_bound_the_memory() -> None:
    sets = ["engine.max_batch=500", "engine.row_tokens=4096", "model.context=2048"]
    sets += ["rollout.concurrency=9", "evaluation.concurrency=4"]
    limit = derived(*sets).row_tokens
    assert limit < 2048  # the tasks allow less than the model
    assert derived(*sets).kv_rows_bytes == 16 * -(-limit // 64) * 64 * derived(*sets).kv_cache_bytes // 32768


def test_coupled_runs_publish_no_files_and_nothing_trained_has_no_moments() -> None:
    coupled = derived('mode="coupled"', "loop.steps=0", "warmstart.steps=0")
    assert coupled.states_bytes == coupled.weights_bytes * CHECKPOINTS_KEPT
    assert derived().states_bytes == derived().weights_bytes * (WEIGHTS_KEPT + 5 * CHECKPOINTS_KEPT)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1_340_000, "1.3 MB"), (2e15, "2.0 PB")]
)
def test_bytes_for_people(size: float, text: str) -> None:
    assert human(size) == text


def test_a_run_that_fits_is_accepted_and_leaves_nothing(tmp_path: Path) -> None:
    preflight.check(load([], [f"folder={tmp_path / 'new' / 'runs'}"]))
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file is a file.*--set folder="):
        preflight.check(load([], [f"folder={tmp_path / 'file' / 'runs'}"]))


def test_a_folder_no_file_system_can_hold(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="character 0"):
        preflight.check(load([], ['folder="a\\u0000b"']))


def test_too_little_room_says_both_figures() -> None:
    with pytest.raises(ConfigError, match=r"may need .*TB.* are free"):
        preflight.check(load([], ["evaluation.tasks=1000000000"]))


def test_too_little_memory_for_the_model_says_both_figures() -> None:
    with pytest.raises(ConfigError, match=r"may take .* of memory .* this machine has .*: take a smaller"):
        preflight.check(load([], ["model.layers=10000000"]))


MUCH = ["model.context=300000", "tasks.limits.max_tokens=300000", "engine.row_tokens=300000"]


@pytest.mark.parametrize(
    ("sets", "keys"),
    [
        (["engine.kv_tokens=10000000000"], ["kv_tokens"]),
        (["engine.host_tokens=10000000000"], ["host_tokens"]),
        (MUCH, ["max_batch", "row_tokens"]),
    ],
)
def test_too_little_memory_names_the_nearest_settings_that_fit(
    sets: list[str], keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "memory", lambda: (8 * 2**30, 8 * 2**30))
    config = load([], sets)
    told = derive(config, preflight.taskset(config))
    with pytest.raises(
        ConfigError, match=r"keys and values .* this machine has 8\.6 GB: set engine"
    ) as caught:
        preflight.fits_in_memory(config, told)
    near = dict(re.findall(r"engine\.(\w+) = (\d+)", str(caught.value)))
    assert list(near) == keys
    for key, value in near.items():
        for number, fits in ((int(value), True), (int(value) + 64, False)):
            changed = load([], [*sets, f"engine.{key}={number}"])
            again = derive(changed, preflight.taskset(changed))
            if fits:
                preflight.fits_in_memory(changed, again)
            else:
                with pytest.raises(ConfigError):
                    preflight.fits_in_memory(changed, again)


def test_where_no_single_setting_helps_all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "memory", lambda: (8 * 2**30, 8 * 2**30))
    config = load([], [*MUCH, "engine.kv_tokens=10000000000"])
    with pytest.raises(ConfigError, match=r"lower several of engine\.max_batch"):
        preflight.fits_in_memory(config, derive(config, preflight.taskset(config)))


def test_what_a_run_holds_already_needs_no_room(tmp_path: Path) -> None:
    config = load([], ["model.layers=100000", "model.dim=8192"])
    needed = derive(config, preflight.taskset(config))
    preflight.room(needed, tmp_path, held=needed.disk_bytes)
    with pytest.raises(ConfigError, match="free"):
        preflight.room(needed, tmp_path)


def test_fewer_sandboxes_than_rollouts_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.max_live"):
        preflight.check(load([], ["sandbox.max_live=8"]))


def test_bare_processes_are_refused_before_anything_starts() -> None:
    with pytest.raises(SandboxUnavailable, match="without isolation"):
        preflight.check(load([], ["sandbox.type=process"]))
    preflight.check(load([], ["sandbox.type=process", "sandbox.unsafe=true"]))


def test_a_prompt_that_leaves_no_room_to_speak_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing is left to say"):
        preflight.check(load([], ["tasks.limits.max_tokens=16", "tasks.hops=6"]))


@pytest.mark.parametrize(
    "key", ["model.dim=64", "loop.steps=3", "rollout.group_size=4", "mode=coupled", "loop={steps=3}"]
)
def test_an_evaluation_refuses_what_cannot_have_an_effect(key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--set {key.partition('=')[0].partition('.')[0]}.*cannot have an effect"
    ):
        preflight.evaluation(load([]), [key])


def test_an_evaluation_takes_what_has_one() -> None:
    sets = ["evaluation.tasks=8", "tasks.hops=2", "seed=4", "rollout.success=0.5", "sandbox.unsafe=true"]
    assert preflight.evaluation(load([]), sets) == load([], sets)
    with pytest.raises(ConfigError, match="did you mean 'model'"):
        preflight.evaluation(load([]), ["modell.dim=3"])


SETS = st.lists(
    st.sampled_from(
        [
            "loop.steps=7",
            "warmstart.schedule.warmup=0",
            "warmstart.schedule.final=1.0",
            "loop.schedule.final=0.5",
            "algorithm.type=rloo",
            "tasks.habits.forgotten=[]",
            "tasks.habits.table=0.0",
            "tasks.limits.max_tokens=100",
            'tasks.system="\\u007f\\" \\\\ ä\\n"',
            "trainer.lr=1",
            "trainer.betas=[0.5, 0.75]",
            "model.tied=false",
            'sandbox.require=["fs"]',
            "sandbox.type=landlock",
            "rollout.max_attempts=9",
        ]
    ),
    unique=True,
)


@settings(deadline=None)
@given(SETS, st.booleans())
def test_what_is_written_loads_back_to_the_same_tree(sets: list[str], changed: bool) -> None:
    config = load([], sets)
    assert resolved(tomllib.loads(toml(config, changed=changed)), "written") == config
    assert resolved(differing(config), "written") == config


def test_only_what_was_changed_is_written() -> None:
    assert toml(load([]), changed=True) == ""
    assert toml(load([], ["loop.steps=7", "seed=0"]), changed=True) == "[loop]\nsteps = 7\n"
    text = toml(load([], ["loop.steps=7"]), changed=False)
    assert "\nsteps = 7\n" in text and "\ngroups = 16  # default\n" in text


def test_a_part_with_required_keys_is_written(tmp_path: Path) -> None:
    config = load([], ["tasks.type=jsonl", "tasks.train=a b", "tasks.heldout=c"])
    assert resolved(tomllib.loads(toml(config, changed=True)), "written") == config


@given(st.recursive(st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False), st.lists))
def test_any_value_is_written_as_toml(value: Any) -> None:
    def writable(each: Any) -> bool:
        return (
            all(map(writable, each))
            if isinstance(each, list)
            else not isinstance(each, str) or _unicode(each)
        )

    if writable(value):
        assert tomllib.loads(f"x = {literal(value)}")["x"] == value


def _unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def test_a_dictionary_is_an_inline_table() -> None:
    assert tomllib.loads(f"x = {literal({'a b': [1], 'c': {}})}")["x"] == {"a b": [1], "c": {}}


def config_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "rollwright.cli.main", "config", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_toml_that_loads_back_and_json() -> None:
    given = load([ROOT / "examples" / "records.toml"], ["loop.steps=3"])
    printed = config_command("examples/records.toml", "--set", "loop.steps=3")
    assert resolved(tomllib.loads(printed.stdout), "printed") == given, printed.stderr
    assert "# model " in printed.stdout
    told = json.loads(config_command("examples/records.toml", "--set", "loop.steps=3", "--json").stdout)
    assert resolved(told["config"], "printed") == given
    assert told["derived"]["prompts"] == 48


def test_the_command_refuses_what_train_refuses() -> None:
    ended = config_command("--set", "model.context=64")
    assert ended.returncode == 2 and ended.stdout == "" and "model.context" in ended.stderr


def test_a_tool_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    task = '{"id": "ID", "set": "s", "messages": [{"role": "user", "content": "ID?"}], "tools": ["sqll"], '
    task += '"checks": [{"kind": "answer_equals", "expected": "1"}]}\n'
    for split in ("train", "heldout"):
        (tmp_path / split).write_text(task.replace("ID", split))
    sets = ["tasks.type=jsonl", "warmstart.steps=0", "evaluation.tasks=1"]
    sets += [f"tasks.{split}={tmp_path / split}" for split in ("train", "heldout")]
    with pytest.raises(PluginError, match="did you mean 'sql'"):
        preflight.check(load([], [*sets, "model.context=4096"]))


def test_an_accelerator_that_is_not_there_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    place = f"folder={tmp_path / 'runs'}"
    with pytest.raises(ConfigError, match=r"engine\.device = 'cuda:63' cannot be used here: torch finds \d"):
        preflight.check(load([], ["mode=async", "engine.device=cuda:63", place]))
    assert not (tmp_path / "runs").exists()
