"""Each engine of `accelerate_configs`, in two real processes over gloo: what one process finds on the same batch."""

import pytest
from launch_ranks import EACH_ENGINE, ENGINES, assert_like_one
from rank_runs import TRAINED


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("engine", [engine for engine in EACH_ENGINE if "single" not in engine.values])
def test_two_processes_train_like_one(ranks_under, engine, name):
    found = ranks_under(engine)[name]
    assert found[0]["engine"].startswith(ENGINES[engine])
    assert_like_one(name, found, ranks_under("single")[name])
