"""The attention implementation "moe_ext", and compiled generation."""

import importlib

import pytest
import torch
from assertions import assert_same_bits

transformers = pytest.importorskip("transformers", minversion="5.23")

from packed_checkpoints import load, write  # noqa: E402
from tiny_models import PADDED, error, tiny, tokens  # noqa: E402

attention = importlib.import_module("moe_ext.integrations._transformers.attention")

CASES = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "padded": {"input_ids": PADDED, "attention_mask": (PADDED > 0).long()},
    "beams": {"num_beams": 3},
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def queries(monkeypatch):
    """Returns the shapes [heads, tokens] of the queries that are grouped."""
    shapes = []

    def spy(query, *arguments, **options):
        shapes.append(tuple(query.shape[1:3]))
        return torch.nn.functional.scaled_dot_product_attention(query, *arguments, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    return shapes


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model_type", attention.GROUPED_MODELS)
def test_generation_equals_sdpa(model_type, case, queries):
    options = {"input_ids": tokens(), "max_new_tokens": 6, "do_sample": False} | CASES[case]
    options |= {"return_dict_in_generate": True, "output_logits": True}

    def run(implementation):
        model = tiny(model_type).eval()
        model.set_attn_implementation(implementation)
        return model.generate(**options)

    actual, expected = run("moe_ext"), run("sdpa")
    assert torch.equal(actual.sequences, expected.sequences)
    assert error(torch.stack(actual.logits), torch.stack(expected.logits)) < 1e-5
    assert {*queries} == {(2, 2)}  # the 4 heads are 2 heads of 2 query tokens


def test_gradients_equal_sdpa():
    """One query token may have gradients, as in training with a prompt that is cached."""
    leaves = [
        torch.randn(2, heads, n, 8, requires_grad=True) for heads, n in [(4, 1), (2, 5), (2, 5)]
    ]
    mask = torch.tensor([True, True, False, True, True]).expand(2, 1, 1, 5)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    results = []
    for function in (attention.attention_forward, attention.sdpa_attention_forward):
        y, _ = function(module, *leaves, mask, scaling=0.3)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        assert actual.shape == expected.shape and error(actual, expected) < 1e-5


@pytest.mark.parametrize(
    "heads, length, options",
    [
        (4, 3, {}),
        (2, 1, {}),
        (4, 1, {"position_bias": torch.randn(2, 4, 1, 3)}),
        (4, 1, {"attention_mask": torch.rand(2, 4, 1, 3) > 0.2}),
    ],
)
def test_all_else_is_sdpa(heads, length, options, queries):
    module = torch.nn.Module()
    module.num_key_value_groups = heads // 2
    tensors = torch.randn(2, heads, length, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    options = {"attention_mask": None, "scaling": 0.3, **options}
    actual, expected = (
        function(module, *tensors, **options)[0]
        for function in (attention.attention_forward, attention.sdpa_attention_forward)
    )
    assert_same_bits(actual, expected)
    assert queries == []


def test_sinks_are_an_error():
    model = tiny("gpt_oss").eval()
    model.set_attn_implementation("moe_ext")
    with pytest.raises(ValueError, match=r"^attn_implementation='moe_ext': .* got GptOssAttention"):
        model(tokens())


def test_load_chooses_the_attention(tmp_path):
    def chosen(model_type, kind, **options):
        write(tmp_path / model_type, model_type, kind)
        return load(tmp_path / model_type, **options).config._attn_implementation

    assert chosen("qwen3_moe", "fp8") == "moe_ext"
    assert chosen("qwen3_moe", "fp8", attn_implementation="eager") == "eager"
    assert chosen("gpt_oss", "mxfp4") == "eager"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("model_type, kind", [("qwen3_moe", "int8"), ("gpt_oss", "mxfp4")])
def test_compiled_generation(model_type, kind, backend, tmp_path):
    write(tmp_path, model_type, kind)
    model = load(tmp_path)
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(tokens(), **options)
    config = transformers.CompileConfig(backend=backend, mode="default", fullgraph=True)
    config._compile_all_devices = True
    options |= {"cache_implementation": "static", "compile_config": config}
    statistics, counts = torch._dynamo.utils.counters["stats"], []
    for _ in range(2):
        assert torch.equal(model.generate(tokens(), **options), expected)
        counts.append(statistics["unique_graphs"])
    assert 0 < counts[0] == counts[1]  # the second call compiles nothing
