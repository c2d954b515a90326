"""`make check` tests everything that needs no TensorFlow, in a minute."""

import re

import pytest

from tests import tiers
from tests.long_tests import LONG_TESTS, OTHER_CASES
from tests.tiers import CHECK, LIMITS, TESTS, imported_frameworks, is_in_check


def test_check_tier_does_not_import_tensorflow(pytestconfig):
    if pytestconfig.getoption("tier") != "check":
        pytest.skip("Only `make check` runs without TensorFlow.")
    assert not imported_frameworks()
    with pytest.raises(ImportError, match="make check"):
        import tensorflow  # noqa: F401


def test_files_of_make_check_exist():
    assert [path for path in CHECK if not (TESTS / path).exists()] == []
    assert is_in_check(TESTS / "test_prose.py") and not is_in_check(TESTS / "test_compat.py")


def test_each_tier_has_a_limit():
    assert LIMITS["check"] < LIMITS["test"] < LIMITS["long"]


@pytest.mark.parametrize("row", LONG_TESTS, ids=lambda row: row.test)
def test_rows_of_long_tests_name_existing_tests(row):
    file, *_, name = row.test.split("::")
    assert f"def {name}(" in (TESTS / file).read_text("utf-8")
    assert row.quick_cases or row.quick_test != OTHER_CASES


@pytest.mark.parametrize("row", LONG_TESTS, ids=lambda row: row.test)
def test_quick_test_of_a_long_test_exists(row):
    """A row may name a file, or a test of a file. The test is not long itself."""
    for file, name in re.findall(r"([\w/]+[.]py)(?:::(?:\w+::)?(test_\w+))?", row.quick_test):
        text = (TESTS / file).read_text("utf-8")
        assert not name or f"def {name}(" in text
        long_rows = [
            row
            for row in LONG_TESTS
            if row.test.startswith(file) and row.test.endswith(f"::{name}")
        ]
        assert all(row.quick_cases for row in long_rows)


def test_each_long_test_has_one_row():
    names = [row.test for row in LONG_TESTS]
    assert sorted(set(names)) == sorted(names)


def test_each_test_belongs_to_one_part():
    tests = [(f"tests/test_{n}.py::test", [f"tied/dp{n}@1x{n}"] * (n % 2)) for n in range(99)]
    membership = [[tiers.is_in_part(*test, index, 3) for test in tests] for index in (1, 2, 3)]
    assert all(sum(row) == 1 for row in zip(*membership)) and all(map(any, membership))
    runs = [tiers.is_in_part(f"tests/{n}.py::test", ["tied/dp2@2x1"], 1, 3) for n in range(9)]
    assert len(set(runs)) == 1  # tests that share a run share a part
    assert tiers.parse_part("2/3") == (2, 3)
    with pytest.raises(ValueError, match="expected 1 to 3"):
        tiers.parse_part("4/3")
