"""The networks that the benchmarks run on."""

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    """784-100-10, 79,510 parameters in 4 tensors."""
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.padding = stride, outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        if self.stride > 1 or self.padding:
            x = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding))
        return torch.relu(x + y)


def resnet20(classes: int = 10) -> nn.Module:
    """ResNet-20 for 32×32 images (He et al. 2016, section 4.2), about 270,000 parameters in 59 tensors."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for outputs, first_stride in ((16, 1), (32, 2), (64, 2)):
        for index in range(3):
            layers.append(_Block(width, outputs, first_stride if index == 0 else 1))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def resnet18(classes: int = 10) -> nn.Module:
    """torchvision's ResNet-18, 11 million parameters in 62 tensors."""
    from torchvision.models import resnet18 as build

    return build(num_classes=classes)
