"""The pages of trackers in a headless browser: the run, its curve and its hyperparameters are on them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import PORT, Browser, browse, serve
from tests.loggers.trackers.test_resume import train
from tests.loggers.trackers.trackers import TRACKERS

pytestmark = [pytest.mark.trackers, pytest.mark.browser, pytest.mark.filterwarnings("default")]
SHOTS = Path(os.environ.get("INSTEP_SHOTS", ""))  # where pictures for docs/pages go; nowhere by default


# The line of a curve has a corner for each of its points.
CURVE = "[...document.querySelectorAll('path.js-line')].some(line => line.getAttribute('d').split(/[LHV]/).length > 40)"


def shoot(browser: Browser, page: Any, name: str) -> None:
    if SHOTS.name:
        browser.shoot(page, SHOTS / name)


def test_the_page_of_mlflow_shows_the_run(tmp_path: Path) -> None:
    assert train("mlflow", tmp_path) == 0
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--port", PORT, "--workers", "1"]
    where = f"#/experiments/{experiment.experiment_id}/runs"
    with serve(command, env=TRACKERS["mlflow"].environment(tmp_path)) as url, browse() as browser:
        for phone in (False, True):
            page = browser.open(f"{url}/{where}/{run.info.run_id}", phone=phone)
            page.get_by_text(run.info.run_name).first.wait_for(timeout=120_000)  # megabytes of code come first
            page.get_by_text("width").first.wait_for()
            page.get_by_text("16", exact=True).first.wait_for()
            page.get_by_text("val_loss").first.wait_for()
            shoot(browser, page, f"mlflow{'-phone' * phone}.webp")
        page = browser.open(f"{url}/{where}/{run.info.run_id}/model-metrics")
        page.get_by_text("third").first.wait_for()
        page.wait_for_function(CURVE)
        shoot(browser, page, "mlflow-curves.webp")


def test_the_page_of_trackio_shows_the_run(tmp_path: Path) -> None:
    assert train("trackio", tmp_path) == 0
    show = "import trackio, sys; trackio.show(open_browser=False, block_thread=True, server_port=int(sys.argv[1]))"
    environment = {**TRACKERS["trackio"].environment(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    with serve([sys.executable, "-c", show, PORT], env=environment) as url, browse() as browser:
        for phone in (False, True):
            page = browser.open(f"{url}/?project=digits", phone=phone)
            page.get_by_text("loss", exact=True).first.wait_for()
            page.locator("canvas, svg.marks").nth(1).wait_for()
            browser.wait_drawn(page.locator("canvas, svg.marks").nth(1), 0.3)
            shoot(browser, page, f"trackio{'-phone' * phone}.webp")
        page = browser.open(f"{url}/runs?project=digits")
        page.get_by_text("-0").last.click()  # Trackio calls it something like "dainty-sunset-0"
        page.get_by_text('"width": 16').first.wait_for()
        shoot(browser, page, "trackio-runs.webp")
