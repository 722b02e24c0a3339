"""One accelerator chip: how fast it computes, how fast it reads, whom it can reach; and one operation on it."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from .breakdown import slowest, term
from .elementwise import positive
from .facts import known, quantity, sourced, table
from .formats import HARDWARE
from .network import MOST, Boardfly, Mesh, Switch, Tiered, Torus
from .units import si

ALIASES = {"tpu7x": "ironwood", "v7x": "ironwood", "v5litepod": "v5e", "trillium": "v6e"}
NETWORKS = {"torus": (Torus, ("link_bandwidth", "hop_latency", "axes", "wrap", "domain")),
            "switch": (Switch, ("egress_bandwidth", "hop_latency", "domain")),
            "mesh": (Mesh, ("link_bandwidth", "hop_latency", "domain")),
            "boardfly": (Boardfly, ("egress_bandwidth", "hop_latency", "domain"))}
DCN = ("dcn_bandwidth", "dcn_latency")
COUNTED = ("axes", "wrap", "domain", "devices", "tile")
UNITS = {"hbm_bytes": "B", "hbm_reserved": "B", "hbm_bandwidth": "B/s", "kv_bandwidth": "B/s", "link_bandwidth": "B/s",
         "egress_bandwidth": "B/s", "hop_latency": "s", "overhead": "s", "dcn_bandwidth": "B/s", "dcn_latency": "s",
         "price": "USD/s", "vector": "FLOP/s", **dict.fromkeys(COUNTED, ""), **dict.fromkeys(HARDWARE, "FLOP/s")}


@dataclass(frozen=True)
class Chip:
    """An accelerator. Capacities in B, bandwidths in B/s, dense peaks in FLOP/s (None: not multiplied natively).

    `devices` is how many JAX devices one chip shows up as; `kv_bandwidth` the rate at which attention reads the cache, where
    it was measured apart (None: as `hbm_bandwidth`); `price` USD per second; `uncertain` the fields whose source is doubtful;
    `dcn` the slower network that joins domains of the chip's own, through each chip's share of the network cards;
    `tile` the side of a matrix unit, in values (1: not known); `hbm_reserved` the HBM that system and compiler keep from programs
    (0: not known); `vector` operations per second of the vector units, f32 (None: not known)."""

    name: str
    hbm_bytes: float
    hbm_bandwidth: float
    network: Torus | Switch | Mesh | Boardfly
    bf16: float | None = None
    f32: float | None = None
    int8: float | None = None
    fp8: float | None = None
    int4: float | None = None
    fp4: float | None = None
    devices: int = 1
    kv_bandwidth: float | None = None
    price: float | None = None
    uncertain: tuple[str, ...] = ()
    dcn: Switch | None = None
    tile: int = 1
    hbm_reserved: float = 0.0
    vector: float | None = None

    def __post_init__(self):
        for name in ("hbm_bytes", "hbm_bandwidth", "kv_bandwidth", "price", "vector", *HARDWARE):
            if getattr(self, name) is not None:
                positive(f"{name} of {self.name}", getattr(self, name))
        for name in ("devices", "tile"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} of {self.name} must be a whole number and positive, got {getattr(self, name)!r}")
        positive(f"hbm_reserved of {self.name}", self.hbm_reserved, zero=True)
        positive(f"what hbm_reserved leaves of the HBM of {self.name}", self.capacity)
        if not isinstance(self.dcn, Switch | None):
            raise ValueError(f"dcn of {self.name} must be a Switch between domains, or None, got {self.dcn!r}")

    def peak(self, format="bf16"):
        """FLOP/s with both operands in that format. ValueError if the chip does not multiply it natively."""
        rate = getattr(self, format) if format in HARDWARE else None
        if rate is None:
            native = ", ".join(name for name in HARDWARE if getattr(self, name) is not None)
            raise ValueError(f"{self.name} does not multiply {format}, only: {native}. Weights may be stored in it: "
                             f"they are upcast, and the math format is one of these")
        return rate

    @property
    def capacity(self):
        """Bytes of HBM that a program may fill."""
        return self.hbm_bytes - self.hbm_reserved

    @property
    def cache_bandwidth(self):
        """Bytes per second at which attention reads the cache."""
        return self.hbm_bandwidth if self.kv_bandwidth is None else self.kv_bandwidth

    @property
    def interconnect(self):
        """The chip's network, continued by the slower one between its domains where that is known."""
        return self.network if self.dcn is None else Tiered(self.network, self.dcn)

    def axis_bandwidth(self, wrapped=True):
        """Bytes per second that the chip sends along one axis of its torus, both ways where the axis wraps around. ValueError
        if its network has no axes."""
        if not isinstance(self.network, Torus):
            raise ValueError(f"{self.name} has no links along axes: this is about a torus")
        if wrapped not in (True, False):
            raise ValueError(f"wrapped must be True or False, got {wrapped!r}")
        return (2 if wrapped else 1) * self.network.link_bandwidth

    def derate(self, compute=1.0, memory=1.0, network=1.0):
        """The chip that software sees: peaks, memory and network bandwidths times the fraction it reaches. ValueError for a
        fraction that is not positive."""
        compute, memory, network = positive("compute", compute), positive("memory", memory), positive("network", network)
        link = "link_bandwidth" if hasattr(self.network, "link_bandwidth") else "egress"
        slower = replace(self.network, **{link: network * getattr(self.network, link)})
        peaks = {name: compute * getattr(self, name) for name in (*HARDWARE, "vector") if getattr(self, name) is not None}
        kv = None if self.kv_bandwidth is None else memory * self.kv_bandwidth
        dcn = None if self.dcn is None else replace(self.dcn, egress=network * self.dcn.egress)
        return replace(self, hbm_bandwidth=memory * self.hbm_bandwidth, kv_bandwidth=kv, network=slower, dcn=dcn, **peaks)


def chip(name, **readings):
    """The chip of that name ("v5e", "ironwood", "h100"), or of a TOML file ("mine.toml"). KeyError lists the names.

    Source: data/chips.csv, the values marked primary. A reading takes one field as another source prints it:
    chip("v5e", hbm_bandwidth="SB"); KeyError lists the sources that print the field."""
    if str(name).endswith(".toml"):
        if readings:
            raise ValueError(f"{name} has one source, it cannot be read as {', '.join(readings.values())} reads it")
        return from_toml(name)
    return _read(str(name).lower().removeprefix("tpu-"), **readings)


@cache
def _read(name, **readings):
    name = ALIASES.get(name, name)
    known("chip", name, {row["chip"] for row in table("chips")} | set(ALIASES))
    rows = [row for row in table("chips") if row["chip"] == name and row["role"] == "primary"]
    uncertain = tuple(row["field"] for row in rows if row["confidence"] == "uncertain")
    kind = next(row["value"] for row in rows if row["field"] == "network")
    plain = ("hbm_bytes", "hbm_reserved", "hbm_bandwidth", "devices", "tile", "vector", "price")
    used = (*plain, *NETWORKS[kind][1], *HARDWARE, *DCN)
    numbers = {row["field"]: si(row["value"], row["unit"]) for row in rows if row["field"] in used and row["value"]}
    if "hbm_bytes" in readings:             # as its source prints it, whole
        numbers.pop("hbm_reserved", None)
    for field, source in readings.items():
        known(f"field of {name}", field, numbers)
        rows = [row for row in table("chips") if (row["chip"], row["field"]) == (name, field) and row["value"]]
        rows.sort(key=lambda row: row["role"] == "primary")             # of two readings of one source, the chosen one
        printed = {key: row for row in rows for key in row["source"].split("+")}
        row = printed[known(f"source of {name}'s {field}", source, printed)]
        numbers[field] = si(row["value"], row["unit"])
    return _assembled(name, kind, numbers, uncertain)


def from_toml(path):
    """A chip of your own: `name`, `source`, `network` ("torus", "switch", "mesh", "boardfly") and quantities with units
    ("3350 GB/s"). ValueError names what is missing or malformed."""
    fields = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    sourced(fields.pop("source", None), str(path))
    kind = known("network", fields.pop("network", ""), NETWORKS)
    name = fields.pop("name", Path(path).stem)
    numbers = {}
    for key, value in fields.items():
        if known("field of a chip", key, UNITS) in COUNTED and not (type(value) is int and value > 0):
            raise ValueError(f"{key} must be a whole number and positive, got {value!r}")
        numbers[key] = value if key in COUNTED else quantity(value, UNITS[key])
    foreign = {key for _, wants in NETWORKS.values() for key in wants} & set(numbers) - set(NETWORKS[kind][1])
    if foreign:
        raise ValueError(f"{path}: a {kind} has no {', '.join(sorted(foreign))}")
    if len(set(DCN) & set(numbers)) == 1:
        raise ValueError(f"{path}: {' and '.join(DCN)} come together or not at all")
    return _assembled(name, kind, numbers, ())


def _assembled(name, kind, numbers, uncertain):
    noun, wants = NETWORKS[kind]
    missing = [key for key in ("hbm_bytes", "hbm_bandwidth", *wants) if key not in numbers]
    if missing or not any(key in numbers for key in HARDWARE):
        raise ValueError(f"chip {name!r} lacks {', '.join(missing) or 'a peak in any of ' + ', '.join(HARDWARE)}")
    network = noun(*[int(numbers[key]) if key in COUNTED else numbers[key] for key in wants], numbers.get("overhead", 0.0))
    dcn = Switch(*[numbers[key] for key in DCN], MOST) if all(key in numbers for key in DCN) else None
    plain = {key: numbers[key] for key in (*HARDWARE, "hbm_reserved", "kv_bandwidth", "price", "vector") if key in numbers}
    return Chip(name, numbers["hbm_bytes"], numbers["hbm_bandwidth"], network, devices=int(numbers.get("devices", 1)),
                uncertain=uncertain, dcn=dcn, tile=int(numbers.get("tile", 1)), **plain)


def chip_names():
    """Names of all chips, in the order of the data file."""
    return tuple(dict.fromkeys(row["chip"] for row in table("chips")))


def alternates(name):
    """Rows of data/chips.csv in which sources give the chip another value than the chosen one."""
    return [row for row in table("chips") if row["chip"] == chip(name).name and row["role"] == "alt"]


def roofline(name, flops, bytes, chip, math="bf16", bandwidth=None):
    """Seconds of one operation: its arithmetic (FLOP) or its memory traffic (B), whichever takes longer."""
    rate = chip.hbm_bandwidth if bandwidth is None else bandwidth
    return slowest(name, term("compute", flops / chip.peak(math)), term("memory", bytes / rate))
