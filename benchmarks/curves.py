"""A curve as SVG, by hand: axes from zero, a line and its name for each series."""

from dataclasses import dataclass, field
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 320, 70, 45, 35, 20
_COLOURS = ("#1f6feb", "#d1622b", "#2a9d57", "#8250df")
_STEPS = 4


@dataclass
class Curve:
    """Points of one or several series over the same axes."""

    title: str
    across: str
    up: str
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, name: str, x: float, y: float) -> None:
        """One point."""
        self.series.setdefault(name, []).append((x, y))

    def svg(self) -> str:
        """The picture."""
        points = [point for line in self.series.values() for point in line]
        widest = max(x for x, _ in points) or 1.0
        highest = max(y for _, y in points) * 1.1 or 1.0

        def place(x: float, y: float) -> tuple[float, float]:
            across = _LEFT + x / widest * (_WIDTH - _LEFT - _RIGHT)
            return round(across, 1), round(_HEIGHT - _BOTTOM - y / highest * (_HEIGHT - _BOTTOM - _TOP), 1)

        drawn = [_text(_WIDTH / 2, 18, self.title, "middle")]
        drawn += [_text(_WIDTH / 2, _HEIGHT - 8, self.across, "middle"), _text(4, 18, self.up, "start")]
        for step in range(_STEPS + 1):
            x, y = place(widest * step / _STEPS, highest * step / _STEPS)
            drawn.append(f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
            drawn.append(_text(_LEFT - 6, y + 4, _number(highest * step / _STEPS), "end"))
            drawn.append(_text(x, _HEIGHT - _BOTTOM + 16, _number(widest * step / _STEPS), "middle"))
        for number, (name, line) in enumerate(self.series.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line))
            drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            drawn += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in (place(*p) for p in line)]
            drawn.append(_text(_WIDTH - _RIGHT, _HEIGHT - _BOTTOM - 10 - 16 * number, name, "end", colour))
        size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        font = 'font-family="sans-serif" font-size="12"'
        ground = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{ground}\n' + "\n".join(drawn) + "\n</svg>\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
