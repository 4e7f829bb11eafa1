"""Published figures on CIFAR-10 with ResNet-20-FRN-Swish, 40,960 images without augmentation, temperature 1."""

FIGURES: dict[str, dict[str, float]] = {
    "HMC": {"error": 0.092, "nll": 0.295, "ambiguity": 0.526},
    "HMC, one half against the other": {"agreement": 0.940, "total variation": 0.074},
    "one network": {"agreement": 0.855, "total variation": 0.190, "error": 0.172, "nll": 0.719},
    "deep ensemble": {"agreement": 0.915, "total variation": 0.115},
    "SGLD": {"agreement": 0.915, "total variation": 0.110, "error": 0.153, "nll": 0.473, "ambiguity": 0.182},
    "SGHMC": {"agreement": 0.920, "total variation": 0.109},
    "cyclical SGHMC": {
        "agreement": 0.927,
        "total variation": 0.099,
        "error": 0.132,
        "nll": 0.409,
        "ambiguity": 0.181,
    },
    "PX-SGHMC": {"error": 0.1185, "nll": 0.3763, "ambiguity": 0.2408},
}
"""By row and metric.

Agreement and total variation are those of Izmailov et al. 2021 (10,000 epochs; SGD 500, 50 networks), quoted from notes
and not checked against the paper; error, NLL and ambiguity those of the table of bdlx (`examples/cifar`, 100 samples,
cyclical; HMC: three chains of 240 samples), and of PX-SGMCMC (Kim et al. 2025, one seed, cyclical, another prior).
"""
