"""Three ways to use equations that are known to hold, on noisy measurements of a small plant.

Six flows: what enters a junction leaves it, and a meter reads the sum of three of them. At test
the right-hand sides b are known, as they are whenever taut can be used. A plain network does not
use them; projecting its output once uses them at test only; a network trained through
`taut.Projection` has them in training too. All see the same data and begin with the same weights.
"""

import torch

import taut

SEEDS = 20

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


def train(x, loss, seed, epochs=150):
    """A network that minimises `loss` of its output v."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss(net(x)).backward()
        optimizer.step()
    return net


def outputs(seed, layer):
    """What each way predicts for fresh inputs, with the right flows."""
    torch.manual_seed(seed)
    x, x_test = torch.randn(200, 4), torch.randn(1000, 4)
    y, y_test = flows(x), flows(x_test)
    b, b_test = y @ A.T, y_test @ A.T
    noisy = (y + 0.05 * torch.randn_like(y)).clamp(0.01, 0.99)
    # Noisy targets do not obey the equations; the nearest that do are one projection away.
    reconciled = layer(taut.activations.sigmoid.inverse(noisy), b)
    plain = train(x, lambda v: taut.bregman_loss(v, noisy, "sigmoid"), seed)
    cleaned = train(x, lambda v: taut.bregman_loss(v, reconciled, "sigmoid"), seed)
    through = train(x, lambda v: layer.loss(v, reconciled, b), seed)
    with torch.no_grad():
        return y_test, {
            "plain": torch.sigmoid(plain(x_test)),
            "plain, projected once at test": layer(plain(x_test), b_test),
            "same, of reconciled targets": layer(cleaned(x_test), b_test),
            "trained through the layer": layer(through(x_test), b_test),
        }


def main():
    layer = taut.Projection(A, activation="sigmoid")
    errors, residuals = {}, {}
    for seed in range(SEEDS):
        y, results = outputs(seed, layer)
        for name, z in results.items():
            errors.setdefault(name, []).append((z - y).square().mean().sqrt())
            residuals.setdefault(name, []).append(((z - y) @ A.T).abs().max())
    once = torch.stack(errors["plain, projected once at test"])
    print(f"Root mean square error of z over {SEEDS} seeds; seeds in which it is below that of")
    print("projecting once; the largest |Az - b| of all test samples.\n")
    print(
        f"{'network':<30} {'mean':>7} {'sd':>7} {'least':>7} {'most':>7} {'below':>6} {'|Az-b|':>8}"
    )
    for name, values in errors.items():
        error, residual = torch.stack(values), torch.stack(residuals[name])
        spread = (error.mean(), error.std(), error.min(), error.max())
        numbers = " ".join(f"{x:7.4f}" for x in spread)
        print(f"{name:<30} {numbers} {int((error < once).sum()):6d} {residual.max():8.1e}")


if __name__ == "__main__":
    main()
