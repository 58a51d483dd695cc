"""Add a version to the site on a host of plain files: SITE is the folder that the host serves.

    make docs
    python scripts/site_version.py SITE 1.2          # docs/_build/html becomes SITE/1.2
    python scripts/site_version.py SITE dev          # the same for the branch of development
    python scripts/site_version.py SITE              # only list the versions again, after one was removed

The menu of each version reads SITE/versions.json, which lists the folders that hold a site: releases with the newest
first, then the others by name. SITE/index.html leads to the first of them. Old versions are not built again.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

BUILT = Path(__file__).parents[1] / "docs" / "_build" / "html"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]*")  # is a part of an address
MARK = "objects.inv"  # Sphinx writes it beside the first page
FIRST_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>instep</title>
<meta http-equiv="refresh" content="0; url={0}/index.html"><link rel="canonical" href="{0}/index.html"></head>
<body><a href="{0}/index.html">instep {0}</a></body></html>
"""


def order(name: str) -> tuple[int, Version, str]:
    """Return a key that sorts final releases first and the newest of them last, for a sort in reverse."""
    try:
        version = Version(name)
    except InvalidVersion:
        return 0, Version("0"), name
    return 1 if version.is_prerelease else 2, version, name


def add(site: Path, name: str, built: Path) -> None:
    """Copy a built site into the folder of its version; one of the same name is replaced."""
    if not (built / MARK).is_file():
        sys.exit(f"{built} holds no built site. Run `make docs` first.")
    if not NAME.fullmatch(name):
        sys.exit(f"A version has letters, digits, and . + - _ after the first, such as 1.2 or dev; got {name!r}.")
    fresh = site / f".{name}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(built, fresh, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    shutil.rmtree(site / name, ignore_errors=True)
    fresh.rename(site / name)


def write_list(site: Path) -> list[str]:
    """Write versions.json and the first page; return the versions in the order of the menu."""
    found = [file.parent.name for file in site.glob(f"*/{MARK}")]
    names = sorted(filter(NAME.fullmatch, found), key=order, reverse=True)
    if not names:
        sys.exit(f"{site} holds no version of the site. Name the one to add.")
    versions = [{"version": name, "url": f"{name}/"} for name in names]
    (site / "versions.json").write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")
    (site / "index.html").write_text(FIRST_PAGE.format(names[0]), encoding="utf-8")
    (site / ".nojekyll").touch()  # else GitHub's pages leave out `_static`
    return names


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, metavar="SITE", help="the folder that the host serves")
    parser.add_argument("version", nargs="?", help="the version that was built")
    parser.add_argument("--built", type=Path, default=BUILT, help="the built pages (default: docs/_build/html)")
    words = parser.parse_args()
    words.site.mkdir(parents=True, exist_ok=True)
    if words.version is not None:
        add(words.site, words.version, words.built)
    print("Versions, as the menu shows them:", ", ".join(write_list(words.site)))


if __name__ == "__main__":
    main()
