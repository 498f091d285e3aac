"""What the figures hold: the numbers of any weights and any history, whoever draws them."""

import matplotlib.pyplot as plt
import torch
from cycler import cycler
from draws import counts, drawn, dtypes, layouts, normal, seeds
from hypothesis import example
from hypothesis import strategies as st

from attnlib import plot as module
from attnlib.plot import plot_attention, plot_history, set_style


@drawn(st.integers(0, 3), counts, counts, dtypes(), st.booleans(), seeds, layouts)
@example(2, 3, 9, torch.bfloat16, True, 0, "strided")
def test_a_heat_map_holds_the_weights(heads, rows, columns, dtype, grad, seed, layout):
    """0 heads stand for a matrix without an axis of heads."""
    shape = (heads, rows, columns) if heads else (rows, columns)
    weights = normal(shape, torch.float64, seed, layout).sigmoid().to(dtype)
    figure = plot_attention(weights.requires_grad_(grad))
    wanted = weights.detach().view(-1, rows, columns).float()
    panels = [axis for axis in figure.axes if axis.get_xlabel() == "keys"]
    assert len(panels) == len(wanted)
    for axis, matrix in zip(panels, wanted, strict=True):
        (image,) = axis.images
        assert torch.equal(torch.tensor(image.get_array().data), matrix)
        assert image.get_clim() == (0, wanted.max().item())
        written = {text.get_position(): text.get_text() for text in axis.texts}
        shown = columns <= 8 and len(wanted) <= 2
        assert len(written) == (rows * columns if shown else 0)
        for (column, row), text in written.items():
            assert text == f"{matrix[row, column]:.2f}"
    plt.close(figure)


@drawn(
    st.dictionaries(st.sampled_from(("a", "b")), st.integers(1, 4), min_size=1),
    st.sampled_from(("step", "epoch")),
    seeds,
)
@example({"a": 1, "b": 4}, "step", 0)  # one run has no rate
def test_a_history_holds_the_points(runs, x, seed):
    history = {
        name: [
            {x: i, "loss": float(i + len(name) + seed)} | ({"rate": 0.5**i} if i % 2 else {})
            for i in range(count)
        ]
        for name, count in runs.items()
    }
    figure = plot_history(history, x=x, log=("rate",))
    names = list(dict.fromkeys(k for run in history.values() for r in run for k in r if k != x))
    assert [axis.get_ylabel() for axis in figure.axes] == names
    for axis, name in zip(figure.axes, names, strict=True):
        assert axis.get_yscale() == ("log" if name == "rate" else "linear")
        wanted = [[(r[x], r[name]) for r in run if name in r] for run in history.values()]
        assert [list(zip(*line.get_data())) for line in axis.lines] == wanted
        for line, own in zip(axis.lines, figure.axes[0].lines, strict=True):
            assert line.get_color() == own.get_color()  # a run has one color in all panels
            assert line.get_label() == own.get_label()
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == list(runs)
    plt.close(figure)


def test_a_style_is_that_of_every_later_figure():
    colors = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#222222"]
    with plt.rc_context():
        set_style()
        for key, value in module.STYLE.items():
            found = plt.rcParams[key]
            assert found == value or tuple(found) == tuple(value), key
        assert plt.rcParams["axes.prop_cycle"] == cycler(color=colors)


ORACLES = {
    "set_style": test_a_style_is_that_of_every_later_figure,
    "STYLE": test_a_style_is_that_of_every_later_figure,
    "plot_attention": test_a_heat_map_holds_the_weights,
    "plot_history": test_a_history_holds_the_points,
}
COLORS = "BLUE ORANGE GREEN RED PURPLE SKY BLACK".split()
NOT_HERE = dict.fromkeys(COLORS, "a color, seen by color-blind readers in test_plot.py")
NOT_HERE |= {"show": "displays a picture and its words, tested in test_plot.py"}


def test_every_public_name_is_tested_here_or_has_a_reason():
    assert ORACLES.keys() | NOT_HERE.keys() == set(module.__all__)
