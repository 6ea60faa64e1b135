"""The documentation site builds without warnings, its links work, and a browser shows it."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from browser import console, overflow, resize
from locks import locked

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "docs"
SOURCES = ("docs/**/*", "moe_ext/**/*.py", "lab/moe_lab/**/*.py", "moe_ext/include/**/*.h")


@pytest.fixture(scope="module")
def site():
    """Returns the folder of the site; builds a site that is missing or older than its sources."""
    for package in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(package)
    index = SITE / "index.html"
    files = [file for place in SOURCES for file in ROOT.glob(place) if file.is_file()]
    changed = max(file.stat().st_mtime for file in files if file.suffix != ".pyc")
    with locked(SITE):
        if not index.exists() or index.stat().st_mtime < changed:
            command = [sys.executable, str(ROOT / "docs" / "build.py")]
            built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            assert built.returncode == 0, built.stdout + built.stderr
    return SITE


def test_broken_links_are_found(tmp_path):
    pytest.importorskip("sphinx")
    problems = runpy.run_path(str(ROOT / "docs" / "build.py"))["problems"]
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="#here"></a><a href="b.html#there"></a><a href="#gone"></a>'
        '<a href="c.html"></a><script src="https://cdn.example/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="there">')
    assert problems(tmp_path) == [
        "a.html: loads https://cdn.example/x.js from the network",
        "a.html: #gone has no such anchor",
        "a.html: c.html does not exist",
    ]


PAGES = (
    "index.html",
    "guides/gate.html",
    "guides/cpp.html",
    "api/generated/moe_ext.MoE.html",
    "api/cpp/ops.html",
    "api/cpp/nn.html",
    "results/experts.html",
)


@pytest.mark.parametrize("page", PAGES)
def test_pages_in_a_browser(page, site, browser):
    """Pages log nothing on the console and do not scroll horizontally at a width of 375 pixels."""
    resize(browser, 375)
    browser.get((site / page).as_uri())
    assert browser.find_element("css selector", "h1").is_displayed()
    assert overflow(browser) <= 0
    assert console(browser) == []


HEADERS = ("ops", "nn", "optim", "state_dict", "build")


@pytest.mark.parametrize("header", HEADERS)
def test_the_reference_has_every_name_of_a_header(header, site):
    """Functions, classes and modules have entries; members are in the code of their class."""
    source = (ROOT / "moe_ext" / "include" / "moe_ext" / f"{header}.h").read_text()
    source = re.sub(r"//.*|^ private:[^}]*", "", source, flags=re.M)
    entries = re.findall(r"^MOE_EXT_API [^(;]*?(\w+)\(", source, re.M)
    entries += re.findall(r"^(?:struct|class) (?:MOE_EXT_API )?(\w+)", source, re.M)
    entries += re.findall(r"^(?:using (?=\w+ =)|TORCH_MODULE\()(\w+)", source, re.M)
    members = re.findall(r"^  (?:TORCH_ARG\(.*, (\w+)\)|[^(\n]+? (\w+)(?: =.*)?;)", source, re.M)
    page = (site / "api" / "cpp" / f"{header}.html").read_text()
    described = re.findall(
        r'<span class="sig-name descname"><span class="n"><span class="pre">(\w+)', page
    )
    assert entries and sorted(described) == sorted(entries)
    shown = set(re.findall(r"\w+", re.sub(r"<.*?>", "", page)))
    assert {name for pair in members for name in pair if name} <= shown


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("Load", "api/generated/moe_ext.ops.load.html#moe_ext.ops.load"),
        ("MoEOptions", "api/cpp/nn.html#_CPPv4N7moe_ext2nn10MoEOptionsE"),
    ],
)
def test_the_search_finds_a_name(text, target, site, browser):
    """A search on the first page finds an operator of Python and a class of C++."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site / "index.html").as_uri())
    browser.find_element("css selector", "input[name=q]").send_keys(f"{text}\n")
    name = (By.CSS_SELECTOR, f"#search-results a[href$='{target}']")
    WebDriverWait(browser, 20).until(lambda driver: driver.find_elements(*name))
    assert console(browser) == []
