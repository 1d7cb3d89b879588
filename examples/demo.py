"""A constrained network against an unconstrained one, on targets that obey three equations.

Six flows in a small plant: what enters a junction leaves it, and the total is metered. Both
networks see the same noisy measurements; one of them ends in `taut.Projection`.
"""

import torch

import taut

# outputs: feed, recycle, reactor, product, purge, loss — all between 0 and 1
A = torch.tensor(
    [
        [1.0, 1.0, -1.0, 0.0, 0.0, 0.0],  # feed + recycle = reactor
        [0.0, -1.0, 1.0, -1.0, -1.0, -1.0],  # reactor = recycle + product + purge + loss
        [1.0, 0.0, 0.0, 0.0, 1.0, 1.0],  # a meter reads feed + purge + loss
    ]
)


def flows(x):
    """Flows that obey the first two equations exactly, as smooth functions of the inputs."""
    feed = 0.2 + 0.3 * torch.sigmoid(x[:, 0] + 0.5 * x[:, 1])
    recycle = 0.1 + 0.3 * torch.sigmoid(x[:, 2] * x[:, 0])
    purge = feed * (0.1 + 0.2 * torch.sigmoid(x[:, 3]))
    loss = feed * 0.2 * torch.sigmoid(-x[:, 1])
    return torch.stack([feed, recycle, feed + recycle, feed - purge - loss, purge, loss], dim=1)


def train(x, noisy, b, layer, epochs=150):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(epochs):
        optimizer.zero_grad()
        v = net(x)
        if layer is None:
            loss = taut.bregman_loss(v, noisy, "sigmoid")
        else:
            loss = taut.matched_loss(layer.solve(v, b), noisy)
        loss.backward()
        optimizer.step()
    return net


def main():
    torch.manual_seed(0)
    x, x_test = torch.randn(200, 4), torch.randn(1000, 4)
    y, y_test = flows(x), flows(x_test)
    noisy = (y + 0.05 * torch.randn_like(y)).clamp(0.01, 0.99)
    layer = taut.Projection(A, activation="sigmoid")
    # Noisy targets do not obey the equations; the nearest that do are one projection away.
    logits = taut.activations.sigmoid.inverse(noisy)
    reconciled = layer(logits, y @ A.T)
    plain, constrained = train(x, noisy, None, None), train(x, reconciled, y @ A.T, layer)
    with torch.no_grad():
        results = {
            "plain": torch.sigmoid(plain(x_test)),
            "constrained": layer(constrained(x_test), y_test @ A.T),
        }
    print(f"{'network':<12} {'error in z':>12} {'largest |Az - b|':>18}")
    for name, z in results.items():
        error = (z - y_test).square().mean().sqrt()
        print(f"{name:<12} {error:12.4f} {(z @ A.T - y_test @ A.T).abs().max():18.1e}")


if __name__ == "__main__":
    main()
