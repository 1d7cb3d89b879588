"""The kinds of constraints, one file each."""

from taut.problems.base import Problem as Problem
from taut.problems.inequalities import Inequalities as Inequalities
from taut.problems.linear import Linear as Linear
from taut.problems.nonlinear import Nonlinear as Nonlinear
