"""The data files of lib: every value is cited, parses, and is the only chosen one of its kind."""

import csv
from collections import Counter
from pathlib import Path

import pytest

DATA = Path(__file__).parent.parent / "lib" / "data"

COUNTS = {"axes", "chips_per_host", "devices", "domain", "links", "max_hops", "tile", "wrap", "year"}
FRACTIONS = {"measured_hbm_fraction", "measured_matmul_fraction"}
FORMATS = ("bf16", "int8", "fp8", "int4", "fp4")
UNITS = {
    **dict.fromkeys(COUNTS | FRACTIONS, {""}),
    **dict.fromkeys(("bf16", "fp8", "fp4"), {"TFLOP/s"}),
    **dict.fromkeys(("int8", "int4"), {"TOP/s"}),
    **dict.fromkeys(("hbm_bytes", "hbm_reserved"), {"GB", "GiB", "MiB", "B"}),
    "hbm_bandwidth": {"GB/s", "TB/s", "GiB/s"},
    **dict.fromkeys(("link_bandwidth", "egress_bandwidth", "two_way_bandwidth", "host_bandwidth"), {"GB/s"}),
    "dcn_bandwidth": {"GB/s", "Gbit/s"},
    **dict.fromkeys(("hop_latency", "dcn_latency"), {"us"}),
    "on_chip_bytes": {"MiB", "MB"},
    "price": {"USD/h"},
    "vector": {"TFLOP/s"},
}
EVERY_CHIP = (*FORMATS, "hbm_bytes", "hbm_bandwidth", "hop_latency", "domain", "devices", "year")
EVERY_NETWORK = {
    "torus": ("link_bandwidth", "axes", "wrap"),
    "switch": ("egress_bandwidth",),
    "mesh": ("link_bandwidth", "egress_bandwidth"),
    "boardfly": ("egress_bandwidth", "max_hops"),
}
CLAIM_UNITS = set(
    "s ms us B kB MB GB GiB TB B/s GB/s TB/s FLOP FLOP/B FLOP/s/(USD/h) TFLOP/s TOP/s tok/s tok/ms req/s "
    "x fraction P/G sequences tokens params ways chips heads hops".split()
)


def rows(name):
    with open(DATA / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


CHIPS, CLAIMS, SOURCES, NUMBER_FORMATS = rows("chips"), rows("claims"), rows("sources"), rows("formats")
NAMES = tuple(dict.fromkeys(row["chip"] for row in CHIPS))


def is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", ["chips", "claims", "formats", "referee"])
def test_every_source_key_is_in_sources(name):
    """A cited row names keys of sources.csv, joined by "+"; the place within the source follows a colon."""
    known = {row["key"] for row in SOURCES}
    cited = {key for row in rows(name) for key in row["source"].partition(":")[0].split("+")}
    assert cited <= known


def test_a_source_has_one_row_and_says_where_it_is():
    """A key of sources.csv stands for one place."""
    assert len({row["key"] for row in SOURCES}) == len(SOURCES)
    assert all(row["key"] and row["source"] for row in SOURCES)


@pytest.mark.parametrize("name", ["chips", "claims", "formats", "sources"])
def test_rows_are_as_wide_as_the_header_and_clean(name):
    """No cell is missing, left over or padded with blanks."""
    for row in rows(name):
        assert None not in row and None not in row.values()
        assert all(cell == cell.strip() for cell in row.values())


def test_chip_values_parse_and_carry_the_unit_of_their_field():
    """Chosen values and alternates are numbers; what is absent or unknown has no value."""
    for row in CHIPS:
        if row["field"] not in UNITS:
            continue
        assert row["unit"] in UNITS[row["field"]], row
        assert is_number(row["value"]) == (row["role"] in ("primary", "alt")), row
        assert bool(row["value"]) == is_number(row["value"]), row


def test_chip_texts_are_known_and_have_no_unit():
    """What is not a number is a name, a vendor, a kind of network or a note."""
    for row in CHIPS:
        if row["field"] in UNITS:
            continue
        assert row["field"] in ("name", "vendor", "network") or row["field"].startswith("note_"), row
        assert row["value"] and not row["unit"] and row["role"] in ("primary", "alt"), row


def test_chip_roles_and_confidences_are_from_the_list():
    """A row is chosen, an alternate, "absent" (not multiplied natively) or "unknown"; confidence has four grades."""
    assert {row["role"] for row in CHIPS} == {"primary", "alt", "absent", "unknown"}
    assert {row["confidence"] for row in CHIPS} == {"high", "medium", "low", "uncertain"}
    assert all(row["field"] in FORMATS for row in CHIPS if row["role"] == "absent")


def test_one_row_answers_for_each_field_of_a_chip():
    """A field of a chip has exactly one row that is not an alternate, and no alternate stands alone."""
    answers = Counter((row["chip"], row["field"]) for row in CHIPS if row["role"] != "alt")
    assert set(answers.values()) == {1}
    assert {(row["chip"], row["field"]) for row in CHIPS} == set(answers)


@pytest.mark.parametrize("chip", NAMES)
def test_a_chip_has_the_fields_that_the_model_reads(chip):
    """Each format, the memory, the network and what its kind needs are answered, if only by "absent" or "unknown"."""
    mine = {row["field"]: row for row in CHIPS if row["chip"] == chip and row["role"] != "alt"}
    assert set(EVERY_CHIP) | set(EVERY_NETWORK[mine["network"]["value"]]) <= set(mine)


def test_positive_and_in_range():
    """A chosen value is positive; a measured fraction is below one."""
    chosen = [row for row in CHIPS if row["role"] == "primary" and row["field"] in UNITS]
    assert all(float(row["value"]) > 0 for row in chosen)
    assert all(float(row["value"]) < 1 for row in CHIPS if row["field"] in FRACTIONS and row["value"])
    assert all(float(row["value"]).is_integer() for row in chosen if row["field"] in COUNTS)


def test_all_chips_are_there():
    """The data file lists these chips, in this order."""
    assert NAMES == tuple(
        "v3 v4 v4i v5e v5p v6e ironwood tpu8i tpu8t a100 h100 h200 b200 b300 gb200 gb300 mi300x mi325x mi355x "
        "trainium2 gaudi3 l40s rtxpro6000 l4".split()
    )


@pytest.mark.parametrize(
    ("chip", "field", "value", "unit"),
    [
        ("v5e", "bf16", "197", "TFLOP/s"),
        ("v5e", "int8", "394", "TOP/s"),
        ("v5e", "hbm_bandwidth", "819", "GB/s"),
        ("v5e", "hbm_bytes", "16", "GiB"),
        ("ironwood", "hbm_bandwidth", "7380", "GB/s"),
    ],
)
def test_values_that_the_book_stands_on(chip, field, value, unit):
    """The chosen values of the running case are the ones that the book prints."""
    assert [
        (row["value"], row["unit"])
        for row in CHIPS
        if (row["chip"], row["field"], row["role"]) == (chip, field, "primary")
    ] == [(value, unit)]


def test_claim_ids_are_unique_and_all_there():
    """225 claims: 35 of the source chapter, 98 and 72 of the book's chapters 7 and 8, 20 of its chapters 1-6."""
    assert len({row["id"] for row in CLAIMS}) == len(CLAIMS)
    assert Counter(row["id"].partition("-")[0] for row in CLAIMS) == {"S": 35, "B7": 98, "B8": 72, "X": 20}


def test_claims_state_plain_numbers_in_known_units():
    """What is stated or recomputed is a number without separators; units and verdicts are from the list."""
    for row in CLAIMS:
        assert all(is_number(row[field]) for field in ("stated", "recomputed") if row[field]), row
        assert row["unit"] in CLAIM_UNITS, row
        assert row["printed_unit"] != row["unit"], row
        assert row["verdict"] in ("match", "rounding", "disagrees", "derived", "input"), row


def test_a_claim_has_a_number_to_be_checked_against():
    """A claim that is derived states nothing, one that is given states it; there is always one of the two."""
    for row in CLAIMS:
        assert row["stated"] or row["recomputed"], row
        if row["verdict"] == "derived":
            assert not row["stated"], row
        if row["verdict"] == "input":
            assert row["stated"], row


def test_formats_weigh_what_their_bits_say():
    """Bits, scale bits and group are positive whole numbers; a format multiplies as one that a matmul unit knows."""
    assert len({row["format"] for row in NUMBER_FORMATS}) == len(NUMBER_FORMATS)
    for row in NUMBER_FORMATS:
        assert int(row["bits"]) > 0 and int(row["scale_bits"]) >= 0 and int(row["group"]) > 0, row
        assert row["multiplies_as"] in (*FORMATS, "f32"), row
    weight = {row["format"]: int(row["bits"]) + int(row["scale_bits"]) / int(row["group"]) for row in NUMBER_FORMATS}
    assert [weight[name] for name in ("int4g128", "mxfp4", "nvfp4", "mxfp8")] == [4.125, 4.25, 4.5, 8.25]


def test_measured_latencies_are_of_known_chips_and_sources():
    """Each is a range of seconds of a collective among chips of the data file, by a source of the list."""
    found, sources = rows("latencies"), {row["key"] for row in SOURCES}
    assert found and all(0 < float(row["low"]) <= float(row["high"]) for row in found)
    assert {row["chip"] for row in found} <= set(NAMES) and {row["source"] for row in found} <= sources
    assert {row["unit"] for row in found} == {"us"} and all(int(row["chips"]) > 1 for row in found)
    assert {row["collective"] for row in found} <= {"all-gather", "all-reduce", "one-shot all-reduce"}


def test_published_speculations_are_of_known_sources():
    """Each has proposals, a speed-up and the sizes it is compared by; Leviathan's an acceptance, Chen's its three times, whose
    ratio is the printed speed-up to 0.5 %, but for one that the chapter names (1.875 printed as 1.92)."""
    found, sources = rows("speculation"), {row["key"] for row in SOURCES}
    assert {row["source"] for row in found} == {"LEV", "CHEN"} <= sources
    for row in found:
        assert int(row["k"]) >= 1 and float(row["speedup"]) > 1
        assert 0 < float(row["draft_params"]) < float(row["target_params"])
    assert all(0 < float(row["acceptance"]) < 1 for row in found if row["source"] == "LEV")
    timed = [row for row in found if row["source"] == "CHEN"]
    ratios = [float(row["target_ms"]) / float(row["token_ms"]) for row in timed]
    off = [abs(ratio / float(row["speedup"]) - 1) > 0.005 for ratio, row in zip(ratios, timed, strict=True)]
    assert off == [True, False, False] and round(ratios[0], 3) == 1.875
