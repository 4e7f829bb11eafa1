"""Chains at several temperatures that swap places: the rates of swaps as pure functions, and their callback."""

from lightning_sgmcmc.tempering.replica_exchange import attempted_pairs, log_swap_rate, pair_noise_variance, swapped

__all__ = ["attempted_pairs", "log_swap_rate", "pair_noise_variance", "swapped"]
