"""Images with a shifted target: a small CNN and four domains of digits, none of which is the target.

The target, and so the validation set, are digits rotated by 50 to 70 degrees, with correct labels. The script
trains with learned and with uniform weights and compares the accuracy.

python examples/images_shifted.py
"""

import numpy as np
import torch
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

import mixwell
from mixwell.training.models.cnn import small_cnn

STEPS, ROWS = 250, 64  # rows per step, all domains together
ANGLES = {
    "upright": (-10, 10),
    "turned": (0, 90),
    "inverted": (-10, 10),  # upright, black on white
    "noisy": (50, 70),  # like the target, but half of the labels are wrong
}
TARGET = (50, 70)
FONTS = [ImageFont.load_default(size) for size in (18, 20, 22)]


def picture(label: int, angle: float, generator: Generator) -> Image.Image:
    """A white digit on black, near the middle of 28 x 28 pixels."""
    image = Image.new("L", (28, 28))
    middle = tuple(14 + generator.normal(0, 1.5, size=2))
    ImageDraw.Draw(image).text(middle, str(label), 255, FONTS[generator.integers(len(FONTS))], anchor="mm")
    return image.rotate(angle, Image.Resampling.BILINEAR)


def draw(rows: int, angles: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images with values of about -1 to 1, and their labels."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(10, size=rows)
    rotations = generator.uniform(*angles, size=rows)
    images = [np.asarray(picture(*one, generator)) for one in zip(labels, rotations, strict=True)]
    noisy_images = np.stack(images) / 127.5 - 1 + generator.normal(0, 0.2, size=(rows, 28, 28))
    return torch.from_numpy(noisy_images).float().unsqueeze(1), torch.from_numpy(labels)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(signal: mixwell.Signal) -> tuple[float, dict[str, float]]:
    """Train a new model; rerotations the test accuracy and the average weights."""
    torch.manual_seed(0)
    model = small_cnn(channels=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mixer = mixwell.Mixer(model, optimizer, list(domains), budget=STEPS, signal=signal)
    for batch in mixwell.MixtureLoader(domains, ROWS).follow(mixer):  # rows follow the weights
        for part in batch.by_domain():
            with mixer.domain(part):
                loss(model, part.rows).backward()
        mixer.step()
        if mixer.validation_due:
            with mixer.validation():
                loss(model, validation).backward()
        record = mixer.round_ended
        if record is not None and record.step_size:  # 0 with constant weights
            shown = "  ".join(f"{name} {weight:.3f}" for name, weight in record.new_weights.items())
            print(f"step {mixer.steps_done:3d}  {shown}")
    with torch.no_grad():
        right = model(test[0]).argmax(dim=1) == test[1]
    return right.float().mean().item(), mixer.weights.average


domains = {name: draw(2000, angles, seed) for seed, (name, angles) in enumerate(ANGLES.items())}
images, labels = domains["inverted"]
domains["inverted"] = -images, labels
images, labels = domains["noisy"]
torch.manual_seed(0)
wrong = (labels + torch.randint(1, 10, labels.shape)) % 10
domains["noisy"] = images, torch.where(torch.rand(len(labels)) < 0.5, wrong, labels)
validation, test = draw(500, TARGET, seed=10), draw(2000, TARGET, seed=11)

learned, average = train(mixwell.Hypergradient())  # with dense traces, the best choice for convolutions
print("average:", {name: round(weight, 3) for name, weight in average.items()})
uniform, _ = train(mixwell.ConstantWeights())  # uniform weights
print(f"test accuracy: {learned:.1%} with learned weights, {uniform:.1%} with uniform ones")
assert max(average, key=average.__getitem__) == "turned"
assert learned > uniform
