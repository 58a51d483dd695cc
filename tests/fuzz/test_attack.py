"""A few of the folders of strangers; `python -m tests.fuzz.attack` takes all of them, with all commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.fuzz.attack import CALLS, Attack

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

SENT = ("runs sync", "runs sync --yes")
READ = ["runs show", "checkpoint show", "merge-weights", "from_pretrained"]
READ += ["dashboard"] * (find_spec("nicegui") is not None)


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attack]:
    before = dict(os.environ)
    attack = Attack(tmp_path_factory.mktemp("attack"))
    try:
        with attack.listening():
            yield attack
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize(
    "name",
    [
        "csv-save_dir-absolute",
        "csv-folder-up",
        "csv-mark-is-made-up",
        "json-hook-of-the-logger",
        "json-image-leads-out",
        "metrics.csv-is-a-link",
        "metrics.jsonl-is-a-second-name",
        "hparams.yaml-is-a-link",
        "loggers-is-a-folder",
        "marks-of-another-run",
        "mark-of-another-note",
        "class-is-an-escape",
        "mlflow-file-address-in-capitals",
        "aim-repo",
    ],
)
def test_syncing_a_strangers_run_stays_inside_of_it(attack: Attack, name: str) -> None:
    assert not attack.problems(name, {words: CALLS[words] for words in SENT})


@pytest.mark.parametrize(
    "name", ["names-are-escapes", "status-escape", "train.log-is-a-link", "weights-are-a-link", "config-index-up"]
)
def test_looking_at_a_strangers_run_stays_inside_of_it(attack: Attack, name: str) -> None:
    assert not attack.problems(name, {words: CALLS[words] for words in READ})
