"""transformers at its best: `generate` and continuous batching, as the engine benchmarks' rivals.

Role: what `engine.py` and `prefix.py` compare with. Neighbours: `models.pair` gives the model, with our
weights. Invariant: sampling at temperature 1 from the whole vocabulary, ends at the number of tokens and
nothing else, and records no logprobs, which would only cost it time.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from serving import CpuClock

from rollwright.types import Ints

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CACHES, ATTENTION = ("dynamic", "static"), ("sdpa", "eager")


class _Watch:
    """A logits processor that changes nothing and notes when the first and the newest token were due."""

    def __init__(self, clock: CpuClock) -> None:
        self._clock, self.first, self.last = clock, 0.0, 0.0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.last = self._clock.now()
        self.first = self.first or self.last
        return scores


class Generate:
    """`generate` of a static batch; its cache and attention are `tune`d for the batch."""

    def __init__(self, model: LlamaForCausalLM, clock: CpuClock) -> None:
        self._model, self._clock = model, clock
        self.cache, self.attention = CACHES[0], ATTENTION[0]
        logging.getLogger("transformers").setLevel(logging.ERROR)

    def tune(self, batch: int, prompt: int, tokens: int = 8) -> str:
        """Try every setting at that batch and length, keep the one whose decoding is fastest, and tell it."""
        rng, found = np.random.default_rng(0), {}
        ids = list(rng.integers(0, self._model.config.vocab_size, (batch, prompt), dtype=np.int32))
        for attention in ATTENTION:
            for cache in CACHES:
                self.cache, self.attention = cache, attention
                self.decode(ids, 2)
                found[cache, attention] = self.decode(ids, tokens)
        self.cache, self.attention = max(found, key=lambda setting: found[setting])
        return f"{self.cache}, {self.attention}"

    def usual(self, batch: int) -> str:
        """The setting that `tune` mostly finds for that batch."""
        self.cache, self.attention = ("static" if batch >= 64 else "dynamic"), "sdpa"
        return f"{self.cache}, {self.attention} (not tuned)"

    def decode(self, ids: Sequence[Ints], steps: int) -> float:
        """Tokens per second after the first token of each, `steps` tokens in each row."""
        watch = _Watch(self._clock)
        self.generate(ids, steps + 1, watch)
        return steps * len(ids) / (watch.last - watch.first)

    def generate(self, ids: Sequence[Ints], tokens: int, watch: _Watch | None = None) -> list[Ints]:
        """`tokens` new ids for each prompt; shorter prompts are padded on the left."""
        from transformers import GenerationConfig, LogitsProcessorList

        longest = max(len(prompt) for prompt in ids)
        padded = np.zeros((len(ids), longest), np.int64)
        mask = np.zeros((len(ids), longest), np.int64)
        for row, prompt in enumerate(ids):
            padded[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        self._model.set_attn_implementation(self.attention)
        config = GenerationConfig(
            max_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=self.cache,
            disable_compile=True,
        )
        processors = LogitsProcessorList([watch] if watch is not None else [])
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self._model.generate(
                input_ids=torch.from_numpy(padded),
                attention_mask=torch.from_numpy(mask),
                generation_config=config,
                logits_processor=processors,
            )
        return list(out[:, longest:].numpy().astype(np.int32))


class ContinuousBatching:
    """transformers' continuous batching with at most `batch` requests at once; a context manager, whose setup
    is outside every clock. Of pages of 32 and 256 tokens, 64 to 1,024 tokens a step, both kinds of attention
    and sharing of blocks, these settings were as fast as any."""

    def __init__(self, model: LlamaForCausalLM, batch: int, clock: CpuClock, tokens: int = 256) -> None:
        self._model, self._batch, self._clock, self._tokens = model, batch, clock, tokens
        self._stack, self._runs = contextlib.ExitStack(), 0
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

    def __enter__(self) -> ContinuousBatching:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._model.set_attn_implementation("sdpa")
        manager = self._model.continuous_batching_context_manager(
            generation_config=GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=256,
                num_blocks=self._batch * 3,
                max_batch_tokens=self._tokens,
                max_requests_per_batch=self._batch,
                allow_block_sharing=False,
            ),
        )
        self._manager = self._stack.enter_context(manager)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, ids: Sequence[Ints], lengths: Sequence[int]) -> float:
        """Tokens per second, from the first request given to the last ended.

        Raises:
            RuntimeError: a request failed or came back short: nothing was measured.
        """
        self._runs += 1
        began, got = self._clock.now(), 0
        for i, (prompt, length) in enumerate(zip(ids, lengths, strict=True)):
            name = f"{self._runs}/{i}"
            self._manager.add_request(prompt.tolist(), request_id=name, max_new_tokens=length)
        for output in self._ended(len(ids)):
            got += len(output)
        seconds = self._clock.now() - began
        if got != sum(lengths):
            raise RuntimeError(f"continuous batching gave {got} tokens, {sum(lengths)} were asked for")
        return got / seconds

    def _ended(self, count: int) -> Iterator[list[int]]:
        for _ in range(count):
            output = self._manager.get_result(timeout=300)
            if output is None or output.error:
                raise RuntimeError(f"continuous batching failed: {output and output.error}")
            yield output.generated_tokens
