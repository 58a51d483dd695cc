"""`instep fit` and its kin as people call them: real processes, started by themselves and by launchers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from instep.cli.main import main
from instep.cli.trainer_command import dotted, is_run
from instep.errors import SettingError
from tests.helpers.spawn import Finished, run_command
from tests.helpers.warm import warm_python
from tests.launch.ways import REPO, UNLAUNCHED, same_weights

CONSOLE_SCRIPT = "import sys\nfrom instep.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
CONFIG = REPO / "examples" / "digits.yaml"


def words(folder: Path, *more: str) -> list[str]:
    """`fit` of the example, as tests/launch/digits_job.py trains it."""
    from tests.launch.digits_job import STEPS  # late: loads scikit-learn

    settings = {
        "accelerator": "cpu",
        "max_steps": STEPS,
        "limit_val_batches": 0,
        "enable_progress_bar": "false",
        "default_root_dir": folder,
    }
    options = [f"--trainer.{name}={value}" for name, value in settings.items()]
    result = ["--trainer.callbacks=tests.cli.configured.Result", f"--trainer.callbacks.out={folder / 'out.json'}"]
    return ["fit", f"--config={CONFIG}", *options, "--model.dropout=0", *result, *more]


def run(*argv: str) -> Finished:
    env = {**UNLAUNCHED, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = run_command([warm_python(), *argv], env=env, cwd=REPO)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.dist
@pytest.mark.slow
def test_the_trainer_command_starts_its_ranks_and_tests_from_the_saved_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = tmp_path / "instep"
    console.write_text(CONSOLE_SCRIPT)
    run(str(console), *words(tmp_path, "--trainer.devices=2", "--trainer.callbacks+=ModelCheckpoint"))
    assert same_weights(tmp_path / "out.json")["world_size"] == 2
    [config] = tmp_path.glob("instep_runs/version_0/config.yaml")
    assert yaml.safe_load(config.read_text())["trainer"]["devices"] == 2
    one = ["--trainer.devices=1", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    assert main(["test", "-c", str(config), "--ckpt_path=last", *one, "--trainer.callbacks=null"]) == 0
    assert "test_correct" in capsys.readouterr().out


@pytest.mark.dist
@pytest.mark.slow
def test_instep_fit_runs_under_instep_launch(tmp_path: Path) -> None:
    run("-m", "instep", "launch", "--devices=2", "-m", "instep", *words(tmp_path))
    assert same_weights(tmp_path / "out.json")["launcher"] == "torchrun"


def test_words_of_the_command_line_name_files_and_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert dotted(["--module=a.b:C", "--data", "sub/file.py:D", "--model.x", "a:b"]) == [
        "--model=a.b.C",
        "--data",
        "sub.file.D",
        "--model.x",
        "a:b",
    ]
    with pytest.raises(SettingError, match="its path must go down from here"):
        dotted(["--module", "../file.py:C"])
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("# of a run\ntrainer:\n  max_epochs: 1\n")
    Path("launch.yaml").write_text("devices: 2\nprecision: bf16-mixed\n")
    runs = [["--module", "a:B"], ["--trainer.devices=2"], ["-c", "run.yaml"], ["--config=run.yaml"], ["--ckpt_path=x"]]
    assert all(map(is_run, runs))
    assert not any(map(is_run, [[], ["--devices", "2"], ["--config", "launch.yaml"], ["--config=fsdp"], ["--config"]]))


def test_errors_end_with_their_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    assert main(["fit"]) == 2
    out, err = capsys.readouterr()
    assert (out, err[:16]) == ("", "usage: instep fi")
    with pytest.raises(SystemExit) as end:
        main(["fit", "--module", "tests/cli/configured.py:LineNet", "--model.lr=fast"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "instep fit: model: Problem with given class_path 'tests.cli.configured.LineNet': Parser key"
    )
    assert said.endswith('"lr": Expected a float. Got value: fast. Got lr=fast\n')
    for accelerator, said in (("cpus", "is not known"), ("mps", "this process sees no such device")):
        assert main(["fit", "--module", "tests.cli.configured:LineNet", f"--trainer.accelerator={accelerator}"]) == 2
        assert f"accelerator='{accelerator}'{':' * (accelerator == 'mps')} {said}" in capsys.readouterr().err
    seen = []
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append((kind, trace is not None)))
    assert main(["fit", "--module", "tests.cli.configured:LineNet", "--trainer.accelerator=cpus"]) == 1
    assert seen == [(SettingError, True)], "a rank leaves it to the agent, which has its traceback"
    assert capsys.readouterr().err == ""
