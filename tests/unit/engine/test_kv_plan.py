"""What fits, what sharing saves, where more stops paying: against enumeration and arithmetic by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_run import made_run
from typer.testing import CliRunner, Result

from rollwright.cli.main import app
from rollwright.engine.kv.accelerators import ACCELERATORS
from rollwright.engine.kv.card import Card, Kind, Layer, Parameters
from rollwright.engine.kv.cards import named
from rollwright.engine.kv.cost import BITS, Cost, Format
from rollwright.engine.kv.plan import Demand, Device, plan
from rollwright.engine.kv.sizes import parsed, told
from rollwright.engine.kv.traffic import Traffic, learned
from rollwright.errors import ConfigError
from rollwright.view.folder import viewed

GIB = 2**30
TRAFFIC = st.builds(
    lambda prompt, shared, *rest: Traffic(prompt, min(shared, prompt), *rest),
    *(st.integers(1, 60), st.integers(0, 60), st.integers(1, 4), st.integers(1, 20)),
    *(st.integers(0, 20), st.integers(1, 5)),
)


def plain(layers: int = 1, kind: Kind = Kind.FULL, span: int = 0) -> Card:
    """A model whose token costs 4 bytes a layer."""
    layer = Layer(kind, heads=1, key=1, value=1, span=span)
    return Card("plain", (layer,) * layers, 10_000, Parameters(1000), "bf16")


def sequences(traffic: Traffic, groups: int) -> list[list[int]]:
    """Rollouts as ids: what is common to all, what to a group, and what is each one's own."""
    made, fresh = [], iter(range(10**6, 10**9))
    for group in range(groups):
        prompt = [
            *range(traffic.shared),
            *(1000 + group * 100 + i for i in range(traffic.prompt - traffic.shared)),
        ]
        for _ in range(traffic.group):
            made.append([*prompt, *(next(fresh) for _ in range(traffic.length - traffic.prompt))])
    return made


@given(TRAFFIC, st.integers(1, 4), st.integers(1, 3))
def test_shared_memory_is_that_of_a_trie_of_whole_blocks(traffic: Traffic, groups: int, block: int) -> None:
    rows = sequences(traffic, groups)
    blocks = {tuple(row[: at + block]) for row in rows for at in range(0, len(row), block)}
    found = Cost(plain(), block=block).together(traffic, len(rows), traffic.length)
    assert found == 4 * block * len(blocks)


@given(TRAFFIC, st.integers(1, 8))
def test_the_hit_rate_is_that_of_a_cache_that_forgets_nothing(traffic: Traffic, block: int) -> None:
    cached: set[tuple[int, ...]] = set()

    def keep(ids: list[int]) -> None:
        cached.update(tuple(ids[:end]) for end in range(block, len(ids) + 1, block))

    def hit(ids: list[int]) -> int:
        return max((end for end in range(block, len(ids), block) if tuple(ids[:end]) in cached), default=0)

    keep(list(range(traffic.shared)))  # rollouts of other prompts came before
    asked = found = 0
    rows = sequences(traffic, 1)
    for turn in range(traffic.turns):
        length = traffic.prompt + turn * (traffic.sampled + traffic.observed)
        for row in rows:
            asked, found = asked + length, found + hit(row[:length])
            keep(row[: length + traffic.sampled - 1] if turn or traffic.sampled > 1 else row[:length])
    assert Cost(plain(), block=block).hit_rate(traffic) == pytest.approx(found / asked)


@settings(max_examples=60)
@given(
    st.sampled_from(["llama-3.1-8b", "gemma-3-27b", "gemma-3n-e4b", "qwen3-next-80b-a3b", "llama-4-scout"]),
    st.integers(1, 40_000),
    st.integers(1, 64),
    st.integers(1, 8),
)
def test_longer_costs_more_and_sharing_never_does(name: str, tokens: int, block: int, devices: int) -> None:
    cost = Cost(named(name), Format("int8"), block, devices)
    assert 0 < cost.sequence_bytes(tokens) <= cost.sequence_bytes(tokens + 1)
    assert Cost(named(name), Format("int8"), block, 1).sequence_bytes(tokens) >= cost.sequence_bytes(tokens)
    traffic = Traffic(max(1, tokens // 2), tokens // 4, group=4)
    states = sum(line.state_bytes for line in cost.lines())
    assert cost.together(traffic, 8, tokens) <= 8 * cost.sequence_bytes(tokens) + 2 * states


def test_what_fits_fits_and_one_more_does_not() -> None:
    demand = Demand(context=8192, reserve=8 * GIB, block=16)
    traffic = Traffic(prompt=6000, shared=1000, turns=2, sampled=256, observed=512, group=8)
    made = plan(named("llama-3.1-8b"), Device(80 * GIB), demand, traffic)
    # 80 − 8 GiB − 16,060,522,496 of weights = 61,248,888,832; a sequence is 8,192 × 131,072 = 1 GiB
    assert made.budget == 72 * GIB - 16_060_522_496
    assert (made.sequence_bytes, made.fits) == (GIB, 57)
    cost = Cost(named("llama-3.1-8b"), Format("bf16"), 16)
    assert cost.together(traffic, made.fits_shared, 8192) <= made.budget
    assert cost.together(traffic, made.fits_shared + 1, 8192) > made.budget
    assert made.fits_shared > 2 * made.fits
    assert 8 * cost.sequence_bytes(made.longest) <= made.budget < 8 * cost.sequence_bytes(made.longest + 1)
    assert made.longest_one == 131_072  # the model's own end, though memory would hold more


def test_the_knee_is_where_one_more_adds_a_tenth_of_the_first() -> None:
    # dense: T(B) = B / (a + bB), so T(B+1) − T(B) = a / ((a + bB)(a + b(B+1)))
    demand = Demand(context=2048, fixed_seconds=0.002)
    device, traffic = Device(80 * GIB, 3.35e12, 989e12), Traffic(prompt=1024, sampled=1024)
    made = plan(named("llama-3.1-8b"), device, demand, traffic)
    a = 0.002 + 16_060_522_496 / 3.35e12
    b = 131_072 * 1536 / 3.35e12 + 2 * 8_030_261_248 / 989e12
    gains = [a / ((a + b * n) * (a + b * (n + 1))) * (a + b) for n in range(1, 2000)]
    assert made.knee == 1 + sum(gain >= 0.1 for gain in gains)
    assert made.knee_rate == pytest.approx(made.knee / (a + b * made.knee))
    assert made.first_rate == pytest.approx(1 / (a + b))
    assert plan(named("llama-3.1-8b"), Device(80 * GIB), demand, traffic).knee is None


def test_what_cannot_fit_is_refused_with_the_nearest_setting() -> None:
    with pytest.raises(ConfigError, match=r"take 131 GiB, the device has 80 GiB.*--tensor-parallel 2"):
        plan(named("llama-3.1-70b"), Device(80 * GIB), Demand(context=4096))
    with pytest.raises(
        ConfigError, match=r"one sequence of 131,072 tokens 16 GiB more.*--context (\d+)"
    ) as caught:
        plan(named("llama-3.1-8b"), Device(24 * GIB), Demand())
    nearest = int(re.findall(r"--context (\d+)", str(caught.value))[0])
    assert plan(named("llama-3.1-8b"), Device(24 * GIB), Demand(context=nearest)).fits == 1
    with pytest.raises(ConfigError, match="one sequence"):
        plan(named("llama-3.1-8b"), Device(24 * GIB), Demand(context=nearest + 16))


@given(st.integers(0, 10**15))
def test_sizes_are_read_as_they_are_written(size: int) -> None:
    assert parsed(f"{size}", "x") == parsed(f"{size} B", "x") == size
    number, unit = told(size).split()
    assert parsed(f"{number} {'B' if unit == 'bytes' else unit}", "x") == pytest.approx(size, rel=0.01)


def test_units() -> None:
    assert parsed("80GiB", "x") == 80 * GIB and parsed("24 gb", "x") == 24 * 10**9
    assert parsed("1.5MiB", "x") == 3 * 2**19 and told(16 * GIB) == "16 GiB"


def test_traffic_is_learned_from_rollouts(tmp_path: Path) -> None:
    with viewed(made_run(tmp_path, 48)) as view:
        assert view.archive is not None
        lines = [line.rollout for line in view.lines if line.job == "train"]
        rollouts = [kept.scored.rollout for _, kept, _ in view.archive.whole(lines)]
    found = learned(rollouts, 4)
    rows = [rollout.rows[0] for rollout in rollouts]
    assert found.rollouts == len(rollouts) and found.traffic.group == 4
    assert found.longest == max(len(row.tokens) for row in rows)
    assert found.traffic.prompt == np.ceil(np.mean([rollout.turns[0].start for rollout in rollouts]))
    common = {tuple(row.tokens[: found.traffic.shared].tolist()) for row in rows}
    assert len(common) == 1
    mean = np.mean([len(row.tokens) for row in rows])
    assert found.traffic.length == pytest.approx(mean, rel=0.2)
    with pytest.raises(ConfigError, match="no rollout"):
        learned([], 4)


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "kv", *arguments], terminal_width=200)


def test_the_articles_case_prints_16_gib() -> None:
    done = ask("article", "--memory", "80GiB", "--context", "32768", "--kv-dtype", "fp16")
    assert done.exit_code == 0, done.output
    assert re.search(r"a sequence of 32,768 +16 GiB\n", done.output)
    assert re.search(r"sequences that fit +3;", done.output)  # 80 − 8 − 12.55 GiB of weights


def test_json_and_picture_say_the_same_as_the_text(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    sets = ["gemma-3-27b", "--card", "h100", "--prompt", "4000", "--shared", "1000", "--turns", "4"]
    sets += ["--observed", "300", "--group", "8", "--kv-dtype", "fp8", "--picture", str(picture)]
    text, found = ask(*sets).output, json.loads(ask(*sets, "--json").output)
    assert f"{found['token_bytes']:,} bytes" in text and f"{found['knee']:,} sequences" in text
    assert found["kinds"][0]["kind"] == "sliding window" and found["kv"] == "fp8"
    root = ElementTree.parse(picture).getroot()
    words = " ".join(each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text"))
    assert f"nothing shared: {found['fits']:,} fit" in words and f"knee: {found['knee']:,}" in words


def test_a_models_name_is_escaped_in_the_picture(tmp_path: Path) -> None:
    folder = tmp_path / "<b>&"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(
        json.dumps({**config, "vocab_size": 100, "max_position_embeddings": 512})
    )
    done = ask(str(folder), "--memory", "1GB", "--picture", str(tmp_path / "x.svg"))
    assert done.exit_code == 0 and "<b>&amp;" not in (tmp_path / "x.svg").read_text()
    assert ElementTree.parse(tmp_path / "x.svg") is not None


def test_traffic_of_a_run(tmp_path: Path) -> None:
    run = made_run(tmp_path, 48)
    found: dict[str, Any] = json.loads(
        ask("smollm2-135m", "--memory", "4GiB", "--from-run", str(run.path), "--json").output
    )
    assert found["traffic"]["turns"] >= 1 and found["context"] <= 8192 and found["fits"] > 1


def test_sharing_never_makes_fewer_fit_however_many_do(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 2, "num_hidden_layers": 1, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 2, "vocab_size": 9}))
    found = json.loads(ask(str(tmp_path), "--card", "h200", "--context", "64", "--json").output)
    assert found["fits_shared"] == found["fits"] > 2**20


def test_a_context_beyond_the_model_is_noted_and_never_advised() -> None:
    done = ask("llama-3.1-8b", "--card", "h100", "--context", "200000", "--kv-dtype", "fp8")
    assert "note: 200,000 tokens are more than the 131,072" in done.output, done.output
    assert "KV of 1 sequence " in done.output and "so that 1 fits at once" in done.output
    assert re.search(r"worth allowing +131,072,", done.output)
    refused = ask("llama-2-7b", "--memory", "80GiB", "--context", "1000000")
    assert "--context 4096" in refused.output.replace(",", "")


def test_heads_that_do_not_divide_by_the_devices_are_noted() -> None:
    found = ask("llama-3.1-8b", "--card", "h100", "--tensor-parallel", "3").output
    assert "note: 8 KV heads do not divide by 3 devices" in found and "holds 3" in found
    assert "divide" not in ask("llama-3.1-8b", "--card", "h100", "--tensor-parallel", "4").output


def test_the_help_lists_what_can_be_given() -> None:
    said = re.sub(r"[\s│]+", " ", ask("--help").output)
    for name in (*ACCELERATORS, *BITS):
        assert re.search(rf"[ :,]{name}[,.;]", said), (name, said)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["llama-3.1-8b"], "how much memory"),
        (["llama-3.1-8b", "--memory", "much"], "no size"),
        (["lama-3.1-8b", "--memory", "80GiB"], "did you mean 'llama-3.1-8b'"),
        (["article", "--card", "h10"], "no such card"),
        (["article", "--card", "h100", "--kv-dtype", "fp7"], "'fp7' is not known"),
        (
            ["article", "--card", "h100", "--kv-dtype", "q8"],
            "--kv-dtype q8: 'q8' is not known; take one of fp32",
        ),
        (["article", "--card", "h100", "--dtype", "q8"], "--dtype q8"),
        (["article", "--card", "h100", "--reserve", "0.1"], "--reserve = '0.1' is no whole number of bytes"),
        (["article", "--memory", "0.8"], "--memory = '0.8'"),
        (["article", "--card", "h100", "--activations", "1.5"], "--activations = '1.5'"),
        (["article", "--card", "h100", "--weights", "0.5"], "--weights = '0.5'"),
        (["article", "--memory", "20GiB", "--context", "99000"], "is --context 11152 or"),
        (["article", "--card", "h100", "--gain", "1"], "--gain"),
        (["article", "--card", "h100", "--tflops", "-1"], "--tflops"),
        (["article", "--card", "h100", "--turns", "4"], "belong to --prompt"),
        (["article", "--card", "h100", "--sampled", "4"], "belong to --prompt"),
        (["article", "--card", "h100", "--group", "4"], "--group needs"),
        (["article", "--memory", "9" * 400], "no size"),
        (["article", "--card", "h100", "--prompt", "10", "--shared", "11"], "not more shared"),
        (["article", "--card", "h100", "--prompt", "0"], "--prompt 0"),
        (["article", "--card", "h100", "--prompt", "9", "--context", "8"], "do not fit"),
        (["article", "--card", "h100", "--picture", "plan.png"], "ends in .svg"),
        (["article", "--card", "h100", "--picture", "/nowhere/plan.svg"], "cannot be written"),
        (["article", "--card", "h100", "--from-run", "/nowhere"], "no run folder"),
        (["article", "--memory", "4GiB"], "the device has 4 GiB"),
    ],
)
def test_wrong_inputs_are_one_line(arguments: list[str], says: str) -> None:
    done = ask(*arguments)
    assert done.exit_code == 2 and says in done.stderr, done.output
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
