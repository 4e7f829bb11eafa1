"""The most launches of an ordinary step beside its graphs, and the most waits of a step that draws samples, by case.

The numbers are those of the stand-in (`cases.py`), and may only become smaller. An ordinary step waits for nothing.
ResNet-20 has 59 tensors of parameters, the network of the other cases 23.
"""

LAUNCHES = {
    "ResNet-20, four chains": 804,
    "ResNet-20, contour and clipping": 1158,
    "ResNet-20, sixteen chains": 814,
    "one chain": 166,
    "one chain, contour": 295,
    "own contour": 448,
    "interacting contour": 509,
    "loop": 710,
    "loop, compiled": 303,
    "vmap, not compiled": 524,
    "clipping": 446,
    "accumulation": 767,
    "replica exchange": 492,
    "replica exchange, reduced variance": 587,
    "EWSG": 762,
    "control variates": 603,
    "covariance friction": 646,
    "a step size for each chain": 423,
    "scalar parameters": 537,
    "scalar parameter, one chain": 167,
    "dropout": 370,
    "single precision": 370,
    "data on the host": 313,
    "SGLD": 443,
    "pSGLD": 449,
    "SGNHT": 520,
    "UnderdampedLangevin": 445,
    "pSGHMC": 524,
}

WAITS_OF_A_DRAW = {
    "ResNet-20, four chains": 709,
    "ResNet-20, contour and clipping": 159,
    "one chain, contour": 85,
}
