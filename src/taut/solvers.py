"""The two ways to minimise D: Newton's, and the paper's gradient descent.

A solver takes the problems of a batch and says, for each sample alone, how it ended.
"""

from taut.descent import GradientDescent as GradientDescent
from taut.newton import Newton as Newton
from taut.solver import Solver as Solver
