"""Backbones, masked models and weights: results that were silently wrong for unusual calls."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn as nn

from attnlib.attention import attention_backend
from attnlib.beit import Beit, BeitAttention
from attnlib.deit import DistilledVisionTransformer
from attnlib.mae import MaskedAutoencoder
from attnlib.models import data_config, load_pretrained
from attnlib.swin import SwinTransformer
from attnlib.swinv2 import SwinTransformerV2, WindowAttentionV2
from attnlib.vit import LayerScale, VisionTransformer, attention_rollout, patch_shares
from attnlib.vit_variants import use_rotary

SMALL = dict(img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2)


def autoencoder(**options):
    torch.manual_seed(0)
    decoder = dict(decoder_embed_dim=16, decoder_depth=1, decoder_num_heads=2)
    return MaskedAutoencoder(**SMALL | decoder | options)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_wrapped_state_dict_keeps_trained_windows(prefix):
    shape = dict(img_size=32, patch_size=2, embed_dim=8, depths=(1, 1), num_heads=(1, 2))
    wrapped = SwinTransformerV2(window_size=4, **shape)
    for name in reversed(prefix.split(".")[:-1]):
        outer = nn.Module()
        outer.add_module(name, wrapped)
        wrapped = outer
    model = SwinTransformerV2(window_size=8, **shape)
    load_pretrained(model, wrapped.state_dict())
    assert [block.attn.trained_window() for block in model.blocks] == [(4, 4), (4, 4)]


def test_loss_of_masked_autoencoder_does_not_overflow_in_float16():
    model = autoencoder(img_size=64)
    images, noise = 3 * torch.randn(400, 3, 64, 64), torch.rand(400, 64)
    wanted = model(images, 0.75, noise).loss
    loss = model.half()(images.half(), 0.75, noise.half()).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted, rtol=1e-2, atol=0)


def test_encoder_of_masked_autoencoder_takes_another_size():
    model = autoencoder()
    encoder = model.encoder(img_size=(64, 32)).eval()
    assert encoder(torch.randn(1, 3, 64, 32)).shape == (1, 16)
    wanted = VisionTransformer(num_classes=0, **SMALL)
    wanted.load_state_dict(model.encoder().state_dict())
    wanted.set_input_size((64, 32))
    assert torch.equal(encoder.pos_embed, wanted.pos_embed)


@pytest.mark.parametrize("size", [(3, 224, 224), 224.5, (224,)])
def test_data_config_refuses_what_is_no_size(size):
    with pytest.raises(ValueError, match="img_size"):
        data_config("vit_tiny_patch16_224", size)


def test_layer_scale_may_start_at_zero():
    x = torch.randn(1, 16, 16)
    block = VisionTransformer(init_values=0.0, **SMALL).blocks[0]
    assert torch.equal(block(x), x) and isinstance(block.ls1, LayerScale)
    block = Beit(init_values=0.0, **SMALL).blocks[0]
    x = torch.randn(1, 17, 16)
    assert torch.equal(block(x), x) and isinstance(block.gamma_2, nn.Parameter)


def test_patch_shares_counts_both_tokens_that_heads_read():
    model = DistilledVisionTransformer(**SMALL).eval()
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        rows = attention_rollout(model.attention_maps(x))
    torch.testing.assert_close(patch_shares(model, x), rows[:, :2].mean(1)[:, 2:])


def test_use_rotary_loses_no_hook_and_changes_nothing_before_an_error():
    model = VisionTransformer(**SMALL)
    model.blocks[0].attn.register_forward_hook(lambda module, inputs, out: 0 * out)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="hook"):
        use_rotary(model)
    narrow = VisionTransformer(**SMALL | dict(embed_dim=12))
    with pytest.raises(ValueError, match="width 6"):
        use_rotary(narrow)
    assert narrow.pos_embed.abs().max() > 0 and narrow.pos_embed.requires_grad
    assert torch.equal(model.pos_embed, before["pos_embed"])
    assert use_rotary(use_rotary(VisionTransformer(**SMALL))) is not None


def test_same_window_as_a_list_keeps_the_table():
    attention = BeitAttention(8, 2, (4, 4))
    table = attention.relative_position_bias_table
    attention.set_window_size([4, 4])
    assert attention.relative_position_bias_table is table


def test_plots_take_arrays_of_titles_and_one_quantity_with_a_logarithmic_scale():
    plot = pytest.importorskip("attnlib.plot")
    figure = plot.plot_attention(torch.rand(2, 3, 4), titles=np.array(["left", "right"]))
    assert [axis.get_title() for axis in figure.axes[:2]] == ["left", "right"]
    history = [{"step": 1, "loss": 2.0, "train_loss": 3.0}]
    scales = [axis.get_yscale() for axis in plot.plot_history(history, log="train_loss").axes]
    assert scales == ["linear", "log"]
    plot.plt.close("all")


def test_shared_table_is_added_to_those_of_the_blocks():
    model, x = Beit(**SMALL | dict(depth=2)).eval(), torch.randn(1, 3, 32, 32)
    stored = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    key = "relative_position_bias_table"
    shared = torch.randn_like(stored[f"blocks.0.attn.{key}"])
    wanted = {k: value + shared if k.endswith(key) else value for k, value in stored.items()}
    load_pretrained(model, wanted)
    right = model(x)
    load_pretrained(model, stored | {f"rel_pos_bias.{key}": shared})
    torch.testing.assert_close(model(x), right)


def test_fused_model_refuses_attention_maps():
    windows = pytest.importorskip("attnlib.windows")
    shape = dict(img_size=16, patch_size=2, embed_dim=8, depths=(1, 1), num_heads=(1, 2))
    fused = windows.fuse_swin(SwinTransformer(window_size=4, **shape))
    with pytest.raises(RuntimeError, match="ask the model itself"):
        pickle.loads(pickle.dumps(fused)).attention_maps(torch.randn(1, 3, 16, 16))


def test_kernel_gives_padding_no_gradient_in_float16():
    windows = pytest.importorskip("attnlib.windows")
    torch.manual_seed(0)
    layer = WindowAttentionV2(8, 2, window_size=4, shift_size=2).half()
    x, found = torch.randn(1, 5, 6, 8).half(), []  # the map is padded to 8 by 8
    for module in (layer, windows.fuse_attention(layer)):
        with attention_backend("auto" if found else "reference"):
            found.append(torch.autograd.grad(module(x).sum(), layer.qkv.weight)[0])
    torch.testing.assert_close(*found, rtol=0.05, atol=0.1)
