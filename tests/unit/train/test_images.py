"""Images of files: what is decoded, which rows there are, and what is refused in one line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from parallax.config import compose
from parallax.errors import ConfigError, DataError
from parallax.model.factory.mlp import MLPConfig
from parallax.train.data import stored
from parallax.train.data.images import ImagesDataConfig
from tests.unit.train.image_folders import BARE, line, one, opened, whole
from tests.unit.train.image_rows import read
from tests.unit.train.pictures import encoded, folder, smooth

HERE = "tests.unit.train.pictures"
COUNTS = {"ants": 7, "bees": 9, "crows": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallax"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return folder(tmp_path / "root", COUNTS)


# ------------------------------------------------------------------------------------------------- rows


def test_labels_are_the_numbers_of_sorted_class_names(root: Path) -> None:
    (root / "bees" / "deeper" / "still").mkdir(parents=True)
    (root / "bees" / "deeper" / "still" / "größe.JPEG").write_bytes(encoded(smooth(9, 9), "jpeg"))
    (root / "ants" / "notes.txt").write_text("no image")
    (root / "ants" / ".hidden.png").write_text("no image")
    (root / ".checkpoints").mkdir()
    inputs, targets = whole(root)
    assert inputs.shape == (25, 3, 8, 8)
    assert inputs.dtype == torch.float32
    assert inputs.is_contiguous()
    assert targets.dtype == torch.int64
    assert targets.tolist() == [0] * 7 + [1] * 10 + [2] * 8


def test_values_are_normalized_as_torchvision_does(tmp_path: Path) -> None:
    image = smooth(8, 8)
    plain = np.asarray(image, np.float64).transpose(2, 0, 1) / 255
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    (tmp_path / "one" / "class").mkdir(parents=True)
    (tmp_path / "one" / "class" / "x.png").write_bytes(encoded(image))
    found = whole(tmp_path / "one")[0][0].numpy()
    expected = (plain - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    own = whole(tmp_path / "one", mean=[0.5], std=[0.1, 0.2, 0.4])[0][0].numpy()
    expected = (plain - 0.5) / np.array([0.1, 0.2, 0.4])[:, None, None]
    np.testing.assert_allclose(own, expected, atol=2e-6)


@pytest.mark.parametrize(("width", "height"), [(31, 20), (20, 45), (16, 16), (10, 100), (3, 5)])
def test_the_middle_is_what_resize_and_center_crop_leave(
    tmp_path: Path, width: int, height: int
) -> None:
    image = smooth(width, height, 3)
    short = min(width, height)
    sizes = (
        10 if width == short else int(10 * width / short),
        10 if height == short else int(10 * height / short),
    )
    left, upper = (round((each - 8) / 2) for each in sizes)
    resized = image.resize(sizes, Image.Resampling.BILINEAR)
    expected = np.asarray(resized.crop((left, upper, left + 8, upper + 8)))
    found = one(tmp_path, encoded(image), resize=10)
    # Only pixels at the edge of the box see no neighbours beyond it.
    difference = np.abs(found.transpose(1, 2, 0) * 255 - expected.astype(float))[1:-1, 1:-1]
    assert difference.max() < 1.01


def test_a_large_jpeg_is_decoded_at_a_lower_resolution_with_the_same_picture(
    tmp_path: Path,
) -> None:
    image = smooth(640, 480, 5)
    exact = one(tmp_path, encoded(image))
    found = one(tmp_path, encoded(image, "jpeg", quality=95, subsampling=0))
    assert np.abs(found - exact).max() < 0.03


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "tiff"])
def test_images_are_turned_as_exif_says(tmp_path: Path, kind: str, turn: int) -> None:
    upright = smooth(16, 16, 7)
    ways = Image.Transpose
    undone = [
        None,
        ways.FLIP_LEFT_RIGHT,
        ways.ROTATE_180,
        ways.FLIP_TOP_BOTTOM,
        ways.TRANSPOSE,
        ways.ROTATE_90,
        ways.TRANSVERSE,
        ways.ROTATE_270,
    ][turn - 1]
    image = upright if undone is None else upright.transpose(undone)
    exif = Image.Exif()
    exif[0x0112] = turn
    options = {"jpeg": {"quality": 100, "subsampling": 0}, "webp": {"lossless": True}}.get(kind, {})
    found = one(tmp_path, encoded(image, kind, exif=exif, **options), f"x.{kind}", size=16)
    assert np.abs(found.transpose(1, 2, 0) * 255 - np.asarray(upright, float)).max() < 12


def test_a_turned_image_is_cut_in_its_own_proportions(tmp_path: Path) -> None:
    """Width and height of a portrait that a camera stored as a landscape."""
    upright = smooth(20, 60, 2)
    exif = Image.Exif()
    exif[0x0112] = 6
    stored_so = upright.transpose(Image.Transpose.ROTATE_90)
    found = one(tmp_path, encoded(stored_so, "jpeg", exif=exif, quality=100, subsampling=0))
    assert np.abs(found - one(tmp_path, encoded(upright))).max() < 0.03


def modes() -> dict[str, tuple[bytes, list[float]]]:
    """One colour in each mode, and what it is in RGB."""
    red = Image.new("RGB", (8, 8), (200, 50, 100))
    grey = [120 / 255] * 3
    deep = np.full((8, 8), 120 * 256 + 77, np.uint16)
    palette = red.quantize(4)
    clear = Image.new("RGBA", (8, 8), (200, 50, 100, 3))
    rgb = [200 / 255, 50 / 255, 100 / 255]
    return {
        "grey": (encoded(Image.new("L", (8, 8), 120)), grey),
        "two values": (encoded(Image.new("1", (8, 8), 1)), [1.0] * 3),
        "grey with alpha": (encoded(Image.new("LA", (8, 8), (120, 9))), grey),
        "16 bits, PNG": (encoded(Image.fromarray(deep)), grey),
        "16 bits, TIFF": (encoded(Image.fromarray(deep), "tiff"), grey),
        "16 bits, PGM": (b"P5 8 8 65535 " + deep.astype(">u2").tobytes(), grey),
        "palette": (encoded(palette), rgb),
        "palette with a clear entry": (encoded(palette, transparency=0), rgb),
        "alpha": (encoded(clear), rgb),
        "CMYK": (encoded(Image.new("CMYK", (8, 8), (0, 0, 255, 0)), "jpeg"), [1, 1, 0]),
        "GIF": (encoded(palette, "gif"), rgb),
        "WebP": (encoded(clear, "webp", lossless=True), rgb),
        "BMP": (encoded(red, "bmp"), rgb),
        "TIFF": (encoded(red, "tiff", compression="tiff_lzw"), rgb),
        "JPEG 2000": (encoded(red, "jpeg2000"), rgb),
        "AVIF": (encoded(red, "avif", quality=100), rgb),
        "progressive JPEG": (encoded(red, "jpeg", progressive=True, quality=100), rgb),
    }


@pytest.mark.parametrize("mode", list(modes()))
@pytest.mark.parametrize("channels", [3, 1])
def test_every_mode_becomes_rgb_or_grey(tmp_path: Path, mode: str, channels: int) -> None:
    content, rgb = modes()[mode]
    found = one(tmp_path, content, channels=channels)
    expected = rgb if channels == 3 else [float(np.dot(rgb, [0.299, 0.587, 0.114]))]
    assert found.shape == (channels, 8, 8)
    for plane, value in zip(found, expected):
        assert abs(plane - value).max() < 0.03


def test_pixels_of_32_bits_are_refused(tmp_path: Path) -> None:
    content = encoded(Image.fromarray(np.full((8, 8), 0.5, np.float32)), "tiff")
    with pytest.raises(DataError, match=r"x\.tif: its pixels have 32 bits"):
        one(tmp_path, content, "x.tif")
    content = encoded(Image.fromarray(np.full((8, 8), 70000, np.int32)), "tiff")
    with pytest.raises(DataError, match=r"x\.tif: its pixels have 32 bits"):
        one(tmp_path, content, "x.tif")


def test_damaged_exif_beside_a_sound_image_is_no_matter(tmp_path: Path) -> None:
    content = encoded(smooth(8, 8), "jpeg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + b"\xff" * 20)
    assert one(tmp_path, content, "x.jpg").shape == (3, 8, 8)


def test_one_row(tmp_path: Path) -> None:
    folder(tmp_path / "root", {"only": 1})
    with opened(tmp_path / "root") as source:
        assert len(source) == 1
        assert source.validation_sets == {}
        inputs, targets = read(source, 4)
        assert torch.equal(inputs[0], inputs[3])
        assert targets.tolist() == [0] * 4


def test_shapes_are_those_of_the_rows(root: Path) -> None:
    config = ImagesDataConfig(path=str(root), size=8, channels=1)
    shapes = config.shapes(MLPConfig())
    assert shapes is not None
    (inputs,), targets = shapes(5)
    found = whole(root, channels=1)
    assert [inputs.shape[1:], inputs.dtype, targets.dtype] == [
        found[0].shape[1:],
        found[0].dtype,
        found[1].dtype,
    ]
    assert ImagesDataConfig(path=str(root), transform=f"{HERE}:noisy").shapes(MLPConfig()) is None


def test_the_option_is_composed_from_the_command_line(root: Path) -> None:
    config = compose(["data=images", f"data.path={root}", "data.mean=[0.5]", "data.crop=random"])
    assert isinstance(config.data, ImagesDataConfig)
    assert config.data.mean == [0.5]
    with pytest.raises(ConfigError, match=r"data\.crop=rndom: accepted are center, random"):
        compose(["data=images", f"data.path={root}", "data.crop=rndom"])


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("size", 0, "numbers above 0"),
        ("resize", 4, r"auto and numbers from data\.size=8"),
        ("scale", [0.5, 1.5], "LEAST,MOST"),
        ("scale", [0.9, 0.1], "LEAST,MOST"),
        ("ratio", [1.0], "LEAST,MOST"),
        ("channels", 4, "3 .RGB. and 1 .grey."),
        ("mean", [0.1, 0.2], r"a list of 3 number\(s\)"),
        ("mean", "imagenet", r"a list of 3 number\(s\)"),
        ("std", [0.0], "numbers above 0"),
        ("broken", "ignore", "refuse, skip"),
        ("interpolation", "cubic", "bilinear, bicubic"),
        ("max_pixels", 0, "numbers above 0"),
        ("max_file", "big", "bytes such as"),
    ],
)
def test_wrong_settings_name_what_is_accepted(key: str, value: Any, accepted: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}=.*{accepted}"):
        ImagesDataConfig(path="x", **{"size": 8, key: value})


# ----------------------------------------------------------------------------------------- augmentation


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("settings", [{}, {"transform": f"{HERE}:noisy"}, {"in_memory": True}])
def test_augmented_rows_are_the_same_for_any_workers_and_micro_batches(
    root: Path, workers: int, settings: dict[str, Any]
) -> None:
    if "transform" not in settings:
        settings = {**settings, "crop": "random", "flip": True}
    with opened(root, **settings) as source:
        expected = [read(source, 8) for _ in range(5)]
    for parts in (1, 2, 4):
        with opened(root, workers=workers, **settings) as source:
            found = [read(source, 8, parts) for _ in range(5)]
        for left, right in zip(expected, found):
            assert torch.equal(left[0], right[0])
            assert torch.equal(left[1], right[1])


def test_augmentation_differs_between_epochs_and_rows_and_seeds(tmp_path: Path) -> None:
    folder(tmp_path / "root", {"only": 1}, side=40)
    settings: dict[str, Any] = {"crop": "random", "flip": True, "validation": 0}
    drawn = []
    for seed in (1, 2):
        with opened(tmp_path / "root", seed, **settings) as source:
            drawn += [read(source, 1)[0] for _ in range(6)]
    assert len({each.numpy().tobytes() for each in drawn}) == 12


def test_random_boxes_have_the_usual_areas_and_shapes(tmp_path: Path) -> None:
    """The image is a ramp to the right and a ramp down, so a row shows the box that was cut."""
    across = np.broadcast_to(np.linspace(0, 255, 256), (256, 256))
    pixels = np.stack([across, across.T, across], axis=-1).astype(np.uint8)
    (tmp_path / "root" / "only").mkdir(parents=True)
    (tmp_path / "root" / "only" / "x.png").write_bytes(encoded(Image.fromarray(pixels)))
    settings: dict[str, Any] = {**BARE, "crop": "random", "flip": True, "size": 32}
    with opened(tmp_path / "root", validation=0, **settings) as source:
        rows = read(source, 400)[0].numpy()
    width = rows[:, 0, 0, -1] - rows[:, 0, 0, 0]
    height = rows[:, 1, -1, 0] - rows[:, 1, 0, 0]
    area, ratio = np.abs(width) * height, np.abs(width) / height
    assert 0.06 < area.min() < 0.15
    assert 0.85 < area.max() <= 1
    assert 0.44 < area.mean() < 0.6
    assert 0.7 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.42
    assert 0.4 < (width < 0).mean() < 0.6  # mirrored


@pytest.mark.parametrize("size", [(3, 200), (200, 3), (1, 1)])
def test_a_box_is_found_in_extreme_images(tmp_path: Path, size: tuple[int, int]) -> None:
    found = one(tmp_path, encoded(smooth(*size)), crop="random")
    assert found.shape == (3, 8, 8)


def test_held_out_rows_are_not_augmented(root: Path) -> None:
    with (
        opened(root, validation=0.25, crop="random", flip=True) as random,
        opened(root, validation=0.25) as plain,
    ):
        assert random.validation_rows == 6
        one, other = random.validation(0, 6), plain.validation(0, 6)
        assert torch.equal(one.inputs(0, 6), other.inputs(0, 6))
        assert torch.equal(one.targets(0, 6), other.targets(0, 6))
        assert not torch.equal(random.batch(6).inputs(0, 6), plain.batch(6).inputs(0, 6))


def test_a_transform_of_ones_own(root: Path) -> None:
    inputs, _ = whole(root, transform=f"{HERE}:turned", **BARE)
    assert inputs.shape == (24, 3, 6, 6)
    assert inputs.max() <= 1
    grey, _ = whole(root, transform=f"{HERE}:turned", channels=1)
    assert grey.shape == (24, 1, 6, 6)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    tensors, _ = whole(root, transform=f"{HERE}:noisy")
    after = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    assert tensors.shape == (24, 3, 4, 4)
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert torch.equal(tensors, whole(root, transform=f"{HERE}:noisy")[0])


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("text", r"returned a str: a Pillow image, a tensor or an array is needed"),
        ("failing", r"000\.png: data\.transform=\S+: RuntimeError: no such colour \(.*pictures\.py:\d+\)"),
        ("missing", r"has no missing"),
        ("uneven", r"rows of several shapes or types: \(14,\) float32 of \S+, \(11,\) float32 of \S+x\.png"),
    ],
)  # fmt: skip
def test_errors_of_a_transform_name_it(root: Path, function: str, text: str) -> None:
    if function == "uneven":
        (root / "crows" / "x.png").write_bytes(encoded(smooth(11, 3)))
    assert re.search(text, line(root, transform=f"{HERE}:{function}"))


def test_a_transform_replaces_crop_and_flip() -> None:
    with pytest.raises(ConfigError, match=r"it replaces data\.crop and data\.flip"):
        ImagesDataConfig(path="x", transform="a:b", flip=True)


# ----------------------------------------------------------------------------------------------- memory


def test_rows_in_memory_are_those_of_the_files(root: Path) -> None:
    expected = whole(root)
    with opened(root, validation=0, shuffle=False, in_memory=True, workers=2) as source:
        for each in root.rglob("*.png"):
            each.unlink()
        found = [read(source, 8) for _ in range(3)]
    assert torch.equal(torch.cat([each[0] for each in found]), expected[0])


def test_rows_that_do_not_fit_in_memory_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = sum(each.stat().st_size for each in root.rglob("*.png")) - 1
    monkeypatch.setattr(stored, "available_memory", lambda processes: free // processes)
    text = line(root, in_memory=True)
    assert re.search(r"data\.in_memory=true needs \S+ \S+ for each of 1 rank\(s\)", text)
    monkeypatch.setattr(stored, "available_memory", lambda processes: (free + 1) // processes)
    assert len(whole(root, in_memory=True)[1]) == 24
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "for each of 2 rank(s) on this host" in line(root, in_memory=True)


def test_targets_alone_decode_nothing(root: Path) -> None:
    for each in root.rglob("*.png"):
        each.write_bytes(b"no image")
    with opened(root, validation=0, shuffle=False, workers=1) as source:
        for _ in range(3):
            batch = source.batch(8)
            assert len(batch.targets(0, 8)) == 8
        with pytest.raises(DataError, match="no image of a known format"):
            batch.inputs(0, 8)


def test_seconds_of_each_part_are_counted(root: Path) -> None:
    with opened(root, transform=f"{HERE}:noisy") as source:
        read(source, 8)
        assert {"read", "decode", "transform", "collate"} <= source.seconds().keys()
        assert all(each > 0 for each in source.seconds().values())


def test_io_is_unbuffered_and_closes(root: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    whole(root)
    assert set(os.listdir("/proc/self/fd")) == before
