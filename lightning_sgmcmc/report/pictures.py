"""The run's pictures: those that it drew, and those drawn here from its record."""

import io
from typing import TYPE_CHECKING

from lightning_sgmcmc import figures
from lightning_sgmcmc.report.html_page import picture
from lightning_sgmcmc.report.run_record import RunRecord
from lightning_sgmcmc.run.results import CYCLE, NLL, PRIOR_NORM, cycle_spans

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MARKS = "with the samples marked; of a cyclical run every second cycle is shaded"
CAPTIONS = {
    "energy": "The mini-batches' NLL per datum along the run and, for a Gaussian prior, ‖θ‖²/(d·σ²), which is 1 under "
    f"the prior, {MARKS}.",
    "sample_energy": "Energies of the samples, by chain.",
    "energy_histogram": "Energies of the samples.",
    "schedule": f"Step size and temperature along the run, {MARKS}.",
    "traces": f"Traces of four single weights along the run, {MARKS}.",
    "temperatures": "Measured temperatures of each tensor with 95 % intervals, and the target.",
    "contour": "Energies that the contour run visited, and the target's by the learned π.",
    "multiplier": "The gradient multiplier κ against the energy; the bouncy zone is where it is negative.",
    "running": "Each metric of the average over the first samples, and of single samples.",
    "running_": "The running model average and single samples against the number of samples:",
    "reliability": "Accuracy of the model average against its confidence, with 95 % binomial intervals, and the number "
    "of data in each bin.",
    "entropy": "Entropy of the predictive distribution.",
    "weight": "Weights of the samples.",
    "geometry": "The samples' geometry in weight space.",
    "chains": "The samples' energies by chain, and the NLL of each chain's average.",
    "segments": "The loss on the segments between samples.",
}
"""Captions by the prefix of a picture's name, in the order of the page; other pictures follow, by name."""
ENERGIES = "Mini-batch estimates of the potential energy along the run; the samples are marked."
"""Caption of the energy's picture of a run that did not record the NLL."""
TEST = "test_"
"""Prefix of pictures on the test data, which come last."""
FIRST = (
    ("energy", "sample_energy"),
    ("test_running", "running"),
    ("test_reliability", "reliability", "test_segments", "segments"),
    ("temperatures", "chains", "geometry"),
)
"""The pictures that are shown first, four: of each group the first that there is."""


def pictures(run: RunRecord) -> tuple[str, str]:
    """Return the four pictures that are shown first, and the others, with their captions."""
    drawn = _drawn(run)
    found = {**drawn, **run.pictures}
    first = [name for group in FIRST if (name := next((one for one in group if one in found), None)) is not None]
    others = [name for name in sorted(found, key=_place) if name not in first]
    missing = len(FIRST) - len(first)
    first, others = first + others[:missing], others[missing:]

    def boxes(names: list[str]) -> str:
        own_caption = {"energy": ENERGIES} if NLL not in run.traces else {}
        shown = [
            picture(
                found[name], own_caption.get(name) or _caption(name), f"Picture of the run: {name.replace('_', ' ')}"
            )
            for name in names
        ]
        return f'<div class="pictures">{"".join(shown)}</div>' if shown else ""

    return boxes(first), boxes(others)


def _caption(name: str) -> str:
    words, start = name.replace("_", " "), _start(name)
    caption = CAPTIONS.get(start, f"{words[:1].upper()}{words[1:]}.")
    if start.endswith("_"):
        caption = f"{caption} {words.removeprefix(TEST.replace('_', ' '))[len(start) :]}."
    return f"{caption.removesuffix('.')}, on the test data." if start and name.startswith(TEST) else caption


def _start(name: str) -> str:
    """Return the longest known prefix of a picture's name, or ""."""
    name = name.removeprefix(TEST)
    return max((start for start in CAPTIONS if name.startswith(start)), key=len, default="")


def _place(name: str) -> tuple[bool, int, str]:
    start = _start(name)
    return name.startswith(TEST), list(CAPTIONS).index(start) if start else len(CAPTIONS), name


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
        drawn["schedule"] = figures.schedule_figure(steps, lr, temperature, marks, cycles=cycles)
    chains = sorted({r.chain for r in run.records})
    if len(chains) > 1 or (run.records and "energy" not in {*drawn, *run.pictures}):
        by_chain = {c: [r for r in run.records if r.chain == c] for c in chains}
        drawn["sample_energy"] = figures.sample_energy_figure(
            {c: ([r.step for r in of], [r.energy for r in of]) for c, of in by_chain.items()}
        )
    return {name: _png(figure) for name, figure in drawn.items() if name not in run.pictures}


def _png(figure: "Figure") -> bytes:
    content = io.BytesIO()
    with figures.styled():
        figure.savefig(content, format="png", dpi=figures.PRINT_DPI)
    return content.getvalue()
