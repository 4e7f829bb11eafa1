"""The samplers' steps, one chain in plain Python floats, as the formulas stand in papers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

N = 50
SHAPES = ((3, 2), (4,), ())


@dataclass
class Controls:
    lr: float
    temperature: float
    multiplier: float


Vector = list[float]


def start(chain: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + chain)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


class Reference:
    """One chain in plain Python floats; `update` makes a step of each coordinate."""

    def __init__(self, theta: Vector) -> None:
        self.theta = list(theta)
        self.v = [0.0] * len(theta)

    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        raise NotImplementedError


class SGLDReference(Reference):
    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        for i in range(len(g)):
            self.theta[i] += -c.lr * c.multiplier * g[i] + math.sqrt(2 * c.lr * c.temperature / N) * xi[i]


class PSGLDReference(Reference):
    alpha, eps = 0.9, 1e-3

    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        for i in range(len(g)):
            self.v[i] = self.alpha * self.v[i] + (1 - self.alpha) * g[i] ** 2
            preconditioner = 1 / (self.eps + math.sqrt(self.v[i]))
            self.theta[i] -= c.lr * c.multiplier * preconditioner * g[i]
            self.theta[i] += math.sqrt(2 * c.lr * c.temperature * preconditioner / N) * xi[i]


class SGHMCReference(Reference):
    """The velocity is kept across a change of lr, but between two steps without noise it follows lr, as in torch."""

    friction, noise_estimate = 0.3, 0.1
    last: Controls | None = None

    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        if self.last is not None and self.last.temperature == c.temperature == 0:
            self.v = [v * c.lr / self.last.lr for v in self.v]
        self.last = c
        for i in range(len(g)):
            noise = math.sqrt(2 * (self.friction - self.noise_estimate) * c.lr * c.temperature / N) * xi[i]
            self.v[i] = (1 - self.friction) * self.v[i] - c.lr * c.multiplier * g[i] + noise
            self.theta[i] += self.v[i]


class PSGHMCReference(Reference):
    """The floor is set by the root mean square of √V̂ over each tensor."""

    friction, alpha, floor = 0.3, 0.9, 0.1

    def __init__(self, theta: Vector) -> None:
        super().__init__(theta)
        self.squares, self.steps = [0.0] * len(theta), 0

    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        self.steps += 1
        self.squares = [self.alpha * s + (1 - self.alpha) * x**2 for s, x in zip(self.squares, g, strict=True)]
        unbiased = [s / (1 - self.alpha**self.steps) for s in self.squares]
        floors: list[float] = []
        for tensor in start():
            own_squares = unbiased[len(floors) : len(floors) + tensor.numel()]
            floors += [self.floor * math.sqrt(sum(own_squares) / tensor.numel())] * tensor.numel()
        for i in range(len(g)):
            own = c.lr / (math.sqrt(unbiased[i]) + floors[i] + 1e-8)
            noise = self.friction * math.sqrt(2 * own * c.temperature / N) * xi[i]
            self.v[i] = (1 - self.friction) * self.v[i] - self.friction * own * c.multiplier * g[i] + noise
            self.theta[i] += self.v[i]


class AdamSGLDReference(Reference):
    """The preconditioner is frozen after six steps; the averaged gradient is not."""

    betas, eps, adapt = (0.8, 0.9), 1e-3, 6

    def __init__(self, theta: Vector) -> None:
        super().__init__(theta)
        self.squares, self.steps, self.adapted = [0.0] * len(theta), 0, 0

    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        (first, second), self.steps = self.betas, self.steps + 1
        if self.adapted < self.adapt:
            self.adapted += 1
            self.squares = [second * s + (1 - second) * x**2 for s, x in zip(self.squares, g, strict=True)]
        for i in range(len(g)):
            own = c.lr / (math.sqrt(self.squares[i] / (1 - second**self.adapted)) + self.eps)
            self.v[i] = first * self.v[i] + (1 - first) * c.multiplier * g[i]
            self.theta[i] -= own * self.v[i] / (1 - first**self.steps)
            self.theta[i] += math.sqrt(2 * own * c.temperature / N) * xi[i]


class ScaleAdaptedReference(Reference):
    friction, floor, adapt, subtracts = 0.3, 0.1, 6, False

    def __init__(self, theta: Vector) -> None:
        super().__init__(theta)
        self.squares, self.means, self.windows = ([0.0] * len(theta) for _ in range(3))
        self.adapted = 0

    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        if self.adapted < self.adapt:
            self.adapted += 1
            for i, x in enumerate(g):
                weight = 1 / (1 + self.windows[i])
                self.means[i] += weight * (x - self.means[i])
                self.squares[i] += weight * (x**2 - self.squares[i])
                self.windows[i] = 1 + self.windows[i] * (1 - self.means[i] ** 2 / self.squares[i])
        floors: list[float] = []
        for tensor in start():
            own_squares = self.squares[len(floors) : len(floors) + tensor.numel()]
            floors += [self.floor * math.sqrt(sum(own_squares) / tensor.numel())] * tensor.numel()
        for i in range(len(g)):
            inverse = math.sqrt(self.squares[i]) + floors[i] + 1e-8
            variance = 2 * self.friction * c.lr * c.temperature / inverse / N
            if self.subtracts:
                variance = max(variance - (c.lr * c.multiplier) ** 2 * self.squares[i] / inverse**2, 0.0)
            noise = math.sqrt(variance) * xi[i]
            self.v[i] = (1 - self.friction) * self.v[i] - c.lr / inverse * c.multiplier * g[i] + noise
            self.theta[i] += self.v[i]


class PaperReference(ScaleAdaptedReference):
    floor, subtracts = 0.0, True


class UnderdampedReference(Reference):
    friction = 1.5

    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        h = c.lr
        for i in range(len(g)):
            self.theta[i] += h * self.v[i]
            self.v[i] -= h * (c.multiplier * N * g[i] + self.friction * self.v[i])
            self.v[i] += math.sqrt(2 * self.friction * c.temperature * h) * xi[i]


class BAOABReference(Reference):
    friction = 1.5

    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        h, decay = c.lr, math.exp(-self.friction * c.lr)
        for i in range(len(g)):
            self.v[i] -= h * c.multiplier * N * g[i]
            self.theta[i] += h / 2 * self.v[i]
            self.v[i] = decay * self.v[i] + math.sqrt(c.temperature * (1 - decay**2)) * xi[i]
            self.theta[i] += h / 2 * self.v[i]


class OBABOReference(Reference):
    friction = 1.5

    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        h, decay = c.lr, math.exp(-self.friction * c.lr)
        for i in range(len(g)):
            force = -h / 2 * c.multiplier * N * g[i]
            self.v[i] = decay * (self.v[i] + force) + math.sqrt(c.temperature * (1 - decay**2)) * xi[i] + force
            self.theta[i] += h * self.v[i]


class UBUReference(Reference):
    """The joint law of position and velocity, by the two columns of a square root of its covariance."""

    friction = 1.5

    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        h, a, decay = c.lr, self.friction, math.exp(-self.friction * c.lr)
        own = c.temperature * (2 * a * h - 3 + 4 * decay - decay**2) / a**2
        both, speed = c.temperature * (1 - decay) ** 2 / a, c.temperature * (1 - decay**2)
        slope = both / speed if speed > 0 else 0.0
        for i in range(len(g)):
            v = self.v[i] - h * c.multiplier * N * g[i]
            push = math.sqrt(speed) * xi[i]
            self.theta[i] += (1 - decay) / a * v + slope * push
            self.theta[i] += math.sqrt(max(own - slope * both, 0.0)) * xi[len(g) + i]
            self.v[i] = decay * v + push


class SGNHTReference(Reference):
    a, inertia = 0.2, 0.5
    eta = 0.2

    def update(self, g: Vector, xi: Vector, c: Controls) -> None:
        for i in range(len(g)):
            noise = math.sqrt(2 * self.a * c.lr * c.temperature / N) * xi[i]
            self.v[i] = (1 - self.eta) * self.v[i] - c.lr * c.multiplier * g[i] + noise
            self.theta[i] += self.v[i]
        if c.temperature > 0:
            mean_square = sum(v**2 for v in self.v) / len(self.v)
            self.eta += ((1 - self.eta / 2) * N / c.lr * mean_square - c.temperature) * (c.lr / N) / self.inertia
