"""The networks that the benchmarks run on."""

from torch import Tensor, nn

from lightning_sgmcmc.recipes.shared.resnet import resnet20

__all__ = ["Transformer", "mlp", "resnet18", "resnet20", "wide_mlp"]


def mlp() -> nn.Module:
    """784-100-10, 79,510 parameters in 4 tensors."""
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def wide_mlp() -> nn.Module:
    """784-400-400-10, 478,410 parameters in 6 tensors."""
    return nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))


class Transformer(nn.Module):
    """A classifier of sequences of tokens, shape (n, length), 530,826 parameters in 28 tensors."""

    tokens, width = 1000, 128

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.tokens, self.width)
        layer = nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(self.width, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.embedding(x)).mean(1)
        return self.head(hidden)  # type: ignore[no-any-return]


def resnet18(classes: int = 10) -> nn.Module:
    """torchvision's ResNet-18, 11 million parameters in 62 tensors."""
    from torchvision.models import resnet18 as build

    return build(num_classes=classes)
