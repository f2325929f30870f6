"""No module of the tree has a name that says nothing to a newcomer."""

from pathlib import Path

from scripts import plain_names


def test_the_tree_has_plain_names() -> None:
    found = plain_names.modules(plain_names.ROOT)
    assert len(found) > 500
    assert plain_names.refused(found) == []


def test_classes_and_functions_have_plain_names() -> None:
    assert plain_names.main() == 0
    source = "class _Told: ...\nclass Ledger:\n    def held(self): ...\ndef whose(): ...\ndef usage(): ...\n"
    assert plain_names.riddles(source) == ["_Told", "whose"]


def test_a_folder_a_module_and_a_test_are_refused() -> None:
    bad = [Path("agent/ladder.py"), Path("tests/house/test_output.py"), Path("tests/ledger/test_torn.py")]
    assert plain_names.refused([*bad, Path("agent/wire.py"), Path("tests/ledger/test_days.py")]) == bad


def test_an_actor_without_a_name_is_refused_with_its_line() -> None:
    text = "The agent writes.\nNobody reads, and whoever asks waits.\nThe body is read.\n"
    assert list(plain_names.vague(text)) == [(2, "Nobody"), (2, "whoever")]
    read = set(plain_names.texts(plain_names.ROOT))
    assert {Path("README.md"), Path("docs/install.md"), Path("accountant/composition.py")} <= read
    assert not any(path.parts[0] == "tests" for path in read)
