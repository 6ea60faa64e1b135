"""The common model tests of transformers on our experts, in float and packed.

A test may only fail if it also fails with transformers' own experts ("eager"), or if `PACKED` says
why it cannot pass.
"""

import importlib
import inspect
import re

import pytest

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("parameterized")  # which the common tests import

from common_model_tests import MODEL_TYPES, download, failures, import_tests  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

# The common tests that cannot pass with packed experts.
PACKED = {
    "test_eager_matches_batched_and_grouped_inference": "packed experts are no implementation "
    "that `set_experts_implementation` changes",
    "test_from_pretrained_no_checkpoint": "gives the state dict of packed experts to stock "
    "`from_pretrained`",
    "test_init_weights_can_init_buffers": "fills the weights with NaN, which no format holds",
    "test_model_weights_reload_no_missing_tied_weights": "writes the state dict of packed experts "
    "to a file for stock `from_pretrained`",
    "test_tp_plan_matches_params": "the plan of transformers names float weights",
}


@pytest.fixture(scope="module")
def common(tmp_path_factory, pytestconfig):
    folder = download(tmp_path_factory.mktemp("transformers"))
    decorators = inspect.getsource(importlib.import_module("transformers.testing_utils"))
    text = (folder / "test_modeling_common.py").read_text("utf-8") + decorators
    for name in sorted({*re.findall(r"\bmark\.(\w+)", text)}):
        pytestconfig.addinivalue_line("markers", f"{name}: of the tests of transformers")
    return import_tests(folder)


def failed_with_ours_alone(common, model_type, experts):
    failed, num_passed = failures(common, model_type, experts)
    assert num_passed > 70
    eager_failed, _ = failures(common, model_type, "eager", failed)
    return {name: error for name, error in failed.items() if name not in eager_failed}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_float_experts(common, model_type):
    assert failed_with_ours_alone(common, model_type, "moe_ext") == {}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_packed_experts(common, model_type):
    failed = failed_with_ours_alone(common, model_type, "packed")
    expected = {name for name in failed if name.startswith(tuple(PACKED))}
    assert {name: failed[name] for name in failed.keys() - expected} == {}
    if model_type == "qwen3_moe":  # each line of the list is needed
        assert all(any(name.startswith(line) for name in expected) for line in PACKED)
