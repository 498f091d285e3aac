"""Draw the picture of the first page: python book/_static/hero.py

Ten scanned digits, 0 to 9, attend to thirty others, three of each value, by the similarity of
their pixels.
"""

from pathlib import Path

import matplotlib.image
import numpy as np
import torch
from sklearn.datasets import load_digits

from attnlib.attention import attention_weights

digits = load_digits()
# (1797, 8, 8), (1797,)
images, values = (
    torch.tensor(digits.images),
    torch.tensor(digits.target),
)
of_value = [images[values == value] for value in range(10)]
# nearest the mean first
typical = [same[(same - same.mean(0)).flatten(1).norm(dim=1).argsort()] for same in of_value]
queries = torch.stack([same[0] for same in typical])  # (10, 8, 8)
keys = torch.cat([same[30:60:10] for same in typical])  # (30, 8, 8)

unit = torch.nn.functional.normalize
# (10, 30)
weights = attention_weights(unit(queries.flatten(1)), unit(keys.flatten(1)), scale=16.0)

# pixels of a place, of the seam between two, and of a digit's own pixels
SIDE, SEAM, INK = (
    44,
    3,
    4,
)
GREY, BLUE = (0.42, 0.46, 0.50), (0.11, 0.50, 0.75)  # read on white and on black
picture = np.zeros((11 * SIDE, 31 * SIDE, 4))  # transparent


def paint(row, column, color, opacity):
    """Put a square of one colour into the middle of a place, with an opacity for each pixel."""
    size = opacity.shape[0]
    top, left = row * SIDE + (SIDE - size) // 2, column * SIDE + (SIDE - size) // 2
    picture[top : top + size, left : left + size, :3] = color
    picture[top : top + size, left : left + size, 3] = opacity


def ink(image):
    return np.kron(image.numpy() / 16, np.ones((INK, INK)))  # (8, 8) -> (32, 32)


for row in range(10):
    paint(row + 1, 0, GREY, ink(queries[row]))
    for column in range(30):
        strength = weights[row, column].item() / weights.max().item()
        paint(
            row + 1,
            column + 1,
            BLUE,
            np.full((SIDE - SEAM, SIDE - SEAM), 0.08 + 0.92 * strength),
        )
for column in range(30):
    paint(0, column + 1, GREY, ink(keys[column]))
matplotlib.image.imsave(Path(__file__).with_name("hero.png"), picture)
