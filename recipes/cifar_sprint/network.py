"""A small convolutional network that trains fast: frozen whitening filters, three stages, no batch statistics."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, gelu, group_norm, max_pool2d, unfold

WHITENED_IMAGES = 5000
"""Most training images whose patches give the whitening filters."""
SMALLEST_VARIANCE = 1e-3
"""Added to a direction's variance, over the mean of all: directions without variance are not blown up."""


def whitening_filters(images: Tensor, count: int, side: int) -> Tensor:
    """Return filters whose responses to the images' patches are uncorrelated and of unit variance, each with ± sign.

        w_i = v_i/√(λ_i + δ·tr(S)/d),   S = Σ_i λ_i·v_i·v_iᵀ the patches' covariance, d its size, λ_1 ≥ λ_2 ≥ …

    Args:
        images: shape (n, channels, H, W).
        count: filters, an even number of at most 2·channels·side²; the leading directions are taken.
        side: of a patch, in pixels.

    Returns:
        shape (count, channels, side, side); the second half is minus the first.

    Raises:
        ValueError: for a count that is odd or too large.

    Source: Coates and Ng 2011 (whitened patches); frozen in a first layer as in the speed runs on CIFAR-10 (Jordan
    2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU").
    """
    channels = images.shape[1]
    size = channels * side * side
    if count % 2 or not 0 < count <= 2 * size:
        raise ValueError(f"filters must be an even number up to {2 * size} for patches of {side} pixels, got {count}")
    patches = unfold(images.float(), side).transpose(1, 2).reshape(-1, size)
    values, vectors = torch.linalg.eigh(patches.double().T.cov())
    scale = (values + SMALLEST_VARIANCE * values.mean()).rsqrt()
    leading = (vectors * scale).T.flip(0)[: count // 2].float().view(-1, channels, side, side)
    return torch.cat([leading, -leading])


class Normalised(nn.Module):
    """Subtracts the mean and divides by the standard deviation of an image's values in a group of channels; adds a
    bias for each channel.

    Args:
        channels: of the input.
        groups: of channels, which divide them equally.
    """

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.bias = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to 0."""
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(x, self.groups) + self.bias[:, None, None]


class Stage(nn.Module):
    """Halves an image: convolution, max-pooling, and a second convolution around which the input is added.

    Args:
        inputs, outputs: channels.
        groups: of the normalisation.
    """

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.first_norm = Normalised(outputs, groups)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = Normalised(outputs, groups)

    def forward(self, x: Tensor) -> Tensor:
        x = gelu(self.first_norm(max_pool2d(self.first(x), 2)))
        return x + gelu(self.second_norm(self.second(x)))


class SprintNetwork(nn.Module):
    """Whitening, three stages that halve the image, the largest value of each channel, and a scaled linear layer.

    The whitening filters require no gradient, so all chains share them. The normalisation has no batch statistics:
    p(y|x, θ) is then a function of θ alone, as a posterior needs it, and no buffer lags behind a chain that moves by
    noise. It has no gains either, so the prior on the convolutions does not act on the function.

    Args:
        classes: K.
        filters: the whitening filters, see `whitening_filters`.
        widths: channels of the stages.
        groups: of the normalisation.
        scale: factor of the logits.
    """

    def __init__(self, classes: int, filters: Tensor, widths: Sequence[int], groups: int, scale: float) -> None:
        super().__init__()
        self.filters = nn.Parameter(filters, requires_grad=False)
        sizes = [len(filters), *widths]
        self.stages = nn.Sequential(*(Stage(*pair, groups) for pair in pairwise(sizes)))
        self.last = nn.Linear(sizes[-1], classes)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        x = gelu(conv2d(x, self.filters, padding=self.filters.shape[-1] // 2))
        return self.scale * self.last(self.stages(x).amax((2, 3)))
