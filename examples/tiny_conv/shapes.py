"""Pictures of ten kinds of shapes, drawn from formulas: the sample convolutional model's data.

A shape is a radius as a function of the angle; a picture adds position, size, rotation, colours, a light
gradient, two bars that may hide part of the shape, blur at the edge and noise.
"""

import math

import torch
from torch import Tensor

CLASSES = ("disc", "ellipse", "triangle", "square", "pentagon", "hexagon", "star4", "star5", "star6", "ring")
SIZE = 48
SUPERSAMPLE = 2


def radius(label: Tensor, angle: Tensor) -> Tensor:
    """Radius of each shape (largest 1) towards `angle`. label: [n, 1, 1], angle: [n, h, w] -> [n, h, w]."""
    sides = torch.tensor([0, 0, 3, 4, 5, 6, 4, 5, 6, 0], device=label.device)[label].clamp(min=1).float()
    sector = torch.remainder(angle, 2 * math.pi / sides) - math.pi / sides
    polygon = torch.cos(math.pi / sides) / torch.cos(sector)
    # A star: straight edges from the tips (radius 1) to the notches (radius 0.5), in polar form.
    offset = sector.abs()  # 0 at a notch, pi / sides at a tip
    half = math.pi / sides
    notch = 0.5
    star = notch * torch.sin(half) / (notch * torch.sin(offset) + torch.sin(half - offset))
    ellipse = 0.45 / torch.sqrt((0.45 * torch.cos(angle)) ** 2 + torch.sin(angle) ** 2)
    one = torch.ones_like(angle)
    is_polygon = (label >= 2) & (label <= 5)
    is_star = (label >= 6) & (label <= 8)
    return torch.where(is_polygon, polygon, torch.where(is_star, star, torch.where(label == 1, ellipse, one)))


def pictures(count: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Pictures float32 [count, 3, 48, 48] and labels int64 [count], the same for the same seed."""
    g = torch.Generator(device=device).manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=g, device=device) * (high - low) + low

    label = torch.randint(len(CLASSES), (count, 1, 1), generator=g, device=device)
    side = SIZE * SUPERSAMPLE
    axis = (torch.arange(side, device=device) + 0.5) / side * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    size = uniform(0.3, 0.75, 1, 1)
    dx = x - uniform(-0.25, 0.25, 1, 1)
    dy = y - uniform(-0.25, 0.25, 1, 1)
    distance = torch.sqrt(dx**2 + dy**2)
    edge = size * radius(label, torch.atan2(dy, dx) + uniform(0, 2 * math.pi, 1, 1))
    inside = (distance < edge) & ~((label == 9) & (distance < 0.6 * edge))
    mask = torch.nn.functional.avg_pool2d(inside.float()[:, None], SUPERSAMPLE)

    shape_colour, back_colour = uniform(0, 1, 3, 1, 1), uniform(0, 1, 3, 1, 1)
    picture = mask * shape_colour + (1 - mask) * back_colour
    ys, xs = torch.meshgrid(*[torch.linspace(-1, 1, SIZE, device=device)] * 2, indexing="ij")
    picture = picture + uniform(-0.3, 0.3, 1, 1, 1) * xs + uniform(-0.3, 0.3, 1, 1, 1) * ys
    for _ in range(2):  # bars
        turn = uniform(0, math.pi, 1, 1, 1)
        across = (xs * torch.cos(turn) + ys * torch.sin(turn) - uniform(-1, 1, 1, 1, 1)).abs()
        picture = torch.where(across < uniform(0.0, 0.06, 1, 1, 1), uniform(0, 1, 3, 1, 1), picture)
    noise = torch.randn(picture.shape, generator=g, device=device) * uniform(0.0, 0.2, 1, 1, 1)
    return (picture + noise - 0.5) * 2, label.flatten()
