"""`TrainModule`: the base class of the models that a Trainer trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.distributed import gather
from instep.distributed.nested import map_leaves
from instep.errors import HookError, UsageError
from instep.strategies.gradients import parameters_of
from instep.trainer.hooks import STEPS, ModuleHooks, is_overridden
from instep.trainer.log import Entry, Options, reduction
from instep.trainer.log_arguments import check_attribute, check_value, items_to_log, ranks_of, text_of
from instep.trainer.optimizers import TrainOptimizer
from instep.types import Location, PathLike
from instep.utils.checks import choice
from instep.utils.hparams import HyperParameters
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from instep.callbacks.base import Trainer

M = TypeVar("M", bound="TrainModule")
_ALGORITHM = choice("norm", "value")


class TrainModule(HyperParameters, ModuleHooks, nn.Module):
    """Base class of a model with its training: an `nn.Module` with methods such as `training_step`.

    Override `training_step` and `configure_optimizers`, and any other hooks that you need. Names and meaning are those
    of a LightningModule.

    Example:
        >>> class Classifier(TrainModule):
        ...     def __init__(self, width: int = 32, lr: float = 1e-3) -> None:
        ...         super().__init__()
        ...         self.save_hyperparameters()
        ...         self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         loss = nn.functional.cross_entropy(self.net(x), y)
        ...         self.log("train_loss", loss, prog_bar=True)
        ...         return loss
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
    """

    automatic_optimization = True
    """False: `training_step` calls `manual_backward` and the optimizers' `step` itself."""

    prepare_data_per_node = True
    """True: `prepare_data` runs on one process of each node. False: it runs on one process of the whole job."""

    strict_loading = True
    """Whether a checkpoint must hold exactly the weights of this module, no more and no fewer."""

    checkpoint_filter: str | Callable[[str], bool] | None = None
    """Which weights a checkpoint holds. None: all. "trainable": all buffers, and the parameters that require gradients
    or did so at an earlier save, such as the adapters of LoRA. A function gets a name in `state_dict()`, and returns
    whether a checkpoint holds this weight. Weights that the checkpoint does not hold must be made by `__init__`, with
    the same values, in every module that loads it. The checkpoint has a digest of these weights, and loading compares
    the digest."""

    example_input_array: Any = None
    """An input of `forward`, for loggers that draw the graph and for exports: a tensor, a tuple or list of arguments,
    or a dict of keyword arguments."""

    __jit_unused_properties__: Sequence[str] = ()
    """Names of the properties that `torch.jit.script` leaves out; the list is set below the class."""

    def __init__(self) -> None:
        super().__init__()
        # These are plain attributes of the instance, since nn.Module's attribute look-up is slow and `log` reads the
        # first one in every step.
        self._log_buffer: list[Entry] | None = None
        self._trainer: Trainer | None = None

    # ---- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of one batch: `training_step(self, batch, batch_idx)`.

        A method defined as `training_step(self, dataloader_iter)` takes one or more batches itself: `batch, batch_idx,
        dataloader_idx = next(dataloader_iter)`. The evaluation steps can do the same, one loader after another.

        Args:
            batch: what the training loader gave, on the module's device.
            batch_idx: its index in the epoch, from 0. May be left out of the signature.

        Returns:
            The loss as a 0-dim tensor, a dict with the loss under "loss", or None to skip the batch (one process only):
            it counts as a batch, and its optimizer step counts as a step, but it gives no gradient.
        """
        raise HookError(f"{type(self).__name__} has no training_step; fit needs one")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one validation batch.

        The arguments are `(batch, batch_idx, dataloader_idx)`; the method may leave out the last one.

        The return value is passed to `on_validation_batch_end`.
        """
        raise HookError(f"{type(self).__name__} has no validation_step; validate needs one")

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one test batch. Arguments and return value are those of `validation_step`."""
        raise HookError(f"{type(self).__name__} has no test_step; test needs one")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict one batch.

        The arguments are those of `validation_step`; by default the module's `forward` is called.
        """
        return self(args[0])

    # ---- tensor, context and pipeline parallelism

    sequence_dim: int | Mapping[Any, int] | None = None
    """Sequence dimension of a batch's tensors, along which context parallelism splits them: one number for all tensors
    that have this dimension, or a number for each key or index of the batch."""

    def parallelize(self, mesh: DeviceMesh) -> Mapping[str, ParallelStyle] | None:
        """Return how tensor parallelism splits the module.

        Args:
            mesh: device mesh with a dimension "tp".

        Returns:
            A dict from names of submodules to styles of `torch.distributed.tensor.parallel`; in a name, `*` stands for
            any one part. Or None, if this method has split submodules itself by
            `parallelize_module(..., mesh["tp"], ...)`, or if the plan of a transformers model should be used.

        Example:
            >>> class Model(TrainModule):
            ...     def parallelize(self, mesh):
            ...         return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        """
        return None

    def pipeline_stages(self) -> Sequence[Any]:
        """Return the parts of `forward` in their order. Pipeline parallelism makes its stages from these parts.

        Returns:
            Submodules, each of which is called with the output of the submodule before it: a tensor or a tuple of
            tensors, whose first dimension is the batch. If a part is more than a call of one submodule, return a tuple
            of a function (a method) and the submodules whose weights it uses. `forward` must be the same as calling all
            parts in turn.

        Example:
            >>> class Model(TrainModule):
            ...     def pipeline_stages(self):
            ...         return [(self.embed, self.tokens, self.positions), *self.blocks, (self.logits, self.head)]
        """
        raise HookError(f"{type(self).__name__} has no pipeline_stages, which a pipeline needs: define it")

    def pipeline_loss(self, output: Any, target: Any) -> Any:
        """Compute the mean loss over samples from the output of `forward`; a pipeline calls this for each micro-batch.

        `training_step` calls it as `self.pipeline_loss(self(inputs), target)`, with any strategy.

        Args:
            output: output of `forward` for some samples of the batch.
            target: the target. Its tensors with one row per sample have only the rows of those samples.

        Returns:
            A 0-dim tensor; or a dict of them with the loss under "loss", each a mean over samples.
        """
        raise HookError(f"{type(self).__name__} has no pipeline_loss, which a pipeline needs: define it")

    # ---- optimization

    def configure_optimizers(self) -> Any:
        """Return the optimizers and schedulers.

        Returns:
            An optimizer; a list of optimizers; two lists, of optimizers and of schedulers; a dict with "optimizer" and,
            if wanted, "lr_scheduler" (a scheduler or a dict with "scheduler", "interval", "frequency", "monitor",
            "strict", "name"); a list of such dicts; or None to train without an optimizer. In automatic optimization,
            several optimizers all step in every accumulation window, with the gradients of the same loss.
        """
        raise HookError(f"{type(self).__name__} has no configure_optimizers; fit needs one")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Any = None) -> None:
        """Step the optimizer. When you override it, call `optimizer_closure()` once, or pass it to `optimizer.step`."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Zero the gradients before backward."""
        optimizer.zero_grad()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backpropagate `loss`, which the Trainer has already weighted and scaled."""
        loss.backward(*args, **kwargs)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients; by default as the Trainer's arguments say."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer through the strategy.

        Args:
            optimizer: the optimizer whose gradients are clipped.
            gradient_clip_val: largest norm or value; None means the Trainer's `gradient_clip_val`. If both are None, or
                if the limit is 0, nothing is clipped.
            gradient_clip_algorithm: "norm" or "value"; None means the Trainer's algorithm.

        Raises:
            UsageError: the Trainer has a `gradient_clip_val`, and an argument differs from the Trainer's setting.
            SettingError: the algorithm is unknown.
        """
        asked = self.trainer.settings
        given = {"gradient_clip_val": gradient_clip_val, "gradient_clip_algorithm": gradient_clip_algorithm}
        for name, value in given.items():
            there = getattr(asked, name)
            if value is not None and asked.gradient_clip_val is not None and value != there:
                raise UsageError(
                    f"You have set `Trainer({name}={there!r})` and have passed `clip_gradients({name}={value!r})`. "
                    "Please use only one of them."
                )
        algorithm = asked.gradient_clip_algorithm
        if gradient_clip_algorithm is not None:
            algorithm = _ALGORITHM("gradient_clip_algorithm", gradient_clip_algorithm)
        limit = asked.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        if limit is not None and limit > 0:
            gradients, bare = self.trainer.strategy.gradients, _bare(optimizer)
            gradients.unscale(bare)  # in manual optimization the gradients are not yet unscaled
            gradients.clip(parameters_of(bare), limit, algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step one scheduler; `metric` is the monitored value, or None."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list if there are several, for manual optimization.

        Args:
            use_pl_optimizer: whether to return the wrapped optimizers. False returns the original optimizers, whose
                `step` the Trainer does not see.
        """
        wrapped = self.trainer._wrapped_optimizers if use_pl_optimizer else self.trainer.optimizers
        return wrapped[0] if len(wrapped) == 1 else list(wrapped)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of schedulers, or None, for manual optimization."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backpropagate in manual optimization, with the precision's scaling and the strategy's gradient reduction."""
        if self.automatic_optimization:
            raise UsageError("manual_backward is for manual optimization: set self.automatic_optimization = False")
        self.trainer._manual_backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Restrict gradients to this optimizer's parameters, until `untoggle_optimizer` is called."""
        # end an earlier `toggle_optimizer` first: the parameters that it froze must not stay frozen
        self.untoggle_optimizer(optimizer)
        mine = set(parameters_of(_bare(optimizer)))
        every = {p for other in self.trainer.optimizers for p in parameters_of(other)}
        self._toggled: dict[Tensor, bool] = {p: p.requires_grad for p in every}
        for p in every - mine:
            p.requires_grad = False

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo `toggle_optimizer`."""
        for p, requires_grad in getattr(self, "_toggled", {}).items():
            p.requires_grad = requires_grad
        self._toggled = {}

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Call `toggle_optimizer` at the start of a `with` block, and `untoggle_optimizer` at its end."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    # ---- logging

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        sync_dist: bool | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
        sync_dist_group: Any = None,
        metric_attribute: str | None = None,
    ) -> None:
        """Log one value. The value is copied and stays on its device, so the host does not wait for the device.

        Args:
            name: name of the metric. A part before a "/" forms a group in dashboards.
            value: a number, a tensor with one element, or a metric object with `compute()`.
            prog_bar: whether to show the value in the progress bar.
            logger: whether to send the value to the loggers; default True.
            on_step: whether to log the value of the step, every `log_every_n_steps` steps. Default: True in the
                training step and in the batch hooks of training.
            on_epoch: whether to log the value reduced over the epoch. Default: True in evaluation and in epoch hooks.
            reduce_fx: "mean" (weighted by batch size), "sum", "min" or "max", over the epoch's batches and ranks; or
                torch's or Python's function of that name.
            sync_dist: None (default): epoch values reduce exactly over ranks, step values stay local. True: step values
                are averaged over ranks too, when they are handed over. False: nothing is reduced.
            add_dataloader_idx: whether to append the loader's index to the name if there are several loaders.
            batch_size: number of samples that the value stands for, which is its weight in a mean; by default known
                from the sampler or the batch.
            rank_zero_only: whether only the main process makes this call. If so, nothing is reduced over ranks, and a
                metric object computes its value from the counts of this process alone.
            sync_dist_group: a process group of torch; values are reduced over its ranks only. Metric objects use their
                own `process_group`.
            metric_attribute: name of the metric object's attribute in this module; by default the attribute is searched
                for.

        Raises:
            LogError: a wrong value. Also a hook in which nothing can be logged, or contradicting arguments for one
                name; these errors are raised when the loop collects the value, right after the step or hook.
        """
        buffer = self._log_buffer
        if buffer is None:
            self._nothing_logs(name)
            return
        if type(name) is not str:
            name = text_of(name)
        if isinstance(value, Tensor):
            if value.ndim:
                check_value(name, value)
                value = value.squeeze()
            value = value.detach().clone()
        elif type(value) is not float and type(value) is not int:
            check_value(name, value)
        if reduce_fx != "mean":
            reduce_fx = reduction(name, reduce_fx)
        if metric_attribute is not None:
            check_attribute(name, value, metric_attribute, self)
        group = None if sync_dist_group is None else ranks_of(name, sync_dist_group)
        buffer.append(
            (
                name,
                value,
                Options(
                    prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only, group
                ),
                batch_size,
            )
        )

    def log_dict(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        """Call `log` for each item of a dict, with the same keyword arguments."""
        for name, value in items_to_log(dictionary):
            self.log(name, value, **kwargs)

    def _log_into(self, buffer: list[Entry] | None) -> None:
        """Set the list into which `log` writes, also for TrainModules within this one.

        With None, `log` warns or raises an error.
        """
        for module in self.modules():
            if isinstance(module, TrainModule):
                module._log_buffer = buffer

    def _nothing_logs(self, name: str) -> None:
        if self._trainer is None or self._trainer._ctx is None:
            warn_user(f"self.log({name!r}) outside a Trainer's run is not recorded")
        else:
            raise UsageError(
                f"self.log({name!r}) was called where nothing can be logged (predict, or a hook outside the stages). "
                "Log in a step, a batch hook, or an *_epoch_start / *_epoch_end hook."
            )

    # ---- the Trainer

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs, or last ran, this module."""
        if self._trainer is None:
            raise UsageError(
                f"{type(self).__name__} is not attached to a `Trainer`: it gets one when a run begins, after its "
                "__init__. Use self.trainer and self.log in hooks, such as setup or training_step."
            )
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        for module in self.modules():
            if isinstance(module, TrainModule):  # `modules` includes TrainModules within this one, such as a backbone
                module._trainer = trainer

    @property
    def current_epoch(self) -> int:
        """Number of completed epochs, which is the index of the running one, from 0."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer steps done."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes of the run; 0 outside of a run."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process among the processes on its machine; 0 outside of a run."""
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """The Trainer's loggers; an empty list outside of a run."""
        return [] if self._trainer is None else self._trainer.loggers

    @property
    def batch_weight(self) -> float:
        """Factor by which to multiply this batch's mean loss in manual optimization: n_rank * world / n_global.

        Here n_rank and n_global are the numbers of samples on this rank and on all ranks together, and world is the
        number of ranks. With this factor, the average over ranks is the mean over all samples. It is 1.0 except at the
        end of an epoch, where ranks may have different numbers of samples.
        """
        return self.trainer._batch_weight()

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def on_gpu(self) -> bool:
        """Whether the first parameter is on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Mesh of the devices that a strategy shards the module over; None without a mesh or outside of a run."""
        return None if self._trainer is None else getattr(self._trainer.strategy, "mesh", None)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process only, above the progress bar."""
        if self._trainer is None:
            print(*args, **kwargs)  # noqa: T201  it is a print
        else:
            self._trainer.print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather tensors of all ranks, stacked in a new first dimension. With one process, return `data` unchanged.

        Collective.

        Args:
            data: a tensor, or nested tensors, with the same shapes on all ranks.
            group: a process group, all of whose ranks must call this method; None for all processes.
            sync_grads: whether gradients flow back to the ranks that the tensors came from.
        """
        if self.trainer.world_size == 1:
            return data
        if sync_grads or group is not None:
            from torch.distributed.nn.functional import all_gather  # imported late: slow to import

            group = group or torch.distributed.group.WORLD
            with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
                return map_leaves(lambda t: torch.stack(all_gather(t, group)) if isinstance(t, Tensor) else t, data)
        return map_leaves(lambda t: gather(t.unsqueeze(0)) if isinstance(t, Tensor) else t, data)

    # ---- weights

    def freeze(self: M) -> M:
        """Stop gradients of all parameters and go to eval mode.

        Returns:
            The module.
        """
        return self.requires_grad_(False).eval()

    def unfreeze(self: M) -> M:
        """Undo `freeze`, and return the module."""
        self.requires_grad_(True)
        return self.train()

    @classmethod
    def load_from_checkpoint(
        cls: type[M],
        checkpoint_path: Location,
        map_location: Any = None,
        hparams_file: PathLike | None = None,
        strict: bool | None = None,
        which_weights: str | None = None,
        **kwargs: Any,
    ) -> M:
        """Make a module from a checkpoint: pass the saved hyperparameters to `__init__`, then load the weights.

        Args:
            checkpoint_path: a checkpoint folder.
            map_location: device to move the module to; also in the other forms that `torch.load` takes.
            hparams_file: a JSON or YAML file of hyperparameters that replace the saved ones.
            strict: whether names must match exactly; default the module's `strict_loading`.
            which_weights: "live" or "averaged", for a run with WeightAveraging; None for the checkpoint's plain
                weights.
            **kwargs: arguments of `__init__`, which take precedence over the saved ones. Pass here what a checkpoint
                does not hold: an argument that `save_hyperparameters` ignored, a class or function that the argument's
                type does not allow, or an object that no checkpoint can make, such as a pydantic model or a container
                of OmegaConf.

        Raises:
            CheckpointError: the folder is not a checkpoint, does not verify, lacks an argument, or names a class or
                function that is not allowed.
        """
        from instep.trainer.weights import load_module  # imported late: instep.checkpoint is loaded only when used

        return load_module(cls, checkpoint_path, map_location, hparams_file, strict, kwargs, which_weights)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile `forward` and the step methods in place, with the arguments of `torch.compile`.

        Call it before `fit`. Logging stays outside the compiled graph. `trainer.fit(torch.compile(module))` does the
        same.
        """
        self.compile_by(lambda method: torch.compile(method, *args, **kwargs))

    def compile_by(self, compiler: Callable[[Any], Any]) -> None:
        """Compile `forward` and the step methods in place, except those that are compiled already.

        Args:
            compiler: function that takes a method and returns it compiled.
        """
        if self._compiled_call_impl is None:
            self._compiled_call_impl = compiler(self._call_impl)
        for name in STEPS:
            step = getattr(self, name)
            if is_overridden(self, name, TrainModule) and not hasattr(step, "_torchdynamo_orig_callable"):
                self.__dict__[name] = compiler(step)

    # ---- folders and repositories of pretrained modules

    def save_pretrained(
        self,
        save_directory: PathLike,
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        max_shard_size: int | str = "5GB",
        **push_to_hub_kwargs: Any,
    ) -> Path:
        """Write the weights as safetensors, and the hyperparameters as `config.json`. Collective: on all ranks.

        Args:
            save_directory: the folder, which is created if necessary. A model in it is replaced, file by file.
            push_to_hub: whether to send the model to the Hugging Face hub too, by `push_to_hub`.
            repo_id: repository on the hub; default: the folder's name.
            max_shard_size: largest size of a file in bytes, or a text such as "5GB". A larger model is split into
                several files with an index.
            **push_to_hub_kwargs: for `push_to_hub`.

        Returns:
            The folder.

        Raises:
            UnsavableStateError: a hyperparameter is no plain value.
        """
        from instep.pretrained import save_pretrained  # imported late: instep.checkpoint is loaded only when used

        return save_pretrained(self, save_directory, max_shard_size, push_to_hub, repo_id, push_to_hub_kwargs)

    def push_to_hub(self, repo_id: str, *, max_shard_size: int | str = "5GB", **push_to_hub_kwargs: Any) -> str:
        """Send the weights and hyperparameters to the Hugging Face hub, in one commit. Collective: on all ranks.

        Args:
            repo_id: repository such as "user/model", which is created if necessary.
            max_shard_size: as in `save_pretrained`.
            **push_to_hub_kwargs: `commit_message`, `private`, `token`, `branch` (which must exist), `create_pr`, and
                patterns for `huggingface_hub.HfApi.upload_folder`.

        Returns:
            The URL of the commit, or of the pull request.

        Raises:
            MissingPackageError: huggingface_hub is not installed.
            CheckpointError: the hub refuses, or cannot be reached.
        """
        from instep.pretrained import push_pretrained  # imported late: instep.checkpoint is loaded only when used

        return push_pretrained(self, repo_id, max_shard_size, **push_to_hub_kwargs)

    @classmethod
    def from_pretrained(
        cls: type[M],
        pretrained_model_name_or_path: PathLike,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: PathLike | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
        map_location: Any = None,
        strict: bool | None = None,
        **model_kwargs: Any,
    ) -> M:
        """Make a module from a folder that `save_pretrained` wrote, or from a repository on the Hugging Face hub.

        `__init__` gets the hyperparameters of `config.json`, then the weights are loaded. Only JSON and safetensors
        files are read, so a repository of an unknown author cannot run code. A checkpoint folder of a run can be loaded
        as well.

        Args:
            pretrained_model_name_or_path: the folder; if there is no such folder, the repository "user/model".
            force_download: download files again that the hub's cache already has.
            token: access token of the hub; None: the one that `hf auth login` has saved, or `HF_TOKEN`.
            cache_dir: folder for downloads; default: the hub's own.
            local_files_only: use only files in the cache, without a network.
            revision: branch, tag or commit of the repository.
            map_location: device to move the module to.
            strict: whether names must match exactly; default the module's `strict_loading`.
            **model_kwargs: arguments of `__init__`, which take precedence over the saved ones.

        Returns:
            The module, in training mode as `__init__` made it.

        Raises:
            CheckpointNotFoundError: there is neither such a folder nor such a repository, or no safetensors in it.
            CorruptCheckpointError: a file is damaged.
            CheckpointError: the model does not fit the class, or the hub refuses or cannot be reached.
            MissingPackageError: the model is not on this machine, and huggingface_hub is not installed.
        """
        from instep.trainer.weights import load_pretrained  # imported late: instep.checkpoint is loaded only when used

        return load_pretrained(
            cls,
            pretrained_model_name_or_path,
            map_location,
            strict,
            model_kwargs,
            force_download=force_download,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            revision=revision,
        )

    # ---- files for programs without instep

    def to_onnx(self, file_path: Location | BytesIO | None = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Write `forward` in ONNX format, in eval mode. On several ranks all call it, and the main process writes.

        Args:
            file_path: path of the file, or a buffer; None writes nothing. Large weights are written to a second file
                beside it.
            input_sample: input of `forward`, in any form that `example_input_array` may have. Default:
                `example_input_array`.
            **kwargs: for `torch.onnx.export`.

        Returns:
            What `torch.onnx.export` returns: an `ONNXProgram`, or None with `dynamo=False`.

        Raises:
            MissingPackageError: onnx or onnxscript is not installed.
            SettingError: there is no input.
            UsageError: the module is sharded over processes.
        """
        from instep import export  # imported late: only an export needs it

        return export.to_onnx(self, file_path, input_sample, **kwargs)

    def to_exported_program(
        self, file_path: Location | BytesIO | None = None, input_sample: Any = None, **kwargs: Any
    ) -> torch.export.ExportedProgram:
        """Export `forward` by `torch.export`, in eval mode. On several ranks all call it, and the main process writes.

        Args:
            file_path: path of the file (".pt2"), for `torch.export.load`; None writes nothing.
            input_sample: input of `forward`, in any form that `example_input_array` may have. Default:
                `example_input_array`.
            **kwargs: for `torch.export.export`, such as `dynamic_shapes`.

        Returns:
            The program. `program.module()` is called with the arguments of `forward`.

        Raises:
            SettingError, UsageError: as in `to_onnx`.
        """
        from instep import export  # imported late: only an export needs it

        return export.to_exported_program(self, file_path, input_sample, **kwargs)

    def to_torchscript(
        self, file_path: Location | None = None, method: str = "script", example_inputs: Any = None, **kwargs: Any
    ) -> Any:
        """Make TorchScript of `forward`, in eval mode. Torch deprecates it, and warns: see `to_exported_program`.

        Args:
            file_path: path of the file, for `torch.jit.load`; None writes nothing.
            method: "script" or "trace".
            example_inputs: inputs to trace with, in any form that `example_input_array` may have. Default:
                `example_input_array`.
            **kwargs: for `torch.jit.script` or `torch.jit.trace`.

        Returns:
            The `torch.jit.ScriptModule`.

        Raises:
            SettingError: the method is neither "script" nor "trace", or there is no input to trace with.
            UsageError: the module is sharded over processes.
        """
        from instep import export  # imported late: only an export needs it

        return export.to_torchscript(self, file_path, method, example_inputs, **kwargs)

    def to_tensorrt(
        self,
        file_path: Location | BytesIO | None = None,
        input_sample: Any = None,
        ir: Literal["default", "dynamo", "ts"] = "default",
        output_format: Literal["exported_program", "torchscript"] = "exported_program",
        retrace: bool = False,
        default_device: str | torch.device = "cuda",
        **compile_kwargs: Any,
    ) -> Any:
        """Compile `forward` by torch_tensorrt, in eval mode.

        Args:
            file_path: path of the file; None writes nothing.
            input_sample: input of `forward`, in any form that `example_input_array` may have. Default:
                `example_input_array`.
            ir: intermediate representation that torch_tensorrt compiles from; "ts" is TorchScript.
            output_format: format of the file; with `ir="ts"` it must be "torchscript".
            retrace: for `torch_tensorrt.save`.
            default_device: CUDA device to compile on where the module is on another kind of device.
            **compile_kwargs: for `torch_tensorrt.compile`.

        Raises:
            MissingPackageError: torch_tensorrt is not installed.
            SettingError: there is no input, or the output format does not fit.
            UsageError: there is no CUDA device.
        """
        from instep import export  # imported late: only an export needs it

        return export.to_tensorrt(
            self, file_path, input_sample, ir, output_format, retrace, default_device, **compile_kwargs
        )

    def __getstate__(self) -> Any:
        # Copies and saved modules must not carry the Trainer, nor steps compiled for another object.
        state = super().__getstate__()  # nn.Module's `__getstate__` leaves the compiled forward out
        left_out = {"_trainer": None, "_log_buffer": None}
        return {key: left_out.get(key, value) for key, value in state.items() if key not in STEPS}


TrainModule.__jit_unused_properties__ = [
    name for name in dir(TrainModule) if isinstance(getattr(TrainModule, name), property)
]
# `torch.jit.script` would read the annotations in the class as TorchScript types, and fail. So leave only one that it
# understands: with none at all, it would read those of a base class.
TrainModule.__annotations__ = {"training": bool}


def _bare(optimizer: Any) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, TrainOptimizer) else optimizer


def accepted_arguments(step: Any, offered: tuple[str, ...], needed_only: int = 0) -> int:
    """Count the offered positional arguments that a step method takes.

    Args:
        step: the bound method.
        offered: names of the offered arguments in order, such as ("batch", "batch_idx", "dataloader_idx").
        needed_only: how many of the last offered arguments are passed only to parameters that have no default.
    """
    from instep.utils.porting import STEP_ARGUMENTS  # imported late: only a run needs these tables

    parameters = list(inspect.signature(step).parameters.values())
    for p in parameters:
        if p.name in STEP_ARGUMENTS and p.name not in offered and p.default is p.empty:
            name = getattr(step, "__qualname__", step)
            raise HookError(f"{name} has an argument {p.name}, which nothing passes: {STEP_ARGUMENTS[p.name]}")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes = len(offered) if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
    if not takes:
        raise HookError(f"{getattr(step, '__qualname__', step)} takes no batch; its first argument must be the batch")
    needs = sum(p.default is p.empty for p in positional)
    return max(min(takes, len(offered) - needed_only), min(needs, len(offered)))
