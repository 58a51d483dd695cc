"""`DeepSpeedStrategy`: makes a DeepSpeed engine for a module, runs its steps, and saves and loads its state."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint.tensors import Shard
from instep.distributed import convert_to_fp32
from instep.errors import CheckpointError, SettingError, UsageError, one_of
from instep.state import GradientState, PartialState
from instep.strategies.base import Strategy, shapes_of
from instep.strategies.deepspeed import partitions
from instep.strategies.deepspeed.config import (
    Config,
    check_accumulation,
    check_config,
    compute_kind,
    fill,
    make_config,
    read_config,
)
from instep.strategies.deepspeed.generation import sync_generation
from instep.strategies.deepspeed.loading import load_deepspeed, quiet_imports
from instep.strategies.deepspeed.optimizers import check_optimizer, counts_in_ints, kind_of, make_optimizer
from instep.strategies.deepspeed.partitions import Partition, is_cut, shape_of, take_run
from instep.strategies.gradients import Gradients, parameters_of
from instep.strategies.materialize import broadcast_weights, materialize_module, refuse_dispatched
from instep.strategies.precision import Precision
from instep.strategies.step_forward import StepForward
from instep.types import PathLike
from instep.utils.imports import check_installed
from instep.utils.optimizer_state import match_state, names_of, whole

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _EnginePrecision(Precision):
    """A precision whose casts and gradient scaling are done by DeepSpeed's engine.

    Args:
        asked: precision of the run.
        dtype: dtype of weights and floating-point inputs.
        zero: function that returns the engine's optimizer, or None if there is none yet.
    """

    def __init__(self, asked: Precision, dtype: torch.dtype | None, zero: Callable[[], Any]) -> None:
        self.__dict__.update(vars(asked.without(autocast=True, scaler=True)))
        self.dtype = dtype
        self._zero = zero

    def convert_module(self, module: nn.Module) -> None:
        """Do nothing, since the engine casts the parameters and keeps float32 copies of them."""

    def state_dict(self) -> dict[str, Any]:
        return partitions.scaler_state(self._zero())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        partitions.load_scaler_state(self._zero(), state_dict)


class DeepSpeedGradients(Gradients):
    """Gradients that DeepSpeed's engine holds, scales and clips; at stage 0 they are `parameter.grad`."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.open = False
        """Whether there are gradients that no optimizer step has used yet."""
        self._factor = 1.0  # factor for the gradients in the next step
        # The engine's configured limit for the norm, while `clip` has set another one for the next step.
        self._unclipped: float | None = None

    def close(self) -> None:
        """Record that there are no gradients for a step."""
        self.open, self._factor = False, 1.0

    def scale(self, loss: Tensor) -> Tensor:
        self.open = True
        engine = self.strategy._engine
        # Multiply by the number of micro-batches, since `engine.scale` divides by it.
        return engine.scale(loss * engine.gradient_accumulation_steps())

    def clip(
        self, parameters: Sequence[Tensor], value: float, algorithm: str = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        if self.strategy.stage == 0:
            return super().clip(parameters, value, algorithm, norm_type)
        if algorithm != "norm":
            raise SettingError(
                "gradient_clip_algorithm='value': DeepSpeed clips by norm, since no process holds all gradients. Use "
                "'norm', or strategy='fsdp'.",
                field="gradient_clip_algorithm",
                got=algorithm,
            )
        said = self.strategy.config.get("gradient_clipping", "auto")
        if said not in ("auto", value):
            raise SettingError(
                f"DeepSpeed's config has gradient_clipping={said}, and the run clips at {value}. Make it 'auto' there.",
                field="gradient_clip_val",
                got=value,
            )
        zero = self.strategy._zero
        if self._unclipped is None:
            self._unclipped = float(zero.clip_grad)
        zero.clip_grad = float(value)  # DeepSpeed's step computes the norm and clips at this value
        return None

    def multiply(self, optimizer: Optimizer, factor: Any) -> None:
        if self.strategy.stage == 0:
            super().multiply(optimizer, factor)
        else:
            self._factor *= factor

    def find_nonfinite(self, tensors: Sequence[Tensor], found: Tensor) -> None:
        # At stage 0, `tensors` has all gradients. With fp16, the loss scaler checks them for overflow.
        strategy = self.strategy
        skip = not strategy.stage or strategy._kind == "fp16"
        super().find_nonfinite([*tensors, *([] if skip else partitions.held_gradients(strategy._zero))], found)

    def forget(self, optimizer: Optimizer) -> None:
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete gradients that were not used in a step. This method replaces the optimizer's `zero_grad`."""
        if self.open:
            self.close()
            strategy = self.strategy
            partitions.drop_gradients(strategy._zero) if strategy.stage else strategy._engine.zero_grad()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        if closure is not None:
            closure()
        engine, zero, factor = self.strategy._engine, self.strategy._zero, self._factor
        if factor != 1.0:  # the factor is put into the loss scale, by which DeepSpeed's step divides
            zero.external_loss_scale, zero.custom_loss_scaler = zero.loss_scale / factor, True
        try:
            engine.step()
        finally:
            if factor != 1.0:
                zero.custom_loss_scaler = False
            if self._unclipped is not None:  # restore the configured limit, since `clip` is not called in every step
                zero.clip_grad, self._unclipped = self._unclipped, None
        self.step_was_skipped = not engine.was_step_applied()
        self.close()


class EngineForward(nn.Module):
    """Module for a handwritten loop, whose forward calls the user's module through a DeepSpeed engine.

    Args:
        module: the user's module.
        call: function that calls a method of the module, given by its name, through the engine.
        convert: function that casts floating-point inputs to the engine's dtype; None if not needed.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any], convert: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.module = module
        self._call, self._convert = call, convert

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._convert is not None:
            args, kwargs = self._convert(args), self._convert(kwargs)
        return convert_to_fp32(self._call("__call__", *args, **kwargs))


class DeepSpeedStrategy(Strategy):
    """ZeRO by DeepSpeed: optimizer state (stage 1), gradients (2) and weights (3) are sharded over processes.

    The precision is that of the run. With bf16-mixed and 16-mixed (and with bf16-true and 16-true, which have the same
    effect here), weights have 16 bits, and the optimizer steps float32 copies of them. The engine clips gradients by
    norm. The module must use automatic optimization and one optimizer. Learning-rate schedulers come from
    `configure_optimizers`, not from DeepSpeed's configuration. An Accelerator can train one model, which must be
    prepared in the same call as its optimizer.

    Args:
        stage: ZeRO stage, 0 to 3; 2 by default.
        offload_optimizer: where to keep optimizer state and float32 weights: "cpu" for CPU memory, or "nvme" for a
            disk. None: on the device.
        offload_parameters: where to keep the weights, with stage 3: "cpu", "nvme" or None.
        nvme_path: folder on a local disk, for "nvme".
        config: DeepSpeed's own configuration as a dict or a JSON file, in place of the arguments above. "auto" values
            are filled in.
        configs: several configurations by name. `use` chooses one, and `select` changes the choice between two runs.
        use: name of the configuration in `configs` to use; by default the first one.
        options: other entries of `zero_optimization`, such as `reduce_bucket_size`.

    Raises:
        SettingError: an entry of the configuration is not supported, or contradicts the run.
        MissingPackageError: deepspeed is not installed.

    Example:
        >>> DeepSpeedStrategy(stage=3, offload_optimizer="cpu").stage  # doctest: +SKIP
        3

    Source:
        Rajbhandari et al.: ZeRO, SC 2020 (https://arxiv.org/abs/1910.02054), as built in DeepSpeed.
    """

    name = "deepspeed"
    multi_process = True
    wraps_with_optimizer = True
    takes_new_groups = False
    steps_can_be_undone = False  # the engine keeps its own weights and states
    gradients_class = DeepSpeedGradients
    gradients: DeepSpeedGradients  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        stage: int | None = None,
        *,
        offload_optimizer: str | None = None,
        offload_parameters: str | None = None,
        nvme_path: PathLike | None = None,
        config: Mapping[str, Any] | PathLike | None = None,
        configs: Mapping[str, Mapping[str, Any] | PathLike] | None = None,
        use: str | None = None,
        **options: Any,
    ) -> None:
        check_installed("deepspeed", extra="deepspeed", purpose="DeepSpeedStrategy")
        self._parts: dict[Tensor, Partition] = {}
        # Float32 values of weights that were loaded before the engine was made. The parameters have only 16 bits.
        self._exact: dict[Tensor, Tensor] = {}
        self._groups: list[list[str]] = []  # names of the parameters in each parameter group
        self._shapes: dict[str, list[int]] = {}  # whole shape of each parameter of the optimizer
        arguments = {"stage": stage, "offload_optimizer": offload_optimizer, "offload_parameters": offload_parameters}
        given = [key for key, value in {**arguments, "nvme_path": nvme_path, **options}.items() if value is not None]
        if (config is not None or configs is not None) and given:
            raise SettingError(
                f"{', '.join(given)} and a config of DeepSpeed's were given; say it in the config, under "
                "zero_optimization.",
                field=given[0],
            )
        if config is not None and configs is not None:
            raise SettingError("config and configs were given; give one of them", field="configs")
        self._configs = None if configs is None else {key: read_config(config) for key, config in configs.items()}
        if self._configs is not None:
            for entry in self._configs.values():
                check_config(entry)
            self.select(next(iter(self._configs)) if use is None else use)
        else:
            if use is not None:
                raise SettingError("use= chooses one of configs=, which were not given", field="use", got=use)
            made = make_config(2 if stage is None else stage, offload_optimizer, offload_parameters, nvme_path, options)
            self._set_config(made if config is None else read_config(config))
        self._engine: Any = None
        self._end_sync: Callable[[], None] | None = None  # function that undoes `sync_generation`
        self._told = 0  # number of micro-batches per step that the engine was last given
        self._optimizer: Optimizer | None = None

    def select(self, name: str) -> None:
        """Choose one of `configs` by its name, for the next run.

        Raises:
            SettingError: there is no configuration of that name.
        """
        if self._configs is None or name not in self._configs:
            raise one_of("use", name, self._configs or ())
        self._set_config(self._configs[name])

    def _set_config(self, config: Config) -> None:
        self.stage = check_config(config)
        self.config = config
        self.sharded = self.stage > 0
        self.whole_parameters = self.stage == 0
        # In inference mode, stage 3 would gather weights as inference tensors, which cannot be trained later.
        self.inference_mode = self.stage < 3

    # ---- set-up and tear-down

    def connect(self, device: torch.device, precision: Precision) -> None:
        super().connect(device, precision)
        self._kind = compute_kind(self.config, precision, self.stage)
        dtype = None if self.stage == 0 else _DTYPES.get(self._kind or "")
        # With bf16, stage 0 would accumulate gradients in bfloat16. So autocast over float32 weights is used instead.
        self._context = precision.context() if self.stage == 0 and self._kind == "bf16" else None
        self.precision = _EnginePrecision(precision, dtype, lambda: None if self._engine is None else self._zero)
        if not dist.is_initialized():  # the engine needs a process group even with one process
            dist.init_process_group(
                "gloo" if device.type == "cpu" else None, store=dist.HashStore(), rank=0, world_size=1
            )
        self._deepspeed = load_deepspeed(device)

    @property
    def _zero(self) -> Any:
        """DeepSpeed's wrapper of the user's optimizer."""
        return self._engine.optimizer

    def model_context(self) -> AbstractContextManager[Any]:
        return self._init(None) if self.stage == 3 else nullcontext()

    @contextmanager
    def _init(self, module: nn.Module | None) -> Iterator[None]:
        """Enter DeepSpeed's context in which parameters are sharded as soon as they are made."""
        with _local_rank(), self._deepspeed.zero.Init(config_dict_or_path=self._filled(2**31), module=module):
            yield

    def _filled(self, elements: int) -> Config:
        return fill(
            self.config,
            kind=None if self.stage == 0 else self._kind,
            device_type=self.device.type,
            accumulate=GradientState().num_steps,
            elements=elements,
        )

    def prepare_module(self, module: nn.Module) -> None:
        refuse_dispatched(self.name, module)
        self.module = module
        self._exchanged = materialize_module(module, self.device)
        if self.stage != 3:
            module.to(self.device)
            return
        fresh = {p: p.detach() for p in module.parameters() if not is_cut(p)}
        if fresh:
            for p in fresh:
                p.data = p.data.to(self.device)
            broadcast_weights(module, skip=is_cut)
            fresh = {p: p.detach() for p in fresh}
            if self.precision.dtype is not None:
                partitions.cast_parameters(module, self.precision.dtype)
            with _local_rank():
                self._deepspeed.zero.Init(module=module, config_dict_or_path=self._filled(_elements(fresh)))
            if self.precision.dtype is not None:
                for p, value in fresh.items():
                    part = partitions.cut_part(p)
                    self._exact[p] = take_run(value, part.begin, part.count).float().clone()
        for _, buffer in module.named_buffers():
            buffer.data = buffer.data.to(self.device)

    def prepare_training(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        before = self._parts
        self._release()
        if not optimizers:
            self._set_up_evaluation(module)
            return
        if not getattr(module, "automatic_optimization", True):
            raise SettingError(
                f"{type(module).__name__} optimizes manually, which DeepSpeed's engine does not take: it steps what "
                "its own backward has reduced. Use strategy='fsdp' or 'ddp'.",
                field="strategy",
                got=self.name,
            )
        if len(optimizers) > 1:
            raise SettingError(
                f"DeepSpeed's engine takes one optimizer, and there are {len(optimizers)}. Make one with several "
                "parameter groups, or use strategy='fsdp'.",
                field="strategy",
                got=self.name,
            )
        optimizer = optimizers[0]
        self._trained = module
        check_optimizer(optimizer, self.config, self.stage)
        names = names_of(module, [optimizer])
        self._groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        self._shapes = {names[p]: list(shape_of(p)) for p in parameters_of(optimizer)}
        exact: dict[Any, Tensor] = self._exact
        self._exact = {}
        if self.stage != 3:
            broadcast_weights(module, skip=is_cut)
            if self.precision.dtype is not None:
                # Keep the float32 values of weights, since the engine casts the parameters to 16 bits.
                exact = {p: p.detach() for p in module.parameters() if p.dtype == torch.float32}
        self._engine = self._make_engine(module, optimizer)
        # By default the engine counts batches to find the last one of a step; from now on `no_sync` decides this.
        self._engine.set_gradient_accumulation_boundary(True)
        self._optimizer = optimizer
        # torch's zero_grad, which the loop calls before accumulating gradients, would free gradient memory that the
        # engine needs for offloading.
        optimizer.zero_grad = self.gradients.zero_grad  # type: ignore[method-assign]
        self._parts = partitions.find_parts(self._zero, optimizer) if self.stage else {}
        for p, part in self._parts.items():
            old = before.get(p)
            if old is not None and (old.begin, old.count) == (part.begin, part.count) and old.fetch is None:
                if _still(p, part, old.weights()):  # the user has not changed the weights since the previous fit
                    # Use the float32 weights of the previous fit, which are not rounded to 16 bits.
                    part.set_weights(old.weights())
            elif p in exact:
                value = exact[p]
                part.set_weights(value if self.stage == 3 else take_run(value, part.begin, part.count))

    def _make_engine(self, module: nn.Module, optimizer: Optimizer | None) -> Any:
        elements = _elements(module.parameters())
        config = self._filled(elements)
        if optimizer is not None:
            config.setdefault("zero_allow_untested_optimizer", True)  # `check_optimizer` has checked the optimizer
        # Ignore warnings about deprecated names of torch's collectives that DeepSpeed uses.
        warnings.filterwarnings(
            "ignore", "`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning
        )
        try:
            with _local_rank(), quiet_imports():
                engine, *_ = self._deepspeed.initialize(
                    model=StepForward(module, self._context), optimizer=optimizer, config=config
                )
        except (AssertionError, ValueError, NotImplementedError) as error:
            raise SettingError(f"DeepSpeed refused its config: {error}", field="config", got=config) from error
        made = getattr(engine.optimizer, "optimizer", optimizer)
        if optimizer is not None and made is not optimizer:
            raise SettingError(
                f"DeepSpeed has made its own {type(made).__name__} in place of the one from configure_optimizers, so "
                "that schedules would have no effect. Use another optimizer.",
                field="strategy",
                got=self.name,
            )
        if self.stage == 3:
            self._end_sync = sync_generation(module)
        return engine

    def _set_up_evaluation(self, module: nn.Module) -> None:
        if self.stage == 3:
            self._engine = self._make_engine(module, None)
            return
        if self.precision.dtype is not None:
            partitions.cast_parameters(module, self.precision.dtype)
        broadcast_weights(module, skip=is_cut)

    def wrap(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        own = set(module.parameters())
        if not optimizers or not all(p in own for optimizer in optimizers for p in parameters_of(optimizer)):
            raise self._refused(
                "makes its engine of a model and a fresh optimizer of its parameters: prepare both in one call, "
                "`model, optimizer = accelerator.prepare(model, optimizer)`. For a model that is not trained: "
                "`accelerator.prepare_model(model, evaluation_mode=True)`."
            )
        self.prepare_training(module, optimizers)
        engine = self._engine

        def call(name: str, *args: Any, **kwargs: Any) -> Any:
            self._take_accumulation(engine)
            return engine(name, *args, **kwargs)

        return EngineForward(module, call, self.precision.input_converter())

    def wrap_evaluated(self, module: nn.Module) -> nn.Module:
        self.prepare_training(module, ())
        convert = self.precision.input_converter()
        return module if convert is None else EngineForward(module, lambda _, *a, **k: module(*a, **k), convert)

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        return wrapped.module if isinstance(wrapped, EngineForward) else wrapped

    def parameters(self) -> Iterable[nn.Parameter]:
        flat: list[Any] = [] if self._optimizer is None else parameters_of(self._optimizer)
        return [*self.module.parameters(), *flat]

    def teardown(self) -> None:
        self._release()

    def _release(self) -> None:
        """Release the engine; the state of the module and the optimizer can still be saved."""
        engine, self._engine = self._engine, None
        self._told = 0
        if self._end_sync is not None:
            self._end_sync = self._end_sync()
        if self._optimizer is not None:
            self._optimizer.__dict__.pop("zero_grad", None)
        if engine is not None:
            engine.destroy()
            engine.module_forward_pre_hook.remove()
            engine.module_forward_post_hook.remove()
            self.gradients.close()

    # ---- the step

    def step_function(self, name: str) -> Callable[..., Any]:
        engine = self._engine
        if engine is None or (name != "training_step" and self.stage < 3):
            return super().step_function(name)
        if name == "training_step":
            self._take_accumulation(engine)
        return lambda *args: engine(name, *args)

    def _take_accumulation(self, engine: Any) -> None:
        """Set the number of micro-batches per optimizer step in the engine, whose gradient buffers depend on it."""
        steps = GradientState().num_steps
        if engine._config.gradient_accumulation_steps != steps or self._told != steps:
            check_accumulation(self.config, steps)
            engine._config.gradient_accumulation_steps = self._zero.gradient_accumulation_steps = self._told = steps

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        retain = bool(kwargs.pop("retain_graph", False))
        if args or any(value not in (None, False) for value in kwargs.values()):
            raise UsageError(f"DeepSpeed's backward takes retain_graph only, got {list(kwargs) or args}")
        self.gradients.open = True
        self._engine.backward(loss, retain_graph=retain, scale_wrt_gas=False)

    @contextmanager
    def _boundary(self, engine: Any) -> Iterator[None]:
        engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            engine.set_gradient_accumulation_boundary(True)

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._engine is None else self._boundary(self._engine)

    def make_optimizer(self, parameters: Iterable[Any], **given: Any) -> Optimizer:
        """Make the optimizer that the section `optimizer` of the configuration describes; for `configure_optimizers`.

        Args:
            parameters: parameters, or parameter groups.
            given: values for entries that are "auto", such as `lr`.

        Raises:
            SettingError: there is no section `optimizer`, or a given value contradicts it.
        """
        return make_optimizer(self.config, parameters, self.device, **given)

    # ---- state: each rank holds a contiguous part of each sharded parameter's elements, in a flat tensor

    def _part_of(self, parameter: Tensor) -> Partition | None:
        """Return this rank's part of a parameter; None if the parameter is not sharded or the rank has none of it.

        At stage 3, the part of a rank that has none of the parameter is not None, but has `count` 0.
        """
        part = self._parts.get(parameter)
        return partitions.cut_part(parameter) if part is None and is_cut(parameter) else part

    def _is_spread(self, parameter: Tensor, name: str) -> bool:
        return is_cut(parameter) or bool(self._parts and parameter.requires_grad and name in self._shapes)

    def model_state(self) -> dict[str, Any]:
        state = self.module.state_dict()
        first = names_of(self.module)
        for name, p in self.module.named_parameters(remove_duplicate=False):
            if name in state and self._is_spread(p, first[p]):
                part = self._part_of(p)
                if part is None or not part.count:
                    del state[name]  # this rank has no element of the parameter
                else:
                    state[name] = part.shard(part.weights())
        return state

    def model_shapes(self) -> Mapping[str, torch.Size | None]:
        cut = {
            name: torch.Size(shape_of(p))
            for name, p in self.module.named_parameters(remove_duplicate=False)
            if is_cut(p)
        }
        return {name: cut.get(name, shape) for name, shape in shapes_of(self.module).items()}

    def local_weights(self) -> dict[str, Tensor]:
        held, runs = super().local_weights(), dict[Tensor, Tensor]()
        for name, part in self._spread_parts(held):
            if part is None or not part.count:
                del held[name]  # this rank has no element of the parameter
            elif part.fetch is not None:
                raise self._refused("keeps weights on a disk ('nvme'), where nothing else can read or write them")
            else:
                held[name] = runs.setdefault(held[name], part.weights())
        return held

    def sync_local_weights(self) -> None:
        if self._engine is None or not self._parts:
            return
        if self.stage < 3:
            self._zero.update_lp_params()
        else:
            partitions.write_cut_weights(self._zero, self._parts)

    def model_state_from(self, held: Mapping[str, Tensor]) -> dict[str, Any]:
        state = {**self.model_state(), **held}
        for name, part in self._spread_parts(held):
            if part is not None:
                state[name] = part.shard(held[name])
        return state

    def local_part(self, name: str, value: Any) -> Tensor:
        part = next((part for _, part in self._spread_parts([name])), None)
        return whole(value) if part is None else take_run(value, part.begin, part.count)

    def _spread_parts(self, names: Iterable[str]) -> list[tuple[str, Partition | None]]:
        """Return the sharded weights among `names`: pairs of a name and the result of `_part_of`."""
        wanted, first = set(names), names_of(self.module)
        own = self.module.named_parameters(remove_duplicate=False)
        return [(name, self._part_of(p)) for name, p in own if name in wanted and self._is_spread(p, first[p])]

    def full_model_state(self) -> dict[str, Any]:
        state, first = self.module.state_dict(), names_of(self.module)
        main = PartialState().is_main_process
        gathered: dict[Tensor, Tensor] = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            if name not in state or not self._is_spread(p, first[p]):
                continue
            if p not in gathered:
                part = self._part_of(p)
                dtype = p.dtype if not self._parts else torch.float32
                run = torch.zeros(torch.Size(shape_of(p)).numel(), dtype=dtype, device=self.device)
                if part is not None:
                    run[part.begin : part.begin + part.count] = part.weights().to(self.device)
                dist.reduce(run, 0)
                gathered[p] = run.cpu().view(shape_of(p)) if main else run[:0]
            state[name] = gathered[p]
        return state if main else {}

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        own = dict(self.module.named_parameters(remove_duplicate=False))
        taken: dict[str, Any] = {}
        for name, value in state.items():
            p = own.get(name)
            if p is None or not hasattr(value, "shape"):
                taken[name] = whole(value)
            elif tuple(value.shape) != shape_of(p):
                # Pass on a tensor of the wrong shape, so that load_state_dict raises its usual error.
                taken[name] = torch.empty(value.shape, device="meta")
            else:
                taken[name] = self._take_weights(p, value)
        return self.module.load_state_dict(taken, strict=strict)

    def _take_weights(self, p: Any, value: Any) -> Tensor:
        """Load this rank's parts of a parameter, and return the value to pass to `load_state_dict`."""
        with torch.no_grad():
            part = self._parts.get(p)
            if part is not None:
                part.set_weights(take_run(value, part.begin, part.count))
            if not is_cut(p):
                return whole(value)
            if p.data.numel():  # shard the parameter again, since DeepSpeed keeps small ones gathered
                p.partition()
            cut = partitions.cut_part(p)
            run = take_run(value, cut.begin, cut.count)
            cut.of(cut.flat).copy_(run)
            if part is None and self.precision.dtype is not None:
                self._exact[p] = run.to(self.device, torch.float32)
            return p.detach()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self.stage:
            return super().optimizer_state(optimizer)
        names, shapes, all_groups = self._optimizer_names()
        state: dict[str, dict[str, Any]] = {}
        for p, part in self._parts.items():
            kept = optimizer.state.get(part.flat, {})
            saved = {key: self._saved(part, key, value, kind_of(optimizer)) for key, value in kept.items()}
            if saved:
                state[names[p]] = saved
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(group_names)}
            for group, group_names in zip(optimizer.param_groups, all_groups, strict=True)
        ]
        dtypes = dict.fromkeys(shapes, torch.float32)  # dtype of the weights that the optimizer steps
        return {
            "optimizer": kind_of(optimizer),
            "shapes": shapes,
            "dtypes": dtypes,
            "state": state,
            "groups": groups,
        }

    def _optimizer_names(self) -> tuple[dict[Any, str], dict[str, list[int]], list[list[str]]]:
        """Return names, shapes and groups of the optimizer's parameters; all names are those in `self.module`.

        An Accelerator that saves several models combines them in one module, where the trained one is a submodule.
        """
        place = next(name for name, module in self.module.named_modules() if module is self._trained)
        prefix = f"{place}." if place else ""
        shapes = {f"{prefix}{name}": shape for name, shape in self._shapes.items()}
        return names_of(self.module), shapes, [[f"{prefix}{name}" for name in group] for group in self._groups]

    def _saved(self, part: Partition, key: str, value: Any, kind: str) -> Any:
        if isinstance(value, Tensor) and value.ndim:
            return part.shard(part.of(value) if part.fetch is None else part.fetch(key)[: part.count])
        if key == "step":  # saved as a tensor, the form in torch's optimizers
            return Shard(torch.tensor(float(value)), (), ())
        return Shard(value.detach().clone(), (), ()) if isinstance(value, Tensor) else value

    def load_optimizer_state(self, optimizer: Optimizer, tree: Mapping[str, Any], strict: bool = True) -> list[str]:
        if not self.stage:
            return super().load_optimizer_state(optimizer, tree, strict)
        names, shapes, all_groups = self._optimizer_names()
        wanted = [
            {**group, "params": group_names}
            for group, group_names in zip(optimizer.param_groups, all_groups, strict=True)
        ]
        kept, settings, left_out = match_state(kind_of(optimizer), shapes, wanted, tree, strict)
        for group, saved in zip(optimizer.param_groups, settings, strict=True):
            group.update({key: value for key, value in saved.items() if key in group and key != "params"})
        by_flat: dict[Tensor, list[tuple[str, Partition]]] = {}
        for p, part in self._parts.items():
            by_flat.setdefault(part.flat, []).append((names[p], part))
        for flat, parts in by_flat.items():
            self._load_flat(optimizer, flat, parts, kept["state"])
        return left_out

    def _load_flat(
        self, optimizer: Optimizer, flat: Tensor, parts: list[tuple[str, Partition]], saved: Mapping[str, Any]
    ) -> None:
        """Load the optimizer state of a flat tensor, by joining the states of the parameters in it."""
        known = [(name, part, saved[name]) for name, part in parts if saved.get(name)]
        if not known:
            return
        state: dict[str, Any] = dict(optimizer.state.get(flat, {}))
        with torch.no_grad(), parts[0][1].at_hand():
            for key in known[0][2]:
                values = [(name, part, kept.get(key)) for name, part, kept in known]
                first = values[0][2]
                if not hasattr(first, "shape") or not tuple(first.shape):
                    state[key] = self._scalar(optimizer, key, [whole(value) for _, _, value in values])
                    continue
                # Never replace an existing tensor that DeepSpeed offloads to a disk; it is filled in place below.
                if parts[0][1].fetch is None or key not in state:
                    state[key] = torch.zeros_like(flat, dtype=first.dtype, requires_grad=False)
                for name, part, value in values:
                    if value is None or tuple(value.shape) != part.shape:
                        raise CheckpointError(
                            f"the state {key!r} of {name!r} has no element for each of the parameter's, so that it "
                            "cannot be cut into runs. Resume from the weights alone."
                        )
                    run = take_run(value, part.begin, part.count)
                    part.of(state[key]).copy_(run)
            optimizer.state[flat] = state

    def _scalar(self, optimizer: Optimizer, key: str, values: list[Any]) -> Any:
        numbers = {float(value) for value in values}
        if len(numbers) > 1:
            raise CheckpointError(
                f"the parameters of a group were stepped different numbers of times ({key}: {sorted(numbers)}), and "
                "DeepSpeed keeps one number for them. Put them into groups of their own, or resume from the weights "
                "alone."
            )
        value = values[0]
        if key == "step" and counts_in_ints(optimizer):
            return int(value)
        return value.clone() if isinstance(value, Tensor) else value

    def local_shards(self, tree: Any) -> Any:
        main = PartialState().is_main_process
        return _written(tree, main) if self.sharded else tree if main else None


def _still(p: Tensor, part: Partition, weights: Tensor) -> bool:
    """Return True if this rank's part of `p` still equals `weights`; False if somebody has set other values.

    `weights` are rounded to the dtype of `p` first. If the part is not in memory (offloaded to a disk), it is not
    compared, and the result is True.
    """
    now = partitions.cut_part(p).flat[: part.count] if is_cut(p) else take_run(p.detach(), part.begin, part.count)
    return now.numel() < part.count or torch.equal(weights.to(now), now)


def _elements(parameters: Iterable[Tensor]) -> int:
    return sum(torch.Size(shape_of(p)).numel() for p in parameters)


@contextmanager
def _local_rank() -> Iterator[None]:
    """Set the environment variable LOCAL_RANK for DeepSpeed, if no launcher has set it."""
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = str(PartialState().local_process_index)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK", None)


def _written(tree: Any, main: bool) -> Any:
    """Return what this rank writes of a state: its Shards, and on rank 0 (`main`) also plain tensors."""
    if isinstance(tree, Mapping):
        return {key: _written(value, main) for key, value in tree.items() if main or not isinstance(value, Tensor)}
    if type(tree) in (list, tuple):
        return type(tree)([_written(value, main) for value in tree])
    return tree
