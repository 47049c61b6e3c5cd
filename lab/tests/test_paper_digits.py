import torch

from spingrad_lab.paper.digits import CLASSIFIED_DIGITS, FEATURE_EXTRACTION, pack, unpack
from spingrad_lab.paper.small import MNIST_PAIRS, TABLE_1
from spingrad_lab.runs import Lab, read_lines, to_frame
from spingrad_lab.tasks.small import DEFINITIONS


def run_quickly(name, experiment, folder):
    lab = Lab(name, experiment, folder, quick=True, workers=0)
    experiment.plan(lab)
    return to_frame(read_lines(lab.path))


def test_images_survive_packing():
    images = torch.arange(2 * 28 * 28).view(2, 28, 28).to(torch.uint8)
    assert (unpack(pack(images)) == images.numpy()).all()


def test_an_image_becomes_sixteen_bits_by_every_definition(data_folder, tmp_path):
    runs = run_quickly("feature-extraction", FEATURE_EXTRACTION, tmp_path)
    for bits in runs["bits"]:
        assert bits.keys() == DEFINITIONS.keys()
        assert {len(own) for own in bits.values()} == {16}
    (figure,) = FEATURE_EXTRACTION.show(runs).figures
    assert figure.svg.startswith("<svg")


def test_the_images_shown_are_those_that_were_classified(data_folder, tmp_path):
    runs = run_quickly("classified-digits", CLASSIFIED_DIGITS, tmp_path)
    for _, run in runs.iterrows():
        for digit in (1, 2):
            assert len(unpack(run[f"{digit}s"])) == len(run[f"{digit}s as"]) == CLASSIFIED_DIGITS.count
            assert set(run[f"{digit}s as"]) <= {1, 2}
    section = CLASSIFIED_DIGITS.show(runs)
    assert [figure.name for figure in section.figures] == ["classified-1s", "classified-2s"]


def test_every_pair_of_digits_has_the_paper_s_numbers_for_both_features():
    assert MNIST_PAIRS.paper.keys() == MNIST_PAIRS.tasks.keys()
    for task, own in MNIST_PAIRS.paper.items():
        assert own == TABLE_1[task[:3]]
