"""The networks that the benchmarks run on."""

from torch import nn

from lightning_sgmcmc.recipes.shared.resnet import resnet20

__all__ = ["mlp", "resnet18", "resnet20"]


def mlp() -> nn.Module:
    """784-100-10, 79,510 parameters in 4 tensors."""
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def resnet18(classes: int = 10) -> nn.Module:
    """torchvision's ResNet-18, 11 million parameters in 62 tensors."""
    from torchvision.models import resnet18 as build

    return build(num_classes=classes)
