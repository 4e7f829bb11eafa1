"""Averages over samples: metrics of the posterior predictive on validation, test and out-of-distribution data."""
