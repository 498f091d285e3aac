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
from benchmarks import common
from benchmarks.common import OPTIMIZED, OURS

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


def vit_peers(ours):
    import torchvision
    import transformers

    width, depth, heads = ours.embed_dim, len(ours.blocks), ours.blocks[0].attn.num_heads
    patch, size, hidden = (
        ours.patch_embed.patch_size[0],
        ours.patch_embed.img_size[0],
        4 * ours.embed_dim,
    )
    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=hidden,
        image_size=size,
        patch_size=patch,
        layer_norm_eps=1e-6,
        num_labels=ours.num_classes,
        attn_implementation="sdpa",
    )
    found = {
        "torchvision": torchvision.models.VisionTransformer(
            size, patch, depth, heads, width, hidden, num_classes=ours.num_classes
        ),
        "transformers": Logits(transformers.ViTForImageClassification(config)),
    }
    try:
        import vit_pytorch
    except ModuleNotFoundError:  # the other peers are timed without it
        return found
    return found | {
        "vit-pytorch": vit_pytorch.ViT(
            image_size=size,
            patch_size=patch,
            num_classes=ours.num_classes,
            dim=width,
            depth=depth,
            heads=heads,
            mlp_dim=hidden,
            dim_head=width // heads,
        )
    }


def swin_peers(ours):
    import transformers

    return both_swin_peers(
        ours, transformers.SwinConfig, transformers.SwinForImageClassification
    )


def swinv2_peers(ours):
    import transformers
    from torchvision.models import swin_transformer

    return both_swin_peers(
        ours,
        transformers.Swinv2Config,
        transformers.Swinv2ForImageClassification,
        block=swin_transformer.SwinTransformerBlockV2,
        downsample_layer=swin_transformer.PatchMergingV2,
    )


def both_swin_peers(ours, config_class, model_class, **options):
    """Swin of either version; `options` are torchvision's."""
    from torchvision.models import SwinTransformer

    depths = [len(stage.blocks) for stage in ours.layers]
    heads = [stage.blocks[0].attn.num_heads for stage in ours.layers]
    size, window = ours.patch_embed.img_size[0], ours.layers[0].blocks[0].attn.window_size[0]
    config = config_class(
        image_size=size,
        embed_dim=ours.embed_dim,
        depths=depths,
        num_heads=heads,
        window_size=window,
        drop_path_rate=0.0,
        num_labels=ours.num_classes,
    )
    return {
        "torchvision": SwinTransformer(
            [4, 4],
            ours.embed_dim,
            depths,
            heads,
            [window, window],
            num_classes=ours.num_classes,
            stochastic_depth_prob=0.0,
            **options,
        ),
        "transformers": Logits(model_class(config)),
    }


def peers(name, num_classes=1000, **options):
    """{library: model}, ours first; those whose names can be mapped have its weights."""
    import timm

    # timm's Swin drops paths by default
    options = dict(num_classes=num_classes, drop_path_rate=0.0) | options
    theirs, ours = timm.create_model(name, **options), attnlib.create_model(name, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    makers = {"vit": vit_peers, "swin": swin_peers, "swinv2": swinv2_peers}
    others = makers.get(name.split("_")[0], lambda ours: {})(ours)
    return {"attnlib": ours, "timm": theirs, **others}


def image_size(ours):
    return (ours.pixel_embed if hasattr(ours, "pixel_embed") else ours.patch_embed).img_size[0]


def check(models, name, size, options):
    """The largest difference of each peer's logits from ours, where its names can be mapped."""
    found, x = {}, torch.randn(2, 3, size, size)
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


def measure(name, mode, kind, batch, device, repeats, compiled, options):
    precision, dtype = MODES[mode]
    torch.set_float32_matmul_precision(precision)
    # to compile takes minutes
    models = {
        library: model.to(device)
        for library, model in peers(name, **options).items()
        if library in ("attnlib", "timm") or not compiled
    }
    size = image_size(models[OURS])
    kernels, fused = has_kernels(device), isinstance(models[OURS], SwinTransformer)
    if kernels:
        models[OPTIMIZED] = models[OURS]
    if kind == "forward" and not compiled and (fused if kernels else device == "cpu"):
        models[OPTIMIZED] = optimize_for_inference(models[OURS].to(dtype))
    pool = [torch.randn(batch, 3, size, size, device=device) for _ in range(3)]
    calls, logits = {}, {}
    for library, model in models.items():
        model = model.to(dtype).eval() if kind == "forward" else model.train()
        backend = "triton" if kernels and library == OPTIMIZED else "auto"
        if kind == "forward" and library in (OURS, OPTIMIZED, "timm"):
            with torch.inference_mode(), attention_backend(backend):
                logits[library] = model(pool[0].to(dtype)).float()
        model = torch.compile(model) if compiled else model
        images = itertools.cycle(pool)
        call = (
            forward(model, images, dtype)
            if kind == "forward"
            else training(model, images, dtype, device)
        )
        calls[library] = under(backend, call)
    for library in logits:  # on this device, in this precision
        difference = (logits[library] - logits["timm"]).abs().max()
        allowed = (1e-3 if mode == "float32" else 0.05) * logits["timm"].abs().max()
        assert difference < allowed, (name, mode, library, difference)
    # which warms up, too
    memory = {library: common.peak_memory(call, device) for library, call in calls.items()}
    graphs = (OURS, OPTIMIZED, "timm") if kind == "forward" and not compiled else ()
    rows = common.measured(calls, repeats, device, graphs=graphs)
    for library, row in rows.items():
        print(
            f"{name} {mode:16} {kind:8} batch {batch:3} "
            f"{'compiled' if compiled else 'eager':8} {library:14} "
            f"{row['ms']:9.1f} ms   attnlib / it {row['ratio']:.3f} {row['quartiles']}",
            flush=True,
        )
    return [
        {"library": library, "memory": memory[library], **row} for library, row in rows.items()
    ]


def main():
    parser = common.timing_parser(__doc__, repeats=9)
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
    device, repeats = arguments.device, arguments.repeats
    common.own_stream(device)
    batches, differences = arguments.batch or ([128, 64, 1] if device == "cuda" else [8]), {}
    token = any(name.startswith(("vit", "deit", "tnt")) for name in arguments.models)
    path = arguments.out and arguments.out / f"{arguments.name}_{device}.json"
    skipped = {"skipped": SKIPPED} if token else {}
    bench = common.Rows(path, device, arguments.minutes, differences=differences, **skipped)

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
            torch.manual_seed(0)
            models = peers(name, **options)
            size = image_size(models["attnlib"])
            differences[name] = check(models, name, size, options)
            print(
                name,
                "largest difference of logits with the same weights:",
                differences[name],
            )
            for compiled in (False, True)[: 1 + arguments.compile]:
                go(name, options, compiled)

    bench.work(all_models)


if __name__ == "__main__":
    main()
