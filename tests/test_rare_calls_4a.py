"""Calls that few users make, of attention in windows and of copies made for inference."""

import pytest
import torch
import torch.nn as nn

from attnlib.attention import attention, record_attention
from attnlib.gpt import GPT, GPTConfig
from attnlib.inference import optimize_for_inference
from attnlib.swin import SwinTransformer
from attnlib.swinv2 import SwinTransformerV2
from attnlib.transformer import Transformer
from attnlib.vit import VisionTransformer

TINY = dict(embed_dim=16, depths=(2, 2), num_heads=(1, 2), num_classes=5)


@pytest.fixture(autouse=True)
def packing_pays(monkeypatch):
    """Whatever the processor: packed products are what is tested here."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


def swin(kind=SwinTransformer, window=4):
    torch.manual_seed(0)
    return kind(32, window_size=window, **TINY).eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", [SwinTransformer, SwinTransformerV2])
def test_a_copy_made_inside_autocast(kind):
    """It is the copy that is made outside, and its calls inside of autocast are refused."""
    model, x = swin(kind), torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        fast = optimize_for_inference(model)
        with pytest.raises(TypeError, match="comes from torch.autocast"):
            fast(x)
    torch.testing.assert_close(fast(x), model(x), rtol=0, atol=1e-5)


def gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=20, block_size=16, n_layer=2, n_head=2, n_embd=16)).eval()


def translator():
    torch.manual_seed(0)
    sizes = dict(num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=16, max_length=8)
    return Transformer(src_vocab=20, d_model=16, nhead=2, **sizes).eval()


def generate(model):
    return model.generate(torch.tensor([[3, 4]]), max_new_tokens=3)


def translate(model):
    return model(torch.tensor([[3, 4, 5]]), torch.tensor([[6, 7]]))


def classify(model):
    return model(torch.ones(1, 3, 32, 32))


@torch.no_grad()
@pytest.mark.parametrize(
    "make, call",
    [
        (gpt, generate),
        (translator, translate),
        (swin, classify),
        (lambda: VisionTransformer(32, 8, embed_dim=16, depth=2, num_heads=2), classify),
    ],
)
def test_a_copy_is_not_recorded(make, call):
    """It would have recorded some of the maps; the model itself records all."""
    model = make()
    fast = optimize_for_inference(model)
    with record_attention() as maps:
        with pytest.raises(RuntimeError, match="keeps no attention maps: record_attention"):
            call(fast)
        assert maps == []
        call(model)
    assert len(maps) > 1
    call(fast)


def test_a_model_inside_of_a_copied_one_refuses_as_the_copy_does():
    x = torch.randn(1, 3, 32, 32)
    whole = nn.Sequential(swin(), nn.Linear(5, 2))
    fast = optimize_for_inference(whole)
    with pytest.raises(RuntimeError, match="keeps no attention maps"):
        fast[0].attention_maps(x)
    for part in (fast, fast[0]):
        with pytest.raises(RuntimeError, match="must be False"):
            part.train()
        assert part.eval() is part
    assert len(whole[0].attention_maps(x)) == 4
    torch.testing.assert_close(fast(x), whole(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [SwinTransformer, SwinTransformerV2])
def test_resampled_weights_keep_the_notes_of_the_layers(kind):
    """Of Swin V2 the trained window is such a note; without it the bias would be another."""
    model, x = swin(kind), torch.randn(1, 3, 32, 32)
    model.set_input_size(window_size=2)
    other = swin(kind, window=2)
    weights = other.resample_state_dict(model.state_dict())
    assert weights._metadata == model.state_dict()._metadata
    other.load_state_dict(weights)
    assert torch.equal(other(x), model(x))
    assert other.resample_state_dict(dict(weights)).keys() == weights.keys()


@pytest.mark.parametrize("shape", [(1, 65), (65,), (70, 1), (1, 1), (2, 1, 65), (3, 1, 70, 65)])
def test_a_bias_that_broadcasts_in_tiles(shape):
    flash = pytest.importorskip("attnlib.flash", reason="it needs Triton")
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 70, 8), torch.randn(65, 8), torch.randn(65, 4)
    q = q.expand(3, 2, 70, 8)
    bias = torch.randn(shape)
    out, lse = flash.tiled_attention(q, k, v, bias=bias, block_rows=64, block_cols=64)
    torch.testing.assert_close(out, attention(q, k, v, bias=bias), rtol=0, atol=1e-5)
    assert lse.shape == (3, 2, 70)
    with pytest.raises(ValueError, match="bias"):
        flash.tiled_attention(q, k, v, bias=torch.randn(64, 65))
