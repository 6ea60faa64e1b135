"""Building and importing moe_ext, and its report on both."""

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import setuptools
import torch
from launch import run_code
from machine import cpu_info, instruction_sets
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch.utils import cpp_extension

import moe_ext
from moe_ext import _build

ROOT = Path(__file__).resolve().parent.parent


class Started(Exception):
    """Raised instead of the start of setuptools."""


@pytest.fixture
def run_setup(monkeypatch, tmp_path):
    """Returns a function that runs setup.py up to `setup` and returns the environment.

    The arguments are variables of the environment. A message of setup.py is a SystemExit.
    """

    def setup(**options):
        raise Started

    monkeypatch.setattr(setuptools, "setup", setup)
    monkeypatch.chdir(tmp_path)
    environ = {k: v for k, v in os.environ.items() if k != "TORCH_CUDA_ARCH_LIST"}

    def run(**given):
        monkeypatch.setattr(os, "environ", environ | given)
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", given.get("CUDA_HOME"))
        with pytest.raises(Started):
            runpy.run_path(str(ROOT / "setup.py"))
        return os.environ

    return run


def test_building_without_torch_is_one_sentence(run_setup, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="^moe_ext: the build .* --no-build-isolation .`$"):
        run_setup()


def locked(path):
    """Reads a file of requirements/ and those it includes: the pins of this Python by name."""
    pins = {}
    for entry in re.split(r"\n(?=\S)", path.read_text().strip()):
        if entry.startswith("#"):
            continue
        if entry.startswith("-r "):
            pins |= locked(path.parent / entry.removeprefix("-r "))
            continue
        assert " --hash=sha256:" in entry
        pin = Requirement(entry.split("\\")[0])
        if pin.marker is None or pin.marker.evaluate():
            assert pin.name not in pins
            [pins[pin.name]] = pin.specifier
    return pins


def test_requirements_lock_all_that_the_scripts_need():
    """Every requirement has one version for this Python, that fits, and the hashes of its files."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    needs = options["dependency-groups"] | {"lab": lab["dependencies"]}
    needs |= {"torch": ["torch>=2.11"], "uv": ["uv"]}
    files = {path.stem: locked(path) for path in (ROOT / "requirements").iterdir()}
    assert files.keys() == needs.keys()
    for name, requirements in needs.items():
        for requirement in map(Requirement, requirements):
            if requirement.name != "moe_ext":
                pin = files[name][canonicalize_name(requirement.name)]
                assert pin.operator == "==" and requirement.specifier.contains(pin.version)
    del files["cuda"]  # an older toolkit than torch's
    versions = {(name, pin) for pins in files.values() for name, pin in pins.items()}
    assert len(versions) == len({name for name, _ in versions})  # one version in all files


def test_unknown_choice_of_cuda_is_one_sentence(run_setup):
    with pytest.raises(SystemExit, match="^moe_ext: MOE_EXT_CUDA must be auto, 0 or 1, got yes$"):
        run_setup(MOE_EXT_CUDA="yes")


@pytest.fixture
def toolkit(tmp_path):
    """Makes a CUDA toolkit of a version; without a version, an empty folder."""

    def make(version=None, architectures="80 90 100 120"):
        if version is not None:
            nvcc = tmp_path / "bin" / "nvcc"
            nvcc.parent.mkdir()
            nvcc.write_text(
                "#!/bin/sh\ncase $1 in\n"
                f"--version) echo 'tools, release {version}, V{version}.1' ;;\n"
                f"--list-gpu-arch) printf 'compute_%s\\n' {architectures} ;;\nesac\n"
            )
            nvcc.chmod(0o755)
        return str(tmp_path)

    return make


with_cuda = pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA")


TORCHS = torch.version.cuda


@with_cuda
@pytest.mark.parametrize(
    ("toolkit_has", "message"),
    [
        (["9.2"], f"the toolkit has CUDA 9.2 and torch has {TORCHS}"),
        ([], f"no CUDA toolkit was found for torch's CUDA {TORCHS}"),
        (
            [TORCHS, "35 70"],
            "the toolkit supports none of the architectures 8.0, 9.0, 10.0, 12.0",
        ),
    ],
    ids=["another CUDA", "no toolkit", "no architecture"],
)
def test_a_toolkit_that_does_not_fit(run_setup, toolkit, capsys, toolkit_has, message):
    home = toolkit(*toolkit_has)
    with pytest.raises(SystemExit) as raised:
        run_setup(CUDA_HOME=home, MOE_EXT_CUDA="1")
    assert raised.value.code == f"moe_ext: MOE_EXT_CUDA=1, but {message}"
    run_setup(CUDA_HOME=home, MOE_EXT_CUDA="auto")
    if not torch.cuda.is_available():
        message = "no GPU was found (MOE_EXT_CUDA=1 builds the CUDA kernels without one)"
    assert capsys.readouterr().out == (f"moe_ext: building only for the CPU, because {message}\n")
    run_setup(CUDA_HOME=home, MOE_EXT_CUDA="0")
    assert capsys.readouterr().out == ""


@with_cuda
@pytest.mark.parametrize(
    ("has", "given", "expected"),
    [
        ("75 80 90 100 120", {}, "8.0+PTX;9.0;10.0;12.0+PTX"),
        ("75 80 90", {}, "8.0+PTX;9.0+PTX"),
        ("80", {}, "8.0+PTX"),
        ("80", {"TORCH_CUDA_ARCH_LIST": "9.0"}, "9.0"),
    ],
)
def test_architectures(run_setup, toolkit, has, given, expected):
    environ = run_setup(CUDA_HOME=toolkit(TORCHS, has), MOE_EXT_CUDA="1", **given)
    assert environ["TORCH_CUDA_ARCH_LIST"] == expected


@pytest.mark.parametrize("compiler", ["env g++", "env -u MOE_EXT_CXX 'g++'"])
def test_a_compiler_with_a_launcher(run_setup, compiler):
    """Torch takes a single program: setup.py writes one."""
    program = run_setup(CXX=compiler, MOE_EXT_CUDA="0")["CXX"]
    expected = subprocess.check_output(["g++", "--version"])
    assert subprocess.check_output([program, "--version"]) == expected
    assert run_setup(CXX="g++", MOE_EXT_CUDA="0")["CXX"] == "g++"


@pytest.fixture
def build_command(monkeypatch, tmp_path):
    """Returns a function that makes a command of setup.py, such as "build_ext"."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MOE_EXT_CUDA", "0")
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))

    def make(name, **options):
        runpy.run_path(str(ROOT / "setup.py"))
        distribution = setuptools.Distribution(given)
        distribution.script_name = "setup.py"
        distribution.parse_config_files()  # reads pyproject.toml
        build = distribution.get_command_obj("build")
        build.build_lib = str(tmp_path)
        command = distribution.get_command_obj(name)
        for key, value in options.items():
            setattr(command, key, value)
        command.ensure_finalized()
        return command

    return make


def test_editable_installs_of_every_mode_have_all_files(build_command, tmp_path):
    """A strict editable install links the outputs that the command declares."""
    release = _build.release(torch.__version__)
    libraries = {Path("libmoe_ext_kernels.so"), Path(f"torch{release}", "libmoe_ext.so")}
    mapping = build_command("build_ext", inplace=True).get_output_mapping()
    folder = Path("moe_ext", "lib")
    assert {*map(Path, mapping)} == {tmp_path / folder / library for library in libraries}
    in_source = {ROOT / folder / library for library in libraries}
    assert {Path(path).resolve() for path in mapping.values()} == in_source
    assert build_command("build_ext").get_outputs() == [*mapping]


def test_a_wheel_has_the_libraries_of_other_releases(build_command, monkeypatch, tmp_path):
    given = tmp_path / "given"
    installed = tuple(map(int, _build.release(torch.__version__).split(".")))
    for minor in (9, 13):
        folder = given / f"torch{installed[0]}.{minor}"
        folder.mkdir(parents=True)
        (folder / "libmoe_ext.so").write_text(f"for {minor}")
    monkeypatch.setenv("MOE_EXT_LIBRARIES", str(given))
    monkeypatch.setattr(
        cpp_extension.BuildExtension, "run", lambda command: None
    )  # does not compile
    command = build_command("build_ext")
    command.run()
    for minor in (9, 13):
        copy = tmp_path / "moe_ext" / "lib" / f"torch{installed[0]}.{minor}" / "libmoe_ext.so"
        assert copy.read_text() == f"for {minor}"
    first, last = min((installed[0], 9), installed), max((installed[0], 13), installed)
    expected = f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    assert [*map(Requirement, command.distribution.install_requires)] == [Requirement(expected)]
    assert build_command("bdist_wheel").get_tag()[:2] == ("py3", "none")


@pytest.mark.filterwarnings("ignore")  # pytest-xdist cannot pass on the warnings of setuptools
def test_a_wheel_has_no_file_of_an_earlier_build(build_command, tmp_path):
    old = tmp_path / "moe_ext" / "lab" / "old.py"
    old.parent.mkdir(parents=True)
    old.write_text("")
    build_command("build_py").run()
    assert not old.exists() and (tmp_path / "moe_ext" / "moe.py").exists()


@pytest.fixture
def other_environment(tmp_path):
    """Returns the folder of an environment."""
    folder = tmp_path / "other"
    (folder / "bin").mkdir(parents=True)
    return folder.resolve()


def test_a_build_in_place_keeps_the_library_of_another_environment(
    build_command, other_environment, tmp_path
):
    command = build_command("build_ext", inplace=True)
    environment, folder = Path(sys.prefix).resolve(), ROOT
    built_by = tmp_path / "built_by.txt"
    names = command.run.__globals__
    names["BUILT_BY"] = built_by

    def record(environment, folder):
        built_by.write_text(f"{environment}\n{folder}\n")

    record(other_environment, folder)
    with pytest.raises(SystemExit, match=f"^moe_ext: the environment {other_environment} uses"):
        command.run()
    # These builds are allowed.
    for owner in [
        (environment, folder),
        (other_environment, tmp_path),
        (tmp_path / "gone", folder),
    ]:
        record(*owner)
        names["require_own_library"]()
    built_by.unlink()
    names["require_own_library"]()


@pytest.mark.parametrize("owner", ["none", "this", "other"])
def test_set_up_keeps_the_library_of_another_environment(owner, other_environment, tmp_path):
    """setup.sh runs with a Python that notes its arguments."""
    folder, log = (tmp_path / "moe_ext").resolve(), tmp_path / "arguments"
    (folder / "moe_ext" / "lib").mkdir(parents=True)
    (folder / "lab").mkdir()
    for name in (
        *("setup.py", "pyproject.toml", "lab/pyproject.toml", "requirements", "scripts", "configs"),
        *("csrc", "moe_ext/include", "moe_ext_command.py"),
    ):
        (folder / name).symlink_to(ROOT / name)
    environment = tmp_path / "this"
    python = environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"
        f"echo \"$PYTHONSAFEPATH: $@\" >> '{log}'\n"
        'case $* in *"import moe_ext"*) exit 1 ;; esac\n'  # not installed yet
    )
    python.chmod(0o755)
    if owner != "none":
        built_environment = {"this": environment.resolve(), "other": other_environment}[owner]
        (folder / "moe_ext" / "lib" / "built_by.txt").write_text(f"{built_environment}\n{folder}\n")

    def set_up(script, compiler="env g++"):  # a compiler with a launcher
        options = {"PYTHON": sys.executable, "MOE_EXT_VENV": str(environment), "CXX": compiler}
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f'{script}source "{folder}/scripts/setup.sh"'],
            env=os.environ | options,
            capture_output=True,
            text=True,
        )

    result = set_up("")
    assert result.returncode == 0, result.stderr
    safe, _, arguments = log.read_text().splitlines()[-1].partition(": ")
    expected = ("1", ". ./lab") if owner == "other" else ("", "-e . -e ./lab")
    assert safe == expected[0] and arguments.endswith(f"--no-build-isolation {expected[1]}")
    no_compiler = set_up("", "env no-g++")
    assert no_compiler.returncode == 2 and "no C++ compiler env no-g++" in no_compiler.stderr
    refused = set_up("in_place=required; ")
    if owner == "other":
        assert refused.returncode == 2
        assert f"MOE_EXT_VENV={other_environment} " in refused.stderr
    else:
        assert refused.returncode == 0


def test_torch_is_not_a_build_requirement():
    requires = re.search(r"^requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    assert "torch" not in requires[1]


def test_the_source_distribution_is_the_repository(tmp_path):
    """It has all that its build, its tests and its documentation need."""
    if not (ROOT / ".git").exists():
        pytest.skip("the source tree is itself a source distribution")
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "MOE_EXT_CUDA": "0"},
        check=True,
    )
    with tarfile.open(next(tmp_path.glob("moe_ext-*.tar.gz"))) as archive:
        files = {
            name.partition("/")[2]
            for member in archive
            if member.isfile() and (name := member.name)
        }
    made = {
        "PKG-INFO",
        "setup.cfg",
        *(name for name in files if name.startswith("moe_ext.egg-info/")),
    }
    listed = subprocess.check_output(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    tree = {name for name in listed.splitlines() if (ROOT / name).is_file()}
    # lab/moe_lab/configs is a link to configs, and its files are in the archive twice.
    tree |= {f"lab/moe_lab/{name}" for name in tree if name.startswith("configs/")}
    assert files - made == tree


@pytest.fixture
def libraries(monkeypatch, tmp_path):
    """Returns a function that gives moe_ext files in place of libraries for releases of torch."""
    monkeypatch.setattr(_build, "__file__", str(tmp_path / "_build.py"))
    monkeypatch.delenv("MOE_EXT_LIBRARY", raising=False)

    def make(*releases):
        for release in releases:
            folder = tmp_path / "lib" / f"torch{release}"
            folder.mkdir(parents=True)
            (folder / "libmoe_ext.so").write_text("no library")

    return make


def test_import_with_another_torch_names_those_that_have_a_library(libraries, monkeypatch):
    libraries("2.11", "2.9")
    monkeypatch.setattr(torch, "__version__", "2.99.1+cu140")
    with pytest.raises(
        ImportError, match=r"libraries for torch 2\.9, 2\.11, but torch 2\.99\.1\+cu140 is"
    ):
        _build.load()


def test_the_message_for_another_torch_has_the_command_that_compiles(libraries, monkeypatch):
    libraries("2.9")
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    with pytest.raises(ImportError, match=r"--force-reinstall \.` in a copy of the repository"):
        _build.load()


@pytest.mark.parametrize("version", [None, "12.1"])
def test_import_with_another_cuda_names_both(monkeypatch, version):
    monkeypatch.setattr(_build, "cuda_version", lambda: "9.2")
    monkeypatch.setattr(torch.version, "cuda", version)
    expected = f"built for CUDA 9.2, but torch for CUDA {version}"
    with pytest.raises(ImportError, match=expected) as raised:
        _build.load()
    assert "--no-build-isolation" in str(raised.value)
    for same in ("12.8", None):  # the same major version; built without CUDA
        monkeypatch.setattr(_build, "cuda_version", lambda same=same: same)
        monkeypatch.setattr(torch.version, "cuda", "12.1")
        _build.load()


def test_import_of_a_library_that_does_not_load_says_why(libraries):
    libraries(_build.release(torch.__version__))
    with pytest.raises(ImportError, match="does not load with torch") as raised:
        _build.load()
    assert torch.__version__ in str(raised.value) and "file too short" in str(raised.value)


def test_a_given_library_replaces_the_one_of_the_package(libraries, monkeypatch, tmp_path):
    known = _build.libraries()
    monkeypatch.setenv("MOE_EXT_LIBRARY", str(tmp_path / "missing.so"))
    with pytest.raises(ImportError, match=r"missing\.so does not load"):
        _build.load()
    monkeypatch.undo()
    assert known == {}
    monkeypatch.setenv(
        "MOE_EXT_LIBRARY", str(_build.libraries()[_build.release(torch.__version__)])
    )
    _build.load()


def test_import_of_an_unbuilt_tree_says_so(monkeypatch):
    monkeypatch.setattr(_build, "libraries", dict)
    with pytest.raises(ImportError, match="has no compiled library") as raised:
        _build.load()
    assert f"imported from {ROOT / 'moe_ext'}," in str(raised.value)
    assert f"`pip install --no-build-isolation -e .` in {ROOT}." in str(raised.value)


def test_info_reports_and_passes_its_self_test():
    program = "import runpy; runpy.run_module('moe_ext.info', run_name='__main__')"
    result = run_code(program, MOE_EXT_GROUPED_MM="0")
    assert result.status == 0, result.stderr
    assert "CUDA GEMMs: moe_ext (MOE_EXT_GROUPED_MM=0)" in result.stdout
    assert torch.__version__ in result.stdout
    assert "noisy_topk_gating" in result.stdout
    assert f"CPU kernels: {moe_ext.info.isa()} (" in result.stdout
    for dtype, name in _build.products().items():
        assert f"{name} ({dtype})" in result.stdout
    assert "self-test, cpu: passed" in result.stdout


IMPORTED = """
import re, sys, torch
torch.set_num_threads(2)
torch.randn(300, 300) @ torch.randn(300, 300)

def runtimes():
    maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
    return sorted(set(re.findall(r"\\S*/lib(?:gomp|iomp|omp)\\S*", maps)))

before = runtimes()
from moe_ext import MoE, _build
layer = MoE(64, 8, 2)
y, aux = layer(torch.randn(2000, 64))
(y.sum() + aux.loss).backward()
print(len(before), runtimes() == before)
print("torch._dynamo" in sys.modules)
print(_build.isa(), _build.products()["bfloat16"])
for name in [name for name in sys.modules if name.partition(".")[0] == "moe_ext"]:
    del sys.modules[name]
import moe_ext
print(moe_ext.MoE is not MoE, moe_ext.MoE(4, 2, 1)(torch.randn(3, 4))[0].shape)
"""


@pytest.fixture(scope="module")
def imported():
    """Returns what a process prints that imports and uses the layer, and imports it again."""
    environment = {name: value for name, value in os.environ.items() if name != "MOE_EXT_ISA"}
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-4:]


def test_threads_are_of_torchs_openmp_alone(imported):
    """Two OpenMP runtimes in one process would compete for cores."""
    number, same = imported[0].split()
    assert int(number) <= 1 and same == "True"


def test_a_training_step_does_not_load_the_compiler(imported):
    assert imported[1] == "False"


def test_the_package_can_be_imported_again(imported):
    """As Spyder and Streamlit do."""
    assert imported[3] == "True torch.Size([3, 4])"


# The instruction set

# Linux grants no AMX tiles to a process whose signal stack is too small for them. Such a process
# has no AMX on any processor.
WITHOUT_AMX = """
import ctypes, os


class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, 8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
import moe_ext.info

for forced in ("mmx", "amx"):
    os.environ["MOE_EXT_ISA"] = forced
    try:
        moe_ext.info.isa()
    except ValueError as error:
        print(error)
del os.environ["MOE_EXT_ISA"]
print(moe_ext.info.isa())
"""


def preferred_instruction_sets():
    """avx512_bf16 multiplies faster than avx512 only on AMD processors."""
    amd = "amd" in cpu_info("vendor_id").lower()
    return [isa for isa in instruction_sets() if isa != "avx512_bf16" or amd]


def test_the_best_instruction_set_is_chosen(imported):
    names = {
        "default": "portable",
        "avx2": "AVX2",
        "avx512": "AVX-512",
        "avx512_bf16": "AVX512-BF16",
        "amx": "AMX",
        "neon": "NEON",
        "neon_bf16": "NEON-BF16",
    }
    best = preferred_instruction_sets()[-1]
    assert imported[2] == f"{best} {names[best]}"


@pytest.mark.skipif(sys.platform != "linux", reason="AMX is used on Linux only")
def test_instruction_sets_that_are_missing():
    done = run_code(WITHOUT_AMX, MOE_EXT_ISA=None)
    assert done.status == 0, done.stderr
    unknown, missing, chosen = done.stdout.splitlines()
    assert unknown == (
        "MOE_EXT_ISA must be default, avx2, avx512, avx512_bf16, amx, neon or neon_bf16, got mmx"
    )
    assert missing == "MOE_EXT_ISA must name an instruction set of this processor, got amx"
    assert chosen == [isa for isa in preferred_instruction_sets() if isa != "amx"][-1]


TYPED = """
import torch
from moe_ext import HierarchicalMoE, MoE, MoELSTM

y, aux = MoE(8, 4, 2)(torch.randn(2, 8))
reveal_type(y)
reveal_type(aux)
reveal_type(HierarchicalMoE(8, 4, 2, 2)(torch.randn(2, 8))[1].load)
reveal_type(MoELSTM(8, 4, 2, 2)(torch.randn(2, 3, 8))[2])
"""


def test_a_type_checker_finds_the_installed_package(tmp_path):
    """A type checker in another folder finds the types, as an editor needs them."""
    pytest.importorskip("mypy")
    (tmp_path / "typed.py").write_text(TYPED)
    # With the same options, the cache of the style check has the types of torch.
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "typed.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    revealed = re.findall(r'Revealed type is "(.*)"', result.stdout)
    tensor, report = "torch._tensor.Tensor", "moe_ext.moe.MoEAux"
    assert revealed[0] == revealed[2] == tensor
    assert report in revealed[1] and report in revealed[3]
