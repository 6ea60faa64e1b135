"""Training of the models: configuration, loop, metrics, checkpoints, paired comparisons.

An example::

    config = read_config("configs/small/moe-32.toml", ["steps=500"])
    trainer = Trainer(config)
    trainer.run()
    trained = load_run(config.output)
    test = evaluate(trained.model, load_part(config.data, trained.vocabulary, "test"))
    print(test.perplexity)
"""

from moe_ext.lab.training.checkpoint import TrainedModel, load_run
from moe_ext.lab.training.cluster import DEVICES, Device, Plan, plan
from moe_ext.lab.training.command import exit_status
from moe_ext.lab.training.comparison import comparison_report, dense_counterpart
from moe_ext.lab.training.config import (
    AnyConfig,
    Config,
    ConfigError,
    DataConfig,
    ParallelDataConfig,
    TranslationConfig,
    config_from_dict,
    read_config,
    to_toml,
)
from moe_ext.lab.training.device import set_up_for, set_up_torch
from moe_ext.lab.training.launch import process_group_of_run
from moe_ext.lab.training.logging import read_metrics
from moe_ext.lab.training.loop import Trainer
from moe_ext.lab.training.metrics import Evaluation, evaluate, perplexity
from moe_ext.lab.training.model import make_model
from moe_ext.lab.training.results import Result, train_and_test
from moe_ext.lab.training.statistics import Interval, bootstrap_difference, mean_difference
from moe_ext.lab.training.study import Results, run_study
from moe_ext.lab.training.text import Text, load_part, load_text
from moe_ext.lab.training.translation import make_translator, translations_of

__all__ = [
    "DEVICES",
    "AnyConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "Device",
    "Evaluation",
    "Interval",
    "ParallelDataConfig",
    "Plan",
    "Result",
    "Results",
    "Text",
    "TrainedModel",
    "Trainer",
    "TranslationConfig",
    "bootstrap_difference",
    "comparison_report",
    "config_from_dict",
    "dense_counterpart",
    "evaluate",
    "exit_status",
    "load_part",
    "load_run",
    "load_text",
    "make_model",
    "make_translator",
    "mean_difference",
    "perplexity",
    "plan",
    "process_group_of_run",
    "read_config",
    "read_metrics",
    "run_study",
    "set_up_for",
    "set_up_torch",
    "to_toml",
    "train_and_test",
    "translations_of",
]
