"""Quantize the linear layers of a model to 8 or 4 bits by bitsandbytes or torchao, one weight at a time.

The float weights are never all in memory: each weight is read, quantized and freed before the next one is read. All
weights are read and checked before the model is changed, so an error leaves the model as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from instep.big_models.device_map import device_of, resolve_device_map
from instep.big_models.dispatch import dispatch_model
from instep.big_models.loading import open_checkpoint
from instep.big_models.memory import accelerator_name
from instep.big_models.offload import WeightsMap, set_offloaded_weights
from instep.big_models.sizes import find_tied_parameters
from instep.checkpoint.lazy import LazyTensor
from instep.errors import CheckpointError, InstepError, SettingError, UsageError, one_of
from instep.strategies.quantized_state import is_stored_quantized, keep_as_tensors
from instep.types import PathLike
from instep.utils.checks import FLAG, Check, check_fields, choice, is_number
from instep.utils.imports import require
from instep.utils.paths import to_path
from instep.utils.warn import warn_user

M = TypeVar("M", bound=nn.Module)

_MOST_NAMES = 5  # maximum number of names in an error text

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_DTYPE = Check(
    lambda value: value in _DTYPES or (isinstance(value, torch.dtype) and value.is_floating_point),
    "'fp32', 'fp16', 'bf16' or a floating torch.dtype",
    lambda value: _DTYPES.get(value, value),
)
_THRESHOLD = Check(lambda value: is_number(value) and value >= 0, "a number of at least 0")
_NAMES = Check(
    lambda value: not isinstance(value, str) and all(isinstance(name, str) for name in value),
    "a list of names of modules",
    tuple,
)


@dataclass
class BnbQuantizationConfig:
    """Quantization of linear layers by bitsandbytes, on a CPU and on CUDA; arguments have Accelerate's names.

    Args:
        load_in_8bit: LLM.int8(): weights and activations in 8 bits, except for outliers of activations.
        llm_int8_threshold: absolute value above which an activation is an outlier; 0: there are no outliers.
        load_in_4bit: weights in 4 bits, in blocks of 64; activations are not quantized.
        bnb_4bit_quant_type: "fp4", or "nf4", which is the better one for weights of a normal distribution.
        bnb_4bit_use_double_quant: whether the scales of the blocks are quantized too, which saves 0.4 bits per weight.
        bnb_4bit_compute_dtype: dtype in which 4-bit layers compute: "fp32", "fp16", "bf16" or a torch.dtype.
        torch_dtype: dtype of all weights that are not quantized; None: float16 with 8 bits, the compute dtype with 4
            bits.
        skip_modules: modules that are not quantized, including all their submodules; given by full names, or by the
            last parts of names. None: the output layer, and modules with tied weights.
        keep_in_fp32_modules: modules, given as in `skip_modules`, that are not quantized and whose weights are float32.

    Raises:
        SettingError: a value is wrong, or not exactly one of `load_in_8bit` and `load_in_4bit` is True.

    Example:
        >>> config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16")
        >>> config.torch_dtype
        torch.bfloat16

    Source: Dettmers et al.: LLM.int8() (https://arxiv.org/abs/2208.07339), QLoRA (https://arxiv.org/abs/2305.14314).
    """

    load_in_8bit: Annotated[bool, FLAG] = False
    llm_int8_threshold: Annotated[float, _THRESHOLD] = 6.0
    load_in_4bit: Annotated[bool, FLAG] = False
    bnb_4bit_quant_type: Annotated[str, choice("fp4", "nf4")] = "fp4"
    bnb_4bit_use_double_quant: Annotated[bool, FLAG] = False
    bnb_4bit_compute_dtype: Annotated[Any, _DTYPE] = "fp16"
    torch_dtype: Annotated[Any, _DTYPE] = None
    skip_modules: Annotated[Sequence[str] | None, _NAMES] = None
    keep_in_fp32_modules: Annotated[Sequence[str] | None, _NAMES] = None

    def __post_init__(self) -> None:
        check_fields(self)
        self.stored_dtype = self.bnb_4bit_quant_type if self.load_in_4bit else torch.int8
        if self.load_in_8bit == self.load_in_4bit:
            raise SettingError(
                f"load_in_8bit={self.load_in_8bit} and load_in_4bit={self.load_in_4bit}: exactly one of them must be "
                "True.",
                field="load_in_4bit",
                got=self.load_in_4bit,
            )
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16

    def quantize(self, layer: nn.Linear, weight: Tensor, device: torch.device) -> nn.Linear:
        """Quantize one floating-point layer, and return the new layer.

        Args:
            layer: the layer. The new layer has the same sizes, and a bias without a value.
            weight: values of the layer's weight, shape (out, in), on any device.
            device: device of the new weight.
        """
        nn_: Any = require("bitsandbytes", extra="quant", purpose="BnbQuantizationConfig").nn
        sizes, bias = (layer.in_features, layer.out_features), layer.bias is not None
        if self.load_in_8bit:
            threshold = self.llm_int8_threshold
            made = nn_.Linear8bitLt(*sizes, bias, has_fp16_weights=False, threshold=threshold, device="meta")
            made.weight = nn_.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False).to(device)
            return made
        kind = {"quant_type": self.bnb_4bit_quant_type, "compress_statistics": self.bnb_4bit_use_double_quant}
        made = nn_.Linear4bit(*sizes, bias, self.bnb_4bit_compute_dtype, **kind, device="meta")
        made.weight = nn_.Params4bit(weight, requires_grad=False, module=made, **kind).to(device)
        # On some CPUs, a forward in eval mode would convert the weight to another layout, rounded to bfloat16; training
        # after a validation would then have no gradients.
        made.support_avx512bf16_for_cpu = False
        return made


@dataclass
class TorchAoConfig:
    """Quantization of linear layers by torchao.

    Args:
        quant_type: "int8" (weights), "int8_dynamic" (activations too), "int4" (weights; on a CPU with 8-bit
            activations), "fp8" (weights), "fp8_dynamic" (activations too; needs CUDA of compute capability 8.9), or a
            configuration of torchao for one kind of layer, such as `Int8WeightOnlyConfig()`.
        torch_dtype: dtype of all weights that are not quantized, and of the computations of layers. None: the model's
            dtype.
        skip_modules: as for `BnbQuantizationConfig`.
        keep_in_fp32_modules: as for `BnbQuantizationConfig`.

    Raises:
        SettingError: a value is wrong.
        MissingPackageError: torchao is not installed.

    Example:
        >>> TorchAoConfig("int8", torch_dtype="bf16").torch_dtype
        torch.bfloat16

    Source: https://docs.pytorch.org/ao/stable/
    """

    quant_type: Any
    torch_dtype: Annotated[Any, _DTYPE] = None
    skip_modules: Annotated[Sequence[str] | None, _NAMES] = None
    keep_in_fp32_modules: Annotated[Sequence[str] | None, _NAMES] = None

    def __post_init__(self) -> None:
        check_fields(self)
        self.stored_dtype = "int4" if self.quant_type == "int4" and accelerator_name() else torch.int8
        if isinstance(self.quant_type, str) and self.quant_type not in _TORCHAO:
            raise one_of("quant_type", self.quant_type, _TORCHAO)

    def quantize(self, layer: nn.Linear, weight: Tensor, device: torch.device) -> nn.Linear:
        """Quantize one floating-point layer; arguments as in `BnbQuantizationConfig.quantize`."""
        torchao: Any = require("torchao.quantization", extra="quant", purpose="TorchAoConfig")
        config = self.quant_type
        if isinstance(config, str):
            config = _TORCHAO[config](torchao, device)
        made = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        made.weight = nn.Parameter(weight.to(device), requires_grad=False)
        torchao.quantize_(made, config, filter_fn=lambda *_: True)
        made.weight.requires_grad_(False)
        probe = torch.zeros(1, layer.in_features, dtype=weight.dtype, device=device, requires_grad=True)
        if not nn.functional.linear(probe, made.weight).requires_grad:
            made.register_forward_pre_hook(_refuse_training)
        return made


def _refuse_training(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise if a gradient would silently end at a layer, since rounded activations have no gradient."""
    if layer.training and torch.is_grad_enabled() and inputs[0].requires_grad:
        raise UsageError(
            "a layer whose activations are quantized too passes no gradient on: nothing before it would learn. Train "
            "with quantized weights alone, TorchAoConfig('int8') or BnbQuantizationConfig(load_in_4bit=True). To use "
            "the model without training call model.eval()."
        )


def _int4(torchao: Any, device: torch.device) -> Any:
    if device.type != "cpu":
        return torchao.Int4WeightOnlyConfig()
    # Unlike torchao's other weights, its 4-bit weights have no kernel for a CPU.
    group = torchao.PerGroup(32)
    return torchao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=group)  # pyright: ignore[reportAttributeAccessIssue]


_TORCHAO: dict[str, Callable[[Any, torch.device], Any]] = {
    "int8": lambda torchao, _: torchao.Int8WeightOnlyConfig(),
    "int8_dynamic": lambda torchao, _: torchao.Int8DynamicActivationInt8WeightConfig(),
    "int4": _int4,
    "fp8": lambda torchao, _: torchao.Float8WeightOnlyConfig(),
    "fp8_dynamic": lambda torchao, _: torchao.Float8DynamicActivationFloat8WeightConfig(),
}


def load_and_quantize_model(
    model: M,
    quantization_config: Any = None,
    weights_location: PathLike | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: PathLike | None = None,
    offload_state_dict: bool = False,
    *,
    bnb_quantization_config: BnbQuantizationConfig | None = None,
) -> M:
    """Quantize a model's linear layers in place, with weights from a checkpoint or the model's own.

    Build large models under `init_empty_weights`, so that at most one float weight is in memory at a time. The
    quantized model has a state dict of plain tensors, which checkpoints hold and `save_pretrained` writes. If you pass
    such a file as `weights_location`, with the same configuration, you get the same model again, bit for bit.

    Args:
        model: model with its weights, or on the meta device.
        quantization_config: a `BnbQuantizationConfig`, a `TorchAoConfig`, or the first argument of a `TorchAoConfig`.
        weights_location: file, index or folder of floating-point weights, or of a model that was quantized with the
            same configuration. None: the model's own weights.
        device_map: devices of the modules: a device for all of them as `{"": "cuda:0"}`, a dict of names, or "auto",
            "balanced", "balanced_low_0", "sequential". None: the current accelerator, or else the CPU. If a dict puts a
            module on "disk", or on "cpu" while others are on an accelerator, the module is not quantized.
        no_split_module_classes: names of classes whose modules stay on one device.
        max_memory: device -> bytes or a text such as "10GB", for maps such as "auto".
        offload_folder: folder for modules on "disk" whose weights have another dtype in the checkpoint; weights of
            other modules are read from the checkpoint.
        offload_state_dict: accepted for scripts of Accelerate, and without effect, since there is no state dict of all
            weights to offload.
        bnb_quantization_config: Accelerate's name of `quantization_config`.

    Returns:
        The model. Quantized weights are frozen.

    Raises:
        SettingError: an argument is wrong, there is no layer to quantize, or a layer cannot be quantized in this way.
        MissingPackageError: bitsandbytes or torchao is not installed.
        CheckpointError: the weights are not this model's, or were quantized in another way.

    Example:
        >>> with init_empty_weights():  # doctest: +SKIP
        ...     model = AutoModelForCausalLM.from_config(config)
        >>> config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        >>> model = load_and_quantize_model(model, config, "folder/of/weights")  # doctest: +SKIP
    """
    config = _config_of(quantization_config if bnb_quantization_config is None else bnb_quantization_config)
    chosen = chosen_layers(model, config)
    devices = _device_map(model, chosen, config, device_map, max_memory, no_split_module_classes)
    place = _Places(devices)
    outside = [name for name in chosen if place.is_offloaded(name)]
    if outside and not isinstance(device_map, Mapping):
        raise SettingError(
            f"device_map={device_map!r} would offload quantized layers, which is not possible: {_few(outside)}. Give "
            "more max_memory, or a dict: what has 'disk' there, or 'cpu' beside an accelerator, is not quantized.",
            field="device_map",
            got=device_map,
        )
    chosen = {name: layer for name, layer in chosen.items() if name not in outside}
    weights = _Weights(model, weights_location, chosen)
    layers = {name: _quantized(name, layer, weights, config, place(name)) for name, layer in chosen.items()}
    rest = weights.others(config, place, offload_folder)
    _put(model, layers, rest)
    if len(place.all) > 1 or place.disk:
        set_offloaded_weights(model, WeightsMap(weights.left))
        dispatch_model(model, devices, offload_dir=offload_folder)
    is_bnb = isinstance(config, BnbQuantizationConfig)
    model.is_loaded_in_8bit = is_bnb and config.load_in_8bit  # pyright: ignore  # peft asks for these
    model.is_loaded_in_4bit = is_bnb and config.load_in_4bit  # pyright: ignore
    return model


def _config_of(config: Any) -> BnbQuantizationConfig | TorchAoConfig:
    if isinstance(config, BnbQuantizationConfig | TorchAoConfig):
        return config
    if config is None or isinstance(config, Mapping):
        raise SettingError(
            "load_and_quantize_model needs a quantization_config: BnbQuantizationConfig(...), TorchAoConfig(...), or "
            f"one of {', '.join(_TORCHAO)}.",
            field="quantization_config",
        )
    return TorchAoConfig(config)


# ---- choosing the layers


def chosen_layers(model: nn.Module, config: Any) -> dict[str, nn.Linear]:
    """Return the linear layers that are quantized, under each of their names."""
    skipped = _kept_by_default(model) if config.skip_modules is None else config.skip_modules
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    unknown = [name for name in config.skip_modules or () if not any(f".{name}." in f".{each}." for each in names)]
    if unknown:
        warn_user(f"{type(model).__name__} has no module {', '.join(unknown)}, which skip_modules names.")
    skipped = [*skipped, *(config.keep_in_fp32_modules or ())]
    linear = {
        name: layer for name, layer in model.named_modules(remove_duplicate=False) if isinstance(layer, nn.Linear)
    }
    done = [name for name, layer in linear.items() if type(layer.weight) is not nn.Parameter]
    if done:
        raise SettingError(
            f"{type(model).__name__} is quantized already: {done[0]}.weight is a "
            f"{type(linear[done[0]].weight).__name__}. Make the model anew; what was saved of a quantized one is given "
            "as weights_location.",
            field="model",
        )
    # Layers of torch's own attention are left out, since attention uses their weights without calling them.
    linear = {name: layer for name, layer in linear.items() if not isinstance(layer, NonDynamicallyQuantizableLinear)}
    chosen = {name: layer for name, layer in linear.items() if not _is_in(name, skipped)}
    if not chosen:
        raise SettingError(
            f"{type(model).__name__} has no layer to quantize: it has {len(linear)} linear layers, and skip_modules is "
            f"{list(skipped)}. Only torch.nn.Linear is quantized, no Conv1D as in GPT-2; give other skip_modules.",
            field="skip_modules",
            got=config.skip_modules,
        )
    return chosen


def _kept_by_default(model: nn.Module) -> list[str]:
    """Return modules that are not quantized by default: those with tied weights, and the last one, the model's head."""
    tied = [name.rpartition(".")[0] for names in find_tied_parameters(model) for name in names]
    # Transformers sets `base_model_prefix`; a model without a head has no attribute of that name.
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []
    return [*tied, *[name for name, _ in model.named_children()][-1:]]


def _is_in(name: str, modules: Iterable[str]) -> bool:
    """Return True if a name is, or lies inside, one of `modules`, whose names may leave out leading parts."""
    return any(f".{module}." in f".{name}." for module in modules)


# ---- reading weights


class _Weights:
    """Weights of a model, from a checkpoint or the model itself; all are checked first, and then read one by one.

    Args:
        model: the model that gets the weights.
        location: path of the checkpoint; None for the model's own.
        chosen: layers that are quantized, by name.

    Raises:
        CheckpointError: a weight is missing, or its shape is not that in the model.
        SettingError: there is no location, and the model is on the meta device.
    """

    def __init__(self, model: nn.Module, location: PathLike | None, chosen: Mapping[str, nn.Linear]) -> None:
        self._own: dict[str, Tensor] = {
            name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
        }
        self._of_layers = {f"{name}.weight" for name in chosen}
        self.left: dict[str, Any] = {}
        """Weights by name that stay in the checkpoint's files, since they are for the disk; `others` adds them."""
        self.where = "the model" if location is None else str(location)
        self.stored: Mapping[str, Any] = self._own if location is None else open_checkpoint(location).weights
        alike: dict[int, list[str]] = {}
        for name, value in self._own.items():
            alike.setdefault(id(value), []).append(name)
        quantized = {f"{name}.weight" for name in chosen if is_stored_quantized(self.stored, name)}
        # The stored name of each weight; a checkpoint may store tied weights under one name only.
        self._from: dict[str, str | None] = {
            name: next((other for other in (name, *alike[id(value)]) if other in self.stored), None)
            for name, value in self._own.items()
            if name not in quantized
        }
        self._check(model)

    def _check(self, model: nn.Module) -> None:
        meta = [name for name, value in chain(model.named_parameters(), model.named_buffers()) if value.is_meta]
        if meta and self.stored is self._own:
            raise SettingError(
                f"{type(model).__name__} is on the meta device and has no values. Give weights_location: the file or "
                "folder of its weights.",
                field="weights_location",
            )
        missing = [name for name, there in self._from.items() if there is None]
        missing += [name for name in meta if name not in self._own]  # non-persistent buffers, which no checkpoint has
        shapes = [
            f"{name} is {tuple(self.stored[there].shape)} there and {tuple(self._own[name].shape)} in the model"
            for name, there in self._from.items()
            if there is not None and self.stored[there].shape != self._own[name].shape
        ]
        if missing or shapes:
            raise CheckpointError(
                f"the weights of {self.where} are not those of {type(model).__name__}: "
                + "; ".join([*shapes[:_MOST_NAMES], *([f"it does not hold {_few(missing)}"] if missing else [])])
                + ". Nothing was loaded.",
                path=to_path(self.where),
            )

    def read(self, name: str) -> Tensor:
        """Read a weight by its name in the model, without a copy; a caller that keeps it must copy it."""
        return self.take(str(self._from[name])).detach()

    def take(self, name: str) -> Tensor:
        """Read a tensor by its name in the checkpoint, without a copy."""
        value = self.stored[name]
        if isinstance(value, LazyTensor):
            return value.map()
        return value if isinstance(value, Tensor) else value.read()

    def others(self, config: Any, place: _Places, folder: PathLike | None) -> dict[str, Tensor]:
        """Read all tensors except weights of quantized layers, and bring each to its dtype and device; tied ones once.

        Args:
            config: configuration of the quantization.
            place: devices of weights.
            folder: folder for weights on "disk" that cannot be used in the checkpoint's file.
        """
        once: dict[int, Tensor] = {}
        for name, own in self._own.items():
            if name in self._of_layers or id(own) in once:
                continue
            value = self.read(name)
            dtype = value.dtype
            if value.is_floating_point():
                is_kept = _is_in(name, config.keep_in_fp32_modules or ())
                dtype = torch.float32 if is_kept else config.torch_dtype or own.dtype
            stored = self.stored[str(self._from[name])]
            on_disk = place.of(name) == "disk" and isinstance(own, nn.Parameter)
            if on_disk and isinstance(stored, LazyTensor) and value.dtype == dtype:
                self.left |= {other: stored for other in self._own if self._own[other] is own}
                once[id(own)] = torch.empty_like(own, dtype=dtype, device="meta")
            elif on_disk and folder is None:
                raise SettingError(
                    f"{name} is for the disk, in {dtype}, and cannot be used where it lies, in {value.dtype}. Give an "
                    "offload_folder to write it to, or the checkpoint's dtype as torch_dtype.",
                    field="offload_folder",
                )
            else:
                once[id(own)] = value.to(place(name), dtype, copy=self.stored is not self._own)
        return {name: once[id(own)] for name, own in self._own.items() if name not in self._of_layers}


def _quantized(name: str, layer: nn.Linear, weights: _Weights, config: Any, device: torch.device) -> nn.Linear:
    """Make one quantized layer, from float weights or from a saved quantized layer."""
    dtype = config.torch_dtype or layer.weight.dtype
    saved = is_stored_quantized(weights.stored, name)
    weight = torch.zeros(layer.weight.shape, dtype=dtype) if saved else weights.read(f"{name}.weight").to(dtype)
    try:
        made = config.quantize(layer, weight, device)
    except InstepError:
        raise
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise SettingError(
            f"the layer {name}, {tuple(layer.weight.shape)} on {device}, cannot be quantized so: {error} "
            "Choose another kind, or leave the layer out by skip_modules.",
            field="quantization_config",
            got=config,
        ) from error
    keep_as_tensors(made)
    if saved:
        _load_saved(name, made, weights)
    del weight
    _give_back_memory()
    return made.train(layer.training)


def _give_back_memory() -> None:
    """Return free memory to the system, since glibc keeps gaps between small weights, up to the size of the model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _load_saved(name: str, made: nn.Linear, weights: _Weights) -> None:
    names = [part for part in made.state_dict() if part != "bias"]
    state = {part: weights.take(there) for part in names if (there := f"{name}.{part}") in weights.stored}
    try:
        missing = [part for part in made.load_state_dict(state, strict=False).missing_keys if part != "bias"]
        if missing:
            raise RuntimeError(f"{_few(missing)} is not there")
    except RuntimeError as error:
        raise CheckpointError(
            f"{weights.where} holds {name} quantized in another way than the quantization_config says: "
            f"{' '.join(str(error).split())}. Give the configuration with which it was made. Nothing was loaded.",
            path=to_path(weights.where),
        ) from error


# ---- choosing the devices of weights


def _device_map(
    model: nn.Module, chosen: Mapping[str, nn.Linear], config: Any, device_map: Any, max_memory: Any, no_split: Any
) -> dict[str, Any]:
    """Return the device of each module, computed from the sizes after quantization."""
    if device_map is None:
        name = accelerator_name()
        return {"": "cpu" if name is None else torch.device(name, torch.accelerator.current_device_index())}
    small = {f"{name}.weight": config.stored_dtype for name in chosen}
    return resolve_device_map(model, device_map, max_memory, no_split, config.torch_dtype, special_dtypes=small)


class _Places:
    """Devices of weights by name, according to a device map.

    Args:
        devices: device by name of a module or weight.
    """

    def __init__(self, devices: Mapping[str, Any]) -> None:
        self._devices = devices
        self.all = set(devices.values())
        self.disk = "disk" in self.all

    def of(self, name: str) -> Any:
        """Return the entry of the map for a weight."""
        return device_of(name, self._devices)

    def is_offloaded(self, name: str) -> bool:
        """Return whether a weight is stored elsewhere than on the device where its module computes."""
        return self.of(name) == "disk" or (self.of(name) == "cpu" and not self.all <= {"cpu", "disk"})

    def __call__(self, name: str) -> torch.device:
        """Return the device on which a weight is in memory."""
        device = self.of(name)
        if isinstance(device, int):
            return torch.device(accelerator_name() or "cuda", device)
        return torch.device("cpu" if device == "disk" else device)


def _few(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _put(model: nn.Module, layers: Mapping[str, nn.Linear], rest: Mapping[str, Tensor]) -> None:
    """Put quantized layers, and the values of all other tensors, into a model."""
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    once: dict[int, nn.Parameter] = {}
    for name, value in rest.items():
        parent, _, child = name.rpartition(".")
        module = model.get_submodule(parent)
        if child in module._parameters:
            old: Any = module._parameters[child]
            value = once.setdefault(id(value), nn.Parameter(value, requires_grad=old.requires_grad))
        setattr(module, child, value)
