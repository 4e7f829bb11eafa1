"""The most launches of an ordinary step beside its graphs, and the most waits of a step that draws samples, by case.

The numbers are those of the stand-in (`cases.py`), and may only become smaller. An ordinary step waits for nothing.
ResNet-20 has 59 tensors of parameters, the network of the other cases 23.
"""

LAUNCHES = {
    "ResNet-20, four chains": 151,
    "ResNet-20, contour and clipping": 211,
    "ResNet-20, sixteen chains": 103,
    "one chain": 89,
    "one chain, contour": 196,
    "own contour": 169,
    "interacting contour": 230,
    "loop": 689,
    "loop, compiled": 260,
    "vmap, not compiled": 313,
    "clipping": 97,
    "accumulation": 183,
    "replica exchange": 192,
    "replica exchange, reduced variance": 287,
    "EWSG": 226,
    "control variates": 368,
    "covariance friction": 433,
    "a step size for each chain": 100,
    "scalar parameters": 150,
    "scalar parameter, one chain": 87,
    "dropout": 91,
    "single precision": 91,
    "data on the host": 34,
    "SGLD": 94,
    "pSGLD": 100,
    "SGNHT": 149,
    "UnderdampedLangevin": 96,
    "pSGHMC": 153,
}

WAITS_OF_A_DRAW = {
    "ResNet-20, four chains": 3,
    "ResNet-20, contour and clipping": 3,
    "one chain, contour": 3,
}
