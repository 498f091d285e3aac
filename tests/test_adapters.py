"""Adapters, hooks, pruning, and quantization take effect in every model, or are refused."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from small_models import small_supernet
from torch.nn.utils import prune

from attnlib.autoformer import AutoFormer, Subnet, extract
from attnlib.beit import BeitForMaskedImageModeling, DiscreteVAE
from attnlib.decoding import greedy
from attnlib.detr import DETR, BoxQueryDETR, small_detr
from attnlib.gpt import GPT, GPTConfig
from attnlib.inference import optimize_for_inference
from attnlib.mae import MaskedAutoencoder
from attnlib.panoptic import PanopticDETR
from attnlib.spatial import AttentiveConvnet, Captioner, ConvEncoder
from attnlib.transformer import Transformer
from helpers import BACKBONES, build, close

LAYERS = nn.Linear, nn.Conv2d, nn.Embedding
IMAGES = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
DECODER = dict(decoder_embed_dim=20, decoder_depth=2, decoder_num_heads=5)


def image(size=32, chans=3):
    return torch.randn(2, chans, size, size, generator=torch.Generator().manual_seed(0))


def tokens(n):
    return torch.randint(3, 20, (2, n), generator=torch.Generator().manual_seed(n))


def noise():
    return torch.rand(2, 16, generator=torch.Generator().manual_seed(0))


def hidden():
    return torch.arange(32).view(2, 4, 4) % 3 == 0


def detr():
    sizes = dict(num_encoder_layers=1, num_decoder_layers=2, embed_dim=32, num_heads=4)
    return DETR(5, 6, backbone="resnet18", dim_feedforward=48, dropout=0.0, **sizes)


def transformer(**options):
    sizes = dict(d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=2)
    return Transformer(20, dim_feedforward=24, dropout=0.0, max_length=16, **sizes, **options)


def joined(output):
    """All tensors that a model returns, one after the other."""
    if isinstance(output, torch.Tensor):
        return output.flatten()
    return torch.cat([joined(x) for x in output if x is not None and not isinstance(x, list)])


MODELS = {  # what makes a model, and what it is called with
    **{name: (lambda name=name: build(name), lambda m: m(image())) for name in BACKBONES},
    "autoformer": (
        lambda: AutoFormer(32, 8, 3, 5, "avg", 24, (1, 2), (2, 1)),
        lambda m: m(image()),
    ),
    "supernet": (lambda: small_supernet(), lambda m: m(image(10, 1))),
    "masked beit": (
        lambda: BeitForMaskedImageModeling(**IMAGES, vocab_size=11),
        lambda m: m(image(), hidden()),
    ),
    "mae": (
        lambda: MaskedAutoencoder(**IMAGES, **DECODER),
        lambda m: m(image(), noise=noise())[:2],
    ),
    "detr": (detr, lambda m: m(image(40))),
    "box queries": (lambda: small_detr(4, BoxQueryDETR), lambda m: m(image(48))),
    "panoptic": (lambda: PanopticDETR(small_detr(6), num_groups=4), lambda m: m(image(48))),
    "transformer": (transformer, lambda m: m(tokens(5), tokens(6))),
    "transformer, untied": (
        lambda: transformer(tie_weights=False, output_bias=True),
        lambda m: m(tokens(5), tokens(6)),
    ),
    "gpt": (
        lambda: GPT(GPTConfig(vocab_size=20, block_size=8, n_layer=2, n_head=2, n_embd=16)),
        lambda m: m(tokens(6)),
    ),
    "captioner": (
        lambda: Captioner(20, ConvEncoder(16), hidden_dim=12),
        lambda m: m(image(), tokens(4)),
    ),
    "convnet": (lambda: AttentiveConvnet(4, "dot"), lambda m: m(image(48))),
}


def make(name):
    """The model with no weight at 0 or 1, in evaluation mode."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def run(name, model):
    return joined(MODELS[name][1](model))


def layers_of(model):
    """The names of the linear layers, convolutions, and tables, each once."""
    found = {}
    for key, layer in model.named_modules():
        if isinstance(layer, LAYERS):
            found[key] = layer
    return found


class Adapter(nn.Module):
    """A layer with a trained addition, which has none of the layer's own attributes."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        y = self.base(x)
        return y + self.scale * (3 * y).sin()


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_around_any_layer_takes_effect(name):
    model, adapters = make(name), {}
    with torch.no_grad():
        before = run(name, model)
    for key, layer in layers_of(model).items():
        adapters[key] = Adapter(layer)
        model.set_submodule(key, adapters[key])
    after = run(name, model)
    assert (after - before).abs().max() > 1e-3
    after.square().sum().backward()
    for key, adapter in adapters.items():
        assert adapter.scale.grad is not None and adapter.scale.grad != 0, key


@pytest.mark.parametrize("name", MODELS)
def test_a_hook_on_any_layer_runs(name):
    model, called = make(name), set()
    for key, layer in layers_of(model).items():
        layer.register_forward_hook(lambda *_, key=key: called.add(key))
    with torch.no_grad():
        run(name, model)
    assert called == layers_of(model).keys()


@pytest.mark.parametrize("name", MODELS)
def test_pruned_layers_can_be_trained(name):
    model = make(name).requires_grad_(True)
    with torch.no_grad():
        before = run(name, model)
    for layer in layers_of(model).values():
        prune.l1_unstructured(layer, "weight", amount=0.3)
    pruned = run(name, model)
    assert (pruned - before).abs().max() > 1e-4
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):  # a weight that is not computed again fails in the second round
        optimizer.zero_grad()
        run(name, model).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # with random weights it may explode
        optimizer.step()
    assert not torch.equal(run(name, model), pruned)
    for layer in layers_of(model).values():
        prune.remove(layer, "weight")
        assert (layer.weight == 0).float().mean() > 0.2


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_quantized_models_run(name):
    model = make(name)
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    count = sum("quantized" in type(part).__module__ for part in quantized.modules())
    with torch.no_grad():
        before, after = run(name, model), run(name, quantized)
    if name != "supernet":  # whose layers are of classes that PyTorch does not quantize
        plain = [layer for layer in layers_of(model).values() if type(layer) is nn.Linear]
        assert count >= len(plain) > 0 and not torch.equal(after, before)
    assert (after - before).abs().max() < 0.2 * before.abs().max() + 0.2


# --- networks within networks, and functions --------------------------------------------------


def test_a_narrower_network_refuses_an_adapter():
    model, narrow = small_supernet().eval(), Subnet(32, (1, 2), (1, 2))
    model.blocks[1].fc1 = Adapter(model.blocks[1].fc1)
    x = image(10, 1)
    assert model(x).shape == (2, 10)  # the largest network has it
    message = r"blocks.1.fc1 \(Adapter\) must be a Linear or LayerNorm of attnlib.autoformer"
    with pytest.raises(TypeError, match=message):
        model(x, narrow)
    with pytest.raises(TypeError, match=message):
        extract(model, narrow)


def test_narrower_networks_have_the_hooks_and_the_pruning_of_the_supernet():
    torch.manual_seed(0)
    model, narrow, called = small_supernet().eval(), Subnet(32, (1, 2), (1, 2)), []
    model.blocks[0].attn.qkv.register_forward_hook(lambda *_: called.append(1))
    before = model(image(10, 1), narrow)
    assert called == [1]
    prune.l1_unstructured(model.blocks[0].attn.qkv, "weight", amount=0.5)
    for _ in range(2):
        after = model(image(10, 1), narrow)
        after.sum().backward()
    assert (after - before).abs().max() > 1e-5
    with pytest.raises(ValueError, match="supernet has no blocks.0.attn.qkv.weight"):
        extract(model, narrow)
    prune.remove(model.blocks[0].attn.qkv, "weight")
    assert torch.allclose(extract(model, narrow)(image(10, 1)), after, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_adapted_and_quantized_models_decode():
    for name in "transformer", "captioner":
        model = make(name)
        src = tokens(5) if name == "transformer" else image()
        options = dict(max_length=6, bos_id=1, eos_id=2)
        plain = greedy(model, src, **options)
        quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
        assert greedy(quantized, src, **options).shape[0] == 2
        model.output = Adapter(model.output)
        model.output.scale.data.fill_(0.0)
        assert torch.equal(greedy(model, src, **options), plain)


def test_an_adapter_around_the_codes_of_a_tokenizer():
    torch.manual_seed(0)
    model = DiscreteVAE(6, 1, 2, 8).eval()
    places = torch.randint(6, (2, 3, 3))
    before = model.decode(places)
    model.codes = Adapter(model.codes)
    assert (model.decode(places) - before).abs().max() > 1e-4


# --- low-rank adapters by peft ----------------------------------------------------------------

SAME = 2e-6  # float32 sums of outputs of up to 10
PAGE = Path(__file__).parent.parent / "nbs" / "36_finetune.ipynb"


def documented_targets():
    """The names for `target_modules` of each model, from the table of the chapter."""
    (text,) = [
        "".join(cell["source"])
        for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
        if cell["id"] == "adapters-text"
    ]
    found = {}
    for row in text.splitlines():
        if row.startswith("|") and "`" in row:
            models, attention, network, classifier = row.strip("|").split("|")
            for model in re.findall(r"\w+", models.lower()):
                found[model] = re.findall("`(.*?)`", attention + network)
                assert re.findall("`(.*?)`", classifier) == ["head"] * (model in BACKBONES)
    return found


TARGETS = documented_targets()


def test_the_table_has_the_models():
    models = {"vit", "deit", "beit", "swin", "swinv2", "tnt", "gpt", "transformer"}
    assert TARGETS.keys() == models


def with_lora(name, **options):
    """A model with low-rank adapters that change its output, in evaluation mode."""
    peft = pytest.importorskip("peft")
    options = dict(r=2, lora_alpha=4, target_modules=TARGETS[name]) | options
    if name in BACKBONES:
        options["modules_to_save"] = ["head"]
    model = peft.get_peft_model(make(name), peft.LoraConfig(**options)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:  # zero at first
                parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("name", TARGETS)
def test_lora_trains_the_adapters_and_the_head_only(name):
    model = with_lora(name)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in key or "modules_to_save" in key for key in trained)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with torch.no_grad():
        first = run(name, model)
    run(name, model).square().mean().backward()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.any(), key
        else:
            assert parameter.grad is None, key
    optimizer.step()
    for key, x in model.state_dict().items():
        assert torch.equal(x, before[key]) == (key not in trained), key
    with torch.no_grad():
        assert (run(name, model) - first).abs().max() > 1e-3


@pytest.mark.parametrize("name", TARGETS)
def test_lora_adapts_attention_and_feed_forward_networks_only(name):
    adapted = {key.split(".lora_")[0] for key in with_lora(name).state_dict() if "lora_" in key}
    parts = r"\.(attn|attn_in|attn_out|self_attn|multihead_attn|mlp|mlp_in|feed_forward)\.\w+$"
    expected = set()
    for key in layers_of(make(name)):
        if re.search(parts, key):
            expected.add(f"base_model.model.{key}")
    assert adapted == expected


@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_lora_merged_saved_loaded_and_optimized_gives_the_same(name, tmp_path):
    peft = pytest.importorskip("peft")
    model = with_lora(name)
    plain, adapted = run(name, make(name)), run(name, model)
    assert (adapted - plain).abs().max() > 1e-3
    with model.disable_adapter():
        close(run(name, model), plain, 1e-6)
    for whole in (model, model.base_model.model):
        close(run(name, optimize_for_inference(whole)), adapted, SAME)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make(name), tmp_path).eval()
    close(run(name, loaded), adapted, 0)
    merged = model.merge_and_unload().eval()
    assert merged.state_dict().keys() == make(name).state_dict().keys()
    assert type(merged) is type(make(name))
    close(run(name, merged), adapted, SAME)


@torch.no_grad()
def test_lora_reaches_the_projections_of_multi_head_attention():
    options = dict(target_modules=[], target_parameters=["in_proj_weight"])
    model = with_lora("transformer", **options)
    plain, adapted = run("transformer", make("transformer")), run("transformer", model)
    assert (adapted - plain).abs().max() > 1e-3
    merged = model.merge_and_unload()
    close(run("transformer", merged), adapted, SAME)
    close(run("transformer", optimize_for_inference(merged)), adapted, SAME)
