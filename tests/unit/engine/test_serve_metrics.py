"""An engine's health as Prometheus text."""

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from rollwright.engine.base import Health
from rollwright.engine.serve.metrics import text
from rollwright.types import PolicyVersion

FRESH = Health(
    ready=True,
    version=PolicyVersion(run="r", incarnation=1, step=7),
    running=0,
    waiting=0,
    prompt_tokens=0,
    cached_tokens=0,
    sampled_tokens=0,
    steps=0,
    busy_seconds=0.0,
    idle_seconds=0.0,
    kv_tokens=0,
    kv_capacity=100,
)


def read(health: Health, engine: str = "e") -> dict[str, tuple[str, float, dict[str, str]]]:
    families = text_string_to_metric_families(text(health, engine))
    return {s.name: (family.type, s.value, s.labels) for family in families for s in family.samples}


def test_the_three_metrics_that_decide_and_the_counters() -> None:
    busy = replace(
        FRESH,
        prompt_tokens=8,
        cached_tokens=6,
        constrained=4,
        compliant=3,
        rate=120.0,
        rate_variation=0.25,
        gap_p99=0.5,
    )
    found = read(busy)
    expected = {
        "prefix_hit_ratio": 0.75,
        "compliance_ratio": 0.75,
        "decode_rate_variation": 0.25,
        "token_gap_p99_seconds": 0.5,
        "decode_tokens_per_second": 120.0,
        "policy_step": 7.0,
        "policy_incarnation": 1.0,
        "ready": 1.0,
    }
    assert {name: found[f"rollwright_engine_{name}"][:2] for name in expected} == {
        name: ("gauge", value) for name, value in expected.items()
    }
    assert found["rollwright_engine_prompt_tokens_total"][:2] == ("counter", 8.0)


def test_a_ratio_without_data_is_absent() -> None:
    found = read(FRESH)
    absent = ("prefix_hit_ratio", "compliance_ratio", "decode_rate_variation", "token_gap_p99_seconds")
    assert not [name for name in absent if f"rollwright_engine_{name}" in found]
    assert found["rollwright_engine_sampled_tokens_total"][1] == 0.0


def test_a_strange_name_stays_one_label() -> None:
    name = 'run "x"\\\n'
    assert {labels["engine"] for _, _, labels in read(FRESH, name).values()} == {name}
