"""`rollwright plan kv`: what keys and values of a model take, and how much fits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollwright.engine.kv.plan import Device
    from rollwright.engine.kv.traffic import Traffic

plan = typer.Typer(no_args_is_help=True, help="Plan resources before a run.")

CARDS = "Accelerator: t4, a10g, l4, rtx4090, l40s, a100-40, a100, h100, h200, b200, mi300x."
"""Help of `--card`; the figures are `engine.kv.accelerators`'."""
RESERVE = 0.1
"""Share of the memory left to the driver and the allocator, where nothing is said."""


@plan.callback()
def _group() -> None:
    """Plan resources before a run."""


@plan.command("kv")
def kv(
    model: Annotated[str, typer.Argument(help="config.json, its folder, or a built-in card: llama-3.1-8b.")],
    memory: Annotated[str | None, typer.Option(help="Of one device, with a unit: 80GiB.")] = None,
    card: Annotated[str | None, typer.Option(help=CARDS)] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Of its memory, TB/s; for the knee.")] = None,
    tflops: Annotated[float | None, typer.Option(help="Its 16-bit peak; for the knee.")] = None,
    context: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence may have.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Sequences wanted at once.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: bf16, fp16, fp32, fp8, int8, int4.")
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="Of keys and values: bf16, fp16, fp32, fp8, int8, int4; scales are counted."),
    ] = None,
    kv_group: Annotated[int, typer.Option(min=0, help="Numbers that share a scale; 0: a head.")] = 0,
    weights: Annotated[str | None, typer.Option(help="On each device: 16GiB; else by the shape.")] = None,
    activations: Annotated[str, typer.Option(help="On each device, with a unit: 2GiB.")] = "0",
    reserve: Annotated[
        str | None,
        typer.Option(help="Left to the driver, a size: 8GiB, not a share; else a tenth of the memory."),
    ] = None,
    block: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 16,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that share the heads.")] = 1,
    step_overhead: Annotated[float, typer.Option(min=0, help="Fixed milliseconds of a step.")] = 0.0,
    gain: Annotated[float, typer.Option(help="Marginal gain at the knee, of the first sequence's.")] = 0.1,
    prompt: Annotated[int | None, typer.Option(help="Tokens of the first prompt.")] = None,
    shared: Annotated[int, typer.Option(help="Of these, common to all rollouts.")] = 0,
    turns: Annotated[int, typer.Option(help="Turns of a rollout.")] = 1,
    sampled: Annotated[
        int | None, typer.Option(help="Tokens sampled in a turn, with --prompt.", show_default="256")
    ] = None,
    observed: Annotated[int, typer.Option(help="Tokens a tool adds between turns.")] = 0,
    group: Annotated[int, typer.Option(help="Rollouts of one prompt.")] = 1,
    from_run: Annotated[Path | None, typer.Option(help="Run folder to learn the traffic from.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write a picture to this .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False,
) -> None:
    """Say what keys and values of MODEL take on a device: bytes of a token and a sequence, how many sequences
    fit, how long they may be, what sharing prefixes saves, and where more at once stops paying."""
    from rollwright.engine.kv.cards import named
    from rollwright.engine.kv.cost import Format
    from rollwright.engine.kv.picture import lines
    from rollwright.engine.kv.plan import Demand
    from rollwright.engine.kv.plan import plan as planned
    from rollwright.engine.kv.sizes import parsed
    from rollwright.errors import ConfigError

    found = named(model)
    device = _device(memory, card, bandwidth, tflops)
    _known("--dtype", dtype)
    _known("--kv-dtype", kv_dtype)
    if not 0 < gain < 1:
        raise ConfigError(f"--gain {gain}: expected more than 0 and less than 1")
    traffic = _traffic(from_run, prompt, (shared, turns, sampled, observed), group)
    demand = Demand(
        context=context,
        concurrency=concurrency,
        dtype=dtype,
        kv=Format(kv_dtype, kv_group) if kv_dtype else None,
        weights=parsed(weights, "--weights") if weights else None,
        activations=parsed(activations, "--activations"),
        reserve=int(RESERVE * device.memory) if reserve is None else parsed(reserve, "--reserve"),
        block=block,
        tensor_parallel=tensor_parallel,
        fixed_seconds=step_overhead / 1000,
        share=gain,
    )
    made = planned(found, device, demand, traffic)
    if picture is not None:
        from rollwright.engine.kv.picture import svg
        from rollwright.engine.kv.plan import curve

        most = max(8, made.fits_shared, min(2 * (made.knee or 0), 4 * made.fits_shared))
        _write(picture, svg(made, curve(found, device, demand, made, most)))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(made), indent=1, default=lambda each: each.value))
    else:
        for line in lines(made):
            typer.echo(line)


def _device(memory: str | None, card: str | None, bandwidth: float | None, tflops: float | None) -> Device:
    """The device that the options name; an option beside `--card` wins."""
    from rollwright.engine.kv.accelerators import accelerator
    from rollwright.engine.kv.plan import Device
    from rollwright.engine.kv.sizes import parsed
    from rollwright.errors import ConfigError

    known = accelerator(card) if card else None
    if memory is None and known is None:
        raise ConfigError("how much memory? Give --memory (for example 80GiB) or --card (for example h100)")
    for name, given in (("--bandwidth", bandwidth), ("--tflops", tflops)):
        if given is not None and not 0 < given < float("inf"):
            raise ConfigError(f"{name} {given}: expected a number above 0")
    size = parsed(memory, "--memory") if memory is not None else known.memory if known else 0
    speed = bandwidth * 1e12 if bandwidth else known.bandwidth if known else None
    peak = tflops * 1e12 if tflops else known.flops if known else None
    return Device(size, speed, peak)


def _known(option: str, dtype: str | None) -> None:
    """Refuse a dtype that is none, by the option that gave it."""
    from rollwright.engine.kv.cost import BITS
    from rollwright.errors import ConfigError

    if dtype is not None and dtype not in BITS:
        raise ConfigError(f"{option} {dtype}: '{dtype}' is not known; take one of {', '.join(BITS)}")


def _traffic(
    run: Path | None, prompt: int | None, rest: tuple[int, int, int | None, int], group: int
) -> Traffic | None:
    """What the options say of the rollouts; `rest` is shared, turns, sampled, observed."""
    from rollwright.engine.kv.traffic import Traffic
    from rollwright.errors import ConfigError

    if run is not None and prompt is not None:
        raise ConfigError("--from-run and --prompt: the traffic is either learned or given, not both")
    if prompt is not None:
        shared, turns, sampled, observed = rest
        return Traffic(prompt, shared, turns, 256 if sampled is None else sampled, observed, group)
    if rest != (0, 1, None, 0):
        raise ConfigError("--shared, --turns, --sampled and --observed belong to --prompt, which is missing")
    if run is not None:
        return _learned(run, group if group > 1 else None)
    if group != 1:
        raise ConfigError("--group needs --prompt, or --from-run")
    return None


def _learned(run: Path, group: int | None) -> Traffic:
    """The traffic of a run's training rollouts."""
    from rollwright.engine.kv.traffic import learned
    from rollwright.errors import ConfigError
    from rollwright.run.folder import RunFolder
    from rollwright.view.folder import viewed

    with viewed(RunFolder(run)) as view:
        if view.archive is None:
            raise ConfigError(f"{run}: no rollout was kept yet: give --prompt, --turns and --sampled instead")
        kept = view.archive.whole([line.rollout for line in view.lines if line.job == "train"])
        size = group or (view.config.rollout.group_size if view.config else 1)
        return learned((each.scored.rollout for _, each, _ in kept), size).traffic


def _write(path: Path, text: str) -> None:
    from rollwright.errors import ConfigError

    if path.suffix != ".svg":
        raise ConfigError(f"--picture {path}: a picture is written as SVG; give a name that ends in .svg")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--picture {path}: cannot be written ({error.strerror})") from error
