import pytest

from streamflow.runtime.units import spell_bytes, spell_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.5, "1.50 s"),
        (123.4, "123 s"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.00 s"),
        (999.6e-6, "1.00 ms"),
        (42e-6, "42.0 us"),
        (5e-9, "5.00 ns"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert spell_seconds(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (150 * 2**20, "150 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes(nbytes: int, text: str) -> None:
    assert spell_bytes(nbytes) == text
