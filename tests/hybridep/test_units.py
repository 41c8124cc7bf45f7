import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridep.errors import QuantityError
from hybridep.units import Dimension, counted, exact, format_bandwidth, format_bytes, format_seconds, gbps_to_bytes_per_s, parse


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("10 Gbps", Dimension.BANDWIDTH, 1.25e9),
        ("10Gbit/s", Dimension.BANDWIDTH, 1.25e9),
        ("16 GB/s", Dimension.BANDWIDTH, 16e9),
        ("1 GiB/s", Dimension.BANDWIDTH, 2.0**30),
        ("8 bps", Dimension.BANDWIDTH, 1.0),
        ("80 GiB", Dimension.SIZE, 80 * 2.0**30),
        ("80 GB", Dimension.SIZE, 80e9),
        ("0.2 ms", Dimension.TIME, 2e-4),
        ("1.5e-3 s", Dimension.TIME, 1.5e-3),
        ("150 TFLOPS", Dimension.THROUGHPUT, 1.5e14),
        ("0.50 $", Dimension.PRICE, 0.5),
        ("0.02 $/GB", Dimension.TRANSFER_PRICE, 2e-11),
        ("7.2 USD/h", Dimension.RENT, 2e-3),
    ],
)
def test_a_quantity_parses_to_base_units(text, dimension, value):
    assert parse(text, dimension) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("value", [10, 10.5, "10", " 3 "])
def test_a_number_without_unit_is_refused_with_an_example(value):
    with pytest.raises(QuantityError, match=r"has no unit.*10 Gbps"):
        parse(value, Dimension.BANDWIDTH)


@pytest.mark.parametrize("text", ["10 Gbqs", "10 GiBps", "fast", "", "1 ms"])
def test_an_unknown_unit_is_refused(text):
    with pytest.raises(QuantityError, match="Gbps"):
        parse(text, Dimension.BANDWIDTH)


def test_a_bit_is_not_a_byte():
    assert parse("1 GB/s", Dimension.BANDWIDTH) == 8 * parse("1 Gb/s", Dimension.BANDWIDTH)
    assert gbps_to_bytes_per_s(8) == 1e9


@given(st.floats(min_value=1e-12, max_value=1e18), st.sampled_from(list(Dimension)))
def test_the_stored_text_reads_back_to_the_same_float(value, dimension):
    assert parse(exact(value, dimension), dimension) == value


def test_texts_for_people():
    assert format_bytes(1.5e9) == "1.5 GB"
    words = [counted(number, what) for number in (0, 1, 2) for what in ("step", "micro-batch")]
    assert words == ["0 steps", "0 micro-batches", "1 step", "1 micro-batch", "2 steps", "2 micro-batches"]
    assert [format_seconds(value) for value in (0, 0.0015, 9999.4, 9999.5, 32400)] == [
        "0 us",
        "1.5 ms",
        "9999 s",
        "10000 s",
        "32400 s",
    ]
    assert format_bandwidth(1.25e9) == "10 Gbps"
