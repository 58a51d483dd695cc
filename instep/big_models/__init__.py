"""Models larger than the memory: empty weights, device maps, offload, quantization. A name is loaded on first use."""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.big_models.device_map import check_device_map as check_device_map
    from instep.big_models.device_map import clean_device_map as clean_device_map
    from instep.big_models.device_map import get_balanced_memory as get_balanced_memory
    from instep.big_models.device_map import infer_auto_device_map as infer_auto_device_map
    from instep.big_models.dispatch import align_module_device as align_module_device
    from instep.big_models.dispatch import cpu_offload as cpu_offload
    from instep.big_models.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from instep.big_models.dispatch import disk_offload as disk_offload
    from instep.big_models.dispatch import dispatch_model as dispatch_model
    from instep.big_models.dispatch import has_offloaded_params as has_offloaded_params
    from instep.big_models.dispatch import remove_hook_from_submodules as remove_hook_from_submodules
    from instep.big_models.dispatch import set_module_tensor_to_device as set_module_tensor_to_device
    from instep.big_models.empty import init_empty_weights as init_empty_weights
    from instep.big_models.empty import init_on_device as init_on_device
    from instep.big_models.hooks import AlignDevicesHook as AlignDevicesHook
    from instep.big_models.hooks import CpuOffload as CpuOffload
    from instep.big_models.hooks import ModelHook as ModelHook
    from instep.big_models.hooks import SequentialHook as SequentialHook
    from instep.big_models.hooks import UserCpuOffloadHook as UserCpuOffloadHook
    from instep.big_models.hooks import add_hook_to_module as add_hook_to_module
    from instep.big_models.hooks import attach_align_device_hook as attach_align_device_hook
    from instep.big_models.hooks import remove_hook_from_module as remove_hook_from_module
    from instep.big_models.layerwise_casting import LayerwiseCastingHook as LayerwiseCastingHook
    from instep.big_models.layerwise_casting import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
    from instep.big_models.loading import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
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
    from instep.big_models.training import prepare_offloaded_training as prepare_offloaded_training

__all__, __getattr__, __dir__ = loads(__name__)
