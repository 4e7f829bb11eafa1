"""The mixture of the samples' distributions: its members, distribution function, quantiles and draws."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from lightning_sgmcmc.predictions.distributions import cdf_of, has_cdf, is_discrete
from lightning_sgmcmc.seeding import OwnDraws
from lightning_sgmcmc.tensors import sent, widest, widest_dtype

MOST = 200
"""Steps of a search for quantiles; bisection alone needs about 60."""
PRECISION = 1e-10
"""Relative error of a quantile's tail probability."""


@dataclass(eq=False)
class Mixture:
    """The distribution p(y) = Σ_s w_s·p_s(y) of each number of n data, y = shift + factor·z with z of the components.

    Args:
        law: the components' class, a `torch.distributions.Distribution`.
        parameters: its arguments by name, shape (S, n, D), of fields (S, n, C, H, W), or with more axes.
        weights: w, shape (S,), summing to 1, on any device.
        shift: of the numbers, broadcast to their shape.
        factor: likewise.
    """

    law: type[Any]
    parameters: Mapping[str, Tensor]
    weights: Tensor
    shift: Tensor | float = 0.0
    factor: Tensor | float = 1.0

    @property
    def components(self) -> Distribution:
        """The distributions of z, in float64 where the device has it."""
        return self._made(self.parameters)

    def _made(self, parameters: Mapping[str, Tensor]) -> Distribution:
        exact = {name: widest(p) for name, p in parameters.items()}
        law: Distribution = self.law(**exact, validate_args=False)
        return law

    def to(self, device: torch.device | str) -> "Mixture":
        """Return a copy on a device."""
        to = torch.device(device)
        parameters = {name: sent(p, to) for name, p in self.parameters.items()}
        shift, factor = (sent(v, to) if isinstance(v, Tensor) else v for v in (self.shift, self.factor))
        return Mixture(self.law, parameters, sent(self.weights, to), shift, factor)

    def scaled(self, shift: Tensor | float, factor: Tensor | float) -> "Mixture":
        """Return the distribution of shift + factor·y."""
        return Mixture(self.law, self.parameters, self.weights, shift + factor * self.shift, factor * self.factor)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log Σ_s w_s·Π_d p_s(y_d) of each datum, shape (n,).

        Args:
            y: shape (n, D).
        """
        law = self.components
        each = law.log_prob(self._z(y, law))
        if not is_discrete(law):
            each = each - torch.as_tensor(self.factor, dtype=each.dtype, device=each.device).log()
        return (each.flatten(2).sum(-1) + sent(self.weights, each.device).log()[:, None]).logsumexp(0)

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y ≤ y), shape (n, D).

        Args:
            y: broadcast to (n, D).
        """
        law = self._with_cdf()
        return self._if_known(self._averaged(cdf_of(law, self._z(y, law))))

    def quantile(self, q: float) -> Tensor:
        """Return the smallest y with P(Y ≤ y) ≥ q, shape (n, D), by a bracketed search on the mixture's cdf; NaN where
        a component is."""
        law = self._with_cdf()
        low, high = self._bracket(law, q)
        if is_discrete(law):
            found = _smallest_integer(lambda z: self._averaged(cdf_of(law, z)), q, low.floor() - 1, high.ceil())
        else:
            found = self._root(law, q, low, high)
        return self.shift + self.factor * self._if_known(found)

    def sample(self, num: int, seed: int | torch.Generator = 0) -> Tensor:
        """Return draws, shape (num, n, D), the D numbers of an example from one component; NaN where that is NaN.

        Args:
            num: draws of each datum.
            seed: seed of the draws, or a generator on the CPU.
        """
        generator = generator_of(seed)
        first = next(iter(self.parameters.values()))
        count = first.shape[1]
        chosen = torch.multinomial(self.weights.cpu(), num * count, replacement=True, generator=generator)
        chosen = chosen.view(num, count).to(first.device)
        rows = torch.arange(count, device=first.device)
        own = int(torch.randint(2**62, (), generator=generator))
        parameters = {name: p[chosen, rows] for name, p in self.parameters.items()}
        # Some of torch's distributions refuse NaN, others return it.
        law = self._made({name: torch.where(p.isnan(), 1.0, p) for name, p in parameters.items()})
        with OwnDraws(own, first.device):
            draws = law.sample()
        return self.shift + self.factor * draws.masked_fill(_has_nan(parameters, draws.dim()), torch.nan)

    def _with_cdf(self) -> Distribution:
        if not has_cdf(self.law):
            raise NotImplementedError(
                f"quantiles and intervals need a distribution function, and {self.law.__name__} has none: define "
                "cdf(value) in a subclass, and use it as the likelihood's distribution"
            )
        return self.components

    def _z(self, y: Tensor, law: Distribution) -> Tensor:
        dtype = widest_dtype(y.device)
        z = (y.to(dtype) - self.shift) / self.factor
        return z.expand(law.batch_shape[1:])[None]

    def _if_known(self, found: Tensor) -> Tensor:
        """Return numbers (n, D), NaN where a component has a NaN parameter."""
        return found.masked_fill(_has_nan(self.parameters, 1 + found.dim()).any(0), torch.nan)

    def _averaged(self, each: Tensor) -> Tensor:
        return torch.einsum("s,s...->...", self.weights.to(each), each)

    def _bracket(self, law: Distribution, q: float) -> tuple[Tensor, Tensor]:
        """Return bounds of the quantile, by Cantelli's inequality, widened until they hold it."""
        mean = self._averaged(law.mean)
        std = (self._averaged(law.variance) + self._averaged((law.mean - mean).square())).sqrt()
        mean = torch.nan_to_num(mean, 0.0, 0.0, 0.0)
        std = torch.where(std.isfinite(), std, 1.0).clamp_min(1e-12)
        low, high = mean - 1.001 * std * ((1 - q) / q) ** 0.5, mean + 1.001 * std * (q / (1 - q)) ** 0.5
        for _ in range(MOST):
            too_high, too_low = self._averaged(cdf_of(law, low[None])) >= q, self._averaged(cdf_of(law, high[None])) < q
            if not bool((too_high | too_low).any()):
                break
            width = high - low
            low, high = torch.where(too_high, low - width, low), torch.where(too_low, high + width, high)
        return low, high

    def _root(self, law: Distribution, q: float, low: Tensor, high: Tensor) -> Tensor:
        """Return the root of cdf - q between bounds, by Newton's steps inside them and bisection else."""
        z = (low + high) / 2
        for step in range(MOST):
            excess = self._averaged(cdf_of(law, z[None])) - q
            low, high = torch.where(excess < 0, z, low), torch.where(excess < 0, high, z)
            scale = torch.finfo(z.dtype).eps * torch.maximum(low.abs(), high.abs())
            if bool(((excess.abs() <= PRECISION * min(q, 1 - q)) | (high - low <= 4 * scale)).all()):
                break
            newton = z - excess / self._averaged(law.log_prob(z[None]).exp())
            inside = (newton > low) & (newton < high) & bool(step % 3 != 2)
            z = torch.where(inside, newton, (low + high) / 2)
        return z


def _has_nan(parameters: Mapping[str, Tensor], axes: int) -> Tensor:
    """Return whether each distribution has a NaN parameter, from parameters with so many axes of distributions."""
    found = [p.isnan().reshape(*p.shape[:axes], -1).any(-1) for p in parameters.values()]
    return functools.reduce(torch.logical_or, found)


def _smallest_integer(cdf: Callable[[Tensor], Tensor], q: float, low: Tensor, high: Tensor) -> Tensor:
    """Return the smallest integer z in (low, high] with cdf(z) ≥ q, for integers low and high that enclose it."""
    for _ in range(MOST):
        if bool((high - low <= 1).all()):
            break
        middle = ((low + high) / 2).floor()
        enough = cdf(middle[None]) >= q
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high


# -- members -----------------------------------------------------------------------------------------------------------


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """Return p_k^(1/T) / Σ_j p_j^(1/T), the softmax of log p / T, shape (…, K).

    >>> tempered(Tensor([[0.9, 0.1]]), 2.0)
    tensor([[0.7500, 0.2500]])
    """
    return (widest(probabilities).clamp_min(FLOOR).log() / temperature).softmax(-1).to(probabilities.dtype)


def moved(each: Tensor, mean: Tensor, wanted: Tensor) -> Tensor:
    """Return each sample's probabilities after the least move of labels that turns their mean into the wanted one.

        q_sk = p_sk·min(1, w_k/p̄_k) + (Σ_j p_sj·(1 - w_j/p̄_j)⁺)·(w_k - p̄_k)⁺/Σ_j (w_j - p̄_j)⁺

    A label of a class whose probability falls is changed, by chance, into one of a class whose probability rises,
    alike for all samples. So the mean of q over the samples is exactly w, and the mutual information of label and
    parameters is at most that before (data processing inequality).

    Args:
        each: p, shape (S, n, …, K).
        mean: p̄, their mean, shape (n, …, K).
        wanted: w, shape (n, …, K).

    Source: the maximal coupling of two laws, Lindvall 1992, chapter I.5.

    >>> each = torch.tensor([[[1.0, 0.0]], [[0.6, 0.4]]])
    >>> moved(each, each.mean(0), torch.tensor([[0.9, 0.1]])).mean(0)
    tensor([[0.9000, 0.1000]])
    """
    before, after, own = widest(mean), widest(wanted), widest(each)
    kept = torch.where(before > 0, (after / before.clamp_min(FLOOR)).clamp_max(1.0), 1.0)
    risen = (after - before).clamp_min(0)
    share = risen / risen.sum(-1, keepdim=True).clamp_min(FLOOR)
    leaving = (own * (1 - kept)).sum(-1, keepdim=True)
    return (own * kept + leaving * share).to(each.dtype)


FLOOR = 1e-30
"""Smallest probability whose logarithm is taken."""


@dataclass(eq=False)
class Members:
    """The probabilities of each sample, with the samples' weights.

    Args:
        probabilities: shape (S, n, …, K).
        weights: w, shape (S,), summing to 1, on any device.
    """

    probabilities: Tensor
    weights: Tensor

    def to(self, device: torch.device | str) -> "Members":
        """Return a copy on a device."""
        return Members(self.probabilities.to(device), sent(self.weights, torch.device(device)))

    def quantile(self, q: float) -> Tensor:
        """Return the smallest probability that samples of weight q or more do not exceed, shape (n, …, K), NaN where a
        sample has NaN."""
        ordered, order = self.probabilities.sort(0)
        # A cumulative sum of equal weights differs from its exact value by rounding.
        reached = widest(sent(self.weights, order.device))[order].cumsum(0) >= q - 1e-12
        first = reached.long().argmax(0, keepdim=True)
        return torch.where(ordered[-1].isnan(), torch.nan, ordered.gather(0, first)[0])  # NaN is the last of a sort

    def cdf(self, p: Tensor | float) -> Tensor:
        """Return the weight of the samples whose probability is at most p, shape (n, …, K), NaN where one is NaN."""
        below = widest(self.probabilities <= p).masked_fill(self.probabilities.isnan(), torch.nan)
        return torch.einsum("s,s...->...", widest(sent(self.weights, below.device)), below).to(self.probabilities.dtype)

    def chosen(self, num: int, generator: torch.Generator) -> Tensor:
        """Return the probabilities of a sample drawn by the weights for each of num·n draws, shape (num, n, …, K)."""
        count = self.probabilities.shape[1]
        chosen = torch.multinomial(self.weights.cpu(), num * count, replacement=True, generator=generator)
        rows = torch.arange(count, device=self.probabilities.device)
        return self.probabilities[chosen.view(num, count).to(self.probabilities.device), rows]


def labels_of(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Return a label drawn from each row, shape (…, K) to (…), by inversion.

    Raises:
        ValueError: if a probability is NaN, since no label says so.
    """
    if unknown := int(probabilities.isnan().any(-1).sum()):
        raise ValueError(
            f"sample draws labels, and {unknown} of {probabilities[..., 0].numel()} have NaN probabilities: leave out "
            "inputs whose prediction is NaN"
        )
    uniform = torch.rand(probabilities.shape[:-1], generator=generator, dtype=torch.float64)
    total = widest(probabilities).cumsum(-1)
    below = total < (sent(uniform, probabilities.device) * total[..., -1])[..., None]
    return below.sum(-1)


def generator_of(seed: int | torch.Generator) -> torch.Generator:
    """Return the generator, or a new one with this seed."""
    return seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
