"""Draw the case `learn` of real_model.py, reward against wall time, as an SVG.

python benchmarks/learning_curve.py benchmarks/results/real_model_learn.json docs/images/learning_curve.svg
"""

import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 48, 16, 16, 44
SIDES = {"ours": ("fsdptrain", "#1f6feb"), "trl": ("TRL", "#d1242f")}
TEXT = 'font-family="sans-serif" font-size="13" fill="#57606a"'
SMOOTHED = 3  # steps of a running mean


def draw(rows: list[dict[str, Any]]) -> str:
    minutes = max(row["curve"][-1]["s"] for row in rows) / 60

    def x(value: float) -> float:
        return round(LEFT + value / minutes * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(TOP + (1 - value) * (HEIGHT - TOP - BOTTOM), 1)

    def text(x: float, y: float, content: object, anchor: str = "middle") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {TEXT}>{content}</text>'

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">']
    parts += ["<title>Reward against wall time</title>", '<rect width="100%" height="100%" fill="#fff"/>']
    for value in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path d="M{LEFT} {y(value)}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        parts.append(text(LEFT - 8, y(value) + 4, value, "end"))
    parts += [text(x(value), HEIGHT - 24, value) for value in range(0, int(minutes) + 1, 5 if minutes > 12 else 1)]
    parts.append(text(WIDTH / 2, HEIGHT - 6, f"minutes; mean reward of {SMOOTHED} steps"))
    for index, row in enumerate(rows):
        name, color = SIDES[row["side"]]
        sums = [0.0, *accumulate(point["reward"] for point in row["curve"])]
        points = [
            f"{x(point['s'] / 60)},{y((sums[i + 1] - sums[max(0, i + 1 - SMOOTHED)]) / min(i + 1, SMOOTHED))}"
            for i, point in enumerate(row["curve"])
        ]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        marked = f'<tspan fill="{color}">&#9632;</tspan> {name}'
        parts.append(text(WIDTH - 120, HEIGHT - 110 + 20 * index, marked, "start"))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(draw(json.loads(source.read_text())["results"]))
