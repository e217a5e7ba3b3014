"""The models behind the page, loaded or trained once."""

from pathlib import Path

import pytest
import torch

from bsi.app.workbench import Workbench, open_workbench


@pytest.fixture(scope="session")
def bench() -> Workbench:
    return open_workbench(Path("digits"), "digits", torch.device("cpu"))


@pytest.fixture(scope="session")
def labeled(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    from test_app import labeled_bench

    return labeled_bench(tmp_path_factory.mktemp("labeled"))
