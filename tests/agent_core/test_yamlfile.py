from pathlib import Path

import msgspec
import pytest

from gputally.base.yaml_file import FileFault, convert, parse, read

QUEUES = """\
# a comment
queues:
  - name: vision
    weight: 2
  - name: nlp
    weight: -1
since: 2026-10-01
"""


class Queue(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    weight: int = 1


class Queues(msgspec.Struct, forbid_unknown_fields=True):
    queues: list[Queue]
    since: str = ""


def faults(text: str) -> tuple[str, ...]:
    with pytest.raises(FileFault) as caught:
        convert(parse(text, "p.yaml"), Queues)
    return caught.value.faults


def test_every_key_and_item_knows_its_line() -> None:
    document = parse(QUEUES, "p.yaml")
    assert document.place(("queues", 1, "weight")) == "p.yaml:6"
    assert document.place(("queues", 1, "no such key")) == "p.yaml:5"
    assert document.place(("nothing",)) == "p.yaml:2"


def test_dates_stay_text() -> None:
    assert convert(parse(QUEUES, "p.yaml"), Queues).since == "2026-10-01"


def test_a_duplicate_key_is_a_fault_and_names_the_first() -> None:
    with pytest.raises(FileFault, match=r"^p.yaml:3: key 'a' occurs twice, first on line 1$"):
        parse("a: 1\nb: 2\na: 3\n", "p.yaml")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [1, 2\n", 2),
        ("a: b: c\n", 1),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: !!python/object:os.system x\n", 1),
        ("a:\n- !!timestamp never\n", 2),
    ],
)
def test_what_is_not_one_plain_yaml_document_is_refused_with_its_line(text: str, line: int) -> None:
    with pytest.raises(FileFault, match=rf"^p\.yaml:{line}: "):
        parse(text, "p.yaml")


def test_an_empty_document_is_none() -> None:
    assert parse("", "p.yaml").data is None


def test_a_wrong_shape_is_answered_with_the_place_of_the_fault() -> None:
    assert faults("queues:\n  - name: a\n    weight: x\n") == ("p.yaml:3: queues.0.weight: Expected `int`, got `str`",)
    assert faults("queues:\n  - name: a\n    wieght: 2\n") == ("p.yaml:3: queues.0.wieght: unknown key",)
    assert faults("queues:\n  - weight: 2\n") == ("p.yaml:2: queues.0: Object missing required field `name`",)
    assert faults("- 1\n") == ("p.yaml:1: Expected `object`, got `array`",)


def test_files_that_cannot_be_read_are_faults_too(tmp_path: Path) -> None:
    with pytest.raises(FileFault, match=r"absent.yaml: No such file"):
        read(tmp_path / "absent.yaml")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(FileFault, match=r"latin.yaml:1: not UTF-8"):
        read(latin)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (4 * 1024 * 1024 + 1))
    with pytest.raises(FileFault, match=r"large.yaml:1: the file is larger than 4 MiB"):
        read(large)


def test_a_small_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "queues.yaml"
    path.write_text(QUEUES, encoding="utf-8")
    assert [queue.weight for queue in convert(read(path), Queues).queues] == [2, -1]


def test_a_text_longer_than_its_caller_allows_is_not_parsed() -> None:
    with pytest.raises(FileFault, match=r"c\.yaml:1: longer than 10 characters"):
        parse("a: [" * 10, "c.yaml", 10)
