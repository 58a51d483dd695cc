"""What stands beside the package: workflows, AGENTS.md, the container."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from instep import errors

REPO = Path(__file__).parents[1]


def test_every_action_is_pinned_by_its_hash() -> None:
    files = sorted((REPO / ".github" / "workflows").glob("*.yml"))
    used = [line for file in files for line in re.findall(r"uses: (.*)", file.read_text())]
    assert len(used) >= 10
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_a_release_attests_where_it_was_built_before_it_is_published() -> None:
    job = yaml.safe_load((REPO / ".github/workflows/release.yml").read_text())["jobs"]["release"]
    used = [step.get("uses", "").partition("@")[0] for step in job["steps"]]
    assert used.index("actions/attest-build-provenance") < used.index("pypa/gh-action-pypi-publish")
    assert job["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}


def test_the_errors_of_the_one_page_are_those_that_exist() -> None:
    text = (REPO / "AGENTS.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert len(named) == 12
    assert all(issubclass(getattr(errors, name), errors.InstepError) for name in named)


def test_forms_and_the_sites_settings_can_be_read() -> None:
    forms = [yaml.safe_load(file.read_text()) for file in (REPO / ".github/ISSUE_TEMPLATE").glob("*.yml")]
    assert sum("body" in form and all(part["type"] for part in form["body"]) for form in forms) == 2
    settings = yaml.safe_load((REPO / ".readthedocs.yaml").read_text())
    assert (REPO / settings["sphinx"]["configuration"]).exists()
    assert "docs = [" in (REPO / "pyproject.toml").read_text()


def test_the_container_copies_what_there_is() -> None:
    copied = [
        word for line in re.findall(r"^COPY (.*)", (REPO / "Dockerfile").read_text(), re.M) for word in line.split()
    ]
    sources = [word for word in copied if not word.startswith("/")]
    assert sources
    assert all((REPO / source).exists() for source in sources)
    allowed = {line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(sources) <= allowed
