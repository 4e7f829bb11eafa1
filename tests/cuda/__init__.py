"""Trainer.fit on a stand-in for one CUDA device: what would fail there, wait for the device, or launch kernels."""
