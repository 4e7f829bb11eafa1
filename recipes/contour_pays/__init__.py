"""When a contour pays: interacting contour, replica exchange, cyclical and plain chains at equal gradient evaluations.

Three small networks whose truth is known from Hamiltonian Monte Carlo (`shared/network_truth.py`), Digits with a small
network, and the plane with 25 modes of `twenty_five_modes` (B1). Every method has as many chains and steps on a
problem, so as many gradients; warm start, warm-up of the contour and the hot chains of replica exchange count. The
contour's settings are those of `ContourGradient(auto=True)`, on the plane of `choose_contour` on a pilot's energies;
nothing was tuned for it.

The measures are the distance to the truth (on networks W₁ between the laws of the functions over the truth's standard
deviation, the mean over a grid; on the plane the KL divergence of 50 x 50 cells) and the NLL of test data. Rows
"minus plain" are differences of a repeat from plain chains with the same seed. Errors are standard errors of the mean
over repeats. On the networks, "reference chain to chain" is the distance of two chains of the reference.

Quick is 3 repeats of the networks and 20 of the plane, full 20 and 100.

Measured (full), distances to the truth and NLL on Digits:

    problem           plain          interacting contour   replica exchange   cyclical       two reference chains
    smallest network  0.21 ± 0.02    0.21 ± 0.02           0.25 ± 0.02        0.34 ± 0.01    0.08
    classification    0.078 ± 0.002  0.080 ± 0.002         0.142 ± 0.004      0.175 ± 0.004  0.07
    regression        0.18 ± 0.01    0.19 ± 0.01           0.31 ± 0.01        5.40 ± 0.19    0.12
    25 modes          0.79 ± 0.02    0.42 ± 0.01           0.10 ± 0.002       1.36 ± 0.03
    NLL on Digits     0.242 ± 0.005  0.243 ± 0.005         0.246 ± 0.005      0.269 ± 0.005

So the contour pays on the plane, where energy barriers part the modes, and replica exchange more. On networks it pays
nowhere: the spread of κ is 0.02 to 0.13, since the energies of short warm-ups are few independent ones, or wide. The
efficiency of the weights is within 0.1 of what was expected in 78 of 80 fits.
"""

from typing import Any

from lightning_sgmcmc.recipes.contour_pays.settings import Settings
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings

METHODS = ("plain", "contour, interacting", "replica exchange", "cyclical")
PLANE = "25 modes"
NETWORKS = ("smallest", "classification", "regression", "digits")
FIGURES = {
    "distance": "distance to the truth",
    "nll": "NLL of test data (nats)",
    "spread": "spread of κ",
    "efficiency": "weight efficiency",
    "promised": "weight efficiency promised",
}


def run(options: Options) -> list[Row]:
    """Run every method on every problem, return the table."""
    from lightning_sgmcmc.recipes.shared.network_truth import truth

    settings = read_settings(Settings, options)
    methods, seeds = options.chosen(METHODS), options.seeds(settings.repeats)
    repeats = len(options.repeated(settings.plane_repeats))
    jobs: list[tuple[Any, ...]] = [(PLANE, method, options.seed, repeats) for method in methods]
    jobs += [(name, method, seed, 1) for name in reversed(NETWORKS) for seed in seeds for method in methods]
    found = run_jobs(one, jobs, options, settings)
    rows: list[Row] = []
    for name in NETWORKS:
        rows += rows_of(name, {method: [found[name, method, seed, 1][0] for seed in seeds] for method in methods})
        if name != "digits":
            rows += [
                Row(f"{name}: reference chain to chain", FIGURES["distance"], float(truth(name)["between"])),
                Row(f"{name}: reference", FIGURES["nll"], float(truth(name)["nll"])),
            ]
    return rows + rows_of(PLANE, {method: found[PLANE, method, options.seed, repeats] for method in methods})


def one(
    problem: str, method: str, seed: int, repeats: int, settings: Settings, options: Options
) -> list[dict[str, float]]:
    """Return the figures of a method on a problem, one mapping for each repeat; those of the plane run side by side."""
    if problem == PLANE:
        from lightning_sgmcmc.recipes.contour_pays.plane import on_plane

        return on_plane((method,), repeats, settings.plane_steps, seed)[method]
    from lightning_sgmcmc.recipes.contour_pays.networks import fit

    return [fit(problem, method, settings, seed)]


def rows_of(problem: str, found: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Return the rows of a problem: means over repeats, and mean differences from plain chains.

    Args:
        problem: its name.
        found: the figures of each repeat, by method.
    """
    rows = []
    for method, repeats in found.items():
        for key in repeats[0]:
            label = FIGURES.get(key, key)
            rows.append(mean_row(f"{problem}: {method}", label, [one[key] for one in repeats]))
            if method != "plain" and key in found.get("plain", [{}])[0]:
                pairs = zip(repeats, found["plain"], strict=True)
                rows.append(
                    mean_row(f"{problem}: {method} minus plain", label, [one[key] - plain[key] for one, plain in pairs])
                )
    return rows
