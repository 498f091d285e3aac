"""Time the vision models beside their peers: `python -m benchmarks.vision --out FOLDER`.

Forward (logits, evaluation) and training step (forward, cross-entropy, backward, AdamW) against
timm, torchvision, the transformers library and vit-pytorch, as far as they have the model.
Weights are copied where names can be mapped, and outputs are compared before anything is timed.
All take turns, with fresh random images, at the same precision of float32 matrix products: see
`MODES`. In bfloat16 evaluation has bfloat16 weights, and training is under autocast. On a CPU
the copy that `attnlib.inference` optimizes takes part in the forward pass, as "attnlib,
optimized"; on a GPU that of Swin does. The others take part a second time under that name with
the kernels of `attnlib.flash` and `attnlib.windows`, and Swin does so in training and compiled.

On a GPU each row has the time on the wall and, under "kernel", the time between events around
some calls in a row: of ours and timm's plain forward passes, that of a CUDA graph, without
Python and launches. With --minutes the command ends after so many, and goes on when it is
given again.
"""

import argparse
import itertools
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn as nn
import torch.nn.functional as F

import attnlib
from attnlib.attention import attention_backend
from attnlib.inference import optimize_for_inference
from attnlib.swin import SwinTransformer
from attnlib.swinv2 import SwinTransformerV2
from benchmarks import runner, timing
from benchmarks.timing import OPTIMIZED, OURS

MODES = {  # name: (torch.set_float32_matmul_precision, dtype)
    "float32": ("highest", torch.float32),
    "float32, medium": ("medium", torch.float32),
    "bfloat16": ("highest", torch.bfloat16),
}
SKIPPED = (
    "The optimized ViT and TNT compute nothing but the class token in their last block, which "
    "is all that the head reads."
)
TINY = {  # of each family; windows divide every map, where all libraries agree
    "vit": dict(img_size=32, depth=2),
    "swin": dict(img_size=64, window_size=2, depths=(2, 1, 1, 1)),
    "swinv2": dict(img_size=64, window_size=2, depths=(2, 1, 1, 1)),
    "tnt": dict(img_size=32, depth=2),
    "beit": dict(img_size=32, depth=2),
}


# --- the same model of other libraries --------------------------------------------------------


class Logits(nn.Module):
    """A model of the transformers library that returns its logits alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


def torchvision_vit(ours):
    from torchvision.models import VisionTransformer

    width = ours.embed_dim
    depth = len(ours.blocks)
    heads = ours.blocks[0].attn.num_heads
    size = ours.patch_embed.img_size[0]
    patch = ours.patch_embed.patch_size[0]
    shape = size, patch, depth, heads, width, 4 * width
    return VisionTransformer(*shape, num_classes=ours.num_classes)


def transformers_vit(ours):
    import transformers

    config = transformers.ViTConfig(
        hidden_size=ours.embed_dim,
        num_hidden_layers=len(ours.blocks),
        num_attention_heads=ours.blocks[0].attn.num_heads,
        intermediate_size=4 * ours.embed_dim,
        image_size=ours.patch_embed.img_size[0],
        patch_size=ours.patch_embed.patch_size[0],
        layer_norm_eps=1e-6,
        num_labels=ours.num_classes,
        attn_implementation="sdpa",
    )
    return Logits(transformers.ViTForImageClassification(config))


def vit_pytorch_vit(ours):
    import vit_pytorch

    heads = ours.blocks[0].attn.num_heads
    return vit_pytorch.ViT(
        image_size=ours.patch_embed.img_size[0],
        patch_size=ours.patch_embed.patch_size[0],
        num_classes=ours.num_classes,
        dim=ours.embed_dim,
        depth=len(ours.blocks),
        heads=heads,
        mlp_dim=4 * ours.embed_dim,
        dim_head=ours.embed_dim // heads,
    )


def swin_shape(ours):
    """Depths, heads, and the sides of the image and of a window."""
    depths = [len(stage.blocks) for stage in ours.layers]
    heads = [stage.blocks[0].attn.num_heads for stage in ours.layers]
    window = ours.layers[0].blocks[0].attn.window_size[0]
    return depths, heads, ours.patch_embed.img_size[0], window


def torchvision_swin(ours):
    """Of either version."""
    from torchvision.models import swin_transformer

    depths, heads, _, window = swin_shape(ours)
    options = {}
    if isinstance(ours, SwinTransformerV2):
        options["block"] = swin_transformer.SwinTransformerBlockV2
        options["downsample_layer"] = swin_transformer.PatchMergingV2
    return swin_transformer.SwinTransformer(
        [4, 4],
        ours.embed_dim,
        depths,
        heads,
        [window, window],
        num_classes=ours.num_classes,
        stochastic_depth_prob=0.0,
        **options,
    )


def transformers_swin(ours):
    """Of either version."""
    import transformers

    depths, heads, size, window = swin_shape(ours)
    second = isinstance(ours, SwinTransformerV2)
    config_class = transformers.Swinv2Config if second else transformers.SwinConfig
    model_class = (
        transformers.Swinv2ForImageClassification
        if second
        else transformers.SwinForImageClassification
    )
    config = config_class(
        image_size=size,
        embed_dim=ours.embed_dim,
        depths=depths,
        num_heads=heads,
        window_size=window,
        drop_path_rate=0.0,
        num_labels=ours.num_classes,
    )
    return Logits(model_class(config))


SWINS = {"torchvision": torchvision_swin, "transformers": transformers_swin}
PEERS = {  # family: {library: function of our model, which has its sizes}
    "vit": {
        "torchvision": torchvision_vit,
        "transformers": transformers_vit,
        "vit-pytorch": vit_pytorch_vit,
    },
    "swin": SWINS,
    "swinv2": SWINS,
}


def peers(name, num_classes=1000, left_out=None, **options):
    """{library: model}, ours first; those whose names can be mapped have its weights.

    A library that is missing is left out, with the reason in `left_out`.
    """
    # timm's Swin drops paths by default
    options = dict(num_classes=num_classes, drop_path_rate=0.0) | options
    ours = attnlib.create_model(name, **options)
    makers = {"timm": partial(timing.timm_like, ours, name, options)}
    for library, maker in PEERS.get(name.split("_")[0], {}).items():
        makers[library] = partial(maker, ours)
    left_out = {} if left_out is None else left_out
    return {OURS: ours, **timing.attempt_all(makers, left_out)}


def image_size(ours):
    return (ours.pixel_embed if hasattr(ours, "pixel_embed") else ours.patch_embed).img_size[0]


def check(name, options):
    """The largest difference of each peer's logits from ours, where its names can be mapped."""
    torch.manual_seed(0)
    models = peers(name, **options)
    size = image_size(models[OURS])
    found = {}
    x = torch.randn(2, 3, size, size)
    for library, model in list(models.items())[1:]:
        own = attnlib.create_model(name, **options)
        source = model.model if isinstance(model, Logits) else model
        try:
            attnlib.load_pretrained(own, source.state_dict())
        except ValueError:
            continue  # vit-pytorch has a norm more: of the same size, but not the same function
        with torch.no_grad():
            found[library] = (own.eval()(x) - model.eval()(x)).abs().max().item()
            assert found[library] < 1e-3, (library, found[library])
    return found


# --- what is timed ----------------------------------------------------------------------------


def forward(model, images, dtype):
    def call():
        with torch.inference_mode():
            model(next(images).to(dtype))

    return call


def training(model, images, dtype, device):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

    def call():
        x = next(images)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            logits = model(x)
        logits = logits[0] if isinstance(logits, tuple) else logits
        F.cross_entropy(
            logits.float(), torch.arange(len(x), device=device) % logits.shape[1]
        ).backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def has_kernels(device):
    """Whether our model takes part with its kernels, too."""
    return device == "cuda" and find_spec("triton") is not None


def under(backend, call):
    """A call with a backend of our attention."""

    def run():
        with attention_backend(backend):
            return call()

    return run


def with_kernels(model):
    """Our model with a kernel for its windows, if it has any; the weights are the same."""
    if not isinstance(model, SwinTransformer):
        return model
    from attnlib import windows  # not above: it needs Triton

    return windows.fuse_swin(model, trainable=True)


def contestants(name, mode, kind, device, compiled, options, left_out):
    """{library: its model on the device}, in the dtype of the mode where it evaluates."""
    dtype = MODES[mode][1]
    models = peers(name, left_out=left_out, **options)
    if compiled:  # to compile takes minutes
        models = {library: models[library] for library in (OURS, "timm") if library in models}
    models = timing.attempt_all(
        {library: partial(model.to, device) for library, model in models.items()}, left_out
    )
    ours = models.get(OURS)
    kernels = has_kernels(device)
    if ours is not None and kernels:
        models[OPTIMIZED] = with_kernels(ours)
    fuses = isinstance(ours, SwinTransformer) if kernels else device == "cpu"
    if ours is not None and kind == "forward" and not compiled and fuses:
        copies = {OPTIMIZED: lambda: optimize_for_inference(ours.to(dtype))}
        models |= timing.attempt_all(copies, left_out)
    for library in models:
        model = models[library]
        models[library] = model.to(dtype).eval() if kind == "forward" else model.train()
    return models


def backend_of(library, device):
    return "triton" if has_kernels(device) and library == OPTIMIZED else "auto"


def compare(models, name, mode, x, device, left_out):
    """Raise where the logits differ, on this device and in this precision.

    A model that fails is taken out.
    """
    dtype = MODES[mode][1]

    @torch.inference_mode()
    def logits(library):
        with attention_backend(backend_of(library, device)):
            return models[library](x.to(dtype)).float()

    some = [library for library in (OURS, OPTIMIZED, "timm") if library in models]
    found = timing.attempt_all(
        {library: partial(logits, library) for library in some}, left_out
    )
    for library in some:
        if library not in found:
            del models[library]
    wanted = found.get("timm", found.get(OURS))
    for library, own in found.items():
        difference = (own - wanted).abs().max()
        allowed = (1e-3 if mode == "float32" else 0.05) * wanted.abs().max()
        assert difference < allowed, (name, mode, library, difference)


def measure(name, mode, kind, batch, device, repeats, compiled, options, left_out):
    precision, dtype = MODES[mode]
    torch.set_float32_matmul_precision(precision)
    models = contestants(name, mode, kind, device, compiled, options, left_out)
    if not models:
        raise RuntimeError("no model is on the device")
    size = image_size(attnlib.create_model(name, **options))
    pool = [torch.randn(batch, 3, size, size, device=device) for _ in range(3)]
    if kind == "forward":
        compare(models, name, mode, pool[0], device, left_out)
    calls = {}
    for library, model in models.items():
        model = torch.compile(model) if compiled else model
        images = itertools.cycle(pool)
        call = (
            forward(model, images, dtype)
            if kind == "forward"
            else training(model, images, dtype, device)
        )
        calls[library] = under(backend_of(library, device), call)
    memory = timing.memories(calls, device, left_out)  # which warms up, too
    calls = {library: calls[library] for library in memory}
    graphs = (OURS, OPTIMIZED, "timm") if kind == "forward" and not compiled else ()
    rows = timing.measured(calls, repeats, device, graphs=graphs, left_out=left_out)
    for library, row in rows.items():
        print(
            f"{name} {mode:16} {kind:8} batch {batch:3} "
            f"{'compiled' if compiled else 'eager':8} {library:14} "
            f"{row['ms']:9.1f} ms   {timing.told(row, OURS)}",
            flush=True,
        )
    return [
        {"library": library, "memory": memory[library], **row} for library, row in rows.items()
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner.add_timing_options(parser, repeats=9)
    parser.add_argument("--models", nargs="+", default=["vit_small_patch16_224"])
    parser.add_argument(
        "--batch", type=int, nargs="+", help="8 on a CPU; 128, 64 and 1 on a GPU"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--passes", nargs="+", choices=["forward", "training"], default=["forward", "training"]
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="time ours and timm's compiled as well, at the largest batch",
    )
    parser.add_argument("--name", default="vision", help="name of the record")
    arguments = parser.parse_args()
    differences = {}
    device = arguments.device
    repeats = arguments.repeats
    timing.own_stream(device)
    batches = arguments.batch or ([128, 64, 1] if device == "cuda" else [8])
    token = any(name.startswith(("vit", "deit", "tnt")) for name in arguments.models)
    path = arguments.out and arguments.out / f"{arguments.name}_{device}.json"
    skipped = {"skipped": SKIPPED} if token else {}
    record = dict(differences=differences, **skipped)
    bench = runner.Rows(path, device, arguments.minutes, arguments.tiny, **record)

    def go(name, options, compiled):
        for mode, kind, batch in itertools.product(arguments.modes, arguments.passes, batches):
            if compiled and batch < max(batches):
                continue
            setting = {"model": name, "mode": mode, "pass": kind, "batch": batch}
            setting["compiled"] = compiled
            rest = (batch, device, repeats, compiled, options)
            bench.once(setting, partial(measure, name, mode, kind, *rest))

    def all_models():
        for name in arguments.models:
            options = dict(TINY[name.split("_")[0]], num_classes=4) if arguments.tiny else {}
            found = bench.guarded(dict(model=name), partial(check, name, options))
            differences[name] = found
            print(name, "largest difference of logits with the same weights:", found)
            for compiled in (False, True)[: 1 + arguments.compile]:
                go(name, options, compiled)

    bench.work(all_models)


if __name__ == "__main__":
    main()
