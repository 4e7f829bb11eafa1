"""Curvatures of a potential, by Lanczos iterations on differences of gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

Gradient = Callable[[Tensor], Tensor]


def lanczos_spectrum(
    gradient: Gradient, point: Tensor, steps: int = 12, probes: int = 2, seed: int = 0
) -> list[tuple[float, float]]:
    """Return the distribution of the Hessian's eigenvalues at a point, as shares and curvatures.

    It is the Gauss quadrature of random probes v: shares are (e_1·y_i)² and curvatures θ_i for the eigenpairs of the
    Lanczos matrix of H and v. Products are H·v ≈ [g(x + ε·v) - g(x - ε·v)]/(2·ε), which every network allows. Negative
    curvatures count as 0.

    Args:
        gradient: g, the gradient of the potential at a point of shape (d,).
        point: x, shape (d,).
        steps: Lanczos iterations of a probe; each costs two gradients.
        probes: number of probes.
        seed: seed of the probes.

    Returns:
        (share, curvature) of each node; the shares add up to 1.

    Source: Ubaru, Chen & Saad 2017 (stochastic Lanczos quadrature), section 3.
    """
    generator = torch.Generator().manual_seed(seed)
    length = 1e-3 * max(float(point.norm()), 1.0)
    found: list[tuple[float, float]] = []
    for _ in range(probes):
        vector = torch.randn(len(point), generator=generator).to(point)
        basis, diagonal, above = [vector / vector.norm()], [], []
        for _ in range(min(steps, len(point))):
            now = basis[-1]
            product = (gradient(point + length * now) - gradient(point - length * now)).double() / (2 * length)
            diagonal.append(float(product @ now.double()))
            for earlier in basis:  # all of them, against rounding
                product = product - (product @ earlier.double()) * earlier.double()
            norm = float(product.norm())
            above.append(norm)
            if norm < 1e-10 * max(map(abs, diagonal)):
                break
            basis.append((product / norm).to(point))
        matrix = torch.diag(torch.tensor(diagonal).double())
        if len(diagonal) > 1:
            off = torch.tensor(above[: len(diagonal) - 1]).double()
            matrix = matrix + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(matrix)
        shares = vectors[0].square() / probes
        found += [(share, max(value, 0.0)) for share, value in zip(shares.tolist(), values.tolist(), strict=True)]
    return found
