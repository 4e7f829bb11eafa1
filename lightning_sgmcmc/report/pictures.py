"""A run's pictures: on the page of a report, drawn where the run did not draw them; and those of the dashboard."""

import io
import math
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_sgmcmc import figures
from lightning_sgmcmc.contour import ContourState, LearnedContour
from lightning_sgmcmc.diagnostics.draws import ChainGrid, chain_diagnostics
from lightning_sgmcmc.diagnostics.geometry import classical_scaling, squared_distances
from lightning_sgmcmc.diagnostics.scores import predictive_entropy, reliability
from lightning_sgmcmc.evaluation.comparison import chain_rows, prediction_diagnostics
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.figures import run as figures_contour
from lightning_sgmcmc.figures import samples as figures_samples
from lightning_sgmcmc.fit.results import CYCLE, NLL, PRIOR_NORM, RunHistory, cycle_spans
from lightning_sgmcmc.health.report import HealthReport
from lightning_sgmcmc.report.run_record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = {
    "energy": ("Training loss", "NLL per example of the mini-batches along the run."),
    "sample_energy": ("Energies of the samples", "Energies of the samples, by chain."),
    "energy_histogram": ("Energies of the samples", "How often each energy occurs among the samples."),
    "schedule": ("Schedule", "Step size and temperature along the run."),
    "traces": ("Single weights", "Values of single weights along the run."),
    "temperatures": (
        "Temperatures of each tensor",
        "Measured temperatures with 95 % intervals, and the target. A point without an interval has too few "
        "independent measurements for one.",
    ),
    "contour": ("Visited energies", "Energies that the contour run visited, and the target's by the learned π."),
    "multiplier": (
        "Gradient multiplier",
        "The gradient multiplier κ against the energy; the bouncy zone is where it is negative.",
    ),
    "running": (
        "Metrics against the number of samples",
        "Each metric of the average over the first samples, and of single samples.",
    ),
    "running_": ("Average against the number of samples", "The running model average, and single samples."),
    "reliability": (
        "Reliability",
        "Accuracy of the model average against its confidence, with 95 % binomial intervals, and the number of data "
        "in each bin.",
    ),
    "entropy": ("Predictive entropy", "Entropy of the predictive distribution."),
    "weight": ("Weights of the samples", "Weights of the samples in the average."),
    "geometry": (
        "Samples in weight space",
        "The samples in the plane that best keeps their distances, joined in the order of drawing.",
    ),
    "chains": ("Chains", "The samples' energies by chain, and the NLL of each chain's average."),
    "segments": (
        "Loss between samples",
        "Metrics on the straight line between two samples, which are at its ends. A rise between them means that the "
        "samples lie in different valleys of the loss.",
    ),
}
"""Titles and captions by the prefix of a picture's name, in the order of the page; other pictures follow, by name."""
ENERGIES = ("Energy along the run", "Mini-batch estimates of the potential energy along the run.")
"""Title and caption of the energy's picture of a run that did not record the NLL."""
NORM = " Below, ‖θ‖²/(d·σ²), which is 1 under the prior."
ALONG = ("energy", "schedule", "traces")
"""Pictures along the run, in which samples are marked."""
REPEATED = "entropy_histogram"
"""Prefix of pictures that a page with the picture "entropy" leaves out, which says the same."""
TEST = "test_"
"""Prefix of pictures on the test data, which come last."""
FIRST = (
    ("energy", "sample_energy"),
    ("test_running", "running"),
    ("test_reliability", "reliability", "test_segments", "segments"),
    ("temperatures", "chains", "geometry"),
)
"""The pictures that are shown first, four: of each group the first that there is."""
Figures = dict[str, Any]
"""matplotlib figures by name."""
Histograms = dict[str, tuple[list[float], str]]
"""Values and their axis label, by name."""
Table = tuple[list[str], list[list[Any]]]
"""Column names and rows."""
Planned = list[tuple[int, float, float, int]]
"""Steps of a run with the step size, τ and the cycle that its schedule sets there."""


@dataclass(frozen=True)
class Picture:
    """A picture of the page, with its title and its caption."""

    name: str
    png: bytes
    title: str
    caption: str

    @property
    def base64(self) -> str:
        """Its content as text."""
        return b64encode(self.png).decode()


def pictures(run: RunRecord) -> tuple[list[Picture], list[Picture]]:
    """Return the four pictures that are shown first, and the others, with their captions."""
    drawn = _drawn(run)
    found = {**drawn, **run.pictures}
    found = {name: png for name, png in found.items() if not _is_omitted(name, found, run)}
    first = [name for group in FIRST if (name := next((one for one in group if one in found), None)) is not None]
    others = [name for name in sorted(found, key=_place) if name not in first]
    missing = len(FIRST) - len(first)
    first, others = first + others[:missing], others[missing:]

    def boxes(names: list[str]) -> list[Picture]:
        return [Picture(name, found[name], *_words(name, run)) for name in names]

    return boxes(first), boxes(others)


def _is_omitted(name: str, found: Mapping[str, bytes], run: RunRecord) -> bool:
    """Return whether another picture says the same, or energies of several priors are mixed in it."""
    own = name.removeprefix(TEST)
    repeats = own.startswith(REPEATED) and name.removesuffix(own) + "entropy" in found
    return repeats or (own in ("energy_histogram", "sample_energy") and run.has_several_scales)


def _words(name: str, run: RunRecord) -> tuple[str, str]:
    """Return a picture's title and its caption, which names only what the picture of this run holds."""
    plain, start = name.removeprefix(TEST).replace("_", " "), _start(name)
    title, caption = WORDS.get(start, (f"{plain[:1].upper()}{plain[1:]}", ""))
    if name == "energy":
        title, caption = (title, caption) if NLL in run.traces else ENERGIES
        caption += NORM if PRIOR_NORM in run.traces else ""
    if start.endswith("_"):
        title = f"{title}: {plain[len(start) :]}"
    if start in ALONG and run.records:
        caption += " The samples are marked."
        if len({record.cycle for record in run.records}) > 1:
            caption += " Every second cycle is shaded."
    return f"{title}, test data" if name.startswith(TEST) else title, caption


def _start(name: str) -> str:
    """Return the longest known prefix of a picture's name, or ""."""
    name = name.removeprefix(TEST)
    return max((start for start in WORDS if name.startswith(start)), key=len, default="")


def _place(name: str) -> tuple[bool, int, str]:
    start = _start(name)
    return name.startswith(TEST), list(WORDS).index(start) if start else len(WORDS), name


def _drawn(run: RunRecord) -> dict[str, bytes]:
    """Draw the pictures that the run did not draw itself."""
    drawn: dict[str, Figure] = {}
    steps, scalars = run.steps, run.scalars
    sample_steps, sample_energy = [r.step for r in run.records], [r.energy for r in run.records]
    cycles = cycle_spans(steps, run.traces[CYCLE]) if CYCLE in run.traces else []
    marks = sorted(set(sample_steps))
    if steps and NLL in run.traces:
        warm = next((value for value in reversed(scalars.get("sampler/temperature", [])) if value > 0), 1.0)
        norms = run.traces.get(PRIOR_NORM, [])
        drawn["energy"] = figures.nll_figure(steps, run.traces[NLL], norms, marks, warm, cycles)
    elif steps and "sampler/energy" in scalars:
        drawn["energy"] = figures.energy_figure(steps, scalars["sampler/energy"], sample_steps, sample_energy)
    if steps and {"sampler/lr", "sampler/temperature"} <= scalars.keys():
        lr, temperature = scalars["sampler/lr"], scalars["sampler/temperature"]
        drawn["schedule"] = figures.schedule_figure(steps, lr, temperature, marks, is_joined=False)
    chains = sorted({r.chain for r in run.records})
    if len(chains) > 1 or (run.records and "energy" not in {*drawn, *run.pictures}):
        by_chain = {c: [r for r in run.records if r.chain == c] for c in chains}
        drawn["sample_energy"] = figures.sample_energy_figure(
            {c: ([r.step for r in of], [r.energy for r in of]) for c, of in by_chain.items()}
        )
    found = {name: io.BytesIO() for name in drawn if name not in run.pictures}
    for name, content in found.items():
        with figures.styled():
            drawn[name].savefig(content, format="png", dpi=figures.PRINT_DPI)
    return {name: content.getvalue() for name, content in found.items()}


# -- the dashboard's figures, histograms and tables by name -----------------------------------------------------------


def schedule(history: RunHistory, planned: Planned) -> Figures:
    """Draw step size and temperature by the schedule, after a warm start's logged ones; without it, the logged ones."""
    if not len(history.scalars):
        return {}
    rows = list(
        zip(history.scalars.column(0), *map(history.scalar, ("sampler/lr", "sampler/temperature")), strict=True)
    )
    warm, marks = history.warm_steps, history.samples.column(0)
    if planned:
        rows = [row for row in rows if row[0] <= warm] + [row[:3] for row in planned]
    steps, lr, temperature = (list(column) for column in zip(*rows, strict=True))
    joined = bool(planned) or len(rows) <= warm
    return {"schedule": figures.schedule_figure(steps, lr, temperature, marks, warm, history.cycles, joined)}


def energy(history: RunHistory) -> Figures:
    """Draw the mini-batches' NLL per example and ‖θ‖²/(d·σ²); without data, as on a density, their energies."""
    if not len(history.scalars):
        return {}
    steps, marks = history.scalars.column(0), history.samples.column(0)
    if NLL not in history.trace_names:
        values, heights = history.scalar("sampler/energy"), history.samples.column(3)
        return {"energy": figures.energy_figure(steps, values, marks, heights, history.cycles)}
    norms = history.scalar(PRIOR_NORM) if PRIOR_NORM in history.trace_names else []
    temperature = history.last_temperature(1.0)
    return {
        "energy": figures.nll_figure(steps, history.scalar(NLL), norms, marks, temperature, history.cycles),
    }


def traces(history: RunHistory) -> Figures:
    """Draw traces of single weights."""
    paths = {name: history.scalar(name) for name in history.trace_names if name not in (NLL, PRIOR_NORM, CYCLE)}
    if not len(history.scalars) or not paths:
        return {}
    return {
        "traces": figures.traces_figure(history.scalars.column(0), paths, history.samples.column(0), history.cycles)
    }


def weights(history: RunHistory) -> Figures:
    """Draw the samples' weights and their worth, where they differ."""
    normalised = history.weights
    if not normalised or not history.has_weights:
        return {}
    return {"weights": figures_samples.weights_figure(normalised, history.samples.column(5))}


def geometry(history: RunHistory) -> Figures:
    """Draw the samples' geometry in weight space."""
    if len(history.sketches) < 2:
        return {}
    rows = history.sketches.tensor()
    coordinates, share = classical_scaling(squared_distances(rows[:, 2:]))
    cycles, chains = rows[:, 0].long().tolist(), rows[:, 1].long().tolist()
    return {"geometry": figures_samples.geometry_figure(coordinates.tolist(), share.tolist(), cycles, chains)}


def temperatures(health: HealthReport | None) -> Figures:
    """Draw each tensor's temperatures from the report on a chain's health, if it has any temperatures."""
    if health is None or not health.tensors:
        return {}
    tensors = {name: vars(entry) for name, entry in health.tensors.items()}
    return {"temperatures": figures_samples.temperatures_figure(tensors, health.temperature, health.tolerance)}


def contour(learned: LearnedContour | None, temperature: float) -> Figures:
    """Draw the energies visited by a contour run and the target's, and its multipliers, from the first chain's π."""
    if learned is None or not bool((learned.state.visits > 0).any()):
        return {}
    state = learned.state
    first = ContourState(*(part[0] for part in state)) if state.log_vector.dim() == 2 else state
    partition = learned.partition
    centres = [partition.first_edge + (i - 0.5) * partition.width for i in range(partition.num_bins)]
    visits, masses = first.visits.tolist(), learned.contour.log_masses(first).exp().tolist()
    return {
        "contour": figures_contour.energy_histogram_figure(centres, visits, masses),
        "multiplier": figures_contour.multiplier_figure(
            centres, learned.contour.multipliers(first, temperature).tolist(), visits
        ),
    }


def chains(history: RunHistory, evaluation: Evaluation | None) -> Figures:
    """Draw the samples' energies and each chain's NLL, if there are several chains."""
    if len(set(history.samples.column(2))) < 2:
        return {}
    rows = chain_rows(*_chains_and_energies(history), evaluation.chains if evaluation is not None else None)
    samples: dict[int, tuple[list[int], list[float]]] = {}
    for step, _, chain, own_energy, *_ in history.samples.rows:
        steps, energies = samples.setdefault(int(chain), ([], []))
        steps.append(int(step))
        energies.append(own_energy)
    disagreement = evaluation.chains.disagreement if evaluation is not None else math.nan
    return {"chains": figures_samples.chains_figure(samples, rows, disagreement)}


def _chains_and_energies(history: RunHistory) -> tuple[list[int], list[float]]:
    return [int(chain) for chain in history.samples.column(2)], history.samples.column(3)


def chain_scalars(history: RunHistory, evaluation: Evaluation | None) -> dict[str, float]:
    """Return R-hat (of one chain, of its halves) and effective sizes: of energies, and the worst of predictions."""
    of_chains, energies = _chains_and_energies(history)
    if not of_chains:
        return {}
    found = {"energy": chain_diagnostics(ChainGrid.of_chains(of_chains).arrange(energies))}
    if evaluation is not None and len(evaluation.chains.chains):
        found["prediction"] = prediction_diagnostics(evaluation.chains)
    values = {
        f"chains/{figure}_{quantity}": value
        for quantity, diagnostics in found.items()
        for figure, value in asdict(diagnostics).items()
    }
    return {name: value for name, value in values.items() if math.isfinite(value)}


def chain_table(history: RunHistory, evaluation: Evaluation | None) -> Table:
    """Return one row per chain and one for all, if there are several chains."""
    columns = ["chain", "samples", "mean energy", "standard deviation", "split R-hat", "bulk ESS", "tail ESS", "NLL"]
    if len(set(history.samples.column(2))) < 2:
        return columns, []
    rows = chain_rows(*_chains_and_energies(history), evaluation.chains if evaluation is not None else None)
    return columns, [
        [
            "all" if row.chain is None else str(row.chain),
            row.samples,
            row.energy,
            row.energy_std,
            row.diagnostics.rhat,
            row.diagnostics.ess_bulk,
            row.diagnostics.ess_tail,
            row.nll,
        ]
        for row in rows
    ]


def running(evaluation: Evaluation) -> Figures:
    """Draw every metric of the running average and of single samples, in one grid."""
    curves = {m: ([r[m] for r in evaluation.running], [r[m] for r in evaluation.members]) for m in evaluation.bma}
    return {"running": figures.running_figure(curves)} if curves else {}


def reliability_diagram(evaluation: Evaluation) -> Figures:
    """Draw accuracy against confidence, for classification."""
    average, target = evaluation.average, evaluation.target
    if average is None or target is None or "probabilities" not in average.terms:
        return {}
    binned = reliability(average.terms["probabilities"], target.long().reshape(-1))
    confidence, accuracy, count = (part.tolist() for part in binned)
    return {"reliability": figures.reliability_figure(confidence, accuracy, count, evaluation.bma["ece"])}


def entropies(evaluation: Evaluation, data: str) -> dict[str, list[float]]:
    """Return the averages' predictive entropies in nats, by data set; empty without classes."""
    averages = {data: evaluation.average, **evaluation.ood}
    return {
        name: predictive_entropy(average.terms["probabilities"]).tolist()
        for name, average in averages.items()
        if average is not None and "probabilities" in average.terms
    }


def entropy(evaluation: Evaluation, data: str) -> Figures:
    """Draw the distribution of the predictive entropy on the evaluation's data and on out-of-distribution data."""
    values = entropies(evaluation, data)
    if not values or evaluation.average is None:
        return {}
    classes = evaluation.average.terms["probabilities"].shape[-1]
    return {"entropy": figures.entropy_figure(values, classes)}


def chain_histograms(history: RunHistory, is_comparable: bool = True) -> Histograms:
    """Return the samples' energies where they have one constant, and their weights where these differ."""
    found = {}
    if is_comparable:
        found["energy_histogram"] = (history.samples.column(3), "potential energy Ũ of the samples (nats)")
    if history.has_weights:
        found["weight_histogram"] = (history.weights, "normalised weight of the samples")
    return found


def entropy_histograms(evaluation: Evaluation, data: str) -> Histograms:
    """Return the predictive entropies, by data set."""
    return {
        "entropy_histogram" if name == data else f"entropy_histogram_{name}": (
            values,
            f"predictive entropy on {name} (nats)",
        )
        for name, values in entropies(evaluation, data).items()
    }


def sample_table(history: RunHistory, evaluation: Evaluation | None, is_comparable: bool = True) -> Table:
    """Return one row per sample: its origin, its weight, and its own metrics if it was evaluated; energies only where
    they have one constant."""
    known = {(m["step"], m["chain"]): m for m in evaluation.members} if evaluation is not None else {}
    metrics = list(evaluation.bma) if evaluation is not None else []
    rows: list[list[Any]] = []
    for step, cycle, chain, own_energy, log_weight, *_ in history.samples.rows:
        own = known.get((step, chain), {})
        energies = [own_energy] if is_comparable else []
        rows.append([int(step), int(chain), int(cycle), *energies, log_weight, *(own.get(name) for name in metrics)])
    return ["step", "chain", "cycle", *(["energy"] if is_comparable else []), "log_weight", *metrics], rows


def metric_table(evaluation: Evaluation) -> Table:
    """Return one row per metric: of a guess, mean and standard deviation over single samples, and of the average."""
    single, deviation = evaluation.single, evaluation.single_std
    guess = evaluation.guessing
    rows = [[m, guess.get(m), single[m], deviation[m], value] for m, value in evaluation.bma.items()]
    return ["metric", "guessing", "mean single sample", "standard deviation", "model average"], rows
