"""Our task sets keep the contract."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rollwright.config import load
from rollwright.tasks.config import AtlasConfig, GymConfig, JsonlConfig, RecordsConfig
from rollwright.testing.tasksets import CHECKS, NUMBERS, Make

OWN = Path(__file__).parents[2] / "examples" / "own_task" / "sales.toml"
GYM = ("chain_sum", "spell_backward", "family_relationships", "course_schedule")


GYM_SETS = [pytest.param(f"gym-{name}", marks=pytest.mark.needs("reasoning-gym")) for name in GYM]


@pytest.fixture(params=["records", "records-one-syllable", "jsonl", "own", "atlas", *GYM_SETS])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "records":
        return RecordsConfig().build
    if request.param == "records-one-syllable":
        return RecordsConfig(syllables=1, people=4, cities=3, hops=2).build
    if request.param == "atlas":
        return AtlasConfig().build
    if request.param == "own":
        return load([OWN]).tasks.build  # type: ignore[attr-defined, no-any-return]
    if request.param.startswith("gym-"):
        return GymConfig(dataset=request.param.removeprefix("gym-"), heldout=NUMBERS).build
    records = RecordsConfig().build()
    paths = {}
    for split in ("train", "heldout"):
        paths[split] = tmp_path / f"{split}.jsonl"
        tasks = [msgspec.structs.replace(records.task(split, i), set="jsonl") for i in range(NUMBERS)]
        paths[split].write_bytes(b"\n".join(msgspec.json.encode(task) for task in tasks))
    return JsonlConfig(train=paths["train"], heldout=paths["heldout"]).build


@pytest.mark.parametrize("check", CHECKS)
def test_task_set(check: Callable[[Make], None], make: Make) -> None:
    check(make)
