"""The settings of Sphinx for the site: `make docs` builds it."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions")]

from regard.version import __version__  # noqa: E402

project = "regard"
author = "the authors of regard"
release = version = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "mathml",
    "outside",
    "reference",
    "in_models",
    "downloads",
    "llms",
    "accessible",
]
exclude_patterns = ["_extensions", "_build", "**.ipynb"]
nitpicky = False

myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE.parent / "build/docs/cache")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"  # numba's first compilation speaks of folders of the machine that built the page
nb_code_prompt_show = "Show a solution"
nb_code_prompt_hide = "Hide the solution"

autodoc_default_options = {"inherited-members": "object"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
suppress_warnings = ["myst-nb.lexer"]  # of cells that do not run, as in `tests/book`
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "regard"
html_static_path = ["_static"]
html_math_renderer = "mathml"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_css_files = ["site.css"]
