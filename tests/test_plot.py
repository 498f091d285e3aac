"""Figures: what they draw, what they say, what they refuse."""

import importlib
import sys

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from attnlib import plot

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_show_displays_picture_and_words_and_closes(monkeypatch):
    shown = []
    monkeypatch.setattr(plot, "display", lambda data, raw: shown.append(data))
    plot.show(plt.figure(), "a description", "what to see where a < b")
    picture, caption = shown
    assert picture["text/plain"] == "a description"
    assert picture["image/png"].startswith(b"\x89PNG")
    assert caption["text/plain"] == "what to see where a < b"
    assert caption["text/html"] == '<p class="caption">what to see where a &lt; b</p>'
    assert not plt.get_fignums()


def test_without_a_caption_the_description_is_shown_and_read_once(monkeypatch):
    shown = []
    monkeypatch.setattr(plot, "display", lambda data, raw: shown.append(data))
    plot.show(plt.figure(), "a description")
    assert shown[1]["text/html"] == '<p class="caption" aria-hidden="true">a description</p>'


@pytest.mark.parametrize("alt", ["", "  "])
def test_figure_without_words_is_refused(alt):
    with pytest.raises(ValueError, match=r"alt \('\s*'\)"):
        plot.show(plt.figure(), alt)


@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 5), (4, 3, 5)])
def test_plot_attention_draws_the_weights(shape):
    weights = torch.rand(shape, requires_grad=True)
    figure = plot.plot_attention(
        weights, queries=list("abc"), keys=["the", "animal", "crossed", "the", "street"]
    )
    panels = figure.axes[: shape[0] if len(shape) == 3 else 1]
    for panel, matrix in zip(panels, weights.detach().reshape(-1, 3, 5)):
        assert torch.equal(torch.from_numpy(panel.images[0].get_array().data), matrix)
        assert panel.images[0].get_clim() == (0, pytest.approx(weights.max().item()))
    assert [tick.get_text() for tick in panels[0].get_yticklabels()] == list("abc")


def test_plot_attention_with_images_and_zeros():
    images = [torch.rand(8, 8).numpy() for _ in range(3)]
    figure = plot.plot_attention(torch.zeros(3, 3), images, images)
    figure.canvas.draw()
    assert len(figure.axes[0].artists) == 6


@pytest.mark.parametrize(
    "options, message",
    [
        ({"queries": ["a"]}, r"queries has 1 entries; weights of shape \(1, 3, 5\) need 3"),
        ({"keys": list("abc")}, r"keys has 3 entries; weights of shape \(1, 3, 5\) need 5"),
        ({"titles": ["a", "b"]}, r"titles has 2 entries; weights of shape \(1, 3, 5\) need 1"),
    ],
)
def test_labels_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plot.plot_attention(torch.rand(3, 5), **options)


def test_weights_with_other_axes_are_refused():
    with pytest.raises(ValueError, match=r"weights of shape \(2, 2, 3, 5\)"):
        plot.plot_attention(torch.rand(2, 2, 3, 5))


def test_plot_history_draws_every_quantity_of_every_run():
    runs = {
        "a": [{"step": 0, "loss": 2.0}, {"step": 5, "loss": 1.0, "accuracy": 0.5}],
        "b": [{"step": 0, "loss": 3.0}],
    }
    figure = plot.plot_history({"a": runs["a"]}, log=["loss"])
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "accuracy"]
    assert figure.axes[0].get_yscale() == "log" and figure.axes[1].get_yscale() == "linear"
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[0, 2], [5, 1]]
    assert figure.axes[1].lines[0].get_xydata().tolist() == [[5, 0.5]]
    assert len(plot.plot_history(runs).axes[0].lines) == 2
    lines = plot.plot_history(runs).axes[1].lines
    assert [len(line.get_xdata()) for line in lines] == [1, 0]  # run b did not measure it


@pytest.mark.parametrize(
    "history, message",
    [
        ([], r"history \(\[\]\) holds no record"),
        (
            [{"loss": 1.0}],
            r"x \('step'\) must be a key of every record; one has only \['loss'\]",
        ),
    ],
)
def test_histories_without_points_are_refused(history, message):
    with pytest.raises(ValueError, match=message):
        plot.plot_history(history)


@pytest.mark.parametrize("package", ["matplotlib.pyplot", "cycler", "IPython.display"])
def test_a_missing_package_names_the_extra_that_brings_it(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "attnlib.plot")
    with pytest.raises(
        ImportError, match=rf'{package} is missing: pip install "attnlib\[plot\]"'
    ):
        importlib.import_module("attnlib.plot")


def test_colors_stay_apart_for_colour_blind_readers():
    """Pairwise distance in CIELAB after simulating deuteranopia and protanopia
    (Viénot et al. 1999)."""
    import numpy as np

    def linear(color):
        c = np.array(matplotlib.colors.to_rgb(color))
        return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)

    def lab(rgb):
        xyz = (
            np.array(
                [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
            )
            @ rgb
        )
        f = np.cbrt(xyz / [0.9505, 1, 1.089])
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    to_lms = np.array(
        [[17.8824, 43.5161, 4.1193], [3.4557, 27.1554, 3.8671], [0.02996, 0.18431, 1.4670]]
    )
    deuteranopia = np.array([[1, 0, 0], [0.49421, 0, 1.24827], [0, 0, 1]])
    protanopia = np.array([[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]])
    colors = [plot.BLUE, plot.ORANGE, plot.GREEN, plot.RED, plot.BLACK]
    for see in (np.eye(3), deuteranopia, protanopia):
        simulate = np.linalg.inv(to_lms) @ see @ to_lms
        seen = [lab(np.clip(simulate @ linear(color), 0, 1)) for color in colors]
        apart = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
        assert min(apart) > 9, (see, min(apart))


def test_maps_of_a_batch_say_how_to_choose_one():
    from attnlib.attention import attention, record_attention

    q = torch.randn(2, 3, 5, 8)
    with record_attention() as maps:
        attention(q, q, q)
        attention(q, q, q)
    with pytest.raises(ValueError, match=r"list of 2 Tensors, .*\(2, 3, 5, 5\); choose one"):
        plot.plot_attention(maps)
    with pytest.raises(ValueError, match=r"choose one row of the batch, such as weights\[0\]"):
        plot.plot_attention(maps[0])
    assert len(plot.plot_attention(maps[0][0]).axes) == 4  # three heads and the color bar


def test_a_list_of_matrices_has_a_panel_for_each():
    matrices = [torch.rand(3, 5), torch.rand(3, 5)]
    figure = plot.plot_attention(matrices)
    for panel, matrix in zip(figure.axes, matrices):
        assert torch.equal(torch.from_numpy(panel.images[0].get_array().data), matrix)
    assert plot.plot_attention([[0.5, 0.5], [0.1, 0.9]]).axes[0].images  # lists of numbers
    with pytest.raises(ValueError, match="weights is a list of 2 Tensors"):
        plot.plot_attention([torch.rand(3, 5), torch.rand(5, 3)])
