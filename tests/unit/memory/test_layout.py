"""Cutting arrays into pieces, and elements that share bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.memory.layout import Pieces, has_gaps, is_compact, overlaps_itself

WIDE = np.dtype([("a", "i4", (100,)), ("b", "u1")])


def filled(num, dtype):
    return np.random.default_rng(5).integers(0, 255, num * dtype.itemsize, np.uint8).view(dtype)


ARRAYS = {
    "C": np.arange(3_000).reshape(10, 300),
    "F": np.asfortranarray(np.arange(3_000).reshape(10, 300)),
    "reversed": np.arange(3_000)[::-1],
    "strided": np.arange(9_000)[::3],
    "broadcast": np.broadcast_to(np.arange(30), (100, 30)),
    "4-d": np.arange(4 * 3 * 50 * 2).reshape(4, 3, 50, 2).transpose(2, 0, 3, 1),
    "0-d": np.array(3.0),
    "one row longer than a piece": np.arange(2_000).reshape(2, 1_000)[:, ::-1],
    "padded": filled(500, np.dtype("i1,f8", align=True))[::2],
    "items longer than a piece": filled(12, WIDE).reshape(4, 3),
    "strided items longer than a piece": filled(24, WIDE).reshape(4, 6)[::-1, ::2],
    "size-1 axes": np.lib.stride_tricks.as_strided(np.arange(300), (1, 300, 1), (7, 8, -9)),
}


@pytest.mark.parametrize("max_nbytes", [64, 200, 1000, 1 << 20])
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("num_rising", [0, 1, 3, 8])
def test_pieces_cover_an_array_in_c_order(name, max_nbytes, num_rising):
    array = ARRAYS[name]
    pieces, found, end = Pieces(array, max_nbytes, num_rising=num_rising), [], 0
    for number in range(pieces.num):
        offset, piece = pieces[number]
        assert offset == end
        assert 0 < piece.nbytes <= max_nbytes
        assert np.shares_memory(piece, array)
        found.append(piece.tobytes())
        end += piece.nbytes
    assert end == array.nbytes
    whole = array.view((np.void, array.itemsize))  # NumPy leaves out what pads a structure
    assert b"".join(found) == whole.tobytes()


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 5)])
def test_nothing_has_no_pieces(shape):
    assert Pieces(np.zeros(shape), 64).num == 0
    assert Pieces(np.zeros((4, 4))[::2, 4:], 64).num == 0


def test_pieces_of_an_axis_are_of_nearly_one_size():
    """Else every other piece of a row a little longer than a chunk would be a few bytes."""
    rows = np.zeros((3, 1_010))[:, ::-1]
    sizes = [Pieces(rows, 8_000)[n][1].size for n in range(Pieces(rows, 8_000).num)]
    assert sizes == [505] * 6


def test_contiguous_arrays_are_cut_at_pages():
    pieces = Pieces(np.zeros(100_001, np.uint8), 33_000)
    assert [pieces[n][0] % 4096 for n in range(pieces.num)] == [0] * pieces.num


def test_the_first_pieces_rise_to_a_whole_one():
    pieces = Pieces(np.zeros(64 << 20, np.uint8), 2 << 20, num_rising=8)
    sizes = [pieces[n][1].nbytes >> 10 for n in range(pieces.num)]
    assert sizes[:8] == [256, 512, 768, 1024, 1280, 1536, 1792, 2048]
    assert set(sizes[8:-1]) == {2048}
    short = Pieces(np.zeros(8 << 20, np.uint8), 2 << 20, num_rising=8)  # not that many: all alike
    assert [short[n][1].nbytes for n in range(short.num)] == [2 << 20] * 4


GAPPED = np.zeros(1, "i4,u1,f8")[["f0", "f2"]].dtype


@pytest.mark.parametrize(
    ("dtype", "is_gapped"),
    [
        ("f8", False),
        ("V5", False),
        ("i1,f8", False),
        (np.dtype("i1,f8", align=True), True),
        (GAPPED, True),
        ([("a", GAPPED, (2,)), ("b", "i4")], True),
        ([("a", "i4,u1", (2,)), ("b", "i4")], False),
    ],
)
def test_gaps_are_bytes_of_no_field(dtype, is_gapped):
    assert has_gaps(np.dtype(dtype)) is is_gapped


def test_a_column_of_a_long_table_is_not_compact():
    table = np.empty((1_000, 2_000), np.uint8)
    assert is_compact(table)
    assert is_compact(table[:100].T)
    assert not is_compact(table[:, 0])
    assert not is_compact(table[::-1, 0])


@pytest.mark.parametrize("shape", [(), (1,), (1_000,), (20, 30)])
def test_pieces_that_keep_gaps_are_of_whole_items(shape):
    array = np.zeros(shape, GAPPED)
    for view in (array, array.T, array[::-2] if shape else array):
        pieces = Pieces(view, 200, keeps_gaps=True)
        found = [pieces[n] for n in range(pieces.num)]
        assert {piece.dtype for _, piece in found} == {GAPPED}
        assert sum(piece.nbytes for _, piece in found) == view.nbytes
        assert all(np.shares_memory(piece, array) for _, piece in found)


def test_a_million_pieces_are_reached_by_number():
    pieces = Pieces(np.broadcast_to(np.float32(1), (1 << 20, 1 << 10)), 1 << 12)
    assert pieces.num == 1 << 20
    offset, piece = pieces[pieces.num - 1]
    assert (offset, piece.shape) == ((1 << 32) - (1 << 12), (1, 1 << 10))


@st.composite
def strided(draw: st.DrawFn) -> np.ndarray:
    axes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(-9, 9)), max_size=3))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    base = np.zeros(200, np.uint8)
    return np.ndarray(
        [num for num, _ in axes], f"V{itemsize}", base.data, 100, [stride for _, stride in axes]
    )


@given(strided())
def test_elements_that_share_bytes_are_found(array):
    starts = [0]
    for num, stride in zip(array.shape, array.strides, strict=True):
        starts = [start + index * stride for start in starts for index in range(num)]
    taken = [start + byte for start in starts for byte in range(array.itemsize)]
    assert overlaps_itself(array) == (len(set(taken)) < len(taken))


def test_what_slicing_makes_of_large_arrays_does_not_overlap():
    base = np.zeros((300, 400, 5), np.float32)
    for view in (base[::-3, 5:, ::2], base.transpose(2, 0, 1)[..., ::-7], base[:, :, 0].T):
        assert not overlaps_itself(view)
    assert not overlaps_itself(np.diagonal(base[:, :, 0]))
    assert overlaps_itself(np.lib.stride_tricks.sliding_window_view(base[0, :, 0], 9))
    assert overlaps_itself(np.broadcast_to(base, (2, *base.shape)))
