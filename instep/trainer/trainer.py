"""The Trainer: its arguments, the train loop, and evaluation. What plug-ins ask of it is in `view.py`."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from instep.callbacks.base import Callback
from instep.data import DataModule
from instep.distributed.heartbeat import BATCH, STEP
from instep.errors import UsageError
from instep.loggers.base import Logger
from instep.state import find_device_kind, read_environment
from instep.strategies import Strategy, resolve_strategy
from instep.strategies.convert import check_sync_batchnorm
from instep.strategies.registry import asked_strategy
from instep.trainer import replay
from instep.trainer.devices import count_devices, launch, on_nodes_there
from instep.trainer.evaluation import evaluate, predict
from instep.trainer.fit_session import FitSession
from instep.trainer.log import LogBook
from instep.trainer.metrics import Metrics, print_results
from instep.trainer.module import TrainModule
from instep.trainer.plugins import default_callbacks
from instep.trainer.position import Position, Progress, TrainerState
from instep.trainer.run_folder import RunFolder
from instep.trainer.run_state import check_resume
from instep.trainer.session import Session
from instep.trainer.settings import resolve
from instep.trainer.step import detached_outputs, make_step
from instep.trainer.view import TrainerView
from instep.types import Location, PathLike

if TYPE_CHECKING:
    from instep.checkpoint.resume import Resume, ResumeReport


class Trainer(TrainerView):
    """Trains, validates, tests and predicts with a `TrainModule`.

    All arguments are keyword-only, have Lightning's names and meaning, and are checked here, before anything runs. They
    can be read back under their names: `trainer.max_epochs`. Where accelerator, strategy, precision,
    accumulate_grad_batches or grace_period_s is left out, `INSTEP_PRECISION` and its kin hold, as `instep launch` sets
    them.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda", "mps", ...
        strategy: "auto", a name such as "ddp", or an `instep.Strategy`.
        devices: how many devices of this machine, their indices, or "auto" (one process on a CPU). With more than one
            in a plain `python train.py` the first fit, validate, test or predict starts the processes.
        num_nodes: machines; by default as many as the launcher started processes on.
        precision: "32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true", "fp8", or a short form.
        logger: True for TensorBoard, a logger, a list of them, or False.
        callbacks: a callback or a list of them.
        fast_dev_run: True or a number: run so many batches of everything, to see that the code works.
        max_epochs: -1 for no limit; 1000 when neither it, `max_steps` nor `max_time` is given.
        min_epochs: keep going so long although a stop was asked for.
        max_steps: optimizer steps; -1 for no limit.
        min_steps: like `min_epochs`.
        max_time: "DD:HH:MM:SS", a timedelta, or its keyword arguments as a dict.
        limit_train_batches: number (int) or fraction (float) of the batches. So are the other three.
        limit_val_batches: 0 turns validation off.
        limit_test_batches: as above.
        limit_predict_batches: as above.
        overfit_batches: train and validate on so many (int) batches or such a fraction (float), in a fixed order.
        val_check_interval: fraction of an epoch (float), training batches (int), or time. Validation waits for the end
            of the optimizer window.
        check_val_every_n_epoch: None counts an int `val_check_interval` across epochs.
        num_sanity_val_steps: validation batches before training; -1 for all.
        log_every_n_steps: optimizer steps between two hand-overs of step values to the loggers; 0 for never.
        enable_checkpointing: save checkpoints; a ModelCheckpoint is added when there is none.
        enable_progress_bar: show a progress bar.
        enable_model_summary: print the model's size before fit.
        accumulate_grad_batches: micro-batches per optimizer step.
        gradient_clip_val: the largest gradient norm or value.
        gradient_clip_algorithm: "norm" or "value".
        deterministic: True, or "warn" to warn where torch has no deterministic algorithm.
        benchmark: `torch.backends.cudnn.benchmark`.
        tf32: True computes float32 matrix products and convolutions in TensorFloat-32, False in full; for the run only.
        inference_mode: use `torch.inference_mode` outside fit; else `no_grad`.
        use_distributed_sampler: shard loaders over processes.
        uneven: where processes read data of their own and have different numbers of batches (never so where instep
            spreads the data): "stop" at the first that is exhausted, "join" (it goes on with weight 0 until all are),
            or "error".
        sync_batchnorm: let BatchNorm layers see the batch of all processes, on GPUs.
        detect_anomaly: torch's anomaly detection.
        barebones: nothing but the loop: no log, bar, checkpoint, summary or sanity check.
        reload_dataloaders_every_n_epochs: ask for the loaders again so often; 0 for never.
        default_root_dir: where run folders go; the working directory by default.
        global_batch_size: samples per optimizer step over all processes; the batch per process and the accumulation
            follow, so that a run means the same on any number of processes.
        trigger_every: optimizer steps between two agreements on triggers; chosen by time when None.
        seed_samples: seed random augmentation by (seed, epoch, sample index).
        nonfinite: what to do when the loss or a gradient is nan or inf, on all ranks and before the update: "stop"
            (leave the update out and raise NonFiniteError), "skip" (leave it out, count the step, go on) or
            "continue" (report it only). None does not look.
        grace_period_s: seconds from the first SIGTERM, SIGINT, SIGUSR1 or SIGUSR2 until a process that has not saved
            and ended by then is ended where it is; float("inf") for no limit. Under plain torchrun at most 25, since
            that kills after 30.
        hang_timeout_s: seconds without a step after which the ranks count as hung: their stacks are written into the
            run folder and they end with exit code 76, which elastic launchers start again. Starting, the first batch of
            a loop, loading, saving, compiling and an epoch's end may take ten times as long. By default what the
            variable INSTEP_HANG_TIMEOUT_S says, else nobody watches.
        **unknown: anything else is an error that names the replacement.

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
        logger: bool | Logger | Iterable[Logger] | None = None,
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
        inference_mode: bool | None = None,
        use_distributed_sampler: bool | None = None,
        uneven: str | None = None,
        sync_batchnorm: bool | None = None,
        detect_anomaly: bool | None = None,
        barebones: bool | None = None,
        reload_dataloaders_every_n_epochs: int | None = None,
        default_root_dir: PathLike | None = None,
        global_batch_size: int | None = None,
        trigger_every: int | None = None,
        seed_samples: bool | None = None,
        nonfinite: str | None = None,
        grace_period_s: float | None = None,
        hang_timeout_s: float | None = None,
        **unknown: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        self._environment = read_environment()
        given["num_nodes"] = self._environment.num_nodes if num_nodes is None else num_nodes
        self.settings = on_nodes_there(resolve(**given, **unknown), self._environment)
        self._device_count = count_devices(self.settings, self._environment)
        world_size = self._device_count * self.settings.num_nodes
        kind = find_device_kind(self.settings.accelerator).name
        options = asked_strategy()[1] if strategy is None else None
        self.strategy = resolve_strategy(self.settings.strategy, world_size, kind, options)
        if self.settings.sync_batchnorm and world_size > 1:
            check_sync_batchnorm(kind)
        self.callbacks = default_callbacks(self.settings, enable_checkpointing)
        self._loggers: list[Logger] | None = None
        self.position = Position()
        self.progress = Progress(self.position)
        self.metrics = Metrics(self)
        self.state = TrainerState()
        self.run_folder = RunFolder(self.settings.default_root_dir)
        if isinstance(self.settings.logger, tuple):
            self.loggers  # noqa: B018  they learn of the run folder now: they may be used before the first run
        self.run_id = uuid.uuid4().hex[:16]
        self.how_to_give_data = "pass loaders or a datamodule"  # for errors; a command line has another way
        self._seed: int | None = None
        self.model: TrainModule | None = None
        self.resume_report: ResumeReport | None = None
        self.interrupted = False
        self.stop_reason = ""
        self._stop_agreed = False
        self._session: Session | None = None
        self._last: Session | None = None
        self._book: LogBook | None = None

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
            on_fit_start
            # with ckpt_path: optimizers, schedulers, position, data, random generators
            if there is a sanity check:
                on_sanity_check_start
                validation  # of num_sanity_val_steps batches
                on_sanity_check_end
            on_train_start
            for epoch in epochs:
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
                on_validation_model_train

            transfer:
                on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer

        Args:
            model: what to train.
            train_dataloaders: a loader, a dict or list of them, or a DataModule; by default the model's.
            val_dataloaders: a loader or a list of them.
            datamodule: in place of loaders.
            ckpt_path: resume from a path, "last", "best", or "auto" (the
                newest that verifies; starts fresh where there is none).
            resume: which parts of it to take up, such as `Resume(lr=1e-4)` or `Resume.weights()`; None for all.
                `resume_report` says what came of it. With "auto" or "last" it holds once: where the same command finds
                a checkpoint that it saved itself, all of that is taken up.

        Raises:
            SettingError: settings that do not fit the model or data.
            CheckpointError: nothing to resume from, or nothing of it verifies.
            NonFiniteError: nan or inf in the loss or a gradient, with `Trainer(nonfinite="stop")`.
            Preempted: a signal asked to stop; the run is saved. Uncaught, the process exits with status 75.
        """
        datamodule, train_dataloaders = _datamodule(datamodule, train_dataloaders, val_dataloaders)
        if resume is not None:
            check_resume(resume, ckpt_path)
        self._launch()
        self._begin(model)
        wanted = replay.take_over(self, model, ckpt_path)
        resume = resume if wanted is ckpt_path else None  # a replay takes up all of its checkpoint
        with FitSession(
            self, "fit", model, datamodule, {"train": train_dataloaders, "val": val_dataloaders}, wanted, resume
        ) as run:
            run.set_up()
            run.configure_optimizers()
            run.prepare()
            hooks, at, book, tick = run.hooks, run.position, run.book, run.triggers.tick
            beats = run.heart.numbers
            hooks.call("on_fit_start")
            run.resume()
            run.sanity_check()
            run.start_training()
            hooks.call("on_train_start")
            run.check_saving()
            run.agree_on_triggers()
            batch_start, batch_end = hooks["on_train_batch_start"], hooks["on_train_batch_end"]
            max_steps, hand_over_every = self.settings.max_steps, self.settings.log_every_n_steps or 500

            while not run.finished:
                run.begin_epoch()
                source, step = run.source, make_step(run)
                complete = False
                for batch in run.batches():
                    batch_idx = run.batch_idx = at.batch
                    book.batch, book.weight = batch, source.share.mine
                    if batch_start and run.skips(batch_start, batch, batch_idx):
                        complete = at.skipped_rest = True
                        break
                    output = step(batch, batch_idx)
                    beats[BATCH], beats[STEP] = batch_idx, at.global_step
                    if batch_end:
                        outputs = detached_outputs(output)
                        for hook in batch_end:
                            hook(outputs, batch, batch_idx)
                    if at.window_batch != at.batch:
                        continue  # in the middle of an optimizer window
                    if at.global_step % hand_over_every == 0:
                        run.hand_over()
                    if at.batch >= run.next_validation:
                        run.validate()
                    if run.has_clock:
                        run.look_at_clock()
                    agreed = tick(at.global_step)
                    if agreed:
                        run.act_on(agreed)
                    if at.global_step == max_steps or (self._stop_agreed and run.stopping):
                        complete = source.share.last
                        break
                else:
                    complete = True
                run.end_epoch(complete)

            run.strategy.average_replicas()
            hooks.call("on_train_end")
            hooks.call("on_fit_end")
            run.say_why_it_ended()

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
            model: by default the one of the last fit, with its best checkpoint's weights where there is one.
            dataloaders: a loader, a list of them, or a DataModule; by default the model's.
            ckpt_path: load weights from a path, "last" or "best" first; which one those are is printed.
            verbose: print the result on the main process.
            datamodule: in place of loaders.

        Returns:
            For each loader a dict of what was logged, the same on every rank.

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
        return_predictions: bool = True,
        ckpt_path: Location | None = None,
    ) -> list[Any] | None:
        """Run `predict_step` over the predict loaders.

        Args:
            model: as in `validate`.
            dataloaders: as in `validate`.
            datamodule: in place of loaders.
            return_predictions: keep the outputs and return them.
            ckpt_path: as in `validate`.

        Returns:
            This rank's outputs, one for each batch, on the CPU; a list of such lists with several loaders. None with
            `return_predictions=False`.
        """
        datamodule, dataloaders = _datamodule(datamodule, dataloaders, None)
        self._launch()
        model, ckpt_path = self._model_for_evaluation(model, ckpt_path)
        with Session(self, "predict", model, datamodule, {"predict": dataloaders}, ckpt_path) as run:
            run.set_up()
            run.strategy.prepare_training(model, [])
            sources = run.loaders.evaluation("predict")
            self._need_loaders(sources, "predict")
            outputs = predict(run, sources, return_predictions)
        return outputs if return_predictions else None

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
        datamodule, dataloaders = _datamodule(datamodule, dataloaders, None)
        self._launch()
        model, ckpt_path = self._model_for_evaluation(model, ckpt_path)
        with Session(self, fn, model, datamodule, {stage: dataloaders}, ckpt_path) as run:
            run.set_up()
            run.strategy.prepare_training(model, [])
            sources = run.loaders.evaluation(stage)
            self._need_loaders(sources, fn)
            results = evaluate(run, fn, sources) or []
        if verbose and self.is_global_zero:
            print_results(results, fn)
        return results

    def _need_loaders(self, sources: list[Any], fn: str) -> None:
        limit = getattr(self.settings, f"limit_{'val' if fn == 'validate' else fn}_batches")
        if not sources and limit != 0:
            raise UsageError(f"{fn} needs data: {self.how_to_give_data}, or give the module a loader method.")

    def _model_for_evaluation(
        self, model: TrainModule | None, ckpt_path: Location | None
    ) -> tuple[TrainModule, Location | None]:
        if model is None:
            if self.model is None:
                raise UsageError("pass a model: this Trainer has not run one yet")
            callback = self.checkpoint_callback
            if ckpt_path is None and callback is not None and callback.best_model_path:
                ckpt_path = callback.best_model_path
            model = self.model
        _check_module(model)
        self.model = model
        return model, ckpt_path

    # ------------------------------------------------------------------ before a session

    def _launch(self) -> None:
        """In a plain script that asked for several devices: become the agent of the ranks."""
        if self._session is not None:
            raise UsageError("this Trainer is running already; make another one for a run inside a run")
        if self._environment.launcher == "none" != read_environment().launcher:
            raise UsageError(
                "this Trainer was made before the ranks were started and takes this one for a process alone: make it "
                "inside the function that is launched"
            )
        if self.world_size > 1 and self._environment.launcher == "none":
            for logger in self.loggers:
                logger.discard()
            launch(self.settings, self._device_count)
        replay.silence(self)

    def _begin(self, model: TrainModule) -> None:
        """A new fit of this Trainer goes on counting where the last one stopped, as users of Lightning expect."""
        _check_module(model)
        self.model = model
        self.resume_report = None
        self._stop_agreed = False
        self.stop_reason = ""
        self.interrupted = False


def _check_module(model: Any) -> None:
    if not isinstance(model, TrainModule):
        raise UsageError(
            f"model must be an instep.TrainModule, got {type(model).__name__}. To port a LightningModule change its "
            "base class and import; a plain nn.Module goes into an attribute of a TrainModule."
        )


def _datamodule(datamodule: DataModule | None, loaders: Any, more: Any) -> tuple[DataModule | None, Any]:
    """A DataModule may be passed in the loaders' place."""
    if isinstance(loaders, DataModule):
        if datamodule is not None:
            raise UsageError("two datamodules were passed; pass one")
        datamodule, loaders = loaders, None
    if datamodule is not None and (loaders is not None or more is not None):
        raise UsageError("both loaders and a datamodule were passed; pass one of them")
    return datamodule, loaders
