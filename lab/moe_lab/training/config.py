"""Configuration of a training run: nested dataclasses, read from TOML, overridden by dotted keys.

An example::

    config = read_config("small/moe-32", ["steps=500", "model.moe.k=2"])

The result is a `TranslationConfig` if the file has ``task = "translation"``, otherwise a `Config`
of a language model.
"""

import copy
import difflib
import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints, overload

from moe_ext.checks import require
from moe_lab.cli import SEED_LIMIT, THREAD_LIMIT
from moe_lab.errors import ConfigError, config_errors
from moe_lab.files import read_file
from moe_lab.models import LanguageModelConfig, TranslationModelConfig
from moe_lab.names import PIECE_KINDS, configuration_file
from moe_lab.rules import Count, Limit, Options, Positive, Share, Weight, minimum, must, one_of

_MAX_BYTES = 2**20  # of a configuration file
_THREADS = must(f"be in [0, {THREAD_LIMIT})", lambda number: 0 <= number < THREAD_LIMIT)
_SECONDS = must("be in (0, 1e+09]", lambda seconds: 0 < seconds <= 1e9)


@dataclass
class DataConfig(Options):
    """Options of the text of a language model."""

    corpus: str = "builtin"  # "builtin", "sources" or a path; see `load_corpus`
    # What the model reads and predicts: "words", or wordpieces of the kind "bpe" or "unigram"; see
    # `Wordpieces.train`. A sampled softmax needs ids in the order of frequency: with
    # model.num_sampled, use "words" or "unigram".
    kind: Annotated[str, one_of("words", *PIECE_KINDS)] = "words"
    # A file with one word per line, or for wordpieces a sentencepiece model. "" makes the
    # vocabulary from the training part.
    vocabulary: str = ""
    # Entries of a made vocabulary, with <unk> and </s>. Words may be fewer.
    vocab_size: Annotated[int, minimum(3)] = 10_000
    min_count: Count = 1  # occurrences of a word in a made vocabulary, at least; 1 for wordpieces
    # Folder of memory-mapped files for the ids, reused by later runs. Use a folder for a corpus
    # larger than the memory. "" keeps the ids in memory.
    encoded: str = ""
    # Worker processes of each rank. Workers count the words of a made vocabulary, make the batches
    # of training and, with `encoded`, encode the text. 0 does this in the rank's own process.
    num_workers: Limit = 0
    tokens_per_batch: Count = 2_560  # approximate number of predictions
    max_length: Limit = 0  # predictions in a row of a training batch at most; 0 is no limit
    max_train_sentences: Limit = 0  # the first training sentences at most; 0 is no limit

    def __post_init__(self) -> None:
        super().__post_init__()
        no_minimum = self.kind == "words" or self.min_count == 1
        require(no_minimum, "min_count", f'be 1 with kind = "{self.kind}"', self.min_count)


@dataclass
class ParallelDataConfig(Options):
    """Options of the parallel text of a translation model."""

    corpus: str = ""  # a folder of parallel text or a table; see `load_parallel`
    # Language pairs; "en-fr" translates from English into French. With several pairs, each source
    # begins with the token <2xx> of its target language.
    pairs: list[str] = field(default_factory=lambda: ["en-fr"])
    wordpieces: str = ""  # a sentencepiece model; "" trains wordpieces on the training part
    vocab_size: Annotated[int, minimum(3)] = 16_000  # of trained wordpieces
    kind: Annotated[str, one_of(*PIECE_KINDS)] = "bpe"  # of trained wordpieces
    # Shell patterns of text names to skip in the training part; see `load_parallel`.
    drop: list[str] = field(default_factory=list)
    max_train_pairs: Limit = 0  # first pairs of each language pair at most; 0 is no limit
    # Wordpieces of the longer side of a training pair, divided by those of the shorter side, at
    # most; 0 is no limit.
    max_ratio: Annotated[float, must("be 0 or at least 1", lambda x: x == 0 or x >= 1)] = 0.0
    oversample: bool = False  # train on equally many pairs of each language pair; see `PairBatches`
    # Folder of memory-mapped files for wordpieces and ids, reused by later runs. "" keeps both in
    # memory.
    encoded: str = ""
    # Worker processes of each rank. Workers encode the text and make the batches of training. 0
    # does this in the rank's own process.
    num_workers: Limit = 0
    tokens_per_batch: Count = 5_120  # approximate number of source tokens plus predictions
    # Source tokens and predictions of a training pair at most; longer pairs are skipped. 0 is no
    # limit, but one very long pair can exhaust the memory.
    max_length: Limit = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.pairs) >= 1, "pairs", "contain at least one language pair", self.pairs)
        rule = 'be pairs of two languages such as "en-fr"'
        for pair, (source, target) in zip(self.pairs, self.language_pairs, strict=True):
            require(bool(source and target) and source != target, "pairs", rule, pair)
        require(len(set(self.pairs)) == len(self.pairs), "pairs", "be distinct", self.pairs)

    @property
    def language_pairs(self) -> list[tuple[str, str]]:
        """The source and the target language of each pair."""
        return [(source, target) for source, _, target in (p.partition("-") for p in self.pairs)]

    @property
    def languages_with_token(self) -> list[str]:
        """The languages with a token ``<2xx>``: the targets of several pairs; [] for one pair."""
        several = len(self.pairs) > 1
        return sorted({target for _, target in self.language_pairs}) if several else []


@dataclass
class OptimizerConfig(Options):
    """Options of Adam with the learning-rate schedules of App. C.1 and E."""

    learning_rate: Positive = 1e-3  # peak of the learning rate
    warmup_steps: Count = 1_000  # steps to the peak
    hold_steps: Limit = 0  # steps at the peak
    beta1: Share = 0.9  # decay rate of the first moment
    beta2: Share = 0.98  # decay rate of the second moment
    eps: Positive = 1e-9  # term that Adam adds to the denominator
    # Optimizers of the expert weights (App. D), and of the weights of embedding and softmax.
    # "factored_adam" has no beta1.
    experts: Annotated[str, one_of("adam", "factored_adam")] = "adam"
    embedding: Annotated[str, one_of("adam", "factored_adam")] = "adam"
    # Peak learning rates of the expert weights, and of the thresholds of strictly balanced gates; 0
    # uses `learning_rate`.
    expert_learning_rate: Weight = 0.0
    threshold_learning_rate: Weight = 0.0
    clip_norm: Weight = 0.0  # maximum norm of the gradient of all parameters; 0 does not clip
    # Batches per optimizer step. The loss is the mean over all tokens of these batches, plus the
    # token-weighted mean of the balancing losses of the batches.
    accumulate: Count = 1


@dataclass
class LogConfig(Options):
    """Options of logs, evaluations and checkpoints."""

    log_every: Count = 50  # steps between log lines
    eval_every: Limit = 500  # steps between evaluations on the dev part; 0: only at the end
    eval_sentences: Limit = 0  # number of dev sentences, for each language pair; 0 uses all
    save_every: Limit = 500  # steps between checkpoints; 0 saves only at the end
    keep_checkpoints: Count = 2  # number of newest checkpoints to keep
    tensorboard: bool = True  # whether to write TensorBoard event files
    # Whether to show a progress bar. If stderr is not a terminal, a line is printed every log_every
    # steps.
    progress: bool = True


@dataclass
class RunConfig(Options):
    """Options common to the training runs of language models and translation models."""

    output: str = ""  # folder of the run; "" uses runs/NAME for the configuration file NAME.toml
    resume: bool = False  # whether to continue the run in the folder `output`
    # Seed of the weights, data order, dropout and noise.
    seed: Annotated[int, must(f"be in [0, {SEED_LIMIT})", lambda n: 0 <= n < SEED_LIMIT)] = 1
    steps: Count = 2_000  # total number of optimizer steps
    device: str = "cpu"  # "cpu", "cuda" or "cuda:N"
    # Number of torch's threads. 0: on a CPU, a single rank compares one thread with torch's default
    # in its first steps and keeps the faster number. Otherwise torch's default.
    num_threads: Annotated[int, _THREADS] = 0
    timeout: Annotated[float, _SECONDS] = 600.0  # a rank that waits longer ends with an error
    # "" for float32, or "bfloat16".
    autocast: Annotated[str, must('be "" or "bfloat16"', ("", "bfloat16").__contains__)] = ""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass
class Config(RunConfig):
    """Options of a training run of a language model."""

    task: str = "language_model"
    data: DataConfig = field(default_factory=DataConfig)
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.dtype != "float32":  # FactoredAdam keeps its state in float32
            for name in ("experts", "embedding"):
                value = getattr(self.optimizer, name)
                rule = f'be factored_adam if model.dtype is "{self.model.dtype}"'
                require(value == "factored_adam", f"optimizer.{name}", rule, value)
        num_sampled, kind = self.model.num_sampled, self.data.kind
        rule = 'be 0 if data.kind is "bpe", whose ids are not in order of frequency'
        require(not num_sampled or kind != "bpe", "model.num_sampled", rule, num_sampled)


@dataclass
class TranslationConfig(RunConfig):
    """Options of a training run of a translation model."""

    task: str = "translation"
    data: ParallelDataConfig = field(default_factory=ParallelDataConfig)
    model: TranslationModelConfig = field(default_factory=TranslationModelConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        attend, rule = self.model.attend_language, "be true if data.pairs has one language pair"
        require(attend or len(self.data.pairs) > 1, "model.attend_language", rule, attend)


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
    """Reads a configuration from a TOML file.

    Args:
        path: the file, or the name of a configuration of the package, such as "small/moe-32".
        overrides: ``key=value`` texts with dotted keys and TOML values. A value that is not TOML is
            a string, so ``data.corpus=builtin`` needs no quotes.
        kind: the required class, `Config` or `TranslationConfig`; None accepts both.
    """
    path = configuration_file(path)
    table = _read_table(path)
    file_table = copy.deepcopy(table)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"an override must be key=value, got {override!r}")
        _set(table, key.strip(), _parse(text.strip()), override)
    try:
        config = config_from_dict(table)
    except ConfigError:
        config_from_file(file_table, path)  # names the file, unless an override is wrong
        raise
    if kind is not None and not isinstance(config, kind):
        raise ConfigError(
            f'task must be "{kind.task}" for this command, got "{config.task}" in {path}'
        )
    config.output = _check_type(str, config.output or f"runs/{path.stem}", "output")
    return config


def config_from_dict(table: dict[str, Any]) -> AnyConfig:
    """Creates a configuration from nested dicts, as in TOML; missing keys get their defaults."""
    if not isinstance(table, dict):
        raise ConfigError(f"a configuration must be a table of options, got {_shown(table)}")
    task = table.get("task", Config.task)
    if not isinstance(task, str) or task not in _KINDS:
        raise ConfigError(f"task must be one of {', '.join(_KINDS)}, got {task!r}")
    kind = _KINDS[task]
    return _build(kind, table, "", kind)


def config_from_file(table: Any, path: Path) -> AnyConfig:
    """Creates a configuration from the contents of a file, which errors name."""
    try:
        return config_from_dict(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read_table(path: Path) -> dict[str, Any]:
    with config_errors():
        content = read_file(path, _MAX_BYTES)
    try:
        return tomllib.loads(content.decode("utf-8-sig"))  # without a byte order mark
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} must be TOML, got a syntax error: {error}") from None


# Options that do not change the results of a run; the options of [log] do not change them either.
_NOT_COMPARED = {
    "output", "resume", "device", "num_threads", "timeout", "data.encoded", "data.num_workers",
}  # fmt: skip


def options_of_results(config: AnyConfig) -> dict[str, Any]:
    """Returns the options that change the results of a run, by dotted key."""
    return {
        key: value
        for key, value in _flatten(asdict(config)).items()
        if key not in _NOT_COMPARED and not key.startswith("log.")
    }


def config_differences(a: AnyConfig, b: AnyConfig) -> list[str]:
    """Returns the dotted keys in which a and b differ and which change the results of a run."""
    if a.task != b.task:
        return ["task"]
    options_b = options_of_results(b)
    return [key for key, value in options_of_results(a).items() if value != options_b[key]]


def config_value(config: AnyConfig, key: str) -> Any:
    """Returns the value of the option with a dotted key, such as "model.moe.k"."""
    return _flatten(asdict(config))[key]


def to_toml(config: AnyConfig) -> str:
    """Formats the configuration as TOML with every key."""
    lines: list[str] = []

    def write(table: dict[str, Any], path: str) -> None:
        if path:
            lines.append(f"\n[{path}]")
        for key, value in table.items():
            if not isinstance(value, dict):
                # JSON and TOML write these numbers, strings, booleans and lists alike, but TOML
                # does not allow the character DEL.
                written = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
                lines.append(f"{key} = {written}")
        for key, value in table.items():
            if isinstance(value, dict):
                write(value, f"{path}.{key}" if path else key)

    write(asdict(config), "")
    return "\n".join(lines) + "\n"


def _parse(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text  # a text of several lines is one value


def _set(table: dict[str, Any], dotted: str, value: Any, override: str) -> None:
    *path, last = dotted.split(".")
    for key in path:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {key} must be a table, got a value")
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
        raise ConfigError(f"option {path[:-1]} must be a table of options, got {_shown(table)}")
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
    with config_errors(f"option {path}"):
        return cls(**values)


def _check_type(hint: Any, value: Any, key: str) -> Any:
    """Returns the value if its type is `hint`. An int is a valid float; a bool is not an int."""
    if get_origin(hint) is list:
        (item,) = get_args(hint)
        if isinstance(value, list):
            return [_check_type(item, element, key) for element in value]
        items = value.split(",") if isinstance(value, str) else [value]
        example = f", such as {json.dumps(items)}" if type(items[0]) is item else ""
        raise ConfigError(
            f"option {key} must be a list of {item.__name__}{example}, got {_shown(value)}"
        )
    if hint is float and type(value) is int:
        value = float(value) if abs(value) < 2**1023 else math.inf
    if type(value) is not hint:
        names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
        raise ConfigError(f"option {key} must be {names[hint]}, got {_shown(value)}")
    if hint is str:
        require_utf8(f"option {key}", value)  # config.toml has every option
        if "\0" in value:
            raise ConfigError(f"option {key} must have no NUL character, got {value!r}")
    if hint is int and not -(2**63) <= value < 2**63:
        raise ConfigError(f"option {key} must fit into 64 bits, got {_shown(value)}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"option {key} must be finite, got {value}")
    return value


def require_utf8(name: str, text: str) -> None:
    """Raises ConfigError if a text has bytes that are not UTF-8, which Python has as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} must be UTF-8, got {text!r}") from None


def _shown(value: Any) -> str:
    """Formats a value for an error message; a whole number can have too many digits for Python."""
    return hex(value) if type(value) is int and abs(value) >= 2**63 else repr(value)


def _unknown_key(key: str, root: type[AnyConfig]) -> str:
    """Makes the error message for an unknown key, with the closest known key."""
    known = list(_flatten(asdict(root())))
    top_level = [f.name for f in fields(root)]
    tables = [f.name for f in fields(root) if is_dataclass(f.default_factory)]
    by_last_word = {name.rpartition(".")[2]: name for name in reversed(known)}
    last_words = difflib.get_close_matches(key.rpartition(".")[2], by_last_word, n=1, cutoff=0.75)
    near = difflib.get_close_matches(key, known + tables, n=1)
    near = near or [by_last_word[word] for word in last_words]
    hint = f"did you mean {near[0]}?" if near else f"top-level keys are {', '.join(top_level)}"
    return f"unknown option {key}; {hint}"
