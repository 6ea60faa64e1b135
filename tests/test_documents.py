"""Python, C++ and bash blocks of README, docs and examples run; shown commands can be parsed.

CONTRIBUTING.md describes the kinds of code blocks.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import moe_lab.__main__
import pytest
import torch
from launch import launch
from sybil import Document
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path for place in ("*.md", "docs/**/*.md", "examples/*.md") for path in ROOT.glob(place)
)
LANGUAGES = {"", "bash", "cmake", "console", "cpp", "python", "text", "toml"}
SECONDS = 300  # time limit of a command


def without_files(parse):
    """Wraps a parser: a block after `<!-- file: NAME -->` is written to NAME and not run."""

    def parse_document(document):
        for region in parse(document):
            name = re.search(r"<!-- file: (\S+) -->\s*$", document.text[: region.start])
            if name:
                region.evaluator = lambda example, name=name: (
                    Path(name[1]).write_text(example.parsed) and None
                )
            yield region

    return parse_document


# The commands of the pages run with this interpreter and the tested package.
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}",
    "OMP_NUM_THREADS": "1",
}


def run(command):
    """Runs a command of bash; returns what it printed if it failed."""
    done = subprocess.run(
        ["timeout", str(SECONDS), "bash", "-c", command],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    return f"{command}\n{done.stdout}{done.stderr}" if done.returncode else None


def run_script(line):
    """Runs a line of torchrun or python with a script; returns what it printed if it failed."""
    program, *words = shlex.split(line, comments=True)
    ranks = None
    if program == "torchrun":
        ranks = int(words.pop(0).removeprefix("--nproc-per-node="))
    script, *arguments = words
    done = launch(script, arguments, ranks=ranks, seconds=SECONDS)
    return f"{line}\n{done.stdout}{done.stderr}" if done.status else None


def run_commands(example):
    """Runs commands of files that earlier blocks wrote; returns the output of a failed command."""
    failed = None
    for line in re.sub(r"\\\n\s*", "", example.parsed).splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        builds = words[0] == "cmake" and Path("CMakeLists.txt").is_file()
        if builds or Path(words[0]).is_file():
            failed = failed or run(line)
        elif any(word.endswith(".py") and Path(word).is_file() for word in words):
            failed = failed or run_script(line)
    return failed


CMAKE = """
cmake_minimum_required(VERSION 3.18)
project(blocks LANGUAGES CXX)
find_package(moe_ext REQUIRED)
add_executable(blocks blocks.cpp)
target_link_libraries(blocks PRIVATE moe_ext::moe_ext)
"""


def run_cpp(blocks):
    """Builds one program of C++ blocks and runs it; returns the output of a failed command.

    A block that defines a class or a function stands before main(), as do all includes. The other
    blocks are the body of main().
    """
    included, declared, body = [], [], []
    for block in blocks:
        lines = block.splitlines()
        included += [line for line in lines if line.startswith("#include")]
        rest = "\n".join(line for line in lines if not line.startswith("#include"))
        defines = re.search(r"^(?:struct|class|namespace|using|[\w:<>]+ \w+\(.*\) \{$)", rest, re.M)
        (declared if defines else body).append(rest)
    Path("blocks").mkdir()
    Path("blocks", "CMakeLists.txt").write_text(CMAKE)
    Path("blocks", "blocks.cpp").write_text(
        "\n".join([*included, *declared, "int main() {", *body, "}"])
    )
    prefix = '-DCMAKE_PREFIX_PATH="$(python -m moe_ext.info --cmake-prefix)"'
    commands = [f"cmake -S blocks -B blocks/build {prefix}", "cmake --build blocks/build"]
    return run(" && ".join([*commands, "blocks/build/blocks"]))


def name_of(page):
    return str(page.relative_to(ROOT))


# The page on C++ compiles for a minute; tests/cpp and examples/cpp compile the same names, also
# those of C++ blocks of other pages. Those on models of transformers write, train and compile
# models; tests/integrations do the same.
LONG = [
    ROOT / "docs" / "guides" / f"{name}.md"
    for name in ("cpp", "transformers", "packed_checkpoints")
]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.long] * (page in LONG))
        for page in PAGES
    ],
)
def test_code_blocks_run(page, pytestconfig, monkeypatch, tmp_path):
    has_cmake = shutil.which("cmake") and shutil.which("ninja")
    if "```cmake" in page.read_text() and not has_cmake:
        pytest.skip("the commands of this page need cmake and ninja")
    cpp = []
    parsers = (
        without_files(PythonCodeBlockParser()),
        without_files(CodeBlockParser(language="cmake", evaluator=lambda example: None)),
        without_files(CodeBlockParser(language="cpp", evaluator=lambda e: cpp.append(e.parsed))),
        CodeBlockParser(language="bash", evaluator=run_commands),
    )
    document = Document.parse(str(page), *parsers)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for example in document.examples():
        example.evaluate()
    if cpp and has_cmake and pytestconfig.getoption("--long"):
        failed = run_cpp(cpp)
        assert not failed, failed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_blocks_are_of_a_known_kind(page):
    languages = re.findall(r"^ *```+(.*)\n(?:.*\n)*? *```+$", page.read_text(), re.M)
    assert {name for name in languages if not name.startswith("{")} <= LANGUAGES


def test_the_readme_has_examples():
    assert (ROOT / "README.md").read_text().count(">>> ") > 5


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_linked_files_exist(page):
    """Checks the top-level pages; docs/build.py checks the links of the site."""
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def commands_that_are_shown():
    """Yields (file, arguments) of every command of moe-lab that is shown with arguments."""
    for place in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/**/*.md",
        "configs/**/*.toml",
        "lab/moe_lab/**/*.py",
    ):
        for file in ROOT.glob(place):
            text = re.sub(r"\\+\n[\s#]*", "", file.read_text())
            program = r"(?:[A-Z_]+=\S+ )*(?:moe-lab|torchrun(?: --\S+)* -m moe_lab)"
            command = r"(?:(?:study|benchmark) [\w-]+|(?!study |benchmark )[\w-]+)"
            pattern = rf"^[\s#]*{program} ({command} [^`\n|#<]+)"
            within_text = rf"`moe-lab ({command} [^`<]+)`"
            for arguments in re.findall(pattern, text, re.M) + re.findall(within_text, text):
                yield file.relative_to(ROOT), shlex.split(arguments)


def test_commands_that_are_shown_can_be_parsed(monkeypatch):
    class Parsed(Exception):
        pass

    def parsing(parse):
        def parsed(*arguments):
            parse(*arguments)
            raise Parsed

        return parsed

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(ArgumentParser, name, parsing(getattr(ArgumentParser, name)))
    commands = list(commands_that_are_shown())
    assert len(commands) > 80
    for file, arguments in commands:
        monkeypatch.setattr(sys, "argv", ["moe-lab", *arguments])
        try:
            assert moe_lab.__main__.main() == 0  # the help of a group
        except Parsed:
            continue
        except (SystemExit, AssertionError):
            pytest.fail(f"{file}: moe-lab {shlex.join(arguments)}")


def test_claims_have_the_figures_and_verdicts_of_their_pages():
    results = ROOT / "docs" / "results"
    index = (results / "index.md").read_text()
    section = index.partition("## The paper's claims at small scale\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (M\d): .*\]\(([\w-]+\.md)\).*\| (.+) \| (.+) \|$", section, re.M)
    assert len(rows) == section.count("\n| M")
    assert {row[0] for row in rows} == {f"M{number}" for number in range(1, 10)}
    for _, page, figure, verdict in rows:
        text = (results / page).read_text()
        # The verdict is the next one after the figure; else it stands before it, or is part of it:
        # "(one seed, not decided)".
        figures = [
            re.search("supported|contradicted|not decided", after + before + figure)
            for before, after in re.findall(rf"(.*){re.escape(figure)}(.*)", text)
        ]
        assert verdict in {row[0] for row in figures if row}, (page, figure, verdict)


def test_the_speed_of_whole_models_in_the_guide_is_that_of_the_measurement():
    """Times of the faster of llama.cpp and ik_llama.cpp, divided by those of moe_ext."""
    data = json.loads((ROOT / "docs" / "results" / "packed_models.json").read_text())
    page = (ROOT / "docs" / "guides" / "packed_checkpoints.md").read_text()
    for result in data["results"]:
        ms = {name: passes["decode"]["ms"][1] for name, passes in result["figures"].items()}
        best = min(ms["llama.cpp"], ms["ik_llama.cpp"])
        ways = ("ours", "compiled", "integer", "integer-compiled")
        ratios = " | ".join(f"{best / ms[way]:.2f}" for way in ways)
        linear = "Q4_K, `packed_linear=True`" if "linear" in result["name"] else "bfloat16"
        assert f"| {linear} | {result['threads']} | {ratios} |" in page


# Messages of torch, Python, transformers, PEFT and CMake on the page on troubleshooting.
FOREIGN_MESSAGES = """
ModuleNotFoundError: No module named 'torch'
Could not find a package configuration file provided by "moe_ext"
error while loading shared libraries: libmoe_ext.so
'tuple' object has no attribute …
Only Tensors created explicitly by the user … support the deepcopy protocol
derivative for moe_ext::_experts_backward is not implemented
Batching rule not implemented for moe_ext::…
cannot use C++ torch::autograd::Function with functorch transforms
jvp is not implemented
forward() takes 2 positional arguments but 3 were given
Failed to convert args/kwargs to proxy
async_op=True for distributed collectives
Could not guard on data-dependent expression
Unknown type annotation: 'Gate'
Tracer cannot infer type
Cannot concatenate overlapping meshes
Invariant encountered: value was None
got mixed torch.Tensor and DTensor
All operands … must have the same mesh
Gloo connectFullMesh failed with … Connection closed by peer
Expected to have finished reduction in the prior iteration
Specified experts_implementation="moe_ext" is not supported
moe_ext is not a valid experts implementation registered
The model is quantized with moe_ext and is not serializable
Target module PackedLinear(…) is not supported
""".strip().splitlines()


def test_messages_on_the_page_on_troubleshooting_are_in_the_code():
    """Compares what stands between the names and the values, which messages get at run time."""
    sources = ("setup.py", "csrc/**/*.cpp", "csrc/**/*.h", "moe_ext/**/*.py", "moe_ext/**/*.cmake")
    code = "\n".join(file.read_text() for place in sources for file in ROOT.glob(place))
    code = re.sub(r'"\s+f?"', "", code)  # a literal in several lines
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| message.*\n((?:\|.*\n)+)", page, re.M)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    shown = [text for cell in cells for text in re.findall("`([^`]+)`", cell)]
    assert len(shown) > 70 and set(FOREIGN_MESSAGES) <= set(shown)
    for message in set(shown) - set(FOREIGN_MESSAGES):
        parts = re.split(r"…|: | must (?:contain )?|, got .*|\d+", message)
        missing = [part for part in map(str.strip, parts) if part not in code]
        assert not missing, (message, missing)


def test_the_reference_of_the_lab_lists_all_its_modules():
    files = (ROOT / "lab" / "moe_lab").glob("*/[!_]*.py")
    modules = sorted(f"moe_lab.{file.parent.name}.{file.stem}" for file in files)
    page = (ROOT / "docs" / "api" / "lab.rst").read_text()
    assert sorted(re.findall(r"^   (moe_lab\.\S+)$", page, re.M)) == modules


def test_documents_that_are_named_exist():
    places = (
        "CONTRIBUTING.md",
        "README.md",
        "configs/**/*.toml",
        "docs/**/*.md",
        "examples/*",
        "lab/moe_lab/**/*.py",
        "moe_ext/**/*.py",
        "scripts/*.*",
    )
    files = [file for place in places for file in ROOT.glob(place) if file.is_file()]
    text = "\n".join(file.read_text() for file in files)
    names = set(re.findall(r"(?<!/)docs/(?:\w+/)?[\w-]+\.\w+", text))
    names |= set(re.findall(r"\b(?:examples|scripts|(?:lab/)?tests)/[a-z_/]+\.(?:py|sh)\b", text))
    assert len(names) > 80
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []
