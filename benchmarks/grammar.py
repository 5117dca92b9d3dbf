"""Constrained output of a model with random weights: is it valid, and what does it cost?

500 function schemas of bfcl-eval (`workloads/bfcl_functions.json` says what was changed), prompts of random
tokens, our engine with a model of 0.9 M. Case `valid`: the share of completions that a JSON schema validator
which knows nothing of the engine (`jsonschema_rs`) takes. Case `time`: CPU seconds a token with constraints
over those without, 16 requests at once, the same numbers of tokens from the same prompts, interleaved; the
schemas were compiled before, as they are in training from the second turn on. `time/b1`, `time/b64`: the same
with other numbers at once. `compile`: milliseconds to compile a schema.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass

import jsonschema_rs
import numpy as np
from harness import ROOT, Cases, parser
from models import VOCAB, decoder
from serving import one_thread

from rollwright.clock import SystemClock
from rollwright.engine.base import Engine
from rollwright.engine.config import EmbeddedConfig
from rollwright.engine.grammar.guided import GuidedGrammars
from rollwright.events import NullSink
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.types import Completion, Constraint, ConstraintKind, Ints, PolicyVersion, Sampling

FUNCTIONS = ROOT / "benchmarks" / "workloads" / "bfcl_functions.json"
END = "<|end|>"
BUDGET, QUICK, PROMPT = 512, 256, 64
"""Tokens of a completion, the same with `--quick`, and of a prompt."""
SIZES = {"b1": 1, "time": 16, "b64": 64}
"""Requests at once, by case."""


@dataclass(frozen=True)
class Asked:
    """A function: the schema of its arguments, and the same as a constraint."""

    schema: dict[str, object]
    constraint: Constraint


def functions() -> list[Asked]:
    """The kept ones, in an order that mixes their sources."""
    found = json.loads(FUNCTIONS.read_text())["functions"]
    order = np.random.default_rng(0).permutation(len(found))
    schemas = [found[i]["parameters"] for i in order]
    kind = ConstraintKind.JSON_SCHEMA
    return [Asked(schema, Constraint(kind=kind, source=json.dumps(schema))) for schema in schemas]


def tokenizer(asked: list[Asked]) -> PieceTokenizer:
    """As many ids as the model has: bytes, what JSON and the schemas' names are made of, numbers."""
    words = [name for each in asked for name in json.dumps(each.schema).split('"') if name.isidentifier()]
    marks = ['{"', '"}', '":', '":"', '","', '":[', '["', '"]', "[{", "}]", '},{"', "[[", "]]", "}}", "],"]
    common = [word for word, _ in sorted(Counter(words).items(), key=lambda each: (-each[1], each[0]))]
    pieces = list(dict.fromkeys(piece for piece in [*marks, *common] if len(piece) > 1))
    room = VOCAB["0.9M"] - 256 - 1
    numbers = [str(n) for n in range(10, 10 + max(0, room - len(pieces)))]
    return PieceTokenizer([*pieces[:room], *numbers][:room], [END])


async def together(engine: Engine, prompts: list[Ints], how: list[Sampling], name: str) -> list[Completion]:
    """All at once."""
    jobs = (
        engine.generate(prompt, each, request=f"{name}/{i}")
        for i, (prompt, each) in enumerate(zip(prompts, how, strict=True))
    )
    return list(await asyncio.gather(*jobs))


@dataclass
class Bench:
    """The engine under test and what it is asked."""

    engine: Engine
    tokens: PieceTokenizer
    asked: list[Asked]
    budget: int

    def sampling(self, asked: Asked, seed: int) -> Sampling:
        """A call's arguments, as the policy likes."""
        stop = (self.tokens.control(END),)
        return Sampling(max_tokens=self.budget, stop=stop, seed=seed, constraint=asked.constraint)

    def prompts(self, count: int, seed: int) -> list[Ints]:
        """Random tokens."""
        rng = np.random.default_rng(seed)
        return [rng.integers(0, self.tokens.size, PROMPT, dtype=np.int32) for _ in range(count)]

    def valid(self, asked: Asked, done: Completion) -> bool:
        """Whether what was said is arguments of the function, for an engine that says so itself too."""
        end = self.tokens.control(END)
        said = self.tokens.decode([id for id in done.tokens.tolist() if id != end])
        try:
            value = json.loads(said)
        except ValueError:
            return False
        return bool(done.compliant) and jsonschema_rs.validator_for(asked.schema).is_valid(value)

    async def share(self, asked: list[Asked]) -> float:
        """Share of valid completions, one for each function."""
        how = [self.sampling(each, seed) for seed, each in enumerate(asked)]
        done = await together(self.engine, self.prompts(len(asked), 1), how, "valid")
        return sum(map(self.valid, asked, done)) / len(asked)

    async def ratio(self, batch: int, number: int) -> tuple[float, float]:
        """CPU seconds a token with and without constraints, of one round."""
        asked = [self.asked[(number * batch + i) % len(self.asked)] for i in range(batch)]
        prompts = self.prompts(batch, 1000 + number)
        held = [self.sampling(each, number) for each in asked]
        name = f"{batch}/{number}"
        await together(self.engine, prompts, held, f"{name}/first")  # compiles, and caches the prompts
        began = time.process_time()
        done = await together(self.engine, prompts, held, f"{name}/held")
        with_them = time.process_time() - began
        tokens = [len(each.tokens) for each in done]
        free = [Sampling(max_tokens=count, seed=number) for count in tokens]
        began = time.process_time()
        await together(self.engine, prompts, free, f"{name}/free")
        return with_them / sum(tokens), (time.process_time() - began) / sum(tokens)


def compiling(bench: Bench, asked: list[Asked]) -> float:
    """Milliseconds to compile a schema that was not seen before."""
    grammars = GuidedGrammars(bench.tokens.vocabulary())
    began = time.process_time()
    for each in asked:
        grammars.matcher(each.constraint, ())
    return 1000 * (time.process_time() - began) / len(asked)


async def measure(quick: bool, cases: Cases) -> None:
    """All cases."""
    asked = functions()
    tokens = tokenizer(asked)
    config = EmbeddedConfig(max_batch=64, row_tokens=PROMPT + BUDGET)
    vocabulary, version = tokens.vocabulary(), PolicyVersion(run="bench")
    engine = config.build(decoder("0.9M"), version, SystemClock(), NullSink(), vocabulary=vocabulary)
    await engine.start()
    bench = Bench(engine, tokens, asked, QUICK if quick else BUDGET)
    some = asked[:32] if quick else asked
    cases.add("valid", await bench.share(some), unit=f"share of {len(some)} completions")
    cases.add("compile", compiling(bench, some), unit="ms a schema")
    for name, batch in SIZES.items():
        rounds = (1 if quick else 5) if batch > 16 else (3 if quick else 15)
        found = [await bench.ratio(batch, number) for number in range(rounds)]
        ratios = [held / free for held, free in found]
        held, free = (statistics.median(seconds) * 1e6 for seconds in zip(*found, strict=True))
        cases.add(
            name if name == "time" else f"time/{name}",
            held,
            free,
            ratio=statistics.median(ratios),
            low=min(ratios),
            high=max(ratios),
            unit="× unconstrained (ours, theirs: µs a token)",
        )
    await engine.close()


def main() -> None:
    """Print the cases."""
    chosen = parser("constrained output: valid, and its cost").parse_args()
    one_thread()
    cases = Cases("grammar")
    asyncio.run(measure(chosen.quick, cases))
    cases.finish(chosen.keep)


if __name__ == "__main__":
    main()
