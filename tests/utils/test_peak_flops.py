from __future__ import annotations

import pytest
import torch

from instep.utils.peak_flops import peak_flops, peak_of


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 NVL", "tf32", 417.5e12),
        ("NVIDIA H200", "float8", 1979e12),
        ("NVIDIA A100-SXM4-80GB", "float16", 312e12),
        ("Tesla V100-SXM2-32GB", "float16", 125e12),
        ("Tesla V100-PCIE-16GB", "float16", 112e12),
        ("Tesla T4", "bfloat16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "float32", 40e12),
        ("NVIDIA GeForce RTX 4080 SUPER", "float16", 97.5e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("AMD Instinct MI250X/MI250", "bfloat16", 191.5e12),
        ("Something Else 4", "float32", None),
    ],
)
def test_devices_by_their_names(name: str, dtype: str, peak: float | None) -> None:
    assert peak_of(name, dtype) == peak


def test_the_column_is_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    device, before = torch.device("cuda"), torch.get_float32_matmul_precision()
    assert peak_flops(device, "bf16-mixed") == peak_flops(device, "16-true") == 312e12
    assert peak_flops(device, "64-true") == 9.7e12
    assert peak_flops(device, "fp8") is None
    try:
        torch.set_float32_matmul_precision("highest")
        assert peak_flops(device, "32-true") == 19.5e12
        torch.set_float32_matmul_precision("high")
        assert peak_flops(device, "32-true") == 156e12
    finally:
        torch.set_float32_matmul_precision(before)
    assert peak_flops(torch.device("cpu"), "32-true") is None
