"""Models larger than the memory: empty weights, device maps, offload, quantisation. A name is loaded on first use."""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

_HOME: dict[str, str] = {
    "BnbQuantizationConfig": "quantization",
    "TorchAoConfig": "quantization",
    "check_device_map": "device_map",
    "clean_device_map": "device_map",
    "compute_module_sizes": "sizes",
    "dtype_byte_size": "sizes",
    "find_tied_parameters": "sizes",
    "get_balanced_memory": "device_map",
    "get_max_memory": "memory",
    "infer_auto_device_map": "device_map",
    "init_empty_weights": "empty",
    "init_on_device": "empty",
    "load_and_quantize_model": "quantization",
    "load_checkpoint_in_model": "loading",
    "named_module_tensors": "sizes",
    "prepare_pippy": "pipeline_inference",
    "retie_parameters": "sizes",
}

if TYPE_CHECKING:
    from instep.big_models.device_map import check_device_map as check_device_map
    from instep.big_models.device_map import clean_device_map as clean_device_map
    from instep.big_models.device_map import get_balanced_memory as get_balanced_memory
    from instep.big_models.device_map import infer_auto_device_map as infer_auto_device_map
    from instep.big_models.empty import init_empty_weights as init_empty_weights
    from instep.big_models.empty import init_on_device as init_on_device
    from instep.big_models.loading import load_checkpoint_in_model as load_checkpoint_in_model
    from instep.big_models.memory import get_max_memory as get_max_memory
    from instep.big_models.pipeline_inference import prepare_pippy as prepare_pippy
    from instep.big_models.quantization import BnbQuantizationConfig as BnbQuantizationConfig
    from instep.big_models.quantization import TorchAoConfig as TorchAoConfig
    from instep.big_models.quantization import load_and_quantize_model as load_and_quantize_model
    from instep.big_models.sizes import compute_module_sizes as compute_module_sizes
    from instep.big_models.sizes import dtype_byte_size as dtype_byte_size
    from instep.big_models.sizes import find_tied_parameters as find_tied_parameters
    from instep.big_models.sizes import named_module_tensors as named_module_tensors
    from instep.big_models.sizes import retie_parameters as retie_parameters

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = loads(__name__, _HOME)
