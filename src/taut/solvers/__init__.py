"""Ways to find the multipliers. A solver says, for each sample alone, how it ended."""

from taut.solvers.base import Solver as Solver
from taut.solvers.descent import GradientDescent as GradientDescent
from taut.solvers.newton import Newton as Newton
