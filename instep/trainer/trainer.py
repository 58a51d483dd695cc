"""The Trainer: its arguments, its four entry points, and methods and properties for callbacks, loggers and modules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

import instep.trainer.own_command  # noqa: F401  records the folder of the program's start
from instep.callbacks.base import Callback
from instep.checkpoint.lineage import Line
from instep.data import DataModule
from instep.data.plan import Share, rank_weight
from instep.distributed import Trigger, broadcast_object
from instep.errors import UsageError
from instep.loggers.base import Logger
from instep.profilers import Profiler, ProfilerName, make_profiler
from instep.state import PartialState, find_device_kind, read_environment
from instep.strategies import Strategy, resolve_strategy
from instep.strategies.base import check_sync_batchnorm
from instep.strategies.registry import asked_strategy
from instep.trainer import plugins
from instep.trainer.context import Position, Progress, RunContext, TrainerState
from instep.trainer.devices import count_devices, launch, make_cublas_repeatable, on_nodes_there
from instep.trainer.evaluation import evaluate, forward_training_data, predict
from instep.trainer.guests import find_replay
from instep.trainer.lifecycle import open_run
from instep.trainer.loaders import StageData, accumulation, data_of, estimate_steps, sanity_batches, users_loaders
from instep.trainer.log import MetricLog
from instep.trainer.loop import fit, validates_now
from instep.trainer.manual import manual_backward
from instep.trainer.metrics import Metrics, as_tensors, print_results
from instep.trainer.module import TrainModule
from instep.trainer.optimizers import LRSchedulerConfig
from instep.trainer.plugins import change_in_run, check_data, check_module, default_callbacks, need_loaders
from instep.trainer.run_folder import RunFolder
from instep.trainer.settings import ATTRIBUTES, change, check_value, no_attribute, resolve
from instep.types import Location, PathLike, ReadOnly
from instep.utils.paths import to_path
from instep.utils.untrusted_files import clean
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.early_stopping import EarlyStopping
    from instep.callbacks.model_checkpoint import ModelCheckpoint
    from instep.callbacks.progress import ProgressBar
    from instep.checkpoint import Reader
    from instep.checkpoint.background import PendingSave
    from instep.checkpoint.resume import Resume, ResumeReport
    from instep.compile import CompileConfig
    from instep.profilers.run_clock import RunSummary
    from instep.trainer.run_state import TrainerSaver
    from instep.trainer.trials import Trial


class Trainer:
    """Trains, validates, tests and predicts with a `TrainModule`.

    All arguments are keyword-only, have Lightning's names and meaning, and are checked here, before anything runs. They
    can be read back under their names, and most may be set between runs: `trainer.max_epochs = 20`. If accelerator,
    strategy, precision, accumulate_grad_batches or grace_period_s is not passed, the environment variable of that name
    holds, such as `INSTEP_PRECISION`. `instep launch` sets these variables.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda", "mps", ...
        strategy: "auto", a name such as "ddp", or an `instep.Strategy`.
        devices: how many devices of this machine, their indices, or "auto" (one process on a CPU). With more than one
            in a plain `python train.py` the first fit, validate, test or predict starts the processes.
        num_nodes: number of machines; by default those on which the launcher started processes.
        precision: "32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true", "fp8", or a short form.
        logger: True for TensorBoard, a logger or its name, such as "mlflow", a list of these, or False.
        profiler: "simple", "advanced", "pytorch" (or "torch"), or a profiler of `instep.profilers`.
        callbacks: a callback or a list of them.
        fast_dev_run: run only this number of batches of everything (1 for True), to see that the code works.
        max_epochs: -1 for no limit; 1000 if `max_epochs`, `max_steps` and `max_time` are all not given.
        min_epochs: a stop waits until this number of epochs is done.
        max_steps: optimizer steps; -1 for no limit.
        min_steps: a stop waits until this number of optimizer steps is done.
        max_time: "DD:HH:MM:SS", a timedelta, or its keyword arguments as a dict.
        limit_train_batches: number (int) or fraction (float) of the batches. The next three take the same values.
        limit_val_batches: 0 turns validation off.
        limit_test_batches: the same for each test loader.
        limit_predict_batches: the same for each prediction loader.
        overfit_batches: train and validate on this number (int) or fraction (float) of the batches, in a fixed order.
        val_check_interval: fraction of an epoch (float), training batches (int), or time. Validation waits for the end
            of the accumulation window.
        check_val_every_n_epoch: epochs between validations. With None, an int `val_check_interval` is counted across
            epochs.
        num_sanity_val_steps: validation batches before training; -1 for all.
        log_every_n_steps: optimizer steps between two hand-overs of step values to the loggers; 0 for never.
        enable_checkpointing: save checkpoints; a ModelCheckpoint is added if there is none.
        enable_progress_bar: show a progress bar.
        enable_model_summary: print the model's size before fit.
        accumulate_grad_batches: micro-batches per optimizer step.
        gradient_clip_val: the largest gradient norm or value.
        gradient_clip_algorithm: "norm" or "value".
        deterministic: True, or "warn" to warn where torch has no deterministic algorithm. On CUDA it also sets
            CUBLAS_WORKSPACE_CONFIG to ":4096:8", unless it is set.
        benchmark: `torch.backends.cudnn.benchmark`.
        tf32: True computes float32 matrix products and convolutions in TensorFloat-32, False in full float32; only
            during runs.
        compile: "module" compiles the module. "step" compiles forward, loss and backward as one graph, and the
            optimizer's step. A `CompileConfig`, or a dict of its fields, sets regions and options.
        cuda_graphs: record the kernels of a training step once and replay them, which helps if a step waits for the
            host to launch kernels. Needs one CUDA device and batches of one shape; else the step runs as usual, and a
            warning says why. Python code in `training_step` runs during the recording, but not in a replay.
        gc_every_n_steps: optimizer steps between two runs of Python's garbage collector, which then runs at the same
            steps on all ranks, and at no other time of the training. Otherwise all ranks wait whenever one of them
            collects. None: Python decides.
        inference_mode: use `torch.inference_mode` outside fit; else `no_grad`.
        use_distributed_sampler: shard loaders over processes.
        uneven: what to do if each process reads training data of its own and their numbers of batches differ. (They do
            not differ if instep divides the data.) "stop" ends the epoch when the first process has no batch left, and
            warns of what is left out. With "join" such a process goes on with weight 0 until all others are done.
            "error" raises an error. An evaluation joins, unless this is "error".
        streams: how iterable data, and other data without a length, is read by several processes or workers. "auto": if
            the first samples show that all read the same, the data is divided, so that each sample counts once; data
            that divides itself is not divided again. "divide": divide in any case. "dispatch": rank 0 reads for all.
            "as_is": each process and worker uses all that it reads.
        sync_batchnorm: let BatchNorm layers use the statistics of all processes, on GPUs.
        detect_anomaly: torch's anomaly detection.
        barebones: run only the loop, without log, bar, checkpoint, summary and sanity check.
        reload_dataloaders_every_n_epochs: epochs after which the loaders are requested again; 0 for never.
        default_root_dir: folder for run folders, unless a logger has a `save_dir`; by default the working directory.
        global_batch_size: samples per optimizer step over all processes; the batch per process and the accumulation are
            derived, so that a run means the same on any number of processes. With `{0: 64, 1000: 256}` the size grows
            at step 1000.
        trigger_every: optimizer steps between two agreements on triggers; None chooses it by measured time.
        seed_samples: seed random augmentation by (seed, epoch, sample index).
        nonfinite: what to do when the loss or a gradient is nan or inf, on all ranks and before the update: "stop"
            (leave the update out and raise NonFiniteError), "skip" (leave it out, count the step, go on) or "continue"
            (report it only). With None nothing is checked.
        grace_period_s: seconds that a process has to save and end after the first SIGTERM, SIGINT, SIGUSR1 or SIGUSR2,
            before it is ended; float("inf") for no limit. Under plain torchrun at most 25, since torchrun kills after
            30.
        hang_timeout_s: seconds without a step after which the ranks count as hung: their stacks are written into the
            run folder, and they end with exit code 76, after which an elastic launcher restarts them. Starting,
            loading, saving, compiling, a loop's first batch and its end may take ten times as long. None: the value of
            the environment variable INSTEP_HANG_TIMEOUT_S.
        name: name of the run in `instep runs` and the dashboard; it does not change the run folder. Without a name they
            show the hyperparameters by which the run differs from its neighbours.
        **unknown: any other argument raises an error that names the replacement.

    Raises:
        SettingError: a value or combination is wrong.

    Example:
        >>> trainer = Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> trainer.max_epochs
        3
    """

    def __init__(
        self,
        *,
        accelerator: str | None = None,
        strategy: str | Strategy | None = None,
        devices: int | str | list[int] | None = None,
        num_nodes: int | None = None,
        precision: str | int | None = None,
        logger: bool | Logger | str | Iterable[Logger | str] | None = None,
        profiler: ProfilerName | Profiler | None = None,
        callbacks: Callback | Iterable[Callback] | None = None,
        fast_dev_run: bool | int | None = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int | None = None,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float | None = None,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        tf32: bool | None = None,
        # named as in torch.compile, although it hides the builtin
        compile: str | bool | CompileConfig | dict[str, Any] | None = None,
        cuda_graphs: bool | None = None,
        gc_every_n_steps: int | None = None,
        inference_mode: bool | None = None,
        use_distributed_sampler: bool | None = None,
        uneven: str | None = None,
        streams: str | None = None,
        sync_batchnorm: bool | None = None,
        detect_anomaly: bool | None = None,
        barebones: bool | None = None,
        reload_dataloaders_every_n_epochs: int | None = None,
        default_root_dir: PathLike | None = None,
        global_batch_size: int | dict[int, int] | None = None,
        trigger_every: int | None = None,
        seed_samples: bool | None = None,
        nonfinite: str | None = None,
        grace_period_s: float | None = None,
        hang_timeout_s: float | None = None,
        name: str | None = None,
        **unknown: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        self._environment = read_environment()
        given["num_nodes"] = self._environment.num_nodes if num_nodes is None else num_nodes
        self.settings = on_nodes_there(resolve(**given, **unknown), self._environment)
        self._device_count = count_devices(self.settings, self._environment)
        world_size = self._device_count * self.settings.num_nodes
        kind = find_device_kind(self.settings.accelerator).name
        make_cublas_repeatable(self.settings, kind)
        options = asked_strategy()[1] if strategy is None else None
        self.strategy = resolve_strategy(self.settings.strategy, world_size, kind, options)
        if self.settings.sync_batchnorm and world_size > 1:
            check_sync_batchnorm(kind)
        self.callbacks = default_callbacks(self.settings, given)
        self.profiler = make_profiler(self.settings.profiler)
        self._loggers: list[Logger] | None = None
        self.position = Position()
        self.progress = Progress(self.position)
        self.metrics = Metrics(self)
        self.state = TrainerState()
        self.run_folder = RunFolder(self.settings.default_root_dir)
        if isinstance(self.settings.logger, tuple):
            self.loggers  # noqa: B018  they learn of the run folder now: they may be used before the first run
        self.line = Line()
        # how to provide missing data, for error texts; the `instep` command sets another text
        self.how_to_give_data = "pass loaders or a datamodule"
        self._seed: int | None = None
        self.model: TrainModule | None = None
        self.resume_report: ResumeReport | None = None
        self.run_summary: RunSummary | None = None
        self.stop_reason = ""
        self._own_stops: set[str] = set()  # reasons for which this rank has asked for a stop
        self._stop_agreed = False
        self._loaded: Location | None = None
        self._asked_for: Location | None = None  # `ckpt_path` as the user set it
        self._data: dict[str, StageData] = {}  # data of the last runs, by stage
        self._ctx: RunContext | None = None  # context of the running fit, validate, test or predict
        self._last_ctx: RunContext | None = None
        self._log: MetricLog | None = None  # log that `self.log` writes into

    # ------------------------------------------------------------------ the train loop

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: Location | None = None,
        resume: Resume | None = None,
    ) -> None:
        """Train.

        The order of all hooks (a callback's runs before the module's)::

            configure_callbacks
            prepare_data
            setup
            # with ckpt_path: load_state_dict of the datamodule and of callbacks
            configure_model
            # with ckpt_path: on_load_checkpoint, then the weights
            configure_optimizers
            # train_dataloader and val_dataloader, where the module or a datamodule gives the loaders
            on_fit_start
            # with ckpt_path: optimizers, schedulers, data; random generators when the epoch goes on
            if there is a sanity check:
                on_sanity_check_start
                validation  # of num_sanity_val_steps batches
                on_sanity_check_end
            on_train_start
            for epoch in epochs:
                # with reload_dataloaders_every_n_epochs: train_dataloader; before a validation val_dataloader
                on_train_epoch_start
                for batch in train_dataloader:
                    transfer
                    on_train_batch_start
                    training_step
                    if first micro-batch of the window:
                        on_before_zero_grad, optimizer_zero_grad
                    on_before_backward
                    backward
                    on_after_backward
                    if last micro-batch of the window:
                        on_before_optimizer_step
                        configure_gradient_clipping
                        optimizer_step
                        if a scheduler has interval="step":
                            lr_scheduler_step
                    on_train_batch_end
                    if validation is due:
                        validation
                    # triggers that all ranks agreed on: stop, save, preempted
                on_train_epoch_end
                if a scheduler has interval="epoch":
                    lr_scheduler_step
                # on_train_epoch_end of EarlyStopping and ModelCheckpoint
            on_train_end
            on_fit_end
            # an error that ends the run at any place: on_exception
            teardown

            validation:
                if training has begun:
                    on_validation_model_zero_grad
                on_validation_model_eval
                on_validation_start
                on_validation_epoch_start
                for batch in val_dataloaders:
                    transfer
                    on_validation_batch_start
                    validation_step
                    on_validation_batch_end
                on_validation_epoch_end
                on_validation_end
                # on_validation_end of EarlyStopping and ModelCheckpoint
                on_validation_model_train

            transfer:
                on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer

        Args:
            model: the module to train. If it is `torch.compile(module)`, its steps run compiled.
            train_dataloaders: a loader, a dict or list of them, or a DataModule; by default the model's.
            val_dataloaders: a loader or a list of them.
            datamodule: a DataModule in place of loaders.
            ckpt_path: resume from a path, "last", "best", or "auto" (the newest checkpoint that verifies; without one
                the run starts fresh).
            resume: which parts of the checkpoint to load, such as `Resume(lr=1e-4)` or `Resume.weights()`; None for
                all. `resume_report` lists what was loaded. With "auto" or "last", `resume` is used only once: if the
                same command later finds a checkpoint that it saved itself, all of that checkpoint is loaded.

        Raises:
            SettingError: settings that do not fit the model or data.
            CheckpointError: there is nothing to resume from, or no checkpoint verifies.
            NonFiniteError: nan or inf in the loss or a gradient, with `Trainer(nonfinite="stop")`.
            Preempted: a signal asked to stop; the run is saved. Uncaught, the process exits with status 75.
        """
        model = check_module(model)
        datamodule, train_dataloaders = check_data(datamodule, train_dataloaders, val_dataloaders)
        ckpt_path = self._chosen(ckpt_path)
        if resume is not None:
            from instep.trainer.run_state import check_resume  # imported late: only a run needs it

            check_resume(resume, ckpt_path)
        self._launch()
        self._begin(model)
        if replay := find_replay():
            ckpt_path, resume = replay.prepare(self, model), None  # `instep replay` needs the whole checkpoint
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        with open_run(self, "fit", model, datamodule, loaders, ckpt_path, resume) as ctx:
            fit(ctx)

    # ------------------------------------------------------------------ evaluation

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: Location | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run the validation loaders once.

        Args:
            model: by default the model of the last fit, with the weights of its best checkpoint if there is one.
            dataloaders: a loader, a list of them, or a DataModule; by default the model's.
            ckpt_path: checkpoint to load first: a path, "last" or "best"; the path that these mean is printed. This
                loads weights, and the state of the datamodule if the class of the saved one has the same name.
            verbose: print the result on the main process.
            datamodule: a DataModule in place of loaders.

        Returns:
            One dict of logged values per loader, the same on every rank.

        Raises:
            UsageError: there is no model, or no data.
            HookError: the module has no `validation_step`.
            CheckpointError: `ckpt_path` is not there, does not verify, or does not fit the module.
        """
        return self._evaluate("validate", "val", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: Location | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run the test loaders once. Arguments, result and errors are those of `validate`."""
        return self._evaluate("test", "test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: Location | None = None,
    ) -> list[Any] | None:
        """Run `predict_step` over the predict loaders.

        Args:
            model: as in `validate`.
            dataloaders: as in `validate`.
            datamodule: a DataModule in place of loaders.
            return_predictions: whether to keep the outputs of all ranks and return them; default True.
            ckpt_path: as in `validate`.

        Returns:
            The outputs of all batches on the CPU, in the order of the data and the same on every rank; a list of such
            lists with several loaders. None with `return_predictions=False`, for outputs that are larger than memory.
            The outputs may be inference tensors, which autograd refuses; with `Trainer(inference_mode=False)` they are
            plain tensors.
        """
        datamodule, dataloaders = check_data(datamodule, dataloaders)
        self._launch()
        model, ckpt_path = self._model_for_evaluation("predict", model, ckpt_path)
        with open_run(self, "predict", model, datamodule, {"predict": dataloaders}, ckpt_path) as ctx:
            ctx.strategy.prepare_training(model, [])
            sources = ctx.loaders.evaluation("predict")
            need_loaders(ctx, sources)
            outputs = predict(ctx, sources, return_predictions is not False)
        return None if return_predictions is False else outputs

    def _evaluate(
        self,
        fn: str,
        stage: str,
        model: TrainModule | None,
        dataloaders: Any,
        ckpt_path: Location | None,
        verbose: bool,
        datamodule: DataModule | None,
    ) -> list[dict[str, float]]:
        datamodule, dataloaders = check_data(datamodule, dataloaders)
        self._launch()
        model, ckpt_path = self._model_for_evaluation(fn, model, ckpt_path)
        with open_run(self, fn, model, datamodule, {stage: dataloaders}, ckpt_path) as ctx:
            ctx.strategy.prepare_training(model, [])
            sources = ctx.loaders.evaluation(stage)
            need_loaders(ctx, sources)
            results = evaluate(ctx, fn, sources) or []
        if verbose and self.is_global_zero:
            print_results(results, fn)
        return results

    def _model_for_evaluation(
        self, fn: str, model: TrainModule | None, ckpt_path: Location | None
    ) -> tuple[TrainModule, Location | None]:
        ckpt_path = self._chosen(ckpt_path)
        if model is None:
            if self.model is None:
                raise UsageError("pass a model: this Trainer has not run one yet")
            callback = self.checkpoint_callback
            if ckpt_path is None and callback is not None and callback.best_model_path:
                ckpt_path = callback.best_model_path
                self._warn(
                    f"trainer.{fn}() was called without a model. The best model of the previous `fit` call will be "
                    f"used, {ckpt_path}. Give ckpt_path='best' or 'last' to choose, or the model to use it as it is."
                )
            model = self.model
        self.model = check_module(model)
        return self.model, ckpt_path

    # ------------------------------------------------------------------ before a run

    def _chosen(self, ckpt_path: Location | None) -> Location | None:
        if self._asked_for is not None and ckpt_path is not None:
            self._warn(f"ckpt_path={ckpt_path!r} goes before trainer.ckpt_path = {self._asked_for!r}, which is dropped")
            self._asked_for = None
        return self._asked_for if ckpt_path is None else ckpt_path

    def _launch(self) -> None:
        """Become the launch agent of the ranks, if a plain script asks for several devices."""
        if self._ctx is not None:
            raise UsageError("this Trainer is running already; make another one for a run inside a run")
        if self._environment.launcher == "none" != read_environment().launcher:
            raise UsageError(
                "this Trainer was made before the ranks were started and takes this one for a process alone: make it "
                "inside the function that is launched"
            )
        if self.world_size > 1 and self._environment.launcher == "none":
            for logger in self.loggers:
                logger.delivery.discard()
            launch(self.settings, self._device_count)
        if replay := find_replay():
            self._loggers = []
            replay.silence(self)

    def _begin(self, model: TrainModule) -> None:
        """Reset what the last fit left.

        The position is kept, so that a new fit continues the counts, as in Lightning.
        """
        self.model, self.resume_report, self.run_summary = model, None, None
        self._set_stop(False)
        self.position.epoch_over = self.position.epoch_ended

    def _enter(self, ctx: RunContext) -> None:
        """Make a run the active run of the Trainer."""
        self._ctx = ctx
        self.state.begin(ctx.fn)
        self.metrics.forget()

    def _leave(self, ctx: RunContext) -> None:
        """Detach a run from the Trainer, but remember the last run, which `save_checkpoint` can still save."""
        before, self._ctx = self._last_ctx, None
        if ctx.fn == "fit" or before is None or before.module is not ctx.module:
            self._last_ctx = ctx  # after an evaluation, save_checkpoint must still find the optimizers of the last fit
        self.progress.stage = self.state.stage = None

    def _set_seed(self, saved: int | None = None) -> None:
        """Set the seed of a run: the saved one if the run is resumed.

        A new run without a seed takes the main process's seed and line (its run id and the runs that it continues).
        """
        if saved is not None:
            self._seed = saved
        elif self._seed is None:
            seed = torch.initial_seed() & (2**63 - 1)
            # all ranks need the ids of this run and of the runs that it continues, since any rank may save after an
            # error
            self._seed, self.line = broadcast_object((seed, self.line))

    def _set_stop(self, agreed: bool, reason: str = "") -> None:
        """Record that all ranks agreed to stop, or that a stop is no longer wanted."""
        self._stop_agreed, self.stop_reason = agreed, reason
        if not agreed:
            self._own_stops.clear()

    def _switch_log(self, log: MetricLog | None) -> MetricLog | None:
        """Set the log that `self.log` writes into, and return the previous one."""
        before, self._log = self._log, log
        return before

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the Trainer does not include objects of its runs, such as devices, process groups and loaders.
        data = {stage: replace(data, loaders=None) for stage, data in self._data.items()}
        return {**self.__dict__, "_ctx": None, "_last_ctx": None, "_log": None, "_data": data}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ATTRIBUTES:
            super().__setattr__(name, value)
        elif self._ctx is not None:
            change_in_run(self._ctx, name, value)
        else:
            self.settings = change(self.settings, name, value)

    def __getattr__(self, name: str) -> Any:
        # An argument can be read by its name, such as `trainer.max_epochs`. Python calls this method only for names
        # that are not attributes.
        settings = self.__dict__.get("settings")
        if settings is None or not hasattr(settings, name):
            raise no_attribute(name)
        return getattr(settings, name)

    # ---- saving and triggers

    def save_checkpoint(self, filepath: Location, weights_only: bool = False) -> Path:
        """Save a checkpoint now. Collective: call it on all ranks.

        Args:
            filepath: name of the folder; the checkpoint is saved as `<filepath>-<attempt>`, which never replaces
                another one. `ckpt_path=filepath` finds the newest attempt.
            weights_only: whether to leave out what only a resumed run needs.

        Returns:
            The folder.

        Raises:
            DistributedError: a rank did not call it.
        """
        path = to_path(filepath).absolute()
        ctx = self._ctx or self._last_ctx
        if ctx is None or not hasattr(ctx.strategy, "module"):  # as in `setup`
            raise UsageError("there is nothing to save yet: call fit first; in a hook, save from on_fit_start on")
        PartialState().wait_for_everyone("trainer.save_checkpoint(), which all ranks call")
        return ctx.saver.finish(ctx.saver.save(path.parent, path.name, weights_only=weights_only))

    def save_to(self, dirpath: Path | None, name: str | None, *, weights_only: bool, **info: Any) -> Path:
        """Save a checkpoint into a folder of checkpoints, as ModelCheckpoint does. Collective.

        Args:
            dirpath: the folder; None for `checkpoints/` in the run folder.
            name: the checkpoint's name, without its attempt; None for `step-<8 digits>`.
            weights_only: whether to leave out what only a resumed run needs.
            info: JSON values for the manifest, such as monitor, mode and score.
        """
        return self.saver.finish(self.saver.save(dirpath, name, weights_only=weights_only, **info))

    def save_later(
        self, dirpath: Path | None, name: str | None, *, weights_only: bool, to_delete: Sequence[str] = (), **info: Any
    ) -> PendingSave:
        """Save as `save_to` does, but in the background; `finish_save` returns the result. Collective.

        Args:
            dirpath, name, weights_only, info: as in `save_to`.
            to_delete: older checkpoints in that folder, deleted once this one has verified.
        """
        return self.saver.save(dirpath, name, weights_only=weights_only, background=True, drop=to_delete, **info)

    def finish_save(self, pending: PendingSave) -> Path:
        """Wait for a save in the background, and raise its error on all ranks. Collective."""
        return self.saver.finish(pending)

    def verify_checkpoint(self, path: Path) -> list[str]:
        """Verify a checkpoint, and return its problems. Collective."""
        return self.saver.store(path.parent).verify_together(path)

    def delete_checkpoint(self, path: Path) -> None:
        """Delete a checkpoint. Collective."""
        self.saver.store(path.parent).delete(path)

    def agree(self, value: Any) -> Any:
        """Return the main process's value on every rank, for decisions that all ranks must take alike. Collective."""
        return broadcast_object(value)

    def save_after(self, error: BaseException, dirpath: Path | None, name: str | None) -> Path | None:
        """Save a run after an error, as `OnExceptionCheckpoint` does. The arguments are those of `save_to`.

        Returns:
            The folder; None if the other processes do not join the save and this one does not hold the whole state.
        """
        return self.saver.save_after(error, dirpath, name)

    resumed_from: ReadOnly[Reader | None] = ReadOnly(
        lambda t: t._ctx and t._ctx.resumed_reader, "Checkpoint that the running fit was resumed from."
    )

    _validates_now: ReadOnly[bool] = ReadOnly(lambda t: validates_now(t._run))
    """Whether a planned validation runs right after this training batch."""

    saver: ReadOnly[TrainerSaver] = ReadOnly(lambda t: t._run.saver, "Saver of the running call.")

    def trial(self) -> Trial:
        """Make a trial: steps that leave no trace, for callbacks that search for a setting; see `Trial`."""
        from instep.trainer.trials import Trial  # imported late: only a search for a setting needs it

        return Trial(self._run)

    def set_trigger(self, name: str, reason: str = "", agreed: bool = False) -> None:
        """Set a trigger on any rank: "stop", "save", "preempted", "validate", or a name of your own. Local and free.

        All ranks see it at the same step.

        Args:
            name: name of the trigger.
            reason: reason for people to read.
            agreed: whether every rank sets the trigger in this same hook of a training batch, because of a value that
                all ranks know, such as a sum over ranks. Then the loop acts at the end of this step, without
                communication between ranks. `agreed` has no effect on triggers with names of your own.
        """
        if name == "stop":
            self._own_stops.add(reason)
        if agreed and name == "validate":
            self._run.validation.next_batch = 0 if self._run.validation.enabled else math.inf
        elif agreed and name in ("stop", "save", "preempted"):
            self._run.ending.deferred.append(Trigger(name, reason, self._run.rank))
        else:
            self._run.triggers.set(name, reason)

    def check_trigger(self, name: str | None = None) -> bool:
        """Reset a trigger, and return whether any rank had set it. Collective and blocking: call it on all ranks.

        Args:
            name: name of the trigger; None for any trigger.
        """
        return self._run.triggers.check(name)

    @property
    def should_stop(self) -> bool:
        """Whether all ranks agreed to stop. Setting it to True asks for a stop, and is local.

        Raises:
            UsageError: it is set to False after all ranks have agreed.
        """
        return self._stop_agreed

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.set_trigger("stop", "trainer.should_stop")
        elif self._ctx is None:
            self._stop_agreed = False
        elif self._stop_agreed:
            raise UsageError(
                "trainer.should_stop = False: all ranks have agreed to stop, and one cannot take that back alone. Ask "
                "for the stop later, or call fit again to go on."
            )

    # ---- properties of the Trainer and its run

    @property
    def _run(self) -> RunContext:
        if self._ctx is None:
            raise UsageError("this works only while fit, validate, test or predict runs")
        return self._ctx

    global_step: ReadOnly[int] = ReadOnly(lambda t: t.position.global_step, "Optimizer steps done.")
    accumulate_grad_batches: ReadOnly[int] = ReadOnly(accumulation, "Micro-batches per optimizer step, as it is now.")

    @property
    def current_epoch(self) -> int:
        """Number of completed epochs, which is the index of the running one, from 0.

        An epoch counts once its end hooks have run, also if the run's end cuts the epoch short.
        """
        return self.position.epoch + self.position.epoch_over

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """All logged values as 0-dim tensors: reduced epoch values, and the current step values of training."""
        if self._log is not None and self._log.buffer:
            self._log.drain()  # collect what the current hook has logged so far
        return as_tensors({**self.metrics.callback, **({} if self._log is None else self._log.callback_values)})

    logged_metrics: ReadOnly[dict[str, Tensor]] = ReadOnly(
        lambda t: as_tensors(t.metrics.logged), "Values that were sent to the loggers last."
    )

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """Values logged with `prog_bar=True`: floats, and device tensors of the running step."""
        log = self._log
        return {**self.metrics.bar, **({} if log is None else log.bar_values())}

    @property
    def batch_weight(self) -> float | None:
        """Number of samples that count in this rank's running batch; None if the data source does not know it.

        It is 0 for a batch that a rank runs a second time to keep in step with ranks that have more batches. Such a
        batch counts nowhere.
        """
        return None if self._log is None else self._log.weight

    def batch_indices(self, batch_idx: int) -> list[Any] | None:
        """Return the data set's indices that make up a batch of this rank.

        Args:
            batch_idx: index of the batch in the running pass over the data, as hooks get it in `batch_idx`.

        Returns:
            The indices; None if they are not known: for an iterable data set, or for a batch before the checkpoint from
            which the pass was resumed.

        Raises:
            UsageError: no run is active.

        Example:
            >>> def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            ...     print(trainer.batch_indices(batch_idx), trainer.batch_weight)
        """
        source = self._run.source
        return source.sample_indices(batch_idx) if batch_idx >= source.first_batch else None

    @property
    def seed(self) -> int:
        """Seed of all random streams of the run: torch's initial seed on the main process."""
        if self._seed is None:
            raise UsageError("the seed is known once a run has started")
        return self._seed

    global_rank: ReadOnly[int] = ReadOnly(lambda t: t._environment.rank)
    """Rank of this process, from 0."""
    local_rank: ReadOnly[int] = ReadOnly(lambda t: t._environment.local_rank)
    """Rank of this process on its node, from 0."""
    node_rank: ReadOnly[int] = ReadOnly(lambda t: t._environment.node_rank)
    """Number of this node, from 0."""
    is_global_zero: ReadOnly[bool] = ReadOnly(lambda t: t.global_rank == 0, "Whether this is the main process.")
    num_devices: ReadOnly[int] = ReadOnly(lambda t: t._device_count, "Devices on this machine.")
    world_size: ReadOnly[int] = ReadOnly(lambda t: t._device_count * t.settings.num_nodes, "Processes of the run.")

    device_ids: ReadOnly[list[int]] = ReadOnly(
        lambda t: list(t.settings.devices if isinstance(t.settings.devices, tuple) else range(t._device_count))
    )
    """Numbers of the devices on this machine that the run uses."""

    @property
    def lightning_module(self) -> TrainModule | None:
        """Lightning's name for `model`."""
        warn_user("trainer.lightning_module: instep's name for it is trainer.model", FutureWarning)
        return self.model

    _shown: ReadOnly[RunContext | None] = ReadOnly(lambda t: t._ctx or t._last_ctx, "Of this call or the last fit.")
    datamodule: ReadOnly[DataModule | None] = ReadOnly(lambda t: t._shown and t._shown.datamodule)
    """Data module of the running call, or of the last fit; None without one."""
    optimizers: ReadOnly[list[Optimizer]] = ReadOnly(lambda t: t._shown.optimizers if t._shown else [])
    """Optimizers of the running call, or of the last fit."""
    _wrapped_optimizers: ReadOnly[list[Any]] = ReadOnly(lambda t: t._shown.wrapped_optimizers if t._shown else [])
    lr_scheduler_configs: ReadOnly[list[LRSchedulerConfig]] = ReadOnly(
        lambda t: t._shown.schedulers if t._shown else []
    )
    """Learning-rate schedules of the running call, or of the last fit, each with its settings."""

    @property
    def loggers(self) -> list[Logger]:
        """All loggers of the Trainer."""
        if self._loggers is None:
            if self.settings.logger is True:
                # imported late: this loads instep's logger, but not tensorboard
                from instep.loggers import TensorBoardLogger

                self._loggers = [TensorBoardLogger()]
            else:
                self._loggers = list(self.settings.logger or ())
            self.run_folder.follow(self._loggers)
        return self._loggers

    @loggers.setter
    def loggers(self, loggers: Iterable[str | Logger] | None) -> None:
        if self._ctx is not None:
            raise UsageError("trainer.loggers: a run goes on with the loggers that it began with; set them before it")
        self._loggers = list(check_value("logger", list(loggers or ())))
        self.run_folder.follow(self._loggers)

    @property
    def logger(self) -> Logger | None:
        """First logger, or a silent one if `fast_dev_run` has turned loggers off."""
        return plugins.first_logger(self.loggers, self.settings)

    @logger.setter
    def logger(self, logger: str | Logger | Literal[False] | None) -> None:
        self.loggers = [] if logger is None or logger is False else [logger]

    default_root_dir: ReadOnly[str] = ReadOnly(lambda t: str(t.settings.default_root_dir), "Where run folders go.")
    log_dir: ReadOnly[str | None] = ReadOnly(
        lambda t: None if t.run_folder.path is None else str(t.run_folder.path), "The run folder, once it is chosen."
    )

    @property
    def ckpt_path(self) -> Location | None:
        """Checkpoint that the running or last call has loaded.

        If you set it, every call without a `ckpt_path` of its own loads this checkpoint, until you set it to None.
        """
        return self._loaded if self._asked_for is None else self._asked_for

    @ckpt_path.setter
    def ckpt_path(self, path: Location | None) -> None:
        self._loaded = self._asked_for = path

    run_id: ReadOnly[str] = ReadOnly(lambda t: t.line.run_id, "Name of the run, which a resumed one takes over.")
    checkpoint_callbacks: ReadOnly[list[ModelCheckpoint]] = ReadOnly(
        lambda t: [callback for callback in t.callbacks if hasattr(callback, "save_now")]
    )
    """Callbacks that save checkpoints."""
    checkpoint_callback: ReadOnly[ModelCheckpoint | None] = ReadOnly(lambda t: next(iter(t.checkpoint_callbacks), None))
    """First callback that saves checkpoints; None without one."""
    early_stopping_callbacks: ReadOnly[list[EarlyStopping]] = ReadOnly(
        lambda t: [callback for callback in t.callbacks if hasattr(callback, "stopping_reason")]
    )
    """Callbacks that stop the run early."""
    early_stopping_callback: ReadOnly[EarlyStopping | None] = ReadOnly(
        lambda t: next(iter(t.early_stopping_callbacks), None)
    )
    """First callback that stops the run early; None without one."""
    progress_bar_callback: ReadOnly[ProgressBar | None] = ReadOnly(
        lambda t: next(iter(plugins.progress_bars(t.callbacks)), None)
    )
    """Callback that shows the progress; None without one."""

    sanity_checking: ReadOnly[bool] = ReadOnly(lambda t: t.state.stage == "sanity_check")
    """True while the validation before the first epoch runs."""
    training: ReadOnly[bool] = ReadOnly(lambda t: t.state.stage == "train")
    """True while `fit` runs, except during the sanity check and validations."""
    validating: ReadOnly[bool] = ReadOnly(lambda t: t.state.stage == "validate")
    """True while a validation runs, except the one before the first epoch."""
    testing: ReadOnly[bool] = ReadOnly(lambda t: t.state.stage == "test")
    """True while a test runs."""
    predicting: ReadOnly[bool] = ReadOnly(lambda t: t.state.stage == "predict")
    """True while a prediction runs."""
    evaluating: ReadOnly[bool] = ReadOnly(lambda t: t.state.stage in ("sanity_check", "validate", "test"))
    """True while a validation or a test runs."""
    interrupted: ReadOnly[bool] = ReadOnly(
        lambda t: t.state.status == "interrupted", "Whether a signal or an error ended the last run."
    )
    received_sigterm: ReadOnly[bool] = ReadOnly(
        lambda t: bool(t._shown and t._shown.signals and t._shown.signals.got_sigterm),
        "Whether SIGTERM has reached this process in the running fit, or the last one.",
    )

    batch_share: ReadOnly[Share] = ReadOnly(
        lambda t: next((c.source.share for c in (t._ctx, t._last_ctx) if hasattr(c, "source")), Share())
    )
    """Number of samples in the current training batch, or in the last one: `mine` on this rank, `all` on all ranks."""
    is_last_batch: ReadOnly[bool] = ReadOnly(lambda t: t.batch_share.last or t.position.skipped_rest)
    """Whether the current training batch, or the last one, ends the epoch."""
    enable_validation: ReadOnly[bool] = ReadOnly(
        lambda t: next((ctx.validation.enabled for ctx in (t._ctx, t._last_ctx) if ctx and ctx.fn == "fit"), False),
        "Whether the running fit, or the last one, has a validation to run.",
    )
    train_dataloader: ReadOnly[Any] = ReadOnly(lambda t: users_loaders(t, "train"))
    """Your training loader, or loaders; None before a run asks for it."""
    val_dataloaders: ReadOnly[Any] = ReadOnly(lambda t: users_loaders(t, "val"))
    """Your validation loader, or loaders; None before a run asks for them."""
    test_dataloaders: ReadOnly[Any] = ReadOnly(lambda t: users_loaders(t, "test"))
    """Your test loader, or loaders; None before a run asks for them."""
    predict_dataloaders: ReadOnly[Any] = ReadOnly(lambda t: users_loaders(t, "predict"))
    """Your prediction loader, or loaders; None before a run asks for them."""
    num_training_batches: ReadOnly[int | float] = ReadOnly(lambda t: next(iter(data_of(t, "train").batches), math.inf))
    """Training batches of an epoch on this rank; infinity where that is not known."""
    num_val_batches: ReadOnly[list[int | float]] = ReadOnly(lambda t: list(data_of(t, "val").batches))
    """Batches of each validation loader on this rank; infinity where that is not known."""
    num_sanity_val_batches: ReadOnly[list[int | float]] = ReadOnly(sanity_batches)
    """Batches of each validation loader that the validation before the first epoch takes."""
    num_test_batches: ReadOnly[list[int | float]] = ReadOnly(lambda t: list(data_of(t, "test").batches))
    """Batches of each test loader on this rank; infinity where that is not known."""
    num_predict_batches: ReadOnly[list[int | float]] = ReadOnly(lambda t: list(data_of(t, "predict").batches))
    """Batches of each prediction loader on this rank; infinity where that is not known."""
    estimated_stepping_batches: ReadOnly[int | float] = ReadOnly(
        estimate_steps, "Optimizer steps of the whole fit, for schedulers; usable in `configure_optimizers`."
    )
    _forward_training_data = forward_training_data

    def _warn(self, message: str) -> None:
        if self.is_global_zero:
            warn_user(message)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process only, above the progress bar."""
        if self.is_global_zero:
            (print if (bar := self.progress_bar_callback) is None else bar.print)(*args, **kwargs)

    def _print(self, text: Any) -> None:
        """Print a text of instep. Control characters in names are removed, since a terminal would obey them."""
        self.print(clean(str(text)))

    # ------------------------------------------------------------------ what `TrainModule` calls

    def _manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        manual_backward(self._run, loss, *args, **kwargs)

    def _batch_weight(self) -> float:
        # Do not prepare data here: torch.jit reads all properties of a module, maybe on one rank only, and preparing
        # data is collective.
        source = None if self._ctx is None else self._ctx.loaders.prepared_train
        return 1.0 if source is None else rank_weight(source)
