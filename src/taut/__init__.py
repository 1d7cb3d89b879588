"""Neural networks whose outputs satisfy constraints exactly."""

from taut import activations as activations, backends as backends, distributed as distributed
from taut.activations import Activation as Activation, Interval as Interval
from taut.analysis import ConditionWarning as ConditionWarning
from taut.certificate import is_certificate as is_certificate
from taut.head import LagrangeHead as LagrangeHead
from taut.losses import bregman_loss as bregman_loss, matched_loss as matched_loss
from taut.memory import LagrangeMemory as LagrangeMemory
from taut.modules import Projection as Projection
from taut.outcome import (
    FailureWarning as FailureWarning,
    SolveError as SolveError,
    Status as Status,
)
from taut.prepare import Prepared as Prepared, prepare as prepare
from taut.projection import project as project, reconcile as reconcile
from taut.solution import Solution as Solution
from taut.solvers import GradientDescent as GradientDescent, Newton as Newton, Solver as Solver

__version__ = "0.2.0"
