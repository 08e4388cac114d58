"""Byzantine workers to order: wrong gradients for tests, and for trying a live job's defences."""

from loft_hvd.attacks.attack import (
    ALIE,
    IPM,
    Attack,
    Drift,
    Gaussian,
    HugeValue,
    LabelFlip,
    Mimic,
    MinMax,
    MinSum,
    NaN,
    Scaled,
    SignFlip,
    Zero,
)
from loft_hvd.attacks.optimised import OptimisedALIE, OptimisedIPM
from loft_hvd.attacks.trial import attach

__all__ = [
    "ALIE",
    "IPM",
    "Attack",
    "Drift",
    "Gaussian",
    "HugeValue",
    "LabelFlip",
    "Mimic",
    "MinMax",
    "MinSum",
    "NaN",
    "OptimisedALIE",
    "OptimisedIPM",
    "Scaled",
    "SignFlip",
    "Zero",
    "attach",
]
