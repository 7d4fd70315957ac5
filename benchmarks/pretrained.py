"""Draw accuracy over epsilon on CIFAR-10: ours on pretrained features, and published figures.

    python benchmarks/pretrained.py docs/images/pretrained.svg

The numbers are those of docs/benchmarks/pretrained.md.
"""

import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 360, 60, 50
EPSILONS, LOW, HIGH = (1, 2, 3, 4, 8), 60, 92
OURS = {1: 88.1, 2: 88.8, 4: 89.3}
WHOLE_SEARCH = {1: 87.9, 2: 88.5, 4: 89.2}
NO_PUBLIC_DATA = {3: 72.6, 4: 73.5}
NOT_PRIVATE = 89.4
PUBLISHED = {
    "DP-RandP, no public data": (1, 72.3),
    "scattering and CNN, no public data": (3, 69.3),
    "FFTKF": (4, 70.9),
    "De et al., no public data": (8, 81.4),
}


def place(epsilon: float, accuracy: float) -> tuple[float, float]:
    """Pixels of a point; epsilon on a logarithmic axis from 0.8 to 10."""
    x = LEFT + (WIDTH - LEFT - 20) * math.log(epsilon / 0.8) / math.log(10 / 0.8)
    y = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 20) * (accuracy - LOW) / (HIGH - LOW)
    return round(x, 1), round(y, 1)


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """One line of text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def draw() -> str:
    """Draw the figure as SVG."""
    parts = []
    for epsilon in EPSILONS:
        x, y = place(epsilon, LOW)
        parts.append(text(x, y + 18, f"{epsilon}", "middle"))
    for accuracy in range(LOW, HIGH, 5):
        x, y = place(0.8, accuracy)
        parts.append(f'<path d="M{x} {y}H{WIDTH - 20}" stroke="#ddd"/>')
        parts.append(text(x - 8, y + 4, f"{accuracy}", "end"))
    for series, words in (
        (OURS, "ours: EfficientNet-Lite0 features, linear"),
        (NO_PUBLIC_DATA, "ours: two fixed layers, linear, no public data"),
    ):
        points = [place(*point) for point in series.items()]
        line = " L".join(f"{x} {y}" for x, y in points)
        parts.append(f'<path d="M{line}" fill="none" stroke="#0b7285" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="4" fill="#0b7285"/>' for x, y in points]
        parts.append(text(points[0][0], min(y for _, y in points) - 10, words))
    for point in WHOLE_SEARCH.items():
        x, y = place(*point)
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="#d9480f"/>')
    x, y = place(1, WHOLE_SEARCH[1])
    parts.append(
        f'<text x="{x}" y="{y + 20}" fill="#d9480f">with the whole search inside epsilon</text>'
    )
    x, y = place(8, NOT_PRIVATE)
    parts.append(f'<path d="M{LEFT} {y}H{WIDTH - 20}" stroke="#868e96" stroke-dasharray="4 4"/>')
    parts.append(text(WIDTH - 20, y - 6, "the same model without privacy", "end"))
    for name, point in PUBLISHED.items():
        x, y = place(*point)
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="none" stroke="#868e96"/>')
        anchor, shift = ("end", -8) if point[0] == 8 else ("start", 8)
        parts.append(text(x + shift, y + 4, name, anchor))
    parts.append(text(WIDTH / 2, HEIGHT - 10, "epsilon", "middle"))
    parts.append(text(LEFT - 40, 14, "test accuracy, %"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="#333">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw())
