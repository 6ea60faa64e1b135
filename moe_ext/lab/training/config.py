"""Configuration of a training run: nested dataclasses, read from TOML, changed by dotted key.

config = read_config("configs/small/moe-32.toml", ["steps=500", "model.moe.k=2"])

With `task = "translation"` it is a `TranslationConfig`, else a `Config`, of a language model.
"""

import difflib
import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints, overload

from moe_ext.checks import require, require_at_least
from moe_ext.lab.models import LanguageModelConfig, TranslationModelConfig


class ConfigError(ValueError):
    """A configuration, corpus or run folder that can't be used: one sentence with what to do."""


@dataclass
class DataConfig:
    """The text.

    Attributes:
        corpus: "builtin" or a path (moe_ext/lab/data/corpora.py).
        vocabulary: a file of one word a line ("": the words of the training part are counted).
        vocab_size: where they are: at most so many entries, `<unk>` and `</s>` included.
        min_count: where they are: entries are words seen at least so often.
        encoded: a folder in which the ids of the text are kept from run to run and mapped from,
            for a corpus larger than memory ("": they are made anew, in memory).
        num_workers: processes that read the text, and then make batches while the model trains, for
            each process that trains (0: that one does it itself).
        tokens_per_batch: predictions per batch, roughly.
        max_length: longest row in training (0: whole sentences).
        max_train_sentences: use only the first ones (0: all).
    """

    corpus: str = "builtin"
    vocabulary: str = ""
    vocab_size: int = 10_000
    min_count: int = 1
    encoded: str = ""
    num_workers: int = 0
    tokens_per_batch: int = 2_560
    max_length: int = 0
    max_train_sentences: int = 0

    def __post_init__(self) -> None:
        require_at_least(3, vocab_size=self.vocab_size)
        require_at_least(1, min_count=self.min_count, tokens_per_batch=self.tokens_per_batch)
        require_at_least(0, num_workers=self.num_workers, max_length=self.max_length)
        require_at_least(0, max_train_sentences=self.max_train_sentences)


@dataclass
class ParallelDataConfig:
    """Sentences and their translations.

    Attributes:
        corpus: a folder of parallel text (moe_ext/lab/data/parallel.py).
        pairs: of languages; "en-fr" is from English into French. Where there are several, each
            source begins with the token `<2xx>` of its target's language.
        wordpieces: a sentencepiece model ("": pieces are found in the training part).
        vocab_size, kind: where they are: so many, by "bpe" or "unigram" (`Wordpieces.train`).
        drop, max_train_pairs: what to leave out of the training part of each language pair
            (`load_parallel`; 0: nothing).
        max_ratio: of the longer side's pieces to those of the shorter one, in training (0: any).
        oversample: train on as many pairs of sentences of each language pair (`PairBatches`).
        encoded: a folder in which wordpieces and the ids of the text are kept from run to run ("":
            they are made anew, in memory).
        num_workers: processes that read the text, and then make batches while the model trains, for
            each process that trains (0: that one does it itself).
        tokens_per_batch: source tokens and predictions per batch, roughly.
        max_length: train only on pairs with at most so many source tokens and predictions (0: all,
            although one very long pair may take all memory).
    """

    corpus: str = ""
    pairs: list[str] = field(default_factory=lambda: ["en-fr"])
    wordpieces: str = ""
    vocab_size: int = 16_000
    kind: str = "bpe"
    drop: list[str] = field(default_factory=list)
    max_train_pairs: int = 0
    max_ratio: float = 0.0
    oversample: bool = False
    encoded: str = ""
    num_workers: int = 0
    tokens_per_batch: int = 5_120
    max_length: int = 100

    def __post_init__(self) -> None:
        require(len(self.pairs) >= 1, "pairs", "be at least one", self.pairs)
        for pair in self.pairs:
            source, _, target = pair.partition("-")
            require(
                bool(source and target) and source != target,
                "pairs",
                'be of two languages each, as "en-fr"',
                pair,
            )
        require(len(set(self.pairs)) == len(self.pairs), "pairs", "be distinct", self.pairs)
        require_at_least(3, vocab_size=self.vocab_size)
        require(self.kind in ("bpe", "unigram"), "kind", 'be "bpe" or "unigram"', self.kind)
        require_at_least(0, max_train_pairs=self.max_train_pairs)
        require_at_least(0, num_workers=self.num_workers, max_length=self.max_length)
        require(
            self.max_ratio == 0 or self.max_ratio >= 1,
            "max_ratio",
            "be 0 or at least 1",
            self.max_ratio,
        )
        require_at_least(1, tokens_per_batch=self.tokens_per_batch)


@dataclass
class OptimizerConfig:
    """Adam under the schedules of App. C.1 and E (moe_ext/optim).

    Attributes:
        learning_rate: its peak.
        warmup_steps: where the peak is.
        hold_steps: for how long the rate stays there.
        beta1, beta2, eps: of Adam.
        experts: the optimizer of the experts' matrices, "adam" or "factored_adam" (App. D), which
            has no beta1.
        embedding: the same for the matrices of embedding and softmax.
        threshold_learning_rate: peak rate of the thresholds of strictly balanced gates (0: the same
            as of all else).
        clip_norm: bound on the norm of all gradients together (0: none).
        accumulate: batches per step; the loss of a step is the mean over all their tokens plus the
            mean, weighted by tokens, of their balancing losses: each batch is balanced by itself.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 1_000
    hold_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-9
    experts: str = "adam"
    embedding: str = "adam"
    threshold_learning_rate: float = 0.0
    clip_norm: float = 0.0
    accumulate: int = 1

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate", "be positive", self.learning_rate)
        require_at_least(1, warmup_steps=self.warmup_steps, accumulate=self.accumulate)
        require_at_least(0, hold_steps=self.hold_steps, clip_norm=self.clip_norm)
        require_at_least(0, threshold_learning_rate=self.threshold_learning_rate)
        require(0 <= self.beta1 < 1, "beta1", "be in [0, 1)", self.beta1)
        require(0 <= self.beta2 < 1, "beta2", "be in [0, 1)", self.beta2)
        require(self.eps > 0, "eps", "be positive", self.eps)
        for name in ("experts", "embedding"):
            value = getattr(self, name)
            require(value in ("adam", "factored_adam"), name, "be adam or factored_adam", value)


@dataclass
class LogConfig:
    """What is shown and kept.

    Attributes:
        log_every, eval_every, save_every: intervals in steps; 0 of the last two: at the end only.
        eval_sentences: of the dev part (of each language pair), so many sentences (0: all).
        keep_checkpoints: the newest so many.
        tensorboard: write event files for it too.
        progress: show a bar; where stderr is no terminal, a line every log_every steps.
    """

    log_every: int = 50
    eval_every: int = 500
    eval_sentences: int = 0
    save_every: int = 500
    keep_checkpoints: int = 2
    tensorboard: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        require_at_least(1, log_every=self.log_every, keep_checkpoints=self.keep_checkpoints)
        require_at_least(0, eval_every=self.eval_every, eval_sentences=self.eval_sentences)
        require_at_least(0, save_every=self.save_every)


@dataclass
class RunConfig:
    """What all training runs have.

    Attributes:
        output: its folder (runs/NAME of the file, if not given).
        resume: continue the run that is there.
        seed: of weights, data order, dropout and noise.
        steps: optimizer steps in all.
        device: "cpu", "cuda" or "cuda:N".
        num_threads: of torch (0: its default).
        timeout: seconds that a process waits for the others before all end.
        autocast: "" for float32, or "bfloat16".
        optimizer, log: tables of further options.
    """

    output: str = ""
    resume: bool = False
    seed: int = 1
    steps: int = 2_000
    device: str = "cpu"
    num_threads: int = 0
    timeout: float = 600.0
    autocast: str = ""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        # torch's generators take 64 bits, and a run has three of them.
        require(0 <= self.seed < 2**62, "seed", "be in [0, 2**62)", self.seed)
        require_at_least(1, steps=self.steps)
        require_at_least(0, num_threads=self.num_threads)
        require(self.timeout > 0, "timeout", "be positive", self.timeout)
        require(self.autocast in ("", "bfloat16"), "autocast", 'be "" or "bfloat16"', self.autocast)


@dataclass
class Config(RunConfig):
    """A training run of a language model: `RunConfig` with the tables data and model."""

    task: str = "language_model"
    data: DataConfig = field(default_factory=DataConfig)
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.dtype != "float32":  # whose averages are float32 all the same
            for name in ("experts", "embedding"):
                value = getattr(self.optimizer, name)
                rule = f'be factored_adam with model.dtype = "{self.model.dtype}"'
                require(value == "factored_adam", f"optimizer.{name}", rule, value)


@dataclass
class TranslationConfig(RunConfig):
    """A training run of a translation model: `RunConfig` with the tables data and model."""

    task: str = "translation"
    data: ParallelDataConfig = field(default_factory=ParallelDataConfig)
    model: TranslationModelConfig = field(default_factory=TranslationModelConfig)


AnyConfig = Config | TranslationConfig
C = TypeVar("C", bound=AnyConfig)
_KINDS: dict[str, type[AnyConfig]] = {"language_model": Config, "translation": TranslationConfig}


@overload
def read_config(path: str | Path, overrides: Sequence[str] = ()) -> AnyConfig: ...
@overload
def read_config(path: str | Path, overrides: Sequence[str], kind: type[C]) -> C: ...
def read_config(
    path: str | Path, overrides: Sequence[str] = (), kind: type[Any] | None = None
) -> AnyConfig:
    """The configuration in a TOML file.

    Args:
        path: the file.
        overrides: `key=value`, keys dotted and values TOML; a value that is not TOML is taken as a
            string, so that `data.corpus=builtin` needs no quotes.
        kind: `Config` or `TranslationConfig`, where only one of them will do.

    Raises:
        ConfigError: names key, rule and value.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"there is no configuration file {path}; give one such as configs/small/moe-32.toml"
        )
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be TOML; correct it: {error}") from None
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"an override must be key=value, got {override!r}")
        _set(table, key.strip(), _parse(text.strip()), override)
    config = config_from_dict(table)
    if kind is not None and not isinstance(config, kind):
        raise ConfigError(f'task must be "{kind.task}" here, got "{config.task}" in {path}')
    config.output = config.output or f"runs/{path.stem}"
    return config


def config_from_dict(table: dict[str, Any]) -> AnyConfig:
    """The configuration of nested dicts, as in TOML; missing keys take their defaults.

    Raises:
        ConfigError: names key, rule and value.
    """
    task = table.get("task", Config.task)
    if task not in _KINDS:
        raise ConfigError(f"task must be one of {', '.join(_KINDS)}, got {task!r}")
    kind = _KINDS[task]
    return _build(kind, table, "", kind)


# Where and how a run is done, not what it computes; so are the options of [log].
_NOT_COMPARED = {
    *("output", "resume", "device", "num_threads", "timeout"),
    *("data.encoded", "data.num_workers"),
}


def config_differences(a: AnyConfig, b: AnyConfig) -> list[str]:
    """The dotted keys in which two configurations describe different runs."""
    if a.task != b.task:
        return ["task"]
    flat_a, flat_b = _flatten(asdict(a)), _flatten(asdict(b))
    return [
        key
        for key in flat_a
        if flat_a[key] != flat_b[key] and key not in _NOT_COMPARED and not key.startswith("log.")
    ]


def config_value(config: AnyConfig, key: str) -> Any:
    """The option with a dotted key."""
    return _flatten(asdict(config))[key]


def to_toml(config: AnyConfig) -> str:
    """The configuration as TOML, every key written out."""
    lines: list[str] = []

    def write(table: dict[str, Any], path: str) -> None:
        if path:
            lines.append(f"\n[{path}]")
        for key, value in table.items():
            if not isinstance(value, dict):
                # JSON and TOML agree on the numbers, strings, booleans and lists used here.
                lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
        for key, value in table.items():
            if isinstance(value, dict):
                write(value, f"{path}.{key}" if path else key)

    write(asdict(config), "")
    return "\n".join(lines) + "\n"


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(table: dict[str, Any], dotted: str, value: Any, override: str) -> None:
    *path, last = dotted.split(".")
    for key in path:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {key} must be a table, it is a value")
    table[last] = value


def _flatten(table: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = value
    return flat


def _build(cls: Any, table: Any, path: str, root: type[AnyConfig]) -> Any:
    if not isinstance(table, dict):
        raise ConfigError(f"{path[:-1]} must be a table of options, got {table!r}")
    hints = get_type_hints(cls)
    values = {}
    for key, value in table.items():
        if key not in hints:
            raise ConfigError(_unknown_key(f"{path}{key}", root))
        hint = hints[key]
        if is_dataclass(hint):
            values[key] = _build(hint, value, f"{path}{key}.", root)
        else:
            values[key] = _check_type(hint, value, f"{path}{key}")
    try:
        return cls(**values)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}{error}") from None


def _check_type(hint: Any, value: Any, key: str) -> Any:
    """The value, if it is of type `hint`; an int serves as a float, a bool not as an int."""
    if get_origin(hint) is list:
        (item,) = get_args(hint)
        if isinstance(value, list):
            return [_check_type(item, element, key) for element in value]
        items = value.split(",") if isinstance(value, str) else [value]
        example = f", as {json.dumps(items)}" if type(items[0]) is item else ""
        raise ConfigError(f"{key} must be a list of {item.__name__}{example}, got {value!r}")
    if hint is float and type(value) is int:
        value = float(value) if abs(value) < 2**1023 else math.inf
    if type(value) is not hint:
        names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
        raise ConfigError(f"{key} must be {names[hint]}, got {value!r}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{key} must be finite, got {value}")
    return value


def _unknown_key(key: str, root: type[AnyConfig]) -> str:
    """What to say of a key that the configuration `root` does not have."""
    known = list(_flatten(asdict(root())))
    top_level = [f.name for f in fields(root)]
    tables = [f.name for f in fields(root) if is_dataclass(f.default_factory)]
    last = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(key, known + tables, n=1, cutoff=0.6)
    near = near or [name for name in known if name.rsplit(".", 1)[-1] == last]
    near = near or [
        name
        for name in known
        if difflib.get_close_matches(last, [name.rsplit(".", 1)[-1]], cutoff=0.75)
    ]
    hint = f"did you mean {near[0]}?" if near else f"top-level keys are {', '.join(top_level)}"
    return f"unknown option {key}; {hint}"
