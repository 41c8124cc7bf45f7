"""Quantities with units: the only place where 8, 1e9 or 2**30 convert anything.

Inside the program every quantity is a float in a base unit that its name carries: ``_bytes``, ``_bytes_per_s``, ``_s``,
``_flops``, ``_flops_per_s``, ``_usd``. Files and the command line write ``10 Gbps``, ``64 GiB``, ``0.2 ms``, ``150 TFLOPS``,
``0.50 $``, ``0.02 $/GB``, ``2.50 $/h``.
Decimal prefixes are powers of 1000, binary ones (``Ki``, ``Mi``, ``Gi``, ``Ti``) powers of 1024; ``b`` is a bit, ``B`` a byte.
"""

from __future__ import annotations

import math
import re
from enum import Enum

from hybridep.errors import QuantityError

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BITS_PER_BYTE = 8.0


def _scaled(suffixes: tuple[str, ...], factor: float, prefixes: dict[str, float]) -> dict[str, float]:
    return {prefix + suffix: factor * scale for suffix in suffixes for prefix, scale in prefixes.items()}


_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_SIZE = _scaled(("B",), 1.0, _DECIMAL | _BINARY)
_MONEY = ("$", "USD")


def _price_per(units: dict[str, float]) -> dict[str, float]:
    return {f"{money}/{unit}": 1 / scale for money in _MONEY for unit, scale in units.items()}


class Dimension(Enum):
    """What a quantity measures; the value is the table unit -> base units."""

    SIZE = _SIZE
    BANDWIDTH = _scaled(("bps", "bit/s", "b/s"), 1 / _BITS_PER_BYTE, _DECIMAL) | _scaled(("B/s",), 1.0, _DECIMAL | _BINARY)
    TIME = _TIME
    THROUGHPUT = _scaled(("FLOPS", "FLOP/s", "flops"), 1.0, _DECIMAL)
    PRICE = dict.fromkeys(_MONEY, 1.0)
    TRANSFER_PRICE = _price_per(_SIZE)
    RENT = _price_per(_TIME)

    @property
    def example(self) -> str:
        examples = {"SIZE": "64 GiB", "BANDWIDTH": "10 Gbps", "TIME": "0.2 ms", "THROUGHPUT": "150 TFLOPS"}
        return (examples | {"PRICE": "0.50 $", "TRANSFER_PRICE": "0.02 $/GB", "RENT": "2.50 $/h"})[self.name]


_NUMBER_UNIT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/$]*)\s*")


def parse(text: object, dimension: Dimension) -> float:
    """``"10 Gbps"`` -> 1.25e9 (bytes per second). Raises QuantityError for a missing or unknown unit or a bad number."""
    match = _NUMBER_UNIT.fullmatch(text) if isinstance(text, str) else None
    kind = dimension.name.lower().replace("_", " ")
    if match is None or not match[2]:
        if isinstance(text, int | float) or match is not None:
            raise QuantityError(f"{text!r} has no unit: write a {kind} such as '{dimension.example}'")
        raise QuantityError(f"{text!r} is not a {kind}: write it like '{dimension.example}'")
    if match[2] not in dimension.value:
        raise QuantityError(f"{match[2]!r} is not a unit of {kind}: write it like '{dimension.example}'")
    value = float(match[1]) * dimension.value[match[2]]
    if not math.isfinite(value):
        raise QuantityError(f"{text!r} is not finite")
    return value


def _format(value: float, steps: list[tuple[float, str]]) -> str:
    scale, unit = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    number = value / scale
    return f"{number:.4g} {unit}" if abs(number) < 9999.5 else f"{number:.0f} {unit}"


def format_bytes(value_bytes: float) -> str:
    """1.5e9 -> ``"1.5 GB"`` (decimal, for people)."""
    return _format(value_bytes, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")])


def format_seconds(value_s: float) -> str:
    """0.0015 -> ``"1.5 ms"``."""
    return _format(value_s, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")])


def counted(number: int, what: str) -> str:
    """2, ``"step"`` -> ``"2 steps"``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


def format_bandwidth(value_bytes_per_s: float) -> str:
    """1.25e9 -> ``"10 Gbps"``."""
    bits = value_bytes_per_s * _BITS_PER_BYTE
    return _format(bits, [(1e9, "Gbps"), (1e6, "Mbps"), (1e3, "kbps")])


def format_throughput(value_flops_per_s: float) -> str:
    """1.5e14 -> ``"150 TFLOPS"``."""
    return _format(value_flops_per_s, [(1e15, "PFLOPS"), (1e12, "TFLOPS"), (1e9, "GFLOPS"), (1e6, "MFLOPS")])


def parse_share(text: str) -> float:
    """``"0.5%"`` -> 0.005. Raises QuantityError."""
    match = re.fullmatch(r"\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*%\s*", text)
    if match is None:
        raise QuantityError(f"{text!r} is not a share: write it like '0.5%'")
    return float(match[1]) / 100


def format_dollars(value_usd: float) -> str:
    """0.5 -> ``"0.5 $"``."""
    return f"{value_usd:.4g} $"


def exact(value: float, dimension: Dimension) -> str:
    """A text that ``parse`` reads back to the same float: the form in which files store a quantity."""
    table = {
        "SIZE": ("TB", "GB", "MB", "kB", "B"),
        "BANDWIDTH": ("Tbps", "Gbps", "Mbps", "kbps", "bps"),
        "TIME": ("s", "ms", "us", "ns"),
        "THROUGHPUT": ("PFLOPS", "TFLOPS", "GFLOPS", "MFLOPS", "kFLOPS", "FLOPS"),
        "PRICE": ("$",),
        "TRANSFER_PRICE": ("$/GB", "$/B"),
        "RENT": ("$/h", "$/s"),
    }
    scaled = [(value / dimension.value[unit], unit) for unit in table[dimension.name]]
    short = [f"{number:.12g} {unit}" for number, unit in scaled if math.isfinite(number)]
    faithful = [text for text in short if parse(text, dimension) == value]
    if faithful:
        return min(faithful, key=len)
    base = next(unit for unit, factor in dimension.value.items() if factor == 1.0)
    return f"{value!r} {base}"


def gbps_to_bytes_per_s(value_gbps: float) -> float:
    """Decimal gigabits per second -> bytes per second (the unit of measured profiles)."""
    return value_gbps * 1e9 / _BITS_PER_BYTE


def ms_to_s(value_ms: float) -> float:
    """Milliseconds -> seconds (the unit of measured round trips)."""
    return value_ms * 1e-3
