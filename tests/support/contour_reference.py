"""The contour's formulas written out slowly in plain Python, with lists and loops, for one chain or several."""

import math


def bin_of(energy: float, first_edge: float, width: float, num_bins: int) -> int:
    """J(u) - 1: how many of the edges u_1, …, u_{m-1} lie below the energy."""
    return sum(energy > first_edge + i * width for i in range(num_bins - 1))


def slope_of(pi, visits, j, options):
    """The rise of log π across bin j, with what is never visited taken as flat."""
    m = len(pi)
    low, high = (max(j - 1, 0), j) if options["difference"] == "backward" else (j, min(j + 1, m - 1))
    if visits[low] == 0 or visits[high] == 0:
        return 0.0
    if options["flat_last_bin"] and options["difference"] == "backward" and j == m - 1:
        return 0.0
    return math.log(pi[high]) - math.log(pi[low])


def locate(pi, visits, energy, temperature, options):
    """Return bin, multiplier and log Ψ of an energy."""
    m, width, first = len(pi), options["width"], options["first_edge"]
    j = bin_of(energy, first, width, m)
    rise = slope_of(pi, visits, j, options)
    multiplier = 1 + options["zeta"] * temperature * rise / width
    if options["min_multiplier"] is not None:
        multiplier = max(multiplier, options["min_multiplier"])
    if options["max_multiplier"] is not None:
        multiplier = min(multiplier, options["max_multiplier"])
    if options["weighting"] == "bin":
        return j, multiplier, math.log(pi[j])
    if options["difference"] == "backward":
        known = visits[j] > 0 and visits[max(j - 1, 0)] > 0
        if options["flat_last_bin"] and j == m - 1 and known:
            return j, multiplier, math.log(pi[j - 1])
        edge = first + j * width
    else:
        edge = first + (j - 1) * width
    return j, multiplier, math.log(pi[j]) + rise * (energy - edge) / width


def learn(pi, bins, log_densities, step_size, options):
    """Return π after one step of the chains' mean: π(i) += mean of step·factor·(1{i=J} - π(i))."""
    m, zeta = len(pi), options["zeta"]
    new = list(pi)
    for j, log_density in zip(bins, log_densities, strict=True):
        factor = math.exp(zeta * log_density)
        if options["scheme"] == "scalable":
            factor = pi[j] * (math.exp(log_density) / pi[j]) ** zeta
        share = min(step_size * factor, 0.5)
        for i in range(m):
            own = share
            if options["scheme"] == "high-order" and i >= j:
                own = min(share + step_size * step_size * options["correction"], 0.5)
            new[i] += own * ((i == j) - pi[i]) / len(bins)
    if options["scheme"] == "high-order":
        total = sum(new)
        new = [value / total for value in new]
    return new
