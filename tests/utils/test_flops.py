from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from instep.utils.flops import FlopCounter, peak_flops, peak_of


def test_forward_and_backward_of_attention_and_of_layers():
    given = torch.rand(2, 3, 8, 4, requires_grad=True)  # batch, heads, length, size of a head
    with FlopCounter() as counter:
        attended = F.scaled_dot_product_attention(given, given, given)
        forward = counter.total
        attended.sum().backward()
    products = 2 * 2 * 3 * 8 * 8 * 4  # one of two matrices a head
    assert forward == 2 * products
    assert counter.total == forward + 5 * products
    with FlopCounter() as counter:
        nn.Conv2d(1, 3, 3)(torch.ones(2, 1, 8, 8)).sum().backward()
    assert list(counter.counts.values()) == [2 * 2 * 3 * 6 * 6 * 9] * 2


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


@pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32:UserWarning")  # torch 2.9's own
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
