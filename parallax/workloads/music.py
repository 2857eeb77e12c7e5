"""Pieces of music with tags, mixed from variants of a recorded sound, and a very deep 1-D convolutional network that
predicts the tags."""

from __future__ import annotations

import itertools
import sysconfig
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from parallax.errors import DataError, printable

Sound = NDArray[np.float32]
PITCHES, WAYS = 10, 5  # of each sound: 50 tags
RECORDED = Path(sysconfig.get_path("stdlib")) / "test" / "audiodata" / "pluck-pcm16.wav"


def _voices(path: str) -> list[Sound]:
    """Return a sound for each tag: the recording at ``path`` in ten pitches, and each pitch in five variants, such as
    reversed."""
    import soundfile

    file = Path(path) if path else RECORDED
    try:
        recorded = soundfile.read(file, dtype="float32", always_2d=True)[0].mean(1)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{printable(str(file))}: no sound can be read ({error}); give one as data.kwargs.path=FILE"
        ) from error
    found = []
    for pitch in range(PITCHES):
        places = np.arange(0, len(recorded) - 1, 2 ** (pitch / 6))
        note = np.interp(places, np.arange(len(recorded)), recorded)
        trembling = note * (np.arange(len(note)) // 128 % 2)
        dark = np.convolve(note, np.ones(8) / 8, "same")
        found += [note, note[::-1], trembling, dark, np.gradient(note) * 4]
    return [each.astype(np.float32) for each in found]


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """``count`` pieces of music, as float32 of shape (1, windows, samples). The targets are 50 tags, each 0 or 1, that
    tell which sounds a piece contains. A piece mixes one to five sounds, each repeated in its own rhythm. ``path``: the
    sound file from which all sounds are made; by default the recording of a plucked string in Python's test suite."""

    def __init__(
        self, count: int, windows: int = 12, samples: int = 38_832, path: str = ""
    ) -> None:
        self.count, self.shape = count, (1, windows, samples)
        self._voices = _voices(path)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng(index)
        length = self.shape[1] * self.shape[2]
        mixed = np.zeros(length, np.float32)
        chosen = random.choice(len(self._voices), random.integers(1, 6), replace=False)
        for tag in chosen:
            sound = self._voices[tag]
            every = int(random.integers(len(sound), 3 * len(sound)))
            beat = np.zeros(every, np.float32)
            beat[: len(sound)] = sound * random.uniform(0.5, 1)
            mixed += np.resize(np.roll(beat, random.integers(every)), length)
        tags = torch.zeros(len(self._voices))
        tags[chosen.tolist()] = 1
        return torch.from_numpy(mixed).reshape(self.shape), tags


class Residual(nn.Module):
    """A residual block: two convolutions over the time of each window, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.GroupNorm(4, channels), nn.ReLU()]
            layers += [nn.Conv2d(channels, channels, (1, 3), padding=(0, 1))]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.layers(x)
        return found


class PoolWindows(nn.Module):
    """Averages each window over time, and concatenates the mean and the maximum over the windows of a piece."""

    def forward(self, x: Tensor) -> Tensor:
        windows = x.mean(3)
        return torch.cat([windows.mean(2), windows.amax(2)], 1)


def tagger(width: int = 32, depth: int = 4, tags: int = PITCHES * WAYS) -> nn.Sequential:
    """Return the network: a deep CNN that processes each window, and a small network over the outputs of all windows.

    Kernels have height 1, so windows do not mix and all use the same weights. The number of samples in a window is
    divided by 16 and then six times by 3. At each of these seven sizes there are ``depth`` pairs of convolutions. With
    a depth of 4, the network has 63 convolutions in total. The number of channels grows from ``width`` to 8 ·
    ``width``. There is one output per tag.
    """
    sizes = [width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width, 8 * width]
    blocks: list[nn.Module] = [nn.Conv2d(1, width, (1, 16), stride=(1, 16))]
    blocks += [Residual(width) for _ in range(depth)]
    for before, after in itertools.pairwise(sizes):
        pool = nn.MaxPool2d((1, 3), ceil_mode=True)
        blocks += [nn.Sequential(pool, nn.Conv2d(before, after, 1))]
        blocks += [Residual(after) for _ in range(depth)]
    small = [PoolWindows(), nn.Linear(2 * sizes[-1], 128), nn.ReLU(), nn.Linear(128, tags)]
    return nn.Sequential(*blocks, nn.Sequential(*small))
