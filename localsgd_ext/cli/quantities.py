"""Sizes, times and rates as one writes them, and back."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence

_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_RATES = {"kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "kb": 1e3 / 8, "Mb": 1e6 / 8, "Gb": 1e9 / 8, "MB": 1e6, "GB": 1e9}


def count(text: str) -> float:
    """A number, as 124e6, 124M or 70B."""
    return _parsed(text, _COUNTS, "a number such as 124e6, 124M or 70B")


def seconds(text: str) -> float:
    """A time, as 0.25, 250ms or 50us."""
    return _parsed(text, _TIMES, "a time such as 0.25, 250ms or 50us")


def seconds_or_0(text: str) -> float:
    """A time, which may be 0."""
    return 0.0 if re.fullmatch(r"0+(\.0*)?\s*(s|ms|us)?", text) else seconds(text)


def rate(text: str) -> float:
    """A link's speed, as 100Mbit, 1Gbit/s or 12.5GB/s, in bytes per second."""
    try:
        return _parsed(re.sub(r"(/s|ps)$", "", text), _RATES, "")
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed such as 100Mbit, 1Gbit/s or 12.5GB/s") from None


def whole(text: str) -> int:
    """A whole number from 1 to a million."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= 10**6:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 1 to a million")
    return number


def fraction(text: str) -> float:
    """A share, as 0.05 or 5%."""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = 0.0
    if not 1e-6 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, such as 0.05 or 5%")
    return number


def spoken_seconds(value: float) -> str:
    """With three digits, in the unit that fits."""
    for limit, unit, scale in (
        (1e-3, "us", 1e6),
        (1.0, "ms", 1e3),
        (120.0, "s", 1.0),
        (7200.0, "min", 1 / 60),
        (math.inf, "h", 1 / 3600),
    ):
        if float(_three(value * scale)) < limit * scale:
            return f"{_three(value * scale)} {unit}"
    return f"{value} s"


def spoken_bytes(value: float) -> str:
    """With three digits, in the unit that fits."""
    return _scaled(value, ("B", "kB", "MB", "GB", "TB"))


def spoken_rate(bytes_per_second: float) -> str:
    """In bits."""
    bits = bytes_per_second * 8
    return f"{_three(bits / 1e9)} Gbit/s" if bits >= 1e9 else f"{_three(bits / 1e6)} Mbit/s"


def spoken_count(value: float) -> str:
    """With three digits, in thousands, millions, billions."""
    return _scaled(value, ("", "k", "M", "B", "T")).rstrip()


def _scaled(value: float, units: Sequence[str]) -> str:
    place = 0
    while place + 1 < len(units) and float(_three(value / 1000**place)) >= 1000:
        place += 1
    return f"{_three(value / 1000**place)} {units[place]}"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _parsed(text: str, units: dict[str, float], allowed: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    try:
        value = float(match[1]) * units[match[2]] if match else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not 1e-12 < value < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return value
