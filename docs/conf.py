"""Sphinx configuration of the documentation. `scripts/docs.sh` builds it."""

import sys
from pathlib import Path
from typing import Any

import sphinx.ext.autosummary
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import moe_ext

sys.path.append(str(Path(__file__).parent))

project = "moe_ext"
author = "the moe_ext contributors"
version = release = moe_ext.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_autodoc_typehints",
    "sphinx_copybutton",
    "cpp_reference",  # docs/cpp_reference.py
]
templates_path = ["_templates"]
default_role = "py:obj"  # `MoE` in a docstring is a link
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"'.*'"),  # the values of a Literal
    ("py:obj", r"[a-z]\w*"),  # an argument in single backticks
    ("py:obj", r"moe_lab\..*"),  # the lab's modules are listed without pages of their own
    ("py:class", r".*\._\w+.*"),  # private types in signatures
    # Base classes that have no page where they are defined.
    ("py:class", r"torch\.distributed\.tensor\.parallel\.style\.\w+"),
    ("py:class", r"transformers\.trainer_callback\.\w+"),
]
nitpick_ignore_regex += [("cpp:identifier", r".*")]  # torch's C++ interface has no inventory here

# Markdown
myst_heading_anchors = 4  # [a link](page.md#a-heading)
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# API reference
add_module_names = False
autoclass_content = "both"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
always_use_bars_union = True
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

# A docstring's first sentence does not end at these.
sphinx.ext.autosummary.WELL_KNOWN_ABBREVIATIONS += ("Eq.", "Eqs.", "Sec.", "App.")

# torch's and Python's names, without a network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "inventories/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable/", "inventories/torch.txt"),
}

# HTML
html_theme = "furo"
html_title = "moe_ext"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_search_summary = False  # it needs a server: a file cannot fetch other files
html_show_sphinx = False


def resolve_short_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Node | None:
    """Resolves `MoE` and `MoE.forward` from any module, where one public name ends so."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains.python_domain
    matches = domain.find_obj(env, "", "", node["reftarget"], "obj", searchmode=1)
    own = [name for name, entry in matches if not entry.aliased]
    if len(own) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", own[0], node, content)


def skip_tuple_fields(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: Any
) -> bool | None:
    """Leaves out the fields of named tuples, which the section Attributes describes."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def show_public_bases(app: Sphinx, name: str, obj: object, options: Any, bases: list[type]) -> None:
    """Names the bases of a private base in its place."""
    bases[:] = [
        public
        for base in bases
        for public in (base.__bases__ if base.__name__.startswith("_") else (base,))
    ]


def setup(app: Sphinx) -> None:
    """Registers the functions above with Sphinx."""
    app.connect("missing-reference", resolve_short_name, priority=400)  # before intersphinx
    app.connect("autodoc-skip-member", skip_tuple_fields)
    app.connect("autodoc-process-bases", show_public_bases)
