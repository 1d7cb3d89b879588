"""The activations: the paper's table, and what can be made from it."""

from taut.activations.activation import Activation as Activation, Interval as Interval
from taut.activations.derived import (
    bounded as bounded,
    mixed as mixed,
    tempered as tempered,
    weighted as weighted,
)
from taut.activations.table import (
    ACTIVATIONS as ACTIVATIONS,
    exp as exp,
    linear as linear,
    resolve as resolve,
    sigmoid as sigmoid,
    srlu as srlu,
    tanh as tanh,
)
