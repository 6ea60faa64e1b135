"""The common model tests of transformers, from its source distribution, on mixtures of experts."""

import contextlib
import importlib
import random
import subprocess
import sys
import tarfile
import types
import unittest
import warnings

import numpy
import torch
import transformers

import moe_ext.integrations.transformers as plug

PACKAGE = "transformers_tests"
# What the common tests import, and the source distribution lacks.
ABSENT = {
    "exporters.test_export": "ExportTesterMixin",
    "generation.test_utils": "GenerationTesterMixin",
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
RANKS = {"q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 16}
RANKS |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
OPTIONS = {  # of all model types; a configuration ignores the names that it does not have
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 0,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_k": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
} | dict.fromkeys(EXPERTS, 6)
MODEL_TYPES = {  # with their own options
    "afmoe": {},
    "aria_text": {},
    "axk2": RANKS,
    "cohere2_moe": {},
    "deepseek_v2": RANKS,
    "deepseek_v3": RANKS | {"head_dim": 4},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "glm4_moe_lite": RANKS,
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "laguna": {},
    "mellum": {},
    "minimax": {},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "solar_open": {},
}


def download(folder):
    """Downloads the source distribution of the installed version; returns its folder of tests."""
    name = f"transformers=={transformers.__version__}"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary=:all:"]
    pip = [sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", name]
    subprocess.run(pip, check=True, timeout=300)
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "tests"


def import_tests(folder):
    """Imports test_modeling_common.py, with empty classes for what the distribution lacks."""
    package = sys.modules[PACKAGE] = types.ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    for name, mixin in ABSENT.items():
        for module in (name.partition(".")[0], name):
            sys.modules[f"{PACKAGE}.{module}"] = types.ModuleType(module)
        setattr(sys.modules[f"{PACKAGE}.{name}"], mixin, type(mixin, (), {}))
    return importlib.import_module(f"{PACKAGE}.test_modeling_common")


class Tester:
    """Makes the configuration of a model type and the inputs of its models."""

    is_training = True
    batch_size, seq_length = 3, 7
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 2

    def __init__(self, model_type):
        self.model_type = model_type

    def get_config(self):
        options = OPTIONS | MODEL_TYPES[self.model_type]
        return transformers.AutoConfig.for_model(self.model_type, **options)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, OPTIONS["vocab_size"], (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextlib.contextmanager
def default_experts(name):
    """Makes an implementation the default one of all models."""
    usual = transformers.PreTrainedModel.get_correct_experts_implementation
    transformers.PreTrainedModel.get_correct_experts_implementation = lambda self, requested: usual(
        self, requested or name
    )
    try:
        yield
    finally:
        transformers.PreTrainedModel.get_correct_experts_implementation = usual


def packed(class_):
    """Returns a class of models whose experts are packed after they are made or loaded.

    Only the experts differ in a checkpoint: it has their dequantized weights.
    """

    class Packed(class_):
        def __init__(self, config, *args, **options):
            super().__init__(config, *args, **options)
            if not next(self.parameters()).is_meta:
                plug.quantize_experts(self, "mxfp4", quiet=True)

        @classmethod
        def from_pretrained(cls, *args, **options):
            pretrained = super().from_pretrained(*args, **options)
            model = pretrained[0] if isinstance(pretrained, tuple) else pretrained
            plug.quantize_experts(model, "mxfp4", quiet=True)
            return pretrained

        def save_pretrained(self, *args, **options):
            dequantized(self, class_).save_pretrained(*args, **options)

        def parameters(self, recurse=True):  # the codes are integers, which have no gradient
            return filter(torch.is_floating_point, super().parameters(recurse))

    Packed.__name__ = Packed.__qualname__ = class_.__name__
    Packed.__module__ = class_.__module__
    return Packed


def dequantized(model, class_):
    """Returns a copy of a packed model with its experts in floats."""
    copy = class_(model.config).to(model.dtype)
    copy.generation_config = getattr(model, "generation_config", None)
    state = copy.state_dict()
    state |= {name: value for name, value in model.state_dict().items() if name in state}
    for path, module in plug.experts_modules(model).items():
        own = copy.get_submodule(path)
        experts = module.quantized.dequantize(model.dtype)
        for i, name in enumerate(["gate_up_proj" if own.has_gate else "up_proj", "down_proj"]):
            weight = experts.weights[i]
            state[f"{path}.{name}"] = weight if own.is_transposed else weight.mT
            if own.has_bias:
                state[f"{path}.{name}_bias"] = experts.biases[i]
    copy.load_state_dict(state)
    return copy


def failures(common, model_type, experts, names=None):
    """Runs the common tests of a model type.

    Args:
        common: the module of the tests.
        model_type: a key of MODEL_TYPES.
        experts: "packed", or the implementation of float experts.
        names: the tests to run; None: all.

    Returns:
        The last line of the error of each test that failed, and the number of tests that passed.
    """
    tester = Tester(model_type)
    kind = type(tester.get_config())
    mappings = transformers.MODEL_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    classes = [mapping[kind] for mapping in mappings]
    if experts == "packed":
        classes = [packed(class_) for class_ in classes]

    def setUp(self):  # noqa: N802
        self.model_tester = tester
        for seed in (torch.manual_seed, numpy.random.seed, random.seed):
            seed(0)

    bases = common.ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase
    case = type("CommonTest", bases, {"setUp": setUp, "all_model_classes": tuple(classes)})
    test_names = unittest.defaultTestLoader.getTestCaseNames(case)
    result = unittest.TestResult()
    implementation = "moe_ext" if experts == "packed" else experts
    with default_experts(implementation), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.filterwarnings("error", "experts_implementation='moe_ext'")  # a module falls back
        unittest.TestSuite(map(case, test_names if names is None else names)).run(result)
    errors = {
        getattr(test, "test_case", test).id().rpartition(".")[2]: text.strip().splitlines()[-1]
        for test, text in [*result.failures, *result.errors]
    }
    return errors, result.testsRun - len(errors) - len(result.skipped)
