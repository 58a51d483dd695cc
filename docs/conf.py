"""Sphinx's settings: furo, MyST, and an API reference made of docstrings. `make docs` builds the site."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

sys.path.insert(0, str(DOCS.parent / "scripts"))

from public_api import ROOMS, public_names  # noqa: E402  # pyright: ignore[reportMissingImports]

import instep  # noqa: E402  # after the path

project, author, copyright = "instep", "the instep developers", "the instep developers"  # Sphinx's name
version = release = instep.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "recordings"]
templates_path: list[str] = []
html_theme = "furo"
html_title = f"instep {version}"
html_static_path = ["_static"]
html_css_files = ["instep.css"]
html_show_sphinx = False
nitpicky = False  # types of torch have no inventory without a network

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3  # the anchors that GitHub makes
nb_execution_mode = "off"  # tests/test_docs.py executes the notebook; the site shows what it printed
suppress_warnings = ["myst.header"]  # a page may begin with a picture
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

default_role = "code"  # docstrings write names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"show-inheritance": True}
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Source", "notes_style"), ("Sources", "notes_style")]


def entry(room: str, name: str) -> list[str]:
    """Return the reStructuredText of one name of a room."""
    value = getattr(import_module(room), name)
    if inspect.isclass(value):
        return [f".. autoclass:: {room}.{name}", "   :members:", "   :undoc-members:", ""]
    if callable(value) and hasattr(value, "__code__"):
        return [f".. autofunction:: {room}.{name}", ""]
    return [f".. autodata:: {room}.{name}", "   :no-value:", ""]


def write_reference(app: Any) -> None:
    """Write a page for each room into reference/api, which git ignores."""
    folder = DOCS / "reference" / "api"
    folder.mkdir(exist_ok=True)
    seen: dict[int, str] = {}
    pages = {}
    for room, about in [*list(ROOMS.items())[1:], *list(ROOMS.items())[:1]]:  # `instep` last: it shows others' names
        names = public_names(room)
        lines = [room, "=" * len(room), "", about, ""]
        again = [name for name in names if id(getattr(import_module(room), name)) in seen]
        if again:
            lines += [".. list-table::", ""]
        for name in again:
            home = seen[id(getattr(import_module(room), name))]
            lines += [f"   * - ``{room}.{name}``", f"     - :py:obj:`{home}`"]
        lines.append("")
        for name in names:
            if name not in again:
                lines += entry(room, name)
                seen[id(getattr(import_module(room), name))] = f"{room}.{name}"
        pages[room] = "\n".join(lines)
    for room in ROOMS:
        file = folder / f"{room}.rst"
        if not file.exists() or file.read_text() != pages[room]:
            file.write_text(pages[room])


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("builder-inited", write_reference)
