"""The documentation's site: it builds without a warning, and its pages fit a desktop and a phone."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import instep
from tests.helpers.axe import violations
from tests.helpers.browser import PORT, browse, serve

REPO = Path(__file__).parents[1]
WIDE = 8  # pixels that a page may be wider than its window: a shadow, a scroll bar

pytestmark = pytest.mark.site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A warning is an error: a link inside leads nowhere, a page is in no table of contents."""
    ours = tmp_path_factory.getbasetemp()
    folder = (ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours) / "site"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the worker that comes first builds the site for all of them
        if not (folder / "built").exists():
            words = ["-W", "--keep-going", "-q", "-b", "html", "-d", folder / "doctrees"]
            words += ["-t", "without_sources"]  # their pages are not written by people
            words += [REPO / "docs", folder / "html"]
            done = subprocess.run([sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            (folder / "built").touch()
    return folder / "html"


def test_every_page_is_there(site: Path) -> None:
    for source in (REPO / "docs").rglob("*.md"):
        page = site / source.relative_to(REPO / "docs").with_suffix(".html")
        if "_build" not in source.parts:
            assert page.exists(), f"{source} has no page"
    for name in ("Trainer", "Accelerator", "TrainModule"):
        assert list(site.glob(f"reference/api/*{name}*")) or name in (site / "genindex.html").read_text()


def test_llms_txt_has_every_page_once(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    linked = re.findall(r"^- \[.+?\]\((\S+\.html)\): \S", text, re.MULTILINE)
    assert sorted(linked) == sorted(set(linked))
    assert {"index.html", "start/quickstart.html", "train/testing.html"} <= set(linked)
    assert all((site / page).exists() for page in linked)


@pytest.mark.browser
def test_no_page_moves_sideways(site: Path) -> None:
    with browse() as browser:
        for look in ({}, {"phone": True}, {"phone": True, "dark": True}):
            for name in (
                "index",
                "start/quickstart",
                "concepts/loop",
                "porting/lightning",
                "reference/api/instep.trainer",
            ):
                page = browser.open(f"file://{site}/{name}.html", **look)
                wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert wider <= WIDE, f"{name} is {wider} px wider than the window {look}"
                page.context.close()
        assert not browser.errors


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(site: Path, dark: bool) -> None:
    with browse() as browser:
        for name in ("index", "start/quickstart", "observe/dashboard", "observe/runs"):
            page = browser.open(f"file://{site}/{name}.html", dark=dark)
            assert violations(page) == [], name
            page.context.close()


@pytest.mark.browser
def test_the_comparison_is_a_list_on_a_phone_and_a_table_on_a_desktop(site: Path) -> None:
    with browse() as browser:
        for look, stacked in (({"phone": True}, True), ({}, False)):
            page = browser.open(f"file://{site}/index.html", **look)
            table = page.locator(".compare table")
            assert ("stacked" in (table.get_attribute("class") or "")) is stacked
            assert table.evaluate("it => it.parentElement.scrollWidth <= it.parentElement.clientWidth")
            cell = table.locator("tbody tr").first.locator("td").nth(2)
            head = cell.evaluate("it => getComputedStyle(it, '::before').content")
            assert head == ('"Lightning"' if stacked else "none")
            page.context.close()


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_code_has_neither_the_colour_nor_the_line_of_a_link(site: Path, dark: bool) -> None:
    with browse() as browser:
        page = browser.open(f"file://{site}/start/quickstart.html", dark=dark)
        link = page.evaluate("getComputedStyle(document.querySelector('article p a')).color")
        styles = "all => all.map(it => [getComputedStyle(it).color, getComputedStyle(it).textDecorationLine])"
        seen = {tuple(each) for each in page.locator(".highlight pre span").evaluate_all(styles)}
        assert len(seen) > 3
        assert {line for _, line in seen} == {"none"}
        assert link not in {colour for colour, _ in seen}


@pytest.fixture(scope="module")
def versions(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a host of plain files serves: two releases and the development branch; 0.9 lacks a page."""
    folder = tmp_path_factory.mktemp("versions")
    said = ""
    for name in ("dev", "0.10", "0.9"):
        script = [sys.executable, REPO / "scripts" / "site_version.py", folder, name, "--built", site]
        said = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert said.endswith("0.10, 0.9, dev\n")
    (folder / "0.9" / "observe" / "runs.html").unlink()
    return folder


@pytest.mark.browser
@pytest.mark.parametrize("look", [{}, {"phone": True, "dark": True}], ids=["desktop", "dark phone"])
def test_the_menu_of_versions_leads_to_the_same_page_by_keyboard(versions: Path, look: dict[str, bool]) -> None:
    command = [sys.executable, "-m", "http.server", PORT, "--bind", "127.0.0.1", "--directory", versions]
    with serve(command) as url, browse() as browser:
        page = browser.open(f"{url}/index.html", **look)
        page.wait_for_url(f"{url}/0.10/index.html")  # the newest release
        page.goto(f"{url}/dev/observe/runs.html#the-table")
        if look:
            page.locator("label.nav-overlay-icon").click()
        menu = page.locator(".versions")
        menu.locator("summary").focus()
        for key, is_open in (("Enter", True), ("Escape", False), ("Enter", True)):
            page.keyboard.press(key)
            assert menu.evaluate("it => it.open") is is_open
        assert menu.locator("a").all_inner_texts() == ["0.10", "0.9", "dev"]
        assert menu.locator("[aria-current]").inner_text() == "dev"
        newest = "document.querySelector('.versions a').href"
        page.wait_for_function(f"{newest}.endsWith('/0.10/observe/runs.html#the-table')")
        assert (menu.locator("a").nth(1).get_attribute("href") or "").endswith("/0.9/")  # has no such page
        box = menu.locator("ul").bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= (390 if look else 1280)
        assert violations(page) == []
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_url(f"{url}/0.10/observe/runs.html#the-table")


@pytest.mark.browser
def test_the_version_is_text_where_nothing_lists_versions_and_a_menu_on_read_the_docs(site: Path) -> None:
    command = [sys.executable, "-m", "http.server", PORT, "--bind", "127.0.0.1", "--directory", site]
    with serve(command) as url, browse() as browser:
        page = browser.open("about:blank")
        with page.expect_response("**/versions.json") as asked:
            page.goto(f"{url}/start/quickstart.html")
        assert asked.value.status == 404
        assert page.locator(".sidebar-brand-row .version").inner_text() == instep.__version__
        assert page.locator(".versions").count() == 0

        text = (site / "start" / "quickstart.html").read_text()
        text = text.replace("</head>", '<meta name="readthedocs-addons-api-version" content="1"></head>')
        page.route("**/start/quickstart.html", lambda it: it.fulfill(body=text, content_type="text/html"))
        browser.asked.clear()
        page.goto(f"{url}/start/quickstart.html")
        page.evaluate(
            """() => document.dispatchEvent(new CustomEvent("readthedocs-addons-data-ready", {detail: {data: () => (
                {versions: {active: ["latest", "v0.9"].map((slug) => ({slug, urls: {documentation: `/en/${slug}/`}}))}}
            )}}))"""
        )
        paths = page.locator(".versions a").evaluate_all("all => all.map(it => it.pathname)")
        assert paths == ["/en/latest/", "/en/v0.9/"]
        assert not [address for address in browser.asked if "versions.json" in address]
