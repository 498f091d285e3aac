"""What was run for 53_inference: `python -m benchmarks.inference COMMAND --out FOLDER`.

    speed  time what an optimized copy gains, piece by piece

`benchmarks.runner` says how runs are resumed and recorded.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import attnlib
from attnlib import inference
from attnlib.decoding import greedy
from attnlib.inference import PackedLinear, optimize_for_inference
from attnlib.swin import WindowAttention
from attnlib.swinv2 import WindowAttentionV2
from attnlib.transformer import CrossAttention, FeedForward, SelfAttention
from attnlib.vit import Mlp
from benchmarks import runner, timing
from benchmarks.runner import Commands
from benchmarks.timing import OPTIMIZED, OURS
from benchmarks.vision import TINY

PARTS = ("models", "decoding")
MODELS = {  # name: batch
    "vit_small_patch16_224": 8,
    "swin_tiny_patch4_window7_224": 4,
    "swinv2_tiny_window8_256": 4,
    "tnt_s_patch16_224": 4,
}
MODES = {  # name: (dtype, environment)
    "float32": (torch.float32, {}),
    "float32, MKL AVX2": (torch.float32, {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
    "bfloat16": (torch.bfloat16, {}),
}
PIECES = {  # name: what is not replaced without it; the others are in `without`
    "packed weights": (),
    "GELU inside the product": (Mlp,),
    "windows": (WindowAttention, WindowAttentionV2),
    "short last block": (),
    "attention of the decoder": (SelfAttention, CrossAttention),
    "ReLU inside the product": (FeedForward,),
}
SHAPES = ((1576, 384, 1536), (12544, 96, 384), (16, 512, 2048), (1, 512, 2048))


@contextmanager
def lacking(piece):
    """Inside, `optimize_for_inference` does not know a piece."""
    kept = dict(inference._REPLACEMENTS)
    can_pack = inference._can_pack
    for cls in PIECES[piece]:
        inference._REPLACEMENTS[cls] = lambda layer: None  # it is left as it is
    if piece == "packed weights":
        inference._can_pack = lambda dtype: False
    try:
        yield
    finally:
        inference._REPLACEMENTS.update(kept)
        inference._can_pack = can_pack


def without(piece, model):
    """An optimized copy that lacks a piece, or None if the model has nothing of it."""
    with lacking(piece):
        fast = optimize_for_inference(model)
    if piece == "short last block":
        return fast if vars(fast).pop("forward", None) else None
    classes = {type(module) for module in model.modules()}
    return fast if piece == "packed weights" or classes & set(PIECES[piece]) else None


def rows(times, **what):
    """A row for each contestant, with its time over that of the optimized copy."""
    found = []
    for name in times:
        row = {**what, "name": name, **timing.compared(times, name)}
        row["slower"] = timing.ratio(times[name], times[OPTIMIZED])
        found.append(row)
        low, high = row["optimized"]["quartiles"]
        print(
            f"{' '.join(map(str, what.values())):52} {name:34} {row['ms']:9.1f} ms   "
            f"optimized / it {row['optimized']['ratio']:.3f} [{low:.3f}, {high:.3f}]",
            flush=True,
        )
    return found


# --- products ---------------------------------------------------------------------------------


def products(dtype, repeats):
    """GFLOP/s of products as they are and with packed weights: the roof of this processor."""
    found = []
    for count, width, out in SHAPES:
        x = torch.randn(count, width).to(dtype)
        layer = nn.Linear(width, out).to(dtype)
        some = [PackedLinear(layer.weight, layer.bias, f) for f in ("none", "gelu")]
        calls = {
            "plain": lambda: layer(x),
            "packed": lambda: some[0](x),
            "plain, then GELU": lambda: F.gelu(layer(x)),
            "packed, GELU inside": lambda: some[1](x),
        }
        with torch.inference_mode():
            times = timing.take_turns(calls, 3 * repeats, "cpu")
        row = {"rows": count, "in": width, "out": out}
        for name, some_times in times.items():
            row[name] = round(2e-6 * count * width * out / min(some_times), 1)
        for name, other in (("packed", "plain"), ("packed, GELU inside", "plain, then GELU")):
            row[f"{name} / {other}"] = timing.ratio(times[name], times[other])
        found.append(row)
        print(row, flush=True)
    return found


# --- vision -----------------------------------------------------------------------------------


def onnx_runtime(model, x):
    """A function that calls the model by ONNX Runtime, with as many threads as PyTorch has."""
    import onnxruntime

    stored = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), stored, dynamo=False, opset_version=17)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        stored.getvalue(), options, providers=["CPUExecutionProvider"]
    )
    name = session.get_inputs()[0].name
    return lambda: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def contestants(ours, theirs, x, mode, compiled):
    """{name: a function that computes the logits of x}."""

    def call(model):
        def logits():
            with torch.inference_mode():
                return model(x)

        return logits

    calls = {
        OURS: call(ours),
        OPTIMIZED: call(optimize_for_inference(ours)),
        "timm": call(theirs),
    }
    if mode == "float32":
        calls["ONNX Runtime"] = onnx_runtime(theirs, x)
    if compiled and mode == "float32":
        for name, options in (("compiled", None), ("compiled and frozen", {"freezing": True})):
            torch.compiler.reset()
            model = torch.compile(theirs, options=options)
            calls[f"timm, {name}"] = torch.no_grad()(lambda model=model: model(x))
            calls[f"timm, {name}"]()
    return calls


def vision(name, batch, mode, repeats, compiled, tiny):
    import timm

    small = dict(TINY[name.split("_")[0]], num_classes=4) if tiny else {}
    theirs = timm.create_model(name, drop_path_rate=0.0, **small).eval().requires_grad_(False)
    ours = attnlib.create_model(name, **small).eval().requires_grad_(False)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    dtype, _ = MODES[mode]
    ours = ours.to(dtype)
    theirs = theirs.to(dtype)
    size = small.get("img_size") or theirs.pretrained_cfg["input_size"][-1]
    x = torch.randn(batch, 3, size, size).to(dtype)
    calls = contestants(ours, theirs, x, mode, compiled)
    wanted = calls["timm"]().float()
    differences = {}
    for contestant, call in calls.items():
        differences[contestant] = (call().float() - wanted).abs().max().item()
        allowed = 1e-5 if dtype == torch.float32 else 0.05 * wanted.abs().max().item()
        assert differences[contestant] < allowed, (name, mode, contestant, differences)
    times = timing.take_turns(calls, repeats, "cpu")
    what = {"part": "models", "mode": mode, "model": name, "batch": batch}
    found = rows(times, **what)
    for row in found:
        row["difference"] = differences[row["name"]]
    pieces = {OURS: calls[OURS], OPTIMIZED: calls[OPTIMIZED]}
    with torch.inference_mode():
        for piece in PIECES:
            fast = without(piece, ours)
            if fast is not None:
                pieces[f"without {piece}"] = torch.inference_mode()(lambda f=fast: f(x))
                pieces[f"without {piece}"]()
    times = timing.take_turns(pieces, repeats, "cpu")
    return found + rows(times, **what | {"part": "pieces"})


# --- decoding ---------------------------------------------------------------------------------


def decoding(mode, repeats, tiny):
    from attnlib.translation import from_marian
    from benchmarks.transformer import END, PAD, SIZE, marian
    from benchmarks.transformer import TINY as SMALL

    size = SMALL if tiny else SIZE
    theirs = marian(size, 0.0).eval()
    theirs.final_logits_bias.normal_(generator=torch.Generator().manual_seed(1))
    theirs.final_logits_bias[0, [END, PAD]] = -1e4  # no sentence ends
    theirs.to(MODES[mode][0])
    ours = from_marian(theirs.config, theirs.state_dict()).eval()
    found = []
    copies = {f"without {piece}": without(piece, ours) for piece in PIECES}
    copies = {OPTIMIZED: optimize_for_inference(ours), **copies}
    for batch in (1, size["batch"]):
        length = size["length"]
        generator = torch.Generator().manual_seed(2)
        src = torch.randint(2, size["vocab"], (batch, length), generator=generator)
        options = dict(max_new_tokens=length, num_beams=1, do_sample=False)
        options["attention_mask"] = torch.ones_like(src)

        def decode(model):
            return lambda: greedy(model, src, length, bos_id=PAD, eos_id=END)

        calls = {OURS: decode(ours)}
        calls |= {name: decode(model) for name, model in copies.items() if model is not None}
        calls["Marian"] = lambda: theirs.generate(src, **options)[:, 1:]
        tokens = {name: call() for name, call in calls.items()}
        same = {
            name: (x == tokens["Marian"]).float().mean().item() for name, x in tokens.items()
        }
        assert min(same.values()) > 0.9, same
        if mode != "bfloat16":
            assert min(same.values()) == 1, same
        times = timing.take_turns(calls, repeats, "cpu")
        found += rows(times, part="decoding", mode=mode, model="base", batch=batch)
    return found


# --- all of it --------------------------------------------------------------------------------


def measure(mode, arguments):
    """The record of one mode, in this process."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    found = {"products": products(MODES[mode][0], arguments.repeats), "rows": []}
    for name in arguments.models:
        batch = 2 if arguments.tiny else MODELS[name]
        found["rows"] += vision(
            name, batch, mode, arguments.repeats, arguments.compile, arguments.tiny
        )
    if "decoding" in arguments.parts:
        found["rows"] += decoding(mode, max(2, arguments.repeats // 2), arguments.tiny)
    return found


def speed(arguments):
    """Time what an optimized copy gains, piece by piece.

    "models" times the vision models in evaluation next to timm's, as it is, compiled, and
    compiled with freezing, and next to ONNX Runtime; and the optimized copy next to copies that
    lack one piece each. "decoding" times 64 tokens, greedily, next to `generate` of the
    transformers library, and without a piece. Weights are copied, outputs compared, and all
    take turns. The record is FOLDER/inference_cpu.json.

    The mode "float32, MKL AVX2" asks MKL, by an environment variable, for the instructions that
    it takes on processors of other makers than Intel: a stand-in for such a processor, no more.
    """
    if "models" not in arguments.parts:
        arguments.models = []
    if arguments.worker:
        found = measure(arguments.modes[0], arguments)
        arguments.worker.write_text(json.dumps(found), encoding="utf-8")
        return
    record = {"mode": {}, "rows": []}
    for mode in arguments.modes:  # each in a process of its own, which has its environment
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.json"
            command = [sys.executable, "-m", "benchmarks.inference", "speed"]
            command += ["--worker", str(path)]
            command += ["--modes", mode, "--repeats", str(arguments.repeats)]
            command += ["--parts", *arguments.parts, "--models", *arguments.models]
            command += ["--tiny"] * arguments.tiny + ["--compile"] * arguments.compile
            subprocess.run(command, check=True, env={**os.environ, **MODES[mode][1]})
            found = json.loads(path.read_text(encoding="utf-8"))
        record["mode"][mode] = {"products": found["products"], "environment": MODES[mode][1]}
        record["rows"] += found["rows"]
    if arguments.out:
        runner.write(arguments.out, "inference", "cpu", record)


def main(arguments=None):
    commands = Commands(__doc__)
    parser = commands.timing("speed", speed, repeats=15)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--compile", action="store_true", help="also torch.compile, minutes")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # where a mode's goes
    commands.run(arguments)


if __name__ == "__main__":
    main()
