"""Residual networks for small images."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class _Sized(nn.Module):
    """A block that keeps its arguments, from which a sample store describes it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inputs, self.outputs, self.stride = inputs, outputs, stride


class _Block(_Sized):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, stride)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        padding = self.outputs - self.inputs
        if self.stride > 1 or padding:
            x = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, padding))
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


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return a 1×1 convolution if the shape changes, else the identity."""
    if stride == 1 and inputs == outputs:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class _ProjectedBlock(_Sized):
    """A block whose shortcut is a 1×1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, stride)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class _Bottleneck(_Sized):
    """Three convolutions, of which the first and the last are 1×1; a quarter of the outputs in between."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, stride)
        narrow = outputs // 4
        self.conv1 = nn.Conv2d(inputs, narrow, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(narrow)
        self.conv3 = nn.Conv2d(narrow, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(torch.relu(self.norm2(self.conv2(y)))))
        return torch.relu(y + self.shortcut(x))


class _WideBlock(_Sized):
    """A block that normalises before each convolution (Zagoruyko & Komodakis 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, stride)
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(x))
        around = x if self.shortcut is None else self.shortcut(y)
        return around + self.conv2(torch.relu(self.norm2(self.conv1(y))))


def staged(
    block: Callable[[int, int, int], nn.Module], stem: int, widths: tuple[int, ...], blocks: int, classes: int
) -> nn.Module:
    """Return a residual network: a convolution, stages of blocks, of which each but the first halves the image.

    Args:
        block: makes a block of its numbers of inputs and outputs and its stride.
        stem: channels of the first convolution.
        widths: channels of each stage.
        blocks: blocks in each stage.
        classes: K.
    """
    late = block is _WideBlock
    layers: list[nn.Module] = [nn.Conv2d(3, stem, 3, 1, 1, bias=False)]
    layers += [] if late else [nn.BatchNorm2d(stem), nn.ReLU()]
    inputs = stem
    for stage, outputs in enumerate(widths):
        for index in range(blocks):
            layers.append(block(inputs, outputs, 2 if index == 0 and stage > 0 else 1))
            inputs = outputs
    layers += [nn.BatchNorm2d(inputs), nn.ReLU()] if late else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "ResNet-8": lambda classes: resnet(1, 8, classes),
    "ResNet-20": lambda classes: staged(_ProjectedBlock, 16, (16, 32, 64), 3, classes),
    "ResNet-32": lambda classes: staged(_ProjectedBlock, 16, (16, 32, 64), 5, classes),
    "ResNet-56": lambda classes: staged(_Bottleneck, 16, (64, 128, 256), 9, classes),
    "WRN-16-8": lambda classes: staged(_WideBlock, 16, (128, 256, 512), 2, classes),
}
"""The networks of ICSGLD's program, by the number of classes: shortcuts are 1×1 convolutions, and its network called
ResNet-56 has blocks of three convolutions, 82 in all. ResNet-8 is ours, for quick runs, with half of the channels."""


def resnet18(classes: int = 10, width: int = 64) -> nn.Module:
    """Return ResNet-18 for 32×32 images, 11.2 million parameters: no pooling before the first of its four stages.

    Args:
        classes: K.
        width: channels of the first stage; each other has twice as many as the one before.
    """
    return staged(_ProjectedBlock, width, (width, 2 * width, 4 * width, 8 * width), 2, classes)


class FilterResponseNorm(nn.Module):
    """Filter response normalisation with its thresholded activation, each image and channel by itself.

        max(γ·x/√(ν² + 1e-6) + β, t),   ν² the mean of x² over the places of an image

    Args:
        channels: C of inputs (n, C, height, width); γ, β and t have one number for each.

    Source: Singh & Krishnan 2020 (Filter response normalization layer), with a constant in place of a learned ε.
    """

    EPSILON = 1e-6

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.scale, self.shift, self.threshold = (nn.Parameter(torch.empty(channels, 1, 1)) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set γ to 1, and β and t to 0."""
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.shift)
        nn.init.zeros_(self.threshold)

    def forward(self, x: Tensor) -> Tensor:
        square = x.square().mean((-2, -1), keepdim=True)
        return torch.maximum(self.scale * x * (square + self.EPSILON).rsqrt() + self.shift, self.threshold)


def _filtered(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    """Return a convolution, with biases, and its `FilterResponseNorm`."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, padding=size // 2), FilterResponseNorm(outputs))


class _FilteredBlock(_Sized):
    """A block with `FilterResponseNorm` and Swish, whose shortcut is a 1×1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, stride)
        self.first, self.second = _filtered(inputs, outputs, stride), _filtered(outputs, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else _filtered(inputs, outputs, stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        swish = nn.functional.silu
        return swish(self.second(swish(self.first(x))) + self.shortcut(x))


def resnet20_frn(classes: int = 10, width: int = 16) -> nn.Module:
    """Return the ResNet-20-FRN-Swish of Izmailov et al. 2021: filter response normalisation, Swish, no batch effects.

    Args:
        classes: K.
        width: channels of the first stage.
    """
    layers: list[nn.Module] = [_filtered(3, width), nn.SiLU()]
    inputs = width
    for stage in range(3):
        for index in range(3):
            outputs = width * 2**stage
            layers.append(_FilteredBlock(inputs, outputs, 2 if index == 0 and stage > 0 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
