"""An archive that nobody vouches for: unpacked whole, or refused before anything is written."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from anymamba.errors import UnsafeArchiveError
from anymamba.upstream.archive import Limits, unpack
from small_upstream import members, write_sdist


def _tar(path: Path, *entries: tarfile.TarInfo | tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                tar.addfile(info, io.BytesIO(entry[1]))
    return path


def _special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def _refused(archive: Path, tmp_path: Path, match: str, limits: Limits = Limits()) -> None:  # noqa: B008
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(UnsafeArchiveError, match=match) as caught:
        unpack(archive, into, limits)
    assert caught.value.next_step
    assert list(into.iterdir()) == []
    assert not (tmp_path / "evil").exists()


def test_a_source_archive_is_unpacked_whole(tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    top = unpack(write_sdist(tmp_path, "mamba_ssm"), tmp_path / "into")
    files = {path.relative_to(top.parent).as_posix(): path.read_bytes() for path in top.rglob("*") if path.is_file()}
    assert files == members("mamba_ssm")


def test_a_zip_is_unpacked_too(tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    with zipfile.ZipFile(tmp_path / "p-1.zip", "w") as zipped:
        zipped.writestr("p-1/a.py", "x = 1\n")
    assert (unpack(tmp_path / "p-1.zip", tmp_path / "into") / "a.py").read_text(encoding="utf-8") == "x = 1\n"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../evil", "leaves its folder"),
        ("p-1/../../evil", "leaves its folder"),
        ("p-1//a", "leaves its folder"),
        ("/evil", "absolute"),
        ("C:/evil", "characters"),
        ("p-1/C:evil", "characters"),
        ("\\\\server\\share\\evil", "characters"),
        ("p-1\\..\\..\\evil", "characters"),
        ("p-1/a:stream", "characters"),
        ("p-1/new\nline", "characters"),
        ("p-1/NUL", "device's name"),
        ("p-1/aux.py", "device's name"),
        ("p-1/COM1.tar", "device's name"),
        ("p-1/lpt²", "device's name"),
        ("p-1/trailing.", "ends in a dot"),
        ("p-1/trailing ", "ends in a dot or a space"),
        ("p-1/" + "/".join("d" * 30) + "/a", "too deep"),
        ("p-1/" + "n" * 250, "too long"),
        ("loose", "outside the archive's own folder"),
    ],
)
def test_names_that_some_system_cannot_hold_or_that_leave_the_folder_are_refused(
    tmp_path: Path, name: str, why: str
) -> None:
    _refused(_tar(tmp_path / "p-1.tar.gz", ("p-1/good.py", b""), (name, b"x")), tmp_path, why)


def test_the_same_names_are_refused_in_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "p-1.zip", "w") as zipped:
        zipped.writestr("p-1/../../evil", "x")
    _refused(tmp_path / "p-1.zip", tmp_path, "leaves its folder")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"),
        (tarfile.FIFOTYPE, "device"),
        (tarfile.CONTTYPE, "device"),
    ],
)
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes, why: str) -> None:
    _refused(_tar(tmp_path / "p-1.tar.gz", _special("p-1/x", kind, "../../evil")), tmp_path, why)


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("p-1/x")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "p-1.zip", "w") as zipped:
        zipped.writestr(info, "../../evil")
    _refused(tmp_path / "p-1.zip", tmp_path, "link")


def test_names_that_one_file_on_windows_would_hold_are_refused(tmp_path: Path) -> None:
    _refused(_tar(tmp_path / "p-1.tar.gz", ("p-1/a.py", b"1"), ("p-1/A.py", b"2")), tmp_path, "collides")


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    _refused(_tar(tmp_path / "p-1.tar.gz", ("p-1/a", b"1"), ("p-1/a/b", b"2")), tmp_path, "folder has the same name")


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "p-1.tar.gz", "w:gz", format=tarfile.GNU_FORMAT, encoding="gbk") as tar:
        tar.addfile(tarfile.TarInfo("p-1/模型.py"))
    _refused(tmp_path / "p-1.tar.gz", tmp_path, "characters")


def test_a_bomb_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    archive = _tar(tmp_path / "p-1.tar.gz", ("p-1/zeros", bytes(1 << 20)))
    assert archive.stat().st_size < 1 << 16
    _refused(archive, tmp_path, "unpacks to more", Limits(total_bytes=1 << 16))


def test_a_bomb_in_a_header_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("p-1/x")
    header.pax_headers = {"comment": "z" * (1 << 20)}
    _refused(_tar(tmp_path / "p-1.tar.gz", header), tmp_path, "unpacks to more", Limits(total_bytes=1 << 10, members=8))


def test_too_many_members_are_refused(tmp_path: Path) -> None:
    archive = _tar(tmp_path / "p-1.tar.gz", *((f"p-1/{n}", b"") for n in range(20)))
    _refused(archive, tmp_path, "more than 10 members", Limits(members=10))


def test_a_hundred_thousand_members_are_refused_while_counting(tmp_path: Path) -> None:
    header = tarfile.TarInfo("p-1/")
    header.type = tarfile.DIRTYPE
    thousand = gzip.compress(header.tobuf(tarfile.GNU_FORMAT) * 1000)
    (tmp_path / "p-1.tar.gz").write_bytes(thousand * 100 + gzip.compress(bytes(1024)))
    _refused(tmp_path / "p-1.tar.gz", tmp_path, "more than 5000 members")


def test_two_top_folders_are_refused(tmp_path: Path) -> None:
    _refused(_tar(tmp_path / "p-1.tar.gz", ("p-1/a", b""), ("q-1/a", b"")), tmp_path, "2 top folders")


@pytest.mark.parametrize("content", [b"", b"not an archive", gzip.compress(b"no tar inside" * 100)])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p-1.tar.gz").write_bytes(content)
    _refused(tmp_path / "p-1.tar.gz", tmp_path, "not a readable|damaged|0 top folders")


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    whole = write_sdist(tmp_path, "mamba_ssm").read_bytes()
    (tmp_path / "p-1.tar.gz").write_bytes(whole[: len(whole) // 2])
    _refused(tmp_path / "p-1.tar.gz", tmp_path, "not a readable|damaged")
