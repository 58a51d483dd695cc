from __future__ import annotations

import subprocess
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from instep.errors import InstepError, SettingError, UsageError
from instep.loggers import TensorBoardLogger
from instep.testing import check_logger
from tests.helpers.spawn import HANG_S, run_ranks
from tests.trainer.toys import Toy, loader, quiet

# TensorBoard's readers use what newer Pythons and numpys warn about.
pytestmark = pytest.mark.filterwarnings("default:::tensorboard.*", "default::DeprecationWarning")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def opened(folder: Path, **options: Any) -> TensorBoardLogger:
    logger = TensorBoardLogger(**options)
    logger.delivery.start(folder)
    return logger


def test_scalars_come_back(tmp_path):
    logger = TensorBoardLogger()
    logger.log_metrics({"early": 1.0}, step=0)
    logger.delivery.start(tmp_path)
    for step in range(2000):
        logger.log_metrics({"loss": float(step), "zero": 0.0}, step=step)
    logger.finalize()
    found = scalars(tmp_path)
    assert found["early"] == [(0, 1.0)]
    assert found["loss"] == [(step, float(step)) for step in range(2000)]
    assert found["zero"][0] == (0, 0.0)


def test_torch_is_not_loaded_for_it(tmp_path):
    code = (
        "import sys; from instep.loggers import TensorBoardLogger; logger = TensorBoardLogger(); "
        f"logger.delivery.start({str(tmp_path)!r}); logger.log_metrics({{'a': 1.0}}, 1); "
        "logger.log_hyperparams({'b': 2}); logger.finalize(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)
    assert scalars(tmp_path) == {"a": [(1, 1.0)], "hp_metric": [(1, -1.0)]}


def test_save_brings_everything_to_the_disk(tmp_path):
    logger = opened(tmp_path, flush_s=3600)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.save()
    assert scalars(tmp_path) == {"a": [(1, 1.0)]}
    logger.finalize()


def test_a_resumed_run_forgets_what_came_after_the_checkpoint():
    def read(logger):
        for name, values in scalars(Path(logger.log_dir)).items():
            yield from ((step, {name: value}) for step, value in values)

    check_logger(TensorBoardLogger, read=read)


def test_a_second_start_appends_everything(tmp_path):
    logger = opened(tmp_path)
    logger.log_metrics({"a": 1.0}, step=5)
    logger.finalize()
    logger.delivery.start(tmp_path)
    logger.log_metrics({"test": 1.0}, step=5)
    logger.finalize()
    assert scalars(tmp_path) == {"a": [(5, 1.0)], "test": [(5, 1.0)]}


def session_groups(folder: Path) -> list[Any]:
    """What the HParams tab asks its server for."""
    from tensorboard import context
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    plugin = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    ctx = context.RequestContext()
    experiment = get_experiment.Handler(ctx, plugin, "", api_pb2.GetExperimentRequest(include_metrics=True)).run()
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=10,
        include_metrics=True,
        allowed_statuses=[api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING],
        col_params=[api_pb2.ColParams(hparam=info.name) for info in experiment.hparam_infos]
        + [api_pb2.ColParams(metric=info.name) for info in experiment.metric_infos],
    )
    return list(list_session_groups.Handler(ctx, plugin, "", request).run().session_groups)


def test_the_hparams_tab_shows_hyperparameters_and_metrics(tmp_path):
    for run, lr in enumerate((0.1, 0.2)):
        logger = TensorBoardLogger()
        logger.log_hyperparams({"lr": lr, "net": {"act": torch.relu, "deep": True}}, metrics={"score": 0.25})
        logger.delivery.start(tmp_path / f"version_{run}")
        logger.log_metrics({"accuracy": 0.5 + run}, step=10)
        logger.finalize("success" if run else "failed")
    first, second = sorted(session_groups(tmp_path), key=lambda group: group.hparams["lr"].number_value)
    assert [group.hparams["lr"].number_value for group in (first, second)] == [0.1, 0.2]
    assert first.hparams["net/deep"].bool_value is True
    assert "relu" in first.hparams["net/act"].string_value
    metrics = {value.name.tag: (value.training_step, value.value) for value in second.metric_values}
    assert metrics == {"accuracy": (10, 1.5), "score": (0, 0.25)}
    from tensorboard.plugins.hparams import api_pb2

    assert first.sessions[0].status == api_pb2.STATUS_FAILURE
    assert second.sessions[0].status == api_pb2.STATUS_SUCCESS
    assert yaml.safe_load((tmp_path / "version_0" / "hparams.yaml").read_text())["lr"] == 0.1


def texts(folder: Path) -> dict[str, str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")]
    return {tag.partition("/")[0]: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags}


def test_experiment_is_a_summary_writer_on_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = TensorBoardLogger(sub_dir="tb")
    logger.experiment.add_text("note", "before the start")
    (early,) = (tmp_path / "instep_runs").iterdir()
    with pytest.warns(UserWarning, match="version_0.* before the run, which goes on in .*run"):
        logger.delivery.start(tmp_path / "run")
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"a": 1.0}, step=1)
    logger.experiment.add_scalar("b", 2.0, 3)
    logger.finalize()
    logger.experiment.add_text("end", "after it")
    logger.finalize()
    assert scalars(tmp_path / "run" / "tb") == {"a": [(1, 1.0)], "b": [(3, 2.0)], "hp_metric": [(0, -1.0)]}
    assert (texts(early / "tb"), texts(tmp_path / "run" / "tb")) == ({"note": "before the start"}, {"end": "after it"})
    assert yaml.safe_load((tmp_path / "run" / "tb" / "hparams.yaml").read_text()) == {"lr": 0.1}


def test_the_graph_needs_an_input(tmp_path):
    logger = opened(tmp_path)
    with pytest.warns(UserWarning, match="could not log the computational graph.*example_input_array"):
        logger.log_graph(torch.nn.Linear(2, 1))
    logger.finalize()


def test_the_graphs_input_goes_where_the_module_is(tmp_path):
    logger = opened(tmp_path)
    logger.log_graph(torch.nn.Linear(2, 1, device="meta"), torch.zeros(3, 2))
    logger.finalize()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # that the module draws
def test_the_graph_is_drawn_at_the_start_of_fit(tmp_path):
    class Drawn(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.zeros(2, 4)

        def forward(self, x: Any) -> Any:
            return self.layer(x + torch.rand(4))

    logger = TensorBoardLogger(log_graph=True)
    module = Drawn()
    before = torch.get_rng_state()
    trainer = quiet(max_epochs=1, logger=logger, default_root_dir=tmp_path)
    trainer.fit(module, loader())
    assert torch.equal(torch.get_rng_state(), before)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trainer.log_dir))
    events.Reload()
    assert "layer" in str(events.Graph())


class Graphed(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def draw_twice(folder: Path, strategy: str) -> tuple[int, list[str]]:
    """Fit twice on a rank; return the steps and the warnings of the second fit's start."""
    logger, module = TensorBoardLogger(log_graph=True), Graphed()
    settings: dict[str, Any] = {"devices": 2, "strategy": strategy, "logger": logger, "default_root_dir": folder}
    trainer = quiet(max_epochs=1, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader())
        trainer.max_epochs = 2
        trainer.fit(module, loader())
    return trainer.global_step, [str(it.message) for it in caught if "log_graph=True" in str(it.message)]


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rank_0_draws_the_graph_alone(tmp_path, strategy):
    (steps, warned), (other_steps, on_rank_1) = run_ranks(draw_twice, 2, tmp_path, strategy)
    assert steps == other_steps > 0
    assert (len(warned), on_rank_1) == (int(strategy == "fsdp"), [])


def test_the_placeholder_metric_comes_once(tmp_path):
    logger = opened(tmp_path)
    logger.log_hyperparams(Namespace(lr=0.1, net={"width": 8}), step=3)
    logger.log_hyperparams({"lr": 0.2})
    logger.log_hyperparams({"lr": 0.2}, metrics=0.5)
    state = logger.state_dict()
    logger.finalize()
    resumed = TensorBoardLogger()
    resumed.load_state_dict(state)
    resumed.delivery.start(tmp_path)
    resumed.log_hyperparams({"lr": 0.2})
    resumed.finalize()
    resumed.delivery.start(tmp_path / "next", begins=True)
    for _ in range(3):  # the run's first file has no hyperparameters
        resumed.finalize()
        resumed.log_hyperparams({"lr": 0.3})
    resumed.finalize()
    assert [value for _, value in scalars(tmp_path / "next")["hp_metric"]] == [-1.0]
    without = opened(tmp_path / "without", default_hp_metric=False, prefix="p")
    without.log_hyperparams()
    without.log_metrics({"loss": {"a": 1.0, "b": torch.tensor(2)}})
    without.log_metrics({"loss": 3})
    without.finalize()
    assert scalars(tmp_path) == {"hp_metric": [(3, -1.0), (3, 0.5)]}
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == {"lr": 0.2, "net": {"width": 8}}
    assert scalars(tmp_path / "without") == {"p-loss/a": [(0, 1.0)], "p-loss/b": [(0, 2.0)], "p-loss": [(1, 3.0)]}
    with pytest.raises(UsageError, match="log_hyperparams got a int"):
        without.log_hyperparams(3)


def test_errors_name_the_logger(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InstepError, match="TensorBoardLogger failed in start"):
        opened(tmp_path / "file")
    with pytest.raises(SettingError, match="save_dir=3: expected the path of a folder"):
        TensorBoardLogger(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SettingError, match="flush_s=0"):
        TensorBoardLogger(flush_s=0)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("within", [False, True], ids=["itself", "within-another"])
def test_the_graph_of_a_module_without_a_trainer_is_drawn_and_leaves_it_without(tmp_path: Path, within: bool) -> None:
    module = Toy()
    drawn = torch.nn.Sequential(module.layer, torch.nn.Identity(), Toy()) if within else module
    module.forward = lambda x: module.layer(x)
    if within:
        drawn[2].forward = lambda x: x
    logger = opened(tmp_path)
    logger.log_graph(drawn, torch.zeros(2, 4))
    logger.finalize()
    with pytest.raises(UsageError, match="not attached"):
        _ = module.trainer
