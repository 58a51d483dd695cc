"""The page of a sweep as a person sees it, in a browser, and as an attacker does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep.runs.label import MOST_NAME, Label, read_label, write_label
from instep.sweeps.source import Sweep, Wish
from tests.dashboard.test_page import HOSTILE, dashboard
from tests.helpers.axe import violations
from tests.helpers.browser import Browser
from tests.sweeps.sweep import DISK, log_media, make_run, make_sweep

pytestmark = pytest.mark.browser


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


_SERIES = "getElement(+document.querySelector('.plot').id.slice(1)).chart.getOption().series"


def wait_series(page: Any, count: int) -> list[dict[str, Any]]:
    """What the first plot draws in the browser, once that is so many things."""
    page.wait_for_function(f"() => {_SERIES}.length == {count}")
    return page.evaluate(_SERIES)


def pick(page: Any, label: str, option: str) -> None:
    page.get_by_label(label, exact=True).click()
    page.get_by_role("option", name=option, exact=True).click()
    page.keyboard.press("Escape")


@pytest.mark.parametrize("look", [{}, {"dark": True}, {"phone": True}], ids=["light", "dark", "phone"])
def test_one_look_answers_what_is_best_what_differs_what_failed_and_what_runs(served, browser, look):
    page = open_sweep(browser, served[1], **look)
    page.locator(".plot canvas").first.wait_for()
    page.get_by_text("24 runs: 20 finished, 2 failed, 1 running, 1 ended nan").wait_for()
    said = page.locator(".summary").inner_text()
    assert "by least val_loss: lr=0.01 batch=64 seed=0 with 0.2367 at step 380, better by 0.00372 (1.5%) than" in said
    assert "lr=0.01 batch=16 with 0.25116 over seed (4 finished runs, 0.24042 to 0.26908), better by 0.0054" in said
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
    expected = [entry.name for entry in Sweep(root).view(Wish()).table.entries]
    shown = names(page)
    assert shown == expected[: len(shown)]
    assert len(shown) > 10
    bests = page.locator(".ag-center-cols-container [col-id=v2]").all_inner_texts()
    header = "[...document.querySelectorAll('.ag-header-cell')].find(it => it.innerText.trim() == 'seed')"
    seed_width = f"() => {header}.offsetWidth"
    before = page.evaluate(seed_width)
    assert bests[0].endswith("*")  # the text of a cell, not the number that its column is sorted by
    page.locator(".ag-header-cell[col-id=v3]").click()  # by the rate
    page.locator(".ag-row[row-index='0']").filter(has_text="lr=0.001").first.wait_for()
    page.locator(".ag-header-cell[col-id=v3]").click()
    page.locator(".ag-row[row-index='0']").filter(has_text="lr=0.1 ").first.wait_for()
    page.locator(".ag-header-cell[col-id=v3]").click()  # as it was
    page.get_by_label("Filter").fill("lr=0.01 and batch=16")
    page.locator(".ag-row").filter(has_text="lr=0.1 ").first.wait_for(state="detached")
    assert names(page) == [name for name in expected if name.startswith("lr=0.01 batch=16")]
    page.wait_for_function(f"before => ({seed_width})() == before", arg=before)  # it stands in the rate's place now
    drawn = wait_series(page, 3)  # a band over four seeds: the least, the rest up to the greatest, and the mean
    assert [each.get("stack") for each in drawn] == ["0-0", "0-0", None]
    pick(page, "Bands over", "nothing: a line for each run")
    assert [each["name"].strip("\u200b") for each in wait_series(page, 4)] == names(page)
    page.locator(".ag-pinned-left-cols-container .ag-row").nth(1).get_by_role("checkbox").uncheck()
    wait_series(page, 3)
    page.get_by_label("Filter").fill("lrr<1")
    page.locator(".problem").get_by_text("lrr").wait_for()
    assert len(names(page)) == 4  # the table stays


def test_two_runs_stand_side_by_side_and_what_a_run_logged_is_shown(tmp_path, browser):
    settings = {"lr": 0.01, "batch": 16, "seed": 0, "width": 256}
    make_run(tmp_path / "version_0", settings)
    log_media(make_run(tmp_path / "version_1", {**settings, "lr": 0.1, "width": 64}, age_s=60.0))
    with dashboard(tmp_path) as (url, _):
        page = open_sweep(browser, url)
        tab(page, "Two runs")
        rows = page.locator(".stack table").first.locator("tbody tr")
        rows.get_by_text("width").wait_for()
        assert sorted(row.split() for row in rows.all_inner_texts()) == [
            ["lr", "0.01", "0.1", "≠"],
            ["width", "256", "64", "≠"],
        ]
        page.get_by_role("cell", name=f"{16:040x}").first.wait_for()
        browser.wait_drawn(page.locator(".plot canvas").first, 0.6)  # the curves of both
        tab(page, "Logged")
        page.get_by_text("This run has no pictures").wait_for()
        pick(page, "Run", "lr=0.1 width=64")
        page.get_by_role("img", name="samples/0, step 400").wait_for()
        assert page.get_by_role("img", name="samples").evaluate_all("all => all.map(it => it.naturalWidth)") == [64, 64]
        page.get_by_role("cell", name="97", exact=True).wait_for()
        assert violations(page) == []


def test_who_has_the_token_writes_a_name_tags_and_a_note_by_the_keyboard_alone(tmp_path, browser):
    folder = make_run(tmp_path / "version_0", {"lr": 0.01, "batch": 16, "seed": 0})
    write_label(folder, Label(note="of before"))
    with dashboard(tmp_path) as (url, _):
        page = open_sweep(browser, url)
        page.get_by_role("tab", name="Curves").focus()
        for _ in range(4):
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        name = page.get_by_label("Name", exact=True)
        name.focus()
        page.keyboard.type("long warmup")
        page.keyboard.press("Tab")
        page.keyboard.type("paper good paper")
        write_label(folder, Label(note="of another page"))
        page.wait_for_function("() => document.querySelector('textarea').value == 'of another page'")
        assert name.input_value() == "long warmup"  # what is being typed stays
        for _ in range(3):
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.get_by_text("Saved.").wait_for()
        assert read_label(folder) == Label("long warmup", ("paper", "good"), "of another page")
        page.locator(".ag-cell").get_by_text("long warmup").wait_for()
        for field, text, said in (
            ("Name", "x" * (MOST_NAME + 1), "201 characters"),
            ("Name", "a\x1b[2Jb\u202e", "not printed"),
            ("Tags, with blanks between them", "a,b", "is no word"),
        ):
            page.get_by_label(field, exact=True).fill(text)
            page.get_by_role("button", name="Save").click()
            page.get_by_text(said).wait_for()
            page.get_by_label(field, exact=True).fill("")
        assert read_label(folder).name == "long warmup"
        # Another user of this machine reaches the port, but has no token.
        stranger = browser.open(url.partition("?")[0] + "sweep")
        stranger.locator(".ag-row").first.wait_for()
        tab(stranger, "Notes")
        stranger.get_by_text("To write, open the address").wait_for()
        assert stranger.get_by_role("button", name="Save").is_disabled()
        assert stranger.get_by_label("Name", exact=True).is_disabled()


def test_a_filter_unticks_no_run_and_takes_no_note_to_another(tmp_path, browser):
    folders = [
        make_run(tmp_path / f"version_{n}", {"lr": lr, "batch": 16, "seed": 0}) for n, lr in enumerate((0.1, 0.01))
    ]
    with dashboard(tmp_path) as (url, _):
        address, _, token = url.partition("?")
        browser.open(f"{address}sweep?{token}").locator(".ag-row").first.wait_for()  # the token leads to the page
        page = open_sweep(browser, url)
        wait_series(page, 2)
        text = page.get_by_label("Filter")
        text.fill("lr<0.05")
        wait_series(page, 1)
        text.fill("lr<")
        page.locator(".problem", has_text="lr<").wait_for()
        text.fill("")
        wait_series(page, 2)
        tab(page, "Notes")
        note = page.get_by_label("Note", exact=True)
        picked = page.get_by_label("Run", exact=True).input_value()
        note.fill("of this run")
        text.fill("nothing has this name")
        page.wait_for_function("() => document.querySelectorAll('.ag-center-cols-container .ag-row').length == 0")
        assert note.input_value() == "of this run"
        page.get_by_role("button", name="Save").click()
        page.get_by_text("Saved.").wait_for()
        page.wait_for_function(
            "() => document.querySelector('textarea').value == ''"
        )  # no run is shown, so none is written
        note.fill("of no run")
        page.get_by_role("button", name="Save").click()
    notes = {read_label(folder).note for folder in folders}
    assert picked
    assert notes == {"of this run", ""}


_ATTACKS = (
    HOSTILE,
    "</script><script>window.pwned=1</script>",
    "javascript:window.pwned=1",
    "\x1b[31mred\x1b]0;title\x07",
    "../../../../etc/passwd",
    "a" * 10_000,
    "\u202egnirts\u2066 עברית العربية",
    "訓練 обучение ประเทศไทย 🧪",
    "{a|b} {{window.pwned=1}} ${window.pwned=1}",
    "=cmd|' /C calc'!A0",
    "__proto__",
    "}{a|constructor}\n__proto__",
)


def test_a_strangers_names_notes_tags_settings_and_metrics_are_text(tmp_path, browser):
    for number, text in enumerate(_ATTACKS):
        folder = make_run(tmp_path / f"version_{number}", {"lr": 0.1, "batch": 16, "seed": number}, 40)
        settings = {text[:300]: text, ":onclick": text, "lr": number, "nested": [text]}
        (folder / "hparams.yaml").write_text(json.dumps(settings))
        (folder / "label.json").write_text(json.dumps({"name": text, "tags": [text, 3], "note": text}))
        (folder / "status.json").write_text(json.dumps({"status": "failed", "error": text, "epoch": 1}))
        (folder / "git.json").write_text(json.dumps({"commit": text, "branch": text}))
        with open(folder / "metrics.jsonl", "w") as file:
            for step in range(4):
                row = {"step": step, f"loss {text[:300]}": step, ":formatter": step, "__proto__": 1.0, "val_loss": step}
                file.write(json.dumps(row) + "\n")
            for kind, value in (("text", text), ("table", {"columns": [text], "rows": [[text]]})):
                file.write(json.dumps({"step": 4, "kind": kind, "name": f"{kind} {text}", "value": value}) + "\n")
    with dashboard(tmp_path) as (url, _):
        page = open_sweep(browser, url)
        page.locator(".plot canvas").first.wait_for()
        page.locator(".plot").first.hover()  # its tooltip
        page.locator(".ag-cell").get_by_text("onerror").first.wait_for()
        pick(page, "Metrics", "__proto__")
        for name in ("Hyperparameters", "Two runs", "Logged", "Notes"):
            tab(page, name)
            page.wait_for_timeout(1000)
            for plot in page.locator(".plot canvas").all():
                plot.hover()
            assert page.locator(".stack").inner_text().strip()
        page.get_by_label("Columns").click()
        page.get_by_role("option").filter(has_text="onerror").first.wait_for()
        page.keyboard.press("Escape")
        content = page.content()
        assert "root:" not in content
        assert "\x1b" not in content
        assert page.evaluate("window.pwned") is None
        # The plots' cache of texts takes what every object inherits for an entry of its own.
        assert page.evaluate("(() => { for (const key in {}) return key })()") is None
        assert page.evaluate("Object.keys(Object)") == []
        assert page.locator("img[src=x]").count() == 0
        assert overflow(page) <= 0


def test_a_thousand_runs_are_sorted_and_fifty_of_them_drawn(tmp_path, browser):
    for number in range(1000):
        folder = tmp_path / f"version_{number}"
        folder.mkdir()
        (folder / "status.json").write_text('{"status": "done", "exit_code": 0, "global_step": 2}')
        (folder / "hparams.yaml").write_text(f"lr: {number / 1000}\nseed: {number % 4}\n")
        (folder / "metrics.csv").write_text(f"step,val_loss\n1,{number + 1}\n2,{(number * 7919) % 1000}\n")
    with dashboard(tmp_path) as (url, _):
        page = open_sweep(browser, url)
        page.get_by_text("1,000 runs: 1,000 finished").wait_for()
        assert page.locator(".ag-pinned-left-cols-container .ag-row").count() < 100  # of those that are in the window
        assert names(page)[0] == "lr=0 seed=0"
        page.locator(".ag-header").get_by_role("checkbox").first.check()
        page.get_by_text("The first 50 of 1,000 runs are drawn.").wait_for()
        pick(page, "Bands over", "nothing: a line for each run")
        wait_series(page, 50)
