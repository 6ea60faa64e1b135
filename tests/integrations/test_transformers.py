"""transformers' experts on our operators: each class of the registry, tiny models, features.

The classes are found in the source of transformers, so a new class is tested when it appears.
"""

import ast
import copy
import functools
import gc
import importlib
import inspect
import pickle
import re
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from moe_ext import count_parameters

transformers = pytest.importorskip("transformers", minversion="5.23")

from tiny_models import MODEL_TYPES, assert_close, error, losses_of, tiny, tokens  # noqa: E402

plug = importlib.import_module("moe_ext.integrations.transformers")
activations = importlib.import_module("moe_ext.integrations._transformers.activation")
once = importlib.import_module("moe_ext.integrations._transformers.warnings")

MODELS = Path(transformers.__file__).parent / "models"
NUM_EXPERTS, K = 5, 2

# The classes with an activation that the operator does not have.
FALL_BACKS = {
    "Inkling2Experts": "a product of softcaps",
    "Inkling2LoopExperts": "a product of softcaps",  # since 5.24
}

# The classes that `build` cannot build, with the error.
NOT_BUILT = {"Dots3NoteExperts": "is a per-layer attribute"}


def registry():
    """Finds (module, class) of each class with the decorator use_experts_implementation."""
    classes = []
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        if "use_experts_implementation" in (source := file.read_text()):
            classes += [
                (f"transformers.models.{file.parent.name}.{file.stem}", node.name)
                for node in ast.parse(source).body
                if isinstance(node, ast.ClassDef)
                and any("use_experts_impl" in ast.unparse(d) for d in node.decorator_list)
            ]
    return classes


REGISTRY = registry()


def shrink(config):
    """Sets the sizes that an experts module reads: 5 experts, widths 16 and 8."""
    for key, value in list(vars(config).items()):
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            if re.search(r"(hidden|latent)_size", key):
                setattr(config, key, 16)
            elif "intermediate_size" in key:
                setattr(config, key, 8)
            elif re.search(r"experts$", key):
                setattr(config, key, NUM_EXPERTS)


def build(module, name, dtype=torch.float64):
    """Builds an experts module of random weights from the first config class that fits."""
    experts_class = getattr(importlib.import_module(module), name)
    package, _, file = module.rpartition(".")
    configs = importlib.import_module(f"{package}.{file.replace('modeling', 'configuration')}")
    sized = "intermediate_size" in inspect.signature(experts_class.__init__).parameters
    options = {"intermediate_size": 8} if sized else {}
    errors = []
    for config_class in vars(configs).values():
        if not (isinstance(config_class, type) and config_class.__module__ == configs.__name__):
            continue
        try:
            config = config_class()
            shrink(config)
            experts = experts_class(config, **options)
        except (AttributeError, KeyError, TypeError) as error:  # not the config of this class
            errors.append(f"{config_class.__name__}: {error}")
            continue
        config._experts_implementation = "moe_ext"
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=0.5)
        return experts.to(dtype)
    raise AssertionError(f"{name} cannot be built: {errors}")


class InFloat64(TorchFunctionMode):
    """Replaces float32 by float64: some classes compute a part in float32 in any dtype."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(value):
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(widen(arg) for arg in args)
        return func(*args, **{key: widen(value) for key, value in (kwargs or {}).items()})


def inputs(experts, num_tokens=7, dtype=torch.float64):
    """Returns x, the index and the weights; expert 3 has no token."""
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x = torch.randn(num_tokens, width, dtype=dtype, requires_grad=True)
    allowed = torch.tensor([0, 1, 2, 4])
    chosen = torch.rand(num_tokens, 4).argsort(1)[:, :K]
    gates = torch.rand(num_tokens, K, dtype=dtype, requires_grad=True)
    return x, allowed[chosen], gates


def results(experts, implementation, x, index, gates):
    """Returns the output and the gradients of x, of the gates and of each parameter."""
    experts.config._experts_implementation = implementation
    y = experts(x, index, gates)
    direction = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    leaves = {"x": x, "gates": gates, **dict(experts.named_parameters())}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(y, list(leaves.values()), direction)
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_equal_to_eager(experts, x, index, gates, tolerance=1e-10):
    with InFloat64():
        expected = results(experts, "eager", x, index, gates)
        actual = results(experts, "moe_ext", x, index, gates)
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype == expected[name].dtype
        assert error(actual[name], expected[name]) < tolerance, name


@pytest.fixture(autouse=True)
def no_warnings():
    """Hides the warnings of modules that fall back."""
    once._messages.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="experts_implementation='moe_ext'")
        yield


def test_the_registry_is_found():
    assert len(REGISTRY) >= 64
    assert {"MixtralExperts", "GptOssExperts", "AriaExperts"} <= {name for _, name in REGISTRY}


BUILT = [row for row in REGISTRY if row[1] not in NOT_BUILT]
each_class = pytest.mark.parametrize(("module", "name"), BUILT, ids=[name for _, name in BUILT])


def cast(arguments, dtype):
    return [
        value.detach().to(dtype).requires_grad_() if value.is_floating_point() else value
        for value in arguments
    ]


@each_class
def test_each_class_equals_eager(module, name):
    """In float32 and bfloat16, the error is at most twice that of eager."""
    wide = build(module, name)
    arguments = inputs(wide, num_tokens=64)
    assert_equal_to_eager(wide, *arguments)
    for dtype in (torch.float32, torch.bfloat16):
        experts, narrow = copy.deepcopy(wide).to(dtype), cast(arguments, dtype)
        with InFloat64():
            exact = copy.deepcopy(experts).double(), "eager", *cast(narrow, torch.float64)
            expected = results(*exact)
        eager, fused = (results(experts, name, *narrow) for name in ("eager", "moe_ext"))
        # The gradient of a bias sums about 25 rows in float32.
        rounding = max(torch.finfo(dtype).eps / 2, 4 * torch.finfo(torch.float32).eps)
        for key in expected:
            bound = 2 * max(error(eager[key], expected[key]), rounding)
            assert error(fused[key], expected[key]) <= bound, (key, dtype)


def test_only_classes_with_other_activations_fall_back():
    classes = {
        name
        for module, name in BUILT
        if isinstance(activations.activation_of(build(module, name)), str)
    }
    assert classes == set(FALL_BACKS) & {name for _, name in BUILT}


MIXTRAL = ("transformers.models.mixtral.modeling_mixtral", "MixtralExperts")
MUSE_SPARK = ("transformers.models.muse_spark.modeling_muse_spark", "MuseSparkExperts")
NEMOTRON = ("transformers.models.nemotron_h.modeling_nemotron_h", "NemotronHExperts")


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize(
    ("function", "name"),
    [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_python", "gelu")]
    + [("relu", "relu"), ("sigmoid", "sigmoid"), ("tanh", "tanh"), ("linear", "identity")]
    + [("relu2", "relu_squared")],
)
def test_activations_are_recognised(function, name, has_gate):
    experts = build(*(MIXTRAL if has_gate else NEMOTRON))
    experts.act_fn = transformers.activations.ACT2FN[function]
    gated = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu", "sigmoid": "glu"}
    expected = gated.get(name) if has_gate else name
    actual = activations.activation_of(experts)
    assert isinstance(actual, str) if expected is None else actual.name == expected
    assert_equal_to_eager(experts, *inputs(experts))


def test_an_activation_may_be_replaced():
    experts = build(*MIXTRAL)
    assert_equal_to_eager(experts, *inputs(experts))
    for function in ("gelu", "mish", "silu"):
        experts.act_fn = transformers.activations.ACT2FN[function]
        assert_equal_to_eager(experts, *inputs(experts))


def test_a_module_whose_forward_is_replaced_is_freed():
    """Hooks of accelerate and of expert parallelism replace forward by a closure."""
    experts = build(*MIXTRAL)
    experts.forward = functools.partial(experts.forward)
    results(experts, "moe_ext", *inputs(experts))
    freed = weakref.ref(experts)
    del experts
    gc.collect()
    assert freed() is None


def test_an_activation_is_recognised_once_with_parametrizations(monkeypatch):
    """PEFT registers new parametrizations in each forward pass."""
    experts, calls = build(*MIXTRAL), []
    recognise = activations._recognise
    monkeypatch.setattr(
        activations, "_recognise", lambda module: calls.append(1) or recognise(module)
    )
    for _ in range(2):
        with torch.no_grad():
            experts.gate_up_proj.mul_(1.5)
        parametrize.register_parametrization(experts, "gate_up_proj", nn.Identity())
        assert_equal_to_eager(experts, *inputs(experts))
        parametrize.remove_parametrizations(experts, "gate_up_proj")
    assert len(calls) == 1


def test_a_cold_export_contains_the_operator():
    model = tiny()
    with torch.no_grad():
        arguments = {"input_ids": tokens(), "use_cache": False}
        program = torch.export.export(model, (), arguments, strict=False)
    called = [node for node in program.graph.nodes if "moe_ext.experts" in str(node.target)]
    assert len(called) == len(plug.experts_modules(model))
    actual = activations.activation_of(next(iter(plug.experts_modules(model).values())))
    assert actual == activations.KnownActivation("swiglu")


class Wrapped(torch.Tensor):
    """A tensor that wraps another, as torchao's quantized tensors do; all operators unwrap it."""

    @staticmethod
    def __new__(cls, data):
        options = {"dtype": data.dtype, "device": data.device, "strides": data.stride()}
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, **options)

    def __init__(self, data):
        self.data_of_it = data

    def __tensor_flatten__(self):
        return ["data_of_it"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return Wrapped(inner["data_of_it"])

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function.namespace == "moe_ext" or function._opname in ("transpose", "_grouped_mm"):
            raise NotImplementedError(function)  # like torchao
        unwrap = lambda value: value.data_of_it if isinstance(value, Wrapped) else value  # noqa: E731
        result = function(*tree_map(unwrap, arguments), **tree_map(unwrap, options or {}))
        return Wrapped(result) if function._opname == "detach" else result


def test_quantized_parameters_fall_back():
    model = tiny("qwen3_moe", "moe_ext").requires_grad_(False)
    with torch.no_grad():
        expected = model(tokens()).logits
        for layer in model.model.layers:
            for name in ("gate_up_proj", "down_proj"):
                weight = Wrapped(getattr(layer.mlp.experts, name).detach())
                setattr(layer.mlp.experts, name, torch.nn.Parameter(weight, requires_grad=False))
        match = "Qwen3MoeExperts uses 'eager': its parameters are of the class (Wrapped|Parameter)"
        with pytest.warns(UserWarning, match=match):
            torch.testing.assert_close(model(tokens()).logits, expected)


def test_fp8_models_fall_back(monkeypatch):
    """transformers' own implementations need kernels for a GPU; here a stand-in returns x."""
    fp8 = importlib.import_module("transformers.integrations.finegrained_fp8")
    model = fp8.replace_with_fp8_linear(tiny(), None, transformers.FineGrainedFP8Config())
    experts = next(iter(plug.experts_modules(model).values()))
    assert experts.gate_up_proj.dtype == torch.float8_e4m3fn
    monkeypatch.setattr(once, "_messages", set())
    for scheme, name in (("dynamic", "grouped_mm"), ("static", "eager")):
        experts.activation_scheme = scheme
        called = lambda module, x, index, weights: x + 1  # noqa: E731
        monkeypatch.setitem(fp8.ALL_FP8_EXPERTS_FUNCTIONS._local_mapping, name, called)
        x = torch.randn(3, 4)
        with pytest.warns(UserWarning, match=f"FP8Experts uses '{name}': its parameters are FP8"):
            y = experts(x, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1))
        assert torch.equal(y, x + 1)


@pytest.mark.parametrize("function", ["relu6", "gelu_10", "leaky_relu", "mish", "prelu"])
def test_similar_activations_are_not_mistaken(function):
    experts = build(*NEMOTRON)
    experts.act_fn = transformers.activations.ACT2FN[function].double()
    assert isinstance(activations.activation_of(experts), str)
    assert_equal_to_eager(experts, *inputs(experts))


def test_a_fall_back_warns_once_and_says_why():
    experts = build(*NEMOTRON)
    experts.act_fn = transformers.activations.ACT2FN["mish"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            results(experts, "moe_ext", *inputs(experts))
    (message,) = [str(w.message) for w in caught]
    assert "NemotronHExperts uses 'eager': its activation is none of" in message


def test_decoding_under_autocast_warns_once():
    """Autocast would cast the weights of all experts in each call."""
    model = tiny("qwen3_moe", "moe_ext")
    step = tokens()[:, :1]

    def warnings_of(model, ids, grad=False, enabled=True):
        once._messages.clear()
        with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(grad):
            warnings.simplefilter("always")
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                model(ids), model(ids)
        return [str(w.message) for w in caught]

    (message,) = warnings_of(model, step)
    assert re.search(r"all experts of Qwen3MoeExperts .* model.to\(torch.bfloat16\)", message)
    assert warnings_of(model, step, grad=True) == warnings_of(model, step, enabled=False) == []
    assert warnings_of(model, step.expand(-1, 200)) == []
    assert warnings_of(model.bfloat16(), step) == []  # as the message says


def test_unknown_flags_and_parameters_fall_back(monkeypatch):
    monkeypatch.setitem(activations._UNKNOWN_FLAGS, "is_scaled", False)
    experts = build(*MIXTRAL)
    assert activations._unknown_part(experts) is None
    experts.is_scaled = True
    assert activations.activation_of(experts) == "the flag is_scaled = True is unknown"
    experts = build(*MIXTRAL)
    experts.scale = nn.Parameter(torch.ones(()))
    assert activations.activation_of(experts) == "the parameter scale is unknown"


def test_mixed_dtypes_fall_back():
    experts = build(*MIXTRAL, dtype=torch.float32)
    experts.down_proj.data = experts.down_proj.data.bfloat16()
    reason = plug._refusal(experts, [experts.gate_up_proj, experts.down_proj])
    assert reason.endswith("got torch.bfloat16, torch.float32")


@pytest.mark.parametrize("class_", [MIXTRAL, MUSE_SPARK])
def test_expert_parallelism_skips_the_experts_of_other_ranks(class_):
    experts = build(*class_)
    x, index, gates = inputs(experts)
    gates = (gates.detach() * (index != 2)).requires_grad_()
    index = index.masked_fill(index == 2, NUM_EXPERTS)
    expected = results(experts, "eager", x, index, gates)
    experts._is_expert_parallel = True
    actual = results(experts, "moe_ext", x, index, gates)
    for name in expected:
        assert error(actual[name], expected[name]) < (1e-6 if class_ is MUSE_SPARK else 1e-10), name
    assert (actual["gates"][index == NUM_EXPERTS] == 0).all()
    nothing = results(experts, "moe_ext", x, torch.full_like(index, NUM_EXPERTS), gates)
    assert all((value == 0).all() for value in nothing.values())


def test_x_is_converted_to_the_dtype_of_the_parameters():
    experts = build(*MIXTRAL, dtype=torch.bfloat16)
    x, index, gates = inputs(experts, dtype=torch.float32)
    y = experts(x, index, gates)
    assert y.dtype == torch.float32
    assert torch.equal(y, experts(x.bfloat16(), index, gates).float())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_models_equal_eager(model_type):
    model = tiny(model_type, "eager")
    expected = losses_of(model)
    model.set_experts_implementation("moe_ext")
    assert model.get_experts_implementation() == {"": "moe_ext"}
    assert_close(losses_of(model), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant):
    model = tiny()
    expected = losses_of(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    losses = losses_of(model)
    assert all(torch.equal(losses[name], expected[name]) for name in expected)


def test_copies_of_a_model():
    model = tiny()
    expected = model(tokens()).logits
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(tokens()).logits, expected)


def test_transformers_without_the_flags_is_an_error(monkeypatch):
    def old(experts_class=None, *, experts_interface=None, is_transposed=False, has_bias=False):
        raise NotImplementedError

    monkeypatch.setattr(activations, "use_experts_implementation", old)
    with pytest.raises(ImportError, match="has_gate, has_post_expert_norm, is_concatenated"):
        activations._read_flags()


def test_total_and_active_parameters():
    """Mixtral-8x7B has 46.7 billion parameters, of which a token uses 12.9 (arXiv 2401.04088)."""
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig())
    total, active = count_parameters(model)
    assert (round(total / 1e8), round(active / 1e8)) == (467, 129)
    assert total == model.num_parameters()
    assert count_parameters(model, k=8).active == total
    with pytest.raises(ValueError, match="^count_parameters: k must be at least 1, got 0$"):
        count_parameters(model, k=0)
