"""The site of these documents: `make docs` builds it into build/docs.

Documents are plain Markdown, which a code host shows as well as Sphinx does. So the source folder is the repository, in
which links between documents are the same for both, and what is Sphinx's alone is in `_ext/`: the order of the pages,
and what is made from docstrings.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import tk  # noqa: E402

project = "tk"
author = "the authors of tk"
copyright = author
version = release = tk.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "navigation", "reference"]
include_patterns = ["docs/*.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/log.md"]
exclude_patterns = ["build", "dist", ".venv*"]
root_doc = "docs/index"

myst_heading_anchors = 4  # links name headings as a code host does
myst_enable_extensions = ["html_image"]
suppress_warnings = ["config.cache"]
nitpicky = False  # docstrings name types of torch's, which are not on this site

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 100
add_module_names = True

html_theme = "furo"
html_title = f"tk {version}"
html_static_path = ["_static"]
html_extra_path = ["_root"]  # index.html, which leads to docs/
html_css_files = ["tk.css"]
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
