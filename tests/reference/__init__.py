"""Tests of lightning_sgmcmc.reference."""
