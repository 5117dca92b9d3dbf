"""The plan: what fits, how long, how much is shared, and where more concurrency stops paying.

Role: from a model, a device and traffic to figures. Neighbours: `cost` has the bytes, `picture` and the
command show. Invariants: every figure is of one device; a figure without data (no bandwidth known) is None.

Cost model of a decode step of B sequences: it reads the weights once and each sequence's KV, and multiplies
each token with the active weights, so
    throughput(B) = B / (t₀ + weights(B)/bandwidth + B·kv/bandwidth + B·2·active/peak).
The knee is the largest B at which one more sequence still adds `share` of what the first one gave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rollwright.engine.kv.card import Card
from rollwright.engine.kv.cost import BITS, Cost, Format, Line
from rollwright.engine.kv.sizes import told
from rollwright.engine.kv.traffic import Traffic
from rollwright.errors import ConfigError

MOST = 65_536
"""Sequences beyond which no knee is looked for."""
TURN = 1024
"""Tokens sampled after the prompt, where nothing is said about traffic."""


@dataclass(frozen=True)
class Device:
    """What one accelerator offers; None is "not known"."""

    memory: int
    """Bytes."""
    bandwidth: float | None = None
    """Bytes per second."""
    flops: float | None = None
    """Floating-point operations per second."""


@dataclass(frozen=True)
class Demand:
    """What is asked of the plan."""

    context: int | None = None
    """Tokens that a sequence may have; None: those of the traffic, else the model's longest."""
    concurrency: int | None = None
    """Sequences wanted at once; None: a group."""
    dtype: str | None = None
    """Of the weights; None: the model's."""
    kv: Format | None = None
    """None: the weights' dtype where it has 16 bits or more, else bf16."""
    weights: int | None = None
    """Bytes of the weights on each device; None: counted from the shape."""
    activations: int = 0
    """Bytes on each device."""
    reserve: int = 0
    """Bytes on each device left to driver, allocator and others."""
    block: int = 16
    tensor_parallel: int = 1
    fixed_seconds: float = 0.0
    """t₀ of a step: launches, scheduling, sampling."""
    share: float = 0.1
    """Marginal gain, as a share of the first sequence's throughput, that defines the knee."""


@dataclass(frozen=True)
class Plan:
    """The answer; bytes are of one device."""

    model: str
    parameters: int
    context: int
    """Tokens a sequence may have."""
    traffic: Traffic
    dtype: str
    kv: str
    block: int
    tensor_parallel: int
    memory: int
    weights: int
    activations: int
    reserve: int
    budget: int
    """What is left for keys and values."""
    kinds: tuple[Line, ...]
    token_bytes: int
    sequence_bytes: int
    """At `context`."""
    fits: int
    """Sequences of `context` tokens that fit, nothing shared."""
    fits_shared: int
    """The same with what the traffic shares held once."""
    wanted: int
    """Sequences at once that `longest` and the two below are about."""
    longest: int
    """Longest context at which `wanted` sequences fit, at most the model's own: the longest worth
    allowing."""
    longest_one: int
    """Longest at which one fits."""
    hit_rate: float
    """Expected share of prompt tokens found in the prefix cache, while nothing is evicted."""
    alone_bytes: int
    """Of `wanted` sequences at `context`, nothing shared."""
    shared_bytes: int
    """With sharing."""
    knee: int | None
    knee_rate: float | None
    """Tokens per second at the knee."""
    first_rate: float | None
    """Tokens per second of one sequence."""
    advised: int
    """Sequences at once worth having: the knee, or what fits with sharing, whichever is less."""
    notes: tuple[str, ...] = ()


def plan(card: Card, device: Device, demand: Demand, traffic: Traffic | None = None) -> Plan:
    """Plan `card` on `device`.

    Raises:
        ConfigError: the weights leave nothing, not one sequence fits, or the demand contradicts itself.
    """
    context, traffic = _lengths(card, demand, traffic)
    dtype, form = _formats(card, demand)
    cost = Cost(card, form, demand.block, demand.tensor_parallel)
    weights = demand.weights
    if weights is None:
        weights = -(-card.parameters.total * BITS[dtype] // (8 * demand.tensor_parallel))
    budget = device.memory - weights - demand.activations - demand.reserve
    sequence = cost.sequence_bytes(context)
    if budget < sequence:
        _refuse(cost, card, device, demand, weights, budget, context, dtype)
    fits = budget // max(1, sequence)
    shared = _largest(lambda n: cost.together(traffic, n, context) <= budget, 0, budget)
    wanted = demand.concurrency or traffic.group
    rate = _rate(cost, device, demand, weights, traffic)
    knee = None if rate is None else _knee(rate, demand.share)
    longest = card.context or MOST * 1024
    return Plan(
        model=card.name,
        parameters=card.parameters.total,
        context=context,
        traffic=traffic,
        dtype=dtype,
        kv=form.dtype,
        block=demand.block,
        tensor_parallel=demand.tensor_parallel,
        memory=device.memory,
        weights=weights,
        activations=demand.activations,
        reserve=demand.reserve,
        budget=budget,
        kinds=tuple(cost.lines()),
        token_bytes=cost.token_bytes(),
        sequence_bytes=sequence,
        fits=fits,
        fits_shared=shared,
        wanted=wanted,
        longest=_largest(lambda n: wanted * cost.sequence_bytes(n) <= budget, 0, longest),
        longest_one=_largest(lambda n: cost.sequence_bytes(n) <= budget, 0, longest),
        hit_rate=cost.hit_rate(traffic),
        alone_bytes=wanted * sequence,
        shared_bytes=cost.together(traffic, wanted, context),
        knee=knee,
        knee_rate=None if rate is None or knee is None else rate(knee),
        first_rate=None if rate is None else rate(1),
        advised=shared if knee is None else min(shared, knee),
        notes=_notes(card, demand, context, shared, knee),
    )


def curve(
    card: Card, device: Device, demand: Demand, made: Plan, most: int
) -> list[tuple[int, int, int, float]]:
    """(sequences, bytes alone, bytes shared, tokens per second; 0.0 where not known) up to `most` sequences
    at about 60 points, for a picture."""
    cost = Cost(card, _formats(card, demand)[1], demand.block, demand.tensor_parallel)
    rate = _rate(cost, device, demand, made.weights, made.traffic)
    counts = sorted({max(1, round(most * step / 60)) for step in range(1, 61)} | {1})
    return [
        (
            count,
            count * made.sequence_bytes,
            cost.together(made.traffic, count, made.context),
            rate(count) if rate else 0.0,
        )
        for count in counts
    ]


def _lengths(card: Card, demand: Demand, traffic: Traffic | None) -> tuple[int, Traffic]:
    """Tokens of a sequence, and the traffic that makes it."""
    if traffic is None:
        context = demand.context or card.context
        if context < 2:
            raise ConfigError(f"{card.name} does not say how long a sequence may be: give --context")
        sampled = min(TURN, context // 2)
        return context, Traffic(prompt=context - sampled, sampled=sampled)
    context = demand.context or traffic.length
    if traffic.length > context:
        raise ConfigError(
            f"rollouts of {traffic.length} tokens (prompt, turns, sampled, observed) do not fit into "
            f"--context {context}"
        )
    return context, traffic


def _formats(card: Card, demand: Demand) -> tuple[str, Format]:
    """dtype of the weights, and how KV is stored."""
    dtype = Format(demand.dtype or card.dtype).dtype
    return dtype, demand.kv or Format(dtype if BITS[dtype] >= 16 else "bf16")


def _refuse(
    cost: Cost,
    card: Card,
    device: Device,
    demand: Demand,
    weights: int,
    budget: int,
    context: int,
    dtype: str,
) -> None:
    """Say what does not fit, both figures, and the nearest setting that does.

    Raises:
        ConfigError: always.
    """
    needed = weights + demand.activations + demand.reserve
    what = f"{card.name} ({dtype}): weights, activations and reserve take {told(needed)}"
    if budget > 0:
        most = min(context, card.context or context)
        least = _largest(lambda n: cost.sequence_bytes(n) <= budget, 0, most)
        what += f", one sequence of {context:,} tokens {told(cost.sequence_bytes(context))} more"
        near = f"--context {least}" if least else ""
    else:
        near = ""
    for devices in (2, 4, 8, 16, 32, 64):
        split = replace(cost, tensor_parallel=devices * demand.tensor_parallel)
        left = device.memory - weights // devices - demand.activations - demand.reserve
        if left >= split.sequence_bytes(context):
            near += f"{' or ' if near else ''}--tensor-parallel {split.tensor_parallel}"
            break
    raise ConfigError(
        f"{what}, the device has {told(device.memory)}: "
        + (f"the nearest setting that fits is {near}" if near else "take a smaller model or more memory")
    )


def _rate(
    cost: Cost, device: Device, demand: Demand, weights: int, traffic: Traffic
) -> Callable[[int], float] | None:
    """Tokens per second as a function of the batch; None where the device's figures are not known."""
    if not device.bandwidth or not device.flops:
        return None
    bandwidth, flops, parameters = device.bandwidth, device.flops, cost.card.parameters
    scale = weights / max(1, parameters.total)  # bytes of a weight on this device
    kv = cost.sequence_bytes(traffic.mean) / bandwidth
    work = 2 * parameters.active / demand.tensor_parallel / flops

    def rate(batch: int) -> float:
        read = parameters.read(batch) * scale / bandwidth
        return batch / (demand.fixed_seconds + read + batch * (kv + work))

    return rate


def _knee(rate: Callable[[int], float], share: float) -> int:
    """The largest batch at which one more sequence adds `share` of the first one's rate or more."""
    least, best = share * rate(1), 1
    now = rate(1)
    for batch in range(1, MOST):
        more = rate(batch + 1)
        if more - now >= least:
            best = batch + 1
        elif batch > 4 * best + 1024:  # mixtures of experts gain again once all experts are read anyway
            break
        now = more
    return best


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number up to `most` that fits, `least` doing so; `fits` is monotone."""
    if fits(most):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _notes(card: Card, demand: Demand, context: int, shared: int, knee: int | None) -> tuple[str, ...]:
    notes = list(card.notes)
    if card.quantised and demand.weights is None and demand.dtype is None:
        notes.append("the checkpoint is quantised: give its size with --weights, or its --dtype")
    if card.context and context > card.context:
        notes.append(
            f"{context:,} tokens are more than the {card.context:,} that the model was made for: "
            f"give --context {card.context} or less"
        )
    if knee is None:
        notes.append("no knee: give --card, or --bandwidth and --tflops")
    elif shared < knee:
        notes.append(f"memory ends before the knee: at {shared:,} of {knee:,} sequences")
    heads = [layer.heads for layer in card.layers if layer.heads and not layer.latent]
    if heads and demand.tensor_parallel > min(heads):
        notes.append(
            f"{min(heads)} KV heads on {demand.tensor_parallel} devices: heads are held more than once"
        )
    elif heads and demand.tensor_parallel > 1 and (odd := [n for n in heads if n % demand.tensor_parallel]):
        most = -(-odd[0] // demand.tensor_parallel)
        notes.append(
            f"{odd[0]} KV heads do not divide by {demand.tensor_parallel} devices, as most engines "
            f"want it: the figures are of a device that holds {most}"
        )
    return tuple(notes)
