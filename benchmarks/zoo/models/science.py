"""Models that are neither of images nor of text: graphs, recommendation, generation, control, physics, sets."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import Batch, Entry, Whole
from benchmarks.zoo.models.rows import (
    CLASSES,
    LENGTH,
    WIDTH,
    class_loss,
    images,
    numbers,
    sequences,
    square_loss,
    vectors,
)

NODES, EDGES = 12, 30


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ---- graphs ----------------------------------------------------------------------------------------


class GraphConv(nn.Module):
    """Messages along edges, added up by index_add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.own = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        messages = self.message(x[:, source])
        gathered = torch.zeros_like(x).index_add(1, target, messages)
        return F.relu(self.own(x) + gathered)


class GraphNet(nn.Module):
    """All rows share one graph, which is an input without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.convs = nn.ModuleList(GraphConv(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.enter(x)
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.head(x.mean(dim=1))


def one_graph(rows: int, random: torch.Generator) -> Batch:
    """Features of nodes for each row, and the edges that all share."""
    edges = torch.randint(0, NODES, (2, EDGES), generator=torch.Generator().manual_seed(5))
    x = torch.randn(rows, NODES, 4, generator=random)
    return (x, Whole(edges)), torch.randint(0, CLASSES, (rows,), generator=random)


class FixedGraph(GraphNet):
    """The graph is a buffer, its degrees a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(5)
        adjacency = (torch.rand(NODES, NODES, generator=random) < 0.3).float()
        adjacency.fill_diagonal_(1.0)
        self.register_buffer("norm", adjacency / adjacency.sum(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for conv in self.convs:
            x = F.relu(conv.own(x) + self.norm @ conv.message(x))
        return self.head(x.mean(dim=1))


def node_features(rows: int, random: torch.Generator) -> Batch:
    """Features of nodes for each row."""
    x = torch.randn(rows, NODES, 4, generator=random)
    return x, torch.randint(0, CLASSES, (rows,), generator=random)


class GraphAttention(nn.Module):
    """Dense attention over a mask of edges, which each row has."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ModuleList([nn.Linear(4, WIDTH, False), nn.Linear(WIDTH, WIDTH, False)])
        self.a = nn.ParameterList([nn.Parameter(torch.empty(2 * WIDTH, 1)) for _ in range(2)])
        for a in self.a:
            nn.init.xavier_uniform_(a, gain=1.414)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for w, a in zip(self.ws, self.a):
            h = w(x)
            e = F.leaky_relu(h @ a[:WIDTH] + (h @ a[WIDTH:]).mT, 0.2)
            e = torch.where(adjacency > 0, e, torch.full_like(e, -9e15))
            x = F.elu(e.softmax(dim=-1) @ h)
        return self.head(x.sum(1))


def many_graphs(rows: int, random: torch.Generator) -> Batch:
    """Features and edges of a graph for each row."""
    adjacency = (torch.rand(rows, NODES, NODES, generator=random) < 0.3).float()
    adjacency += torch.eye(NODES)
    x = torch.randn(rows, NODES, 4, generator=random)
    return (x, adjacency), torch.randint(0, CLASSES, (rows,), generator=random)


# ---- recommendation and retrieval ------------------------------------------------------------------


class DLRM(nn.Module):
    """Tables of categories, and all products of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 8) for size in (10, 20, 30))
        for table in self.tables:
            nn.init.uniform_(
                table.weight,
                -math.sqrt(1 / table.num_embeddings),
                math.sqrt(1 / table.num_embeddings),
            )
        self.bottom, self.top = _mlp(6, 16, 8), _mlp(8 + 6, 16, 16, 1)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        embedded = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack([x, *embedded], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([x, products[:, rows, columns]], dim=1)).squeeze(1)


def clicks(rows: int, random: torch.Generator) -> Batch:
    """Numbers and categories, and whether it was clicked."""
    categories = torch.randint(0, 10, (rows, 3), generator=random)
    clicked = torch.randint(0, 2, (rows,), generator=random).float()
    return (torch.randn(rows, 6, generator=random), categories), clicked


class TwoTowers(nn.Module):
    """Queries against all items of the batch, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.item = _mlp(WIDTH, 32, 8), _mlp(10, 32, 32, 8)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, query: Tensor, item: Tensor) -> Tensor:
        q, k = F.normalize(self.query(query), dim=-1), F.normalize(self.item(item), dim=-1)
        return self.logit_scale.exp() * q @ k.t()


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    labels = torch.arange(len(targets), device=outputs.device)
    return (F.cross_entropy(outputs, labels) + F.cross_entropy(outputs.T, labels)) / 2


class FeatureTowers(TwoTowers):
    """The same, with the comparison left to the loss."""

    def forward(self, query: Tensor, item: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return self.query(query), self.item(item), self.logit_scale.exp()


def contrast_of_features(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    q, k, scale = outputs
    return contrast(scale * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).t(), targets)


def spread_of_features(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """VICReg: alike, of some variance, and not correlated."""
    del targets
    q, k, _ = outputs
    apart = [each - each.mean(0) for each in (q, k)]
    shared = [(each.t() @ each / (len(each) - 1)).square() for each in apart]
    spread = sum(F.relu(1 - (each.var(0) + 1e-4).sqrt()).mean() for each in apart)
    return F.mse_loss(q, k) + spread + sum(each.sum() - each.diagonal().sum() for each in shared)


def query_items(rows: int, random: torch.Generator) -> Batch:
    """Queries and items, by name."""
    query, item = (
        torch.randn(rows, WIDTH, generator=random),
        torch.randn(rows, 10, generator=random),
    )
    return {"query": query, "item": item}, torch.zeros(rows)


class Siamese(nn.Module):
    """One net for anchor, positive and negative."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(True)
        )
        self.fc = nn.Linear(128, 8)

    def forward_once(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.conv(x), 1))

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(self.forward_once, (anchor, positive, negative)))


def triplet_loss(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    del targets
    return F.triplet_margin_loss(*outputs)


def triplets(rows: int, random: torch.Generator) -> Batch:
    """Three images to a row."""
    return tuple(torch.randn(rows, 3, 16, 16, generator=random) for _ in range(3)), torch.zeros(
        rows
    )


class MoCo(nn.Module):
    """A queue of old keys, which each forward of training writes; the encoder of keys moves after the other."""

    def __init__(self, size: int = 28) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = _mlp(WIDTH, 32, 8), _mlp(WIDTH, 32, 8)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(8, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        q = F.normalize(self.encoder_q(query), dim=1)
        with torch.no_grad():
            for p, m in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
                m.data = m.data * 0.9 + p.data * 0.1
            k = F.normalize(self.encoder_k(key), dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        pointer = int(self.queue_ptr)
        where = (torch.arange(k.shape[0]) + pointer) % self.queue.shape[1]
        self.queue[:, where] = k.T
        self.queue_ptr[0] = (pointer + k.shape[0]) % self.queue.shape[1]
        return torch.cat([positive, negative], dim=1) / 0.2


def first_class(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, torch.zeros_like(targets, dtype=torch.long))


def two_views(rows: int, random: torch.Generator) -> Batch:
    """Two views of a row."""
    x = torch.randn(rows, WIDTH, generator=random)
    return (x, x + 0.1), torch.zeros(rows)


# ---- generation ------------------------------------------------------------------------------------


class VAE(nn.Module):
    """The noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _mlp(WIDTH, 32, 32), _mlp(4, 32, 32, WIDTH)
        self.mu, self.logvar = nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.encoder(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + noise * torch.exp(0.5 * logvar)
        return self.decoder(z), mu, logvar


def vae_loss(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    found, mu, logvar = outputs
    divergence = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return F.mse_loss(found, targets) + 0.1 * divergence


def with_noise(rows: int, random: torch.Generator) -> Batch:
    """Vectors and noise; the vectors are the targets too."""
    x = torch.randn(rows, WIDTH, generator=random)
    return (x, torch.randn(rows, 4, generator=random)), x


class VectorQuantizerEMA(nn.Module):
    """Codes that follow the mean of what is nearest to them."""

    def __init__(self, codes: int = 8, width: int = 4) -> None:
        super().__init__()
        self.register_buffer("embedding", torch.randn(codes, width))
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.register_buffer("ema_w", self.embedding.clone())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nearest = torch.cdist(z, self.embedding).argmin(dim=1)
        chosen = F.one_hot(nearest, self.embedding.shape[0]).to(z.dtype)
        quantized = chosen @ self.embedding
        if self.training:
            with torch.no_grad():
                self.cluster_size = self.cluster_size * 0.9 + 0.1 * chosen.sum(0)
                n = self.cluster_size.sum()
                size = (self.cluster_size + 1e-5) / (n + 8e-5) * n
                self.ema_w = self.ema_w * 0.9 + 0.1 * chosen.t() @ z
                self.embedding = self.ema_w / size.unsqueeze(1)
        commitment = F.mse_loss(quantized.detach(), z, reduction="none").mean(1)
        return z + (quantized - z).detach(), commitment, nearest


class VQVAE(nn.Module):
    """Buffers that training replaces; integers among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _mlp(WIDTH, 32, 4), _mlp(4, 32, WIDTH)
        self.quantizer = VectorQuantizerEMA()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z, commitment, codes = self.quantizer(self.encoder(x))
        return {"found": self.decoder(z), "commitment": commitment, "codes": codes}


def vq_loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.mse_loss(outputs["found"], targets) + 0.25 * outputs["commitment"].mean()


class Generator(nn.Module):
    """DCGAN's, initialised by class names; the loss holds a fixed discriminator's view."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.apply(weights_init)

    def forward(self, z: Tensor) -> Tensor:
        return self.main(z[:, :, None, None])


def weights_init(m: nn.Module) -> None:
    name = m.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


def latents(rows: int, random: torch.Generator) -> Batch:
    """Noise and the images it is to become."""
    return torch.randn(rows, 8, generator=random), torch.randn(rows, 3, 16, 16, generator=random)


class TiedAutoencoder(nn.Module):
    """The decoder uses the encoder's matrices, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 32), nn.Linear(32, 8)
        self.b1, self.b2 = nn.Parameter(torch.zeros(32)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.sigmoid(self.w2(torch.sigmoid(self.w1(x))))
        h = torch.sigmoid(F.linear(z, self.w2.weight.t(), self.b1))
        return F.linear(h, self.w1.weight.t(), self.b2)


class RealNVP(nn.Module):
    """Coupling layers with masks; the logarithm of the determinant is summed along."""

    def __init__(self) -> None:
        super().__init__()
        masks = torch.stack([(torch.arange(WIDTH) + i) % 2 for i in range(4)]).float()
        self.register_buffer("masks", masks)
        self.s = nn.ModuleList(nn.Sequential(_mlp(WIDTH, 24, WIDTH), nn.Tanh()) for _ in range(4))
        self.t = nn.ModuleList(_mlp(WIDTH, 24, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = x.new_zeros(x.shape[0])
        for i in reversed(range(len(self.t))):
            mask = self.masks[i]
            kept = mask * x
            s, t = self.s[i](kept) * (1 - mask), self.t[i](kept) * (1 - mask)
            x = (1 - mask) * (x - t) * torch.exp(-s) + kept
            log_det = log_det - s.sum(dim=1)
        return x, log_det


def likelihood(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    del targets
    z, log_det = outputs
    return (0.5 * z.pow(2).sum(1) - log_det).mean() / WIDTH


# ---- control, physics, sets, time ------------------------------------------------------------------


class ActorCritic(nn.Module):
    """PPO's: orthogonal gains, a dict of outputs, a parameter that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)
        self.log_std = nn.Parameter(torch.full((3,), -0.5))
        for module, gain in ((self.shared, math.sqrt(2)), (self.actor, 0.01), (self.critic, 1.0)):
            for layer in module.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.orthogonal_(layer.weight, gain)
                    nn.init.zeros_(layer.bias)

    def forward(self, state: Tensor, action: Tensor) -> dict[str, Tensor]:
        h = self.shared(state)
        policy = torch.distributions.Normal(self.actor(h), self.log_std.exp(), validate_args=False)
        return {
            "log_prob": policy.log_prob(action).sum(-1),
            "entropy": policy.entropy().sum(-1),
            "value": self.critic(h).squeeze(-1),
        }


def ppo_loss(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    ratio = (outputs["log_prob"] - targets["log_prob"]).exp()
    gain = targets["advantage"]
    surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    value = F.mse_loss(outputs["value"], targets["return"])
    return -surrogate + 0.5 * value - 0.01 * outputs["entropy"].mean()


def rollouts(rows: int, random: torch.Generator) -> Batch:
    """States and actions; advantages, returns and old probabilities are the targets."""
    targets = {
        "log_prob": -3 + 0.1 * torch.randn(rows, generator=random),
        "advantage": torch.randn(rows, generator=random),
        "return": torch.randn(rows, generator=random),
    }
    state = torch.randn(rows, WIDTH, generator=random)
    return {"state": state, "action": torch.randn(rows, 3, generator=random)}, targets


class PhysicsInformed(nn.Module):
    """Takes the derivative of its own output, with a graph of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        u = self.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return du[:, :1] + u * du[:, 1:]


class NeuralODE(nn.Module):
    """Runge and Kutta's fourth order, by a loop over one net."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.enter, self.field = nn.Linear(WIDTH, 8), _mlp(9, 16, 8)
        self.head, self.steps = nn.Linear(8, CLASSES), steps

    def slope(self, t: float, y: Tensor) -> Tensor:
        return self.field(torch.cat([y, torch.full_like(y[:, :1], t)], dim=1))

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.enter(x), 1 / self.steps
        for i in range(self.steps):
            t = i * h
            k1 = self.slope(t, y)
            k2 = self.slope(t + h / 2, y + h / 2 * k1)
            k3 = self.slope(t + h / 2, y + h / 2 * k2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.slope(t + h, y + h * k3))
        return self.head(y)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)))


class MixtureOfExperts(nn.Module):
    """The two best experts of each token, found by torch.where; a loss of balance is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(2))
        self.experts = nn.ModuleList(nn.ModuleList(Expert() for _ in range(4)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        shape, balance = x.shape, []
        for gate, experts in zip(self.gates, self.experts):
            flat = x.view(-1, shape[-1])
            weights, selected = torch.topk(gate(flat), 2)
            weights = F.softmax(weights, dim=1)
            results = torch.zeros_like(flat)
            for i, expert in enumerate(experts):
                index, nth = torch.where(selected == i)
                results[index] += weights[index, nth, None] * expert(flat[index])
            balance.append(gate(flat).softmax(-1).view(shape[0], -1, 4).mean(1))
            x = x + results.view(shape)
        return self.head(x.mean(1)), torch.stack(balance, 1)


def balanced_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], targets) + 0.1 * outputs[1].square().sum(-1).mean()


class DenseMixture(nn.Module):
    """All experts run, stacked as parameters, and are weighted by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(4, WIDTH, 32))
        self.w2 = nn.Parameter(torch.empty(4, 32, WIDTH))
        self.gate, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, CLASSES)
        for w in (self.w1, self.w2):
            nn.init.normal_(w, std=w.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        hidden = F.relu(torch.einsum("bi,eio->beo", x, self.w1))
        found = torch.einsum("beo,eoi,be->bi", hidden, self.w2, shares)
        return self.head(x + found)


class Tree(nn.Module):
    """A module that holds modules of its own class and calls them."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.split = nn.Linear(WIDTH, 1) if depth else None
        self.leaf = None if depth else nn.Linear(WIDTH, CLASSES)
        self.left = Tree(depth - 1) if depth else None
        self.right = Tree(depth - 1) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        if self.leaf is not None:
            return self.leaf(x)
        assert self.split is not None
        assert self.left is not None
        assert self.right is not None
        p = torch.sigmoid(self.split(x))
        return p * self.left(x) + (1 - p) * self.right(x)


class DeepSets(nn.Module):
    """Sets of different sizes: padding by a mask of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.rho = _mlp(WIDTH, 32, 32), _mlp(32, 32, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.phi(x).masked_fill(~mask.unsqueeze(-1), 0.0)
        return self.rho(h.sum(1) / mask.sum(1, keepdim=True))


def sets(rows: int, random: torch.Generator) -> Batch:
    """Sets and which members they have."""
    mask = torch.ones(rows, LENGTH, dtype=torch.bool)
    mask[::2, LENGTH // 2 :] = False
    x = torch.randn(rows, LENGTH, WIDTH, generator=random)
    return {"x": x, "mask": mask}, torch.randint(0, CLASSES, (rows,), generator=random)


class NBeats(nn.Module):
    """Each stack subtracts what it explains."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(_mlp(WIDTH, 32, WIDTH + 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        forecast = torch.zeros(x.size(0), 4, dtype=x.dtype, device=x.device)
        for stack in self.stacks:
            backcast, part = stack(x).split([WIDTH, 4], dim=-1)
            x, forecast = x - backcast, forecast + part
        return forecast


class ConvLSTM(nn.Module):
    """A loop over frames with a state of maps."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([nn.Conv2d(3 + 8, 32, 3, 1, 1), nn.Conv2d(16, 32, 3, 1, 1)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, frames: Tensor) -> Tensor:
        rows, times, _, height, width = frames.shape
        states = [
            (frames.new_zeros(rows, 8, height, width), frames.new_zeros(rows, 8, height, width))
            for _ in self.gates
        ]
        for t in range(times):
            x = frames[:, t]
            for i, gate in enumerate(self.gates):
                h, c = states[i]
                a, f, o, g = gate(torch.cat([x, h], dim=1)).chunk(4, dim=1)
                c = f.sigmoid() * c + a.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                states[i], x = (h, c), h
        return self.head(x)


def films(rows: int, random: torch.Generator) -> Batch:
    """Frames and the one that follows."""
    x = torch.randn(rows, 5, 3, 8, 8, generator=random)
    return x[:, :4], x[:, 4]


class Distilled(nn.Module):
    """A frozen teacher in evaluation mode, whatever the student is in."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = _mlp(WIDTH, 64, 64, CLASSES), _mlp(WIDTH, 24, 24, CLASSES)
        self.teacher.requires_grad_(False)

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            wanted = self.teacher(x)
        return {"logits": self.student(x), "teacher": wanted}


def distillation(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    soft = F.kl_div(
        (outputs["logits"] / 2).log_softmax(-1),
        (outputs["teacher"] / 2).softmax(-1),
        reduction="batchmean",
    )
    return F.cross_entropy(outputs["logits"], targets) + soft


class MultiTask(nn.Module):
    """Heads by name; the weights of the tasks are parameters, which travel as outputs without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = _mlp(WIDTH, 32, 32)
        self.heads = nn.ModuleDict({"classes": nn.Linear(32, CLASSES), "value": nn.Linear(32, 1)})
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.relu(self.trunk(x))
        found = {name: head(h) for name, head in self.heads.items()}
        return {**found, "log_vars": self.log_vars}


def uncertainty_loss(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    losses = torch.stack(
        [
            F.cross_entropy(outputs["classes"], targets["classes"]),
            F.mse_loss(outputs["value"].squeeze(1), targets["value"]),
        ]
    )
    weights = outputs["log_vars"]
    return (torch.exp(-weights) * losses + weights).sum()


def two_tasks(rows: int, random: torch.Generator) -> Batch:
    """Vectors, classes and values."""
    targets = {
        "classes": torch.randint(0, CLASSES, (rows,), generator=random),
        "value": torch.randn(rows, generator=random),
    }
    return torch.randn(rows, WIDTH, generator=random), targets


class Siren(nn.Module):
    """Sines, with their own initial range for the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in ((2, 32), (32, 32), (32, 32)))
        self.last = nn.Linear(32, 3)
        with torch.no_grad():
            for i, layer in enumerate(self.layers):
                bound = 1 / 2 if i == 0 else math.sqrt(6 / 32) / 30
                layer.weight.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        return self.last(x)


def pixels(rows: int, random: torch.Generator) -> Batch:
    """Places and colours."""
    return torch.rand(rows, 6, 2, generator=random), torch.rand(rows, 6, 3, generator=random)


class FourierOperator(nn.Module):
    """Complex weights on the low frequencies of an image, written into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(3, 8, 1), nn.Linear(8, CLASSES)
        self.spectral = nn.ParameterList(
            [nn.Parameter(torch.rand(8, 8, 4, 4, dtype=torch.cfloat) / 64) for _ in range(2)]
        )
        self.pointwise = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for weight, w in zip(self.spectral, self.pointwise):
            z = torch.fft.rfft2(x)
            out = torch.zeros_like(z)
            out[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", z[:, :, :4, :4], weight)
            x = F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + w(x))
        return self.project(x.mean((2, 3)))


class Capsules(nn.Module):
    """Routing by agreement: a loop whose weights have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 5, 4)
        self.w = nn.Parameter(torch.randn(1, 36, CLASSES, 6, 4) * 0.1)

    @staticmethod
    def squash(s: Tensor) -> Tensor:
        norm = s.pow(2).sum(-1, keepdim=True)
        return norm / (1 + norm) * s / (norm.sqrt() + 1e-8)

    def forward(self, x: Tensor) -> Tensor:
        u = self.squash(self.conv(x).view(x.size(0), -1, 4))
        votes = (self.w @ u[:, :, None, :, None]).squeeze(-1)
        b = torch.zeros(*votes.shape[:3], 1, dtype=x.dtype, device=x.device)
        for i in range(3):
            v = self.squash((b.softmax(2) * votes).sum(1))
            if i < 2:
                b = b + (votes.detach() * v.detach().unsqueeze(1)).sum(-1, keepdim=True)
        return v.norm(dim=-1) * 5


ENTRIES: dict[str, Entry] = {
    "graph-edges": Entry(GraphNet, one_graph, class_loss, "graph net, edges an input without rows"),
    "graph-buffer": Entry(FixedGraph, node_features, class_loss, "graph net, graph a buffer"),
    "graph-attention": Entry(GraphAttention, many_graphs, class_loss, "graph attention"),
    "dlrm": Entry(DLRM, clicks, F.binary_cross_entropy_with_logits, "DLRM"),
    "two-towers": Entry(TwoTowers, query_items, contrast, "two towers, all rows", coupled=True),
    "clip": Entry(
        FeatureTowers,
        query_items,
        contrast_of_features,
        "CLIP, one loss of all rows",
        gathered=True,
    ),
    "vicreg": Entry(
        FeatureTowers,
        query_items,
        spread_of_features,
        "VICReg, one loss of all rows",
        gathered=True,
    ),
    "siamese": Entry(Siamese, triplets, triplet_loss, "Siamese, one net thrice"),
    "moco": Entry(MoCo, two_views, first_class, "MoCo with queue", coupled=True),
    "vae": Entry(VAE, with_noise, vae_loss, "variational autoencoder, noise an input"),
    "vqvae": Entry(
        VQVAE,
        lambda rows, random: (lambda x: (x, x))(torch.randn(rows, WIDTH, generator=random)),
        vq_loss,
        "VQ-VAE, codes as EMA buffers",
        coupled=True,
    ),
    "generator": Entry(Generator, latents, square_loss, "DCGAN generator", coupled=True),
    "tied-autoencoder": Entry(
        TiedAutoencoder, numbers(outputs=WIDTH), square_loss, "autoencoder, matrices turned"
    ),
    "real-nvp": Entry(RealNVP, numbers(), likelihood, "RealNVP"),
    "ppo": Entry(ActorCritic, rollouts, ppo_loss, "PPO actor-critic, dicts"),
    "physics": Entry(
        PhysicsInformed, numbers(2), square_loss, "autograd.grad in the forward", coupled=False
    ),
    "neural-ode": Entry(NeuralODE, vectors(), class_loss, "neural ODE, one net in a loop"),
    "experts": Entry(MixtureOfExperts, sequences(), balanced_loss, "mixture of experts, top 2"),
    "dense-experts": Entry(DenseMixture, vectors(), class_loss, "experts stacked, einsum"),
    "tree": Entry(Tree, vectors(), class_loss, "soft decision tree, recursive"),
    "deep-sets": Entry(DeepSets, sets, class_loss, "sets with a mask"),
    "n-beats": Entry(NBeats, numbers(outputs=4), square_loss, "N-BEATS"),
    "conv-lstm": Entry(ConvLSTM, films, square_loss, "ConvLSTM"),
    "distilled": Entry(Distilled, vectors(), distillation, "frozen teacher, train() overridden"),
    "multi-task": Entry(MultiTask, two_tasks, uncertainty_loss, "learned weights of tasks"),
    "siren": Entry(Siren, pixels, square_loss, "SIREN"),
    "fourier": Entry(FourierOperator, images(), class_loss, "Fourier neural operator"),
    "capsules": Entry(Capsules, images(), class_loss, "capsules, routing"),
}
