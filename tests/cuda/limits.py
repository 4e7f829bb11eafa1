"""The most launches of an ordinary step beside its graphs, and the most waits of a step that draws samples, by case.

The numbers are those of the stand-in (`cases.py`), and may only become smaller. An ordinary step waits for nothing.
ResNet-20 has 59 tensors of parameters, the network of the other cases 23.
"""

LAUNCHES = {
    "ResNet-20, four chains": 81,
    "ResNet-20, contour and clipping": 100,
    "ResNet-20, sixteen chains": 99,
    "one chain": 84,
    "one chain, contour": 145,
    "own contour": 97,
    "interacting contour": 99,
    "loop": 663,
    "loop, compiled": 261,
    "vmap, not compiled": 309,
    "clipping": 93,
    "accumulation": 175,
    "replica exchange": 189,
    "replica exchange, reduced variance": 284,
    "EWSG": 214,
    "control variates": 364,
    "covariance friction": 427,
    "a step size for each chain": 95,
    "scalar parameters": 102,
    "scalar parameter, one chain": 84,
    "dropout": 87,
    "single precision": 87,
    "data on the host": 24,
    "SGLD": 87,
    "pSGLD": 94,
    "SGNHT": 99,
    "UnderdampedLangevin": 90,
    "pSGHMC": 147,
    "AutoSampling": 134,
    "DeepEnsemble": 79,
    "DeepEnsemble by AdamW": 720,
    "SWAG": 102,
    "MCDropout": 87,
    "WarmStart": 720,
    "a contour that learns its range": 97,
    "health is measured": 369,
}

WAITS_OF_A_DRAW = {
    "ResNet-20, four chains": 709,
    "ResNet-20, contour and clipping": 159,
    "one chain, contour": 85,
}
