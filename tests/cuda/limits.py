"""The most launches of an ordinary step beside its graphs, and the most waits of a step that draws samples, by case.

The numbers are those of the stand-in (`cases.py`), and may only become smaller. An ordinary step waits for nothing.
ResNet-20 has 59 tensors of parameters, the network of the other cases 23.
"""

LAUNCHES = {
    "ResNet-20, four chains": 142,
    "ResNet-20, contour and clipping": 101,
    "ResNet-20, sixteen chains": 100,
    "one chain": 87,
    "one chain, contour": 148,
    "own contour": 122,
    "interacting contour": 124,
    "loop": 688,
    "loop, compiled": 262,
    "vmap, not compiled": 310,
    "clipping": 94,
    "accumulation": 176,
    "replica exchange": 189,
    "replica exchange, reduced variance": 284,
    "EWSG": 215,
    "control variates": 365,
    "covariance friction": 427,
    "a step size for each chain": 97,
    "scalar parameters": 103,
    "scalar parameter, one chain": 85,
    "dropout": 88,
    "single precision": 88,
    "data on the host": 25,
    "SGLD": 87,
    "pSGLD": 94,
    "SGNHT": 99,
    "UnderdampedLangevin": 90,
    "pSGHMC": 147,
    "AutoSampling": 134,
    "DeepEnsemble": 79,
    "DeepEnsemble by AdamW": 720,
    "SWAG": 79,
    "MCDropout": 112,
    "WarmStart": 720,
    "a contour that learns its range": 90,
}

WAITS_OF_A_DRAW = {
    "ResNet-20, four chains": 709,
    "ResNet-20, contour and clipping": 159,
    "one chain, contour": 85,
}
