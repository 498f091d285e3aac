"""What was run for 31_deit: `python -m benchmarks.deit COMMAND --out FOLDER`.

    distillation  train small transformers with and without a teacher

`benchmarks.runner` says how runs are resumed and recorded.
"""

import torch
import torch.nn.functional as F

from attnlib.data import digits
from attnlib.deit import DistillationLoss, DistilledVisionTransformer
from attnlib.recipes import accuracy, small_convnet, train_classifier
from attnlib.train import CrossEntropy
from attnlib.vit import VisionTransformer
from benchmarks.runner import Commands, Runs, logistic_regression, tune

RATES = (1e-3, 3e-3, 1e-2)
STUDENT = dict(
    img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=2, num_heads=4
)
STUDENTS = {  # the model, options of its loss, and whether it sees pictures without labels
    "alone": (VisionTransformer, None, False),
    "hard, one token": (VisionTransformer, dict(kind="hard"), False),
    "hard, two tokens": (DistilledVisionTransformer, dict(kind="hard"), False),
    # the weight 10/11 of the code is 1/2 in the formula, for ten classes
    "soft, two tokens": (
        *(DistilledVisionTransformer, dict(kind="soft", weight=10 / 11, temperature=3.0)),
        False,
    ),
    "hard, unlabeled": (VisionTransformer, dict(kind="hard", weight=1.0), True),
    "soft, unlabeled": (
        *(VisionTransformer, dict(kind="soft", weight=1.0, temperature=3.0)),
        True,
    ),
}


def parts(seed):
    """Labelled pictures, those for validation and test, and pictures without labels."""
    (x, y) = digits("train", seed=seed)
    (unseen, answers) = digits("test", seed=seed)
    x = 4 * x - 2
    unseen = 4 * unseen - 2
    pictures = torch.cat([x[:200], x[400:]])
    nothing = torch.zeros(len(pictures), dtype=torch.int64)  # labels of weight 0
    return (x[:200], y[:200]), (x[200:400], y[200:400]), (unseen, answers), (pictures, nothing)


def noisy(x):
    return x + torch.randn_like(x)


def two_heads(model, test):
    """Accuracy and cross-entropy of each head and of their average, and the tokens' cosines."""
    images, labels = test
    tokens = model.forward_features(images)
    a = model.head(tokens[:, 0])
    b = model.head_dist(tokens[:, 1])
    after = model.forward_intermediates(
        images, intermediates_only=True, return_prefix_tokens=True
    )
    pairs = [model.embed(images)[:, :2], *(prefix for _, prefix in after)]
    heads = {"class": a, "distill": b, "average": (a + b) / 2}
    cosines = [F.cosine_similarity(x[:, 0], x[:, 1], dim=-1).mean().item() for x in pairs]
    return {
        "right": {name: share(z, labels) for name, z in heads.items()},
        "loss": {
            name: round(F.cross_entropy(z, labels).item(), 4) for name, z in heads.items()
        },
        "cosines": [round(cosine, 4) for cosine in cosines],
    }


def share(logits, labels):
    return round((logits.argmax(-1) == labels).float().mean().item(), 4)


class Students(Runs):
    """The runs of the record: a teacher of each seed, and its students."""

    def __init__(self, path, minutes, steps):
        super().__init__(path, minutes, steps=steps, best={})
        self.steps = steps
        self.teachers = {}

    def train(self, name, lr, seed):
        """A model, and what is recorded of it."""
        seen, valid, test, unlabeled = parts(seed)
        log_every = max(1, self.steps // 8)
        options = dict(
            steps=self.steps,
            batch_size=50,
            lr=lr,
            seed=seed,
            log_every=log_every,
        )
        torch.manual_seed(seed)
        if name == "teacher":
            model = small_convnet(1, 10, (24, 48))
            taught = None
        else:
            make, taught, without_labels = STUDENTS[name]
            model = make(**STUDENT)
            seen = unlabeled if without_labels else seen
        if taught is None:
            loss_fn = CrossEntropy(augment=noisy)
        else:
            loss_fn = DistillationLoss(self.teacher(seed), augment=noisy, **taught)
        history = train_classifier(model, seen, valid, loss_fn=loss_fn, **options)
        model.cpu().eval()
        with torch.no_grad():
            found = {"curve": [[row["step"], round(row["accuracy"], 4)] for row in history]}
            found["test"] = round(accuracy(model, test)["accuracy"].item(), 4)
            if isinstance(model, DistilledVisionTransformer):
                found["heads"] = two_heads(model, test)
            if name == "teacher":
                torch.manual_seed(seed)
                images = seen[0].repeat(5, 1, 1, 1)
                labels = seen[1].repeat(5)
                found["own images"] = share(model(seen[0]), seen[1])
                found["own images, noisy"] = share(model(noisy(images)), labels)
        return model, found

    def teacher(self, seed):
        """The teacher of a seed, trained again where only its record is left."""
        if seed not in self.teachers:
            lr = self.record["best"]["teacher"]
            self.teachers[seed] = self.train("teacher", lr, seed)[0]
        return self.teachers[seed]

    def run(self, name, lr, seed):
        what = dict(name=name, lr=lr, seed=seed)
        return self.once(what, lambda: self.train(name, lr, seed)[1])

    def tuned(self, name, rates, seeds):
        """All rates with the first seed, all seeds with the rate that was best there."""
        best, _ = tune(
            lambda lr, seed: self.run(name, lr, seed),
            rates=rates,
            seeds=seeds,
            score=lambda run: run["curve"][-1][1],
        )
        self.record["best"][name] = best
        self.write()


def logistic(seed):
    """Test accuracy of scikit-learn's logistic regression, its C from the validation."""
    train, valid, test = (
        (images.flatten(1).numpy(), labels.numpy()) for images, labels in parts(seed)[:3]
    )
    return logistic_regression(train, valid, test, strengths=(0.001, 0.01, 0.1, 1))


def distillation(arguments):
    """Train small transformers with and without a teacher.

    200 labeled digits for everybody, another 200 for the learning rate, 360 for the test; the
    seed decides which. A small convolutional network is the teacher, the students are Vision
    Transformers with one token or two. Two of them see no label at all, but 1,237 pictures with
    the teacher's answers. Noise is added to every batch.

    The record, distillation.json, is written after every model.
    """
    if arguments.tiny:
        steps = 2
        rates = RATES[:1]
        seeds = (0,)
    else:
        steps = 600
        rates = RATES
        seeds = (0, 1, 2)
    bench = Students(arguments.out / "distillation.json", arguments.minutes, steps)
    bench.record["logistic regression"] = [logistic(seed) for seed in seeds]

    def go():
        for name in ("teacher", *STUDENTS):
            bench.tuned(name, rates, seeds)

    bench.work(go)


def main(arguments=None):
    commands = Commands(__doc__)
    commands.experiment("distillation", distillation)
    commands.run(arguments)


if __name__ == "__main__":
    main()
