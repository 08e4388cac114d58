"""Tar and Parquet files as data sets: what is read, in how many reads, and what is refused."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

import loft_hvd as loft
from loft_hvd.data.shards import ParquetShards, ShardFiles, TarShards
from loft_hvd.errors import ArgumentTypeError, DataError
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.plans import FakePlans

Members = list[tuple[str, bytes]]


def write_tar(path: Path, members: Members, *, format_: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format_) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def numbered(first: int, count: int) -> Members:
    """Samples of an image and a label, whose bytes are their number."""
    return [
        member
        for i in range(first, first + count)
        for member in ((f"{i:06d}.jpg", b"%d" % i * (1 + i % 7)), (f"{i:06d}.cls", b"%d" % i))
    ]


def write_parquet(path: Path, first: int, count: int, *, rows: int = 10) -> Path:
    pa = pytest.importorskip("pyarrow", reason="the extra [store] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra [store] is not installed")
    numbers = range(first, first + count)
    table = pa.table({"cls": [str(i).encode() for i in numbers], "number": list(numbers)})
    parquet.write_table(table, path, row_group_size=rows, write_page_checksum=True)
    return path


def tars(folder: Path, *counts: int) -> list[Path]:
    firsts = np.cumsum([0, *counts]).tolist()
    return [
        write_tar(folder / f"{place:04d}.tar", numbered(first, count))
        for place, (first, count) in enumerate(zip(firsts, counts, strict=False))
    ]


def parquets(folder: Path, *counts: int) -> list[Path]:
    firsts = np.cumsum([0, *counts]).tolist()
    return [
        write_parquet(folder / f"{place:04d}.parquet", first, count)
        for place, (first, count) in enumerate(zip(firsts, counts, strict=False))
    ]


def all_of(dataset: ShardFiles) -> list[Any]:
    return [dataset[i] for i in range(len(dataset))]


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


@pytest.fixture(params=["tar", "parquet"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., ShardFiles]:
    """Makes a data set of numbers in files of so many samples."""

    def make_one(*counts: int, decode: Any = number_of, **options: Any) -> ShardFiles:
        if request.param == "tar":
            return TarShards(tars(tmp_path, *counts), decode=decode, **options)
        return ParquetShards(parquets(tmp_path, *counts), decode=decode, **options)

    return make_one


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read that a tar file gets for samples."""
    found: list[int] = []
    pread = os.pread

    def counted(descriptor: int, length: int, begin: int) -> bytes:
        found.append(length)
        return pread(descriptor, length, begin)

    monkeypatch.setattr(os, "pread", counted)
    return found


def test_every_sample_is_where_it_was_packed(make: Callable[..., ShardFiles]) -> None:
    dataset = make(30, 0, 25, 1)
    assert len(dataset) == 56
    assert [dataset[i] for i in range(56)] == list(range(56))
    assert dataset[-1] == 55
    assert dataset.__getitems__([55, 0, 29, 30, 0]) == [55, 0, 29, 30, 0]
    assert dataset.__getitems__([]) == []
    assert [Path(dataset.path_of(i)).stem for i in (29, 30, 55)] == ["0000", "0002", "0003"]


@pytest.mark.parametrize("index", [56, -57])
def test_a_sample_beyond_the_last_is_an_index_error(
    make: Callable[..., ShardFiles], index: int
) -> None:
    with pytest.raises(IndexError, match="of a data set of 56"):
        make(30, 26)[index]


def test_shards_are_tar_files_and_row_groups(tmp_path: Path) -> None:
    assert TarShards(tars(tmp_path, 3, 0, 5)).shard_sizes.tolist() == [3, 0, 5]
    sizes = ParquetShards(parquets(tmp_path, 25, 0, 5)).shard_sizes.tolist()
    assert [size for size in sizes if size] == [10, 10, 5, 5]  # an empty file may have an empty one


def test_a_tar_sample_is_a_dict_of_its_members(tmp_path: Path) -> None:
    members = [
        ("./", b""),
        ("__meta__/x.json", b"left out"),
        ("a/0.JPG", b"image"),
        ("a/0.seg.png", b""),
        ("a/.hidden", b"left out"),
        ("a/readme", b"left out"),
        ("b.c/0.cls", b"1"),
    ]
    dataset = TarShards([write_tar(tmp_path / "x.tar", members)])
    assert all_of(dataset) == [
        {"__key__": "a/0", "jpg": b"image", "seg.png": b""},
        {"__key__": "b.c/0", "cls": b"1"},
    ]


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_files_of_every_format_are_read(tmp_path: Path, format_: int) -> None:
    long = "d" * 90 + "/" + "n" * 60  # longer than the 100 bytes of a header
    members = [(f"{long}{i}.{end}", b"%d" % i) for i in range(9) for end in ("jpg", "cls")]
    dataset = TarShards([write_tar(tmp_path / "x.tar", members, format_=format_)])
    assert dataset.__getitems__([7, 8, 2])[2] == {"__key__": f"{long}2", "jpg": b"2", "cls": b"2"}


def test_parquet_rows_have_the_columns_asked_for(tmp_path: Path) -> None:
    paths = parquets(tmp_path, 3)
    assert ParquetShards(paths)[2] == {"cls": b"2", "number": 2}
    assert ParquetShards(paths, columns=["number"])[2] == {"number": 2}
    with pytest.raises(DataError, match=r"0000.parquet has no columns \['label'\]; it has"):
        ParquetShards(paths, columns=["label"])


def test_parts_of_parquet_columns_are_known_too(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra [store] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra [store] is not installed")
    table = pa.table({"image": [{"bytes": b"a", "path": "p"}], "imagery": [1]})
    path = tmp_path / "parts.parquet"
    parquet.write_table(table, path)
    assert ParquetShards([path], columns=["image.bytes"])[0] == {"image": {"bytes": b"a"}}
    for wrong in ("image.nope", "imag"):
        with pytest.raises(DataError, match=rf"has no columns \['{wrong}'\]; it has"):
            ParquetShards([path], columns=[wrong])


def test_the_order_of_paths_does_not_matter(tmp_path: Path) -> None:
    paths = tars(tmp_path, 4, 3, 5)
    assert [number_of(each) for each in all_of(TarShards(paths[::-1]))] == list(range(12))


def test_neighbours_come_in_one_read(tmp_path: Path, reads: list[int]) -> None:
    dataset = TarShards(tars(tmp_path, 40, 40))
    reads.clear()
    dataset.__getitems__([*range(10, 20), 5, *range(38, 42)])
    assert len(reads) == 4  # 5, 10 to 19, 38 and 39, 40 and 41


def test_a_long_run_is_cut_into_bounded_reads(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loft_hvd.data.shards._READ_BYTES", 5000)
    dataset = TarShards(tars(tmp_path, 20), decode=number_of)
    assert dataset.__getitems__(range(20)) == list(range(20))
    assert len(reads) == 10  # two samples of 2,048 bytes each
    assert max(reads) <= 5000
    monkeypatch.setattr("loft_hvd.data.shards._READ_BYTES", 1)
    assert dataset.__getitems__(range(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("shuffle", "least", "most"), [(True, 2, 4), (loft.BlockShuffle(1, 6400), 28, 32)]
)
def test_batches_of_a_loader_come_in_blocks(
    tmp_path: Path, reads: list[int], shuffle: Any, least: float, most: float
) -> None:
    """Two ranks of 32 samples: blocks of 16 are three reads a batch, single samples 31."""
    dataset = TarShards(tars(tmp_path, *[200] * 8), decode=number_of)
    loader = loft.DataLoader(dataset, FakePlans([32, 32], rank=1), shuffle=shuffle)
    reads.clear()
    num_batches = sum(1 for _ in loader)
    assert least <= len(reads) / num_batches <= most


def test_a_row_group_is_read_once_for_its_block(tmp_path: Path) -> None:
    dataset = ParquetShards(parquets(tmp_path, 100, 100), decode=number_of)
    reader = pytest.importorskip("loft_hvd.data.arrow").ParquetReader
    found: list[int] = []
    read_group = reader.read_group

    def counted(self: Any, group: int) -> Any:
        found.append(group)
        return read_group(self, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "read_group", counted)
        blocks = loft.BlockShuffle(block=10)
        for _ in loft.DataLoader(dataset, FakePlans([25, 15]), shuffle=blocks):
            pass
    assert len(found) <= 20  # row groups in all


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_compute_every_sample_once(make: Callable[..., ShardFiles], num_workers: int) -> None:
    dataset = make(30, 41, 0, 17)
    dataset[3]  # files are open before loader processes are forked
    computed: list[int] = []
    for rank in range(3):
        plans = FakePlans([9, 5, 2], rank=rank)
        loader = loft.DataLoader(dataset, plans, num_workers=num_workers, seed=4)
        for batch in loader:
            if not loader.is_padding:
                computed += batch.tolist()
    assert sorted(computed) == list(range(88))


def test_a_data_set_travels_to_a_process_that_is_not_forked(
    make: Callable[..., ShardFiles],
) -> None:
    dataset = make(12, 5)
    assert dataset[3] == 3
    again = pickle.loads(pickle.dumps(dataset))
    assert again.__getitems__([16, 3]) == [16, 3]


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loft_hvd.data.shards._MOST_OPEN", 3)
    dataset = TarShards(tars(tmp_path, *[2] * 20), decode=number_of)
    before = len(os.listdir("/proc/self/fd"))
    assert [dataset[i] for i in range(40)] == list(range(40))
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_threads_share_a_data_set(make: Callable[..., ShardFiles]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    dataset = make(30, 30, 30)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(dataset.__getitem__, range(90))) == list(range(90))


def test_a_sample_asked_for_twice_is_decoded_twice(make: Callable[..., ShardFiles]) -> None:
    dataset = make(5, decode=lambda sample: sample.pop("cls"))
    assert dataset.__getitems__([2, 2]) == [b"2", b"2"]


# The index.


def test_a_kept_index_is_used(
    make: Callable[..., ShardFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "indexes" / "deep"
    dataset = make(20, 5, folder=folder)
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(type(dataset), "_scan", None)
    again = type(dataset)(dataset.paths, decode=number_of, folder=folder)
    assert [again[i] for i in range(25)] == list(range(25))


def spoil_length(index: Path, _: Path) -> None:
    index.write_bytes(index.read_bytes()[:-3])


def spoil_byte(index: Path, _: Path) -> None:
    data = bytearray(index.read_bytes())
    data[-5] ^= 1
    index.write_bytes(data)


def spoil_all(index: Path, _: Path) -> None:
    index.write_bytes(b"?")


def change_file(_: Path, shard: Path) -> None:
    os.utime(shard, ns=(1, 1))


@pytest.mark.parametrize("spoil", [spoil_length, spoil_byte, spoil_all, change_file])
def test_an_index_that_is_not_true_is_made_again(
    make: Callable[..., ShardFiles], tmp_path: Path, spoil: Callable[[Path, Path], None]
) -> None:
    folder = tmp_path / "indexes"
    dataset = make(20, folder=folder)
    (index,) = folder.iterdir()
    spoil(index, Path(dataset.paths[0]))
    again = type(dataset)(dataset.paths, decode=number_of, folder=folder)
    assert [again[i] for i in range(20)] == list(range(20))


def test_a_folder_that_takes_nothing_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    dataset = TarShards(tars(tmp_path, 3), folder=tmp_path / "file")
    assert len(dataset) == 3
    assert "is not kept" in caplog.text


# What is refused.


@pytest.mark.parametrize(
    ("paths", "kind", "match"),
    [
        ("x.tar", ArgumentTypeError, "must be a list of files"),
        (Path("x.tar"), ArgumentTypeError, "must be a list of files"),
        ([b"x.tar"], ArgumentTypeError, "not bytes"),
        ([], DataError, "0 paths"),
        (["x.tar", "x.tar"], DataError, "x.tar'\\] of them twice"),
        (["gone.tar"], DataError, "gone.tar cannot be read"),
    ],
)
@pytest.mark.parametrize("kind_of", [TarShards, ParquetShards])
def test_paths_that_are_no_list_of_files_are_refused(
    kind_of: Any, paths: Any, kind: type, match: str
) -> None:
    if kind_of is ParquetShards:
        pytest.importorskip("pyarrow", reason="the extra [store] is not installed")
    with pytest.raises(kind, match=match):
        kind_of(paths)


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([("0.a", b""), ("1.a", b""), ("0.b", b"")], "members of '0' are apart.*--sort=name"),
        ([("0.a", b""), ("0.A", b"")], "'0.A' comes twice"),
    ],
)
def test_samples_that_are_not_packed_together_are_refused(
    tmp_path: Path, members: Members, match: str
) -> None:
    path = write_tar(tmp_path / "bad.tar", members)
    with pytest.raises(DataError, match=rf"bad.tar: .*{match}"):
        TarShards([path])


def test_a_compressed_tar_file_is_refused(tmp_path: Path) -> None:
    (path,) = tars(tmp_path, 3)
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match=r"0000.tar is compressed \(gzip\): unpack it first"):
        TarShards([path])


@pytest.mark.parametrize("length", [0, 1, 511, 512, 700, 1024, 2048, 3000, 20 * 2048])
def test_a_tar_file_that_is_cut_off_is_refused(tmp_path: Path, length: int) -> None:
    whole, cut = tars(tmp_path, 20, 20)
    cut.write_bytes(cut.read_bytes()[:length])
    what = "no tar file" if length < 512 else "damaged or cut off at byte"
    with pytest.raises(DataError, match=rf"0001.tar is {what}.*pack it anew"):
        TarShards([whole, cut])


@pytest.mark.parametrize("member", range(0, 40, 7))
@pytest.mark.parametrize("byte", [0, 130, 150, 156])
def test_a_tar_file_with_a_damaged_header_is_refused(
    tmp_path: Path, member: int, byte: int
) -> None:
    (path,) = tars(tmp_path, 20)
    data = bytearray(path.read_bytes())
    data[1024 * member + byte] ^= 0x15
    path.write_bytes(data)
    what = f"damaged or cut off at byte {1024 * member} " if member else "no tar file"
    with pytest.raises(DataError, match=rf"0000.tar is {what}"):
        TarShards([path])


@pytest.mark.parametrize("end", [2048 * 4 + 512, None], ids=["a header", "the rest"])
def test_a_tar_file_that_became_zeros_is_refused(tmp_path: Path, end: int | None) -> None:
    """``tarfile`` takes zeros for the end, with which samples would be gone without a word."""
    (path,) = tars(tmp_path, 20)
    data = bytearray(path.read_bytes())
    begin = 2048 * 4
    data[begin:end] = bytes(len(data[begin:end]))
    if end is None:
        data += bytes(1 << 20)
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"0000.tar is damaged or cut off at byte {begin} "):
        TarShards([path])


def test_a_tar_file_that_lost_its_last_sample_but_for_some_bytes_is_refused(
    tmp_path: Path,
) -> None:
    (path,) = tars(tmp_path, 20)
    data = path.read_bytes()
    path.write_bytes(data[: 2048 * 19] + data[2048 * 20 - 300 :])  # 300 zeros of its padding stay
    with pytest.raises(DataError, match=rf"damaged or cut off at byte {2048 * 19} .*whole blocks"):
        TarShards([path])


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_to_a_member_is_refused(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "linked.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("0.cls"))
        link = tarfile.TarInfo("1.cls")
        link.type, link.linkname = kind, "0.cls"
        tar.addfile(link)
    with pytest.raises(DataError, match=r"member '1.cls' is a link to '0.cls'"):
        TarShards([path])


# The bytes of a header that say how long its member is: octal, or in base 256 with a first bit.
_CLAIMS = {
    "2**63": b"\x80" + (2**63).to_bytes(11, "big"),
    "2**63 - 513": b"\x80" + (2**63 - 513).to_bytes(11, "big"),
    "2**40": b"\x80" + (2**40).to_bytes(11, "big"),
    "2**88": b"\x80" + b"\xff" * 11,
    "8 GiB": b"77777777777\0",
    "less than nothing": b"\xff" * 11 + b"\x01",
}


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
@pytest.mark.parametrize("claim", _CLAIMS.values(), ids=_CLAIMS)
@pytest.mark.parametrize("member", [0, 7])
def test_a_header_that_claims_any_length_is_refused_and_takes_no_memory(
    tmp_path: Path, kind: bytes, claim: bytes, member: int
) -> None:
    (path,) = tars(tmp_path, 20)
    data = bytearray(path.read_bytes())
    header = data[1024 * member : 1024 * member + 512]
    header[124:136], header[156:157], header[148:156] = claim, kind, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    data[1024 * member : 1024 * member + 512] = header
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(
            DataError, match=r"0000.tar is (no tar file|damaged or cut off)"
        ) as found:
            TarShards([path])
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "pack it anew" in str(found.value)


def test_a_tar_file_that_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = tars(tmp_path, 3)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("loft_hvd.data.shards._HeaderFile", refused)
    with pytest.raises(DataError, match=r"0000.tar cannot be read: .*Permission denied"):
        TarShards([path])


def test_headers_that_announce_one_another_without_end_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 512
    header = info.tobuf(tarfile.GNU_FORMAT) + b"n" * 512
    path = tmp_path / "deep.tar"
    path.write_bytes(header * 2000)
    with pytest.raises(DataError, match=r"deep.tar is no tar file"):
        TarShards([path])


@pytest.mark.parametrize("seed", range(40))
def test_damage_is_an_error_of_ours_or_no_damage_to_headers(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    (path,) = tars(tmp_path, 10)
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 30)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    found = ""
    try:
        keys = [sample["__key__"] for sample in all_of(TarShards([path]))]
    except DataError as error:
        found = str(error)
    # Bytes of members have no checksum; ``decode`` is what sees them.
    assert str(path) in found or keys == [f"{i:06d}" for i in range(10)]


@pytest.mark.parametrize("seed", range(40))
def test_damaged_parquet_files_are_errors_of_ours(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    (path,) = parquets(tmp_path, 50)
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 30)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    with pytest.raises(DataError, match=r"0000\.parquet"):
        all_of(ParquetShards([path]))


def with_footer(path: Path, change: Callable[[bytes], bytes]) -> Path:
    """Change a Parquet file's footer, which says what is where; its length stays true."""
    data = path.read_bytes()
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = change(data[begin:-8])
    path.write_bytes(data[:begin] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return path


@pytest.mark.parametrize("columns", [None, ["number"]])
def test_parquet_names_that_are_no_text_are_refused(
    tmp_path: Path, columns: list[str] | None
) -> None:
    (path,) = parquets(tmp_path, 20)
    with_footer(path, lambda footer: footer.replace(b"cls", b"c\xffs"))
    with pytest.raises(DataError, match=r"0000.parquet has a column whose name .*UTF-8"):
        ParquetShards([path], columns=columns)


def varint(number: int) -> bytes:
    """Return a whole number as Thrift's compact protocol has it in an i64 field that is next."""
    number, found = 2 * number, b""
    while number > 127:
        found += bytes([number & 127 | 128])
        number >>= 7
    return b"\x16" + found + bytes([number])


@pytest.mark.parametrize("rows", [2**27, 2**40, 2**62])
def test_a_row_group_that_claims_more_rows_than_there_can_be_is_refused(
    tmp_path: Path, rows: int
) -> None:
    """Arrow would make room for all of them, and the process would be killed for its memory."""
    path = with_footer(
        write_parquet(tmp_path / "0.parquet", 0, 77, rows=100),
        lambda footer: footer.replace(varint(77), varint(rows)),
    )
    with pytest.raises(DataError, match=rf"row group 0 claims {rows} rows, of 67108864 at most"):
        ParquetShards([path])


def test_row_groups_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    path = with_footer(
        write_parquet(tmp_path / "0.parquet", 0, 77, rows=70),
        lambda footer: footer.replace(varint(70), varint(7000)),
    )
    with pytest.raises(DataError, match=r"row groups have 7007 rows, and it claims 77"):
        ParquetShards([path])


def test_parquet_values_that_python_does_not_hold_are_errors_of_ours(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra [store] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra [store] is not installed")
    path = tmp_path / "late.parquet"
    late = pa.array([2**40], pa.int64()).cast(pa.timestamp("s"))  # in the year 36812
    parquet.write_table(pa.table({"when": late}), path)
    with pytest.raises(DataError, match=r"late.parquet: rows 0 to 0 .* cannot be read"):
        ParquetShards([path])[0]


def test_a_file_that_was_cut_off_since_its_index_is_an_error(
    make: Callable[..., ShardFiles],
) -> None:
    dataset = make(40)
    path = Path(dataset.paths[0])
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=str(path)):
        dataset.__getitems__(range(40))


def test_a_file_that_was_packed_anew_since_its_index_is_an_error(tmp_path: Path) -> None:
    (path,) = tars(tmp_path, 10)
    dataset = TarShards([path])
    write_tar(path, [(f"{i}.cls", b"?" * 3000) for i in range(10)])
    with pytest.raises(DataError, match=r"0000.tar: samples .* has it changed"):
        all_of(dataset)


def test_row_groups_of_other_lengths_than_indexed_are_an_error(tmp_path: Path) -> None:
    (path,) = parquets(tmp_path, 20)
    dataset = ParquetShards([path])
    write_parquet(path, 0, 20, rows=4)
    with pytest.raises(DataError, match=r"row group 0 has 4 rows, of which 0 to 9"):
        dataset.__getitems__(range(10))


def test_a_file_that_is_gone_is_an_error_that_names_it(make: Callable[..., ShardFiles]) -> None:
    dataset = make(4)
    os.remove(dataset.paths[0])
    with pytest.raises(DataError, match=r"0000\."):
        dataset[0]


def test_an_error_of_decode_names_file_and_sample(tmp_path: Path) -> None:
    dataset = TarShards(tars(tmp_path, 3, 3), decode=lambda sample: int(sample["cls"] + b"x"))
    with pytest.raises(
        DataError, match=r"0001.tar: decode failed for sample 4 \('000004'\): Value"
    ):
        dataset[4]


class Pipeline(IterableDataset[int]):
    """What a webdataset pipeline is to torch."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize("wrap", [loft.DataLoader, loft.BatchSampler])
def test_a_stream_is_shown_the_way_to_shards_and_streams(wrap: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"loft.TarShards.*ParquetShards.*StreamLoader"):
        wrap(Pipeline(), FakePlans([2, 2]))


# A store around shards.


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_store_keeps_what_shards_have_read(
    make: Callable[..., ShardFiles], num_workers: int
) -> None:
    pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")
    dataset = make(60, 40, decode=None)
    store = loft.SampleStore(dataset, memory_bytes=1 << 20, transform=number_of)
    assert store.shard_sizes is dataset.shard_sizes
    loader = loft.DataLoader(store, FakePlans([16]), num_workers=num_workers, seed=1)
    orders = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = [batch.tolist() for batch in loader]
        orders.append(batches)
        assert sorted(number for batch in batches for number in batch) == list(range(100))
        for path in dataset.paths if epoch == 0 else ():
            os.truncate(path, 0)  # the second epoch needs none of them
    assert orders[0] != orders[1]
    # The first epoch came in blocks: neighbours stand together in a batch.
    steps = np.concatenate([np.diff(batch) for batch in orders[0]])
    assert (steps == 1).mean() > 0.6
    assert store.counters["own"] == 100
    store.close()


def test_stores_of_ranks_replay_who_keeps_what(make: Callable[..., ShardFiles]) -> None:
    pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")
    dataset = make(200, 150, 0, 250, decode=None)
    done = threading.Barrier(3)

    def rank(transport: LocalTransport) -> tuple[list[list[int]], dict[str, int]]:
        store = loft.SampleStore(
            dataset, memory_bytes=1 << 20, transform=number_of, transport=transport
        )
        plans = FakePlans((30, 20, 10), rank=transport.rank)
        loader = loft.DataLoader(store, plans, seed=3)
        seen: list[list[int]] = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            seen.append([])
            for batch in loader:
                plans.next_step += 1
                seen[-1] += batch.tolist()
        done.wait(60)  # the others may still ask
        store.close()
        return seen, dict(store.counters)

    by_rank = run_ranks(3, rank)
    for epoch in range(3):
        numbers = [number for seen, _ in by_rank for number in seen[epoch]]
        assert sorted(numbers) == list(range(600))
    assert sum(counters["source"] for _, counters in by_rank) == 600  # in the first epoch alone


def test_a_store_shows_a_stream_the_way() -> None:
    pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")
    with pytest.raises(ArgumentTypeError, match=r"loft.TarShards.*ParquetShards.*StreamLoader"):
        loft.SampleStore(Pipeline(), memory_bytes=1 << 20)


def test_torchs_own_loader_reads_shards(make: Callable[..., ShardFiles]) -> None:
    dataset = make(10, 13)
    sampler = loft.BatchSampler(dataset, FakePlans([6]))
    loader: Any = TorchDataLoader(dataset, batch_sampler=sampler)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(23))
