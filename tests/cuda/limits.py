"""The most launches of an ordinary step beside its graphs, and the most waits of a step that draws samples, by case.

The numbers are those of the stand-in (`cases.py`), and may only become smaller. An ordinary step waits for nothing.
ResNet-20 has 59 tensors of parameters, the network of the other cases 23.
"""

LAUNCHES = {
    "ResNet-20, four chains": 149,
    "ResNet-20, contour and clipping": 111,
    "ResNet-20, sixteen chains": 101,
    "one chain": 89,
    "one chain, contour": 152,
    "own contour": 126,
    "interacting contour": 130,
    "loop": 689,
    "loop, compiled": 260,
    "vmap, not compiled": 311,
    "clipping": 95,
    "accumulation": 179,
    "replica exchange": 190,
    "replica exchange, reduced variance": 285,
    "EWSG": 222,
    "control variates": 366,
    "covariance friction": 431,
    "a step size for each chain": 98,
    "scalar parameters": 107,
    "scalar parameter, one chain": 87,
    "dropout": 89,
    "single precision": 89,
    "data on the host": 26,
    "SGLD": 92,
    "pSGLD": 98,
    "SGNHT": 147,
    "UnderdampedLangevin": 94,
    "pSGHMC": 151,
    "AutoSampling": 138,
    "DeepEnsemble": 83,
    "DeepEnsemble by AdamW": 724,
    "SWAG": 83,
    "MCDropout": 113,
    "WarmStart": 724,
    "a contour that learns its range": 91,
}

WAITS_OF_A_DRAW = {
    "ResNet-20, four chains": 709,
    "ResNet-20, contour and clipping": 159,
    "one chain, contour": 85,
}
