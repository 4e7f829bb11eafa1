"""The run's pictures: those that it drew, and those drawn here from its record."""

import io
from typing import TYPE_CHECKING

from lightning_sgmcmc import figures
from lightning_sgmcmc.report.html_page import picture
from lightning_sgmcmc.report.run_record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CAPTIONS = {
    "energy": "Mini-batch estimates of the potential energy along the run; the samples are marked.",
    "sample_energy": "Energies of the samples, by chain.",
    "energy_histogram": "Energies of the samples.",
    "schedule": "Step size and temperature along the run; the samples are marked.",
    "traces": "Traces of a few quantities along the run; the samples are marked.",
    "temperatures": "Measured temperatures of each tensor, and the target.",
    "contour": "Energies that the contour run visited, and the target's by the learned π.",
    "multiplier": "The gradient multiplier κ against the energy; the bouncy zone is where it is negative.",
    "running_": "The running model average and single samples against the number of samples:",
    "reliability": "Accuracy of the model average against its confidence, and the share of the data.",
    "entropy": "Entropy of the predictive distribution.",
    "weight": "Weights of the samples.",
    "geometry": "The samples' geometry in weight space.",
    "segments": "The loss on the segments between samples.",
}
"""Captions by the prefix of a picture's name, in the order of the page; other pictures follow, by name."""
TEST = "test_"
"""Prefix of pictures on the test data, which come last."""


def pictures(run: RunRecord) -> str:
    """Return the pictures with their captions."""
    pictures = {**_drawn(run), **run.pictures}
    shown = []
    for name in sorted(pictures, key=_place):
        shown.append(picture(pictures[name], _caption(name), f"Picture of the run: {name.replace('_', ' ')}"))
    return f'<div class="pictures">{"".join(shown)}</div>' if shown else ""


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
    if steps and "sampler/energy" in scalars:
        drawn["energy"] = figures.energy_figure(steps, scalars["sampler/energy"], sample_steps, sample_energy)
    if steps and {"sampler/lr", "sampler/temperature"} <= scalars.keys():
        lr, temperature = scalars["sampler/lr"], scalars["sampler/temperature"]
        drawn["schedule"] = figures.schedule_figure(steps, lr, temperature, sorted(set(sample_steps)))
    chains = sorted({r.chain for r in run.records})
    if len(chains) > 1 or (run.records and "energy" not in {*drawn, *run.pictures}):
        by_chain = {c: [r for r in run.records if r.chain == c] for c in chains}
        drawn["sample_energy"] = figures.sample_energy_figure(
            {c: ([r.step for r in of], [r.energy for r in of]) for c, of in by_chain.items()}
        )
    return {name: _png(figure) for name, figure in drawn.items() if name not in run.pictures}


def _png(figure: "Figure") -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
