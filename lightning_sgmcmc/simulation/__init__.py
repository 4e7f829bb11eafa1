"""The samplers without a trainer: analytic targets, finite sums, exact references, many chains at once."""
