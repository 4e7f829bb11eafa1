"""Which data a step sees: orders of the data, loaders that resume exactly, batches for each chain."""
