import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spingrad_lab.data import (
    adult,
    cifar10,
    fashion_mnist,
    karate,
    key_points,
    line_features,
    mnist,
    planetoid,
    tiny_shakespeare,
)
from spingrad_lab.data.download import DataError
from spingrad_lab.data.graphs import unpickle

# torch_geometric still scripts its classes, which torch has deprecated.
old_torch_geometric = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.mark.parametrize("load", [mnist, fashion_mnist])
def test_images_have_the_published_counts(data_folder, load):
    train, test = load("train"), load("test")
    assert train.images.shape == (60_000, 28, 28)
    assert test.images.shape == (10_000, 28, 28)
    assert train.images.dtype == torch.uint8
    assert test.labels.bincount().sum() == 10_000
    assert len(train.labels.unique()) == 10
    pixels = train.pixels()
    assert pixels.shape == (60_000, 784)
    if load is mnist:
        assert pixels.mean().item() == pytest.approx(0.1307, abs=1e-4)
        assert pixels.std().item() == pytest.approx(0.3081, abs=1e-4)


@pytest.fixture
def with_a_changed_byte(data_folder, tmp_path, monkeypatch):
    """Copy a folder of data, change one byte of one file, and read from there."""

    def change(folder, file):
        shutil.copytree(Path(data_folder) / folder, tmp_path / folder, copy_function=shutil.copyfile)
        (tmp_path / folder).chmod(0o755)
        path = tmp_path / folder / file
        content = bytearray(path.read_bytes())
        content[1000] ^= 1
        path.write_bytes(content)
        monkeypatch.setenv("SPINGRAD_DATA", str(tmp_path))

    return change


def test_a_changed_byte_is_refused_before_parsing(with_a_changed_byte):
    with_a_changed_byte("mnist", "t10k-labels-idx1-ubyte.gz")
    with pytest.raises(ValueError, match=r"t10k-labels.*expected a file with SHA-256 f7ae60f9"):
        mnist("test")


def test_a_changed_byte_is_refused_before_unpickling(with_a_changed_byte, monkeypatch):
    with_a_changed_byte("planetoid", "ind.cora.y")
    monkeypatch.setattr("spingrad_lab.data.graphs.unpickle", lambda content: pytest.fail("unpickled"))
    with pytest.raises(ValueError, match=r"ind\.cora\.y.*expected a file with SHA-256 94465c14"):
        planetoid("cora")


def test_a_huge_file_is_refused_without_reading_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINGRAD_DATA", str(tmp_path))
    (tmp_path / "adult").mkdir()
    with open(tmp_path / "adult" / "a1a", "wb") as file:
        file.truncate(200 * 10**9)
    with pytest.raises(DataError, match=r"a1a: expected a file of 114,818 bytes, got 200,000,000,000"):
        adult("train")


def test_a_folder_in_the_place_of_a_file_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINGRAD_DATA", str(tmp_path))
    (tmp_path / "adult" / "a1a").mkdir(parents=True)
    with pytest.raises(DataError, match=r"a1a: expected a file, got a folder"):
        adult("train")


def test_every_official_source_is_encrypted():
    from spingrad_lab.data import graphs

    modules = [sys.modules[load.__module__] for load in (adult, cifar10, tiny_shakespeare)]
    sources = [*sys.modules[mnist.__module__]._SOURCE.values(), graphs._SOURCE, *(m._SOURCE for m in modules)]
    assert all(url.startswith("https://") for url in sources)


def test_cifar10_has_the_published_counts(data_folder):
    test = cifar10("test")
    assert test.images.shape == (10_000, 3, 32, 32)
    assert test.labels.bincount().tolist() == [1000] * 10


def test_tiny_shakespeare_has_the_published_length(data_folder):
    text = tiny_shakespeare()
    assert (len(text), len(set(text))) == (1_115_394, 65)


def test_wrong_splits_are_explained():
    for load in (mnist, adult):
        with pytest.raises(ValueError, match='"train" or "test", got \'valid\''):
            load("valid")
    with pytest.raises(ValueError, match='"citeseer" or "pubmed", got \'dblp\''):
        planetoid("dblp")


@pytest.mark.parametrize(("split", "count", "positive"), [("train", 1605, 395), ("test", 30956, 7446)])
def test_adult_has_the_published_counts(data_folder, split, count, positive):
    table = adult(split)
    assert table.features.shape == (count, 123)
    assert table.features.unique().tolist() == [0, 1]
    assert table.labels.bincount().tolist() == [count - positive, positive]
    if split == "train":  # the file's first line
        first = [3, 11, 14, 19, 39, 42, 55, 64, 67, 73, 75, 76, 80, 83]
        assert (table.features[0].nonzero().flatten() + 1).tolist() == first
        assert table.labels[0] == 0


@pytest.mark.parametrize(
    ("name", "nodes", "width", "edges", "classes", "train"),
    [
        ("cora", 2708, 1433, 10556, 7, 140),
        ("citeseer", 3327, 3703, 9104, 6, 120),
        ("pubmed", 19717, 500, 88648, 3, 60),
    ],
)
def test_planetoid_has_the_published_counts(data_folder, name, nodes, width, edges, classes, train):
    pytest.importorskip("scipy")
    graph = planetoid(name)
    assert graph.features.shape == (nodes, width)
    assert graph.edge_index.shape == (2, edges)
    assert graph.labels.unique().tolist() == list(range(classes))
    assert graph.labels[graph.train].bincount().tolist() == [train // classes] * classes
    assert [len(part) for part in (graph.train, graph.val, graph.test)] == [train, 500, 1000]
    source, target = graph.edge_index
    assert (source != target).all()
    forward, backward = source * nodes + target, target * nodes + source
    assert torch.equal(forward.unique(), backward.unique())


@old_torch_geometric
@pytest.mark.parametrize("name", ["cora", "citeseer"])
def test_planetoid_equals_torch_geometric(data_folder, name):
    pytest.importorskip("torch_geometric")
    from torch_geometric.io import read_planetoid_data

    theirs, ours = read_planetoid_data(f"{data_folder}/planetoid", name), planetoid(name)
    assert torch.equal(ours.features, theirs.x)
    assert torch.equal(ours.labels, theirs.y)
    assert torch.equal(ours.edge_index.flip(0), theirs.edge_index)
    for part in ("train", "val", "test"):
        assert torch.equal(getattr(ours, part), theirs[f"{part}_mask"].nonzero().flatten())


@pytest.mark.parametrize("function", [os.system, eval, shutil.rmtree])
def test_a_pickle_that_names_anything_else_is_refused(function):
    pytest.importorskip("scipy")
    for protocol in (0, 2, 4):
        name = function.__qualname__
        with pytest.raises(pickle.UnpicklingError, match=rf"do not need \w+\.{name}; refused"):
            unpickle(pickle.dumps(function, protocol))


@old_torch_geometric
def test_karate_has_four_communities_and_numbered_nodes():
    pytest.importorskip("torch_geometric")
    graph = karate()
    assert graph.labels.bincount().tolist() == [13, 12, 4, 5]
    assert graph.edge_index.shape == (2, 156)
    assert graph.features.shape == (34, 6)
    assert graph.features[33].tolist() == [1, -1, -1, -1, -1, 1]
    assert len(graph.features.unique(dim=0)) == 34
    assert not any(len(part) for part in (graph.train, graph.val, graph.test))


def test_key_points_cover_the_image_with_about_as_many_as_asked(data_folder):
    pytest.importorskip("skimage")
    points = key_points(mnist("test").images[:20])
    assert points.shape == (20, 75, 3)
    found = ~points.isnan().any(2)
    assert 60 < found.sum(1).float().mean() <= 75
    assert ((points[found] >= 0) & (points[found] <= torch.tensor([27, 27, 1]))).all()
    assert found.int().diff(dim=1).max() <= 0  # missing ones come last


def test_key_points_of_two_halves_are_dark_left_and_bright_right():
    pytest.importorskip("skimage")
    image = torch.zeros(1, 28, 28, dtype=torch.uint8)
    image[:, :, 14:] = 255
    quarters = [[6.5, 6.5, 0], [6.5, 20.5, 1], [20.5, 6.5, 0], [20.5, 20.5, 1]]
    torch.testing.assert_close(key_points(image, num_segments=4)[0], torch.tensor(quarters), atol=0.6, rtol=0)


def test_images_of_the_wrong_type_are_explained():
    pytest.importorskip("skimage")
    with pytest.raises(ValueError, match=r"got torch.float32 of shape \(1, 28, 28\)"):
        key_points(torch.zeros(1, 28, 28))


def random_points(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(*shape, 3, generator=generator) * torch.tensor([27, 27, 1])


@pytest.mark.parametrize("centre", ["image", "points"])
def test_line_features_equal_a_count_by_hand(centre):
    points = random_points(5, 21)
    points[:, 18:] = torch.nan
    features = line_features(points, keep="stroke", centre=centre)
    for image, row in zip(points, features, strict=True):
        kept = image[image[:, 2] > 0.2].double()
        middle = kept[:, :2].mean(0) if centre == "points" else torch.tensor([13.5, 13.5])
        for i, feature in enumerate(row):
            angle = torch.tensor(torch.pi * i / 16).double()
            side = ((kept[:, :2] - middle) @ torch.stack([angle.sin(), angle.cos()])).sign()
            assert feature == (1 if side.sum() > 0 else -1)


def test_points_on_one_side_of_a_line_decide_it():
    below = torch.tensor([[[20.0, 13.5, 1.0], [27.0, 13.5, 1.0]]])
    assert line_features(below)[0].tolist() == [-1] + [1] * 15  # on the first line is on neither side
    right = torch.tensor([[[13.5, 20.0, 1.0], [13.5, 27.0, 1.0]]])
    assert line_features(right)[0].tolist() == [1] * 8 + [-1] * 8


def test_mirrored_points_flip_every_line():
    points = random_points(8, 75)  # odd: no ties
    mirrored = torch.cat([27 - points[..., :2], points[..., 2:]], 2)
    assert torch.equal(line_features(mirrored), -line_features(points))


def test_dark_and_missing_points_have_no_vote():
    points = random_points(8, 75)
    dark = random_points(8, 9) * torch.tensor([1, 1, 0.1])
    missing = torch.full((8, 4, 3), torch.nan)
    more = torch.cat([points, dark, missing], 1)
    for centre in ("image", "points"):
        expected = line_features(points, keep="stroke", centre=centre)
        assert torch.equal(line_features(more, keep="stroke", centre=centre), expected)


def test_unknown_points_and_centres_are_explained():
    with pytest.raises(ValueError, match='"all" or "stroke", got \'ink\''):
        line_features(random_points(1, 3), keep="ink")
    with pytest.raises(ValueError, match='"image" or "points", got \'mass\''):
        line_features(random_points(1, 3), centre="mass")


@pytest.mark.parametrize(
    ("missing", "call"),
    [
        ("torch_geometric.datasets", karate),
        ("skimage.segmentation", lambda: key_points(torch.zeros(1, 28, 28).byte())),
    ],
)
def test_a_missing_extra_names_the_command(monkeypatch, missing, call):
    for name in (missing, missing.split(".")[0]):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "spingrad-lab\[all\]"'):
        call()


def test_importing_the_data_sets_imports_no_extra():
    heavy = "{'scipy', 'skimage', 'torch_geometric'}"
    code = f"import sys, spingrad_lab.data, spingrad.nn.gcn; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
