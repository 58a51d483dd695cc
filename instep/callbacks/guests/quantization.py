"""`QuantizationAwareTraining`: train a model with the rounding errors of its later quantization, by torchao."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from torch import nn

from instep.callbacks.base import Callback
from instep.errors import SettingError
from instep.utils.checks import FLAG, at_least
from instep.utils.imports import require
from instep.utils.seed import isolate_rng

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

M = TypeVar("M", bound=nn.Module)
_converted: WeakSet[nn.Module] = WeakSet()


class QuantizationAwareTraining(Callback):
    """Train linear layers with torchao's fake quantization, and quantize them when training ends.

    Before the optimizer is made, each linear layer is replaced by a layer that rounds weights and activations as the
    quantized layer will do, but computes in the precision of the run. The parameters stay the same objects under the
    same names: checkpoints hold plain weights, a run resumes bit for bit, and all strategies work.

    Args:
        config: torchao's configuration of the quantized model, such as
            `Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))`, which is
            the default; or a `QATConfig` with fake quantization of your own, whose layers are not quantized at the end.
        start_epoch: the first epoch with rounding; earlier epochs train without rounding.
        convert_at_end: quantize the module at the end of fit, after the last checkpoint, so that `trainer.test` runs
            the quantized module. Pass False if the strategy shards weights (FSDP, DeepSpeed), and call `convert` later
            on a module from `load_from_checkpoint`.
        filter_fn: function that takes a layer and its name, and returns whether to quantize the layer; by default all
            linear layers.

    Raises:
        MissingPackageError: torchao is not installed.
        SettingError: an argument is wrong. (At the start of the run:) there is no layer to quantize, or a layer cannot
            be quantized; or the strategy shards weights and `convert_at_end` is True.

    Example:
        >>> callback = QuantizationAwareTraining(start_epoch=2)  # doctest: +SKIP
        >>> module = callback.convert(MyModule.load_from_checkpoint("runs/best"))  # doctest: +SKIP

    Source:
        Jacob et al.: Quantization and Training of Neural Networks, CVPR 2018 (https://arxiv.org/abs/1712.05877), as
        built in torchao.
    """

    def __init__(
        self,
        config: Any = None,
        start_epoch: int = 0,
        convert_at_end: bool = True,
        filter_fn: Callable[[nn.Module, str], bool] | None = None,
    ) -> None:
        self._qat: Any = require("torchao.quantization.qat", extra="quant", purpose="QuantizationAwareTraining")
        self._torchao: Any = require("torchao.quantization", extra="quant", purpose="QuantizationAwareTraining")
        self.config = self._default() if config is None else config
        custom = isinstance(self.config, self._qat.QATConfig)
        self._prepare = self.config if custom else self._checked(self.config)
        self._base = self._prepare.base_config
        if any(
            getattr(part, "range_learning", False) or not getattr(part, "is_dynamic", True)
            for part in (self._prepare.activation_config, self._prepare.weight_config)
        ):
            raise SettingError(
                "QuantizationAwareTraining takes dynamic ranges: is_dynamic=True, range_learning=False. torchao keeps "
                "others outside of the module's state, so that a resumed run would have others.",
                field="config",
                got=config,
            )
        if self._prepare.step != "prepare":
            raise SettingError(f"config is a QATConfig of step {self._prepare.step!r}: give that of step 'prepare'")
        self.start_epoch = at_least(0)("start_epoch", start_epoch)
        self.convert_at_end = FLAG("convert_at_end", convert_at_end)
        self.filter_fn = filter_fn

    def _default(self) -> Any:
        import torch  # imported late: only needed together with torchao
        from torchao.quantization.granularity import PerGroup

        return self._torchao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4,  # pyright: ignore[reportAttributeAccessIssue]
            weight_granularity=PerGroup(32),
        )

    def _checked(self, config: Any) -> Any:
        try:
            self._qat.fake_quantize_config._infer_fake_quantize_configs(config)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise SettingError(
                f"QuantizationAwareTraining(config={config!r}): torchao has no fake quantization for it ({error}). "
                "Take a configuration such as Int8DynamicActivationIntxWeightConfig or IntxWeightOnlyConfig.",
                field="config",
                got=config,
            ) from error
        return self._qat.QATConfig(config, step="prepare")

    # ---- replacing and quantizing layers

    def prepare(self, module: M) -> M:
        """Replace layers in place by layers with fake quantization; layers that already have it are not changed.

        Raises:
            SettingError: there is no layer to quantize, or a layer cannot be quantized.
        """
        last = ""

        def chosen(layer: nn.Module, name: str) -> bool:
            nonlocal last
            wanted = isinstance(layer, nn.Linear) and not _is_fake(layer)
            wanted = wanted and (self.filter_fn is None or self.filter_fn(layer, name))
            last = name if wanted else last
            return wanted

        with _as_it_was(module):
            try:
                self._torchao.quantize_(module, self._prepare, filter_fn=chosen)
            except (ValueError, AssertionError) as error:
                raise SettingError(
                    f"the layer {last!r} cannot be quantized so: {error}. Leave it out by filter_fn, or choose another "
                    "granularity.",
                    field="filter_fn",
                ) from error
        if not any(map(_is_fake, module.modules())):
            raise SettingError(
                f"{type(module).__name__} has no linear layer that QuantizationAwareTraining would quantize. Make the "
                "layers in __init__, not in configure_model, and look at filter_fn.",
                field="filter_fn",
                got=self.filter_fn,
            )
        return module

    def convert(self, module: M) -> M:
        """Quantize in place the layers that were trained with fake quantization, in this run or an earlier one.

        Returns:
            The module. Its layers hold torchao's tensors, which instep's checkpoints cannot hold: save it by
            `torch.save`.
        """
        if not any(map(_is_fake, module.modules())):
            self.prepare(module)
        with _as_it_was(module):
            config = self._qat.QATConfig(self._base, step="convert")
            self._torchao.quantize_(module, config, filter_fn=lambda layer, _: _is_fake(layer))
        if self._base is not None:
            _converted.add(module)
        return module

    # ---- the run

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        if module in _converted:
            raise SettingError(
                f"this {type(module).__name__} was quantized at the end of an earlier fit, and cannot be trained any "
                "more. Make it anew, or load it from a checkpoint; or set convert_at_end=False."
            )
        if self.convert_at_end and not trainer.strategy.whole_parameters:
            raise SettingError(
                f"convert_at_end=True needs whole weights, and strategy={trainer.strategy.name!r} cuts them up. Set "
                "convert_at_end=False, and after training quantize what load_from_checkpoint gives: "
                "callback.convert(MyModule.load_from_checkpoint(path)).",
                field="convert_at_end",
                got=True,
            )
        self._enable(self.prepare(module), self.start_epoch == 0)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._enable(module, trainer.current_epoch >= self.start_epoch)

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.convert_at_end:
            self.convert(module)

    @staticmethod
    def _enable(module: nn.Module, enabled: bool) -> None:
        layers: Iterator[Any] = filter(_is_fake, module.modules())
        for layer in layers:
            for part in (layer.activation_fake_quantizer, layer.weight_fake_quantizer):
                if part is not None:
                    part.enabled = enabled


def _is_fake(layer: nn.Module) -> bool:
    return hasattr(layer, "weight_fake_quantizer")


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Restore the random generators and the training modes after torchao has made new layers."""
    training = {name: part.training for name, part in module.named_modules()}
    with isolate_rng():
        yield
    for name, part in module.named_modules():
        parent = name.rpartition(".")[0]
        part.training = training.get(name, training.get(parent, module.training))
