"""Numbers about draws: R-hat, effective sizes, temperatures, calibration, geometry."""
