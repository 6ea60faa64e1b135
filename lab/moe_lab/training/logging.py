"""Logs of a run: progress bar, metrics.jsonl and TensorBoard."""

import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from moe_ext.checks import is_whole
from moe_lab.errors import ConfigError, config_errors
from moe_lab.files import MAX_JSON, atomic_file, from_json, json_text, read_lines, require_regular
from moe_lab.training.config import LogConfig


class RunLog:
    """Writes and shows records such as {"kind": "train", "step": 100, "nll": ...}.

    In metrics.jsonl, numbers that are NaN or infinite are the texts "NaN" and "Infinity".

    On a terminal, the progress bar shows training records, and lines above the bar show dev
    records. If stderr is not a terminal, each record is a line, which begins with title.

    A run that resumes from a checkpoint gives its step as start_step. Later records in the log are
    removed, because the run repeats these steps.
    """

    def __init__(
        self, run: Path, config: LogConfig, *, start_step: int, steps: int, title: str
    ) -> None:
        self._writer = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self._writer = SummaryWriter(run / "tensorboard", purge_step=start_step + 1)
        path = run / "metrics.jsonl"
        kept = [record for record in read_metrics(run) if record["step"] <= start_step]
        with atomic_file(path) as file:
            file.writelines(f"{json_text(record)}\n".encode() for record in kept)
        self._file = path.open("a", encoding="utf-8")
        self._bar = tqdm(
            total=steps,
            initial=start_step,
            desc=title,
            unit="step",
            dynamic_ncols=True,
            disable=None if config.progress else True,  # None: no bar without a terminal
        )
        self._title, self._steps = title, steps
        self._lines = config.progress and self._bar.disable

    def step_done(self) -> None:
        self._bar.update()

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Writes one record to metrics.jsonl and TensorBoard, and shows its main values."""
        self._file.write(json_text({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for key, value in values.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{kind}/{key}", value, step)
                    continue
                for layer, item in enumerate(value):
                    tag = f"{kind}/{key}/layer{layer}"
                    if isinstance(item, list):
                        self._writer.add_histogram(tag, torch.tensor(item), step)
                    else:
                        self._writer.add_scalar(tag, item, step)
        shown = {
            "nll": "nll", "aux_loss": "aux", "words_per_second": "words/s", "perplexity": "ppl",
        }  # fmt: skip
        text = [
            f"{shown[key]} {value:,.0f}" if value >= 1000 else f"{shown[key]} {value:.4g}"
            for key, value in values.items()
            if key in shown
        ]
        if kind == "train" and not self._lines:
            self._bar.set_postfix_str(", ".join(text))
        else:
            self.say(f"step {step}/{self._steps}, {kind} {', '.join(text)}")

    def say(self, text: str) -> None:
        """Shows one line, above the progress bar on a terminal."""
        line = f"{self._title}: {text}"
        if self._lines:
            print(line, file=sys.stderr, flush=True)
        elif not self._bar.disable:
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read_metrics(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Reads the records of a run's metrics.jsonl in order; [] if the file does not exist.

    A last line that a crash has truncated is left out.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    with config_errors():
        require_regular(path)
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(read_lines(file, MAX_JSON), start=1):
            record = _record(line)
            if record is None and line.endswith(b"\n"):
                raise ConfigError(f"{path}, line {number} must be a record, got {line!r:.100}")
            if record is not None and kind in (None, record["kind"]):
                records.append(record)
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    """Parses a line of metrics.jsonl; None if it is not a record."""
    try:
        record = from_json(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    known = isinstance(record, dict) and record.get("kind") in ("train", "dev")
    return record if known and is_whole(record.get("step")) else None
