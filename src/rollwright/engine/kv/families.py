"""Model types whose memory the planner understands.

Role: the list, and the refusal of all others. Neighbours: `read` asks before it counts. Invariant: a type is
listed only where the keys of `raw`, read as `read` does, decide what each layer keeps; a type's own code may
mean other defaults by the same keys, so a name that is not listed is refused rather than taken for a Llama.
"""

from __future__ import annotations

import difflib

from rollwright.errors import ConfigError

KNOWN = (
    *("bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "falcon", "gemma"),
    *("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt2"),
    *("gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granitemoe", "granitemoehybrid", "hunyuan_v1_dense"),
    *("jamba", "kimi_k2", "llama", "llama4_text", "mistral", "mixtral", "nemotron_h", "olmo", "olmo2"),
    *("olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_vl_text"),
    *("seed_oss", "smollm3", "stablelm", "starcoder2"),
)
"""`model_type`, of a model with several parts that of its `text_config`."""


def understood(model_type: str, where: str) -> None:
    """Refuse a model whose type is not listed; `where` names the file.

    Raises:
        ConfigError: the type is missing or not known; names the known ones.
    """
    if model_type in KNOWN:
        return
    near = difflib.get_close_matches(model_type, KNOWN, n=1)
    what = f"model_type '{model_type}' is not known here" if model_type else "'model_type' is missing"
    mean = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(f"{where}: {what}, and it decides what a layer keeps; {mean}known: {', '.join(KNOWN)}")
