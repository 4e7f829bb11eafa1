"""UCI regression with NLL beside RMSE: sampled networks and an ensemble at equal cost, beside Deep Ensembles' table.

Networks with 50 hidden units and an output for the mean and one for the noise, as in the paper (Lakshminarayanan et
al. 2017, Table 1), on the standard splits; RMSE and NLL are in the targets' own units. `ensemble` is forty networks
that AdamW trains with the prior as weight decay. `posterior` starts at five of them, and samples at temperature 1 with
all data in each step; its time step follows from the noise that the optimized networks have found. The paper's
ensembles are five networks of 40 epochs.

Measured (quick: split 0 alone, 2026-11-23), RMSE and NLL of `posterior`: Boston 2.40, 2.51; Concrete 5.44, 2.75;
Energy 0.62, 0.24; Kin8nm 0.074, -1.283; Power plant 4.07, 2.78; Wine 0.625, 0.831; Yacht 0.41, 0.28. `ensemble`: 2.38,
3.59; 5.63, 3.01; 1.73, 0.48; 0.085, -1.226; 4.22, 2.86; 0.613, 0.883; 0.46, 0.24, at 0.7 to 1 times the processor
seconds. The posterior has the lower NLL on six of seven tables, and a little more on Yacht (by 0.04). Its 90 %
intervals cover 84 to 100 % (Boston 84 %), the ensemble's 76 to 100 %. The paper's NLL, over twenty splits: 2.41, 3.06,
1.38, -1.20, 2.79, 0.94, 1.18. The other splits have not been run.

quick is the first split (`python -m recipes uci_nll --data-root DIR`), full all twenty.
"""

from dataclasses import dataclass
from typing import Any

from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.regression import METHODS, Setting, fit_and_score, means
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings


@dataclass(frozen=True)
class Settings:
    """Number of splits, and the network and training of both methods."""

    splits: int
    fit: Setting

    @property
    def work(self) -> float:
        """The splits, which have the same work."""
        return float(self.splits)


PUBLISHED = {
    "boston-housing": ((3.28, 1.00), (2.41, 0.25)),
    "concrete": ((6.03, 0.58), (3.06, 0.18)),
    "energy": ((2.09, 0.29), (1.38, 0.22)),
    "kin8nm": ((0.09, 0.00), (-1.20, 0.02)),
    "power-plant": ((4.11, 0.17), (2.79, 0.04)),
    "wine-quality-red": ((0.64, 0.04), (0.94, 0.12)),
    "yacht": ((1.58, 0.48), (1.18, 0.21)),
}
"""RMSE and NLL of Deep Ensembles, in the targets' own units."""


def run(options: Options) -> list[Row]:
    """Run both methods on all tables and splits, return the table."""
    settings = read_settings(Settings, options)
    require(*(_data(table, 0, options) for table in PUBLISHED))
    splits, methods = options.repeated(settings.splits), options.chosen(METHODS)
    jobs = [(table, method, split) for table in PUBLISHED for split in splits for method in methods]
    outcomes = run_jobs(one, jobs, options, settings.fit)
    rows = []
    for table, published in PUBLISHED.items():
        for name, paper in zip(("rmse", "nll"), published, strict=True):
            for method in methods:
                known = paper if method == "ensemble" else (None, None)
                values = means([outcomes[table, method, s] for s in splits], name)
                rows.append(mean_row(method, f"{table}: {name.upper()}", values, *known))
            if len(methods) == 1:
                continue
            gains = [outcomes[table, "posterior", s][name] - outcomes[table, "ensemble", s][name] for s in splits]
            rows.append(mean_row("posterior - ensemble", f"{table}: {name.upper()}", gains))
        for method in methods:
            found_here = [outcomes[table, method, s] for s in splits]
            for name, label in (("coverage_90", "coverage of 90 % intervals"), ("seconds", "processor seconds")):
                rows.append(mean_row(method, f"{table}: {label}", means(found_here, name)))
    return rows


def one(table: str, method: str, split: int, setting: Setting, options: Options) -> dict[str, float]:
    """Fit and score one method on one split of a table."""
    return fit_and_score(lambda size: _data(table, split, options, size), method, setting, options.seed + split)


def _data(table: str, split: int, options: Options, batch_size: int = 100) -> Any:
    from lightning_sgmcmc.datamodules import UCIRegressionDataModule

    return UCIRegressionDataModule(table, options.data_root, split=split, batch_size=batch_size)
