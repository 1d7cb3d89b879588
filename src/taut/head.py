"""Lagrange units that lower layers predict."""

from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from taut.accept import Numbers, as_floating
from taut.activations import Activation, resolve
from taut.maps import stacked


@final
class LagrangeHead(nn.Module):
    """Lagrange units predicted from lower layers: (v, λ) from features, u = v + Aᵀλ + Gᵀν.

    The paper's units "coupled by standard means to lower layers": for use where b is not known
    at test time, trained with `bregman_loss`; or, where it is, as the start of an exact solve.
    Units of inequalities have one sign: ν ≥ 0 for a lower side, ν ≤ 0 for an upper one, either
    for both. They start near 0; with them, `bregman_loss` + Σ|ν| slack(y) bounds the matched loss
    from above.

    >>> head = LagrangeHead(8, torch.ones(1, 3), activation="sigmoid")
    >>> v, multipliers = head(torch.zeros(5, 8))
    >>> head.predictor(v, multipliers).shape
    torch.Size([5, 3])
    """

    A: Tensor
    G: Tensor | None

    def __init__(
        self,
        in_features: int,
        A: Float[Tensor, "I K"] | Numbers,
        activation: str | Activation = "linear",
        *,
        G: Float[Tensor, "M K"] | Numbers | None = None,
        lower: Float[Tensor, "..."] | Numbers | float | None = None,
        upper: Float[Tensor, "..."] | Numbers | float | None = None,
        h: Any = None,
    ):
        super().__init__()
        if h is not None:
            raise NotImplementedError(
                "LagrangeHead knows no h: multipliers of nonlinear equations do not give z, as "
                "their weights J(z) depend on it. Use taut.Projection(A, b, h=h)."
            )
        if G is None and not (lower is None and upper is None):
            raise ValueError(
                "bounds on z have no multipliers to predict: clip σ(u), or give the bounds as "
                "rows, G=torch.eye(K)."
            )
        own = _matrix("A", A)
        rows, columns = own.shape
        self.register_buffer("A", own)
        self.register_buffer("G", None if G is None else _matrix("G", G, own))
        self.activation: Activation = resolve(activation)
        self.linear: nn.Linear = nn.Linear(in_features, columns).to(own.dtype)
        self.lagrange: nn.Linear = nn.Linear(in_features, rows).to(own.dtype)
        if self.G is not None:
            self.signed: _Signed = _Signed(in_features, self.G, lower, upper)

    def forward(
        self, x: Float[Tensor, "*batch J"]
    ) -> tuple[Float[Tensor, "*batch K"], Float[Tensor, "*batch multipliers"]]:
        """The free predictor v and the predicted multipliers: λ, then ν."""
        multipliers = self.lagrange(x)
        if self.G is not None:
            multipliers = torch.cat([multipliers, self.signed(x)], -1)
        return self.linear(x), multipliers

    def predictor(
        self, v: Float[Tensor, "*batch K"], multipliers: Float[Tensor, "*batch multipliers"]
    ) -> Float[Tensor, "*batch K"]:
        """u = v + Aᵀλ + Gᵀν; σ(u) is the output, `bregman_loss(u, y, activation)` the loss.

        In half precision the terms are summed in float32.
        """
        A, G = as_floating("A", self.A, None), self.G
        G = None if G is None else as_floating("G", G, None)
        v, multipliers = as_floating("v", v, None), as_floating("multipliers", multipliers, None)
        return v + stacked(A, G).adjoint(multipliers)


def _matrix(name: str, x: Any, beside: Tensor | None = None) -> Tensor:
    """One matrix for all samples, that goes together with the one `beside` it."""
    found = as_floating(name, x, beside.dtype if beside is not None else None)
    if found.ndim != 2:
        raise ValueError(
            f"LagrangeHead needs one {name} for all samples, (I, K); got {tuple(found.shape)}."
        )
    if beside is None:
        return found.detach().clone()
    if found.shape[1] != beside.shape[1]:
        raise ValueError(
            f"A and G must have a column for each output; got A {tuple(beside.shape)}, "
            f"{name} {tuple(found.shape)}."
        )
    if found.dtype != beside.dtype:
        raise TypeError(f"A is {beside.dtype} and {name} is {found.dtype}: convert one of them.")
    return found.detach().clone()


@final
class _Signed(nn.Module):
    """The units of inequalities: softplus for each side that there is, off at the start."""

    sides: Tensor

    def __init__(self, in_features: int, G: Tensor, lower: Any, upper: Any):
        super().__init__()
        rows = G.shape[0]
        sides = []
        for name, x in (("lower", lower), ("upper", upper)):
            side = as_floating(name, torch.inf if x is None else x, G.dtype, G.device)
            if side.shape not in ((), (rows,)):
                raise ValueError(
                    f"{name} must be a number or ({rows},), an entry for each row of G, as a unit "
                    f"serves all samples; got {tuple(side.shape)}."
                )
            sides.append(side.expand(rows).isfinite())
        if not bool((sides[0] | sides[1]).any()):
            raise ValueError("G without a side constrains nothing: pass lower, upper, or both.")
        self.register_buffer("sides", torch.stack(sides).to(G.dtype))
        self.units: nn.Linear = nn.Linear(in_features, 2 * rows).to(G.dtype)
        nn.init.constant_(self.units.bias, -4.0)

    def forward(self, x: Float[Tensor, "*batch J"]) -> Float[Tensor, "*batch M"]:
        """ν = softplus(a) − softplus(c)."""
        up, down = nn.functional.softplus(self.units(x)).chunk(2, -1)
        return self.sides[0] * up - self.sides[1] * down
