"""Control variates on energies: the mean stays, the noise goes."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_sgmcmc import BayesianModule, Categorical, ContourRules
from lightning_sgmcmc.callbacks import ContourGradient, SamplerCallback, SamplingSchedule, VarianceReducedEnergy
from tests.support.problems import Even, full_energy
from tests.support.recorders import Energies, Nudge
from tests.support.trainers import quiet_trainer


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_the_mean_is_exact_and_the_noise_is_less(chains: int, options: dict[str, Any]) -> None:
    """Chains that do not move, so everything can be computed: on the snapshot each energy is U itself; off it an
    epoch's energies, whose batches make up all data, have U as their mean, and a fraction of the spread."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    module = BayesianModule(net=net, likelihood=Categorical(), lr=0.0, num_chains=chains, seed=1)
    energies = Energies()
    starts: list[torch.Tensor] = []

    class Look(SamplerCallback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            starts.append(full_energy(pl_module))

    trainer = quiet_trainer(
        max_epochs=4,
        callbacks=[SamplingSchedule(every_n_steps=1), VarianceReducedEnergy(1, 3), energies, Nudge(), Look()],
        **options,
    )
    trainer.fit(module, datamodule=Even(16))
    after = full_energy(module)
    assert all(torch.equal(a, b) for a, b in zip(energies.corrected[0], energies.plain[0], strict=True))
    on_snapshot = torch.stack(energies.corrected[1])
    torch.testing.assert_close(on_snapshot, starts[0].expand_as(on_snapshot), rtol=1e-5, atol=1e-3)
    assert float((after - starts[0]).abs().min()) > 0.1
    for epoch in (2, 3):
        corrected, plain = torch.stack(energies.corrected[epoch]), torch.stack(energies.plain[epoch])
        torch.testing.assert_close(corrected.mean(0), after, rtol=1e-5, atol=1e-3)
        assert float((corrected.std(0) / plain.std(0)).max()) < 0.5


def test_a_contour_sees_the_corrected_energies() -> None:
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    module = BayesianModule(net=net, likelihood=Categorical(), lr=0.0, num_chains=2, seed=1)
    contour = ContourGradient(ContourRules(zeta=0.75), first_edge=0.0, width=0.5, num_bins=1000)
    trainer = quiet_trainer(
        max_steps=8, callbacks=[SamplingSchedule(every_n_steps=1), VarianceReducedEnergy(0, 1), contour]
    )
    trainer.fit(module, datamodule=Even(16))
    assert module.contour is not None
    visited = (module.contour.state.visits > 0).sum(1)
    assert visited.tolist() == [1, 1]  # eight batches, one energy
    expected = (full_energy(module) / 0.5).ceil().long()
    assert module.contour.state.visits.argmax(1).tolist() == expected.tolist()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="every_n_epochs must be at least 1, got 0"):
        VarianceReducedEnergy(0, 0)
