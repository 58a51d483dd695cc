"""Sphinx's settings: furo, MyST, and an API reference made of docstrings. `make docs` builds the site."""

from __future__ import annotations

import inspect
import os
import re
import sys
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

sys.path.insert(0, str(DOCS.parent / "scripts"))
sys.path.insert(0, str(DOCS))

from colours import DARK, LIGHT  # noqa: E402  # pyright: ignore[reportMissingImports]
from docutils import nodes  # noqa: E402
from public_api import ROOMS, entries, public_names  # noqa: E402  # pyright: ignore[reportMissingImports]
from sphinx.addnodes import pending_xref  # noqa: E402
from sphinx.ext.napoleon import GoogleDocstring  # noqa: E402
from sphinx.pycode import ModuleAnalyzer  # noqa: E402

import instep  # noqa: E402  # after the path

project, author, copyright = "instep", "the instep developers", "the instep developers"  # Sphinx's name
version = release = instep.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
if not tags.has("without_sources"):  # noqa: F821  # pyright: ignore[reportUndefinedVariable]  # a name of Sphinx
    extensions.append("sphinx.ext.viewcode")
exclude_patterns = ["_build", "_templates", "recordings"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"instep {version}"
html_favicon = "_static/mark.svg"
html_theme_options = {"light_css_variables": LIGHT, "dark_css_variables": DARK}
pygments_style, pygments_dark_style = "colours.LightCode", "colours.DarkCode"
html_static_path = ["_static"]
html_css_files = ["instep.css"]
html_js_files = ["site.js", "versions.js"]
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")  # the version that search engines show
html_show_sphinx = False
nitpicky = False  # types of torch have no inventory without a network

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3  # the anchors that GitHub makes
nb_execution_mode = "off"  # tests/test_docs.py executes the notebook; the site shows what it printed
suppress_warnings = ["myst.header"]  # a page may begin with a picture
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

default_role = "name"  # docstrings write names in single backticks; `name_role` links those that are public
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
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
        lines = [f".. autoclass:: {room}.{name}", "   :members:", "   :undoc-members:"]
        bases = value.__mro__[1:]
        if any(base is not object and not is_internal(base) for base in value.__bases__):
            lines.append("   :show-inheritance:")
        if any(is_internal(base) for base in bases):  # its members are those of the public class
            lines.append(f"   :inherited-members: {', '.join(b.__name__ for b in bases if not is_internal(b))}")
        if is_dataclass(value):  # Args has its fields
            said = ModuleAnalyzer.for_module(value.__module__).find_attr_docs()
            hidden = [each.name for each in fields(value) if (value.__qualname__, each.name) not in said]
            lines.append(f"   :exclude-members: {', '.join(hidden)}")
        for attribute, hint in vars(value).get("__annotations__", {}).items():
            if isinstance(hint, str):
                value.__annotations__[attribute] = re.sub(r"^ReadOnly\[(.*)\]$", r"\1", hint)
        return [*lines, ""]
    if callable(value) and hasattr(value, "__code__"):
        return [f".. autofunction:: {room}.{name}", ""]
    return [f".. py:data:: {room}.{name}", "", *(f"   {line}" for line in data_docstring(value)), ""]


def is_enum(value: Any) -> bool:
    """Tell whether a value is an enum: these stand last on their page."""
    return inspect.isclass(value) and issubclass(value, Enum)


def is_internal(cls: type) -> bool:
    """Tell whether a class is instep's and no page shows it."""
    return cls.__module__.startswith("instep.") and cls not in public_classes()


@cache
def public_classes() -> set[type]:
    """Return the classes that have an entry."""
    return {value for _, value in entries() if inspect.isclass(value)}


def data_docstring(value: Any) -> list[str]:
    """Return the text below a value where it is assigned; its class's where there is none."""
    for module in [each for name, each in sys.modules.items() if name.startswith("instep.")]:
        for name in [name for name, each in vars(module).items() if each is value]:
            found = ModuleAnalyzer.for_module(module.__name__).find_attr_docs().get(("", name))
            if found:
                return found
    return (inspect.getdoc(type(value)) or "").splitlines()


def write_reference(app: Any) -> None:
    """Write a page for each room into reference/api, which git ignores."""
    folder = DOCS / "reference" / "api"
    folder.mkdir(exist_ok=True)
    seen: dict[int, str] = {}
    pages = {}
    for room, about in [*list(ROOMS.items())[1:], *list(ROOMS.items())[:1]]:  # `instep` last: it shows others' names
        names = sorted(public_names(room), key=lambda name: is_enum(getattr(import_module(room), name)))
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
    lines = [".. list-table::", ""]
    for room, about in ROOMS.items():
        lines += [f"   * - :doc:`{room}`", f"     - {about}"]
    for name, text in {**{f"{room}.rst": pages[room] for room in ROOMS}, "modules.txt": "\n".join(lines)}.items():
        file = folder / name
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def name_role(name: str, rawtext: str, text: str, *_: Any) -> tuple[list[nodes.Node], list[Any]]:
    """Show code; where it is a public name, link it."""
    code = nodes.literal(rawtext, text, classes=["code"])
    home = homes().get(text.removesuffix("()"))
    if home is None:
        return [code], []
    return [pending_xref("", code, refdomain="py", reftype="obj", reftarget=home, refwarn=False)], []


@cache
def homes() -> dict[str, str]:
    """Return the full names of public classes, functions and members, by each short name that only one of them has."""
    found: dict[str, list[str]] = {}
    for name, _ in entries():
        room = max((room for room in ROOMS if name.startswith(f"{room}.")), key=len)
        short = name.removeprefix(f"{room}.")
        if short.islower() and "_" not in short:  # `save` or `make` is more often another's
            continue
        found.setdefault(short, []).append(name)
    return {short: names[0] for short, names in found.items() if len(names) == 1}


def hide_internal(app: Any, name: str, value: Any, options: Any, bases: list[type]) -> None:
    """Leave out of a class's bases those that have no page."""
    bases[:] = [base for base in bases if not is_internal(base)]


def read_property(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Read a property's docstring as any other: napoleon takes `Mean: of all ranks.` for a type and its meaning."""
    if what in ("attribute", "data", "property"):
        read = GoogleDocstring(lines, app.config, app, "method", name, value, options).lines()
        lines[:] = ["..", "", *read]  # an empty comment, so that napoleon finds no colon


def write_llms(app: Any, error: Exception | None) -> None:
    """Write `llms.txt`: each page's title, address and first sentence, for programs that read the site."""
    if error is not None or app.builder.name != "html":
        return
    lines = ["# instep", "", f"> {inspect.cleandoc(instep.__doc__ or '').splitlines()[0]}", ""]
    section = ""
    for name in sorted(app.env.found_docs, key=lambda name: ("/" in name, name)):
        folder = name.partition("/")[0] if "/" in name else "start here"
        if folder != section:
            lines += ["", f"## {folder}", ""] if section else [f"## {folder}", ""]
            section = folder
        tree = app.env.get_doctree(name)
        first = next((each.astext() for each in tree.findall(nodes.paragraph)), "").split(". ")[0].replace("\n", " ")
        lines.append(f"- [{app.env.titles[name].astext()}]({html_baseurl}{name}.html): {first.rstrip('.')}.")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def ask_for_versions(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Ask Read the Docs to hand the list of versions to each page, for `_static/versions.js`."""
    if "READTHEDOCS" in os.environ:
        context["metatags"] = context.get("metatags", "") + '<meta name="readthedocs-addons-api-version" content="1">'


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("build-finished", write_llms)
    app.connect("html-page-context", ask_for_versions)
    app.add_role("name", name_role)
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-bases", hide_internal)
    app.connect("autodoc-process-docstring", read_property, priority=400)  # before napoleon's
