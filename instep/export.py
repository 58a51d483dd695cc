"""Export a trained module for programs without instep: as ONNX, torch.export, TorchScript or TensorRT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from instep.errors import SettingError, UsageError
from instep.state import PartialState
from instep.types import Location
from instep.utils.atomic import replacing
from instep.utils.checks import choice
from instep.utils.imports import check_installed, require
from instep.utils.jit import readable_by_jit
from instep.utils.paths import to_path

if TYPE_CHECKING:
    from instep.trainer import TrainModule

Sample = tuple[tuple[Any, ...], dict[str, Any]]
_METHOD = choice("script", "trace")
_MEANWHILE = ("_compiled_call_impl",)


def to_onnx(module: TrainModule, file_path: Location | BytesIO | None, input_sample: Any, **kwargs: Any) -> Any:
    """Write a module as an ONNX file; arguments are described at `TrainModule.to_onnx`."""
    purpose = f"{type(module).__name__}.to_onnx()"
    check_installed("onnx", extra="onnx", purpose=purpose)
    dynamo = kwargs.get("dynamo", True)
    if dynamo:
        check_installed("onnxscript", extra="onnx", purpose=f"{type(module).__name__}.to_onnx(dynamo=True)")
    args, named = _sample_of(
        module,
        input_sample,
        "Could not export to ONNX since neither `input_sample` nor `model.example_input_array` attribute is set.",
    )
    target = None if file_path is None else _target(file_path)
    # `torch.onnx.export` also accepts a buffer, although its annotation does not say so
    where: Any = str(target) if isinstance(target, Path) else target
    if isinstance(target, Path) and dynamo:
        kwargs.setdefault("verbose", False)  # by default torch prints its progress
    with _at_rest(module, by_jit=not dynamo):
        # torch must write to the final path itself: the model file contains the name of a second file with the weights
        return torch.onnx.export(module, args, where, kwargs=named or None, **kwargs)


def to_exported_program(
    module: TrainModule, file_path: Location | BytesIO | None, input_sample: Any, **kwargs: Any
) -> torch.export.ExportedProgram:
    """Export a module with `torch.export`; arguments are described at `TrainModule.to_exported_program`."""
    args, named = _sample_of(
        module,
        input_sample,
        "Could not export since neither `input_sample` nor `model.example_input_array` attribute is set.",
    )
    with _at_rest(module):
        program = torch.export.export(module, args, named or None, **kwargs)
    _write(file_path, lambda file: torch.export.save(program, file))
    return program


def to_torchscript(
    module: TrainModule, file_path: Location | None, method: str, example_inputs: Any, **kwargs: Any
) -> Any:
    """Convert a module to TorchScript; arguments are described at `TrainModule.to_torchscript`."""
    try:
        _METHOD("method", method)
    except SettingError as error:
        raise SettingError(
            f"The 'method' parameter only supports 'script' or 'trace', but value given was: {method}",
            field="method",
            got=method,
        ) from error
    if method == "script":
        with _at_rest(module, by_jit=True):
            made = torch.jit.script(module, **kwargs)
    else:
        args, named = _sample_of(
            module,
            example_inputs,
            "Choosing method=`trace` requires either `example_inputs` or `model.example_input_array` to be defined.",
        )
        if kwargs.get("check_inputs") is not None:
            checked = kwargs["check_inputs"]
            several = checked if isinstance(checked, list) else [checked]
            kwargs["check_inputs"] = [_sample_of(module, each, "")[0] for each in several]
        with _at_rest(module, by_jit=True):
            # `torch.jit.trace` accepts example inputs by position or by name, but not both
            inputs = {"example_kwarg_inputs": named} if named else {"example_inputs": args}
            made = torch.jit.trace(module, **inputs, **kwargs)
    _write(file_path, lambda file: torch.jit.save(made, file))
    return made


def to_tensorrt(
    module: TrainModule,
    file_path: Location | BytesIO | None,
    input_sample: Any,
    ir: Literal["default", "dynamo", "ts"],
    output_format: Literal["exported_program", "torchscript"],
    retrace: bool,
    default_device: str | torch.device,
    **compile_kwargs: Any,
) -> Any:
    """Compile a module with TensorRT; arguments are described at `TrainModule.to_tensorrt`."""
    purpose = f"{type(module).__name__}.to_tensorrt()"
    torch_tensorrt = require("torch_tensorrt", extra=None, purpose=purpose)
    device, wanted = module.device, torch.device(default_device)
    if device.type != "cuda" and (wanted.type != "cuda" or not torch.cuda.is_available()):
        raise UsageError(
            f"TensorRT only supports CUDA devices. The current device is {device}. Please set the `default_device` "
            f"argument to a CUDA device; got {wanted}, and this machine has "
            f"{torch.cuda.device_count() if torch.cuda.is_available() else 'no'} CUDA devices."
        )
    if file_path is not None and ir == "ts" and output_format != "torchscript":
        raise SettingError(
            "TensorRT with IR mode 'ts' only supports output format 'torchscript'. The current output format is "
            f"{output_format}.",
            field="output_format",
            got=output_format,
        )
    if device.type != "cuda":
        module.to(wanted)
    try:
        args, named = _sample_of(
            module,
            input_sample,
            "Could not export to TensorRT since neither `input_sample` nor `model.example_input_array` attribute is "
            "set.",
        )
        inputs = [*args, *named.values()]
        with _at_rest(module, by_jit=ir == "ts"):
            made = torch_tensorrt.compile(module=module, ir=ir, inputs=inputs, **compile_kwargs)
    finally:
        module.to(device)
    if file_path is not None and PartialState().is_main_process:
        if ir == "ts":
            _write(file_path, lambda file: torch.jit.save(made, file))
        else:
            place = file_path if isinstance(file_path, BytesIO) else str(to_path(file_path))
            torch_tensorrt.save(made, place, inputs=inputs, output_format=output_format, retrace=retrace)
    return made


# ---- functions that the exports share


def _sample_of(module: TrainModule, given: Any, missing: str) -> Sample:
    """Return arguments for tracing `forward`: a sample after the module's batch hooks, on the module's device."""
    sample = module.example_input_array if given is None else given
    if sample is None:
        raise SettingError(missing, field="input_sample")
    sample = module.on_before_batch_transfer(sample, 0)
    sample = module.transfer_batch_to_device(sample, module.device, 0)
    sample = module.on_after_batch_transfer(sample, 0)
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, tuple | list) else (sample,)), {}


@contextmanager
def _at_rest(module: nn.Module, by_jit: bool = False) -> Iterator[None]:
    """Prepare a module for tracing inside the block: eval mode, no gradients, no compiled code.

    Modes and compiled code are restored after the block. Sharded weights raise a UsageError.
    """
    sharded = next((name for name, p in module.named_parameters() if hasattr(p, "full_tensor")), None)
    if sharded is not None:
        raise UsageError(
            f"{type(module).__name__} is sharded over processes ({sharded} is a DTensor), and an export needs the "
            f"whole. Save a checkpoint, then in one process: {type(module).__name__}.load_from_checkpoint(path), and "
            "export that."
        )
    parts = list(module.modules())
    training = [part.training for part in parts]
    held = [(part, name, vars(part)[name]) for part in parts for name in _MEANWHILE if vars(part).get(name)]
    try:
        for part in parts:
            part.training = False
        for part, name, _ in held:
            setattr(part, name, None)
        with torch.no_grad(), readable_by_jit(module) if by_jit else nullcontext():
            yield
    finally:
        for part, was in zip(parts, training, strict=True):
            part.training = was
        for part, name, value in held:
            setattr(part, name, value)


def _target(file_path: Location | BytesIO) -> Path | BytesIO | None:
    """Return the path or buffer that the main process writes; None on the other processes, which do not write."""
    if isinstance(file_path, BytesIO):
        return file_path
    if not PartialState().is_main_process:
        return None
    path = to_path(file_path)
    if not isinstance(path, Path):
        raise SettingError(f"{path} is not on a disk; export to a file here, and send it there", got=str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write(file_path: Location | BytesIO | None, save: Any) -> None:
    """Write a buffer or file with `save` on the main process; a file gets its name only when it is complete."""
    if file_path is None or not PartialState().is_main_process:
        return
    if isinstance(file_path, BytesIO):
        save(file_path)
        return
    path = to_path(file_path)
    buffer = BytesIO()
    save(buffer)
    if not isinstance(path, Path):
        path.write_bytes(buffer.getvalue())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(buffer.getvalue())
