"""The choice of a contour's settings from energies: closed forms, what chains then do, and what is refused."""

import json
import math

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.contour import ContourChoice, ContourGoals, choose_contour
from lightning_sgmcmc.contour.partition import EnergyLaw
from lightning_sgmcmc.health.verdict import ContourUse, contour_findings
from lightning_sgmcmc.simulation import ContourRun, simulate


def chi_square_energies(dimension: int, count: int = 4000, temperature: float = 1.0) -> Tensor:
    """Return quantiles of U - min U of a Gaussian target, in random order: τ·Gamma(d/2)."""
    from scipy.stats import gamma

    shares = (torch.arange(count).double() + 0.5) / count
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return 100 + temperature * torch.tensor(gamma.ppf(shares.numpy(), dimension / 2))[order]


def efficiency(shape: float, zeta: float) -> float:
    """Return (E w)²/E w² of weights w = p^ζ of draws from p^{1-ζ}, by the integrals of powers of a gamma density."""

    def log_power(c: float) -> float:
        order = c * (shape - 1) + 1
        return math.lgamma(order) - order * math.log(c)

    return math.exp(2 * log_power(1) - log_power(1 - zeta) - log_power(1 + zeta))


@pytest.mark.parametrize("dimension", [20, 200, 2000])
def test_the_choice_on_a_gaussian_target_is_the_closed_form(dimension: int) -> None:
    """Exact chi-square energies. The flat outer bins hold 5.1 % of the draws, and 23 % of a normal law's (κ-1)²."""
    energies = chi_square_energies(dimension)
    choice = choose_contour(energies, goals=ContourGoals(spread=50.0, efficiency=0.5))
    law = EnergyLaw(100 + dimension / 2, math.sqrt(dimension / 2), dimension / 2)
    assert (choice.law.mean, choice.law.std) == pytest.approx((law.mean, law.std), rel=0.01)
    zeta = choice.contour.rules.zeta
    assert efficiency(law.shape, zeta) == pytest.approx(0.5, abs=0.05)
    assert EnergyLaw(5.0, 3.0).log_masses(choice.contour.partition).isfinite().all()
    assert choice.efficiency == pytest.approx(0.5, abs=0.01)
    # E(κ-1)² = (ζτ)²/(k_q - 2) over the flattened law, a gamma law of shape k_q = (1-ζ)(k-1) + 1 and of its own scale
    limited = choose_contour(energies, goals=ContourGoals(spread=0.6 * choice.spread, efficiency=0.01))
    flat = limited.contour.rules.zeta
    shape = (1 - flat) * (dimension / 2 - 1) + 1
    assert limited.spread == pytest.approx(0.6 * choice.spread, rel=0.02)
    if dimension >= 200:  # below, the density falls too steeply under the first edge, where κ = 1
        assert 0.8 < limited.spread / (flat / math.sqrt(shape - 2)) < 1.02
    assert flat < zeta
    assert limited.contour.rules.weight_exponent == 1


def test_the_choice_moves_with_the_energies_and_scales_with_the_temperature() -> None:
    """U + c shifts the bins, and U and τ times ten leave κ and the weights as they are."""
    energies = chi_square_energies(30)
    one, moved = choose_contour(energies), choose_contour(energies + 1234.5)
    ten = choose_contour(10 * energies, temperature=10.0)
    assert moved.contour.partition.first_edge == pytest.approx(one.contour.partition.first_edge + 1234.5, rel=1e-6)
    assert ten.contour.partition.width == pytest.approx(10 * one.contour.partition.width, rel=1e-6)
    for other in (moved, ten):
        assert other.contour.rules.zeta == pytest.approx(one.contour.rules.zeta, rel=1e-6)
        assert (other.spread, other.efficiency) == pytest.approx((one.spread, one.efficiency), rel=1e-6)


class Gaussian:
    """A standard normal target."""

    dimension = 20

    def energy(self, x: Tensor) -> Tensor:
        return x.double().square().sum(-1) / 2

    def gradient(self, x: Tensor) -> Tensor:
        return x


def test_chains_on_a_gaussian_have_the_wanted_spread_and_efficiency() -> None:
    """32 chains; limits are 12 %, three times the scatter over seeds that was seen, and learning adds noise to κ."""
    options = {"lr": 0.1, "num_chains": 32, "seed": 0, "compile": False, "keep_every": 2}
    warm = simulate(Gaussian(), num_steps=500, burn_in=100, **options)
    for goals in (ContourGoals(spread=0.4, efficiency=0.3), ContourGoals(spread=5.0, efficiency=0.6)):
        choice = choose_contour(warm.energies, goals=goals)
        met = choice.spread / goals.spread, choice.efficiency / goals.efficiency
        assert min(abs(one - 1) for one in met) < 0.02
        contour = ContourRun(choice.contour, shared=True, state=choice.initial_state(warm.energies))
        done = simulate(Gaussian(), num_steps=1200, burn_in=300, initial=warm.positions[-1], contour=contour, **options)
        weights = done.log_weights.double().flatten().softmax(0)
        assert float((done.multipliers - 1).square().mean().sqrt()) == pytest.approx(choice.spread, rel=0.12)
        assert float(1 / weights.square().sum() / len(weights)) == pytest.approx(choice.efficiency, rel=0.12)
        variance = (weights * done.positions.double().square().mean(-1).flatten()).sum()
        assert float(variance) == pytest.approx(1 / (1 - 0.1 / 4), rel=0.06)  # that of SGLD at this step


def test_the_prior_is_left_out_if_it_drifts_more_than_the_data_spread() -> None:
    noise = torch.randn(400, 2, generator=torch.Generator().manual_seed(0)).double()
    data, still = 50 + 5 * noise, torch.full((400, 2), -30.0).double()
    drifting = still - torch.linspace(0, 200, 400).double()[:, None]
    kept = choose_contour(data - still, log_prior=still)
    left = choose_contour(data - drifting, log_prior=drifting)
    assert kept.include_prior
    assert not left.include_prior
    assert left.law.mean == pytest.approx(50, abs=1)
    assert "left out of the energy (it changed by 100 nats" in left.sentence
    assert "use a longer warm-up" in choose_contour(data - drifting).sentence


@pytest.mark.parametrize("memory", [0.0, 0.9, 0.99])
def test_few_independent_energies_allow_weights_that_hold_if_the_law_is_another(memory: float) -> None:
    """Normal energies of AR(1) chains; efficiencies where their variance is r times that of π's law, by quadrature
    without bins, which moves them by up to 0.04."""
    noise = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0)).double()
    rows = [noise[0]]
    for row in noise[1:]:
        rows.append(memory * rows[-1] + math.sqrt(1 - memory**2) * row)
    choice = choose_contour(500 + 20 * torch.stack(rows), goals=ContourGoals(spread=5.0))
    assert choice.independent is not None
    assert choice.zeta_of_law is not None
    assert choice.independent == pytest.approx(16_000 * (1 - memory) / (1 + memory), rel=0.4)  # that of AR(1)
    zeta, partition = choice.contour.rules.zeta, choice.contour.partition
    u = torch.linspace(-12, 12, 20_001).double()  # in standard deviations
    low, high = ((edge - choice.law.mean) / choice.law.std for edge in (partition.first_edge, partition.last_edge))
    log_pi = -u.clamp(low, high).square() / 2

    def had(r: float) -> float:
        drawn, weights = (-u.square() / (2 * r) - zeta * log_pi).softmax(0), (zeta * log_pi).exp()
        return float((drawn * weights).sum().square() / (drawn * weights.square()).sum())

    assert choice.efficiency == pytest.approx(had(1.0), abs=0.04)
    lost = had(1.0) - had(1 + 2 * math.sqrt(2 / choice.independent))
    assert (zeta == choice.zeta_of_law) == (memory == 0)
    assert lost < 0.1 if memory == 0 else lost == pytest.approx(0.1, abs=0.04)
    assert ("leaves their law uncertain" in choice.sentence) == (zeta < 0.9 * choice.zeta_of_law)


def test_tempered_weights_are_an_option() -> None:
    choice = choose_contour(chi_square_energies(200), goals=ContourGoals(spread=0.6, exact=False))
    assert choice.spread == pytest.approx(0.6, rel=0.02)
    assert choice.efficiency == pytest.approx(0.5, rel=0.02)
    assert choice.contour.rules.weight_exponent < 0.5
    again = ContourChoice.from_json(json.loads(json.dumps(choice.as_json())))
    assert again == choice


def test_energies_that_do_not_say_are_refused() -> None:
    energies = chi_square_energies(10, 200)
    with pytest.raises(ValueError, match="has 99 energies of the warm-up to choose from, fewer than 100"):
        choose_contour(energies[:99])
    with pytest.raises(ValueError, match="infinite energies"):
        choose_contour(torch.cat([energies, torch.tensor([math.inf])]))
    with pytest.raises(ValueError, match="all 7"):
        choose_contour(torch.full((200,), 7.0))
    for bad in ({"spread": 0.0}, {"efficiency": 1.0}, {"efficiency": 0.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ContourGoals(**bad)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (ContourUse(0.4, 5000, 50, 0.6, 0.05), []),
        (ContourUse(0.01, 400, 50, 1.0, 0.02), []),
        (ContourUse(0.01, 5000, 50, 0.999, 0.02), [("below", "note", "it does nothing")]),
        (ContourUse(0.4, 5000, 50, 0.02, 0.97), [("above", "problem", "97 % of the weight")]),
        (ContourUse(0.4, 5000, 9, 0.2, 0.97), []),
        (
            ContourUse(0.4, 5000, 60, 0.2, 0.05, 0.5),
            [("above", "note", "20 % of the 60 samples, where 50 % was")],
        ),
        (ContourUse(0.4, 5000, 60, 0.45, 0.05, 0.5), []),
        (None, []),
    ],
)
def test_findings_name_a_contour_without_effect_and_one_sample_with_all_weight(use: ContourUse, said: list) -> None:
    found = contour_findings(use)
    assert [(one.side, one.severity) for one in found] == [(side, severity) for side, severity, _ in said]
    for one, (_, _, words) in zip(found, said, strict=True):
        assert words in one.sentence
        assert one.remedy
