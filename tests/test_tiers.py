"""Promise: what needs no TensorFlow is tested without it, in a minute."""

import pytest

from tests.long_tests import LEFT
from tests.tiers import CHECK, LIMITS, TESTS, imported_frameworks, is_in_check


def test_plans_files_and_docs_are_tested_without_tensorflow(pytestconfig):
    if pytestconfig.getoption("tier") != "check":
        pytest.skip("TensorFlow is there for the other tests: make check")
    assert not imported_frameworks()
    with pytest.raises(ImportError, match="make check"):
        import tensorflow  # noqa: F401


def test_the_files_of_make_check_exist():
    assert [place for place in CHECK if not (TESTS / place).exists()] == []
    assert is_in_check(TESTS / "test_words.py") and not is_in_check(TESTS / "test_compat.py")


def test_each_tier_has_a_limit():
    assert LIMITS["check"] < LIMITS["test"] < LIMITS["all"]


@pytest.mark.parametrize("left", LEFT, ids=lambda left: left.test)
def test_what_left_the_quick_suite_is_there(left):
    file, *_, name = left.test.split("::")
    assert f"def {name}(" in (TESTS / file).read_text("utf-8")
    assert left.stays or left.held_by
