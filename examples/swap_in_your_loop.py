"""A device memory limit in a training loop of your own, with one more line:

python examples/swap_in_your_loop.py
"""

import torch
from torch import nn

import parallax

LIMIT = "40MiB"  # two fifths of the memory that this loop holds without a limit


def main() -> None:
    """Train the same few steps without a limit, and with one that offloads activations and optimizer states."""
    without = train(limit="1GiB")
    limited = train(limit=LIMIT)
    print(f"losses are equal, bit for bit: {without == limited}")


def train(limit: str) -> list[float]:
    """Return the losses of an ordinary training loop inside `with parallax.swap(...)`."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)], nn.Linear(512, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(2048, 512)
    labels = inputs[:, :10].argmax(1)
    losses = []
    with parallax.swap(model, limit=limit, optimizer=optimizer) as swapping:
        for _ in range(5):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    print(swapping.report(), end="\n\n")
    return losses


if __name__ == "__main__":
    main()
