"""moe_ext without Python: the library's symbols, its header of operators, and CMake.

scripts/test.sh runs the C++ tests of tests/cpp.
"""

import ast
import inspect
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
import torch

import moe_ext
from moe_ext import _build, gates, ops

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(moe_ext.__file__).parent
LIBRARY = _build.libraries()[_build.release(torch.__version__)]
KERNELS = PACKAGE / "lib" / "libmoe_ext_kernels.so"
KERNELS_CUDA = PACKAGE / "lib" / "libmoe_ext_kernels_cuda.so"
HEADERS = PACKAGE / "include" / "moe_ext"


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def without_comments(header):
    return re.sub(r"//.*", "", (HEADERS / header).read_text())


# The library

needs_binutils = pytest.mark.skipif(
    not (shutil.which("nm") and shutil.which("readelf")), reason="needs nm and readelf"
)


def test_setup_and_cmake_compile_the_same_folders_as_one():
    (together,) = re.findall(r"^TOGETHER = (.+)$", (ROOT / "setup.py").read_text(), re.M)
    cmake = (ROOT / "CMakeLists.txt").read_text()
    (folders,) = re.findall(r"^foreach\(folder (.+)\)$", cmake, re.M)
    assert ast.literal_eval(together) == folders.split()


@needs_binutils
def test_the_library_needs_no_python():
    undefined = output_of("nm", "-D", "--undefined-only", LIBRARY)
    assert "TensorImpl" in undefined
    assert re.findall(r"\b_?Py\w+|pybind11\w*", undefined) == []
    dynamic = output_of("readelf", "-d", LIBRARY)
    needed = re.findall(r"NEEDED\).*\[(.*)\]", dynamic)
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed if "python" in name] == []
    assert re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", dynamic) == [
        "$ORIGIN/..:$ORIGIN/../../../torch/lib"
    ]


@needs_binutils
def test_the_library_exports_its_headers_alone():
    """Weak symbols are templates of the standard library and of torch."""
    declared = set(re.findall(r"\w+", " ".join(map(without_comments, os.listdir(HEADERS)))))
    lines = output_of("nm", "-D", "-C", "--defined-only", LIBRARY).splitlines()
    symbols = [re.fullmatch(r"\w+ (\w) (.*)", line).groups() for line in lines]
    strong = [name for kind, name in symbols if kind not in "wWvVu"]
    assert any(name.startswith("moe_ext::ops::experts(") for name in strong)
    for name in strong:
        match = re.match(r"(?:.* (?:for|to) )?moe_ext::(?:\w+::)*~?(\w+)", name)
        assert match and match[1] in declared, name
    assert [name for _, name in symbols if "moe_ext::cpu" in name] == []


kernels = pytest.mark.parametrize(
    ("library", "kind"),
    [
        pytest.param(KERNELS, "cpu", id="cpu"),
        pytest.param(
            KERNELS_CUDA,
            "cuda",
            marks=pytest.mark.skipif(_build.cuda_version() is None, reason="built without CUDA"),
            id="cuda",
        ),
    ],
)


@needs_binutils
@kernels
def test_the_kernels_need_no_torch(library, kind):
    undefined = output_of("nm", "-D", "-C", "--undefined-only", library)
    assert "cudaLaunchKernel" in undefined if kind == "cuda" else "operator new" in undefined
    assert re.findall(r"\b(?:at|c10|torch|aoti_torch)\w*::?\w+|Py\w+", undefined) == []
    needed = re.findall(r"NEEDED\).*\[(.*)\]", output_of("readelf", "-d", library))
    assert [name for name in needed if "torch" in name or "c10" in name] == []
    cuda_libraries = [name for name in needed if "cu" in name]
    assert [name.partition(".")[0] for name in cuda_libraries] == ["libcudart"] * (kind == "cuda")


@needs_binutils
@kernels
def test_the_kernels_export_what_the_other_library_calls(library, kind):
    lines = output_of("nm", "-D", "-C", "--defined-only", library).splitlines()
    symbols = [re.fullmatch(r"\w+ (\w) (.*)", line).groups() for line in lines]
    strong = {name.partition("(")[0] for kind, name in symbols if kind not in "wWvVu"}
    assert {name.rpartition("::")[2] for name in strong} == exported_on(kind)
    called = output_of("nm", "-D", "-C", "--undefined-only", LIBRARY)
    assert all(f"{name}(" in called for name in strong)


def exported_on(kind):
    """Returns the names of the functions that the headers declare for one kind of device."""
    folder = ROOT / "csrc"
    declared = ""
    for header in [*folder.glob("kernels/*.h"), *folder.glob("cpu/**/*.h")]:
        left_out = "cuda" if kind == "cpu" else "cpu"
        text = without_comments(header)
        namespace = rf"namespace moe_ext::{left_out} {{(?:(?!\nnamespace ).)*\n}}"
        declared += re.sub(namespace, "", text, flags=re.S)
    names = set(re.findall(r"MOE_EXT_KERNEL_API [\w :<>&*]+?\b(\w+)\(", declared))
    return {name for name in names if name == f"run_on_{kind}" or not name.startswith("run_on_")}


@pytest.mark.parametrize("folder", ["cpu", "cuda", "kernels", "math"])
def test_the_kernels_include_only_torchs_types_of_numbers(folder):
    files = [*(ROOT / "csrc" / folder).rglob("*.*")]
    assert files
    for path in files:
        for name in re.findall(r"#include [<\"](.*)[>\"]", path.read_text()):
            foreign = re.match(r"(?:torch|c10|ATen|caffe2)/", name)
            assert not foreign or name.startswith("torch/headeronly/"), path


# The header of operators

TYPES = {
    "Tensor": "const Tensor&",
    "Tensor(a!)": "Tensor&",
    "Tensor(b!)": "Tensor&",
    "Tensor(c!)": "Tensor&",
    "Tensor?": "const OptionalTensor&",
    "Tensor[]": "at::TensorList",
    "Tensor[]?": "at::TensorList",
    "SymInt": "int64_t",
    "SymInt?": "std::optional<int64_t>",
    "int": "int64_t",
    "float": "double",
    "float?": "std::optional<double>",
    "bool": "bool",
    "str": "std::string_view",
    "PackedWeight[]": "at::ArrayRef<PackedWeight>",
    "LoRA[]": "at::ArrayRef<LoRA>",
    "float[]": "at::ArrayRef<double>",
    "float[]?": "at::ArrayRef<double>",
}
VALUES = {"std::nullopt": None, "nullptr": None, "{}": None, "false": False, "true": True}


def parsed(argument):
    """Returns (type, name, default) of a C++ argument or member; without default, ... ."""
    declared, _, default = argument.partition("=")
    kind, name = declared.strip().rsplit(" ", 1)
    default = default.strip()
    if not default:
        return kind, name, ...
    return kind, name, VALUES[default] if default in VALUES else ast.literal_eval(default)


def members(struct):
    """Returns the members of a struct of ops.h."""
    body = re.search(rf"struct {struct} {{(.*?)\n}};", without_comments("ops.h"), re.S)[1]
    return [parsed(" ".join(line.split())) for line in body.split(";") if line.strip()]


def declarations():
    """Returns {name: (result, arguments)} of the functions of ops.h, with members of options."""
    functions = {}
    pattern = r"MOE_EXT_API\s+([\w:]+)\s+(\w+)\(([^;]*)\);"
    for result, name, arguments in re.findall(pattern, without_comments("ops.h")):
        flat = []
        for text in " ".join(arguments.split()).split(", "):
            kind, argument, default = parsed(text)
            struct = re.search(r"\w+Options", kind)
            flat += members(struct[0]) if argument == "options" else [parsed(text)]
        functions[name] = result, flat
    return functions


def schemas():
    """Returns {name: (arguments, results)} of the public operators, from the text of schemas."""
    by_name = {}
    for schema in map(str, torch._C._jit_get_all_schemas()):
        match = re.fullmatch(r"moe_ext::([a-z]\w*)\((.*)\) -> (.*)", schema)
        if match:
            results = [text.split(" ")[-1] for text in match[3].strip("()").split(", ")]
            by_name[match[1]] = [parsed_schema(text) for text in match[2].split(", ")], results
    # Structs of C++ stand for several arguments. packed_experts calls the operator experts.
    arguments, results = by_name["experts"]
    kept = [a for a in arguments if not a[1].startswith("lora_")]
    kept.append(("LoRA[]", "lora", None))
    packed = ("formats", "groups", "columns", "arithmetic")
    by_name["experts"] = [a for a in kept if a[1] not in packed], results
    kinds = {"weights": "PackedWeight[]"}
    by_name["packed_experts"] = (
        [
            (kinds.get(name, kind), name, default)
            for kind, name, default in kept
            if name not in packed[:3]
        ],
        results,
    )
    return by_name


def parsed_schema(argument):
    kind, name = argument.split(" ")
    name, _, default = name.partition("=")
    return kind, name, ast.literal_eval(default) if default else ...


def test_every_operator_has_a_function():
    assert len(schemas()) >= 10
    # cv_squared calls weighted_cv_squared.
    assert set(declarations()) == set(schemas()) | {"cv_squared"}


@pytest.mark.parametrize("name", schemas())
def test_functions_have_the_arguments_of_the_schema(name):
    """Operators with options differ: C++ and Python pass recompute instead of what to keep.

    lstm returns only the outputs of which a gradient can be taken.
    """
    arguments, results = schemas()[name]
    result, declared = declarations()[name]
    if name in ("experts", "packed_experts", "linear_cross_entropy"):
        kept = ("keep_hidden", "keep_gradients")
        arguments = [("bool", "recompute", ...) if a[1] in kept else a
                     for a in arguments]  # fmt: skip
        arguments.sort(key=lambda a: [kind for _, kind, _ in declared].index(a[1]))
        results = [""]
    if name == "lstm":
        results = results[:3]
    kinds = [TYPES[kind] for kind, _, _ in arguments]
    assert [argument for _, argument, _ in declared] == [argument for _, argument, _ in arguments]
    for (kind, argument, _), expected in zip(declared, kinds, strict=True):
        assert kind == expected or f"const {kind}&" == expected, argument
    if result in ("Tensor", "void"):
        assert len(results) == 1
    else:
        assert [member for _, member, _ in members(result)] == results


@pytest.mark.parametrize("name", schemas())
def test_functions_have_the_defaults_of_python(name):
    """Apart from detach_threshold of load, which C++ writes as threshold.detach()."""
    _, declared = declarations()[name]
    if name in ops.__all__:
        parameters = inspect.signature(getattr(ops, name)).parameters.values()
        expected = [
            (p.name, ... if p.default is p.empty else p.default)
            for p in parameters
            if (name, p.name) != ("load", "detach_threshold")
        ]
    else:
        expected = [(argument, default) for _, argument, default in schemas()[name][0]]
    assert [(argument, default) for _, argument, default in declared] == expected


# The header of modules

# What only Python has, with the reason. What C++ gains must leave these lists.
ONLY_PYTHON = {
    "AdaptiveGate": "C++ has update_gates for TopKGate alone",
    "Capacity": "not written yet",
    "HierarchicalGate": "the groups of a gate serve the sharding over ranks",
    "ImportanceLoss": "w_importance computes it",
    "KeepAux": "a Sequential of C++ takes no module with two results",
    "LoRAExperts": "not written yet",
    "LoadLoss": "w_load computes it",
    "ModuleExperts": "experts of several modules derive from Experts",
    "MoELSTM": "not written yet",
    "MoELSTMCell": "not written yet",
    "ParameterCount": "count_parameters is not written yet",
    "PrimarySelection": "the groups of a gate serve the sharding over ranks",
    "QuantizedExperts": "ops::packed_experts is the operator",
    "ReLUGate": "not written yet",
    "SecondarySelection": "the groups of a gate serve the sharding over ranks",
    "StrictlyBalancedGate": "each balanced gate has the members itself",
}
SHARDING = {"process_group", "parallel"}  # only Python shards experts over ranks
CAPACITY = {"capacity"}  # not written yet
HABITS = {"device", "dtype"}  # where C++ lacks these, `to` moves and converts a module
ZERO_COMPUTATION = {"num_identity_experts", "num_null_experts"}  # not written yet
OPTIONS_OF_PYTHON = {
    "FeedForwardExperts": {"first_expert"},  # of the rank
    "HierarchicalMoE": SHARDING,
    "MoE": SHARDING | CAPACITY | ZERO_COMPUTATION,
    "MoEAux": {"kept"},  # by the capacity
    "Routing": {"kept"},
}
OPTIONS_OF_CPP = {"Gate": {"name"}, "RouterLoss": {"owner"}}  # the class that errors name
OTHER_DEFAULTS = {("Experts", "d_output")}  # always given in C++


def python_classes():
    """Returns the public classes of the layer by name."""
    named = {name: getattr(module, name) for module in (moe_ext, gates) for name in module.__all__}
    return {name: value for name, value in named.items() if inspect.isclass(value)}


def options_of_python(cls):
    """Returns {name: default} of the arguments of a class, with those of `**options`."""
    options = {}
    for p in inspect.signature(cls).parameters.values():
        if p.kind is p.VAR_KEYWORD:
            defaults = options_of_python(cls.__base__)
            options |= {name: defaults[name] for name in get_args(p.annotation)[0].__annotations__}
        else:
            options[p.name] = ... if p.default is p.empty else p.default
    return options


def arguments(text):
    """Returns {name: default} of the arguments of a constructor."""
    parts = re.split(r", (?![^<]*>)", " ".join(text.split()))  # not within std::array<int64_t, 2>
    return {name: default for _, name, default in map(parsed, parts)}


def options_of_cpp(name):
    """Returns {name: default} of an options struct, a plain struct or a constructor; or None."""
    header = without_comments("nn.h")
    constructor = rf"[ (]{name}%s\(([^()]*)\);"
    if options := re.search(rf"struct MOE_EXT_API {name}Options {{(.*?)\n}};", header, re.S):
        required = arguments(re.search(constructor % "Options", options[1])[1])
        fields = re.findall(r"TORCH_ARG\((.*), (\w+)\)( = .*)?;", options[1])
        defaults = dict(parsed(f"{kind} {field}{default}")[1:] for kind, field, default in fields)
        assert list(required) == [field for field, default in defaults.items() if default is ...]
        shared = re.findall(r"MOE_EXT_LAYER_ARG\((\w+)\)", options[1])
        return defaults | {name: options_of_cpp("MoE")[name] for name in shared}
    if struct := re.search(rf"struct MOE_EXT_API {name} {{(.*?)\n}};", header, re.S):
        lines = re.findall(r"^  ([^()\n]+);", struct[1], re.M)
        return dict(parsed(line)[1:] for line in lines)
    defaults = re.search(constructor % "(?:Impl)?", header)
    return defaults and arguments(defaults[1])


def test_cpp_has_the_classes_of_python():
    classes = python_classes()
    assert len(classes) >= 20
    assert {name for name in classes if options_of_cpp(name) is None} == set(ONLY_PYTHON)


@pytest.mark.parametrize("name", sorted(set(python_classes()) - set(ONLY_PYTHON)))
def test_classes_have_the_options_of_python(name):
    python, cpp = options_of_python(python_classes()[name]), options_of_cpp(name)
    assert set(python) - set(cpp) - HABITS == OPTIONS_OF_PYTHON.get(name, set())
    assert set(cpp) - set(python) == OPTIONS_OF_CPP.get(name, set())
    for option in set(python) & set(cpp):
        if (name, option) not in OTHER_DEFAULTS:
            default = python[option]
            assert cpp[option] == (None if default in ((), {}) else default), option


def test_hierarchical_options_are_those_of_the_flat_layer():
    """A setter returns the struct that declares it, so the hierarchical one names all options."""
    flat, hierarchical = options_of_cpp("MoE"), options_of_cpp("HierarchicalMoE")
    sizes = {"d_model", "num_experts", "k", "num_groups", "experts_per_group"}
    assert {name: value for name, value in flat.items() if name not in sizes} == {
        name: value for name, value in hierarchical.items() if name not in sizes
    }


# CMake

needs_cmake = pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
PROJECT = """
cmake_minimum_required(VERSION 3.24)
project(user LANGUAGES CXX)
set(file main.cpp)
find_package(moe_ext 0.1 REQUIRED)
if(NOT file STREQUAL "main.cpp")
  message(FATAL_ERROR "find_package(moe_ext) has changed a variable")
endif()
"""


@pytest.fixture
def configure(tmp_path):
    """Returns a function that configures a project; it sees a copy of moe_ext without torch."""
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "CMakeLists.txt").write_text(PROJECT)
    for folder in ("include", "lib", "share"):
        shutil.copytree(PACKAGE / folder, tmp_path / "lib" / "moe_ext" / folder)

    def run(*prefixes):
        prefixes = ";".join(map(str, [tmp_path / "lib" / "moe_ext", *prefixes]))
        result = subprocess.run(
            ["cmake", "-S", "user", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefixes}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        # CMake wraps the lines of a message.
        return result.returncode, " ".join(result.stderr.split())

    return run


@pytest.fixture
def other_torch(tmp_path):
    """Makes the headers of a torch that is one minor version ahead."""
    torch_root = Path(torch.__file__).parent
    major, minor = torch.__version__.split(".")[:2]
    for header in ("torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"):
        source = torch_root / "include" / header
        if source.exists():
            target = tmp_path / "torch" / "include" / header
            target.parent.mkdir(parents=True, exist_ok=True)
            before = f"TORCH_VERSION_MINOR {minor}"
            target.write_text(
                source.read_text().replace(before, f"TORCH_VERSION_MINOR {int(minor) + 1}")
            )
    main = tmp_path / "torch" / "include" / "torch" / "csrc" / "api" / "include" / "torch"
    (main / "torch.h").write_text("")
    (tmp_path / "torch" / "lib").mkdir()
    (tmp_path / "torch" / "lib" / "libtorch_cpu.so").write_text("")
    return tmp_path / "torch", f"{major}.{int(minor) + 1}."


@needs_cmake
def test_find_package_with_the_torch_of_the_build(configure):
    code, error = configure(torch.utils.cmake_prefix_path)
    assert (code, error) == (0, "")


@needs_cmake
@pytest.mark.parametrize(
    "asked, selected",
    [
        ("0.1", True), ("{version} EXACT", True), ("0.0.1...0.0.9", False),
        ("0.1...0.9", True), ("0.0.1...{version}", True), ("0.0.1...<{version}", False),
        ("{version}...<0.9", True), ("0.8...0.9", False), ("99", False),
    ],
)  # fmt: skip
def test_find_package_looks_at_both_ends_of_a_range(configure, tmp_path, asked, selected):
    header = (PACKAGE / "include" / "moe_ext" / "version.h").read_text()
    version = re.search(r'MOE_EXT_VERSION "([\d.]+)', header)[1]
    project = PROJECT.replace("moe_ext 0.1", f"moe_ext {asked.format(version=version)}")
    (tmp_path / "user" / "CMakeLists.txt").write_text(project)
    code, _ = configure(torch.utils.cmake_prefix_path)
    assert (code == 0) == selected


@needs_cmake
def test_find_package_with_another_torch_names_both(configure, other_torch):
    folder, version = other_torch
    code, error = configure(folder)
    assert code != 0
    known = ", ".join(_build.libraries())
    assert f"moe_ext was built for torch {known}, but {folder} has torch {version}" in error
    assert error.count("CMake Error") == 1
    # The remedy that the message names.
    assert configure(torch.utils.cmake_prefix_path) == (0, "")


@needs_cmake
def test_find_package_without_torch_says_what_to_add(configure):
    code, error = configure()
    assert code != 0
    assert "moe_ext: found no torch; add LibTorch's folder" in error
    assert "CMAKE_PREFIX_PATH" in error
    assert error.count("CMake Error") == 1
