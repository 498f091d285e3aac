"""Calls that are legitimate and rare: detectors, data, figures, plans, and training."""

import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tools.torchvision_ops  # noqa: F401
from attnlib import data, detr, plot, scaling, train
from attnlib.gpt import GPTConfig


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    return detr.ResNet("resnet18").eval()


@pytest.mark.parametrize("name", ["layer4", "layer4.1", "layer4.0.downsample", "layer4.1.relu"])
def test_hooks_of_a_resnet_are_called(resnet, name):
    seen = []
    x = torch.rand(1, 3, 32, 32)
    before = resnet(x)[-1]
    handle = resnet.get_submodule(name).register_forward_hook(
        lambda module, inputs, output: seen.append(output.shape)
    )
    after = resnet(x)[-1]
    handle.remove()
    assert seen
    assert torch.allclose(before, after, rtol=1e-4, atol=1e-4)


def test_what_a_hook_of_a_stage_returns_is_used(resnet):
    handle = resnet.layer3.register_forward_hook(lambda module, inputs, output: 0 * output)
    maps = resnet(torch.rand(1, 3, 32, 32))
    handle.remove()
    assert maps[2].abs().max() == 0


def test_another_activation_of_a_block_is_used():
    torch.manual_seed(0)
    model = detr.ResNet("resnet18").eval()
    model.layer4[1].relu = nn.Identity()
    assert model(torch.rand(1, 3, 32, 32))[-1].min() < 0


def test_boxes_in_bfloat16_may_reach_the_edge():
    boxes = torch.tensor([[0.83, 0.5, 0.34, 0.2]])
    target = dict(labels=torch.tensor([1]), boxes=boxes.bfloat16())
    detr.check_targets([target], 1, 4, 3)
    with pytest.raises(ValueError, match="inside it"):
        detr.check_targets([target | dict(boxes=boxes.bfloat16() + 0.02)], 1, 4, 3)


def test_one_text_is_not_many():
    with pytest.raises(ValueError, match="texts"):
        data.train_bpe("the cat sat on the mat", 60)


def test_a_vocabulary_is_not_larger_than_asked_for():
    with pytest.raises(ValueError, match="at least 14"):
        data.train_bpe(["the cat sat on the mat the cat"], 8)
    assert data.train_bpe(["the cat sat on the mat the cat"], 14).get_vocab_size() == 14


def test_digits_without_a_pixel_are_not_there():
    found = data.collages(40, size=8)
    assert ((found["kind"] >= 0) == (found["box"][..., 2] > 0)).all()


def test_attention_of_a_window_takes_fewer_operations():
    shape = dict(vocab_size=50, block_size=64, n_layer=2, n_head=4, n_embd=32)
    whole, _ = scaling.flops_per_token(GPTConfig(**shape))
    assert scaling.flops_per_token(GPTConfig(**shape, window=64))[0] == whole
    found, every = scaling.flops_per_token(GPTConfig(**shape, window=8))
    pairs = sum(min(i, 8) for i in range(1, 65))  # of queries and keys
    assert abs(found - whole * pairs / sum(range(1, 65))) < 0.01 * whole
    assert every < scaling.flops_per_token(GPTConfig(**shape))[1]


def test_a_plan_is_checked():
    with pytest.raises(ValueError, match="zero"):
        scaling.Plan(2, zero=2)
    with pytest.raises(ValueError, match="data"):
        scaling.Plan(0)


def test_a_loss_of_one_entry_is_reported():
    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), batch[1]).view(1), 1

    x, y = torch.rand(8, 3), torch.rand(8, 2)
    history = train.fit(
        nn.Linear(3, 2), train.shuffled_batches(x, y, batch_size=4), loss_fn=loss_fn, steps=2
    )
    assert history[-1]["step"] == 2


def test_tokens_may_be_dollars():
    figure = plot.plot_attention(torch.rand(2, 2), ["$$", "$_$"], ["a", "$$"])
    figure.canvas.draw()
    plt.close(figure)


def test_every_run_is_in_the_legend():
    history = [dict(step=1, loss=2.0), dict(step=2, loss=1.0)]
    figure = plot.plot_history({"_first": history, "second": history})
    words = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    plt.close(figure)
    assert words == ["_first", "second"]


def test_nothing_to_plot():
    with pytest.raises(ValueError, match="weights"):
        plot.plot_attention(torch.zeros(3, 0))
    with pytest.raises(ValueError, match="history"):
        plot.plot_history([dict(step=1)])
