"""Calls that few users make, of fills, texts, training and plots."""

import matplotlib
import pytest
import torch
from torch import nn

matplotlib.use("Agg")

from attnlib import data, plot, train


def test_a_resumed_run_draws_the_batches_of_a_whole_one(tmp_path):
    def weights(folder, stops):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        for stop in stops:
            torch.manual_seed(5)
            train.fit(
                model,
                lambda step: (torch.randn(4, 3),),
                loss_fn=lambda model, batch: ((model(batch[0]) - 1).square().sum(), 4),
                steps=4,
                log_every=2,
                lr=0.1,
                checkpoint=tmp_path / folder / "run.json",
                stop_after=stop,
            )
        return model.weight

    assert torch.equal(weights("whole", [None]), weights("parts", [2, None]))


def test_what_json_refuses_leaves_an_older_checkpoint_of_the_same_step(tmp_path):
    path = tmp_path / "run.json"
    train.save_checkpoint(path, {"x": torch.zeros(1)}, {"step": 1})
    with pytest.raises(TypeError):
        train.save_checkpoint(path, {"x": torch.ones(1)}, {"step": 1, "seen": {1, 2}})
    assert train.load_checkpoint(path)[0]["x"] == 0


@pytest.mark.parametrize("direction", ["left", "right"])
def test_the_padding_of_a_tokenizer_does_not_get_into_a_text(direction):
    texts = ["one two", "one"]
    tokenizer = data.train_bpe(texts, 30)
    wanted = data.encode(tokenizer, texts)
    tokenizer.enable_padding(length=9, direction=direction)
    assert torch.equal(data.encode(tokenizer, texts), wanted)
    assert tokenizer.padding["length"] == 9  # and it keeps its setting


def test_numbers_of_a_tensor_are_excluded():
    drawn = data.draw_numbers(200, 10, exclude=torch.arange(5))
    assert min(drawn) == 5


def test_an_attention_map_with_a_row_of_nan_keeps_the_scale_of_the_others():
    weights = torch.tensor([[0.2, 0.8], [torch.nan, torch.nan]])
    figure = plot.plot_attention(weights)
    limits = figure.axes[0].images[0].get_clim()
    plot.plt.close(figure)
    assert limits == pytest.approx((0, 0.8))


@pytest.mark.parametrize("vmax", [0, -1.0, float("nan")])
def test_a_scale_without_an_extent_is_refused(vmax):
    with pytest.raises(ValueError, match=r"vmax \((0|-1.0|nan)\)"):
        plot.plot_attention(torch.rand(2, 2), vmax=vmax)


def test_labels_that_are_numbers_are_refused():
    with pytest.raises(ValueError, match="keys has 7; each entry"):
        plot.plot_attention(torch.rand(2, 2), keys=[7, 8])
