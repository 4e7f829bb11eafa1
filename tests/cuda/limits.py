"""The most launches of an ordinary step beside its graphs, by case, and the most waits of a step that draws samples.

The numbers are those of the stand-in (`cases.py`), and may only become smaller. An ordinary step waits for nothing.
ResNet-20 has 59 tensors of parameters, the network of the other cases 23.
"""

LAUNCHES = {
    "ResNet-20, four chains": 20,
    "ResNet-20, contour and clipping": 27,
    "ResNet-20, sixteen chains": 32,
    "cifar_sprint, sixteen chains": 32,
    "one chain": 17,
    "one chain, contour": 25,
    "own contour": 26,
    "interacting contour": 26,
    "loop": 603,
    "loop, compiled": 195,
    "vmap, not compiled": 255,  # with the casts of its norms, as in three others
    "clipping": 22,
    "accumulation": 43,
    "replica exchange": 116,
    "replica exchange, reduced variance": 217,
    "EWSG": 92,
    "control variates": 303,
    "covariance friction": 372,
    "a step size for each chain": 22,
    "scalar parameters": 27,
    "scalar parameter, one chain": 17,
    "dropout": 20,
    "channels last": 17,
    "single precision": 20,
    "data on the host": 17,
    "SGLD": 22,
    "pSGLD": 29,
    "SGNHT": 36,
    "UnderdampedLangevin": 25,
    "pSGHMC": 46,
    "AdamSGLD": 30,
    "ScaleAdaptedSGHMC": 42,
    "UnderdampedLangevin, obabo": 26,
    "UnderdampedLangevin, ubu": 27,
    "AMAGOLD, tested": 106,  # the step that begins a trajectory and copies the state
    "GGMC, tested": 82,
    "MCLMC": 84,
    "pMCLMC": 107,
    "AutoSampling": 39,
    "DeepEnsemble": 18,
    "DeepEnsemble by AdamW": 43,
    "SWAG": 18,
    "MCDropout": 20,
    "WarmStart": 43,
    "LearningCoefficient": 20,
    "prior scales": 117,  # a step that draws them, with a contour
    "a contour that learns its range": 26,
    "health is measured": 302,
}

WAITS_OF_A_DRAW = 3

MORE_WAITS_OF_A_DRAW = {
    "replica exchange": 4,  # a logged step too, as in the next
    "replica exchange, reduced variance": 4,
    "AMAGOLD, tested": 6,  # a test too, with the energies of all data
    "GGMC, tested": 6,
    "AutoSampling": 5,
    "a contour that learns its range": 7,
    "LearningCoefficient": 32,  # the first, with the energy of the centre of all data
    "MCDropout": 61,  # masks for each sample, and a look at its seed
    "SWAG": 2468,  # passes for the BatchNorm of each sample, at a cycle's end
}
