"""Contour sampling: energy bins, the flattened target and its weights, as pure functions of tensors."""
