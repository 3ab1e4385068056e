"""Colours of all pages and pictures, each for a light and for a dark screen."""

import re
from html import escape

TONES = {
    "ink": ("#24292f", "#e6edf3"), "dim": ("#57606a", "#9da7b3"), "line": ("#e3e7ec", "#30363d"),
    "ground": ("#f6f8fa", "#0d1117"), "card": ("#ffffff", "#161b22"), "axis": ("#b6bec8", "#6a737d"),
    "alarm": ("#86181d", "#ffb4ad"), "alarm-ground": ("#fff1f0", "#3b1a1c"),
    "blue": ("#3b6fb6", "#6ea3e8"), "orange": ("#e07b1f", "#f0923b"), "teal": ("#2a9d8f", "#3fc1b1"),
    "red": ("#c2453d", "#ef7a72"), "purple": ("#7b5ea7", "#b296dc"), "yellow": ("#e0a21f", "#e8b64a"),
    "link": ("#2f62a8", "#6ea3e8"), "pick": ("#2f62a8", "#2f62a8"), "on-pick": ("#fefefe", "#fefefe"),
    "shade-1": ("#8fb8e8", "#2c5c96"), "shade-2": ("#5b92d4", "#4780c4"), "shade-3": ("#2d66ae", "#7bacea"),
    "shade-4": ("#123f78", "#b9d5f8"),
    "grey": ("#5f6b76", "#9aa5b1"), "pink": ("#c66ba8", "#dd8fc3"), "brown": ("#8c6d46", "#c19f73"),
}  # fmt: skip
"""The light and the dark value of each colour. A page uses them by name, as `var(--ink)`; a picture by its light
value, for which `themed` adds the dark one.
"""

_DARK = "@media (prefers-color-scheme: dark)"


def variables() -> str:
    """Return the CSS that defines a variable for each colour."""
    light, dark = ("".join(f"--{name}: {tones[place]}; " for name, tones in TONES.items()) for place in (0, 1))
    return f":root {{ color-scheme: light dark; {light}}}\n{_DARK} {{ :root {{ {dark}}} }}"


def themed(svg: str, name: str, title: str, words: str) -> str:
    """Return matplotlib's SVG with a title, a description, and the dark value of each colour.

    The colours stay in their style attributes, because programs other than browsers know no variables in SVG.
    """
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in TONES.values()
        for kind in ("fill", "stroke")
        if f"{kind}: {light}" in svg
    )
    (light, dark), mark = TONES["ink"], re.sub(r"\W", "-", name)
    head = (
        f'<title id="{mark}-title">{escape(title)}</title><desc id="{mark}-words">{escape(words)}</desc>'
        f"<style>svg text{{fill:{light}}}{_DARK}{{svg text{{fill:{dark}}}{rules}}}</style>"
    )
    labels = f'role="img" aria-labelledby="{mark}-title {mark}-words" '
    return re.sub(r"<svg (.*?>)", lambda found: f"<svg {labels}{found[1]}{head}", svg, count=1, flags=re.DOTALL)
