"""The solve and the matched loss as torch.library ops, for torch.compile and torch.export.

A graph carries tensors only: an activation is its text and its numbers, and what is worked out
about a matrix is found again by the numbers of the matrix. Eager calls never come here.
"""

from taut.compiled import ops as ops
from taut.compiled.graph import (
    SPARSE as SPARSE,
    arguments as arguments,
    call as call,
    loss as loss,
    matched_loss as matched_loss,
    project as project,
    unfit as unfit,
)
from taut.compiled.memo import Memo as Memo
