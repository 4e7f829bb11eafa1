"""Energies with less mini-batch noise, for callbacks that look at energies."""

from lightning_sgmcmc.callbacks.snapshot_callback import SnapshotCallback


class VarianceReducedEnergy(SnapshotCallback):
    """Takes the mini-batch's noise out of the energy by a control variate.

        Ũ_VR(θ) = Ũ(θ) - (N/n)·Σ_{i in batch} U_i(θ_q) + Σ_i U_i(θ_q),   U_i = -log p(y_i|x_i,θ)

    with θ_q a snapshot of the chain, taken at the beginning of every q-th epoch. It has the same mean as Ũ, and the
    less noise the nearer θ_q is. `ContourGradient` and `ReplicaExchange` look at this energy in place of Ũ; gradients
    stay as they are (`ControlVariates` corrects them, and energies too from the same snapshot). Each chain has a
    snapshot of its own. The price is a pass over all data for each snapshot, and a forward pass of the snapshot at each
    step; both are made in evaluation mode, with the training data's augmentation.

    Args:
        start_epoch: first epoch, from 0, in which energies are corrected.
        every_n_epochs: q.

    Raises:
        ValueError: for an argument out of range.

    Source: Deng et al. 2022 (ICSGLD), appendix B.1; Deng et al. 2021 (variance-reduced replica exchange).
    """

    def __init__(self, start_epoch: int = 0, every_n_epochs: int = 2) -> None:
        super().__init__(start_epoch, every_n_epochs, energy=True, gradients=False)
