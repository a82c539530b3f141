"""Folders of images: classes by subfolder or attribute, resized once, one message for what is
wrong."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fedlgm import data
from fedlgm.data import images
from fedlgm.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLGM_DATA", str(tmp_path / "store"))
    images._load_resized.cache_clear()


def draw(path, colour, size=(12, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def by_class(folder, each=10):
    for number, name in enumerate(("cats", "dogs", "eels")):
        for i in range(each):
            draw(folder / name / f"{i:03}.png", (10 * i, 100 * number, 0))
        (folder / name / "notes.txt").write_text("not an image")
    return folder


def test_subfolders_are_classes(tmp_path):
    found = data.load("image-folder", by_class(tmp_path / "set"), image_size=6)
    assert (found.shape, found.classes) == ((3, 6, 6), 3)
    assert found.labels == tuple(sorted(path.name for path in (tmp_path / "set").iterdir()))
    assert (len(found.train_y), len(found.test_y)) == (24, 6)
    assert np.bincount(found.train_y).tolist() == [8, 8, 8]
    assert found.train_x.dtype == np.float32
    assert found.train_x[found.train_y == 1][:, 1].max() == pytest.approx(100 / 127.5 - 1)
    assert found.train_x[:, 2].max() == -1
    grey = data.load("image-folder", tmp_path / "set", image_size=6, channels=1)
    assert grey.shape == (1, 6, 6)


def test_train_and_test_folders_are_taken_as_they_are(tmp_path):
    by_class(tmp_path / "set" / "train", each=3)
    by_class(tmp_path / "set" / "test", each=2)
    found = data.load("image-folder", tmp_path / "set", image_size=4)
    assert (len(found.train_y), len(found.test_y)) == (9, 6)


def celeba(folder):
    for i in range(10):
        draw(folder / "img_align_celeba" / f"{i:06}.jpg", (20 * i, 0, 0))
    rows = [f"{i:06}.jpg  {1 if i % 2 else -1} -1" for i in range(10)]
    (folder / "list_attr_celeba.txt").write_text("\n".join(["10", "Smiling Young", *rows]) + "\n")
    return folder


def test_an_attribute_of_celeba(tmp_path):
    folder = celeba(tmp_path / "celeba")
    found = data.load("image-folder", folder, image_size=8, attribute="Smiling")
    assert found.labels == ("not Smiling", "Smiling")
    assert found.train_y.tolist() + found.test_y.tolist() == [0, 1, 0, 1, 1, 0, 1, 0, 0, 1]
    (folder / "list_eval_partition.txt").write_text(
        "\n".join(f"{i:06}.jpg {2 if i > 6 else i % 2}" for i in range(10))
    )
    images._load_resized.cache_clear()
    found = data.load("image-folder", folder, image_size=8, attribute="Smiling")
    assert (found.train_y.tolist(), found.test_y.tolist()) == (
        [0] * 4,
        [1, 0, 1],
    )  # 1 is for validation: left out


def test_an_image_that_the_partition_file_leaves_out(tmp_path):
    folder = celeba(tmp_path / "celeba")
    (folder / "list_eval_partition.txt").write_text(
        "\n".join(f"{i:06}.jpg {2 * (i % 2)}" for i in range(9))
    )
    with pytest.raises(DataError, match=r"does not say whether '000009\.jpg' is for training"):
        data.load("image-folder", folder, image_size=8, attribute="Smiling")


class TestStatedNumbers:
    """What a plan goes by where there is no folder is what a run demands of the folder."""

    def test_a_folder_with_these_numbers_is_taken(self, tmp_path):
        found = data.load(
            "image-folder",
            by_class(tmp_path / "set"),
            image_size=4,
            train_images=24,
            image_classes=3,
        )
        assert (len(found.train_y), found.classes) == (24, 3)

    @pytest.mark.parametrize(
        ("stated", "message"),
        [
            (
                {"train_images": 25},
                r"data\.train_images = 25, but .*set has 24 training images.* to 24 \(none accepts",
            ),
            ({"image_classes": 2}, r"data\.image_classes = 2, but .*set has 3 classes"),
        ],
    )
    def test_another_folder_is_refused_before_an_image_is_read(self, tmp_path, stated, message):
        folder = by_class(tmp_path / "set")
        with pytest.raises(DataError, match=message):
            data.load("image-folder", folder, image_size=4, **stated)
        assert not (tmp_path / "store").exists()

    def test_halves_have_the_numbers_that_are_published(self, tmp_path):
        folder = by_class(tmp_path / "set")
        for half in ("public", "private"):
            found = data.load(f"image-folder/{half}", folder, image_size=4, train_images=24)
            assert len(found.train_y) == data.published_examples(f"image-folder/{half}", 24)

    def test_the_outline_is_that_of_the_folder(self, tmp_path):
        options = {"image_size": 6, "channels": 1, "image_classes": 3}
        known = data.outline("image-folder", train_images=24, **options)
        found = data.load("image-folder", by_class(tmp_path / "set"), **options)
        assert (known.shape, known.classes) == (found.shape, found.classes)


def test_words_in_a_table_are_classes(tmp_path):
    for i in range(10):
        draw(tmp_path / "ffhq" / f"{i:05}.png", (i, i, i))
    rows = [f"{i:05}.png,{('old', 'young')[i % 2]}" for i in range(10)]
    (tmp_path / "ffhq" / "labels.csv").write_text("\n".join(["image,age", *rows]))
    found = data.load("image-folder", tmp_path / "ffhq", image_size=4, attribute="age")
    assert found.labels == ("old", "young")
    assert found.train_y[:4].tolist() == [0, 1, 0, 1]


def test_images_are_resized_once_and_mapped(tmp_path, monkeypatch):
    folder = by_class(tmp_path / "set")
    first = data.load("image-folder", folder, image_size=6)
    kept = list((tmp_path / "store" / "image-folder").iterdir())
    assert len(kept) == 1
    assert kept[0].stat().st_mode & 0o077 == 0
    images._load_resized.cache_clear()
    monkeypatch.setattr(images, "_read", None)  # nothing is read again
    again = data.load("image-folder", folder, image_size=6)
    assert np.array_equal(first.train_x, again.train_x)
    assert isinstance(again.train_x, np.memmap)
    monkeypatch.undo()
    monkeypatch.setenv("FEDLGM_DATA", str(tmp_path / "store"))
    draw(folder / "cats" / "000.png", (255, 255, 255))
    changed = data.load("image-folder", folder, image_size=6)
    assert not np.array_equal(first.train_x, changed.train_x)


def test_a_store_that_cannot_be_written_is_said_and_does_no_harm(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDLGM_DATA", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="held in memory"):
        found = data.load("image-folder", by_class(tmp_path / "set"), image_size=6)
    assert len(found.train_y) == 24


def test_halves_of_a_folder(tmp_path):
    folder = by_class(tmp_path / "set")
    halves = [
        data.load(f"image-folder/{half}", folder, image_size=6) for half in ("private", "public")
    ]
    assert [len(half.train_y) for half in halves] == [12, 12]


def one_class(folder):
    draw(folder / "only" / "a.png", (0, 0, 0))


def damaged(folder):
    by_class(folder)
    (folder / "cats" / "000.png").write_bytes(b"not a picture")


def short(folder):
    by_class(folder, each=2)


def missing(folder):
    celeba(folder)
    (folder / "img_align_celeba" / "000003.jpg").unlink()


def ragged(folder):
    celeba(folder)
    with (folder / "list_attr_celeba.txt").open("a") as file:
        file.write("000010.jpg 1\n")


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda folder: None, {}, r"needs data\.dir, a folder of images: '.*set' is not a folder"),
        (one_class, {}, "1 subfolders with images; give one subfolder per class"),
        (damaged, {}, r"000\.png is not a readable image"),
        (short, {}, "6 images, but no test image"),
        (by_class, {"channels": 2}, "channels must be 1 or 3"),
        (by_class, {"attribute": "Smiling"}, "no attribute file"),
        (celeba, {"attribute": "Bald"}, "no attribute 'Bald'; it has Smiling, Young"),
        (missing, {"attribute": "Smiling"}, "names '000003.jpg', which is not among the 9 images"),
        (ragged, {"attribute": "Smiling"}, "row 11 has 1 values for 2 attributes"),
    ],
)
def test_what_is_wrong_is_said_with_its_name(tmp_path, make, options, message):
    make(tmp_path / "set")
    with pytest.raises(DataError, match=message):
        data.load("image-folder", tmp_path / "set", **options)


def test_a_folder_must_be_named():
    with pytest.raises(DataError, match=r"needs data\.dir, a folder of images: it is not set"):
        data.load("image-folder")


def test_options_of_images_are_for_folders_of_images():
    with pytest.raises(
        ConfigError,
        match=r"image_size is for data\.name = 'image-folder' or 'hf:owner/name', not for 'digits'",
    ):
        data.load("digits", image_size=8)


class TestPixelsKeepTheirMeaning:
    """Black is -1 and white is 1 in every mode, or the mode is refused; a photograph stands
    upright."""

    def one(self, folder, array, ending="tif", **options):
        for name in ("a", "b"):
            for part in ("train", "test"):
                (folder / part / name).mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(folder / part / name / f"x.{ending}", **options)
        return data.load("image-folder", folder, image_size=4, channels=1)

    @pytest.mark.parametrize("ending", ["png", "tif"])
    def test_sixteen_bits_are_scaled(self, tmp_path, ending):
        found = self.one(
            tmp_path / "set", np.tile(np.array([0, 20000, 40000, 65535], np.uint16), (4, 1)), ending
        )
        assert found.train_x[0, 0, 0].tolist() == pytest.approx([-1, -0.389, 0.221, 1], abs=0.01)

    @pytest.mark.parametrize(("kind", "mode"), [(np.float32, "F"), (np.int32, "I")])
    def test_modes_without_black_and_white_are_refused(self, tmp_path, kind, mode):
        with pytest.raises(
            DataError, match=rf"x\.tif: an image of Pillow's mode '{mode}' does not say"
        ):
            self.one(tmp_path / "set", np.ones((4, 4), kind))

    def test_exif_data_turn_an_image(self, tmp_path):
        exif = Image.Exif()
        exif[0x0112] = 3  # upside down
        found = self.one(
            tmp_path / "set",
            np.repeat([[0], [255]], 2, axis=0).repeat(4, 1).astype(np.uint8),
            "png",
            exif=exif,
        )
        assert found.train_x[0, 0, 0].tolist() == [1] * 4
        assert found.train_x[0, 0, 3].tolist() == [-1] * 4

    def test_an_image_beyond_pillows_limit_is_one_sentence(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
        with pytest.raises(
            DataError, match=r"x\.png is too large an image to decode: save it with fewer pixels"
        ):
            self.one(tmp_path / "set", np.zeros((4, 4), np.uint8), "png")


def test_a_class_of_private_images_only_is_refused(tmp_path):
    by_class(tmp_path / "set" / "train", each=3)
    for name in ("cats", "dogs"):
        draw(tmp_path / "set" / "test" / name / "0.png", (0, 0, 0))
    with pytest.raises(
        DataError, match=r"no test image has the class 'eels', so private images alone would add"
    ):
        data.load("image-folder", tmp_path / "set", image_size=4)
    with pytest.raises(DataError, match=r"no test image has the class 'eels'"):
        data.load("image-folder", few(tmp_path / "few"), image_size=4)


def few(folder):
    by_class(folder)
    for path in (folder / "eels").glob("00[4-9].png"):
        path.unlink()
    return folder


class TestAttributeFilesNameEachImageOnce:
    """An attribute file gives one value to one image, or is refused."""

    def load(self, folder, rows):
        for i, part in enumerate("ab"):
            for j in range(5):
                draw(folder / part / f"{j}.png", (255 * i, 255 * i, 255 * i))
        (folder / "list.csv").write_text(
            "file,k\n" + "".join(f"{name},{value}\n" for name, value in rows)
        )
        return data.load("image-folder", folder, image_size=4, attribute="k")

    def test_images_of_one_name_in_two_folders_are_two_images(self, tmp_path):
        rows = [(f"{part}/{j}.png", int(part == "b")) for part in "ab" for j in range(5)]
        found = self.load(tmp_path, rows)
        assert [np.unique(x).tolist() for x in found.train_x] == [[-1]] * 4 + [[1]] * 4
        assert found.train_y.tolist() == [0] * 4 + [1] * 4

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([("0.png", 1)], r"names '0\.png', which may be a/0\.png and b/0\.png: give paths"),
            ([("a/0.png", 1), ("a/0.png", 0)], r"names 'a/0\.png' twice: drop one row"),
            (
                [("a/0.png", 1), ("./a/0.png", 0)],
                r"twice, as 'a/0\.png' and '\./a/0\.png': drop one row",
            ),
            (
                [("a/0.png", 1), ("b/0.png", "nan"), ("b/1.png", 0)],
                r"attribute 'k' has no value for 'b/0\.png' \(1 of 3 images\): leave out",
            ),
            (
                [("a/0.png", "mild"), ("b/0.png", ""), ("b/1.png", "NA")],
                r"attribute 'k' has no value for 'b/0\.png' \(1 of 3 images\): leave out",
            ),
        ],
    )
    def test_what_may_be_another_image_or_no_value_is_refused(self, tmp_path, rows, message):
        with pytest.raises(DataError, match=message):
            self.load(tmp_path, rows)
