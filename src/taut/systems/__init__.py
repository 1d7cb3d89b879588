"""The one linear system: `gram` for steps, `pull` for derivatives, `stable` where slopes differ."""

from taut.systems.gram import (
    Factor as Factor,
    Rough as Rough,
    SharedFactor as SharedFactor,
    conjugate_gradient as conjugate_gradient,
    factorise as factorise,
    factorise_unseen as factorise_unseen,
    independent as independent,
    share as share,
    solve_gram as solve_gram,
    solve_gram_roughly as solve_gram_roughly,
    solve_lifted as solve_lifted,
)
from taut.systems.pull import (
    CONDITION as CONDITION,
    EVEN as EVEN,
    FAINT as FAINT,
    SAFE as SAFE,
    Known as Known,
    pull as pull,
    wide as wide,
)
from taut.systems.stable import Pulled as Pulled, solve_stably as solve_stably
