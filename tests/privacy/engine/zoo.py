"""Small nets that between them use every kind of layer, alone, repeated and shared."""

from collections.abc import Callable

import torch
from oracle import draw, generator
from torch import Tensor, nn
from torch.nn import functional as F

from dpsweep.core.circulant import CirculantLinear
from dpsweep.core.weight_standardization import StandardConv2d

SHAPE = (2, 6, 6)
CLASSES = 4


def loss(outputs_B: Tensor, targets_B: Tensor) -> Tensor:
    """Cross entropy; over positions too, where outputs have any."""
    return F.cross_entropy(outputs_B.flatten(1)[:, :CLASSES], targets_B)


def batch(num: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    targets = torch.randint(0, CLASSES, (num,), generator=generator(1))
    return draw(num, *SHAPE, seed=2).to(dtype), targets


class Net(nn.Module):
    """Layers by name, and a function of them and the images."""

    def __init__(self, forward: Callable[["Net", Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, inputs_B: Tensor) -> Tensor:
        return self.function(self, inputs_B)


class Gate(nn.Module):
    """No rule fits: parameters of its own, a layer inside, and two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.inner = nn.Linear(6, 6)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.scale * self.inner(left).sigmoid() * right


class Words(nn.Module):
    """Pixels as numbers of words in [0, 7)."""

    def forward(self, inputs_B: Tensor) -> Tensor:
        return (inputs_B.flatten(1)[:, :9] * 2).round().long() % 7


def _tied() -> nn.Module:
    net = Net(
        lambda net, x: net.out(net.table(net.words(x)).tanh().mean(1)),
        words=Words(),
        table=nn.Embedding(7, 3),
        out=nn.Linear(3, 7),
    )
    net.out.weight = net.table.weight
    return net


def _shared() -> nn.Module:
    net = Net(
        lambda net, x: net.out(net.second(net.first(x.flatten(2)).tanh()).flatten(1)),
        first=nn.Linear(36, 36),
        second=nn.Linear(36, 36, bias=False),
        out=nn.Linear(72, 4),
    )
    net.second.weight = net.first.weight
    return net


class Rotary(nn.Module):
    """Attention whose queries and keys are turned by angles of their positions (Su et al. 2021)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        half = width // heads // 2
        self.register_buffer("rates", 100.0 ** -(torch.arange(half) / half))

    def turned(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        angle = torch.arange(x.shape[2])[:, None] * self.rates
        one, two = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            self.turned(self.query(x)), self.turned(self.key(x)), value, is_causal=True
        )
        return mixed.transpose(1, 2).flatten(2)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
        nn.Tanh(),
        nn.Conv2d(4, 6, (3, 2), stride=(1, 2), groups=2, bias=False),
        nn.Tanh(),
        nn.Conv2d(6, 6, 2, dilation=2, padding=1, groups=6),
        nn.Flatten(),
        nn.Linear(72, 4),
    ),
    "standardised convolutions": lambda: nn.Sequential(
        StandardConv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        StandardConv2d(4, 6, (3, 2), stride=(1, 2), groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(72, 4),
    ),
    "norms": lambda: nn.Sequential(
        nn.LayerNorm((6, 6)),
        nn.GroupNorm(1, 2),
        nn.Tanh(),
        nn.LayerNorm(6, bias=False),
        nn.LayerNorm((2, 6, 6), elementwise_affine=False),
        nn.Flatten(),
        nn.Linear(72, 4),
    ),
    "linear over positions": lambda: nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Flatten(2), nn.Linear(30, 3, bias=False), nn.LayerNorm(3)
    ),
    "circulant": lambda: nn.Sequential(
        CirculantLinear(6, 6, block=3), nn.Tanh(), nn.Flatten(), CirculantLinear(72, 4, block=4)
    ),
    "words": lambda: nn.Sequential(
        Words(), nn.Embedding(7, 4, padding_idx=0), nn.Tanh(), nn.Flatten(), nn.Linear(36, 4)
    ),
    "tied words": _tied,
    "shared weight": _shared,
    "attention": lambda: Net(
        lambda net, x: net.cross(
            net.itself(*[x.flatten(1, 2)] * 3)[0], x[:, 0], x[:, 1], need_weights=False
        )[0],
        itself=nn.MultiheadAttention(6, 3, batch_first=True),
        cross=nn.MultiheadAttention(6, 2, batch_first=True),
    ),
    "transformer": lambda: Net(
        lambda net, x: net.block(x.flatten(1, 2))[:, :4, 0],
        block=nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
    ),
    "rotary attention": lambda: Net(
        lambda net, x: net.out(net.norm(net.attend(net.enter(x.flatten(1, 2)))))[:, :4, 0],
        enter=nn.Linear(6, 8),
        attend=Rotary(8, 2),
        norm=nn.RMSNorm(8),
        out=nn.Linear(8, 2),
    ),
    "black boxes": lambda: Net(
        lambda net, x: net.out(net.curve(net.gate(x[:, 0], x[:, 1])).flatten(1)),
        gate=Gate(),
        curve=nn.PReLU(6),
        out=nn.Linear(36, 4),
    ),
    "one black box": lambda: Net(
        lambda net, x: net.gate(x[:, 0], x[:, 1]),
        gate=Gate(),
    ),
    "called twice": lambda: Net(
        lambda net, x: (
            net.out(net.twice(net.twice(x).tanh()).mean((2, 3)))
            + net.out(net.twice(x[:, :, :4]).mean((2, 3)))
        ),
        twice=nn.Conv2d(2, 2, 3, padding=1),
        out=nn.Linear(2, 4),
    ),
    "never called": lambda: Net(
        lambda net, x: net.out(x.flatten(1)),
        idle=nn.Conv2d(2, 3, 3),
        box=Gate(),
        out=nn.Linear(72, 4),
    ),
    "without effect": lambda: Net(
        lambda net, x: net.out(net.head(x.flatten(1)).detach()) + 0 * net.tail(x.flatten(1)),
        head=nn.Linear(72, 4),
        tail=nn.Linear(72, 4),
        out=nn.Linear(4, 4),
    ),
}
"""Name -> net whose outputs begin with a number for each of CLASSES classes."""


def network(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The net of that name, with every parameter away from where it begins."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = ZOO[name]().to(dtype)
        with torch.no_grad():
            for p in net.parameters():
                p += 0.2 * torch.randn(p.shape, dtype=torch.float64).to(p)
    return net
