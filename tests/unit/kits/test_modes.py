"""Directories in which others can replace what is not theirs."""

import pytest

from kubelend.kits import files


@pytest.mark.parametrize(
    "mode, exposed",
    [
        pytest.param(0o700, False, id="own"),
        pytest.param(0o755, False, id="readable"),
        pytest.param(0o2775, False, id="a volume's group"),
        pytest.param(0o1777, False, id="sticky"),
        pytest.param(0o777, True, id="everybody's"),
        pytest.param(0o703, True, id="others'"),
    ],
)
def test_directory_that_others_can_write_is_reported(tmp_path, mode, exposed):
    tmp_path.chmod(mode)
    complaint = files.directory_mode_problem(tmp_path)
    assert bool(complaint) == exposed
    if exposed:
        assert complaint == (
            f"{tmp_path} has mode {mode:04o}, so other users can replace files in it;"
            f" chmod o-w {tmp_path}"
        )


def test_directory_that_is_not_there_is_no_complaint(tmp_path):
    assert files.directory_mode_problem(tmp_path / "none") == ""
