"""Aim in a repository of its own, read by Aim; and its page in a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from instep.errors import InstepError
from instep.loggers import AimLogger
from tests.helpers.browser import PORT, browse, serve
from tests.loggers.trackers.kinds import log_every_kind
from tests.loggers.trackers.test_resume import train

SHOTS = os.environ.get("INSTEP_SHOTS")  # where pictures for docs/pictures go

pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("default")]  # of Aim's packages
aim = pytest.importorskip("aim", reason="aim is not installed: make test-trackers")


def quiet(folder: Path, **options: Any) -> AimLogger:
    return AimLogger(
        folder, system_tracking_interval=None, log_system_params=False, capture_terminal_logs=False, **options
    )


def test_every_kind_comes_back_from_the_repository(tmp_path: Path) -> None:
    logger = quiet(tmp_path / "repo", experiment="digits", run_name="first")
    logger.delivery.start(tmp_path / "run")
    assert log_every_kind(logger, tmp_path) == {"video", "table"}
    assert logger.experiment.hash == logger.version
    logger.finalize()

    run = aim.Run(logger.version, repo=str(tmp_path / "repo"))  # for writing, which sees it before it is indexed
    assert (run.experiment, run.name) == ("digits", "first")
    assert run["hparams"] == {"lr": 0.1, "net": {"width": 3}, "none": None, "many": [1, 2]}
    metrics = {(one.name, str(one.context.to_dict())): one.data.items_list() for one in run.metrics()}
    steps, (values, *_) = metrics["loss", "{}"]
    assert sorted(zip(steps, values, strict=True)) == [(step, step / 3) for step in range(3)]
    assert ("loss", "{'subset': 'train'}") in metrics
    context = aim.storage.context.Context({})
    assert run.get_text_sequence("said", context).values.last()[1].data == "Once"
    pictures = run.get_image_sequence("seen", context).values.last()[1]
    assert [picture.caption for picture in pictures] == ["black", "white"]
    assert run.get_audio_sequence("heard", context).values.last()[1][0].get().read(4) == b"RIFF"
    counts, edges = run.get_distribution_sequence("weights", context).values.last()[1].to_np_histogram()
    assert (counts.sum(), len(edges), edges[-1]) == (100, 65, 99)
    assert set(run.artifacts) == {"net/weights.bin"}
    run.close()


def test_a_run_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(InstepError, match="run_hash"):
        quiet(tmp_path / "repo", run_hash="0" * 24).delivery.start(tmp_path / "run")


@pytest.mark.browser
def test_the_run_its_curve_and_its_hyperparameters_are_on_the_page(tmp_path: Path) -> None:
    assert train("aim", tmp_path) == 0
    repo = tmp_path / "repo"
    (key,) = aim.Repo.from_path(str(repo)).list_all_runs()
    aim_up = [Path(sys.executable).with_name("aim"), "up"]
    command = [*aim_up, "--repo", repo, "--host", "127.0.0.1", "--port", PORT]
    with serve(command) as url, browse() as browser:
        for phone in (False, True):
            page = browser.open(f"{url}/runs/{key}", phone=phone)
            page.get_by_text("digits").first.wait_for()
            page.get_by_text("width").first.wait_for()
            if SHOTS:
                browser.shoot(page, Path(SHOTS) / f"aim-{'phone' if phone else 'desktop'}.webp")
        page = browser.open(f"{url}/runs/{key}/metrics")
        page.get_by_text("third").first.wait_for()
        page.wait_for_function(
            "[...document.querySelectorAll('svg path')].some(one => (one.getAttribute('d') || '').length > 400)"
        )
        if SHOTS:
            browser.shoot(page, Path(SHOTS) / "aim-curves.webp")
