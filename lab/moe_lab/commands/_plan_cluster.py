"""The work of ``moe-lab plan-cluster``: devices, growing mixtures and the printed table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import TypeVar

from moe_lab.analysis.cluster import PAPER, Efficiency, Plan
from moe_lab.analysis.devices import DEVICES, Device
from moe_lab.errors import ConfigError
from moe_lab.markdown import markdown_table
from moe_lab.training.config import Config

T = TypeVar("T", Device, Efficiency)


def parse_device(words: Sequence[str]) -> Device:
    return _parsed("--device", Device, words, DEVICES)


def parse_efficiency(words: Sequence[str]) -> Efficiency:
    return _parsed("--efficiency", Efficiency, words, {"paper": PAPER})


def _parsed(option: str, kind: type[T], words: Sequence[str], presets: Mapping[str, T]) -> T:
    """Parses an option: a preset's name, key=value arguments, or both."""
    required = {field.name: field.default is MISSING for field in fields(kind)}
    values: dict[str, float] = {}
    for word in words:
        key, _, text = word.partition("=")
        if word in presets:
            values = {name: getattr(presets[word], name) for name in required} | values
        elif key in required:
            try:
                values[key] = float(text)
            except ValueError:
                raise ConfigError(f"{option}: {key} must be a number, got {text!r}") from None
        else:
            rule = f"be a preset ({', '.join(presets)}) or {'=, '.join(required)}="
            raise ConfigError(f"{option} must {rule}, got {word!r}")
    if missing := [name for name in required if required[name] and name not in values]:
        raise ConfigError(f"{option} must be a preset or also give {', '.join(missing)}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def grown(config: Config, factor: int) -> Config:
    """Multiplies the numbers of experts and of groups of a configuration by `factor`."""
    moe = config.model.moe
    moe = replace(moe, num_experts=factor * moe.num_experts, num_groups=factor * moe.num_groups)
    return replace(config, model=replace(config.model, moe=moe))


def table(plans: Sequence[Plan], device: Device, efficiency: Efficiency | None = None) -> str:
    """Formats the cluster plans as a Markdown table, one column for each number of devices.

    efficiency: adds the expected step and TFLOPS; None: leaves them out.
    """

    def pair_cell(values: Iterable[float], form: str) -> str:
        return " / ".join(format(value, form) for value in values)

    def bounds(function: Callable[..., float]) -> tuple[float, float]:
        return function(overlap=False), function(overlap=True)

    lines = {
        "devices": lambda p: str(p.num_devices),
        "experts of a MoE layer": lambda p: f"{p.num_experts:,}",
        "parameters, dense": lambda p: f"{p.dense_parameters / 1e6:,.2f}M",
        "parameters, experts": lambda p: f"{p.expert_parameters / 1e6:,.2f}M",
        "memory: parameters, GB": lambda p: f"{p.parameter_bytes / 1e9:.3f}",
        "memory: gradients, GB": lambda p: f"{p.gradient_bytes / 1e9:.3f}",
        "memory: optimizer, GB": lambda p: f"{p.optimizer_bytes / 1e9:.3f}",
        "memory: saved for backward, GB": lambda p: f"{p.activation_bytes / 1e9:.3f}",
        "memory, GB": lambda p: f"{p.memory_bytes / 1e9:.3f}",
        "fits": lambda p: "yes" if p.memory_bytes <= device.memory else "NO",
        "wire: exchange, MB": lambda p: f"{p.exchange_bytes / 1e6:,.3f}",
        "wire: dense gradients, MB": lambda p: f"{p.reduce_bytes / 1e6:,.3f}",
        "intensity, expert / device": lambda p: pair_cell(
            (p.expert_intensity, p.device_intensity), ",.0f"
        ),
        "compute, ms": lambda p: f"{1e3 * p.compute_seconds:,.2f}",
        "optimizer, ms": lambda p: f"{1e3 * p.optimizer_seconds:,.2f}",
        "network, ms": lambda p: f"{1e3 * p.network_seconds:,.2f}",
        "step, sum / max, ms": lambda p: pair_cell(
            tuple(1e3 * seconds for seconds in bounds(p.step_seconds)), ",.2f"
        ),
        "tokens/s, all devices": lambda p: pair_cell(
            tuple(p.num_devices * p.tokens / seconds for seconds in bounds(p.step_seconds)), ",.0f"
        ),
        "efficiency": lambda p: pair_cell(bounds(p.efficiency), ".2f"),
        "share of peak": lambda p: pair_cell(bounds(p.share_of_peak), ".2f"),
    }  # fmt: skip
    if efficiency is not None:
        known = efficiency
        lines |= {
            "expected step, ms": lambda p: f"{1e3 * p.expected_seconds(device, known):,.2f}",
            "expected TFLOPS, each device": lambda p: (
                f"{p.flops / p.expected_seconds(device, known) / 1e12:,.2f}"
            ),
        }
    header, *rows = ([name, *map(value, plans)] for name, value in lines.items())
    return markdown_table(header, rows)
