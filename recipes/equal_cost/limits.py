"""The limits that `auto` should keep, fixed before the full run: which comparisons decide, and by how much."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.recipes.equal_cost.comparison import Difference, Results

SUBJECT, FEW = "auto", "auto_10"
RIVALS = ("ensemble_temperature", "sgd_tuned_temperature")
"""Of these the one with the lower mean NLL on the test data is the rival, which favours the rivals a little."""
NLL_MARGIN = 0.005
"""The NLL may exceed that of the rival by so much, in nats."""
NOVELTY_GAIN, NOVELTY_ENOUGH = 0.02, 0.99
"""The OOD AUROC should exceed the ensemble's by so much, or reach this value."""
ECE_MARGIN = 0.005
"""The ECE may exceed that of the ensemble with a temperature by so much."""
LOSS_OF_FEW = 0.003
"""Ten samples may lose so much NLL to all, in nats."""


class Verdict(NamedTuple):
    """One limit on one data set.

    Attributes:
        found: what was measured, as text.
        kept: whether the limit is kept by the mean over seeds; None where it is not measured.
    """

    found: str
    kept: bool | None

    def __str__(self) -> str:
        return self.found if self.kept is None else f"{self.found}, {'kept' if self.kept else '**not kept**'}"


LIMITS = (
    f"NLL at most {NLL_MARGIN} above the better of {' and '.join(RIVALS)}",
    f"OOD AUROC {NOVELTY_GAIN} above the ensemble's, or at least {NOVELTY_ENOUGH}",
    f"ECE at most {ECE_MARGIN} above that of ensemble_temperature",
    f"{FEW}: NLL at most {LOSS_OF_FEW} above all samples'",
)


def verdicts(results: Results, data: str, shared_data: bool) -> tuple[Verdict, ...]:
    """Return the verdicts of a data set, in the order of `LIMITS`; all rows are needed.

    Args:
        results: all rows.
        data: the data set.
        shared_data: whether all seeds have the same test data.
    """
    rival = min(RIVALS, key=lambda row: results.mean(data, row, "nll"))
    nll = results.differences(data, rival, "nll", shared_data)[SUBJECT]
    few = results.differences(data, SUBJECT, "nll", shared_data)[FEW]
    own, others = (results.mean(data, row, "ood_auroc") for row in (SUBJECT, "ensemble"))
    novelty = own >= min(others + NOVELTY_GAIN, NOVELTY_ENOUGH)
    ece = Verdict("", None)
    if "ece" in results.metrics(data, SUBJECT):
        values = [results.mean(data, row, "ece") for row in (SUBJECT, "ensemble_temperature")]
        ece = Verdict(f"{values[0]:.4f} to {values[1]:.4f}", values[0] <= values[1] + ECE_MARGIN)
    return (
        Verdict(f"{_short(nll)} from {rival}", nll.value <= NLL_MARGIN),
        Verdict(f"{own:.3f} to {others:.3f}", novelty),
        ece,
        Verdict(_short(few), few.value <= LOSS_OF_FEW),
    )


def section(results: Results, sets: Sequence[str], fixed_test: Sequence[str]) -> str:
    """Return the page's first section: each limit, on how many data sets it is kept, and the table; empty without rows.

    Args:
        results: all rows.
        sets: the data sets.
        fixed_test: those whose seeds share their test data.
    """
    needed = (SUBJECT, FEW, "ensemble", *RIVALS)
    known = [data for data in sets if all(results.has(data, row) for row in needed)]
    if not known:
        return ""
    found = {data: verdicts(results, data, data in fixed_test) for data in known}
    said = []
    for place, limit in enumerate(LIMITS):
        of = {data: own[place].kept for data, own in found.items() if own[place].kept is not None}
        failed = [data for data, kept in of.items() if not kept]
        names = f"; not on {', '.join(failed)}" if failed else ""
        said.append(f"* {limit}: kept on {len(of) - len(failed)} of {len(of)} data sets{names}.")
    table = markdown_table(
        ["data set", "ΔNLL", "OOD AUROC, ensemble's", "ECE, ensemble_temperature's", f"ΔNLL of {FEW}"],
        [[data, *map(str, own)] for data, own in found.items()],
    )
    return "## Limits that were fixed before the run\n\n" + "\n".join(said) + f"\n\n{table}"


def _short(one: Difference) -> str:
    return f"{one.value:+.4f} [{one.low:+.4f}, {one.high:+.4f}]".replace("-", "−")
