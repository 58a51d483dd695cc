"""The accessibility of a page, by axe-core, which the package axe-playwright-python carries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

_BAD = ("serious", "critical")


def violations(page: Any) -> list[str]:
    """List what is serious or critical: the rule, and the first element that breaks it. Skips the test without axe."""
    spec = find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe-playwright-python is not installed: make .venv, or pip install axe-playwright-python")
    page.evaluate(Path(spec.origin).with_name("axe.min.js").read_text())
    found = page.evaluate("axe.run({resultTypes: ['violations']})")
    assert found["passes"], "axe looked at nothing"
    return [
        f"{each['id']} ({len(each['nodes'])}): {each['nodes'][0]['target']} {each['nodes'][0]['html'][:200]} "
        f"{each['nodes'][0]['failureSummary']}"
        for each in found["violations"]
        if each["impact"] in _BAD
    ]
