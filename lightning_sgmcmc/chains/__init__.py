"""Many chains in one module: stacked parameters, initial states, energies, samples, layouts over processes."""
