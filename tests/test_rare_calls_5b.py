"""Losses of models in half precision: their sums are not rounded to it."""

import pytest
import torch
import torch.nn.functional as F

from attnlib.beit import masked_loss
from attnlib.recipes import classification_loss
from attnlib.spatial import RewardBaseline, caption_loss, reinforce_loss

HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
MANY = 3000  # terms of about 5: their sum, 15,000, has steps of 8 in float16


def logits_of(*shape, dtype):
    torch.manual_seed(0)
    return torch.randn(*shape).mul(3).to(dtype)


class Fixed(torch.nn.Module):
    """A model whose logits are always these."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, images, masked):
        return self.logits


def wanted(logits, targets):
    logs = logits.double().log_softmax(-1)
    return -logs.gather(-1, targets[..., None]).sum()


@HALF
def test_the_loss_of_masked_patches(dtype):
    logits = logits_of(MANY, 20, dtype=dtype)
    tokens = torch.arange(MANY).view(1, 1, MANY) % 20
    masked = torch.ones(1, 1, MANY, dtype=torch.bool)
    model = Fixed(logits)
    total, count = masked_loss(model, (torch.zeros(1, 3, 2, 2), tokens, masked))
    assert count == MANY and total.dtype == torch.float32
    expected = wanted(logits, tokens.flatten())
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    rounded = F.cross_entropy(logits, tokens.flatten(), reduction="sum")  # control
    assert abs(rounded.double() - expected) > 1e-4 * expected


@HALF
def test_the_loss_of_a_classifier(dtype):
    logits = logits_of(MANY, 20, dtype=dtype)
    labels = torch.arange(MANY) % 20
    total, count = classification_loss(torch.nn.Identity(), (logits, labels))
    assert count == MANY and total.dtype == torch.float32
    torch.testing.assert_close(total.double(), wanted(logits, labels), rtol=1e-6, atol=0)


@HALF
def test_the_loss_of_captions(dtype):
    logits = logits_of(30, 100, 20, dtype=dtype)
    targets = 1 + torch.arange(MANY).view(30, 100) % 19
    weights = torch.full((30, 100, 1), 1.0, dtype=dtype)
    mean = caption_loss(logits, targets, weights, penalty=0.0)
    assert mean.dtype == torch.float32
    expected = wanted(logits, targets) / 30
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=0)


@HALF
def test_the_loss_of_drawn_places(dtype):
    logits = logits_of(4, 700, 20, dtype=dtype)
    targets = 1 + torch.arange(2800).view(4, 700) % 19
    log_prob, entropy = torch.zeros(2, 4, 700, dtype=dtype)
    baseline = RewardBaseline(700).eval()
    loss = reinforce_loss(
        logits, targets, log_prob, entropy, baseline, reward_weight=1.0, entropy_weight=0.0
    )
    assert loss.dtype == torch.float32
    expected = wanted(logits, targets) / 4
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
