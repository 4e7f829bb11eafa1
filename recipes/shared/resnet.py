"""Residual networks for small images."""

import torch
from torch import Tensor, nn


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


def resnet(blocks: int, width: int, classes: int) -> nn.Module:
    """Return a residual network for 32×32 images of depth 6·blocks + 2 (He et al. 2016, section 4.2).

    Args:
        blocks: residual blocks in each of the three stages.
        width: channels of the first stage; the others have twice and four times as many.
        classes: K.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(3):
        for index in range(blocks):
            outputs = width * 2**stage
            layers.append(_Block(inputs, outputs, 2 if index == 0 and stage > 0 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def resnet20(classes: int = 10) -> nn.Module:
    """Return ResNet-20, about 270,000 parameters in 59 tensors."""
    return resnet(3, 16, classes)


class _ProjectedBlock(nn.Module):
    """A block whose shortcut is a 1×1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


def resnet18(classes: int = 10, width: int = 64) -> nn.Module:
    """Return ResNet-18 for 32×32 images, 11.2 million parameters: no pooling before the first of its four stages.

    Args:
        classes: K.
        width: channels of the first stage; each other has twice as many as the one before.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(4):
        for index in range(2):
            outputs = width * 2**stage
            layers.append(_ProjectedBlock(inputs, outputs, 2 if index == 0 and stage > 0 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
