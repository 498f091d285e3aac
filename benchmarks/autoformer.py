"""What was run for 44_autoformer: `python -m benchmarks.autoformer COMMAND --out FOLDER`.

    supernets  train supernets of 22,140 small networks in three ways
    ranking    train subnets alone, and compare them with what they inherit
    repeats    repeat the ranking with a second seed
    scenes     train supernets on a second task
    search     search under three budgets by evolution and at random
    speed      time slicing and extracting

The digits stand at one of nine positions of a canvas of 10 × 10 pixels. Of the training digits,
300 are for validation; the test digits are used for the report alone. "ranking" needs the
record of "supernets"; "repeats" and "search" need both.

The record, FOLDER/autoformer_COMMAND.json, is written after every run; the weights of one
supernet go to FOLDER/autoformer_digits.safetensors, all others to FOLDER/checkpoints. `longer`
trains on a GPU (`python -m benchmarks.runs supernet`).
"""

import itertools
import time
from functools import partial

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from attnlib import autoformer
from attnlib.attention import attention
from attnlib.autoformer import (
    SPACES,
    Attention,
    ClassicalSharing,
    Space,
    Subnet,
    SuperTransformer,
    evolutionary_search,
    extract,
    parameter_count,
    sample_subnet,
)
from attnlib.data import caption_scenes, digits, small_images
from attnlib.multihead import merge_heads
from attnlib.recipes import classification_loss, crop_and_flip
from attnlib.train import fit, shuffled_batches
from attnlib.vit import VisionTransformer
from benchmarks import runner, timing
from benchmarks.chapter import run_cells
from benchmarks.runner import Commands, Runs

page = run_cells("44_autoformer", "random-search", "small", "losses", modules=[autoformer])
SEEDS = (0, 1, 2)
RATES = (2e-3, 4e-3, 8e-3)
BATCH = 64
STEPS = {"uniform": 2000, "classical": 2000, "sandwich": 600}
ALONE = 800  # steps of a network that is trained alone
# how many subnets are judged, and trained alone
CLOUD = 60
SPREAD = 12
EQUAL = 12
BUDGETS = (15_000, 24_000, 50_000)
SAME_SIZE = (22_000, 24_000)
EVOLUTION = dict(population=20, generations=5, parents=6, crossovers=7, mutations=7)
PARTS = ("valid", "test")  # of the digits, on which networks are judged
LOSSES = {
    "uniform": page.uniform_loss,
    "sandwich": page.sandwich_loss,
    "classical": page.uniform_loss,
}


# --- digits, scores ---------------------------------------------------------------------------
def parts(tiny):
    """Digits at all places to train and to test, at three of them to validate."""
    (x, y) = digits("train")
    (unseen, answers) = digits("test")
    count = 20 if tiny else 300
    if tiny:
        x = x[:60]
        y = y[:60]
        unseen = unseen[:10]
        answers = answers[:10]
    return {
        "train": page.shifted_digits(x[count:], y[count:]),
        "valid": page.shifted_digits(x[:count], y[:count], every=4),
        "test": page.shifted_digits(unseen, answers),
    }


def scene_parts(tiny):
    """Scenes and the thing that their caption names first, one of 24; unseen pairs to test."""
    counts = (80, 20, 10) if tiny else (8000, 500, 1000)
    found = {}
    for part, split, count in zip(("train", *PARTS), ("train", "train", "test"), counts):
        scenes = caption_scenes(count, split, seed=part == "valid")
        labels = 4 * scenes["color"][:, 0] + scenes["kind"][:, 0]
        found[part] = 2 * scenes["image"] - 1, labels
    return found


@torch.no_grad()
def judged(model, data, *subnet):
    """Mean loss and accuracy of a network, or of a supernet's subnet."""
    images, labels = data
    device = next(model.parameters()).device
    logits = [model.eval()(x.to(device), *subnet).cpu() for x in images.split(300)]
    logits = torch.cat(logits)
    right = (logits.argmax(1) == labels).float().mean()
    loss = F.cross_entropy(logits, labels)
    return dict(loss=round(loss.item(), 4), accuracy=round(right.item(), 4))


SUPERNET = page.small_supernet()
SCENES = dict(img_size=32, patch_size=4, num_classes=24, in_chans=3)


def size(subnet, supernet=SUPERNET):
    """Its number of parameters."""
    return parameter_count(supernet, subnet)


def described(subnet):
    """A subnet as a record keeps it."""
    return dict(
        embed_dim=subnet.embed_dim,
        num_heads=list(subnet.num_heads),
        mlp_ratio=list(subnet.mlp_ratio),
    )


def read(entry):
    """The subnet of such a description."""
    return Subnet(entry["embed_dim"], tuple(entry["num_heads"]), tuple(entry["mlp_ratio"]))


class Look:
    """What is asked on the way of a supernet: its ends, and the mean of some subnets.

    The seconds are those of the training alone, of this process.
    """

    def __init__(self, data, subnets):
        self.data = data
        self.subnets = subnets
        self.seconds = 0.0
        self.began = time.process_time()

    def __call__(self, model):
        self.seconds += time.process_time() - self.began
        ends = dict(smallest=model.space.smallest(), largest=model.space.largest())
        found = {k: judged(model, self.data, s)["accuracy"] for k, s in ends.items()}
        some = [judged(model, self.data, s)["accuracy"] for s in self.subnets]
        self.began = time.process_time()
        mean = round(sum(some) / len(some), 4)
        return {"seconds": round(self.seconds, 1), "mean": mean, **found}


# --- the runs ---------------------------------------------------------------------------------
class Supernets(Runs):
    """The runs of the record of a part."""

    def __init__(self, path, minutes, tiny, part):
        super().__init__(
            path, minutes, runs=[], searches=[], everything=[], alone=[], inherited=[]
        )
        self.tiny = tiny
        self.part = part
        self.shape = SCENES if part == "scenes" else {}
        self.data = scene_parts(tiny) if part == "scenes" else parts(tiny)
        self.steps = dict.fromkeys(STEPS, 4) if tiny else STEPS
        if tiny:
            self.seeds = SEEDS[:1]
            self.rates = RATES[:2]
        else:
            self.seeds = SEEDS
            self.rates = RATES
        self.space = SUPERNET.space
        draws = [sample_subnet(self.space, seed) for seed in range(4000)]
        unlike = list(dict.fromkeys(draws))
        low, high = SAME_SIZE
        same = [s for s in unlike if low <= size(s) <= high]
        self.cloud = unlike[: 4 if tiny else CLOUD]
        self.groups = {
            "spread": unlike[: 3 if tiny else SPREAD],
            "equal": same[: 2 if tiny else EQUAL],
        }

    def checkpoint(self, name):
        """The path of a file that a later part or a command which goes on will need."""
        return self.path.parent / "checkpoints" / f"autoformer-{name}.safetensors"

    def before(self, part):
        """Another part, to look up what it has chosen; it makes no run."""
        return Supernets(self.path.with_name(f"autoformer_{part}.json"), 0, self.tiny, part)

    # supernets

    def new(self, kind):
        sharing = ClassicalSharing if kind == "classical" else SuperTransformer
        return page.small_supernet(sharing, **self.shape)

    def trained(self, kind, seed, lr, steps):
        """A trained supernet and its history."""
        torch.manual_seed(seed)
        model = self.new(kind)
        look = Look(self.data["valid"], self.cloud[:12])
        history = fit(
            model,
            shuffled_batches(*self.data["train"], batch_size=BATCH, seed=seed),
            loss_fn=LOSSES[kind],
            **dict(steps=steps, lr=lr, warmup=steps // 10, betas=(0.9, 0.999), seed=seed),
            **dict(weight_decay=0.05, log_every=max(2, steps // 8), evaluate=look),
        )
        return model, history

    def run(self, kind, seed, lr, times=1):
        """The entry of a supernet: its history, and the scores of many subnets."""
        steps = times * self.steps[kind]

        def make():
            model, history = self.trained(kind, seed, lr, steps)
            weights = {key: x.contiguous() for key, x in model.state_dict().items()}
            if self.part == "supernets":
                save_file(weights, self.checkpoint(f"{kind}-{seed}-{lr}-{steps}"))
            entangled = self.new("uniform")
            cloud = [
                dict(parameters=size(s, entangled), **judged(model, self.data["valid"], s))
                for s in self.cloud
            ]
            test = [judged(model, self.data["test"], s)["accuracy"] for s in self.cloud[:12]]
            return dict(
                parameters=sum(p.numel() for p in model.parameters()),
                valid=round(sum(row["accuracy"] for row in cloud) / len(cloud), 4),
                test=round(sum(test) / len(test), 4),  # of twelve
                seconds=history[-1]["seconds"],
                cloud=cloud,
                history=history,
            )

        return self.once(dict(kind=kind, seed=seed, lr=lr, steps=steps), make)

    def best_rate(self, kind):
        tried = {lr: self.run(kind, self.seeds[0], lr)["valid"] for lr in self.rates}
        return max(tried, key=tried.get)

    def supernets(self):
        """Each kind with its best rate and all seeds, and a longer run of the first."""
        for kind in self.steps:
            rate = self.best_rate(kind)
            for seed in self.seeds:
                self.run(kind, seed, rate)
            if kind == "uniform":
                first = self.checkpoint(f"{kind}-{self.seeds[0]}-{rate}-{self.steps[kind]}")
                weights = {key: x.half() for key, x in load_file(first).items()}
                save_file(weights, self.path.with_name("autoformer_digits.safetensors"))
        self.run("uniform", self.seeds[0], self.best_rate("uniform"), times=4)

    def scenes(self):
        for kind in ("uniform", "classical"):
            rate = self.best_rate(kind)
            for seed in self.seeds:
                self.run(kind, seed, rate)
            self.run(kind, self.seeds[0], rate, times=4)

    def stored(self, kind, times=1):
        """The trained supernets of a kind, by their files: pairs of settings and model."""
        rate = self.before("supernets").best_rate(kind)
        steps = times * self.steps[kind]
        for seed in self.seeds[: 1 if times > 1 else None]:
            path = self.checkpoint(f"{kind}-{seed}-{rate}-{steps}")
            model = self.new(kind)
            model.load_state_dict(load_file(path))
            yield dict(kind=kind, supernet=seed, times=times), model

    # ranking

    def alone(self, subnet, seed, lr, steps, group):
        """The entry of a subnet that is trained alone, from the start."""

        def make():
            torch.manual_seed(seed)
            model = extract(page.small_supernet(), subnet)
            began = time.process_time()
            history = fit(
                model,
                shuffled_batches(*self.data["train"], batch_size=BATCH, seed=seed),
                loss_fn=classification_loss,
                **dict(steps=steps, lr=lr, warmup=steps // 10, betas=(0.9, 0.999), seed=seed),
                **dict(weight_decay=0.05, log_every=steps),
            )
            scores = {part: judged(model, self.data[part]) for part in PARTS}
            seconds = round(time.process_time() - began, 1)
            loss = round(history[-1]["loss"], 4)
            return dict(parameters=size(subnet), **scores, seconds=seconds, loss=loss)

        what = dict(subnet=described(subnet), seed=seed, lr=lr, steps=steps, group=group)
        return self.once(what, make, "alone")

    def alone_steps(self):
        return 4 if self.tiny else ALONE

    def alone_rates(self):
        """The best rate for one network of each width: the smallest, the largest, one between.

        All networks of the width take it.
        """
        spread = sorted(self.groups["spread"], key=lambda s: (s.embed_dim, size(s)))
        tuned = (
            ("spread", spread[0]),
            ("spread", spread[-1]),
            ("equal", self.groups["equal"][0]),
        )
        best = {}
        for group, s in tuned:
            rows = {lr: self.alone(s, 0, lr, self.alone_steps(), group) for lr in self.rates}
            best[s.embed_dim] = max(rows, key=lambda lr: rows[lr]["valid"]["accuracy"])
        return best

    def inherit(self, kind, times=1):
        """The scores of all those subnets with the weights of the supernets of a kind."""
        for what, model in self.stored(kind, times):

            def scores(subnet, model=model):
                found = {part: judged(model, self.data[part], subnet) for part in PARTS}
                return dict(subnet=described(subnet), **found)

            def make(scores=scores):
                return {group: list(map(scores, some)) for group, some in self.groups.items()}

            self.once(what, make, "inherited")

    def ranking(self):
        self.inherit("uniform")
        rates = self.alone_rates()
        steps = self.alone_steps()
        for group, subnets in self.groups.items():
            for s in subnets:
                self.alone(s, 0, rates[s.embed_dim], steps, group)

    def repeats(self):
        """What the networks inherit elsewhere; the same with a second seed, some for longer."""
        self.inherit("sandwich")
        self.inherit("uniform", times=4)
        rates = self.before("ranking").alone_rates()
        steps = self.alone_steps()
        for seed, times, group in ((1, 1, "equal"), (0, 2, "spread"), (1, 1, "spread")):
            for s in self.groups[group]:
                self.alone(s, seed, rates[s.embed_dim], times * steps, group)

    # search

    def search(self):
        scored = []
        for what, model in self.stored("uniform"):
            scores = {}

            def score(subnet, model=model, scores=scores):
                if subnet not in scores:
                    scores[subnet] = judged(model, self.data["valid"], subnet)["accuracy"]
                return scores[subnet]

            scored.append((what["supernet"], model, score))
        for (supernet, model, score), budget in itertools.product(scored, BUDGETS):
            self.searched(supernet, model, score, budget)
        supernet, model, score = scored[0]
        self.once(
            dict(supernet=supernet, budget=BUDGETS[0]),
            lambda: self.all_within(score, BUDGETS[0]),
            "everything",
        )
        self.retrain()

    def searched(self, supernet, model, score, budget, seed=0):
        """Evolution, and random search with as many evaluations."""
        options = dict(max_params=budget, seed=seed)
        small = dict(population=6, generations=2, parents=2, crossovers=2, mutations=2)
        evolution = small if self.tiny else EVOLUTION
        what = dict(supernet=supernet, budget=budget, seed=seed)
        evaluations = 0
        for method in ("evolution", "random"):

            def make(method=method, evaluations=evaluations):
                best, history = (
                    evolutionary_search(score, model, **evolution, **options)
                    if method == "evolution"
                    else page.random_search(score, model, evaluations=evaluations, **options)
                )
                return dict(
                    subnet=described(best),
                    parameters=size(best),
                    valid=score(best),
                    test=judged(model, self.data["test"], best)["accuracy"],
                    scores=[row[1] for row in history],
                )

            entry = self.once(dict(method=method, **what), make, "searches")
            evaluations = len(entry["scores"])

    def all_within(self, score, budget):
        """The accuracies of all subnets of a budget."""
        fit_in = [s for s in self.space.subnets() if size(s) <= budget]
        fit_in = fit_in[:5] if self.tiny else fit_in
        rows = sorted(((score(s), size(s)) for s in fit_in), reverse=True)
        return dict(scores=[a for a, _ in rows], parameters=[n for _, n in rows])

    def retrain(self):
        """What evolution found of the size of the second group, trained alone."""
        rates = self.before("ranking").alone_rates()
        budget = SAME_SIZE[1]
        for supernet in self.seeds:
            what = dict(method="evolution", supernet=supernet, budget=budget, seed=0)
            (row,) = (row for row in self.record["searches"] if what.items() <= row.items())
            subnet = read(row["subnet"])
            group = f"evolution {supernet} {budget}"
            self.alone(subnet, 0, rates[subnet.embed_dim], self.alone_steps(), group)


def longer(folder, tiny, data="digits"):
    """A supernet for a GPU (see `benchmarks.runs`): digits for longer, or "cifar10"."""
    if data == "digits":
        train, test = (page.shifted_digits(*digits(part)) for part in ("train", "test"))
        torch.manual_seed(0)
        model = page.small_supernet()

        def augment(images):
            return images

        steps = 20_000
    else:
        train, test = small_images(data)
        space = Space((128, 192, 256), (6, 8, 10), (2, 3, 4), (2, 3, 4))
        shape = dict(img_size=32, patch_size=4, num_classes=10)
        torch.manual_seed(0)
        model = SuperTransformer(space, **shape)
        augment = crop_and_flip
        steps = 40_000
    if tiny:
        steps = 2
        batch = 4
        count = 2
    else:
        steps = steps
        batch = 256
        count = 100
    test = tuple(x[:20] for x in test) if tiny else test
    history = fit(
        model,
        shuffled_batches(*train, batch_size=batch),
        loss_fn=lambda model, batch: page.uniform_loss(model, (augment(batch[0]), batch[1])),
        **dict(steps=steps, lr=1e-3, warmup=steps // 10, betas=(0.9, 0.999)),
        **dict(weight_decay=0.05, log_every=max(1, steps // 10)),
        checkpoint=folder / "autoformer.json",
    )
    space = model.space
    subnets = [
        space.smallest(),
        space.largest(),
        *(sample_subnet(space, i) for i in range(count)),
    ]
    rows = [dict(subnet=described(s), **judged(model, test, s)) for s in subnets]
    return dict(data=data, history=history, subnets=rows)


# --- speed -----------------------------------------------------------------------------------

DRAWS = 3  # subnets of a round of training steps


def supernet(tiny):
    torch.manual_seed(0)
    return SuperTransformer(SPACES["tiny"], img_size=32 if tiny else 224)


def step_calls(tiny, device):
    """A round of each has `DRAWS` steps; of all rounds the same subnets."""
    model = supernet(tiny).to(device)
    subnets = [sample_subnet(model.space, seed) for seed in range(1 if tiny else DRAWS)]
    fixed = [extract(model, subnet) for subnet in subnets]
    images = torch.randn(1 if tiny else 4, 3, *model.patch_embed.img_size, device=device)

    def step(network, *subnet):
        network.zero_grad()
        network(images, *subnet).logsumexp(1).sum().backward()

    return {
        "random subnet": lambda: [step(model, subnet) for subnet in subnets],
        "random subnet, extracted": lambda: [step(network) for network in fixed],
        "largest subnet": lambda: [step(model) for _ in subnets],
    }


def bare(attn, x, _=None):
    """The attention without relative positions."""
    return attn.proj(merge_heads(attention(*attn.project(x, attn.num_heads))))


def forward_calls(tiny, device):
    model = supernet(tiny).to(device).eval()
    subnet = Subnet(192, (3,) * 12, (4,) * 12)
    fixed = extract(model, subnet).eval()
    size = model.patch_embed.img_size
    without = extract(model, subnet).eval()
    for block in without.blocks:
        block.attn.forward = partial(bare, block.attn)
    shape = dict(embed_dim=192, depth=12, num_heads=3, global_pool="avg")
    vit = VisionTransformer(size, 16, **shape).to(device).eval()
    images = torch.randn(1 if tiny else 4, 3, *size, device=device)
    return {
        "sliced": lambda: model(images, subnet),
        "extracted": lambda: fixed(images),
        "extracted, no relative positions": lambda: without(images),
        "ViT": lambda: vit(images),
    }


def dense(attn, x):
    """The attention with the vectors of all pairs of tokens, as the authors' code has it."""
    q, k, v = attn.project(x, attn.num_heads)  # (B, h, N, d) each
    widths = attn.rows.shape[1], attn.columns.shape[1]
    row, column = (part.int().argmax(1) for part in attn.places.split(widths, dim=1))
    R_k, R_v = (
        table.vertical[attn.rows[:, row]] + table.horizontal[attn.columns[:, column]]
        for table in (attn.rel_k, attn.rel_v)
    )  # (N, N, d)
    logits = q @ k.mT + torch.einsum("bhnd,nmd->bhnm", q, R_k)
    weights = (logits * attn.head_dim**-0.5).softmax(-1)
    out = weights @ v + torch.einsum("bhnm,nmd->bhnd", weights, R_v)
    return attn.proj(merge_heads(out))


def attention_calls(tiny, device):
    torch.manual_seed(0)
    side = 4 if tiny else 14
    attn = Attention(384, 6, grid_size=(side, side)).to(device)
    x = torch.randn(1 if tiny else 8, 1 + side**2, 384, device=device)
    return {"rows and columns": lambda: attn(x), "all pairs": lambda: dense(attn, x)}


GROUPS = {
    "training step": step_calls,
    "forward": forward_calls,
    "attention": attention_calls,
}


def measure(group, arguments, clock, left_out):
    """A row for each contestant of a group, with its ratio to the last of them."""
    device = arguments.device
    with torch.set_grad_enabled(group == "training step"):
        calls = GROUPS[group](arguments.tiny, device)
        times = timing.warm_turns(calls, arguments.repeats, device, left_out, clock)
    *_, last = calls
    return [dict(what=name, **timing.median_row(times, name, last)) for name in times]


def speed(arguments):
    """Time what slicing a supernet costs, and what extracting a subnet saves.

    - A training step of the supernet of AutoFormer-T with a random subnet, of the same subnet
      extracted, and of the largest subnet.
    - A forward pass of the released AutoFormer-T, sliced from its supernet, extracted, and
      extracted with its relative positions left out, beside a ViT of the same width, depth and
      heads, which has none.
    - The attention of AutoFormer-S with relative positions by rows and columns, and with the
      authors' table of all pairs of tokens.

    Contestants take turns; a row has the ratio to the last named of its group. On a CPU one
    thread is used, and its own time counts, without that of other programs. The record is
    FOLDER/autoformer_speed_DEVICE.json.
    """
    device = arguments.device
    torch.set_num_threads(1)
    clock = time.process_time if device == "cpu" else time.perf_counter
    path = arguments.out and arguments.out / f"autoformer_speed_{device}.json"
    bench = runner.Rows(path, device, arguments.minutes, arguments.tiny)

    def go():
        for group in GROUPS:
            work = partial(measure, group, arguments, clock)
            print(*bench.once(dict(group=group), work), sep="\n")

    bench.work(go)


def run_part(arguments):
    (arguments.out / "checkpoints").mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"autoformer_{arguments.command}.json"
    bench = Supernets(path, arguments.minutes, arguments.tiny, arguments.command)
    bench.work(getattr(bench, arguments.command))


def supernets(arguments):
    """Train supernets of 22,140 small networks in three ways.

    One random subnet per step; the sandwich (largest, smallest, random) in about the same time;
    and classical sharing, which has separate weights for each choice. There are three seeds,
    learning rates are chosen with the first, and one run has four times the steps.
    """
    run_part(arguments)


def ranking(arguments):
    """Train subnets alone, twelve of all sizes and twelve of one size.

    They are compared with the same subnets with inherited weights. Learning rates are chosen
    with one network of each width.
    """
    run_part(arguments)


def repeats(arguments):
    """Repeat the ranking with a second seed, the first twelve also with twice the steps."""
    run_part(arguments)


def scenes(arguments):
    """Train supernets, uniformly sampled and with classical sharing, on a second task.

    Of two colored things in a drawn scene (`attnlib.data.caption_scenes`), the network says
    which one is further left or further up.
    """
    run_part(arguments)


def search_networks(arguments):
    """Search under three budgets by evolution and at random, with equally many evaluations.

    All networks of the smallest budget are evaluated, and the networks found are trained alone.
    """
    run_part(arguments)


def main(arguments=None):
    commands = Commands(__doc__)
    for function in (supernets, ranking, repeats, scenes):
        commands.experiment(function.__name__, function)
    commands.experiment("search", search_networks)
    commands.timing("speed", speed, repeats=9)
    commands.run(arguments)


if __name__ == "__main__":
    main()
