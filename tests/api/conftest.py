"""The API in a folder and with a store of its own, and benches that are over at once."""

import pytest

from tests.command_line import command_line


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Benches are short, and stored work is this module's own."""
    folder = tmp_path_factory.mktemp("work")
    with command_line(folder, tmp_path_factory.mktemp("store"), short_bench=True):
        yield folder
