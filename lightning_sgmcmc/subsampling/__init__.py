"""Mini-batch gradients with less noise: exponentially weighted choices, snapshots, gradient moments."""
