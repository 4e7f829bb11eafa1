"""The learner of π without a trainer: alone, together over processes, and from a saved state."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.contour import Contour, ContourRules, DecayingStepSize, EnergyPartition
from lightning_sgmcmc.contour.learner import ContourLearner
from lightning_sgmcmc.contour.partition import EnergyRange
from lightning_sgmcmc.contour.start import EnergyRecord

ALONE, FOUR = ChainLayout(), ChainLayout(num_chains=4, total_chains=4)
CONTOUR = Contour(EnergyPartition(-1.0, 0.5, 8), ContourRules(zeta=0.9, min_multiplier=0.5, max_multiplier=1.5))
STEP_SIZE = DecayingStepSize(5, 0.7, 20)
ENERGIES = torch.randn(60, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make(chains: ChainLayout, **options: Any) -> ContourLearner:
    return ContourLearner(CONTOUR, STEP_SIZE, chains, **options)


def learn(learner: ContourLearner, energies: Tensor) -> ContourLearner:
    for energy in energies:
        learner.learn(learner.locate(energy))
    return learner


def test_chains_learn_as_each_alone() -> None:
    together = learn(make(FOUR), ENERGIES).learned.state
    for chain in range(4):
        alone = learn(make(ALONE), ENERGIES[:, chain : chain + 1]).learned.state
        assert torch.equal(together.log_vector[chain], alone.log_vector)
        assert torch.equal(together.visits[chain], alone.visits)


@pytest.mark.parametrize("exchange_every", [1, 3])
def test_interacting_chains_learn_the_same_wherever_they_are(exchange_every: int) -> None:
    """A process with two of four chains, which receives the other two's encoded energies."""
    options: dict[str, Any] = {"interacting": True, "exchange_every": exchange_every}
    whole = learn(make(FOUR, **options), ENERGIES)
    sent = [CONTOUR.partition.encode(energy, whole.locate(energy).index) for energy in ENERGIES]
    position = 0

    class Half(ChainLayout):
        def gather(self, codes: Tensor, dim: int = 0) -> Tensor:
            nonlocal position
            others = torch.stack(sent[position : position + len(codes)])
            position += len(codes)
            assert torch.equal(codes, others[:, :2])
            return others

    half = learn(make(Half(num_chains=2, total_chains=4), **options), ENERGIES[:, :2])
    assert half.updates == 60
    assert torch.equal(half.learned.state.log_vector, whole.learned.state.log_vector)
    assert int(half.learned.state.visits.sum()) == 240


@pytest.mark.parametrize("interacting", [True, False])
def test_a_restored_learner_continues_bit_for_bit(interacting: bool) -> None:
    options: dict[str, Any] = {"interacting": interacting, "exchange_every": 4 if interacting else 1}
    whole = learn(make(FOUR, **options), ENERGIES)
    first = learn(make(FOUR, **options), ENERGIES[:30])
    again = make(FOUR, **options)
    again.load_state_dict(first.state_dict())
    learn(again, ENERGIES[30:])
    assert torch.equal(again.learned.state.log_vector, whole.learned.state.log_vector)
    with pytest.raises(ValueError, match="continue with the same num_chains and interacting"):
        make(ChainLayout(num_chains=3, total_chains=3)).load_state_dict(first.state_dict())


def test_the_share_of_clamped_steps_starts_again_with_each_row() -> None:
    learner = make(ALONE)
    location = learner.locate(torch.tensor([0.2]))
    for multiplier in (0.5, 1.0, 1.5, 1.0):
        learner.learn(location._replace(multiplier=torch.tensor([multiplier]).double()))
    scalars = learner.scalars(location)
    assert scalars["contour/clamped"] == 0.5
    assert scalars["contour/step_size"] == STEP_SIZE.at(4)
    assert "contour/clamped" not in learner.scalars(location)


def test_a_warm_up_keeps_its_second_half() -> None:
    record = EnergyRecord(10, FOUR)
    for step, energy in enumerate(ENERGIES[:10], start=1):
        if step != 7:  # a step that was skipped
            record.add(step, energy[None], torch.zeros(1, 1))
    assert sorted(record.energies().tolist()) == sorted(ENERGIES[[5, 7, 8, 9]].flatten().tolist())
    again = EnergyRecord(10, FOUR)
    with pytest.raises(ValueError, match="was at temperature 0"):
        again.energies()
    again.load_state_dict(record.state_dict())
    assert torch.equal(again.energies(), record.energies())
    with pytest.raises(ValueError, match="another warm-up"):
        EnergyRecord(12, FOUR).load_state_dict(record.state_dict())


def test_a_range_is_given_or_learned() -> None:
    assert EnergyRange(8, -1.0, 0.5).given == CONTOUR.partition
    learned = EnergyRange(8, width=0.25, lowest=0.5)
    assert learned.given is None
    assert learned.learned(ENERGIES).width == 0.25
    assert learned.resumed({"first_edge": 1.0, "width": 2.0, "num_bins": 9}) == EnergyPartition(1.0, 2.0, 8)
