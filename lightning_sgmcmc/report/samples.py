"""The samples, and the efficiency of their weights."""

import math
from typing import Any

from lightning_sgmcmc.chains.samples import SampleRecord, comparable_log_weights
from lightning_sgmcmc.diagnostics.draws import normalised_weights, weight_efficiency
from lightning_sgmcmc.report import html_page
from lightning_sgmcmc.report.html_page import folded, paragraph, table
from lightning_sgmcmc.report.run_record import RunRecord

SHORT_TABLE = 12
"""Longer tables of samples are folded."""


def samples(run: RunRecord) -> str:
    """Return the table of samples, folded if it is long."""
    records = run.records
    if not records:
        return ""
    try:
        shares: list[float | None] = list(normalised_weights(comparable_log_weights(records)).tolist())
    except ValueError:
        shares = [None] * len(records)
    rows: list[list[Any]] = [
        [i + 1, r.step, r.cycle + 1, r.chain, r.energy, r.log_weight, share]
        for i, (r, share) in enumerate(zip(records, shares, strict=True))
    ]
    header = ["sample", "step", "cycle", "chain", "energy (nats)", "log weight", "weight"]
    if any(record.bin is not None for record in records):
        header.append("energy bin")
        rows = [[*row, record.bin] for row, record in zip(rows, records, strict=True)]
    content = table(header, rows, "Samples in the order of drawing; energies are mini-batch estimates")
    return content if len(rows) <= SHORT_TABLE else folded(f"All {len(rows)} samples", content)


def weights(records: list[SampleRecord]) -> str:
    """Return the section on the weights and their efficiency."""
    if not records:
        return ""
    if equal_weights(records):
        return paragraph(f"All {len(records)} samples have equal weight.")
    try:
        log_weights = comparable_log_weights(records)
        weights, efficiency = normalised_weights(log_weights), weight_efficiency(log_weights)
    except ValueError as error:
        return paragraph(f"The weights cannot be used: {error}.")
    facts = [
        ("Weight efficiency", f"{efficiency:.3g} ({efficiency * len(records):.1f} of {len(records)} samples)"),
        ("Largest weight", float(weights.max())),
        ("Smallest weight", float(weights.min())),
    ]
    note = "The weight efficiency is (Σw)²/(S·Σw²) of S samples: it ignores their correlation."
    if not all(record.comparable for record in records):
        note += " Each chain learned its own π, so weights are normalised within each chain, and chains count alike."
    return html_page.facts(facts) + paragraph(note, "note")


def equal_weights(records: list[SampleRecord]) -> bool:
    """Return whether the samples, at least one, all have equal weight."""
    return len({r.log_weight for r in records}) == 1 and math.isfinite(records[0].log_weight) and records[0].comparable
