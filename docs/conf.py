"""Sphinx configuration of the documentation. `scripts/docs.sh` builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import moe_ext  # noqa: E402

project = "moe_ext"
author = "the moe_ext contributors"
version = release = moe_ext.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_copybutton",
    "api_reference",
]
exclude_patterns = ["extensions"]
nitpicky = True
default_role = "py:obj"  # `MoE` in a docstring is a link

# Markdown
myst_heading_anchors = 4  # [a link](page.md#a-heading)
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# API reference
add_module_names = False
autoclass_content = "both"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

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
html_show_copyright = False
html_show_sphinx = False
html_show_search_summary = False  # it needs a server: a file cannot fetch other files
