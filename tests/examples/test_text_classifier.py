"""The walk of a first distributed project: the two text classifiers mean the same however they are launched."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from instep.cli.main import main
from tests.helpers import gpu
from tests.helpers.spawn import run_command, run_ranks
from tests.helpers.warm import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.transformers]
EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINER, ACCELERATOR = "text_classifier", "text_classifier_accelerator"


def run(script: str, root: Path, *args: str) -> dict[str, list[float]]:
    """Run a script's main in this process; its losses by tag, as TensorBoard has them."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import_module(script).main(["--smoke", "--root", str(root), *args])
    finally:
        sys.path.remove(str(EXAMPLES))
    return losses(root)


def losses(root: Path) -> dict[str, list[float]]:
    """Values of every tag below a folder, by step: of a step that was written twice the last one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[str, dict[int, float]] = {}
    for file in sorted(root.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            values.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return {tag: [by_step[step] for step in sorted(by_step)] for tag, by_step in values.items()}


def under_each_file(root: Path) -> dict[str, Any]:
    """Run both scripts as the launches of `examples/launch` tell them to."""
    found: dict[str, Any] = {}
    for name in ("ddp", "zero_2", "zero_3"):  # zero_1 is a part of zero_2
        asked = yaml.safe_load((EXAMPLES / "launch" / f"{name}.yaml").read_text())
        os.environ.update(INSTEP_ACCELERATOR=asked["accelerator"], INSTEP_STRATEGY=asked["strategy"])
        for script in (TRAINER, ACCELERATOR):
            found[f"{script} {name}"] = run(script, root / f"{script}-{name}")
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, list[float]]]:
    """Losses of one process, which each script trains once."""
    done: dict[str, dict[str, list[float]]] = {}

    def get(script: str) -> dict[str, list[float]]:
        if script not in done:
            done[script] = run(script, tmp_path_factory.mktemp(script))
        return done[script]

    return get


def steps_of(found: dict[str, list[float]]) -> list[float]:
    return found.get("train_loss_step") or found["train_loss"]


@pytest.mark.dist
@pytest.mark.deepspeed
def test_losses_are_the_same_under_every_launch(tmp_path: Path, alone: Callable[[str], Any]) -> None:
    ranks = run_ranks(under_each_file, 2, tmp_path)
    for name, found in ranks[0].items():
        reference = alone(name.split()[0])
        assert len(steps_of(found)) == len(steps_of(reference)) >= 30
        assert steps_of(found) == pytest.approx(steps_of(reference), abs=1e-5), name
        for tag in ("val_loss", "val_accuracy"):
            assert found[tag] == pytest.approx(reference[tag], abs=1e-5), name
    assert steps_of(alone(TRAINER)) == pytest.approx(steps_of(alone(ACCELERATOR)), abs=1e-5)


def test_micro_batches_and_precisions(
    tmp_path: Path, alone: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for script, accumulate in ((TRAINER, "--micro-batch=8"), (ACCELERATOR, "--accumulate=4")):
        cut = run(script, tmp_path / f"{script}-cut", accumulate)
        assert cut["val_loss"] == pytest.approx(alone(script)["val_loss"], abs=1e-5)
    by_argument = [
        run(TRAINER, tmp_path / "argument", "--precision", "bf16-mixed"),
        run(ACCELERATOR, tmp_path / "argument-accelerator", "--mixed-precision", "bf16"),
    ]
    monkeypatch.setenv("INSTEP_PRECISION", "bf16-mixed")  # what a launch tells its ranks
    by_launch = [run(script, tmp_path / f"{script}-launch") for script in (TRAINER, ACCELERATOR)]
    for script, argument, launch in zip((TRAINER, ACCELERATOR), by_argument, by_launch, strict=True):
        assert steps_of(argument) == steps_of(launch) != steps_of(alone(script))
        assert argument["val_accuracy"][-1] == pytest.approx(alone(script)["val_accuracy"][-1], abs=0.01)


def test_interrupted_in_the_middle_of_an_epoch(
    tmp_path: Path, alone: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(ACCELERATOR, tmp_path / ACCELERATOR, "--save-every", "20", "--max-steps", "22")
    resumed = run(ACCELERATOR, tmp_path / ACCELERATOR, "--resume")
    assert steps_of(resumed) == steps_of(alone(ACCELERATOR))

    alone(TRAINER)
    classifier = import_module(TRAINER).TextClassifier
    step = classifier.training_step

    def interrupted(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patched:
        patched.setattr(classifier, "training_step", interrupted)
        with pytest.raises(SystemExit) as end:
            run(TRAINER, tmp_path / TRAINER)
    assert end.value.code == 75
    resumed = run(TRAINER, tmp_path / TRAINER, "--resume")
    assert steps_of(resumed) == steps_of(alone(TRAINER))
    assert resumed["val_loss"] == alone(TRAINER)["val_loss"]


@pytest.mark.dist
@pytest.mark.deepspeed
def test_the_commands_of_the_walk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    launch = [warm_python(), "-m", "instep", "launch", "--config", str(EXAMPLES / "launch" / "zero_2.yaml")]
    finished = run_command([*launch, "--mixed-precision", "bf16", str(EXAMPLES / f"{ACCELERATOR}.py"), "--smoke",
                            "--root", str(tmp_path / "walk")])  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert re.search(r"trained 34 steps on 2 process\(es\)", finished.stdout)
    config.write_text("accelerator: cpu\ndevices: 1\nprecision: bf16-mixed\n")
    assert main(["launch", "--config", str(config), "--dry-run", str(EXAMPLES / f"{TRAINER}.py")]) == 0
    assert '"INSTEP_PRECISION": "bf16-mixed"' in capsys.readouterr().out


@pytest.mark.gpu
@gpu.needs("float16 that is worth two trainings of a transformer")
def test_float16_is_as_accurate_as_float32(tmp_path: Path) -> None:
    whole = run(TRAINER, tmp_path / "32", "--precision", "32-true")
    half = run(TRAINER, tmp_path / "16", "--precision", "16-mixed")
    assert half["val_accuracy"][-1] == pytest.approx(whole["val_accuracy"][-1], abs=0.01)
