"""Decode encoded images to float32 rows of one size, for all kinds of data with images."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallax.common.targets import load_target
from parallax.common.units import parse_bytes
from parallax.errors import ConfigError, DataError, check_choice, check_positive, printable
from parallax.model.source import ModelConfig
from parallax.plan.tier import AUTO
from parallax.train.data.indexed import IndexedDataConfig
from parallax.train.data.order import Seeds
from parallax.train.data.source import Shapes
from parallax.train.data.stored import Encoded
from parallax.train.data.table import Table, own_generators, placed, seed_all, timed

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]  # (height, width, channels)
Box = tuple[float, float, float, float]  # left, upper, right, lower

SUFFIXES = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "ppm", "pgm", "pbm", "pnm"),
    *("tif", "tiff", "jp2", "avif"),
)
REFUSE, SKIP = "refuse", "skip"
# Only formats that libraries decode: EPS would start Ghostscript.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "JPEG2000", "AVIF")
_INTERPOLATIONS = ("bilinear", "bicubic", "lanczos", "box", "hamming", "nearest")
# Of ImageNet's images. Of grey ones: the means of the three.
_MEANS = {3: (0.485, 0.456, 0.406), 1: (0.449,)}
_DEVIATIONS = {3: (0.229, 0.224, 0.225), 1: (0.226,)}
_GAP = 2.0  # a JPEG is decoded at this many times the needed resolution or more, as Pillow's thumbnails are
_ATTEMPTS = 10  # attempts to draw a box that fits in the image
_ORIENTATION = 0x0112  # in Exif
_JPEG = ("JPEG", "MPO")
_ADVICE = " (data.broken=skip leaves out files with broken headers)"
_MODES = {3: "RGB", 1: "L"}


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig(IndexedDataConfig):
    """Settings of all kinds of data with images.

    ``size``: height and width of a row in pixels.
    ``resize``: the length in pixels to which the short side is resized before ``crop=center`` crops the middle; auto is
        ``size``.
    ``crop``: center; or random, which crops a random box of each training image and resizes it. The box's share of the
        area is drawn from ``scale``, and its width / height from ``ratio``.
    ``flip``: mirror a training row with probability 1/2.
    ``interpolation``: bilinear, bicubic, lanczos, box, hamming or nearest.
    ``channels``: 3 converts all images to RGB, 1 to grey; transparency is dropped, and 16-bit values keep their upper 8
        bits.
    ``mean``, ``std``: values for the normalization of each channel, on a scale from 0 to 1; auto uses ImageNet's.
    ``transform``: a function as ``package.module:function`` that replaces the resizing, cropping and flipping, such as
        a composition of torchvision's transforms. The function gets a Pillow image with ``channels`` channels. If the
        function returns a Pillow image, its values are normalized; a tensor or an array is used unchanged. The global
        generators of Python, numpy and torch are seeded for each row.
    ``broken``: refuse ends the run at a file that is not an image; skip checks the headers of all files once, at the
        first start, and skips broken files. In both cases a file that cannot be decoded ends the run.
    ``max_pixels``: the maximum pixels of a stored image.
    ``max_file``: the maximum bytes of an encoded image.
    ``in_memory``: read all encoded images into memory at the start; workers share this memory.
    """

    size: int = 224
    resize: int | str = AUTO
    crop: str = "center"
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    ratio: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    flip: bool = False
    interpolation: str = _INTERPOLATIONS[0]
    channels: int = 3
    mean: list[float] | str = AUTO
    std: list[float] | str = AUTO
    transform: str = ""
    broken: str = REFUSE
    max_pixels: int = 89478485
    max_file: int | str = "256MiB"
    in_memory: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("data.size", self.size)
        check_choice("data.crop", self.crop, ("center", "random"))
        check_choice("data.interpolation", self.interpolation, _INTERPOLATIONS)
        check_choice("data.broken", self.broken, (REFUSE, SKIP))
        check_positive("data.max_pixels", self.max_pixels)
        parse_bytes(self.max_file, "data.max_file")
        if self.channels not in _MODES:
            raise ConfigError(f"data.channels={self.channels}: accepted are 3 (RGB) and 1 (grey)")
        if self.short_side < self.size:
            raise ConfigError(
                f"data.resize={self.resize}: accepted are auto and numbers from data.size={self.size}"
            )
        for key, most in (("scale", 1.0), ("ratio", math.inf)):
            found = getattr(self, key)
            if len(found) != 2 or not 0 < found[0] <= found[1] <= most:
                raise ConfigError(
                    f"data.{key}={found}: accepted are [LEAST,MOST] above 0"
                    + (f" and up to {most:g}" if most < math.inf else "")
                )
        self._check_normalization()
        if self.transform and (self.crop, self.flip) != ("center", False):
            raise ConfigError(
                f"data.transform={printable(self.transform)}: it replaces data.crop and data.flip; leave them out"
            )

    def _check_normalization(self) -> None:
        for key in ("mean", "std"):
            given = getattr(self, key)
            if given != AUTO and (
                isinstance(given, str) or len(given) not in (1, self.channels) or None in given
            ):
                raise ConfigError(
                    f"data.{key}={given}: accepted are auto and a list of {self.channels} number(s), one a channel"
                )
        if self.std != AUTO and not all(float(each) > 0 for each in self.std):
            raise ConfigError(f"data.std={self.std}: accepted are numbers above 0")

    def for_evaluation(self, table: Any) -> Table:
        found: Table = table.plain()
        return found

    @property
    def short_side(self) -> int:
        """The length in pixels of an image's short side after resizing, before the middle is cropped."""
        return self.size if isinstance(self.resize, str) else self.resize

    def shapes(self, model: ModelConfig) -> Shapes | None:  # noqa: ARG002
        if self.transform:
            return None

        def images(rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
            shape = rows, self.channels, self.size, self.size
            return (torch.empty(shape, device="meta"),), torch.empty(
                rows, dtype=torch.int64, device="meta"
            )

        return images


class ImageDecoder:
    """Decodes images to rows, with the settings ``config``. ``augment``: whether to crop and flip at random."""

    def __init__(self, config: ImageDataConfig, *, augment: bool = True) -> None:
        try:
            from PIL import Image
        except ImportError as error:
            raise ConfigError(
                f"data={config.name} needs Pillow ({error}): pip install 'parallax-train[images]'"
            ) from error
        Image.init()  # before workers are forked
        self._pillow, self._config = Image, config
        self._formats = [each for each in _FORMATS if each in Image.OPEN]
        self._most_bytes = parse_bytes(config.max_file, "data.max_file")
        self._random = augment and config.crop == "random"
        self._flip = augment and config.flip
        self._resampling = Image.Resampling[config.interpolation.upper()]
        self._mode = _MODES[config.channels]
        self._transform: Callable[[Any], Any] | None = None
        if config.transform:
            self._transform = load_target("data.transform", config.transform)
        mean = _MEANS[config.channels] if config.mean == AUTO else config.mean
        std = _DEVIATIONS[config.channels] if config.std == AUTO else config.std
        scale = 1 / np.asarray(std, np.float64)[:, None, None]
        self._scale = (scale / 255).astype(np.float32)
        self._shift = (-np.asarray(mean, np.float64)[:, None, None] * scale).astype(np.float32)

    def plain(self) -> ImageDecoder:
        """Return the decoder for evaluation, without random crops and flips."""
        return ImageDecoder(self._config, augment=False)

    # ------------------------------------------------------------------------------------------ rows

    def batch(self, images: Sequence[Encoded], seeds: Seeds, where: Callable[[int], str]) -> Any:
        """Return ``images`` as one float32 tensor of shape (rows, channels, height, width). If the user's ``transform``
        returns tensors, it determines shape and dtype. ``where(i)`` is the place of image i, for error messages."""
        if self._transform is not None:
            return self._transformed(images, seeds, where)
        side = self._config.size
        found = np.empty((len(images), self._config.channels, side, side), np.float32)
        with timed("decode"):
            for place, (data, seed) in enumerate(zip(images, seeds.tolist())):
                with self._named(place, where):
                    self._normalize(self._row(data, seed), found[place])
        return torch.from_numpy(found)

    def _normalize(self, pixels: Pixels, row: NDArray[np.float32]) -> None:
        """Write the normalized ``pixels`` to ``row``, channels first. Rows are normalized one by one, so that each
        stays in the CPU cache."""
        row[...] = pixels.transpose(2, 0, 1)
        row *= self._scale
        row += self._shift

    @contextlib.contextmanager
    def _named(self, place: int, where: Callable[[int], str]) -> Iterator[None]:
        """A context that converts any error of Pillow to a :class:`DataError` that names the image. All exceptions are
        caught, because Pillow raises many classes."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{where(place)}: {_reason(error)}; mend or remove it"
                + ("" if self._config.broken == SKIP else _ADVICE)
            ) from error

    def _row(self, data: Encoded, seed: int) -> Pixels:
        """Return one decoded row of shape (size, size, channels)."""
        side = self._config.size
        image = self._opened(io.BytesIO(data), len(data))
        turn = self._orientation(image)
        width, height = image.size if turn < 5 else image.size[::-1]
        box, mirrored = self._drawn(width, height, seed)
        finest = min(box[2] - box[0], box[3] - box[1]) / (_GAP * side)
        if image.format in _JPEG:
            divisor = max(1, int(finest))
            mode = "L" if self._mode == "L" else None
            image.draft(mode, (-(-image.width // divisor), -(-image.height // divisor)))
        found = self._upright(image, turn)
        across, down = found.width / width, found.height / height
        found = found.resize(
            (side, side),
            self._resampling,
            (
                box[0] * across,
                box[1] * down,
                min(box[2] * across, found.width),
                min(box[3] * down, found.height),
            ),
            _GAP,
        )
        pixels = np.asarray(found).reshape(side, side, self._config.channels)
        return pixels[:, ::-1] if mirrored else pixels

    # ----------------------------------------------------------------------------------------- images

    def fault(self, file: IO[bytes], size: int) -> str:
        """Return the reason why a file of ``size`` bytes is not an image, judged by its header; "" if the file seems to
        be an image. Raises OSError if the file cannot be read."""
        try:
            self._opened(file, size)
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            return _reason(error)
        return ""

    def _opened(self, file: IO[bytes], size: int) -> Image:
        """Return the image of ``file`` without decoding its pixels."""
        if size > self._most_bytes:
            raise ValueError(
                f"it has {size:,} bytes, more than data.max_file={self._config.max_file}"
            )
        if not size:
            raise ValueError("it is empty")
        usual = self._pillow.MAX_IMAGE_PIXELS
        self._pillow.MAX_IMAGE_PIXELS = None  # ours is checked instead
        try:
            image = self._pillow.open(file, formats=self._formats)
        finally:
            self._pillow.MAX_IMAGE_PIXELS = usual
        if image.width * image.height > self._config.max_pixels:
            raise ValueError(
                f"it has {image.width} × {image.height} pixels, more than data.max_pixels={self._config.max_pixels}"
            )
        return image

    def _orientation(self, image: Image) -> int:
        """Return the Exif orientation of the image, 1 to 8. Reading it decodes no pixels of a JPEG."""
        if image.format not in _JPEG:
            image.load()
        if image.format == "TIFF":  # Pillow turns these itself
            return 1
        with contextlib.suppress(Exception):  # damaged Exif beside a sound image
            if (found := image.getexif().get(_ORIENTATION, 1)) in range(1, 9):
                return int(found)
        return 1

    def _upright(self, image: Image, turn: int) -> Image:
        """Return the image with ``channels`` channels, rotated or mirrored as the Exif orientation ``turn``
        requires."""
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            image = self._eight_bits(image)
        if image.mode != self._mode:
            image = image.convert(self._mode)
        ways = self._pillow.Transpose
        if turn == 1:
            return image
        return image.transpose(
            (
                ways.FLIP_LEFT_RIGHT,
                ways.ROTATE_180,
                ways.FLIP_TOP_BOTTOM,
                ways.TRANSPOSE,
                ways.ROTATE_270,
                ways.TRANSVERSE,
                ways.ROTATE_90,
            )[turn - 2]
        )

    def _eight_bits(self, image: Image) -> Image:
        """Return a 16-bit grey image as 8-bit. Pillow's own conversion would clip the values."""
        values = np.asarray(image)
        if image.mode == "F" or values.min(initial=0) < 0 or values.max(initial=0) > 0xFFFF:
            raise ValueError("its pixels have 32 bits; use a data.transform after converting it")
        return self._pillow.fromarray((values >> 8).astype(np.uint8))

    # --------------------------------------------------------------------------------------- geometry

    def _drawn(self, width: int, height: int, seed: int) -> tuple[Box, bool]:
        """Return the crop box of an image, and whether to flip the image. Random choices depend only on ``seed``."""
        if not self._random and not self._flip:
            return self._center(width, height), False
        draw = np.random.Generator(np.random.PCG64(seed))
        mirrored = bool(draw.random() < 0.5) and self._flip
        if not self._random:
            return self._center(width, height), mirrored
        config, area = self._config, width * height
        lowest, highest = (math.log(each) for each in config.ratio)
        for _ in range(_ATTEMPTS):
            share, shape, left, upper = draw.random(4).tolist()
            wanted = area * (config.scale[0] + share * (config.scale[1] - config.scale[0]))
            by = math.exp(lowest + shape * (highest - lowest))
            across, down = round(math.sqrt(wanted * by)), round(math.sqrt(wanted / by))
            if 0 < across <= width and 0 < down <= height:
                x, y = int(left * (width - across + 1)), int(upper * (height - down + 1))
                return (x, y, x + across, y + down), mirrored
        across = min(width, max(1, round(height * config.ratio[1])))
        down = min(height, max(1, round(width / config.ratio[0])))
        x, y = (width - across) // 2, (height - down) // 2
        return (x, y, x + across, y + down), mirrored

    def _center(self, width: int, height: int) -> Box:
        """Return the box of the center crop, in pixels of the original image. The region equals that of torchvision's
        Resize and CenterCrop."""
        side, short = self._config.size, self._config.short_side
        least = min(width, height)
        sizes = [short if each == least else int(short * each / least) for each in (width, height)]
        firsts = [round((each - side) / 2) for each in sizes]
        left, upper = (
            first * whole / resized for first, whole, resized in zip(firsts, (width, height), sizes)
        )
        right, lower = (
            (first + side) * whole / resized
            for first, whole, resized in zip(firsts, (width, height), sizes)
        )
        return left, upper, min(right, width), min(lower, height)

    # --------------------------------------------------------------------------------- the user's own

    def _transformed(
        self, images: Sequence[Encoded], seeds: Seeds, where: Callable[[int], str]
    ) -> Any:
        """Return the rows that the user's ``transform`` returns for ``images``."""
        assert self._transform is not None
        found: list[Any] = []
        with own_generators():
            for place, (data, seed) in enumerate(zip(images, seeds.tolist())):
                with timed("decode"), self._named(place, where):
                    image = self._opened(io.BytesIO(data), len(data))
                    image = self._upright(image, self._orientation(image))
                seed_all(seed)
                try:
                    with timed("transform"):
                        found.append(self._array(self._transform(image)))
                except DataError:
                    raise
                except Exception as error:
                    raise DataError(
                        f"{where(place)}: data.transform={printable(self._config.transform)}: {placed(error)}"
                    ) from error
        return self._collated(found, where)

    def _array(self, value: Any) -> Any:
        """Convert the result of the user's function: a Pillow image to an array of pixels, which are normalized later,
        and a tensor or an array to a tensor. Raises :class:`DataError` for anything else."""
        if isinstance(value, self._pillow.Image):
            value = self._upright(value, 1)
            return np.asarray(value).reshape(value.height, value.width, self._config.channels)
        if isinstance(value, np.ndarray | Tensor):
            return torch.as_tensor(value)
        raise DataError(
            f"data.transform={printable(self._config.transform)} returned a {type(value).__name__}: a Pillow image, a "
            "tensor or an array is needed"
        )

    def _collated(self, found: list[Any], where: Callable[[int], str]) -> Any:
        for place, each in enumerate(found):
            if (type(each), each.dtype, each.shape) != (
                type(found[0]),
                found[0].dtype,
                found[0].shape,
            ):
                raise DataError(
                    f"data.transform={printable(self._config.transform)} returns rows of several shapes or types: "
                    f"{_kind(found[0])} of {where(0)}, {_kind(each)} of {where(place)}; make them equal"
                )
        with timed("collate"):
            if isinstance(found[0], Tensor):
                return torch.stack(found)
            height, width, channels = found[0].shape
            rows = np.empty((len(found), channels, height, width), np.float32)
            for pixels, row in zip(found, rows):
                self._normalize(pixels, row)
            return torch.from_numpy(rows)


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _reason(error: Exception) -> str:
    """Return an error of Pillow as one line, without memory addresses."""
    text = (str(error).splitlines() or [""])[0]
    if text.startswith("cannot identify image file"):
        return f"it is no image of a known format ({', '.join(_FORMATS)})"
    if isinstance(error, ValueError | OSError):
        return printable(text)
    return printable(f"it cannot be decoded ({type(error).__name__}: {text})")
