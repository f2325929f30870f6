"""No module of the tree has a name that says nothing to a newcomer."""

from pathlib import Path

from scripts import name_check


def test_the_tree_has_plain_names() -> None:
    found = name_check.modules(name_check.ROOT)
    assert len(found) > 500
    assert name_check.refused(found) == []


def test_classes_and_functions_have_plain_names() -> None:
    assert name_check.main() == 0
    source = "class _Told: ...\nclass Ledger:\n    def held(self): ...\ndef whose(): ...\ndef usage(): ...\n"
    assert name_check.riddles(source) == ["_Told", "whose"]


def test_a_folder_a_module_and_a_test_are_refused() -> None:
    bad = [Path("agent/ladder.py"), Path("tests/house/test_output.py"), Path("tests/ledger/test_torn.py")]
    assert name_check.refused([*bad, Path("agent/wire.py"), Path("tests/ledger/test_days.py")]) == bad


def test_an_actor_without_a_name_and_a_twisted_clause_are_refused_with_their_line() -> None:
    text = "The agent writes.\nNobody reads, and whoever asks waits.\nA body anew.\nA name stands here twice.\n"
    assert list(name_check.vague(text)) == [(2, "Nobody"), (2, "whoever"), (3, "anew"), (4, "stands here twice")]
    read = set(name_check.texts(name_check.ROOT))
    assert {Path("README.md"), Path("docs/install.md"), Path("accountant/composition.py")} <= read
    assert not any(path.parts[0] == "tests" for path in read)
