"""One accelerator: its numbers, its peaks, a chip of your own, one operation on it."""

from dataclasses import replace

import pytest

from lib.chips import alternates, chip, chip_names, from_toml, roofline
from lib.formats import HARDWARE

FIXED = "v4 v5e v5p v6e ironwood tpu8i tpu8t a100 h100 h200 b200 gb200 mi300x".split()  # design.md, section 4


@pytest.mark.parametrize("name", sorted({*FIXED, *chip_names()}))
def test_every_chip_loads(name):
    """Sizes and rates are positive, and a peak is known for at least one format."""
    one = chip(name)
    assert name == one.name
    assert min(one.hbm_bytes, one.hbm_bandwidth, one.devices, one.network.hop_latency, one.network.domain) > 0
    assert any(getattr(one, format) for format in HARDWARE)


PRINTED = [  # formulas.md T1, S-034, S-035
    ("v5e", "bf16", 197e12),
    ("v5e", "int8", 394e12),
    ("v5e", "hbm_bandwidth", 819e9),
    ("v5e", "hbm_bytes", 16 * 2**30),
    ("v5p", "bf16", 459e12),
    ("v5p", "int8", 918e12),
    ("v5p", "hbm_bandwidth", 2765e9),
    ("v6e", "bf16", 918e12),
    ("v6e", "int8", 1836e12),
    ("v6e", "fp8", 918e12),
    ("v6e", "hbm_bandwidth", 1638e9),
    ("ironwood", "bf16", 2307e12),
    ("ironwood", "fp8", 4614e12),
    ("ironwood", "hbm_bandwidth", 7380e9),
    ("ironwood", "hbm_bytes", 192 * 2**30),
    ("h100", "bf16", 989e12),
    ("h100", "fp8", 1979e12),
    ("h100", "int8", 1979e12),
    ("h100", "hbm_bandwidth", 3350e9),
    ("h100", "hbm_bytes", 80e9),
    ("tpu8i", "fp4", 10100e12),
    ("tpu8i", "hbm_bandwidth", 8601e9),
]


@pytest.mark.parametrize(("name", "field", "expected"), PRINTED)
def test_printed_numbers(name, field, expected):
    """As the sources print them, in SI base units; GiB where the source says GiB."""
    assert expected == getattr(chip(name), field)


@pytest.mark.parametrize("spelling", ["ironwood", "tpu7x", "v7x", "TPU7x", "Ironwood", "tpu-v7x"])
def test_one_chip_of_several_names(spelling):
    """ironwood, tpu7x and v7x are one chip, in any case."""
    assert chip("ironwood") == chip(spelling)


def test_an_unknown_chip_lists_the_known():
    """KeyError with the names there are."""
    with pytest.raises(KeyError, match="unknown chip 'v9'; known: .*h100.*ironwood.*v5e"):
        chip("v9")


@pytest.mark.parametrize(("name", "devices"), [("ironwood", 2), ("v4", 2), ("v5e", 1), ("h100", 1)])
def test_devices_of_a_chip(name, devices):
    """Ironwood and v4 show up as two JAX devices."""
    assert devices == chip(name).devices


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("ironwood", "int8"),
        ("ironwood", "int4"),
        ("v5e", "fp8"),
        ("h100", "int4"),
        ("mi300x", "fp4"),
        ("a100", "fp8"),
        ("v5e", "hbm_bytes"),
        ("v5e", "name"),
        ("v5e", "mxfp4"),
        ("v5e", "int5"),
        ("v5e", None),
    ],
)
def test_a_format_that_is_not_multiplied(name, format):
    """ValueError lists what the chip multiplies natively (formulas.md T2)."""
    with pytest.raises(ValueError, match=f"{name} does not multiply {format}, only: bf16"):
        chip(name).peak(format)


def test_doubtful_fields_are_marked():
    """All TPU 8i peaks are second-hand; of v5e's fields only the latency between slices is a placeholder."""
    assert {"bf16", "fp8", "fp4"} <= set(chip("tpu8i").uncertain)
    assert ("dcn_latency",) == chip("v5e").uncertain


def test_conflicting_values_are_kept():
    """Three sources give v5p three bandwidths, up to 14 % apart (formulas.md, disagreement 15)."""
    assert {"hbm_bandwidth"} <= {row["field"] for row in alternates("v5p")}
    assert alternates("v7x") == alternates("ironwood")


def test_derating_scales_each_rate():
    """Half the peaks, a quarter of the memory bandwidth, a tenth of the links; capacity and latency stay."""
    full, slow = chip("v5e"), chip("v5e").derate(compute=0.5, memory=0.25, network=0.1)
    assert (full.bf16 / 2, full.int8 / 2, full.hbm_bandwidth / 4) == (slow.bf16, slow.int8, slow.hbm_bandwidth)
    assert (0.1 * 50e9, 1e-6, full.hbm_bytes) == (slow.network.link_bandwidth, slow.network.hop_latency, slow.hbm_bytes)
    assert (None, full) == (slow.fp8, full.derate())
    assert [225e9, 32e9, 600e9] == [
        getattr(chip(n).derate(network=0.5).network, link)
        for n, link in [("h100", "egress"), ("mi300x", "link_bandwidth"), ("tpu8i", "egress")]
    ]


@pytest.mark.parametrize("share", [0, -1, float("nan"), float("inf"), "1", None])
@pytest.mark.parametrize("field", ["compute", "memory", "network"])
def test_a_share_that_is_none(field, share):
    """A chip that reaches nothing, or NaN, of its peak is refused."""
    with pytest.raises(ValueError, match=field):
        chip("v5e").derate(**{field: share})


def test_a_roofline_takes_the_longer_of_the_two():
    """1.97 GFLOP on v5e take 10 us, 8.19 MB take 10 us; twice the bytes 20 us."""
    assert (pytest.approx(1e-5), pytest.approx(2e-5), "memory") == (
        roofline("op", 1.97e9, 8.19e6, chip("v5e")).value,
        roofline("op", 1.97e9, 16.38e6, chip("v5e")).value,
        roofline("op", 1.97e9, 16.38e6, chip("v5e")).bound,
    )


GOOD = """
name = "mine"
source = "data sheet, 2030"
network = "switch"
hbm_bytes = "80 GB"
hbm_bandwidth = "3350 GB/s"
egress_bandwidth = "450 GB/s"
hop_latency = "600 ns"
domain = 8
bf16 = "989 TFLOP/s"
price = "3.6 USD/h"
"""
TORUS = """
source = "bench"
network = "torus"
hbm_bytes = "16 GiB"
hbm_bandwidth = "819 GB/s"
link_bandwidth = "50 GB/s"
hop_latency = "1 us"
axes = 2
wrap = 16
domain = 256
bf16 = "197 TFLOP/s"
"""


@pytest.fixture
def toml(tmp_path):
    """Writes a chip file and returns its path as text."""

    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_a_chip_of_your_own(toml):
    """Quantities with units from a TOML file, under the name `chip` as any other."""
    mine = chip(toml(GOOD))
    assert ("mine", 80e9, 3.35e12, 989e12, None, 450e9, 8, 1, 0.001) == (
        mine.name,
        mine.hbm_bytes,
        mine.hbm_bandwidth,
        mine.peak(),
        mine.fp8,
        mine.network.egress,
        mine.network.domain,
        mine.devices,
        mine.price,
    )


def test_another_reading_of_the_memory_is_whole():
    """16 GB as the vendor's page prints them, with nothing kept back: what a claim of that source is checked with."""
    assert 16e9 == chip("v5e", hbm_bytes="DOC").capacity
    assert chip("v5e").hbm_reserved == chip("v5e", hbm_bandwidth="JAX").hbm_reserved == 2**28


def test_what_a_chip_of_your_own_keeps(toml):
    """Of 80 GB, 5 kept by the driver leave 75 to programs."""
    assert 75e9 == chip(toml(GOOD + '\nhbm_reserved = "5 GB"')).capacity


def test_a_chip_of_your_own_is_named_after_its_file(toml):
    """Where no name is given; a torus as v5e has it."""
    mine = from_toml(toml(TORUS, "ours.toml"))
    assert ("ours", chip("v5e").network) == (mine.name, mine.network)


@pytest.mark.parametrize("field", ["hbm_bytes", "hbm_bandwidth", "egress_bandwidth", "hop_latency", "domain"])
def test_a_missing_field_is_named(toml, field):
    """ValueError says which."""
    with pytest.raises(ValueError, match=f"'mine' lacks {field}"):
        chip(toml("\n".join(line for line in GOOD.splitlines() if not line.startswith(field))))


def test_a_chip_needs_a_peak(toml):
    """In at least one format."""
    with pytest.raises(ValueError, match="lacks a peak in any of f32, bf16"):
        chip(toml(GOOD.replace("bf16 =", "# bf16 =")))


@pytest.mark.parametrize("text", [GOOD.replace("source =", "# source ="), GOOD.replace("data sheet, 2030", " ")])
def test_a_chip_without_source_does_not_load(toml, text):
    """Nobody answers for its numbers."""
    with pytest.raises(ValueError, match="mine.toml has no source"):
        chip(toml(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [("3350 GB/s", "3350GB/s"), ("3350 GB/s", "fast"), ("3350 GB/s", "3350 gb/s"), ("989 TFLOP/s", "989 TFLOPS")],
)
def test_a_malformed_quantity_is_shown(toml, old, new):
    """ValueError prints it and the form it should have."""
    with pytest.raises(ValueError, match=f"'{new}' is not a positive number with a unit"):
        chip(toml(GOOD.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"3350 GB/s"', '"-3350 GB/s"'),
        ('"3350 GB/s"', '"0 GB/s"'),
        ('"3350 GB/s"', '"nan GB/s"'),
        ('"3350 GB/s"', '"inf GB/s"'),
        ("domain = 8", "domain = 0"),
        ("domain = 8", "domain = 2.5"),
        ("domain = 8", 'domain = "8"'),
        ("domain = 8", "domain = true"),
        ('"3350 GB/s"', '"3350"'),
        ('"3350 GB/s"', "3350"),
        ('"80 GB"', '"80 GB/s"'),
        ('"3350 GB/s"', '"3350 TFLOP/s"'),
    ],
)
def test_an_impossible_quantity_is_refused(toml, old, new):
    """Negative, zero, NaN, infinite, fractional counts, no unit, the wrong dimension: ValueError, no chip."""
    with pytest.raises(ValueError):
        chip(toml(GOOD.replace(old, new)))


def test_a_network_has_its_own_fields_and_a_dcn_is_whole(toml):
    """A switch has no axes; a data-centre network has a bandwidth and a latency. An overhead may be given."""
    with pytest.raises(ValueError, match="a switch has no axes"):
        chip(toml(GOOD + "\naxes = 2\n"))
    with pytest.raises(ValueError, match="dcn_bandwidth and dcn_latency come together"):
        chip(toml(GOOD + '\ndcn_bandwidth = "50 GB/s"\n'))
    dcn = '\ndcn_bandwidth = "50 GB/s"\ndcn_latency = "10 us"\noverhead = "3 us"\n'
    mine = chip(toml(GOOD + dcn, "whole.toml"))
    assert (50e9, 1e-5, 3e-6) == (mine.dcn.egress, mine.dcn.hop_latency, mine.network.overhead)


def test_an_unknown_field_is_refused(toml):
    """A misspelt `prize` must not vanish."""
    with pytest.raises((ValueError, KeyError), match="prize"):
        chip(toml(GOOD.replace("price =", "prize =")))


@pytest.mark.parametrize("text", [GOOD.replace('"switch"', '"pigeons"'), GOOD.replace("network =", "# network =")])
def test_an_unknown_network_lists_the_known(toml, text):
    """KeyError or ValueError with the four there are."""
    with pytest.raises((KeyError, ValueError), match="network.*boardfly, mesh, switch, torus"):
        chip(toml(text))


def test_a_broken_file_is_a_value_error(toml):
    """TOML that does not parse."""
    with pytest.raises(ValueError):
        chip(toml(GOOD + "hbm_bytes = "))


def test_an_edited_file_is_read_again(toml):
    """The same path, other numbers: the second call sees them."""
    before = chip(toml(GOOD)).hbm_bandwidth
    assert before / 2 == chip(toml(GOOD.replace("3350", "1675"))).hbm_bandwidth


def test_a_reading_that_would_change_nothing_is_refused(toml):
    """A field that the chip's model does not use, or another source of a TOML chip, is an error, not a silence."""
    with pytest.raises(KeyError, match="unknown field of v6e 'egress_bandwidth'"):
        chip("v6e", egress_bandwidth="DERIV")
    with pytest.raises(ValueError, match="has one source"):
        chip(toml(GOOD), hbm_bandwidth="SB")


@pytest.mark.parametrize("change", [{"hbm_bandwidth": -1.0}, {"hbm_bytes": 0.0}, {"bf16": float("nan")}])
def test_a_chip_has_positive_rates(change):
    """Also when it is built directly."""
    with pytest.raises(ValueError, match="must be finite and positive"):
        replace(chip("v5e"), **change)


def test_derating_the_memory_derates_its_cache_reads():
    """A rate at which the cache is read falls with the memory it is read from."""
    assert 0.5e12 == replace(chip("v5e"), kv_bandwidth=1e12).derate(memory=0.5).kv_bandwidth
