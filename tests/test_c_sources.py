"""The C files of an exported network: each compiles by itself, and each function is compared with numpy."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from spingrad.export import library

SOURCES = Path(library.__file__).parent / "sources"
STRICT = "-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Wshadow", "-Werror", "-std=c99", "-O2", "-c"
COMPILERS = {
    "gcc": (),
    "clang": (),
    "avr-gcc": ("-mmcu=atmega328p",),
    "arm-none-eabi-gcc": ("-mcpu=cortex-m0", "-mthumb"),
    "riscv64-unknown-elf-gcc": ("-march=rv32imac", "-mabi=ilp32", "--specs=picolibc.specs"),
}
CHIPS = {"avr.c": "avr-gcc", "cortex_m.c": "arm-none-eabi-gcc", "riscv.c": "riscv64-unknown-elf-gcc"}
WORDS = 8, 16, 32
NUMBERS = {"u8": np.uint8, "i8": np.int8, "i16": np.int16, "i32": np.int32}


def need(program):
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")


@pytest.mark.parametrize("bits", WORDS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_compiler_takes_each_file_by_itself(compiler, bits, tmp_path):
    need(compiler)
    for file in ("network.c", "library.c", "test.c"):
        # A file alone has functions that only a network calls, and includes the header for its types.
        options = f"-DNETWORK_WORD_BITS={bits}", "-Wno-unused-function", "-include", SOURCES / "network.h"
        command = [compiler, *COMPILERS[compiler], *STRICT, *options, SOURCES / file, "-o", tmp_path / "a.o"]
        subprocess.run(command, check=True)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_program_of_a_chip_compiles_by_itself(chip, tmp_path):
    need(compiler := CHIPS[chip])
    shutil.copy(SOURCES / "chips" / chip, tmp_path / "chip.c")
    shutil.copy(SOURCES / "chips/main.c", tmp_path)
    flags = [flag for flag in STRICT if flag != "-std=c99"]
    command = [compiler, *COMPILERS[compiler], *flags, "-std=gnu99", f"-I{SOURCES}", "main.c"]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_the_files_are_formatted():
    need("clang-format")
    files = [*SOURCES.glob("*.[ch]"), *SOURCES.glob("chips/*.c")]
    subprocess.run(["clang-format", "--dry-run", "--Werror", *files], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("bits", WORDS)
def test_clang_tidy_and_cppcheck_find_nothing(bits):
    need("clang-tidy")
    need("cppcheck")
    left_out = "easily-swappable-parameters", "suspicious-include", "macro-parentheses"
    checks = "-*,clang-analyzer-*,bugprone-*," + ",".join(f"-bugprone-{name}" for name in left_out)
    file, word = str(SOURCES / "network.c"), f"-DNETWORK_WORD_BITS={bits}"
    tidy = ["clang-tidy", "--quiet", f"--checks={checks}", "--warnings-as-errors=*", file]
    subprocess.run([*tidy, "--", "-std=c99", word, "-Wno-unused-function"], check=True)
    options = "--enable=warning,performance,portability", "--inline-suppr", "--error-exitcode=1", "--std=c99"
    limits = "-DINT_MAX=2147483647", "--suppress=missingIncludeSystem"
    done = subprocess.run(
        ["cppcheck", *options, *limits, word, "--quiet", file], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_calls_of_a_function_are_read_from_the_file():
    text = library.needed(["sum_valid_bits"])
    names = ("count(", "carry_of_four(", "valid_differences(", "sum_valid_bits(")
    assert sorted(names, key=text.index) == list(names)
    assert "patch_of" not in text
    assert library.needed(["pool_u8"]).count("static") == 1


def test_values_go_where_a_file_marks_them():
    text = (
        "int x = 3 /*@count*/;\n    /* @calls: an example */\n    f(1);\n    /* @end */\nreturn *p /*@p*/;\n"
    )
    filled = library.filled(text, {"count": 12, "calls": "    g(2);\n", "p": "*q, 4"})
    assert filled == "int x = 12;\n    g(2);\nreturn *q, 4;\n"


class Kernels:
    """The functions of ``library.c``, compiled for this machine with words of some size."""

    def __init__(self, bits, folder):
        self.bits, self.word = bits, np.dtype(f"u{bits // 8}")
        options = "-Dstatic=", f"-DNETWORK_WORD_BITS={bits}", "-include", SOURCES / "network.h"
        command = ["gcc", "-std=c99", "-O1", "-fPIC", "-shared", *options, SOURCES / "library.c"]
        subprocess.run([*command, "-o", folder / "kernels.so"], check=True)
        self.compiled = ctypes.CDLL(str(folder / "kernels.so"))

    def __call__(self, name, *arguments):
        values = [x.ctypes.data_as(ctypes.c_void_p) if isinstance(x, np.ndarray) else x for x in arguments]
        return getattr(self.compiled, name)(*values)

    def packed(self, ones, width=None):
        """Bits as words, the first in the lowest bit; with a width, each row from a word of its own."""
        ones = np.atleast_2d(np.asarray(ones, np.uint8).reshape(-1, width or np.size(ones)))
        ones = np.pad(ones, ((0, 0), (0, -ones.shape[1] % self.bits)))
        return np.packbits(ones, axis=1, bitorder="little").view(self.word).ravel()

    def ones(self, words, count):
        return np.unpackbits(words.view(np.uint8), bitorder="little")[:count]


@pytest.fixture(scope="module", params=WORDS)
def kernels(request, tmp_path_factory):
    need("gcc")
    return Kernels(request.param, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def random():
    return np.random.default_rng(0)


def sums_of(count):
    return np.full(count, -77, np.int32)


def test_bits_are_counted_and_read(kernels, random):
    for word in random.integers(0, 2**kernels.bits, 50):
        assert kernels("count", int(word)) == int(word).bit_count()
    ones = random.integers(0, 2, 70)
    assert [kernels("get_bit", kernels.packed(ones), place) for place in range(70)] == ones.tolist()


def test_bits_are_copied_and_filled_at_any_place(kernels, random):
    for _ in range(100):
        source, target = random.integers(0, 2, (2, 160))
        first, to, count = (int(random.integers(0, end)) for end in (70, 70, 90))
        words, value = kernels.packed(target), int(random.integers(0, 2))
        kernels("copy_bits", kernels.packed(source), first, count, words, to)
        expected = target.copy()
        expected[to : to + count] = source[first : first + count]
        np.testing.assert_array_equal(kernels.ones(words, 160), expected)
        kernels("fill_bits", value, count, words, first)
        expected[first : first + count] = value
        np.testing.assert_array_equal(kernels.ones(words, 160), expected)


def test_spins_are_packed_with_the_channels_of_a_pixel_together(kernels, random):
    spins = random.choice(np.array([-1, 1], np.int8), (5, 21))
    words = kernels.packed(np.zeros(105))
    kernels("spins_of_input", spins, 5, 21, words)
    np.testing.assert_array_equal(kernels.ones(words, 105), spins.T.ravel() > 0)


@pytest.mark.parametrize("inputs", [1, 31, 128, 300])
def test_sums_of_spins(kernels, random, inputs):
    x, valid = random.integers(0, 2, (2, inputs))
    weight = random.integers(0, 2, (9, inputs))
    sums, spins = sums_of(9), (2 * weight - 1) * (2 * x - 1)
    kernels("sum_bits", kernels.packed(x), kernels.packed(weight, inputs), inputs, 9, sums)
    np.testing.assert_array_equal(sums, spins.sum(1))
    masked = kernels.packed(x), kernels.packed(valid), kernels.packed(weight, inputs)
    kernels("sum_valid_bits", *masked, inputs, 9, sums)
    np.testing.assert_array_equal(sums, (spins * valid).sum(1))
    whole = random.integers(-127, 128, (9, inputs)).astype(np.int8)
    kernels("sum_whole_bits", kernels.packed(x), whole, inputs, 9, sums)
    np.testing.assert_array_equal(sums, whole.astype(int) @ (2 * x - 1))


@pytest.mark.parametrize("inputs", [1, 31, 128, 300])
@pytest.mark.parametrize(
    ("kind", "table", "bound"),
    [
        ("u8", "i16", 255),
        ("i8", "i16", 127),
        ("i16", "i16", 1023),
        ("i16", "i32", 32767),
        ("i32", "i32", 2**20),
    ],
)
def test_sums_of_integers(kernels, random, kind, table, bound, inputs):
    x = random.integers(0 if kind == "u8" else -bound, bound + 1, inputs).astype(NUMBERS[kind])
    weight, sums = random.integers(0, 2, (9, inputs)), sums_of(9)
    kernels(f"sum_{kind}_in_{table}", x, kernels.packed(weight, inputs), inputs, 9, sums)
    np.testing.assert_array_equal(sums, (2 * weight - 1) @ x.astype(int))
    whole = random.integers(-127, 128, (9, inputs)).astype(np.int8)
    kernels(f"sum_whole_{kind}", x, whole, inputs, 9, sums)
    np.testing.assert_array_equal(sums, (whole.astype(np.int64) @ x.astype(np.int64)).astype(np.int32))


SIZE = 6, 4, 5  # channels, height and width of an image
KERNEL, STRIDE, CORNER, DILATION = (2, 3), (2, 1), (1, 2), (1, 2)


def geometry(channels, by_channel=False):
    apart = (20, 1) if by_channel else (1, SIZE[0])
    return np.array([channels, *SIZE[1:], *apart, *KERNEL, *STRIDE, *CORNER, *DILATION], np.int32)


def window(image, first, channels, y, x, corner=CORNER):
    """A patch of an image (channels, height, width) in the order of the C, and which places lie inside."""
    values, inside = [], []
    for i in range(KERNEL[0]):
        for j in range(KERNEL[1]):
            row = y * STRIDE[0] - corner[0] + i * DILATION[0]
            column = x * STRIDE[1] - corner[1] + j * DILATION[1]
            within = 0 <= row < SIZE[1] and 0 <= column < SIZE[2]
            values += [image[c, row, column] if within else 0 for c in range(first, first + channels)]
            inside += [within] * channels
    return np.array(values), np.array(inside)


@pytest.mark.parametrize(("y", "x"), [(0, 0), (1, 2), (2, 4)])
def test_patches_of_spins(kernels, random, y, x):
    image = random.integers(0, 2, SIZE)
    stored, (values, inside) = kernels.packed(image.transpose(1, 2, 0)), window(image, 2, 3, y, x)
    patch, valid, numbers = kernels.packed(np.zeros(18)), kernels.packed(np.zeros(18)), np.zeros(18, np.int8)
    kernels("patch_of_valid_bits", stored, geometry(3), 2, y, x, patch, valid)
    np.testing.assert_array_equal(kernels.ones(valid, 18), inside)
    np.testing.assert_array_equal(kernels.ones(patch, 18)[inside], values[inside])
    kernels("patch_of_spins", stored, geometry(3), 2, y, x, numbers)
    np.testing.assert_array_equal(numbers, np.where(inside, 2 * values - 1, 0))


def test_patches_without_a_border(kernels, random):
    image = random.integers(0, 2, SIZE)
    stored, patch = kernels.packed(image.transpose(1, 2, 0)), kernels.packed(np.zeros(18))
    kernels("patch_of_bits", stored, geometry(3), 2, 1, 0, patch)
    np.testing.assert_array_equal(kernels.ones(patch, 18), window(image, 2, 3, 1, 0, (0, 0))[0])


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("kind", NUMBERS)
def test_patches_of_integers(kernels, random, kind, by_channel):
    image = random.integers(0, 100, SIZE).astype(NUMBERS[kind])
    stored = np.ascontiguousarray(image if by_channel else image.transpose(1, 2, 0))
    patch = np.zeros(18, NUMBERS[kind])
    kernels(f"patch_of_{kind}", stored, geometry(3, by_channel), 2, 1, 4, patch)
    np.testing.assert_array_equal(patch, window(image, 2, 3, 1, 4)[0])


@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("kind", ["bits", *NUMBERS])
def test_pools(kernels, random, kind, add):
    image = random.integers(0, 2 if kind == "bits" else 100, SIZE)
    last = np.ascontiguousarray(image.transpose(1, 2, 0))
    stored = kernels.packed(last) if kind == "bits" else last.astype(NUMBERS[kind])
    part = image[1:5, 2:4, 1:4] * (2 if kind == "bits" else 1) - (kind == "bits")
    sums = sums_of(4)
    kernels(f"pool_{kind}", stored, geometry(0), 1, 1, 1, add, 4, sums)
    np.testing.assert_array_equal(sums, part.sum((1, 2)) if add else part.max((1, 2)))


@pytest.mark.parametrize("kind", ["bits", *NUMBERS])
def test_values_are_loaded_joined_turned_padded_and_put(kernels, random, kind):
    image = random.integers(0, 2 if kind == "bits" else 100, SIZE)
    last = np.ascontiguousarray(image.transpose(1, 2, 0))
    stored = kernels.packed(last) if kind == "bits" else last.astype(NUMBERS[kind])
    numbers = 2 * last - 1 if kind == "bits" else last
    stride, sums = [] if kind == "bits" else [1], sums_of(4)
    kernels(f"load_{kind}", stored, 13, *stride, 4, sums)
    np.testing.assert_array_equal(sums, numbers.ravel()[13:17])
    kernels(f"join_{kind}", stored, 25, *stride, -3, 4, sums)
    np.testing.assert_array_equal(sums, numbers.ravel()[13:17] - 3 * numbers.ravel()[25:29])
    kernels(f"turn_{kind}", stored, 6, 20, 18, 4, sums)
    np.testing.assert_array_equal(sums, numbers.transpose(2, 0, 1).ravel()[18:22])
    if kind != "bits":
        for first, row, column in ((-2, 1, 1), (4, 3, 4), (0, -1, 0), (1, 0, 5)):
            kernels(f"pad_{kind}", stored, geometry(6), first, row, column, 4, sums)
            inside = 0 <= row < 4 and 0 <= column < 5
            expected = [
                image[c, row, column] if inside and 0 <= c < 6 else 0 for c in range(first, first + 4)
            ]
            np.testing.assert_array_equal(sums, expected)
    values = random.integers(-1 if kind == "bits" else 0, 2 if kind == "bits" else 100, 4).astype(np.int32)
    out = stored.copy()
    kernels(f"put_{kind}", values, 4, out, 13)
    after = kernels.ones(out, last.size) if kind == "bits" else out.ravel()
    expected = last.ravel().copy()
    expected[13:17] = values >= 0 if kind == "bits" else values
    np.testing.assert_array_equal(after, expected)


def test_activations_of_sums(kernels, random):
    x = random.integers(-500, 500, 40).astype(np.int32)
    sums = x.copy()
    kernels("multiply", -3, 40, sums)
    np.testing.assert_array_equal(sums, -3 * x)
    sums = x.copy()
    kernels("clip", -7, 90, 40, sums)
    np.testing.assert_array_equal(sums, np.clip(x, -7, 90))
    sums = x.copy()
    kernels("compare", 12, 40, sums)
    np.testing.assert_array_equal(sums, np.where(x >= 12, 1, -1))
    directions = random.choice(np.array([-1, 1], np.int8), 40)
    sums = x.copy()
    kernels("direct", directions, 40, sums)
    np.testing.assert_array_equal(sums, x * directions)
    for kind in ("i16", "i32"):
        thresholds, sums = random.integers(-500, 500, 40).astype(NUMBERS[kind]), x.copy()
        kernels(f"compare_{kind}", thresholds, 40, sums)
        np.testing.assert_array_equal(sums, np.where(x >= thresholds, 1, -1))


@pytest.mark.parametrize("shift", [0, 7, 40])
def test_rescaling_rounds_down_and_clips(kernels, random, shift):
    x = random.integers(-500, 500, 40).astype(np.int32)
    multipliers = random.integers(-(2**31), 2**31, 40).astype(np.int32)
    offsets = random.integers(-(2**50), 2**50, 40)
    sums = x.copy()
    kernels("rescale_each", multipliers, offsets, shift, -1000, 2**20, 40, sums)
    exact = [int(m) * int(k) + int(o) >> shift for m, k, o in zip(multipliers, x, offsets, strict=True)]
    np.testing.assert_array_equal(sums, np.clip(exact, -1000, 2**20))
    sums = x.copy()
    offset = ctypes.c_int64(int(offsets[0]))
    kernels("rescale", int(multipliers[0]), offset, shift, -1000, 2**20, 40, sums)
    exact = [int(multipliers[0]) * int(k) + int(offsets[0]) >> shift for k in x]
    np.testing.assert_array_equal(sums, np.clip(exact, -1000, 2**20))
