"""The page of a sweep as a person sees it, in a browser, and as an attacker does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.test_page import dashboard
from tests.helpers.axe import violations
from tests.helpers.browser import Browser, browse
from tests.sweeps.sweep import DISK, make_sweep

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with browse() as browser:
        yield browser.engine


@pytest.fixture
def browser(engine: Any) -> Iterator[Browser]:
    browser = Browser(engine)
    yield browser
    browser.close()
    assert not [error for error in browser.errors if "ERR_CONNECTION_REFUSED" not in error]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    root = make_sweep(tmp_path_factory.mktemp("runs") / "digits")
    with dashboard(root) as (url, _):
        yield root, url


def open_sweep(browser: Browser, url: str, **look: Any) -> Any:
    """The page of the sweep, with its table."""
    page = browser.open(url, **look)
    page.get_by_role("link", name="Sweep").click()
    page.locator(".ag-row").first.wait_for()
    return page


def names(page: Any) -> list[str]:
    """The names in the table, from above."""
    cells = page.locator(".ag-pinned-left-cols-container [col-id=v0]")
    return cells.all_inner_texts()


def tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def overflow(page: Any) -> int:
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def series(page: Any) -> list[dict[str, Any]]:
    """What the first plot draws, in the browser."""
    return page.evaluate("getElement(+document.querySelector('.plot').id.slice(1)).chart.getOption().series")


def pick(page: Any, label: str, option: str) -> None:
    page.get_by_label(label, exact=True).click()
    page.get_by_role("option", name=option, exact=True).click()
    page.keyboard.press("Escape")


@pytest.mark.parametrize("look", [{}, {"dark": True}, {"phone": True}], ids=["light", "dark", "phone"])
def test_one_look_answers_what_is_best_what_differs_what_failed_and_what_runs(served, browser, look):
    page = open_sweep(browser, served[1], **look)
    page.locator(".plot canvas").first.wait_for()
    said = page.locator(".summary").inner_text()
    assert "val_loss (*): 0.2" in said
    assert "from the next, lr=0.01 batch=" in said
    assert "lr: 0.001, 0.01, 0.1 · batch: 16, 64 · seed: 0, 1, 2, 3" in said
    assert f"lr=0.001 batch=64 seed=1: failed: {DISK}" in said
    assert "lr=0.1 batch=16 seed=3: finished: train_loss is nan, first at step 240" in said
    assert "lr=0.01 batch=64 seed=3: step 260" in said
    if not look.get("phone"):  # all of it in the window, without scrolling
        assert page.locator(".summary").bounding_box()["y"] + page.locator(".summary").bounding_box()["height"] < 400
    assert overflow(page) <= 0
    for name in () if look.get("phone") else ("Hyperparameters", "Two runs", "Logged", "Notes"):
        tab(page, name)
        page.mouse.move(0, 0)
        page.wait_for_timeout(500)  # a ripple over the tab is a colour of its own
        assert violations(page) == []
    tab(page, "Curves")
    page.wait_for_timeout(500)
    assert violations(page) == []


def test_the_table_is_that_of_runs_ls_and_choosing_draws(served, browser):
    root, url = served
    page = open_sweep(browser, url)
    from instep.sweeps.source import Sweep, Wish

    expected = [entry.name for entry in Sweep(root).view(Wish()).table.entries]
    shown = names(page)
    assert shown == expected[: len(shown)]
    assert len(shown) > 10
    bests = page.locator(".ag-center-cols-container [col-id=v2]").all_inner_texts()
    assert bests[0].endswith("*")  # the text of a cell, not the number that its column is sorted by
    page.locator(".ag-header-cell[col-id=v3]").click()  # by the rate
    page.locator(".ag-row[row-index='0']").filter(has_text="lr=0.001").first.wait_for()
    page.locator(".ag-header-cell[col-id=v3]").click()
    page.locator(".ag-row[row-index='0']").filter(has_text="lr=0.1 ").first.wait_for()
    page.locator(".ag-header-cell[col-id=v3]").click()  # as it was
    page.get_by_label("Filter").fill("lr=0.01 and batch=16")
    page.locator(".ag-row").filter(has_text="lr=0.1 ").first.wait_for(state="detached")
    assert names(page) == [name for name in expected if name.startswith("lr=0.01 batch=16")]
    page.wait_for_function("() => document.querySelector('.plot').offsetParent")
    # One band over four seeds: the least, the rest up to the greatest, and the mean.
    page.wait_for_timeout(500)
    drawn = series(page)
    assert [each.get("stack") for each in drawn] == ["0-0", "0-0", None]
    pick(page, "Bands over", "nothing: a line for each run")
    page.wait_for_timeout(700)
    assert [each["name"] for each in series(page)] == names(page)
    page.locator(".ag-pinned-left-cols-container .ag-row").nth(1).get_by_role("checkbox").uncheck()
    page.wait_for_timeout(700)
    assert len(series(page)) == 3
    page.get_by_label("Filter").fill("lrr<1")
    page.locator(".problem").get_by_text("lrr").wait_for()
    assert len(names(page)) == 4  # the table stays
