"""The strategies draw what they promise."""

import torch
from draws import broadcasting, drawn, layouts, masks, normal, paddings, seeds
from hypothesis import strategies as st

shapes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


@drawn(shapes, seeds, layouts)
def test_a_layout_changes_the_memory_and_not_the_values(shape, seed, layout):
    x = normal(shape, torch.float32, seed, layout)
    plain = normal(shape, torch.float32, seed)
    assert x.shape == shape and not x.isnan().any()
    if layout != "expanded":
        assert torch.equal(x, plain)
    if layout == "strided" and x.numel() > 1:
        assert not x.is_contiguous()


@drawn(shapes, st.data())
def test_smaller_shapes_broadcast(shape, data):
    assert torch.broadcast_shapes(data.draw(broadcasting(shape)), shape) == shape
    assert data.draw(masks(shape)).dtype == torch.bool


@drawn(st.integers(0, 3), st.integers(1, 5), st.data())
def test_a_sentence_is_not_empty_unless_it_may_be(batch, length, data):
    kept = data.draw(paddings(batch, length, empty=False))
    assert kept.shape == (batch, length) and kept.any(1).all()
