"""Train the small Transformer that reverses strings of digits, and write the strings that it is judged on.

    python calibration/reverse/train.py              tokens.npz and transformer_reverse.safetensors; < 2 minutes, 1 core

The task: a source is 2 to 16 digits and the end token, its target the same digits backwards and the end token; padding
follows. Nothing is downloaded: all strings are drawn from one seed. `tokens.npz` holds strings that training never
sees: each training string that is among them is drawn again. They are read once, after the last step, to print the
accuracy; no weight or hyper-parameter is chosen by them.

The result is a plain state dict of `Transformer`, float32, in safetensors form.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from vitdeploy.models.architectures.transformer import Transformer, TransformerConfig
from vitdeploy.models.families.transformer import parse

FOLDER = Path(__file__).resolve().parent
NAME = "transformer_w32e2d2h4_v13_l20"
FIRST_DIGIT = 3  # 0, 1 and 2 pad, start and end
SHORTEST, LONGEST = 2, 16  # digits of a string
EVALUATED = 512
STEPS, BATCH, PEAK_LEARNING_RATE, WARM_UP_STEPS, MAX_GRADIENT_NORM = 1200, 64, 3e-3, 150, 1.0


def config() -> TransformerConfig:
    parsed = parse(NAME)
    assert parsed is not None
    return parsed


def draw(generator: np.random.RandomState, count: int, excluded: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """`count` strings of digits 0 to 9, their lengths uniform, none of them in `excluded`."""
    strings: list[tuple[int, ...]] = []
    while len(strings) < count:
        length = generator.randint(SHORTEST, LONGEST + 1)
        string = tuple(int(digit) for digit in generator.randint(0, 10, length))
        if string not in excluded:
            strings.append(string)
    return strings


def draw_distinct(generator: np.random.RandomState, count: int) -> list[tuple[int, ...]]:
    """`count` strings, each another one."""
    strings: list[tuple[int, ...]] = []
    while len(strings) < count:
        strings += draw(generator, 1, set(strings))
    return strings


def to_tokens(strings: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets, int64 [n, LONGEST + 1]: the digits, or the digits backwards, the end token, padding."""
    shape, tokens = (len(strings), LONGEST + 1), config()
    source, target = (np.full(shape, tokens.pad, np.int64) for _ in range(2))
    for i, string in enumerate(strings):
        digits = np.array(string) + FIRST_DIGIT
        source[i, : len(string)], target[i, : len(string)] = digits, digits[::-1]
        source[i, len(string)] = target[i, len(string)] = tokens.end
    return source, target


def with_start(target: Tensor) -> Tensor:
    """What the decoder reads: the target behind the start token, without its last token."""
    return F.pad(target[:, :-1], (1, 0), value=config().start)


def learning_rate_factor(step: int) -> float:
    """Linear warm-up to 1, then half a cosine down to 0."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP_STEPS) / (STEPS - WARM_UP_STEPS)))


def train(generator: np.random.RandomState, excluded: set[tuple[int, ...]]) -> Transformer:
    """Fit a fresh model, printing its loss now and then."""
    model = Transformer(config()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    begun = time.perf_counter()
    for step in range(1, STEPS + 1):
        source, target = map(torch.from_numpy, to_tokens(draw(generator, BATCH, excluded)))
        logits = model(source, with_start(target))
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=config().pad)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"step {step}/{STEPS}  loss {loss.item():.5f}  {time.perf_counter() - begun:.0f} s", flush=True)
    return model.eval()


@torch.inference_mode()
def decode(model: Transformer, source: Tensor, steps: int) -> Tensor:
    """Greedy tokens, int64 [n, steps], each step from the whole target so far."""
    target = torch.full((len(source), 1), model.config.start)
    for _ in range(steps):
        target = torch.cat([target, model(source, target)[:, -1:].argmax(dim=-1)], dim=1)
    return target[:, 1:]


def save_checkpoint(model: nn.Module, path: Path) -> None:
    """Write the state dict; the name appears only once the file is whole, so no reader meets half a checkpoint."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(save({name: tensor.contiguous() for name, tensor in model.state_dict().items()}))
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the Transformer that reverses strings of digits.")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of both files")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # part of the recipe: the order of float sums, so the last bits, depends on it
    torch.manual_seed(arguments.seed)
    generator = np.random.RandomState(arguments.seed)  # its stream is frozen for all versions of numpy
    evaluated = draw_distinct(generator, EVALUATED)
    source, target = to_tokens(evaluated)
    np.savez_compressed(arguments.output / "tokens.npz", source=source, target=target)
    model = train(generator, set(evaluated))
    save_checkpoint(model, arguments.output / "transformer_reverse.safetensors")
    decoded = decode(model, torch.from_numpy(source), target.shape[1]).numpy()
    used = target != config().pad
    right = decoded == target
    print(
        f"unseen strings: {100 * right[used].mean():.2f} % of {int(used.sum())} tokens, "
        f"{int((right | ~used).all(axis=1).sum())} of {len(target)} strings whole"
    )


if __name__ == "__main__":
    main()
