import torch
from torch.torch_version import TorchVersion

PIPES = TorchVersion(torch.__version__) >= "2.13"  # pipelines refuse an older torch
