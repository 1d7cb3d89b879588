"""Which equations are independent, how well they pin z down, and in what basis to work."""

from taut.analysis.basis import Basis as Basis, Scaled as Scaled
from taut.analysis.examine import (
    ConditionWarning as ConditionWarning,
    analyse as analyse,
    unexamined as unexamined,
)
from taut.analysis.pivoted import pivoted as pivoted, uneven as uneven
from taut.analysis.sifting import sift as sift
